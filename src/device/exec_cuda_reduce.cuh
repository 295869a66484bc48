// SPDX-License-Identifier: Apache-2.0
// CudaExec: adding rows, in fp32, in the order of their sources. Multiplication and addition round apart, as on the host.
#pragma once

#include "device/exec_cuda_stream.cuh"

namespace moe {

template <class Number>
struct Vector {
  static constexpr int kCount = 16 / static_cast<int>(sizeof(Number));
  Number values[kCount];
};

// Loads that pass by the first-level cache: these rows are read once.
template <class Number>
__device__ __forceinline__ Vector<Number> loadVector(const std::byte* from) {
  int4 raw;
  asm volatile("ld.global.L1::no_allocate.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "l"(from)
               : "memory");
  return *reinterpret_cast<Vector<Number>*>(&raw);
}

// Adds Width vectors, 32 * 16 bytes apart, of every source.
template <class Number, int Width>
__device__ __forceinline__ void addVectors(ReduceItem& item, bool weighted, int64_t at) {
  constexpr int kCount = Vector<Number>::kCount;
  float sum[Width][kCount];
  bool first = true;
  for (int w = 0; w < Width; ++w) {
    for (int e = 0; e < kCount; ++e) sum[w][e] = 0;
  }
  for (int64_t s = 0; s < item.count; ++s) {
    ReduceSource source = item.sources()[s];
    if (!source.row) continue;
    Vector<Number> loaded[Width];
#pragma unroll
    for (int w = 0; w < Width; ++w) loaded[w] = loadVector<Number>(source.row + (at + 32 * w) * 16);
    float weight = weighted ? source.weight : 1.0f;
#pragma unroll
    for (int w = 0; w < Width; ++w) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        float product = __fmul_rn(weight, Number::load(loaded[w].values[e]));
        sum[w][e] = first ? product : __fadd_rn(sum[w][e], product);
      }
    }
    first = false;
  }
#pragma unroll
  for (int w = 0; w < Width; ++w) {
    Vector<Number> result;
#pragma unroll
    for (int e = 0; e < kCount; ++e) result.values[e] = Number::store(sum[w][e]);
    *reinterpret_cast<int4*>(item.result + (at + 32 * w) * 16) = *reinterpret_cast<int4*>(&result);
  }
}

template <class Number>
__device__ void addElements(ReduceItem& item, bool weighted, int64_t elements, int lane) {
  for (int64_t e = lane; e < elements; e += 32) {
    float sum = 0;
    bool first = true;
    for (int64_t s = 0; s < item.count; ++s) {
      ReduceSource source = item.sources()[s];
      if (!source.row) continue;
      Number value = reinterpret_cast<const Number*>(source.row)[e];
      float product = __fmul_rn(weighted ? source.weight : 1.0f, Number::load(value));
      sum = first ? product : __fadd_rn(sum, product);
      first = false;
    }
    reinterpret_cast<Number*>(item.result)[e] = Number::store(sum);
  }
}

template <class Number>
__device__ void addRow(ReduceItem& item, bool weighted, int64_t elements, int lane) {
  int64_t bytes = elements * static_cast<int64_t>(sizeof(Number));
  bool wide = aligned(item.result, item.result, bytes, 16);
  for (int64_t s = 0; s < item.count; ++s) wide = wide && aligned(item.sources()[s].row, nullptr, 0, 16);
  if (!wide) return addElements<Number>(item, weighted, elements, lane);
  int64_t vectors = bytes / 16;
  int64_t at = lane;
  for (; at + 96 < vectors; at += 128) addVectors<Number, 4>(item, weighted, at);
  for (; at < vectors; at += 32) addVectors<Number, 1>(item, weighted, at);
}

template <class Job>
__device__ bool CudaExec::reduceRows(int64_t count, Job& job) {
  for (int64_t i = 0; i < count; i += kRunRows) {
    if (!job.beginRun(*this, i, items(i))) return false;
    __syncwarp();
    for (int64_t j = 0; j < kRunRows; ++j) {
      auto& row = *items(i).template as<ReduceItem>(j);
      if (!row.result) continue;
      if (job.type() == moeFloat32) {
        addRow<Float32>(row, job.weighted(), job.elements(), lane());
      } else if (job.type() == moeFloat16) {
        addRow<Float16>(row, job.weighted(), job.elements(), lane());
      } else {
        addRow<Bfloat16>(row, job.weighted(), job.elements(), lane());
      }
    }
    __syncwarp();
    job.finishedRun(*this, i);
  }
  return true;
}

}  // namespace moe

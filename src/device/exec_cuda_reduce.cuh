// SPDX-License-Identifier: Apache-2.0
// CudaExec: adding rows, in fp32, in the order of their sources. Multiplication and addition round apart, as on the
// host.
#pragma once

#include "device/exec_cuda_stream.cuh"

namespace moe {

template <class Number>
struct alignas(16) Vector {
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
__device__ bool CudaExec::reduceDirect(int64_t count, Job& job) {
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

#if __CUDA_ARCH__ >= 900
// A part of a row for which all sources' bytes fit into one stage, one source after the other.
struct ReducePart {
  int64_t row;
  int64_t offset = 0;

  __device__ int64_t bytes(const ReduceItem& item, int64_t rowBytes, int64_t stageBytes) const {
    int64_t most = item.count > 1 ? stageBytes / item.count / 512 * 512 : stageBytes;
    return smaller(rowBytes - offset, most);
  }
};

// Moves the sources that are there to the front of the lists of a run's items.
__device__ inline void compactSources(RunItems items, int lane) {
  if (lane < kRunRows) {
    auto* item = items.as<ReduceItem>(lane);
    int64_t kept = 0;
    for (int64_t s = 0; item->result && s < item->count; ++s) {
      if (item->sources()[s].row) item->sources()[kept++] = item->sources()[s];
    }
    item->count = kept;
  }
  __syncwarp();
}

// Adds what a stage holds of a row: `count` sources, one after the other. A lane keeps up to Width vectors, so that the
// latency of shared memory is paid once for all.
template <class Number, bool kWeighted>
__device__ void addStaged(ReduceItem& item, const std::byte* stage, std::byte* result, int64_t bytes, int lane) {
  constexpr int kCount = Vector<Number>::kCount;
  constexpr int kWidth = 4;
  auto count = static_cast<int>(item.count);
  for (int64_t first = lane * 16; first < bytes; first += kWidth * 512) {
    float sum[kWidth][kCount];
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) sum[w][e] = 0;
    }
    for (int s = 0; s < count; ++s) {
      float weight = kWeighted ? item.sources()[s].weight : 1.0f;
      const std::byte* source = stage + s * bytes + first;
#pragma unroll
      for (int w = 0; w < kWidth; ++w) {
        if (first + w * 512 >= bytes) continue;
        auto loaded = *reinterpret_cast<const Vector<Number>*>(source + w * 512);
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
          float value = Number::load(loaded.values[e]);
          if (kWeighted) value = __fmul_rn(weight, value);
          sum[w][e] = s == 0 ? value : __fadd_rn(sum[w][e], value);
        }
      }
    }
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      if (first + w * 512 >= bytes) continue;
      Vector<Number> rounded;
#pragma unroll
      for (int e = 0; e < kCount; ++e) rounded.values[e] = Number::store(sum[w][e]);
      *reinterpret_cast<Vector<Number>*>(result + first + w * 512) = rounded;
    }
  }
}

template <class Number>
__device__ void addStaged(ReduceItem& item, const std::byte* stage, std::byte* result, int64_t bytes, bool weighted,
                          int lane) {
  if (weighted) return addStaged<Number, true>(item, stage, result, bytes, lane);
  addStaged<Number, false>(item, stage, result, bytes, lane);
}

// As streamStaged, with parts of rows in place of rows. Sums go straight from registers to their destination.
template <class Job>
__device__ bool CudaExec::reduceStaged(int64_t count, Job& job) {
  ReducePart next{0}, ahead{0};
  int loading = 0, adding = 0, inFlight = 0;
  ptx::fenceProxyShared();
  __syncwarp();
  while (next.row < count) {
    while (ahead.row < count && inFlight < grid_.stages - 1 && ahead.row - next.row < kRunRows) {
      if (ahead.offset == 0 && ahead.row % kRunRows == 0) {
        __syncwarp();
        if (!job.beginRun(*this, ahead.row, items(ahead.row))) {
          for (; inFlight > 0; --inFlight) {
            awaitStage(adding);
            adding = adding + 1 == grid_.stages ? 0 : adding + 1;
          }
          return false;
        }
        __syncwarp();
        compactSources(items(ahead.row), lane());
      }
      auto& item = *items(ahead.row).template as<ReduceItem>(ahead.row % kRunRows);
      if (!item.result) {
        ++ahead.row;
        continue;
      }
      int64_t bytes = ahead.bytes(item, job.rowBytes(), grid_.stageBytes);
      if (lane() == 0) loadPart(item, loading, ahead.offset, bytes);
      loading = loading + 1 == grid_.stages ? 0 : loading + 1;
      ++inFlight;
      ahead.offset += bytes;
      if (ahead.offset == job.rowBytes()) ahead = {ahead.row + 1};
    }
    auto& item = *items(next.row).template as<ReduceItem>(next.row % kRunRows);
    if (item.result) {
      int64_t bytes = next.bytes(item, job.rowBytes(), grid_.stageBytes);
      awaitStage(adding);
      addPart(item, adding, next, bytes, job);
      // Lanes have read the stage; the copy engine may write it.
      ptx::fenceProxyShared();
      __syncwarp();
      adding = adding + 1 == grid_.stages ? 0 : adding + 1;
      --inFlight;
      next.offset += bytes;
      if (next.offset < job.rowBytes()) continue;
    }
    next = {next.row + 1};
    if (next.row % kRunRows == 0) {
      if (lane() == 0) {
        ptx::bulkWait<0>();
        ptx::fenceProxy();
      }
      __syncwarp();
      job.finishedRun(*this, next.row - kRunRows);
    }
  }
  return true;
}

__device__ inline void CudaExec::loadPart(ReduceItem& item, int stage, int64_t offset, int64_t bytes) {
  ptx::bulkWaitRead<1>();
  for (int64_t s = 0; s < item.count; ++s) {
    ptx::barrierExpect(barriers_ + stage, static_cast<uint32_t>(bytes));
    ptx::bulkLoad(stages_ + stage * grid_.stageBytes + s * bytes, item.sources()[s].row + offset,
                  static_cast<uint32_t>(bytes), barriers_ + stage);
  }
  ptx::barrierArrive(barriers_ + stage);
}

template <class Job>
__device__ void CudaExec::addPart(ReduceItem& item, int stage, ReducePart part, int64_t bytes, const Job& job) {
  const std::byte* from = stages_ + stage * grid_.stageBytes;
  std::byte* to = item.result + part.offset;
  if (item.count == 1 && !job.weighted()) {
    // Nothing to add: the copy engine can carry on.
    if (lane() == 0) ptx::bulkStore(to, from, static_cast<uint32_t>(bytes));
  } else if (job.type() == moeFloat32) {
    addStaged<Float32>(item, from, to, bytes, job.weighted(), lane());
  } else if (job.type() == moeFloat16) {
    addStaged<Float16>(item, from, to, bytes, job.weighted(), lane());
  } else {
    addStaged<Bfloat16>(item, from, to, bytes, job.weighted(), lane());
  }
  // A group a part, so that its stage is known to be read before it is loaded again.
  if (lane() == 0) ptx::bulkCommit();
}
#endif

template <class Job>
__device__ bool CudaExec::reduceRows(int64_t count, Job& job) {
  if constexpr (ptx::kHasBulk) {
    // A stage must hold at least 512 bytes of every source.
    if (grid_.stages > 0 && job.wide() && grid_.stageBytes >= 512 * job.mostSources()) return reduceStaged(count, job);
  }
  return reduceDirect(count, job);
}

}  // namespace moe

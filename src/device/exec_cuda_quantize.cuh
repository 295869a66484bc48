// SPDX-License-Identifier: Apache-2.0
// CudaExec: quantizing. Lanes take vectors of 16 elements side by side, so that eight of them have a group.
#pragma once

#include "device/exec_cuda.cuh"

namespace moe {

// A vector of bf16.
struct WideVector {
  uint32_t words[8];
};

// Whether a row can be read vector by vector; if not, element by element.
__device__ __forceinline__ bool readsWide(const std::byte* row, int64_t elements) {
  return reinterpret_cast<uintptr_t>(row) % 16 == 0 && elements % 16 == 0;
}

// Element by element, for rows that do not align: a real function, so that others do not prepare for it. Moves the
// elements through the vector one by one, so that few registers are in use.
__device__ __noinline__ inline WideVector loadWideElements(const std::byte* row, int64_t first, int64_t elements) {
  WideVector vector{};
#pragma unroll 1
  for (int64_t e = first; e < first + 16; ++e) {
    uint32_t element = e < elements ? reinterpret_cast<const uint16_t*>(row)[e] : 0u;
#pragma unroll
    for (int w = 0; w < 7; ++w) vector.words[w] = vector.words[w] >> 16 | vector.words[w + 1] << 16;
    vector.words[7] = vector.words[7] >> 16 | element << 16;
  }
  return vector;
}

// Elements first .. first + 15 of a row of `elements`, which has all or none of them.
__device__ __forceinline__ WideVector loadWideVector(const std::byte* row, int64_t first, int64_t elements) {
  WideVector vector{};
  if (first >= elements) return vector;
  int4 words[2] = {ptx::loadOnce(row + 2 * first), ptx::loadOnce(row + 2 * first + 16)};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    vector.words[4 * half] = static_cast<uint32_t>(words[half].x);
    vector.words[4 * half + 1] = static_cast<uint32_t>(words[half].y);
    vector.words[4 * half + 2] = static_cast<uint32_t>(words[half].z);
    vector.words[4 * half + 3] = static_cast<uint32_t>(words[half].w);
  }
  return vector;
}

// kCount vectors, whose first elements are kStep apart; zeros past the row's end.
template <int kCount, int kStep>
__device__ __forceinline__ void loadWide(const std::byte* row, int64_t first, int64_t elements, WideVector* vectors) {
  bool wide = readsWide(row, elements);
#pragma unroll
  for (int v = 0; v < kCount; ++v) {
    vectors[v] =
        wide ? loadWideVector(row, first + v * kStep, elements) : loadWideElements(row, first + v * kStep, elements);
  }
}

// Makes e4m3 of a vector and returns the scale of its group. All lanes of the warp.
__device__ __forceinline__ float quantizeVector(const WideVector& vector, bool powerOfTwo, uint32_t* words) {
  uint32_t most = 0;
#pragma unroll
  for (uint32_t pair : vector.words) most = __vmaxu2(most, pair & 0x7fff7fffu);
  most = max(most & 0xffffu, most >> 16);
#pragma unroll
  for (int step = static_cast<int>(kGroupVectors) / 2; step > 0; step /= 2) {
    most = max(most, __shfl_xor_sync(~0u, most, step));
  }
  auto [scale, reciprocal] = groupScale(most, powerOfTwo);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    words[w] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t pair = vector.words[2 * w + half];
      float low = __builtin_bit_cast(float, pair << 16), high = __builtin_bit_cast(float, pair & 0xffff0000u);
      words[w] |= ptx::float8Pair(low * reciprocal, high * reciprocal) << (16 * half);
    }
  }
  return scale;
}

__device__ __forceinline__ QuantizedUnit CudaExec::loadQuantized(const std::byte* row, int64_t unit, int64_t elements,
                                                                 bool powerOfTwo) {
  WideVector vectors[Unit::kVectors]{};
  loadWide<Unit::kVectors, kUnitsPerBlock * Unit::kVectorBytes>(row, Unit::vectorAt(unit, 0), elements, vectors);
  QuantizedUnit result;
#pragma unroll
  for (int v = 0; v < Unit::kVectors; ++v) {
    result.scales[v] = quantizeVector(vectors[v], powerOfTwo, result.data.words + 4 * v);
  }
  return result;
}

// Writes what a piece becomes into the row that it is part of, which lies on a multiple of 16 bytes. All lanes of the
// warp.
__device__ inline void quantizeRow(const QuantizedPiece& piece, std::byte* row, int lane) {
  constexpr int64_t kAtOnce = 32 * 16;
  int64_t groups = ceilDiv(piece.elements, kGroup);
  for (int64_t base = 0; base < piece.elements; base += 2 * kAtOnce) {
    WideVector vectors[2]{};
    loadWide<2, kAtOnce>(piece.from, base + lane * 16, piece.elements, vectors);
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      int64_t first = base + v * kAtOnce + lane * 16, group = first / kGroup;
      uint32_t words[4];
      float scale = quantizeVector(vectors[v], piece.ue8m0, words);
      if (first < piece.elements) {
        *reinterpret_cast<int4*>(row + piece.tokens + first) =
            int4{static_cast<int>(words[0]), static_cast<int>(words[1]), static_cast<int>(words[2]),
                 static_cast<int>(words[3])};
      }
      if (first % kGroup != 0) continue;
      std::byte* scales = row + piece.scales;
      if (!piece.ue8m0 && group < groups) reinterpret_cast<float*>(scales)[group] = scale;
      // Past the last group, bytes of its word.
      if (piece.ue8m0 && group < roundUp(groups, kScaleWord)) {
        scales[group] = static_cast<std::byte>(group < groups ? ue8m0Of(scale) : 0);
      }
    }
  }
}

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// CudaExec: flag-in-data.
#pragma once

#include "device/exec_cuda_wait.cuh"

namespace moe {

// Whether waiting for tagged words is over, as waitIsOver has it. `count` words, `stride` bytes apart.
__device__ __noinline__ inline bool taggedWaitIsOver(const CudaGrid& grid, const std::byte* words, int count,
                                                     int64_t stride, uint32_t tag, Awaited awaited, int peer,
                                                     uint64_t start) {
  if (ptx::loadRelaxedGpu(grid.failed)) return true;
  int culprit = peer;
  int32_t code = verdict(grid, peer, &culprit);
  if (code == moeSuccess && ptx::globalTimerNs() - start > grid.timeoutNs) code = moeTimeout;
  if (code == moeSuccess) return false;
  // What a rank wrote before it left still counts.
  for (int w = 0; w < count; ++w) {
    uint32_t seen = ptx::loadTagged(words + w * stride).tag;
    if (seen == tag) continue;
    reportFailure(grid, code, awaited, culprit, epochOf(tag), epochOf(seen));
    return true;
  }
  return false;
}

// Whether a word has come.
__device__ __forceinline__ bool hasCome(const ptx::TaggedWord& word, uint32_t tag) {
#ifdef MOE_MUTANT_STALE_TAG
  return word.tag != 0;
#else
  return word.tag == tag;
#endif
}

// Polls kCount words, `stride` bytes apart, all in flight together.
template <int kCount>
__device__ __forceinline__ bool getWords(const CudaGrid& grid, const std::byte* words, int64_t stride, uint32_t tag,
                                         Awaited awaited, int peer, uint32_t* data) {
  constexpr int kEager = kPollsPerHurry, kPause = 20;
  uint64_t start = 0;
#pragma unroll 1
  for (int polls = 1;; ++polls) {
    ptx::TaggedWord word[kCount];
    bool came = true;
#pragma unroll
    for (int w = 0; w < kCount; ++w) word[w] = ptx::loadTagged(words + w * stride);
#pragma unroll
    for (int w = 0; w < kCount; ++w) {
      came = came && hasCome(word[w], tag);
      for (int i = 0; i < 3; ++i) data[3 * w + i] = word[w].data[i];
    }
    if (came) return true;
    if (polls < kEager) continue;
    __nanosleep(kPause);
    if (polls % kPollsPerHurry == 0 && mayGiveUp()) return false;
    if (polls % kPollsPerLook != 0) continue;
    if (start == 0) start = ptx::globalTimerNs();
    if (taggedWaitIsOver(grid, words, kCount, stride, tag, awaited, peer, start)) return false;
  }
}

__device__ __forceinline__ bool CudaExec::getTagged(const std::byte* word, uint32_t tag, Awaited awaited, int peer,
                                                    uint32_t* data) const {
  return getWords<1>(grid_, word, 0, tag, awaited, peer, data);
}
__device__ __forceinline__ bool CudaExec::getUnit(const std::byte* row, int64_t unit, uint32_t tag, Awaited awaited,
                                                  int peer, Unit* data) const {
  constexpr int kStride = kUnitsPerBlock * kTaggedWord;
  return getWords<kUnitWords>(grid_, row + Unit::wordAt(unit, 0), kStride, tag, awaited, peer, data->words);
}
__device__ __forceinline__ bool CudaExec::getTaggedPair(const std::byte* word, int64_t stride, uint32_t tag,
                                                        Awaited awaited, int peer, uint32_t* data) const {
  return getWords<2>(grid_, word, stride, tag, awaited, peer, data);
}

__device__ __forceinline__ CudaExec::Peek CudaExec::peekUnit(const std::byte* row, int64_t unit) const {
  Peek peek;
#pragma unroll
  for (int w = 0; w < kUnitWords; ++w) peek.words[w] = ptx::loadTagged(row + Unit::wordAt(unit, w));
  return peek;
}
__device__ __forceinline__ bool CudaExec::takePeek(const Peek& peek, uint32_t tag, Unit* data) const {
  bool came = true;
#pragma unroll
  for (int w = 0; w < kUnitWords; ++w) {
    came = came && hasCome(peek.words[w], tag);
    for (int i = 0; i < 3; ++i) data->words[3 * w + i] = peek.words[w].data[i];
  }
  return came;
}

__device__ __forceinline__ void CudaExec::putUnit(std::byte* row, int64_t unit, uint32_t tag, const Unit& data) {
#pragma unroll
  for (int w = 0; w < kUnitWords; ++w) {
    const uint32_t* words = data.words + 3 * w;
    putTagged(row + Unit::wordAt(unit, w), tag, words[0], words[1], words[2]);
  }
}

// A vector of a unit that is read or written as one.
__device__ __forceinline__ void takeVector(Unit* unit, int vector, int4 words) {
  unit->words[4 * vector] = static_cast<uint32_t>(words.x);
  unit->words[4 * vector + 1] = static_cast<uint32_t>(words.y);
  unit->words[4 * vector + 2] = static_cast<uint32_t>(words.z);
  unit->words[4 * vector + 3] = static_cast<uint32_t>(words.w);
}
__device__ __forceinline__ int4 vectorOf(const Unit& unit, int vector) {
  const uint32_t* words = unit.words + 4 * vector;
  return {static_cast<int>(words[0]), static_cast<int>(words[1]), static_cast<int>(words[2]),
          static_cast<int>(words[3])};
}

// Byte by byte, for rows that do not align: real functions, so that others do not prepare for them.
__device__ __noinline__ inline Unit loadUnitBytes(const std::byte* row, int64_t unit, int64_t bytes) {
  Unit data{};
#pragma unroll
  for (int v = 0; v < Unit::kVectors; ++v) {
    auto size = static_cast<int>(Unit::vectorBytes(unit, v, bytes));
#pragma unroll
    for (int b = 0; b < Unit::kVectorBytes; ++b) {
      if (b >= size) continue;
      auto byte = static_cast<uint32_t>(static_cast<uint8_t>(row[Unit::vectorAt(unit, v) + b]));
      data.words[4 * v + b / 4] |= byte << (8 * (b % 4));
    }
  }
  return data;
}

__device__ __forceinline__ Unit CudaExec::loadUnit(const std::byte* row, int64_t unit, int64_t bytes) {
  if (!aligned(row, row, bytes, 16)) return loadUnitBytes(row, unit, bytes);
  Unit data{};
  int64_t first = Unit::vectorAt(unit, 0);
#pragma unroll
  for (int v = 0; v < Unit::kVectors; ++v) {
    int64_t at = first + v * kUnitsPerBlock * Unit::kVectorBytes;
    if (at < bytes) takeVector(&data, v, ptx::loadOnce(row + at));
  }
  return data;
}

__device__ __noinline__ inline void storeUnitBytes(std::byte* row, int64_t unit, int64_t bytes, Unit data) {
#pragma unroll
  for (int v = 0; v < Unit::kVectors; ++v) {
    auto size = static_cast<int>(Unit::vectorBytes(unit, v, bytes));
#pragma unroll
    for (int b = 0; b < Unit::kVectorBytes; ++b) {
      if (b >= size) continue;
      row[Unit::vectorAt(unit, v) + b] = static_cast<std::byte>(data.words[4 * v + b / 4] >> (8 * (b % 4)));
    }
  }
}

// Lanes work out a row's address each, and hand it to all.
template <class RowOf, class Use>
__device__ __forceinline__ void CudaExec::forRows(uint64_t rows, RowOf rowOf, Use use) {
  auto lane = threadIdx.x % 32;
#pragma unroll 1
  for (uint32_t first = 0; rows != 0; first += 32, rows >>= 32) {
    auto left = static_cast<uint32_t>(rows);
    uint64_t mine = left >> lane & 1 ? reinterpret_cast<uint64_t>(rowOf(static_cast<int>(first + lane))) : 0;
#pragma unroll 1
    for (; left != 0; left &= left - 1) use(reinterpret_cast<std::byte*>(__shfl_sync(~0u, mine, __ffs(left) - 1)));
  }
}

__device__ __forceinline__ void CudaExec::storeUnit(std::byte* row, int64_t unit, int64_t bytes, const Unit& data) {
  if (!aligned(row, row, bytes, 16)) {
    storeUnitBytes(row, unit, bytes, data);
    return;
  }
  constexpr int64_t kStep = kUnitsPerBlock * Unit::kVectorBytes;
  auto first = static_cast<uint32_t>(Unit::vectorAt(unit, 0));
#pragma unroll
  for (int v = 0; v < Unit::kVectors; ++v) {
    if (first + v * kStep < bytes) ptx::storeGlobal(row + first + v * kStep, vectorOf(data, v));
  }
}

template <class RowOf>
__device__ __forceinline__ void CudaExec::storeUnits(uint64_t rows, RowOf rowOf, int64_t unit, int64_t bytes,
                                                     const Unit& data) {
  constexpr uint32_t kStep = kUnitsPerBlock * Unit::kVectorBytes;
  auto first = static_cast<uint32_t>(Unit::vectorAt(unit, 0)), size = static_cast<uint32_t>(bytes);
  bool exists[Unit::kVectors];
#pragma unroll
  for (int v = 0; v < Unit::kVectors; ++v) exists[v] = first + v * kStep < size;
  forRows(rows, rowOf, [&](std::byte* row) {
    if ((size | static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row))) % 16 != 0) {
      storeUnitBytes(row, unit, bytes, data);
      return;
    }
    // One address for all: a register that a store reads cannot be written again for long.
    std::byte* to = ptx::opaque(row + first);
#pragma unroll
    for (int v = 0; v < Unit::kVectors; ++v) {
      if (exists[v]) ptx::storeGlobal(to + v * kStep, vectorOf(data, v));
    }
  });
}

}  // namespace moe

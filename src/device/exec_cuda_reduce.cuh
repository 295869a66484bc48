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

template <class Number>
__device__ __forceinline__ void unpack(int4 words, float* values) {
  const auto& vector = reinterpret_cast<const Vector<Number>&>(words);
#pragma unroll
  for (int e = 0; e < Vector<Number>::kCount; ++e) values[e] = Number::load(vector.values[e]);
}
template <>
__device__ __forceinline__ void unpack<Bfloat16>(int4 words, float* values) {
  const int word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    values[2 * w] = __int_as_float(word[w] << 16);
    values[2 * w + 1] = __int_as_float(word[w] & static_cast<int>(0xffff0000u));
  }
}

template <class Number>
__device__ __forceinline__ int4 pack(const float* values) {
  Vector<Number> vector;
#pragma unroll
  for (int e = 0; e < Vector<Number>::kCount; ++e) vector.values[e] = Number::store(values[e]);
  return reinterpret_cast<const int4&>(vector);
}
template <>
__device__ __forceinline__ int4 pack<Bfloat16>(const float* values) {
  int word[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) word[w] = ptx::packBfloat16(values[2 * w], values[2 * w + 1]);
  return {word[0], word[1], word[2], word[3]};
}

// Words that a lane adds in one step where the row has as many left.
constexpr int kSumWidth = 4;

// Words of 16 bytes that one lane takes of a row: kWidth of them, 512 bytes apart.
template <int kWidth>
struct Words {
  int4 words[kWidth];

  __device__ __forceinline__ void load(const std::byte* from) {
#pragma unroll
    for (int w = 0; w < kWidth; ++w) words[w] = ptx::loadOnce(from + w * 512);
  }
};

// A lane's share of a sum, in fp32.
template <class Number, bool kWeighted, int kWidth>
struct Sum {
  static constexpr int kCount = Vector<Number>::kCount;
  float values[kWidth][kCount];

  __device__ __forceinline__ void add(const Words<kWidth>& row, float weight, bool first) {
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      float loaded[kCount];
      unpack<Number>(row.words[w], loaded);
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        float value = kWeighted ? __fmul_rn(weight, loaded[e]) : loaded[e];
        values[w][e] = first ? value : __fadd_rn(values[w][e], value);
      }
    }
  }
  __device__ __forceinline__ void store(std::byte* to) const {
#pragma unroll
    for (int w = 0; w < kWidth; ++w) ptx::storeGlobal(to + w * 512, pack<Number>(values[w]));
  }
};

// Adds kWidth words of every source.
template <class Number, bool kWeighted, int kWidth>
__device__ __forceinline__ void addWords(ReduceItem& item, int at) {
  int count = item.count;
  Sum<Number, kWeighted, kWidth> sum;
#pragma unroll 1
  for (int s = 0; s < count; ++s) {
    Words<kWidth> row;
    row.load(item.sources()[s].row + at);
    sum.add(row, item.sources()[s].weight, s == 0);
  }
  sum.store(item.result + at);
}

// Rows that do not lie on 16-byte boundaries.
template <class Number>
__device__ void addElements(ReduceItem& item, bool weighted, int bytes, int lane) {
  auto elements = bytes / static_cast<int>(sizeof(Number));
  for (int e = lane; e < elements; e += 32) {
    float sum = 0;
    for (int32_t s = 0; s < item.count; ++s) {
      ReduceSource source = item.sources()[s];
      float value = Number::load(reinterpret_cast<const Number*>(source.row)[e]);
      if (weighted) value = __fmul_rn(source.weight, value);
      sum = s == 0 ? value : __fadd_rn(sum, value);
    }
    reinterpret_cast<Number*>(item.result)[e] = Number::store(sum);
  }
}

template <class Number, bool kWeighted>
__device__ __forceinline__ void addRow(ReduceItem& item, bool wide, int bytes, int lane) {
  constexpr int kWidth = kSumWidth;
  if (!wide || item.count == 0) return addElements<Number>(item, kWeighted, bytes, lane);
  int at = lane * 16;
#pragma unroll 1
  for (; at + (kWidth - 1) * 512 < bytes; at += kWidth * 512) addWords<Number, kWeighted, kWidth>(item, at);
#pragma unroll 1
  for (; at < bytes; at += 512) addWords<Number, kWeighted, 1>(item, at);
}

// Bytes of each of `sources` that fit into a stage together: whole steps of the loop that adds, or at least whole words
// of all lanes.
__device__ inline int partBytes(int sources, int rowBytes, int stageBytes) {
  unsigned most = static_cast<unsigned>(stageBytes) / static_cast<unsigned>(max(sources, 1));
  unsigned step = most >= kSumWidth * 512 ? kSumWidth * 512 : 512;
  return min(rowBytes, static_cast<int>(most / step * step));
}

// Moves the sources that are there to the front of the lists of a run's items, and divides the rows into parts.
__device__ inline void compactSources(RunItems items, int lane, int rowBytes, int stageBytes) {
  if (lane < kRunRows) {
    auto* item = items.as<ReduceItem>(lane);
    int32_t kept = 0;
    for (int32_t s = 0; item->result && s < item->count; ++s) {
      if (item->sources()[s].row) item->sources()[kept++] = item->sources()[s];
    }
    item->count = kept;
    item->part = partBytes(kept, rowBytes, stageBytes);
  }
  __syncwarp();
}

// What happens before a run's rows are added.
template <class Job>
__device__ __forceinline__ RunState CudaExec::beginReduceRun(const Job& job, typename Job::Lane& mine, int i) {
  __syncwarp();
  RunState state = job.beginRun(*this, i, items(i), mine);
  if (state != RunState::kReady) return state;
  __syncwarp();
  compactSources(items(i), lane(), static_cast<int>(job.rowBytes()), grid_.reduce.bytes);
  return state;
}

template <class Number, bool kWeighted, class Job>
__device__ __forceinline__ bool CudaExec::reduceDirect(const Job& job) {
  typename Job::Lane mine;
  job.start(*this, mine);
  bool wide = job.wide();
  auto bytes = static_cast<int>(job.rowBytes());
#pragma unroll 1
  for (int i = 0;; i += kRunRows) {
    RunState state = beginReduceRun(job, mine, i);
    if (state != RunState::kReady) return state == RunState::kEnd;
#pragma unroll 1
    for (int j = 0; j < kRunRows; ++j) {
      if (j == kRunRows - 1) job.prefetchRun(*this, mine);
      auto& row = *reinterpret_cast<ReduceItem*>(item(i + j));
      if (row.result) addRow<Number, kWeighted>(row, wide, bytes, lane());
    }
    __syncwarp();
    if constexpr (!Job::kOnlyAdds) job.finishedRun(*this, i, mine);
  }
}

#if __CUDA_ARCH__ >= 900
// A part of a row for which all sources' bytes fit into one stage, one source after the other.
struct ReducePart {
  int row;
  int offset = 0;  // bytes

  __device__ int bytes(const ReduceItem& item, int rowBytes) const { return min(rowBytes - offset, item.part); }
};

// Adds kWidth words of each source of an item; they lie one after the other in a stage, `bytes` each.
template <class Number, bool kWeighted, int kWidth>
__device__ __forceinline__ void addStagedWords(ReduceItem& item, uint32_t stage, std::byte* result, int count,
                                               int bytes) {
  Sum<Number, kWeighted, kWidth> sum;
  auto addSource = [&](int s, bool first) {
    Words<kWidth> words;
#pragma unroll
    for (int w = 0; w < kWidth; ++w) words.words[w] = ptx::loadShared(stage + s * bytes + w * 512);
    sum.add(words, kWeighted ? item.sources()[s].weight : 1.0f, first);
  };
  addSource(0, true);
#pragma unroll 1
  for (int s = 1; s < count; ++s) addSource(s, false);
  sum.store(result);
}

template <class Number, bool kWeighted>
__device__ __forceinline__ void addStaged(ReduceItem& item, uint32_t stage, std::byte* result, int bytes, int lane) {
  constexpr int kWidth = kSumWidth;
  int count = item.count;
  int at = lane * 16;
#pragma unroll 1
  for (; at + (kWidth - 1) * 512 < bytes; at += kWidth * 512) {
    addStagedWords<Number, kWeighted, kWidth>(item, stage + at, result + at, count, bytes);
  }
#pragma unroll 1
  for (; at < bytes; at += 512) addStagedWords<Number, kWeighted, 1>(item, stage + at, result + at, count, bytes);
}

// Until the store groups before the last `newer` are complete, or a few more.
__device__ inline void bulkWaitAllBut(int newer) {
  if (newer >= 8) return ptx::bulkWait<8>();
  if (newer >= 4) return ptx::bulkWait<4>();
  if (newer >= 2) return ptx::bulkWait<2>();
  ptx::bulkWait<0>();
}

// As streamStaged, with parts of rows in place of rows. Sums go from registers to their destination: a way through
// shared memory would be half as much traffic there again.
template <class Number, bool kWeighted, class Job>
__device__ __forceinline__ bool CudaExec::reduceStaged(const Job& job) {
  typename Job::Lane mine;
  job.start(*this, mine);
  auto rowBytes = static_cast<int>(job.rowBytes());
  ReducePart next{0}, ahead{0};
  int loading = 0, adding = 0, inFlight = 0;
  int stored = 0;  // parts since the last run ended
  RunState state = RunState::kReady;
  while (true) {
    while (state == RunState::kReady && inFlight < grid_.reduce.stages - 1) {
      if (ahead.offset == 0 && ahead.row % kRunRows == 0) {
        // The new run's items take the place of those of the run before last.
        if (ahead.row - next.row > kRunRows) break;
        state = beginReduceRun(job, mine, ahead.row);
        if (state != RunState::kReady) break;
      }
      // Late, so that the next run is known by now.
      if (ahead.offset == 0 && ahead.row % kRunRows == kRunRows - 1) job.prefetchRun(*this, mine);
      auto& item = *reinterpret_cast<ReduceItem*>(this->item(ahead.row));
      if (!item.result) {
        ++ahead.row;
        continue;
      }
      int bytes = ahead.bytes(item, rowBytes);
      loadPart(item, loading, ahead.offset, bytes);
      loading = nextStage(grid_.reduce, loading);
      ++inFlight;
      ahead.offset += bytes;
      if (ahead.offset == rowBytes) ahead = {ahead.row + 1};
    }
    if (next.row == ahead.row && inFlight == 0 && state != RunState::kReady) break;
    auto& item = *reinterpret_cast<ReduceItem*>(this->item(next.row));
    if (item.result) {
      int bytes = next.bytes(item, rowBytes);
      awaitStage(adding);
      addPart<Number, kWeighted>(item, adding, next.offset, bytes);
      adding = nextStage(grid_.reduce, adding);
      --inFlight;
      ++stored;
      next.offset += bytes;
      if (next.offset < rowBytes) continue;
    }
    next = {next.row + 1};
    // Told of one run late, so that nothing is drained between runs.
    if (!Job::kOnlyAdds && next.row % kRunRows == 0 && next.row > kRunRows) {
      publishRun(job, mine, next.row - 2 * kRunRows, stored);
      stored = 0;
    }
  }
  if (!Job::kOnlyAdds && next.row > 0) {
    publishRun(job, mine, next.row - kRunRows, 0);
  } else if (lane() == 0) {
    ptx::bulkWait<0>();
  }
  __syncwarp();
  return state == RunState::kEnd;
}

// `newer`: parts that were stored after the run.
template <class Job>
__device__ __forceinline__ void CudaExec::publishRun(const Job& job, typename Job::Lane& mine, int i, int newer) {
  if (lane() == 0) {
    bulkWaitAllBut(newer);
    ptx::fenceProxyGlobal();
  }
  __syncwarp();
  job.finishedRun(*this, i, mine);
}

// Lanes take a source each.
__device__ __forceinline__ void CudaExec::loadPart(ReduceItem& item, int stage, int offset, int bytes) {
  auto size = static_cast<uint32_t>(bytes);
  int sources = item.count;
  std::byte* to = stageAt(grid_.reduce, stage);
  if (lane() == 0) {
    // With two stages, too, the latest group need not be waited for; but with one wait for both the kernel spills.
    grid_.reduce.stages > 2 ? ptx::bulkWaitRead<1>() : ptx::bulkWaitRead<0>();
    ptx::barrierArriveExpect(barriers_ + stage, size * static_cast<uint32_t>(sources));
  }
  __syncwarp();
#pragma unroll 1
  for (int s = lane(); s < sources; s += 32) {
    ptx::bulkLoad(to + s * bytes, item.sources()[s].row + offset, size, barriers_ + stage);
  }
}

template <class Number, bool kWeighted>
__device__ __forceinline__ void CudaExec::addPart(ReduceItem& item, int stage, int offset, int bytes) {
  const std::byte* from = stageAt(grid_.reduce, stage);
  std::byte* to = item.result + offset;
  if (item.count == 1 && !kWeighted) {
    // Nothing to add: the copy engine can carry on.
    if (lane() == 0) ptx::bulkStore(to, from, static_cast<uint32_t>(bytes));
  } else if (item.count == 0) {
#pragma unroll 1
    for (int zero = lane() * 16; zero < bytes; zero += 512) ptx::storeGlobal(to + zero, int4{0, 0, 0, 0});
  } else {
    addStaged<Number, kWeighted>(item, ptx::sharedAddress(from), to, bytes, lane());
  }
  // A group a part, so that its stage is known to be read before it is loaded again. Lanes have only read it: what the
  // copy engine writes there next needs no fence, only that they are done.
  if (lane() == 0) ptx::bulkCommit();
  __syncwarp();
}
#endif

// The loops over rows exist once for each type and with and without weights: choices inside them cost registers.
template <class Number, bool kWeighted, class Job>
__device__ __forceinline__ bool CudaExec::reduceRowsOf(const Job& job) {
  if constexpr (ptx::kHasBulk) {
    // A stage must hold at least 512 bytes of every source.
    bool fits = grid_.reduce.stages > 0 && grid_.reduce.bytes >= 512 * job.mostSources();
    if (fits && job.wide()) return reduceStaged<Number, kWeighted>(job);
  }
  return reduceDirect<Number, kWeighted>(job);
}

template <class Number, class Job>
__device__ __forceinline__ bool CudaExec::reduceRowsOf(const Job& job) {
  if constexpr (!Job::kOnlyAdds) {
    if (job.weighted()) return reduceRowsOf<Number, true>(job);
  }
  return reduceRowsOf<Number, false>(job);
}

template <class Job>
__device__ __forceinline__ bool CudaExec::reduceRows(const Job& job) {
  switch (job.type()) {
    case moeFloat32: return reduceRowsOf<Float32>(job);
    case moeFloat16: return reduceRowsOf<Float16>(job);
    default: return reduceRowsOf<Bfloat16>(job);
  }
}

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// CudaExec: carrying rows.
//
// Staged: a warp keeps up to stages - 1 rows between their loads and their stores. The loads of a row wait until the
// stores of the row that had its stage before, two rows back, have read it; the stores of one row may be outstanding
// meanwhile. Completion is reported one run late, so that nothing is drained between runs.
#pragma once

#include "device/exec_cuda.cuh"

namespace moe {

// A copy by all lanes in units of Word.
template <class Word>
__device__ __forceinline__ void copyWords(std::byte* to, const std::byte* from, int64_t bytes, int lane) {
  auto* target = reinterpret_cast<Word*>(to);
  const auto* source = reinterpret_cast<const Word*>(from);
  int64_t count = bytes / static_cast<int64_t>(sizeof(Word));
  int64_t at = lane;
  for (; at + 96 < count; at += 128) {
    Word a = source[at], b = source[at + 32], c = source[at + 64], d = source[at + 96];
    target[at] = a;
    target[at + 32] = b;
    target[at + 64] = c;
    target[at + 96] = d;
  }
  for (; at < count; at += 32) target[at] = source[at];
}

__device__ inline bool aligned(const void* a, const void* b, int64_t bytes, uintptr_t to) {
  auto bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | static_cast<uintptr_t>(bytes);
  return bits % to == 0;
}

__device__ inline void copyBytes(std::byte* to, const std::byte* from, int64_t bytes, int lane) {
  if (aligned(to, from, bytes, 16)) return copyWords<int4>(to, from, bytes, lane);
  if (aligned(to, from, bytes, 4)) return copyWords<uint32_t>(to, from, bytes, lane);
  if (aligned(to, from, bytes, 2)) return copyWords<uint16_t>(to, from, bytes, lane);
  copyWords<uint8_t>(to, from, bytes, lane);
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void StagedRow::load(int64_t offset, const std::byte* from, int64_t bytes) {
  if (!aligned(from, stage + offset, bytes, 16)) {
    copyBytes(stage + offset, from, bytes, lane);
    ordinary = true;
  } else if (lane == 0) {
    ptx::barrierExpect(barrier, static_cast<uint32_t>(bytes));
    ptx::bulkLoad(stage + offset, from, static_cast<uint32_t>(bytes), barrier);
  }
}

__device__ __forceinline__ void StagedRow::quantize(const QuantizedPiece& piece) {
  quantizeRow(piece, stage, lane);
  ordinary = true;
}

__device__ __forceinline__ void StagedRow::storeColumn(std::byte* to, int64_t stride, int64_t offset, int64_t words) {
  const auto* from = reinterpret_cast<const uint32_t*>(stage + offset);
  for (int64_t w = lane; w < words; w += 32) *reinterpret_cast<uint32_t*>(to + w * stride) = from[w];
  ordinary = true;
}

__device__ __forceinline__ void StagedRow::store(std::byte* to, int64_t offset, int64_t bytes) {
  if (!aligned(to, stage + offset, bytes, 16)) {
    copyBytes(to, stage + offset, bytes, lane);
    ordinary = true;
  } else if (lane == 0) {
    ptx::bulkStore(to, stage + offset, static_cast<uint32_t>(bytes));
  }
}

// Starts the loads of a row into a stage.
template <class Job>
__device__ __forceinline__ void CudaExec::stageRow(const std::byte* item, int stage, const Job& job) {
  if (lane() == 0) ptx::bulkWaitRead<1>();
  __syncwarp();
  StagedRow row{stageAt(grid_.stream, stage), barriers_ + stage, lane()};
  job.gather(item, row);
  // Into the stage, so that the row is stored in one piece.
  if (auto composed = static_cast<int>(job.composedBytes()); composed > 0) {
    const std::byte* from = job.composed(item);
    std::byte* to = row.stage + job.composedOffset();
    for (int at = lane() * 16; at < composed; at += 512) {
      *reinterpret_cast<int4*>(to + at) = *reinterpret_cast<const int4*>(from + at);
    }
    row.ordinary = true;
  }
  if (row.ordinary) {
    // What lanes wrote is read by the copy engine.
    ptx::fenceProxyShared();
    __syncwarp();
  }
  if (lane() == 0) ptx::barrierArrive(row.barrier);
}

// Until the loads into a stage have arrived.
__device__ inline void CudaExec::awaitStage(int stage) {
  while (!ptx::barrierTryWait(barriers_ + stage, phases_ >> stage & 1u)) {
  }
  phases_ ^= 1u << stage;
}

template <class Job>
__device__ __forceinline__ bool CudaExec::streamStaged(const Job& job) {
  typename Job::Lane mine;
  job.start(*this, mine);
  int begun = 0, stored = 0;  // rows that carry something: loads begun, stores begun
  uint32_t carries = 0;       // a bit for each row between `next` and `ahead`
  int next = 0, ahead = 0;
  int loading = 0, storing = 0;  // their stages
  RunState state = RunState::kReady;
  while (true) {
    while (state == RunState::kReady && begun - stored < grid_.stream.stages - 1 && ahead - next < kRunRows) {
      if (ahead % kRunRows == 0) {
        __syncwarp();
        state = job.beginRun(*this, ahead, items(ahead), mine);
        if (state != RunState::kReady) break;
        __syncwarp();
      }
      // Late, so that the next run is known by now.
      if (ahead % kRunRows == kRunRows - 1) job.prefetchRun(*this, mine);
      if (job.carries(item(ahead))) {
        stageRow(item(ahead), loading, job);
        carries |= 1u << (ahead - next);
        loading = nextStage(grid_.stream, loading);
        ++begun;
      }
      ++ahead;
    }
    if (next == ahead) break;
    if (carries & 1u) {
      StagedRow row{stageAt(grid_.stream, storing), barriers_ + storing, lane()};
      awaitStage(storing);
      job.scatter(item(next), row);
      // Lanes that read the stage themselves must be done before the copy engine writes it again.
      if (row.ordinary) ptx::fenceProxyShared();
      __syncwarp();
      storing = nextStage(grid_.stream, storing);
      ++stored;
    }
    carries >>= 1;
    // One group a row, empty for a row without stores, so that counting groups counts rows.
    if (lane() == 0) ptx::bulkCommit();
    ++next;
    if (Job::kTells && next % kRunRows == 0 && next > kRunRows) {
      finishStreamed<kRunRows>(job, mine, next - 2 * kRunRows);
    }
  }
  if (Job::kTells && next > 0) {
    finishStreamed<0>(job, mine, next - kRunRows);
  } else if (lane() == 0) {
    ptx::bulkWait<0>();
  }
  __syncwarp();
  return state == RunState::kEnd;
}

// `kNewer`: rows that were stored after the run.
template <int kNewer, class Job>
__device__ __forceinline__ void CudaExec::finishStreamed(const Job& job, typename Job::Lane& mine, int i) {
  if (lane() == 0) {
    ptx::bulkWait<kNewer>();
    ptx::fenceProxyGlobal();
  }
  __syncwarp();
  job.finishedRun(*this, i, mine);
}
#endif

__device__ inline void DirectRow::store(std::byte* to, int64_t offset, int64_t bytes) const {
  if (offset == 0 && quantized.from) quantizeRow(quantized, to, lane);
  for (int i = 0; i < count; ++i) {
    int64_t begin = larger(offset, pieces[i].offset);
    int64_t end = smaller(offset + bytes, pieces[i].offset + pieces[i].bytes);
    if (begin < end) copyBytes(to + (begin - offset), pieces[i].from + (begin - pieces[i].offset), end - begin, lane);
  }
}

__device__ inline void DirectRow::storeColumn(std::byte* to, int64_t stride, int64_t offset, int64_t words) const {
  for (int i = 0; i < count; ++i) {
    if (offset < pieces[i].offset || offset >= pieces[i].offset + pieces[i].bytes) continue;
    const auto* from = reinterpret_cast<const uint32_t*>(pieces[i].from + (offset - pieces[i].offset));
    for (int64_t w = lane; w < words; w += 32) *reinterpret_cast<uint32_t*>(to + w * stride) = from[w];
  }
}

template <class Job>
__device__ __forceinline__ bool CudaExec::streamDirect(const Job& job) {
  typename Job::Lane mine;
  job.start(*this, mine);
  for (int i = 0;; i += kRunRows) {
    RunState state = job.beginRun(*this, i, items(i), mine);
    if (state != RunState::kReady) return state == RunState::kEnd;
    __syncwarp();
    for (int j = i; j < i + kRunRows; ++j) {
      if (!job.carries(item(j))) continue;
      DirectRow row(lane());
      job.gather(item(j), row);
      if (job.composedBytes() > 0) row.load(job.composedOffset(), job.composed(item(j)), job.composedBytes());
      job.scatter(item(j), row);
      __syncwarp();
    }
    job.finishedRun(*this, i, mine);
  }
}

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// The direct path's combine. The expert's rank adds a token's local rows and writes one partial row into the token's own
// slot at its source: the address came with the token. The source adds the partial rows of each token.
#pragma once

#include "device/direct_send.h"
#include "device/epochs.h"
#include "device/window_view.h"

namespace moe {

// Partial rows for all sources as a reduce job, chunk by chunk, sources in turn.
template <class X>
class PartialJob {
 public:
  MOE_HD PartialJob(const X& x, const CombineArgs& a, uint64_t epoch)
      : a_(a), layout_(a.common.layout), shape_(layout_.shape), handle_(a.common), work_(a.common), epoch_(epoch),
        warp_(int64_t{x.block()} * x.warps() + x.warp()), warps_(int64_t{a.common.sendBlocks} * x.warps()) {}

  MOE_HD int64_t rows() const {
    int64_t chunks = 0;
    for (int source = 0; source < shape_.nranks; ++source) chunks = larger(chunks, *handle_.sourceChunks(source));
    int64_t runs = chunks * kRunsPerChunk * shape_.nranks;
    return warp_ < runs ? ceilDiv(runs - warp_, warps_) * kRunRows : 0;
  }

  MOE_HD bool weighted() const { return a_.applyWeights && shape_.expertLayout(); }
  MOE_HD int32_t type() const { return shape_.combineType; }
  MOE_HD int64_t elements() const { return shape_.hidden; }
  MOE_HD int64_t rowBytes() const { return shape_.combineRowBytes; }

  MOE_HD RowStep begin(X&, int64_t i) {
    if (i % kRunRows == 0) enterRun(i);
    return first_ + i % kRunRows < end_ ? RowStep::kCarry : RowStep::kSkip;
  }

  MOE_HD int sources(int64_t i, ReduceSource* list) const {
    int64_t slot = first_ + i % kRunRows;
    if (!shape_.expertLayout()) {
      int64_t row = *handle_.sourceFirst(source_) + slot;
      if (row >= a_.common.handleHead()->capacity) return 0;
      list[0] = {inputRow(row, slot), 1.0f};
      return 1;
    }
    int count = 0;
    const int32_t* rows = handle_.rows(source_, slot);
    const float* weights = handle_.rowWeights(source_, slot);
    for (int k = 0; k < shape_.topk; ++k) {
      if (rows[k] >= 0) list[count++] = {inputRow(rows[k], slot), weights[k]};
    }
    return count;
  }

  MOE_HD std::byte* result(int64_t i) const {
    int64_t slot = first_ + i % kRunRows;
    CombineWindow window(layout_, a_.common.windows[source_], epoch_);
    return window.row(*handle_.token(source_, slot), *handle_.ordinal(source_, slot));
  }

  MOE_HD void finished(X& x, int64_t i) const {
    if (i % kRunRows != kRunRows - 1 || x.lane() != 0 || chunk_ < 0) return;
    if (x.arrive(work_.combineDone(source_, chunk_), 1) != kRunsPerChunk) return;
    x.reset(work_.combineDone(source_, chunk_));
    CombineWindow window(layout_, a_.common.windows[source_], epoch_);
    x.signal(window.chunkSignal(shape_.rank, chunk_), epoch_);
  }

 private:
  MOE_HD void enterRun(int64_t i) {
    int64_t run = warp_ + i / kRunRows * warps_;
    source_ = static_cast<int>((shape_.rank + run % shape_.nranks) % shape_.nranks);
    int64_t inSource = run / shape_.nranks;
    chunk_ = inSource / kRunsPerChunk;
    first_ = end_ = 0;
    if (chunk_ >= *handle_.sourceChunks(source_)) {
      chunk_ = -1;
      return;
    }
    const int32_t* ends = handle_.chunkEnds(source_);
    first_ = (chunk_ > 0 ? ends[chunk_ - 1] : 0) + inSource % kRunsPerChunk * kRunRows;
    end_ = smaller(ends[chunk_], first_ + kRunRows);
  }

  MOE_HD const std::byte* inputRow(int64_t row, int64_t slot) const {
    if (!a_.inPlace) return a_.rows.data + row * a_.rows.stride;
    DispatchWindow window(layout_, a_.common.window(), a_.common.handleHead()->dispatchEpoch);
    return window.record(source_, slot) + layout_.record.payload[0];
  }

  const CombineArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  HandleView handle_;
  Workspace work_;
  uint64_t epoch_;
  int64_t warp_, warps_;
  int source_ = 0;
  int64_t chunk_ = -1, first_ = 0, end_ = 0;
};

// This rank's tokens as a reduce job.
template <class X>
class TokenJob {
 public:
  MOE_HD TokenJob(const X& x, const CombineArgs& a, uint64_t epoch)
      : a_(a), shape_(a.common.layout.shape), handle_(a.common), window_(a.common.layout, a.common.window(), epoch),
        epoch_(epoch), tokens_(a.common.handleHead()->numTokens) {
    int64_t block = x.block() - (a.common.blocks - a.common.receiveBlocks);
    warp_ = block * x.warps() + x.warp();
    warps_ = int64_t{a.common.receiveBlocks} * x.warps();
  }

  MOE_HD int64_t rows() const {
    int64_t runs = ceilDiv(tokens_, kRunRows);
    return warp_ < runs ? ceilDiv(runs - warp_, warps_) * kRunRows : 0;
  }

  MOE_HD bool weighted() const { return false; }
  MOE_HD int32_t type() const { return shape_.combineType; }
  MOE_HD int64_t elements() const { return shape_.hidden; }
  MOE_HD int64_t rowBytes() const { return shape_.combineRowBytes; }

  MOE_HD RowStep begin(X& x, int64_t i) {
    int64_t token = tokenOf(i);
    if (token >= tokens_) return RowStep::kSkip;
    int64_t chunk = token / kChunkTokens;
    if (chunk != chunk_) {
      bool ok = true;
      for (int sender = x.lane(); ok && sender < shape_.nranks; sender += x.lanes()) {
        ok = x.wait(window_.chunkSignal(sender, chunk), epoch_, Awaited::kCombineRows, sender);
      }
      if (!x.warpAll(ok)) return RowStep::kFailed;
      chunk_ = chunk;
    }
    return RowStep::kCarry;
  }

  MOE_HD int sources(int64_t i, ReduceSource* list) const {
    int64_t token = tokenOf(i);
    int count = *handle_.rankCount(token);
    for (int ordinal = 0; ordinal < count; ++ordinal) list[ordinal] = {window_.row(token, ordinal), 1.0f};
    return count;
  }

  MOE_HD std::byte* result(int64_t i) const { return a_.output.data + tokenOf(i) * a_.output.stride; }
  MOE_HD void finished(X&, int64_t) const {}

 private:
  MOE_HD int64_t tokenOf(int64_t i) const { return (warp_ + i / kRunRows * warps_) * kRunRows + i % kRunRows; }

  const CombineArgs& a_;
  const Shape& shape_;
  HandleView handle_;
  CombineWindow window_;
  uint64_t epoch_;
  int64_t tokens_;
  int64_t warp_ = 0, warps_ = 1;
  int64_t chunk_ = -1;
};

// Tells every source which dispatch this rank combines. One block.
template <class X>
MOE_HD void tellHeads(X& x, const CombineArgs& a, uint64_t epoch) {
  const Layout& layout = a.common.layout;
  for (int peer = x.thread(); peer < layout.shape.nranks; peer += x.threads()) {
    CombineWindow window(layout, a.common.windows[peer], epoch);
    int64_t dispatched = 0;
    int32_t chunks = 0;
    if (a.common.handle) {
      dispatched = static_cast<int64_t>(a.common.handleHead()->dispatchEpoch);
      chunks = *HandleView(a.common).sourceChunks(peer);
    }
    *window.head(layout.shape.rank) = {dispatched, chunks, a.common.refusal};
    x.signal(window.headSignal(layout.shape.rank), epoch);
  }
}

// Looks at the heads of all senders: a refusal, or a handle of another dispatch. The same for all threads.
MOE_HD inline Refusal findRefusal(const CombineArgs& a, const CombineWindow& window) {
  const Shape& shape = a.common.layout.shape;
  int64_t mine = a.common.handle ? static_cast<int64_t>(a.common.handleHead()->dispatchEpoch) : 0;
  for (int sender = 0; sender < shape.nranks; ++sender) {
    const CombineHead& head = *window.head(sender);
    if (head.refusal != 0) return {head.refusal, sender, 0, 0};
    if (a.common.handle && head.dispatchEpoch != mine) return {moeMismatch, sender, head.dispatchEpoch, mine};
  }
  return {0, 0, 0, 0};
}

// The receiving half of a combine. All warps of the last receiveBlocks blocks; false after a failure.
template <class X>
MOE_HD bool receiveCombine(X& x, const CombineArgs& a, uint64_t epoch) {
  const Shape& shape = a.common.layout.shape;
  CombineWindow window(a.common.layout, a.common.window(), epoch);
  bool ok = true;
  for (int sender = x.thread(); ok && sender < shape.nranks; sender += x.threads()) {
    ok = x.wait(window.headSignal(sender), epoch, Awaited::kCombineHead, sender);
  }
  if (!x.barrier(ok)) return false;
  Refusal refusal = findRefusal(a, window);
  if (refusal.code == 0) {
    TokenJob<X> job(x, a, epoch);
    return x.barrier(x.reduceRows(job.rows(), job));
  }
  if (x.block() == a.common.blocks - 1 && x.thread() == 0) *a.common.outcome = refusal;
  for (int sender = 0; ok && sender < shape.nranks; ++sender) {
    int64_t chunks = smaller(window.head(sender)->chunks, shape.chunks);
    for (int64_t chunk = x.thread(); ok && chunk < chunks; chunk += x.threads()) {
      ok = x.wait(window.chunkSignal(sender, chunk), epoch, Awaited::kCombineRows, sender);
    }
  }
  return x.barrier(ok);
}

// What one combine leaves behind. One thread, after all blocks.
template <class X>
MOE_HD void finishCombine(X& x, const CombineArgs& a, uint64_t epoch) {
  const Layout& layout = a.common.layout;
  Control* control = a.common.control();
  control->combineEpoch = epoch;
  x.signalMany(layout.shape.nranks, epoch,
               [&](int peer) { return consumedCombine(layout, a.common.windows[peer], layout.shape.rank); });
  if (!a.common.handle) return;
  HandleView handle(a.common);
  for (int source = 0; source < layout.shape.nranks; ++source) {
    (source == layout.shape.rank ? control->selfCombineRows : control->mappedCombineRows) +=
        static_cast<uint64_t>(*handle.sourceRows(source));
  }
  HandleHead* head = a.common.handleHead();
  if (head->views && head->dispatchEpoch > control->releasedDispatch) finishReading(x, a.common, head->dispatchEpoch);
  head->views = 0;
}

// A combine on every warp of the grid. False after a failure, which the Exec has recorded.
template <class X>
MOE_HD bool directCombine(X& x, const CombineArgs& a) {
  Control* control = a.common.control();
  uint64_t epoch = control->combineEpoch + 1;
  bool ok = true;
  if (x.block() < a.common.sendBlocks) {
    ok = waitConsumed(x, a.common, epoch, consumedCombine);
    if (ok && x.block() == 0) tellHeads(x, a, epoch);
    if (ok && a.common.handle) {
      PartialJob<X> job(x, a, epoch);
      ok = x.reduceRows(job.rows(), job);
    }
  }
  if (!x.barrier(ok)) return false;
  if (x.block() >= a.common.blocks - a.common.receiveBlocks && !receiveCombine(x, a, epoch)) return false;
  if (x.lastBlock(&control->finishedBlocks, a.common.blocks) && x.thread() == 0) {
    x.reset(&control->finishedBlocks);
    finishCombine(x, a, epoch);
  }
  return true;
}

}  // namespace moe

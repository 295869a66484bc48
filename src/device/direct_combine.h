// SPDX-License-Identifier: Apache-2.0
// The direct path's combine. The expert's rank adds a token's local rows and writes one partial row into the token's
// own slot at its source: the address came with the token. The source adds the partial rows of each token.
#pragma once

#include "device/direct_receive.h"
#include "device/epochs.h"
#include "device/row_jobs.h"
#include "device/window_view.h"

namespace moe {

// What the two ways of sending partial rows share: which records are next, where their partial rows go, and the
// signals.
template <class X>
class PartialRows {
 public:
  MOE_PROTOCOL PartialRows(const X& x, const CombineArgs& a, uint64_t epoch)
      : a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        handle_(a.common),
        work_(a.common),
        epoch_(epoch),
        runs_(shape_, int64_t{x.block()} * x.warps() + x.warp(), int64_t{a.common.sendBlocks} * x.warps()) {}

  MOE_PROTOCOL int64_t rows() const {
    int64_t chunks = 0;
    for (int source = 0; source < shape_.nranks; ++source) chunks = larger(chunks, *handle_.sourceChunks(source));
    return runs_.rows(chunks);
  }
  MOE_PROTOCOL int64_t rowBytes() const { return shape_.combineRowBytes; }

  MOE_PROTOCOL void finishedRun(X& x, int64_t i) const {
    int source = runs_.source(i);
    int64_t chunk = runs_.chunk(i);
    if (x.lane() != 0 || chunk >= *handle_.sourceChunks(source)) return;
    if (x.arrive(work_.combineDone(source, chunk), 1) != kRunsPerChunk) return;
    x.reset(work_.combineDone(source, chunk));
    CombineWindow window(layout_, a_.common.windows[source], epoch_);
    x.signal(window.chunkSignal(shape_.rank, chunk), epoch_);
  }

 protected:
  // The records of a run.
  struct Records {
    int source;
    int64_t first, count;
  };
  MOE_PROTOCOL Records recordsOf(int64_t i) const {
    int source = runs_.source(i);
    int64_t chunk = runs_.chunk(i);
    if (chunk >= *handle_.sourceChunks(source)) return {source, 0, 0};
    const int32_t* ends = handle_.chunkEnds(source);
    int64_t first = (chunk > 0 ? ends[chunk - 1] : 0) + runs_.row(i);
    return {source, first, larger(0, smaller(kRunRows, ends[chunk] - first))};
  }

  MOE_PROTOCOL std::byte* partialRow(int source, int64_t slot) const {
    CombineWindow window(layout_, a_.common.windows[source], epoch_);
    return window.row(*handle_.token(source, slot), *handle_.ordinal(source, slot));
  }

  const CombineArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  HandleView handle_;
  Workspace work_;
  uint64_t epoch_;
  SourceRuns runs_;
};

// Expert layouts: the rows of a token's local experts are added, as a reduce job.
template <class X>
class SumJob : public PartialRows<X> {
 public:
  using PartialRows<X>::PartialRows;

  MOE_PROTOCOL int64_t itemBytes() const { return ReduceItem::bytes(this->shape_.topk); }
  MOE_PROTOCOL int64_t mostSources() const { return this->shape_.topk; }
  MOE_PROTOCOL bool wide() const {
    const RowsIn& rows = this->a_.rows;
    return (reinterpret_cast<uintptr_t>(rows.data) | static_cast<uintptr_t>(rows.stride | this->rowBytes())) % 16 == 0;
  }
  MOE_PROTOCOL bool weighted() const { return this->a_.applyWeights; }
  MOE_PROTOCOL int32_t type() const { return this->shape_.combineType; }
  MOE_PROTOCOL int64_t elements() const { return this->shape_.hidden; }

  MOE_PROTOCOL bool beginRun(X& x, int64_t i, RunItems items) const {
    auto records = this->recordsOf(i);
    int32_t topk = this->shape_.topk;
    for (int j = x.lane(); j < kRunRows; j += x.lanes()) {
      bool some = j < records.count;
      *items.as<ReduceItem>(j) = {some ? this->partialRow(records.source, records.first + j) : nullptr, topk};
    }
    auto entries = static_cast<int32_t>(records.count) * topk;
    for (int32_t entry = x.lane(); entry < entries; entry += x.lanes()) {
      int32_t j = entry / topk, k = entry % topk;
      int32_t row = this->handle_.rows(records.source, records.first + j)[k];
      float weight = this->handle_.rowWeights(records.source, records.first + j)[k];
      items.as<ReduceItem>(j)->sources()[k] = {row >= 0 ? this->a_.rows.data + row * this->a_.rows.stride : nullptr,
                                               weight};
    }
    return true;
  }
};

// moeLayoutRank: the caller's row is the partial row; a sum of one.
template <class X>
class CopyJob : public PartialRows<X> {
 public:
  using PartialRows<X>::PartialRows;

  MOE_PROTOCOL int64_t itemBytes() const { return ReduceItem::bytes(1); }
  MOE_PROTOCOL int64_t mostSources() const { return 1; }
  MOE_PROTOCOL bool weighted() const { return false; }
  MOE_PROTOCOL int32_t type() const { return this->shape_.combineType; }
  MOE_PROTOCOL int64_t elements() const { return this->shape_.hidden; }
  MOE_PROTOCOL bool wide() const {
    const RowsIn& rows = this->a_.rows;
    int64_t inWindow = this->rowBytes();
    if (this->a_.inPlace) return inWindow % 16 == 0;
    return (reinterpret_cast<uintptr_t>(rows.data) | static_cast<uintptr_t>(rows.stride | inWindow)) % 16 == 0;
  }

  MOE_PROTOCOL bool beginRun(X& x, int64_t i, RunItems items) const {
    auto records = this->recordsOf(i);
    for (int j = x.lane(); j < kRunRows; j += x.lanes()) {
      bool some = j < records.count;
      int64_t slot = records.first + j;
      auto* item = items.as<ReduceItem>(j);
      item->result = some ? this->partialRow(records.source, slot) : nullptr;
      item->count = 1;
      // A row that the dispatch's output had no room for counts as zero.
      item->sources()[0] = {some ? inputRow(records.source, slot) : nullptr, 1.0f};
    }
    return true;
  }

 private:
  MOE_PROTOCOL const std::byte* inputRow(int source, int64_t slot) const {
    const CombineArgs& a = this->a_;
    if (a.inPlace) {
      DispatchWindow window(this->layout_, a.common.window(), a.common.handleHead()->dispatchEpoch);
      return window.record(source, slot) + this->layout_.record.payload[0];
    }
    int64_t row = *this->handle_.sourceFirst(source) + slot;
    return row < a.common.handleHead()->capacity ? a.rows.data + row * a.rows.stride : nullptr;
  }
};

// This rank's tokens as a reduce job.
template <class X>
class TokenJob {
 public:
  MOE_PROTOCOL TokenJob(const X& x, const CombineArgs& a, uint64_t epoch)
      : a_(a),
        shape_(a.common.layout.shape),
        handle_(a.common),
        window_(a.common.layout, a.common.window(), epoch),
        epoch_(epoch),
        tokens_(a.common.handleHead()->numTokens),
        warp_(receivingWarp(x, a.common)),
        warps_(int64_t{a.common.receiveBlocks} * x.warps()) {}

  MOE_PROTOCOL int64_t rows() const {
    int64_t runs = ceilDiv(tokens_, kRunRows);
    return warp_ < runs ? ceilDiv(runs - warp_, warps_) * kRunRows : 0;
  }

  MOE_PROTOCOL int64_t itemBytes() const { return ReduceItem::bytes(shape_.distinct); }
  MOE_PROTOCOL int64_t mostSources() const { return shape_.distinct; }
  MOE_PROTOCOL bool wide() const {
    const RowsOut& out = a_.output;
    return (reinterpret_cast<uintptr_t>(out.data) | static_cast<uintptr_t>(out.stride | rowBytes())) % 16 == 0;
  }
  MOE_PROTOCOL bool weighted() const { return false; }
  MOE_PROTOCOL int32_t type() const { return shape_.combineType; }
  MOE_PROTOCOL int64_t elements() const { return shape_.hidden; }
  MOE_PROTOCOL int64_t rowBytes() const { return shape_.combineRowBytes; }

  MOE_PROTOCOL bool beginRun(X& x, int64_t i, RunItems items) {
    int64_t first = (warp_ + i / kRunRows * warps_) * kRunRows;
    if (!waitForChunk(x, first / kChunkTokens)) return false;
    for (int j = x.lane(); j < kRunRows; j += x.lanes()) {
      int64_t token = first + j;
      bool some = token < tokens_;
      auto* item = items.as<ReduceItem>(j);
      item->result = some ? a_.output.data + token * a_.output.stride : nullptr;
      item->count = some ? *handle_.rankCount(token) : 0;
      for (int ordinal = 0; ordinal < item->count; ++ordinal) {
        item->sources()[ordinal] = {window_.row(token, ordinal), 1.0f};
      }
    }
    return true;
  }
  MOE_PROTOCOL void finishedRun(X&, int64_t) const {}

 private:
  MOE_PROTOCOL bool waitForChunk(X& x, int64_t chunk) {
    if (chunk == chunk_) return true;
    bool ok = true;
    for (int sender = x.lane(); ok && sender < shape_.nranks; sender += x.lanes()) {
      ok = x.wait(window_.chunkSignal(sender, chunk), epoch_, Awaited::kCombineRows, sender);
    }
    chunk_ = chunk;
    return x.warpAll(ok);
  }

  const CombineArgs& a_;
  const Shape& shape_;
  HandleView handle_;
  CombineWindow window_;
  uint64_t epoch_;
  int64_t tokens_;
  int64_t warp_, warps_;
  int64_t chunk_ = -1;
};

// Tells every source which dispatch this rank combines. One block.
template <class X>
MOE_PROTOCOL void tellHeads(X& x, const CombineArgs& a, uint64_t epoch) {
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
MOE_PROTOCOL inline Refusal checkHeads(const CombineArgs& a, const CombineWindow& window) {
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
MOE_PROTOCOL bool receiveCombine(X& x, const CombineArgs& a, uint64_t epoch) {
  const Shape& shape = a.common.layout.shape;
  CombineWindow window(a.common.layout, a.common.window(), epoch);
  bool ok = true;
  for (int sender = x.thread(); ok && sender < shape.nranks; sender += x.threads()) {
    ok = x.wait(window.headSignal(sender), epoch, Awaited::kCombineHead, sender);
  }
  if (!x.barrier(ok)) return false;
  Refusal refusal = checkHeads(a, window);
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
MOE_PROTOCOL void finishCombine(X& x, const CombineArgs& a, uint64_t epoch) {
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

template <class X>
MOE_PROTOCOL bool sendPartialRows(X& x, const CombineArgs& a, uint64_t epoch) {
  if (a.common.layout.shape.expertLayout()) {
    SumJob<X> job(x, a, epoch);
    return x.reduceRows(job.rows(), job);
  }
  CopyJob<X> job(x, a, epoch);
  return x.reduceRows(job.rows(), job);
}

// A combine on every warp of the grid. False after a failure, which the Exec has recorded.
template <class X>
MOE_PROTOCOL bool directCombine(X& x, const CombineArgs& a) {
  Control* control = a.common.control();
  uint64_t epoch = control->combineEpoch + 1;
  // A refused dispatch was refused on all ranks: all leave its combine out, and nobody is told.
  bool leftOut = a.common.handle && a.common.handleHead()->refusal != 0;
  bool ok = true;
  if (!leftOut && x.block() < a.common.sendBlocks) {
    ok = waitConsumed(x, a.common, epoch, consumedCombine);
    if (ok && x.block() == 0) tellHeads(x, a, epoch);
    if (ok && a.common.handle) ok = sendPartialRows(x, a, epoch);
  }
  if (!x.barrier(ok)) return false;
  bool receives = !leftOut && x.block() >= a.common.blocks - a.common.receiveBlocks;
  if (receives && !receiveCombine(x, a, epoch)) return false;
  if (x.lastBlock(&control->finishedBlocks, a.common.blocks) && x.thread() == 0) {
    x.reset(&control->finishedBlocks);
    x.reset(&control->ticket);
    if (leftOut) {
      const HandleHead& head = *a.common.handleHead();
      *a.common.outcome = {static_cast<int32_t>(head.refusal), static_cast<int32_t>(head.refusedBy), 0, 0};
    } else {
      finishCombine(x, a, epoch);
    }
  }
  return true;
}

}  // namespace moe

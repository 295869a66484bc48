// SPDX-License-Identifier: Apache-2.0
// The direct path, sending half of dispatch: route, tell the counts, send the rows.
//
// Slots come from counting, not from atomics, so rows arrive in token order: chunk c's first slot at a rank is the sum of
// that rank's counts over all earlier chunks. Blocks count their own chunks, publish the histograms, and add up what
// they need of the others'. A block waits only for chunks of blocks with a lower number, so any number of resident
// blocks makes progress.
#pragma once

#include "device/epochs.h"
#include "device/window_view.h"

namespace moe {

MOE_HD inline int64_t chunksOf(int64_t tokens) { return larger(1, ceilDiv(tokens, kChunkTokens)); }

// The routing of this rank's tokens, in chunks: cleaned ids, owners, and the slot of every record. A chunk is the work of
// one warp.
template <class X>
class Router {
 public:
  MOE_HD Router(X& x, const DispatchArgs& a, uint64_t epoch)
      : x_(x), a_(a), shape_(a.common.layout.shape), work_(a.common), handle_(a.common), epoch_(epoch) {}

  // Counts a chunk's records per rank, and rows per expert, and publishes the histogram.
  MOE_HD void count(int64_t chunk) {
    int32_t* histogram = work_.histogram(chunk);
    for (int64_t bin = x_.lane(); bin < shape_.bins(); bin += x_.lanes()) histogram[bin] = 0;
    enter(chunk);
    x_.warpBarrier();
    if (entries_ > 0) {
      readEntries();
      markFirsts();
    }
    for (int64_t i = x_.lane(); i < entries_; i += x_.lanes()) {
      int64_t token = first_ + i / shape_.topk;
      int k = static_cast<int>(i % shape_.topk);
      if (*work_.rankFirsts(token) >> k & 1) x_.addShared(&histogram[work_.owners(token)[k]], 1);
      if (shape_.expertLayout() && *work_.expertFirsts(token) >> k & 1) {
        x_.addShared(&histogram[shape_.nranks + handle_.ids(token)[k]], 1);
      }
    }
    x_.warpBarrier();
    if (x_.lane() == 0) x_.signal(work_.chunkReady(chunk), epoch_);
  }

  // Gives every record of a chunk its slot, and every row its index, in token order. The chunk's bases count up.
  MOE_HD void assign(int64_t chunk) {
    enter(chunk);
    int32_t* nextSlot = work_.chunkBase(chunk);
    int32_t* nextIndex = nextSlot + shape_.nranks;
    for (int64_t from = 0; from < entries_; from += x_.lanes()) {
      int64_t i = from + x_.lane();
      int64_t token = first_ + i / shape_.topk;
      int k = static_cast<int>(i % shape_.topk);
      bool mine = i < entries_;
      int32_t rank = mine && *work_.rankFirsts(token) >> k & 1 ? work_.owners(token)[k] : -1;
      auto sameRank = x_.match(rank);
      if (rank >= 0) work_.slots(token)[k] = nextSlot[rank] + sameRank.below;
      int32_t expert = mine && shape_.expertLayout() && *work_.expertFirsts(token) >> k & 1 ? handle_.ids(token)[k] : -1;
      auto sameExpert = x_.match(expert);
      if (expert >= 0) work_.indexes(token)[k] = nextIndex[expert] + sameExpert.below;
      x_.warpBarrier();
      if (rank >= 0 && sameRank.below == 0) nextSlot[rank] += sameRank.total;
      if (expert >= 0 && sameExpert.below == 0) nextIndex[expert] += sameExpert.total;
      x_.warpBarrier();
    }
  }

 private:
  MOE_HD void enter(int64_t chunk) {
    first_ = chunk * kChunkTokens;
    tokens_ = larger(0, smaller(kChunkTokens, a_.numTokens - first_));
    entries_ = tokens_ * shape_.topk;
  }

  MOE_HD int64_t givenId(int64_t token, int k) const {
    int64_t at = token * a_.topk + k;
    return a_.wideIds ? static_cast<const int64_t*>(a_.ids)[at] : static_cast<const int32_t*>(a_.ids)[at];
  }

  // Takes ids and weights into the handle, unless this is a repeated dispatch, which has them there.
  MOE_HD void readEntries() {
    for (int64_t i = x_.lane(); i < entries_; i += x_.lanes()) {
      int64_t token = first_ + i / shape_.topk;
      int k = static_cast<int>(i % shape_.topk);
      if (a_.ids) {
        int64_t id = k < a_.topk ? givenId(token, k) : -1;
        bool valid = shape_.experts.valid(id);
        handle_.ids(token)[k] = valid ? static_cast<int32_t>(id) : -1;
        handle_.weights(token)[k] = !valid ? 0.0f : a_.weights ? a_.weights[token * a_.topk + k] : 1.0f;
      }
      int32_t id = handle_.ids(token)[k];
      work_.owners(token)[k] = id >= 0 ? shape_.experts.owner(id) : -1;
    }
    x_.warpBarrier();
  }

  // Finds which entries of a token are the first of their rank and of their expert. A lane takes a token.
  MOE_HD void markFirsts() {
    for (int64_t token = first_ + x_.lane(); token < first_ + tokens_; token += x_.lanes()) {
      const int32_t* owners = work_.owners(token);
      const int32_t* ids = handle_.ids(token);
      uint64_t rankFirsts = 0, expertFirsts = 0;
      int32_t ranks = 0;
      for (int k = 0; k < shape_.topk; ++k) {
        if (owners[k] < 0) continue;
        bool newRank = true, newExpert = true;
        for (int before = 0; before < k; ++before) {
          newRank = newRank && owners[before] != owners[k];
          newExpert = newExpert && ids[before] != ids[k];
        }
        rankFirsts |= uint64_t{newRank} << k;
        expertFirsts |= uint64_t{newExpert} << k;
        ranks += newRank;
      }
      *work_.rankFirsts(token) = rankFirsts;
      *work_.expertFirsts(token) = expertFirsts;
      *handle_.rankCount(token) = ranks;
    }
    x_.warpBarrier();
  }

  X& x_;
  const DispatchArgs& a_;
  const Shape& shape_;
  Workspace work_;
  HandleView handle_;
  uint64_t epoch_;
  int64_t first_ = 0, tokens_ = 0, entries_ = 0;
};

// Adds up the histograms of chunks 0 .. limit-1 and keeps the sums before each of this block's chunks. The block with
// the last chunk also writes all counts into the peers' windows. All threads of the block; a thread takes a bin.
template <class X>
MOE_HD void sumHistograms(X& x, const DispatchArgs& a, int64_t limit, bool last, uint64_t epoch) {
  const Layout& layout = a.common.layout;
  const Shape& shape = layout.shape;
  Workspace work(a.common);
  for (int64_t bin = x.thread(); bin < shape.bins(); bin += x.threads()) {
    bool tells = last && bin < shape.nranks;
    DispatchWindow window(layout, a.common.windows[tells ? bin : shape.rank], epoch);
    int32_t* ends = tells ? window.chunkEnds(shape.rank) : nullptr;
    int32_t sum = 0;
    int64_t mine = x.block();
    for (int64_t chunk = 0; chunk < limit; ++chunk) {
      if (chunk == mine) {
        work.chunkBase(chunk)[bin] = sum;
        mine += a.common.sendBlocks;
      }
      sum += work.histogram(chunk)[bin];
      if (ends) ends[chunk] = sum;
    }
    if (tells) {
      *window.counts(shape.rank) = {a.numTokens, sum, static_cast<int32_t>(limit), a.common.refusal, 0};
      *work.sentRows(static_cast<int>(bin)) = sum;
    } else if (last) {
      auto expert = static_cast<int32_t>(bin - shape.nranks);
      int32_t owner = shape.experts.owner(expert);
      DispatchWindow theirs(layout, a.common.windows[owner], epoch);
      theirs.expertCounts(shape.rank)[expert - shape.experts.first(owner)] = sum;
    }
  }
}

// The routing of this block's chunks: counted, summed and assigned; the counts leave. All warps; false after a failure.
template <class X>
MOE_HD bool routeTokens(X& x, const DispatchArgs& a, uint64_t epoch) {
  const Shape& shape = a.common.layout.shape;
  Router<X> router(x, a, epoch);
  int64_t chunks = chunksOf(a.numTokens);
  int64_t step = a.common.sendBlocks;
  int64_t firstOfWarp = x.block() + x.warp() * step;
  for (int64_t chunk = firstOfWarp; chunk < chunks; chunk += x.warps() * step) router.count(chunk);
  if (!waitConsumed(x, a.common, epoch, consumedDispatch)) return false;
  if (x.block() >= chunks) return true;
  int64_t limit = x.block() + (chunks - 1 - x.block()) / step * step + 1;
  Workspace work(a.common);
  bool ok = true;
  for (int64_t chunk = x.thread(); ok && chunk < limit; chunk += x.threads()) {
    ok = x.wait(work.chunkReady(chunk), epoch, Awaited::kHistogram, shape.rank);
  }
  if (!x.barrier(ok)) return false;
  sumHistograms(x, a, limit, limit == chunks, epoch);
  x.barrier(true);
  if (limit == chunks && x.thread() == 0) {
    x.signalMany(shape.nranks, epoch, [&](int peer) {
      return DispatchWindow(a.common.layout, a.common.windows[peer], epoch).countSignal(shape.rank);
    });
  }
  for (int64_t chunk = firstOfWarp; chunk < chunks; chunk += x.warps() * step) router.assign(chunk);
  return x.barrier(true);
}

// The rows of this block's chunks, as a stream job. Run q of the block is run q % kRunsPerChunk of its chunk
// q / kRunsPerChunk; a warp takes every warps()-th run.
template <class X>
class SendJob {
 public:
  MOE_HD SendJob(const X& x, const DispatchArgs& a, uint64_t epoch)
      : a_(a), layout_(a.common.layout), work_(a.common), handle_(a.common), epoch_(epoch), block_(x.block()),
        warp_(x.warp()), warps_(x.warps()) {}

  // How many rows this warp goes through, those that nobody wants included.
  MOE_HD int64_t rows() const {
    int64_t chunks = chunksOf(a_.numTokens);
    int64_t runs = block_ < chunks ? ceilDiv(chunks - block_, a_.common.sendBlocks) * kRunsPerChunk : 0;
    return warp_ < runs ? ceilDiv(runs - warp_, warps_) * kRunRows : 0;
  }

  MOE_HD RowStep begin(X&, int64_t i) {
    int64_t token = tokenOf(i);
    return token < a_.numTokens && *handle_.rankCount(token) > 0 ? RowStep::kCarry : RowStep::kSkip;
  }

  template <class Row>
  MOE_HD void gather(int64_t i, Row& row) const {
    int64_t token = tokenOf(i);
    for (int payload = 0; payload < layout_.shape.payloads; ++payload) {
      const RowsIn& in = a_.inputs[payload];
      row.load(layout_.record.payload[payload], in.data + token * in.stride, layout_.shape.payloadBytes[payload]);
    }
  }

  MOE_HD int64_t fillOffset() const { return layout_.record.head; }
  MOE_HD int64_t fillBytes() const { return layout_.record.end - layout_.record.head; }
  MOE_HD void fill(X& x, int64_t i, std::byte* to) const {
    int64_t token = tokenOf(i);
    auto* ids = reinterpret_cast<int32_t*>(to + (layout_.record.ids - layout_.record.head));
    auto* weights = reinterpret_cast<float*>(to + (layout_.record.weights - layout_.record.head));
    auto* indexes = reinterpret_cast<int32_t*>(to + (layout_.record.indexes - layout_.record.head));
    if (x.lane() == 0) {
      *reinterpret_cast<RecordHead*>(to) = {static_cast<int32_t>(token), 0, *work_.rankFirsts(token),
                                            *work_.expertFirsts(token), 0};
    }
    for (int k = x.lane(); k < layout_.shape.topk; k += x.lanes()) {
      ids[k] = handle_.ids(token)[k];
      weights[k] = handle_.weights(token)[k];
      if (layout_.shape.expertLayout()) indexes[k] = work_.indexes(token)[k];
    }
  }

  template <class Row>
  MOE_HD void scatter(int64_t i, const Row& row) const {
    int64_t token = tokenOf(i);
    uint64_t firsts = *work_.rankFirsts(token);
    for (int k = 0; firsts >> k; ++k) {
      if (!(firsts >> k & 1)) continue;
      DispatchWindow window(layout_, a_.common.windows[work_.owners(token)[k]], epoch_);
      row.store(window.record(layout_.shape.rank, work_.slots(token)[k]), 0, layout_.record.end);
    }
  }

  MOE_HD void finished(X& x, int64_t i) const {
    if (i % kRunRows != kRunRows - 1 || x.lane() != 0) return;
    int64_t chunk = tokenOf(i) / kChunkTokens;
    if (x.arrive(work_.sendDone(chunk), 1) != kRunsPerChunk) return;
    x.reset(work_.sendDone(chunk));
    x.signalMany(layout_.shape.nranks, epoch_, [&](int peer) {
      return DispatchWindow(layout_, a_.common.windows[peer], epoch_).chunkSignal(layout_.shape.rank, chunk);
    });
  }

 private:
  MOE_HD int64_t tokenOf(int64_t i) const {
    int64_t run = warp_ + i / kRunRows * warps_;
    int64_t chunk = block_ + run / kRunsPerChunk * a_.common.sendBlocks;
    return chunk * kChunkTokens + run % kRunsPerChunk * kRunRows + i % kRunRows;
  }

  const DispatchArgs& a_;
  const Layout& layout_;
  Workspace work_;
  HandleView handle_;
  uint64_t epoch_;
  int64_t block_, warp_, warps_;
};

// The sending half of a dispatch. All warps of blocks 0 .. sendBlocks-1; false after a failure.
template <class X>
MOE_HD bool sendDispatch(X& x, const DispatchArgs& a, uint64_t epoch) {
  auto buffers = static_cast<uint64_t>(a.common.layout.shape.buffers);
  // Views that have been out for `buffers` epochs end here: the stream has passed their readers.
  if (x.block() == 0 && x.thread() == 0 && epoch > buffers &&
      a.common.control()->releasedDispatch < epoch - buffers) {
    releaseDispatch(x, a.common, epoch - buffers);
  }
  if (!routeTokens(x, a, epoch)) return false;
  SendJob<X> job(x, a, epoch);
  return x.streamRows(job.rows(), job);
}

}  // namespace moe

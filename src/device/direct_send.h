// SPDX-License-Identifier: Apache-2.0
// The direct path, sending half of dispatch: route, tell the counts, send the rows.
//
// Slots come from counting, not from atomics, so rows arrive in token order: chunk c's first slot at a rank is the sum
// of that rank's counts over all earlier chunks. Blocks count their own chunks, publish the histograms, and add up what
// they need of the others'. A block waits only for chunks of blocks with a lower number, so any number of resident
// blocks makes progress.
#pragma once

#include "device/epochs.h"
#include "device/row_jobs.h"
#include "device/window_view.h"

namespace moe {

MOE_PROTOCOL inline int64_t chunksOf(int64_t tokens) { return larger(1, ceilDiv(tokens, kChunkTokens)); }

// The routing of this rank's tokens, in chunks: cleaned ids, and the slot of every record. A chunk is the work of one
// warp, and lies in the Exec's scratch memory where that is large enough.
template <class X>
class Router {
 public:
  MOE_PROTOCOL Router(X& x, const DispatchArgs& a, uint64_t epoch)
      : x_(x),
        a_(a),
        shape_(a.common.layout.shape),
        work_(a.common),
        handle_(a.common),
        epoch_(epoch),
        scratch_(x.scratch(routingBytes(shape_))) {}

  // Counts a chunk's records per rank, and rows per expert, and publishes the histogram.
  MOE_PROTOCOL void count(int64_t chunk) {
    enter(chunk);
    for (int64_t bin = x_.lane(); bin < shape_.bins(); bin += x_.lanes()) next_[bin] = 0;
    x_.warpBarrier();
    for (int32_t i = x_.lane(); i < entries_; i += x_.lanes()) {
      if (flags_[i] & kRankFirst) x_.addShared(&next_[owners_[i]], 1);
      if (shape_.expertLayout() && flags_[i] & kExpertFirst) x_.addShared(&next_[shape_.nranks + ids_[i]], 1);
    }
    x_.warpBarrier();
    int32_t* histogram = work_.histogram(chunk);
    for (int64_t bin = x_.lane(); bin < shape_.bins(); bin += x_.lanes()) histogram[bin] = next_[bin];
    x_.warpBarrier();
    if (x_.lane() == 0) x_.signalLocal(work_.chunkReady(chunk), epoch_);
  }

  // Gives every record of a chunk its slot, and every row its index, in token order.
  MOE_PROTOCOL void assign(int64_t chunk) {
    if (loaded_ != chunk) enter(chunk);
    const int32_t* bases = work_.chunkBase(chunk);
    for (int64_t bin = x_.lane(); bin < shape_.bins(); bin += x_.lanes()) next_[bin] = bases[bin];
    x_.warpBarrier();
    int32_t* nextIndex = next_ + shape_.nranks;
    int64_t firstEntry = first_ * shape_.topk;
    for (int32_t from = 0; from < entries_; from += x_.lanes()) {
      int32_t i = from + x_.lane();
      bool mine = i < entries_;
      int32_t rank = mine && flags_[i] & kRankFirst ? owners_[i] : -1;
      auto sameRank = x_.match(rank);
      int32_t slot = rank >= 0 ? next_[rank] + sameRank.below : -1;
      int32_t expert = mine && shape_.expertLayout() && flags_[i] & kExpertFirst ? ids_[i] : -1;
      auto sameExpert = x_.match(expert);
      int32_t index = expert >= 0 ? nextIndex[expert] + sameExpert.below : -1;
      if (mine) work_.targets(0)[firstEntry + i] = rank >= 0 ? int64_t{rank} << 32 | slot : -1;
      if (mine && shape_.expertLayout()) work_.indexes(0)[firstEntry + i] = index;
      x_.warpBarrier();
      if (rank >= 0 && sameRank.below == 0) next_[rank] += sameRank.total;
      if (expert >= 0 && sameExpert.below == 0) nextIndex[expert] += sameExpert.total;
      x_.warpBarrier();
    }
  }

 private:
  static constexpr uint8_t kRankFirst = 1;    // the token's first entry of its rank
  static constexpr uint8_t kExpertFirst = 2;  // and of its expert
  static constexpr int kBatch = 8;            // loads in flight per lane

  MOE_PROTOCOL void enter(int64_t chunk) {
    std::byte* memory = scratch_ ? scratch_ : work_.routing(chunk);
    int64_t most = kChunkTokens * shape_.topk;
    ids_ = reinterpret_cast<int32_t*>(memory);
    owners_ = ids_ + most;
    next_ = owners_ + most;
    flags_ = reinterpret_cast<uint8_t*>(next_ + shape_.bins());
    first_ = chunk * kChunkTokens;
    tokens_ = static_cast<int32_t>(larger(0, smaller(kChunkTokens, a_.numTokens - first_)));
    entries_ = tokens_ * shape_.topk;
    loaded_ = chunk;
    for (int32_t from = 0; from < entries_; from += kBatch * x_.lanes()) readEntries(from);
    x_.warpBarrier();
    for (int32_t i = x_.lane(); i < entries_; i += x_.lanes()) flags_[i] = findFirsts(i);
    x_.warpBarrier();
    for (int32_t token = x_.lane(); token < tokens_; token += x_.lanes()) {
      int32_t ranks = 0;
      for (int k = 0; k < shape_.topk; ++k) ranks += flags_[token * shape_.topk + k] & kRankFirst;
      *handle_.rankCount(first_ + token) = ranks;
    }
  }

  // The id of entry `i` of the chunk as the caller gave it; -1 past the caller's topk.
  MOE_PROTOCOL int64_t givenId(int32_t i, int32_t k) const {
    if (k >= a_.topk) return -1;
    int64_t at = (first_ + i / shape_.topk) * a_.topk + k;
    return a_.wideIds ? static_cast<const int64_t*>(a_.ids)[at] : static_cast<const int32_t*>(a_.ids)[at];
  }
  MOE_PROTOCOL float givenWeight(int32_t i, int32_t k) const {
    if (!a_.weights || k >= a_.topk) return 1.0f;
    return a_.weights[(first_ + i / shape_.topk) * a_.topk + k];
  }

  // Takes a batch of ids and weights into the handle, unless this is a repeated dispatch, which has them there.
  MOE_PROTOCOL void readEntries(int32_t from) {
    int64_t id[kBatch];
    float weight[kBatch];
    MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
      int32_t i = from + b * x_.lanes() + x_.lane();
      bool mine = i < entries_;
      int32_t k = i % shape_.topk;
      id[b] = !mine ? -1 : a_.ids ? givenId(i, k) : handle_.ids(first_)[i];
      weight[b] = mine ? givenWeight(i, k) : 0.0f;
    }
    MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
      int32_t i = from + b * x_.lanes() + x_.lane();
      if (i >= entries_) continue;
      bool valid = shape_.experts.valid(id[b]);
      ids_[i] = valid ? static_cast<int32_t>(id[b]) : -1;
      owners_[i] = valid ? shape_.experts.owner(ids_[i]) : -1;
      if (!a_.ids) continue;
      handle_.ids(first_)[i] = ids_[i];
      handle_.weights(first_)[i] = valid ? weight[b] : 0.0f;
    }
  }

  MOE_PROTOCOL uint8_t findFirsts(int32_t i) const {
    int32_t owner = owners_[i], id = ids_[i];
    if (owner < 0) return 0;
    bool rankFirst = true, expertFirst = true;
    for (int32_t before = i - i % shape_.topk; before < i; ++before) {
      rankFirst = rankFirst && owners_[before] != owner;
      expertFirst = expertFirst && ids_[before] != id;
    }
    return static_cast<uint8_t>((rankFirst ? kRankFirst : 0) | (expertFirst ? kExpertFirst : 0));
  }

  X& x_;
  const DispatchArgs& a_;
  const Shape& shape_;
  Workspace work_;
  HandleView handle_;
  uint64_t epoch_;
  std::byte* scratch_;
  int64_t loaded_ = -1, first_ = 0;
  int32_t tokens_ = 0, entries_ = 0;
  int32_t* ids_ = nullptr;
  int32_t* owners_ = nullptr;
  int32_t* next_ = nullptr;
  uint8_t* flags_ = nullptr;
};

// Adds up the histograms of chunks 0 .. limit-1: keeps the sums before each of this block's chunks, and in the block
// with the last chunk writes all counts into the peers' windows.
template <class X>
class HistogramSums {
 public:
  MOE_PROTOCOL HistogramSums(const X& x, const DispatchArgs& a, int64_t limit, bool last, uint64_t epoch)
      : a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        work_(a.common),
        block_(x.block()),
        limit_(limit),
        last_(last),
        epoch_(epoch) {}

  // All warps of the block. Bins that are few take a warp each, whose lanes share the chunks; many take a thread each.
  MOE_PROTOCOL void run(X& x) {
    int64_t bins = shape_.bins();
    if (bins <= 2 * x.warps()) {
      for (int64_t bin = x.warp(); bin < bins; bin += x.warps()) byWarp(x, bin);
    } else {
      for (int64_t bin = x.thread(); bin < bins; bin += x.threads()) byThread(bin);
    }
  }

 private:
  static constexpr int kBatch = 8;  // loads in flight per thread

  MOE_PROTOCOL void byWarp(X& x, int64_t bin) const {
    int32_t sum = 0;
    for (int64_t from = 0; from < limit_; from += x.lanes()) {
      int64_t chunk = from + x.lane();
      int32_t count = chunk < limit_ ? work_.histogram(chunk)[bin] : 0;
      auto scanned = x.scan(count);
      if (chunk < limit_) note(bin, chunk, sum + scanned.before, count);
      sum += scanned.total;
    }
    if (x.lane() == 0) tell(bin, sum);
  }

  MOE_PROTOCOL void byThread(int64_t bin) const {
    int32_t sum = 0;
    for (int64_t from = 0; from < limit_; from += kBatch) {
      int32_t counts[kBatch];
      MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
        counts[b] = from + b < limit_ ? work_.histogram(from + b)[bin] : 0;
      }
      MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
        if (from + b < limit_) note(bin, from + b, sum, counts[b]);
        sum += counts[b];
      }
    }
    tell(bin, sum);
  }

  MOE_PROTOCOL void note(int64_t bin, int64_t chunk, int32_t before, int32_t count) const {
    if (chunk % a_.common.sendBlocks == block_) work_.chunkBase(chunk)[bin] = before;
    if (!last_ || bin >= shape_.nranks) return;
    DispatchWindow window(layout_, a_.common.windows[bin], epoch_);
    window.chunkEnds(shape_.rank)[chunk] = before + count;
  }

  MOE_PROTOCOL void tell(int64_t bin, int32_t sum) const {
    if (!last_) return;
    if (bin < shape_.nranks) {
      DispatchWindow window(layout_, a_.common.windows[bin], epoch_);
      *window.counts(shape_.rank) = {a_.numTokens, sum, static_cast<int32_t>(limit_), a_.common.refusal, 0};
      *work_.sentRows(static_cast<int>(bin)) = sum;
      return;
    }
    auto expert = static_cast<int32_t>(bin - shape_.nranks);
    int32_t owner = shape_.experts.owner(expert);
    DispatchWindow window(layout_, a_.common.windows[owner], epoch_);
    window.expertCounts(shape_.rank)[expert - shape_.experts.first(owner)] = sum;
  }

  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  Workspace work_;
  int64_t block_, limit_;
  bool last_;
  uint64_t epoch_;
};

// The routing of this block's chunks: counted, summed and assigned; the counts leave. All warps; false after a failure.
template <class X>
MOE_PROTOCOL bool routeTokens(X& x, const DispatchArgs& a, uint64_t epoch) {
  const Shape& shape = a.common.layout.shape;
  Router<X> router(x, a, epoch);
  int64_t chunks = chunksOf(a.numTokens);
  int64_t step = a.common.sendBlocks;
  int64_t firstOfWarp = x.block() + x.warp() * step;
  for (int64_t chunk = firstOfWarp; chunk < chunks; chunk += x.warps() * step) router.count(chunk);
  if (!waitConsumed(x, a.common, epoch, consumedDispatch)) return false;
  if (x.block() >= chunks) {
    bool routed = x.wait(Workspace(a.common).chunkRouted(x.block() % chunks), epoch, Awaited::kHistogram, shape.rank);
    return x.barrier(routed);
  }
  int64_t limit = x.block() + (chunks - 1 - x.block()) / step * step + 1;
  Workspace work(a.common);
  bool ok = true;
  for (int64_t chunk = x.thread(); ok && chunk < limit; chunk += x.threads()) {
    ok = x.wait(work.chunkReady(chunk), epoch, Awaited::kHistogram, shape.rank);
  }
  if (!x.barrier(ok)) return false;
  HistogramSums<X>(x, a, limit, limit == chunks, epoch).run(x);
  x.barrier(true);
  if (limit == chunks && x.thread() == 0) {
    x.signalMany(shape.nranks, epoch, [&](int peer) {
      return DispatchWindow(a.common.layout, a.common.windows[peer], epoch).countSignal(shape.rank);
    });
  }
  for (int64_t chunk = firstOfWarp; chunk < chunks; chunk += x.warps() * step) {
    router.assign(chunk);
    x.warpBarrier();
    if (x.lane() == 0) x.signalLocal(work.chunkRouted(chunk), epoch);
  }
  return x.barrier(true);
}

// Which chunks a sending block deals with. A block routes every sendBlocks-th chunk, from its own number on. Where
// there are more blocks than chunks, those without a chunk help to send the chunk (their number % chunks) of another.
struct ChunkShare {
  int64_t chunks, block, blocks;

  MOE_PROTOCOL ChunkShare(const DispatchArgs& a, int64_t ofBlock)
      : chunks(chunksOf(a.numTokens)), block(ofBlock), blocks(a.common.sendBlocks) {}

  MOE_PROTOCOL int64_t count() const { return block >= chunks ? 1 : ceilDiv(chunks - block, blocks); }
  MOE_PROTOCOL int64_t chunk(int64_t nth) const { return block % chunks + nth * blocks; }
  // Blocks that send this block's chunks, and which of them this one is.
  MOE_PROTOCOL int64_t senders() const { return chunks >= blocks ? 1 : (blocks - 1 - block % chunks) / chunks + 1; }
  MOE_PROTOCOL int64_t sender() const { return chunks >= blocks ? 0 : block / chunks; }
};

// The rows of this block's chunks, as a stream job. Run q is run q % kRunsPerChunk of chunk q / kRunsPerChunk; the
// warps of all senders take turns.
template <class X>
class SendJob {
 public:
  MOE_PROTOCOL SendJob(const X& x, const DispatchArgs& a, uint64_t epoch)
      : a_(a),
        layout_(a.common.layout),
        work_(a.common),
        handle_(a.common),
        epoch_(epoch),
        share_(a, x.block()),
        warp_(share_.sender() * x.warps() + x.warp()),
        warps_(share_.senders() * x.warps()) {}

  // How many rows this warp goes through, those that nobody wants included.
  MOE_PROTOCOL int64_t rows() const {
    int64_t runs = share_.count() * kRunsPerChunk;
    return warp_ < runs ? ceilDiv(runs - warp_, warps_) * kRunRows : 0;
  }

  MOE_PROTOCOL int64_t rowBytes() const { return layout_.record.end; }
  MOE_PROTOCOL int64_t itemBytes() const { return itemBytes(layout_); }
  MOE_HD static int64_t itemBytes(const Layout& layout) {
    return headOffset(layout.shape) + roundUp(layout.record.end - layout.record.head, 16);
  }

  // All that the run's records need besides their payloads is read at once, lanes in parallel.
  MOE_PROTOCOL bool beginRun(X& x, int64_t i, RunItems items) const {
    const Shape& shape = layout_.shape;
    int64_t first = firstToken(i);
    for (int j = x.lane(); j < kRunRows; j += x.lanes()) {
      *items.as<Item>(j) = {first + j, 0, 0};
      *head<RecordHead>(items[j], layout_.record.head) = {static_cast<int32_t>(first + j), 0, 0};
    }
    x.warpBarrier();
    auto rows = static_cast<int32_t>(larger(0, smaller(kRunRows, a_.numTokens - first)));
    for (int32_t entry = x.lane(); entry < rows * shape.topk; entry += x.lanes()) {
      int64_t packed = work_.targets(first)[entry];
      int32_t id = handle_.ids(first)[entry];
      float weight = handle_.weights(first)[entry];
      int32_t index = shape.expertLayout() ? work_.indexes(first)[entry] : 0;
      std::byte* item = items[entry / shape.topk];
      int32_t k = entry % shape.topk;
      destinations(item)[k] = packed < 0 ? nullptr : recordAt(static_cast<int>(packed >> 32), packed & 0xffffffff);
      head<int32_t>(item, layout_.record.ids)[k] = id;
      head<float>(item, layout_.record.weights)[k] = weight;
      if (shape.expertLayout()) head<int32_t>(item, layout_.record.indexes)[k] = index;
    }
    x.warpBarrier();
    for (int j = x.lane(); j < rows; j += x.lanes()) gatherDestinations(items[j]);
    return true;
  }

  MOE_PROTOCOL bool carries(const std::byte* item) const { return reinterpret_cast<const Item*>(item)->count > 0; }

  template <class Row>
  MOE_PROTOCOL void gather(const std::byte* item, Row& row) const {
    int64_t token = reinterpret_cast<const Item*>(item)->token;
    for (int payload = 0; payload < layout_.shape.payloads; ++payload) {
      const RowsIn& in = a_.inputs[payload];
      row.load(layout_.record.payload[payload], in.data + token * in.stride, layout_.shape.payloadBytes[payload]);
    }
  }

  MOE_PROTOCOL int64_t composedOffset() const { return layout_.record.head; }
  MOE_PROTOCOL int64_t composedBytes() const { return layout_.record.end - layout_.record.head; }
  MOE_PROTOCOL const std::byte* composed(const std::byte* item) const { return item + headOffset(layout_.shape); }

  template <class Row>
  MOE_PROTOCOL void scatter(const std::byte* item, Row& row) const {
    int32_t count = reinterpret_cast<const Item*>(item)->count;
    auto bytes = layout_.record.end;
    for (int32_t d = 0; d < count; ++d) row.store(destinations(item)[d], 0, bytes);
  }

  MOE_PROTOCOL void finishedRun(X& x, int64_t i) const {
    if (x.lane() != 0) return;
    int64_t chunk = firstToken(i) / kChunkTokens;
    if (x.arrive(work_.sendDone(chunk), 1) != kRunsPerChunk) return;
    x.reset(work_.sendDone(chunk));
    x.signalMany(layout_.shape.nranks, epoch_, [&](int peer) {
      return DispatchWindow(layout_, a_.common.windows[peer], epoch_).chunkSignal(layout_.shape.rank, chunk);
    });
  }

 private:
  // `count` destinations follow; then the record's head as it travels.
  struct Item {
    int64_t token;
    int32_t count;
    int32_t reserved;
  };
  MOE_HD static int64_t headOffset(const Shape& shape) {
    return roundUp(static_cast<int64_t>(sizeof(Item)) + shape.topk * static_cast<int64_t>(sizeof(std::byte*)), 16);
  }
  MOE_PROTOCOL static std::byte** destinations(std::byte* item) {
    return reinterpret_cast<std::byte**>(item + sizeof(Item));
  }
  MOE_PROTOCOL static std::byte* const* destinations(const std::byte* item) {
    return reinterpret_cast<std::byte* const*>(item + sizeof(Item));
  }
  MOE_PROTOCOL std::byte* recordAt(int rank, int64_t slot) const {
    return DispatchWindow(layout_, a_.common.windows[rank], epoch_).record(layout_.shape.rank, slot);
  }
  // Moves a token's destinations, one for each entry that is the first of its rank, to the front. One lane.
  MOE_PROTOCOL void gatherDestinations(std::byte* item) const {
    uint64_t firsts = 0;
    int32_t count = 0;
    for (int32_t k = 0; k < layout_.shape.topk; ++k) {
      std::byte* to = destinations(item)[k];
      if (!to) continue;
      firsts |= uint64_t{1} << k;
      destinations(item)[count++] = to;
    }
    reinterpret_cast<Item*>(item)->count = count;
    head<RecordHead>(item, layout_.record.head)->rankFirsts = firsts;
  }
  // The part of the head that lies at `offset` of a record.
  template <class T>
  MOE_PROTOCOL T* head(std::byte* item, int64_t offset) const {
    return reinterpret_cast<T*>(item + headOffset(layout_.shape) + (offset - layout_.record.head));
  }

  MOE_PROTOCOL int64_t firstToken(int64_t i) const {
    int64_t run = warp_ + i / kRunRows * warps_;
    int64_t chunk = share_.chunk(run / kRunsPerChunk);
    return chunk * kChunkTokens + run % kRunsPerChunk * kRunRows;
  }

  const DispatchArgs& a_;
  const Layout& layout_;
  Workspace work_;
  HandleView handle_;
  uint64_t epoch_;
  ChunkShare share_;
  int64_t warp_, warps_;
};

// The sending half of a dispatch. All warps of blocks 0 .. sendBlocks-1; false after a failure.
template <class X>
MOE_PROTOCOL bool sendDispatch(X& x, const DispatchArgs& a, uint64_t epoch) {
  auto buffers = static_cast<uint64_t>(a.common.layout.shape.buffers);
  // Views that have been out for `buffers` epochs end here: the stream has passed their readers.
  if (x.block() == 0 && x.thread() == 0 && epoch > buffers && a.common.control()->releasedDispatch < epoch - buffers) {
    releaseDispatch(x, a.common, epoch - buffers);
  }
  if (!routeTokens(x, a, epoch)) return false;
  SendJob<X> job(x, a, epoch);
  return x.streamRows(job.rows(), job);
}

}  // namespace moe

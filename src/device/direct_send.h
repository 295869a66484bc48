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

// Where one copy of a token goes.
struct Target {
  int32_t slot;
  int32_t rank;
};

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
    for (int64_t i = x_.lane(); i < entries_; i += x_.lanes()) {
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
    for (int64_t from = 0; from < entries_; from += x_.lanes()) {
      int64_t i = from + x_.lane();
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
    tokens_ = larger(0, smaller(kChunkTokens, a_.numTokens - first_));
    entries_ = tokens_ * shape_.topk;
    loaded_ = chunk;
    for (int64_t from = 0; from < entries_; from += kBatch * x_.lanes()) readEntries(from);
    x_.warpBarrier();
    for (int64_t i = x_.lane(); i < entries_; i += x_.lanes()) flags_[i] = findFirsts(i);
    x_.warpBarrier();
    for (int64_t token = x_.lane(); token < tokens_; token += x_.lanes()) {
      int32_t ranks = 0;
      for (int k = 0; k < shape_.topk; ++k) ranks += flags_[token * shape_.topk + k] & kRankFirst;
      *handle_.rankCount(first_ + token) = ranks;
    }
  }

  MOE_PROTOCOL int64_t givenId(int64_t i) const {
    int64_t k = i % shape_.topk;
    if (k >= a_.topk) return -1;
    int64_t at = (first_ + i / shape_.topk) * a_.topk + k;
    return a_.wideIds ? static_cast<const int64_t*>(a_.ids)[at] : static_cast<const int32_t*>(a_.ids)[at];
  }

  // Takes a batch of ids and weights into the handle, unless this is a repeated dispatch, which has them there.
  MOE_PROTOCOL void readEntries(int64_t from) {
    int64_t id[kBatch];
    float weight[kBatch];
    for (int b = 0; b < kBatch; ++b) {
      int64_t i = from + b * x_.lanes() + x_.lane();
      bool mine = i < entries_;
      id[b] = !mine ? -1 : a_.ids ? givenId(i) : handle_.ids(first_)[i];
      bool given = mine && a_.weights && i % shape_.topk < a_.topk;
      weight[b] = given ? a_.weights[(first_ + i / shape_.topk) * a_.topk + i % shape_.topk] : 1.0f;
    }
    for (int b = 0; b < kBatch; ++b) {
      int64_t i = from + b * x_.lanes() + x_.lane();
      if (i >= entries_) continue;
      bool valid = shape_.experts.valid(id[b]);
      ids_[i] = valid ? static_cast<int32_t>(id[b]) : -1;
      owners_[i] = valid ? shape_.experts.owner(ids_[i]) : -1;
      if (!a_.ids) continue;
      handle_.ids(first_)[i] = ids_[i];
      handle_.weights(first_)[i] = valid ? weight[b] : 0.0f;
    }
  }

  MOE_PROTOCOL uint8_t findFirsts(int64_t i) const {
    if (owners_[i] < 0) return 0;
    uint8_t flags = kRankFirst | kExpertFirst;
    for (int64_t before = i / shape_.topk * shape_.topk; before < i; ++before) {
      if (owners_[before] == owners_[i]) flags &= static_cast<uint8_t>(~kRankFirst);
      if (ids_[before] == ids_[i]) flags &= static_cast<uint8_t>(~kExpertFirst);
    }
    return flags;
  }

  X& x_;
  const DispatchArgs& a_;
  const Shape& shape_;
  Workspace work_;
  HandleView handle_;
  uint64_t epoch_;
  std::byte* scratch_;
  int64_t loaded_ = -1, first_ = 0, tokens_ = 0, entries_ = 0;
  int32_t* ids_ = nullptr;
  int32_t* owners_ = nullptr;
  int32_t* next_ = nullptr;
  uint8_t* flags_ = nullptr;
};

// Adds up the histograms of chunks 0 .. limit-1 and keeps the sums before each of this block's chunks. The block with
// the last chunk also writes all counts into the peers' windows. All threads of the block; a thread takes a bin.
template <class X>
MOE_PROTOCOL void sumHistograms(X& x, const DispatchArgs& a, int64_t limit, bool last, uint64_t epoch) {
  const Layout& layout = a.common.layout;
  const Shape& shape = layout.shape;
  Workspace work(a.common);
  constexpr int kBatch = 8;  // loads in flight
  for (int64_t bin = x.thread(); bin < shape.bins(); bin += x.threads()) {
    bool tells = last && bin < shape.nranks;
    DispatchWindow window(layout, a.common.windows[tells ? bin : shape.rank], epoch);
    int32_t* ends = tells ? window.chunkEnds(shape.rank) : nullptr;
    int32_t sum = 0;
    int64_t mine = x.block();
    for (int64_t from = 0; from < limit; from += kBatch) {
      int32_t counts[kBatch];
      for (int b = 0; b < kBatch; ++b) counts[b] = from + b < limit ? work.histogram(from + b)[bin] : 0;
      for (int b = 0; b < kBatch && from + b < limit; ++b) {
        if (from + b == mine) {
          work.chunkBase(mine)[bin] = sum;
          mine += a.common.sendBlocks;
        }
        sum += counts[b];
        if (ends) ends[from + b] = sum;
      }
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
  sumHistograms(x, a, limit, limit == chunks, epoch);
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
    int64_t rows = larger(0, smaller(kRunRows, a_.numTokens - first));
    for (int64_t entry = x.lane(); entry < rows * shape.topk; entry += x.lanes()) {
      int64_t packed = work_.targets(first)[entry];
      int32_t id = handle_.ids(first)[entry];
      float weight = handle_.weights(first)[entry];
      int32_t index = shape.expertLayout() ? work_.indexes(first)[entry] : 0;
      std::byte* item = items[entry / shape.topk];
      int64_t k = entry % shape.topk;
      targets(item)[k] = {static_cast<int32_t>(packed), static_cast<int32_t>(packed >> 32)};
      head<int32_t>(item, layout_.record.ids)[k] = id;
      head<float>(item, layout_.record.weights)[k] = weight;
      if (shape.expertLayout()) head<int32_t>(item, layout_.record.indexes)[k] = index;
    }
    x.warpBarrier();
    for (int j = x.lane(); j < rows; j += x.lanes()) {
      uint64_t firsts = 0;
      for (int k = 0; k < shape.topk; ++k) firsts |= uint64_t{targets(items[j])[k].rank >= 0} << k;
      items.as<Item>(j)->wanted = firsts != 0;
      head<RecordHead>(items[j], layout_.record.head)->rankFirsts = firsts;
    }
    return true;
  }

  MOE_PROTOCOL bool carries(const std::byte* item) const { return reinterpret_cast<const Item*>(item)->wanted; }

  template <class Row>
  MOE_PROTOCOL void gather(const std::byte* item, Row& row) const {
    int64_t token = reinterpret_cast<const Item*>(item)->token;
    for (int payload = 0; payload < layout_.shape.payloads; ++payload) {
      const RowsIn& in = a_.inputs[payload];
      row.load(layout_.record.payload[payload], in.data + token * in.stride, layout_.shape.payloadBytes[payload]);
    }
  }

  MOE_PROTOCOL int64_t fillOffset() const { return layout_.record.head; }
  MOE_PROTOCOL int64_t fillBytes() const { return layout_.record.end - layout_.record.head; }
  MOE_PROTOCOL void fill(X& x, const std::byte* item, std::byte* to) const {
    const auto* from = reinterpret_cast<const uint32_t*>(item + headOffset(layout_.shape));
    for (int64_t word = x.lane(); word < fillBytes() / 4; word += x.lanes()) {
      reinterpret_cast<uint32_t*>(to)[word] = from[word];
    }
  }

  template <class Row>
  MOE_PROTOCOL void scatter(const std::byte* item, const Row& row) const {
    for (int k = 0; k < layout_.shape.topk; ++k) {
      Target target = targets(item)[k];
      if (target.rank < 0) continue;
      DispatchWindow window(layout_, a_.common.windows[target.rank], epoch_);
      row.store(window.record(layout_.shape.rank, target.slot), 0, layout_.record.end);
    }
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
  // The targets of the token's entries follow, rank -1: no copy for this entry; then the record's head as it travels.
  struct Item {
    int64_t token;
    int32_t wanted;
    int32_t reserved;
  };
  MOE_HD static int64_t headOffset(const Shape& shape) {
    return roundUp(static_cast<int64_t>(sizeof(Item)) + shape.topk * static_cast<int64_t>(sizeof(Target)), 16);
  }
  MOE_PROTOCOL static Target* targets(std::byte* item) { return reinterpret_cast<Target*>(item + sizeof(Item)); }
  MOE_PROTOCOL static const Target* targets(const std::byte* item) {
    return reinterpret_cast<const Target*>(item + sizeof(Item));
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

// SPDX-License-Identifier: Apache-2.0
// The direct path, sending half of dispatch: routing. Every record gets its slot at its rank, every row its index at
// its expert, and the counts leave.
//
// Slots come from counting, not from atomics, so rows arrive in token order. A block routes a span of contiguous
// chunks, its warps a part each: they count, add up what the parts and blocks before them have counted, and number
// their own. A block waits only for blocks with a lower number, so any number of resident blocks makes progress.
#pragma once

#include "device/finish.h"
#include "device/firsts.h"
#include "device/window_view.h"

namespace moe {

MOE_PROTOCOL int64_t chunksOf(int64_t tokens) { return larger(1, ceilDiv(tokens, kChunkTokens)); }

// How the chunks of a dispatch are shared by its sending blocks: block s routes span s and sends its first chunks; the
// others of a long span are sent by whoever comes first. Where there are more blocks than spans, those without a span
// help to send the span (their number % count) of another.
struct Spans {
  int64_t chunks;  // of the dispatch
  int64_t each;    // chunks of a span; the last span may be shorter
  int64_t count;
  int64_t own;  // chunks of a span that its block sends

  MOE_PROTOCOL explicit Spans(const DispatchArgs& a)
      : chunks(chunksOf(a.numTokens)),
        each(ceilDiv(chunks, a.common.sendBlocks)),
        count(ceilDiv(chunks, each)),
        own(each - each / 2) {}

  MOE_PROTOCOL int64_t first(int64_t span) const { return span * each; }
  MOE_PROTOCOL int64_t chunksIn(int64_t span) const { return smaller(each, chunks - first(span)); }
  MOE_PROTOCOL int64_t tokensIn(int64_t span, int64_t tokens) const {
    return larger(0, smaller(chunksIn(span) * kChunkTokens, tokens - first(span) * kChunkTokens));
  }
};

// The routing of one block's span. All warps of the block call run().
template <class X>
class Router {
 public:
  MOE_PROTOCOL Router(X& x, const DispatchArgs& a, const Epoch& epoch)
      : x_(x),
        a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        work_(a.common),
        handle_(a.common),
        epoch_(epoch),
        spans_(a),
        block_(x.block()),
        last_(block_ == spans_.count - 1),
        first_(spans_.first(block_) * kChunkTokens),
        tokens_(static_cast<int32_t>(spans_.tokensIn(block_, a.numTokens))),
        parts_(smaller(x.warps(), kMaxParts)) {}

  // False after a failure.
  MOE_PROTOCOL bool run() {
    if (block_ >= spans_.count) return waitForRouter();
    takeMemory();
    if (x_.warp() < parts_) countPart();
    x_.barrier(true);
    MOE_ROLL for (int64_t bin = x_.thread(); bin < shape_.bins(); bin += x_.threads()) sumParts(bin);
    x_.barrier(true);
    if (x_.thread() == 0) x_.signalLocal(work_.spanCounted(block_), epoch_);
    if (!waitForOthers()) return false;
    MOE_ROLL for (int64_t bin = x_.thread(); bin < shape_.bins(); bin += x_.threads()) addEarlierSpans(bin);
    x_.barrier(true);
    // The last thread, since the last warp often has no part.
    if (last_ && x_.thread() == x_.threads() - 1) {
      x_.signalMany(shape_.nranks, epoch_, [&](int peer) { return windowOf(peer).countSignal(shape_.rank); });
    }
    if (x_.warp() < parts_) assignPart();
    x_.doneWithScratch();
    x_.barrier(true);
    bool helped = a_.common.sendBlocks > spans_.count || spans_.own < spans_.each;
    if (helped && x_.thread() == 0) x_.signalLocal(work_.spanRouted(block_), epoch_);
    return true;
  }

 private:
  static constexpr int kBatch = 8;      // loads in flight per lane
  static constexpr int32_t kUnit = 16;  // tokens; parts are made of units, and so are chunks
  static constexpr int32_t kUnitsPerChunk = kChunkTokens / kUnit;

  MOE_PROTOCOL DispatchWindow windowOf(int64_t peer) const {
    return DispatchWindow(layout_, a_.common.windows[peer], epoch_);
  }

  MOE_PROTOCOL bool waitForRouter() {
    bool routed = x_.wait(work_.spanRouted(block_ % spans_.count), epoch_, Awaited::kHistogram, shape_.rank);
    return x_.barrier(routed);
  }

  // For the blocks whose counts come before this one's, and until the peers' windows may be written.
  MOE_PROTOCOL bool waitForOthers() {
    bool ok = true;
    MOE_ROLL for (int64_t block = x_.thread(); ok && block < block_; block += x_.threads()) {
      ok = x_.wait(work_.spanCounted(block), epoch_, Awaited::kHistogram, shape_.rank);
    }
    ok = ok && peersConsumed(x_, a_.common, epoch_, consumedDispatch, consumedBefore(a_, epoch_));
    return x_.barrier(ok);
  }

  // Entries of the span are numbered from its first token on.
  MOE_PROTOCOL void takeMemory() {
    int64_t most = int64_t{tokens_} * shape_.topk;
    if (std::byte* memory = x_.blockScratch(routingBytes(shape_, tokens_))) {
      records_ = reinterpret_cast<std::byte**>(memory);
      ids_ = reinterpret_cast<int32_t*>(records_ + shape_.nranks);
      owners_ = ids_ + most;
      bins_ = owners_ + most;
      flags_ = reinterpret_cast<uint8_t*>(bins_ + kMaxParts * shape_.bins());
    } else {
      ids_ = a_.common.handle ? handle_.ids(first_) : nullptr;
      owners_ = work_.owners(first_);
      bins_ = work_.bins(block_);
      flags_ = work_.flags(first_);
      records_ = work_.recordBases(block_);
    }
    next_ = bins_ + x_.warp() * shape_.bins();
    MOE_ROLL for (int peer = x_.thread(); peer < shape_.nranks; peer += x_.threads()) {
      records_[peer] = windowOf(peer).record(shape_.rank, 0);
    }
    int32_t perPart = static_cast<int32_t>(ceilDiv(unitsOf(tokens_), parts_));
    firstUnit_ = x_.warp() * perPart;
    units_ = static_cast<int32_t>(larger(0, smaller(perPart, unitsOf(tokens_) - firstUnit_)));
  }

  // First entry of a unit, and of what lies behind the span.
  MOE_PROTOCOL int32_t entryOf(int32_t unit) const {
    return static_cast<int32_t>(smaller(unit * kUnit, tokens_)) * shape_.topk;
  }
  MOE_PROTOCOL static int32_t unitsOf(int32_t tokens) { return (tokens + kUnit - 1) / kUnit; }

  // Reads this warp's entries and counts records per rank, and rows per expert.
  MOE_PROTOCOL void countPart() {
    MOE_ROLL for (int64_t bin = x_.lane(); bin < shape_.bins(); bin += x_.lanes()) next_[bin] = 0;
    int32_t begin = entryOf(firstUnit_), end = entryOf(firstUnit_ + units_);
    MOE_ROLL for (int32_t from = begin; from < end; from += kBatch * x_.lanes()) readEntries(from, end);
    x_.warpBarrier();
    bool whole = x_.lanes() >= shape_.topk;
    int32_t step = whole ? x_.lanes() / shape_.topk * shape_.topk : x_.lanes(), token = x_.lane() / shape_.topk;
    MOE_ROLL for (int32_t from = begin; from < end; from += step) {
      int32_t i = from + x_.lane();
      bool mine = i < end && x_.lane() < step;
      int32_t id = mine ? ids_[i] : -1, owner = id >= 0 ? shape_.experts.owner(id) : -1;
      if (mine) owners_[i] = owner;
      if (mine && a_.ids) handle_.ids(first_)[i] = id;
      uint8_t flags = 0;
      if (whole) flags = matchFirsts(x_, shape_, token, id, owner, shape_.expertLayout());
      x_.warpBarrier();
      if (mine && !whole) flags = findFirsts(ids_, owners_, i, shape_.topk);
      if (mine) flags_[i] = flags;
      if (shape_.expertLayout() && flags & kExpertFirst) x_.addShared(&next_[shape_.nranks + id], 1);
      int32_t rank = flags & kRankFirst ? owner : -1;
      auto same = x_.match(rank);
      if (rank >= 0 && same.below == 0) next_[rank] += same.total;
      x_.warpBarrier();
    }
    countRanks(begin / shape_.topk, end / shape_.topk);
  }

  // Notes to how many ranks each token goes, and as which of them to this one.
  MOE_PROTOCOL void countRanks(int32_t begin, int32_t end) {
    MOE_ROLL for (int32_t token = begin + x_.lane(); token < end; token += x_.lanes()) {
      TokenRanks ranks{-1, 0, 0};
      MOE_ROLL for (int32_t i = token * shape_.topk; i < (token + 1) * shape_.topk; ++i) {
        if (!(flags_[i] & kRankFirst)) continue;
        if (owners_[i] == shape_.rank) ranks.ownOrdinal = ranks.count;
        ++ranks.count;
      }
      *handle_.ranks(first_ + token) = ranks;
    }
  }

  // Takes a batch of ids, -1 for those that are no expert's, and their weights. In a repeated dispatch the handle has
  // them.
  MOE_PROTOCOL void readEntries(int32_t from, int32_t end) {
    int64_t id[kBatch];
    float weight[kBatch];
    MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
      int32_t i = from + b * x_.lanes() + x_.lane();
      id[b] = i >= end ? -1 : a_.ids ? givenId(i) : handle_.ids(first_)[i];
      weight[b] = i < end && a_.weights && a_.ids ? givenWeight(i) : 1.0f;
    }
    MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
      int32_t i = from + b * x_.lanes() + x_.lane();
      if (i >= end) continue;
      bool valid = shape_.experts.valid(id[b]);
      ids_[i] = valid ? static_cast<int32_t>(id[b]) : -1;
      if (a_.ids) handle_.weights(first_)[i] = valid ? weight[b] : 0.0f;
    }
  }

  // Where entry `i` lies in the caller's arrays, or -1 if it is past the caller's topk.
  MOE_PROTOCOL int64_t givenAt(int32_t i) const {
    if (a_.topk == shape_.topk) return first_ * a_.topk + i;
    int32_t k = i % shape_.topk;
    return k < a_.topk ? (first_ + i / shape_.topk) * a_.topk + k : -1;
  }
  MOE_PROTOCOL int64_t givenId(int32_t i) const {
    int64_t at = givenAt(i);
    if (at < 0) return -1;
    return a_.wideIds ? static_cast<const int64_t*>(a_.ids)[at] : static_cast<const int32_t*>(a_.ids)[at];
  }
  MOE_PROTOCOL float givenWeight(int32_t i) const {
    int64_t at = givenAt(i);
    return at >= 0 ? a_.weights[at] : 1.0f;
  }

  // Turns the counts of a bin into what the parts before have counted, and publishes the span's.
  MOE_PROTOCOL void sumParts(int64_t bin) {
    int32_t sum = 0;
    MOE_ROLL for (int64_t part = 0; part < parts_; ++part) {
      int32_t& next = bins_[part * shape_.bins() + bin];
      int32_t count = next;
      next = sum;
      sum += count;
    }
    work_.histogram(block_)[bin] = sum;
  }

  MOE_PROTOCOL void addEarlierSpans(int64_t bin) {
    int32_t sum = 0;
    MOE_ROLL for (int64_t from = 0; from < block_; from += kBatch) {
      int32_t counts[kBatch];
      MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
        counts[b] = from + b < block_ ? work_.histogram(from + b)[bin] : 0;
      }
      MOE_UNROLL for (int b = 0; b < kBatch; ++b) sum += counts[b];
    }
    MOE_ROLL for (int64_t part = 0; part < parts_; ++part) bins_[part * shape_.bins() + bin] += sum;
    if (last_) tellCount(bin, sum + work_.histogram(block_)[bin]);
  }

  // Writes the total of a bin into the window of the rank that it concerns.
  MOE_PROTOCOL void tellCount(int64_t bin, int32_t total) const {
    if (bin < shape_.nranks) {
      *windowOf(bin).counts(shape_.rank) = {a_.numTokens,
                                            total,
                                            static_cast<int32_t>(spans_.chunks),
                                            a_.common.refusal,
                                            static_cast<int32_t>(spans_.each),
                                            0};
      *work_.sentRows(static_cast<int>(bin)) = total;
      return;
    }
    auto expert = static_cast<int32_t>(bin - shape_.nranks);
    int32_t owner = shape_.experts.owner(expert);
    windowOf(owner).expertCounts(shape_.rank)[expert - shape_.experts.first(owner)] = total;
  }

  // Gives every record of this warp's units its slot, and every row its index, in token order.
  MOE_PROTOCOL void assignPart() {
    int32_t units = unitsOf(tokens_);
    // A dispatch without tokens has one chunk, and it is empty.
    if (units == 0 && x_.warp() == 0) {
      tellRange(0, true);
      tellRange(0, false);
    }
    MOE_ROLL for (int32_t unit = firstUnit_; unit < firstUnit_ + units_; ++unit) {
      if (unit % kUnitsPerChunk == 0) tellRange(unit, true);
      assign(entryOf(unit), entryOf(unit + 1));
      if (unit % kUnitsPerChunk == kUnitsPerChunk - 1 || unit == units - 1) tellRange(unit, false);
    }
  }

  // Tells every rank where its records of the unit's chunk begin, or end.
  MOE_PROTOCOL void tellRange(int32_t unit, bool begin) const {
    int64_t chunk = spans_.first(block_) + unit / kUnitsPerChunk;
    MOE_ROLL for (int peer = x_.lane(); peer < shape_.nranks; peer += x_.lanes()) {
      ChunkRange* range = windowOf(peer).chunkRange(shape_.rank, chunk);
      (begin ? range->begin : range->end) = next_[peer];
    }
  }

  MOE_PROTOCOL void assign(int32_t begin, int32_t end) {
    int32_t* nextIndex = next_ + shape_.nranks;
    MOE_ROLL for (int32_t from = begin; from < end; from += x_.lanes()) {
      int32_t i = from + x_.lane();
      bool mine = i < end;
      int32_t rank = mine && flags_[i] & kRankFirst ? owners_[i] : -1;
      auto sameRank = x_.match(rank);
      int32_t slot = rank >= 0 ? next_[rank] + sameRank.below : -1;
      if (mine) work_.targets(first_)[i] = rank >= 0 ? records_[rank] + slot * layout_.record.stride : nullptr;
      if (rank == shape_.rank) handle_.ranks(first_ + i / shape_.topk)->ownSlot = slot;
      if (shape_.expertLayout()) {
        int32_t expert = mine && flags_[i] & kExpertFirst ? ids_[i] : -1;
        auto sameExpert = x_.match(expert);
        if (mine) work_.indexes(first_)[i] = expert >= 0 ? nextIndex[expert] + sameExpert.below : -1;
        x_.warpBarrier();
        if (expert >= 0 && sameExpert.below == 0) nextIndex[expert] += sameExpert.total;
      }
      x_.warpBarrier();
      if (rank >= 0 && sameRank.below == 0) next_[rank] += sameRank.total;
      x_.warpBarrier();
    }
  }

  X& x_;
  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  Workspace work_;
  HandleView handle_;
  Epoch epoch_;
  Spans spans_;
  int64_t block_;
  bool last_;                          // this block's span is the last
  int64_t first_;                      // token of the span
  int32_t tokens_;                     // in the span
  int64_t parts_;                      // of the span
  int32_t firstUnit_ = 0, units_ = 0;  // of this warp's part
  std::byte** records_ = nullptr;      // [ranks] this rank's first record there
  int32_t* ids_ = nullptr;
  int32_t* owners_ = nullptr;
  int32_t* bins_ = nullptr;  // [parts][bins]: counts, then the next slot or index
  int32_t* next_ = nullptr;  // this warp's of them
  uint8_t* flags_ = nullptr;
};

}  // namespace moe

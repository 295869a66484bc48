// SPDX-License-Identifier: Apache-2.0
// The direct path, sending half of dispatch: routing. Every record gets its slot at its rank, every row its index at
// its expert, and the counts leave.
//
// Rows arrive in token order. A block routes a span of contiguous chunks, and goes on from what the blocks before it
// have counted. It waits only for blocks with a lower number, so any number of resident blocks makes progress.
#pragma once

#include "device/finish.h"
#include "device/numbering.h"
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
    MOE_ROLL for (int64_t bin = x_.thread(); bin < shape_.bins(); bin += x_.threads()) {
      work_.histogram(block_)[bin] = own_.sumParts(shape_, bin, parts_);
    }
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
    ok = ok && peersConsumed(x_, a_.common, epoch_, consumedDispatch, consumedBefore(a_, epoch_), true);
    return x_.barrier(ok);
  }

  // Entries of the span are numbered from its first token on.
  MOE_PROTOCOL void takeMemory() {
    int64_t most = int64_t{tokens_} * shape_.topk;
    if (std::byte* memory = x_.blockScratch(routingBytes(shape_, tokens_))) {
      records_ = reinterpret_cast<std::byte**>(memory);
      own_.ids = reinterpret_cast<int32_t*>(records_ + shape_.nranks);
      own_.owners = own_.ids + most;
      own_.bins = own_.owners + most;
      own_.flags = reinterpret_cast<uint8_t*>(own_.bins + kMaxParts * shape_.bins());
    } else {
      own_.ids = a_.common.handle ? handle_.ids(first_) : nullptr;
      own_.owners = work_.owners(first_);
      own_.bins = work_.bins(block_);
      own_.flags = work_.flags(first_);
      records_ = work_.recordBases(block_);
    }
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
    own_.startPart(x_, shape_);
    int32_t begin = entryOf(firstUnit_), end = entryOf(firstUnit_ + units_);
    MOE_ROLL for (int32_t from = begin; from < end; from += kBatch * x_.lanes()) readEntries(from, end);
    x_.warpBarrier();
    own_.countPart(x_, shape_, begin, end, [&](int32_t i, int32_t id) {
      if (a_.ids) handle_.ids(first_)[i] = id;
    });
    countRanks(begin / shape_.topk, end / shape_.topk);
  }

  // Notes to how many ranks each token goes, and as which of them to this one.
  MOE_PROTOCOL void countRanks(int32_t begin, int32_t end) {
    MOE_ROLL for (int32_t token = begin + x_.lane(); token < end; token += x_.lanes()) {
      TokenRanks ranks{-1, 0, 0};
      MOE_ROLL for (int32_t i = token * shape_.topk; i < (token + 1) * shape_.topk; ++i) {
        if (!(own_.flags[i] & kRankFirst)) continue;
        if (own_.owners[i] == shape_.rank) ranks.ownOrdinal = ranks.count;
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
      own_.ids[i] = valid ? static_cast<int32_t>(id[b]) : -1;
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

  MOE_PROTOCOL void addEarlierSpans(int64_t bin) {
    int32_t sum = 0;
    MOE_ROLL for (int64_t from = 0; from < block_; from += kBatch) {
      int32_t counts[kBatch];
      MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
        counts[b] = from + b < block_ ? work_.histogram(from + b)[bin] : 0;
      }
      MOE_UNROLL for (int b = 0; b < kBatch; ++b) sum += counts[b];
    }
    MOE_ROLL for (int64_t part = 0; part < parts_; ++part) own_.bins[part * shape_.bins() + bin] += sum;
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
      (begin ? range->begin : range->end) = own_.next[peer];
    }
  }

  MOE_PROTOCOL void assign(int32_t begin, int32_t end) {
    own_.number(x_, shape_, begin, end, [&](int32_t i, int32_t rank, int32_t slot, int32_t index) {
      work_.targets(first_)[i] = rank >= 0 ? records_[rank] + slot * layout_.record.stride : nullptr;
      if (rank == shape_.rank) handle_.ranks(first_ + i / shape_.topk)->ownSlot = slot;
      if (shape_.expertLayout()) work_.indexes(first_)[i] = index;
    });
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
  Numbering<X> own_;                   // of the span's tokens
};

}  // namespace moe

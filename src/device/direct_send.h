// SPDX-License-Identifier: Apache-2.0
// The direct path, sending half of dispatch: the rows, once they are routed.
#pragma once

#include "device/direct_route.h"
#include "device/direct_signal.h"
#include "device/epochs.h"
#include "device/quantize.h"
#include "device/row_jobs.h"
#include "device/window_view.h"

namespace moe {

// The rows of a dispatch, as a stream job. A block sends its own span, in token order, and leaves the last chunks of
// long spans to all blocks: some SMs are slower than others, and not always the same.
template <class X>
class SendJob {
  // What routing and the caller say of one entry.
  struct Entry {
    std::byte* target;
    int32_t id, index;
    float weight;
  };

 public:
  static constexpr bool kTells = true;
  struct Lane {
    Claims<X> claims;
    uint32_t shares = 0;                // kShared, once the block's own rows have been taken
    uint32_t known = Claims<X>::kNone;  // the run of which this lane's first entry is known
    Entry entry{};
    PerRun<X> runs;
  };

  MOE_PROTOCOL SendJob(const X& x, const DispatchArgs& a, const Epoch& epoch)
      : a_(a),
        layout_(a.common.layout),
        work_(a.common),
        handle_(a.common),
        epoch_(epoch),
        spans_(a),
        span_(x.block() % spans_.count),
        warp_(x.block() / spans_.count * x.streamers() + x.warp()),
        warps_(((a.common.sendBlocks - 1 - span_) / spans_.count + 1) * x.streamers()),
        perRun_(Grain(spans_.tokensIn(span_, a.numTokens), warps_, 0, {1, 0}).rows),
        ownRecords_(DispatchWindow(layout_, a.common.window(), epoch).record(layout_.shape.rank, 0)),
        ownBytes_(placesOwnInput(a) ? static_cast<uint64_t>(layout_.shape.maxTokens * layout_.record.stride) : 0) {}

  MOE_PROTOCOL int64_t rowBytes() const { return layout_.record.end; }
  MOE_PROTOCOL int64_t itemBytes() const { return itemBytes(layout_); }
  MOE_HD static int64_t itemBytes(const Layout& layout) {
    return headOffset(layout.shape) + roundUp(layout.record.end - layout.record.head, 16);
  }

  MOE_PROTOCOL void start(X& x, Lane& lane) const {
    int64_t runs = smaller(spans_.own, spans_.chunksIn(span_)) * (kChunkTokens / perRun_);
    lane.claims.startTurns(x, static_cast<uint32_t>(warp_), static_cast<uint32_t>(warps_), static_cast<uint32_t>(runs));
  }

  // Loads what the first entries of a run need, a lane each, so that beginRun need not wait for them.
  MOE_PROTOCOL void prefetchRun(X& x, Lane& lane) const {
    lane.known = lane.claims.next(x) | lane.shares;
    if (lane.shares && lane.known >= (sharedRuns() | kShared)) return;
    Tokens tokens = tokensOf(lane.known);
    if (x.lane() < tokens.count * layout_.shape.topk) lane.entry = load(tokens.first, x.lane());
  }

  // All that the run's records need besides their payloads, lanes in parallel.
  MOE_PROTOCOL RunState beginRun(X& x, int64_t i, RunItems items, Lane& lane) const {
    const Shape& shape = layout_.shape;
    uint32_t run = lane.claims.advance(x);
    if (run == Claims<X>::kNone && !lane.shares) {
      RunState state = startSharing(x, lane);
      if (state != RunState::kReady) return state;
      run = lane.claims.advance(x);
    }
    if (lane.shares && run >= sharedRuns()) return RunState::kEnd;
    run |= lane.shares;
    Tokens tokens = tokensOf(run);
    lane.runs.keep(x, i, run);
    MOE_ROLL for (int j = x.lane(); j < kRunRows; j += x.lanes()) items.as<Item>(j)->count = 0;
    MOE_ROLL for (int32_t at = x.lane(); at < tokens.count * shape.topk; at += x.lanes()) {
      Entry entry = at == x.lane() && run == lane.known ? lane.entry : load(tokens.first, at);
      std::byte* item = items[at / shape.topk];
      int32_t k = at % shape.topk;
      destinations(item)[k] = entry.target;
      head<int32_t>(item, layout_.record.ids)[k] = entry.id;
      head<float>(item, layout_.record.weights)[k] = entry.weight;
      if (shape.expertLayout()) head<int32_t>(item, layout_.record.indexes)[k] = entry.index;
    }
    x.warpBarrier();
    MOE_ROLL for (int j = x.lane(); j < tokens.count; j += x.lanes()) finishItem(items[j], tokens.first + j);
    return RunState::kReady;
  }

  MOE_PROTOCOL bool carries(const std::byte* item) const { return reinterpret_cast<const Item*>(item)->count > 0; }

  template <class Row>
  MOE_PROTOCOL void gather(const std::byte* item, Row& row) const {
    const auto& [token, count, own] = *reinterpret_cast<const Item*>(item);
    if (count == 1 && own == 0) return;
    int first = 0;
    if (layout_.shape.quantizes()) {
      first = layout_.shape.payloadOfInput(1);
      const RowsIn& in = a_.inputs[0];
      row.quantize({in.data + token * in.stride, layout_.shape.hidden, layout_.record.payload[0],
                    layout_.record.payload[Shape::kScales], layout_.shape.quantize == moeQuantizeUe8m0});
    }
    MOE_ROLL for (int payload = first; payload < layout_.shape.payloads; ++payload) {
      const RowsIn& in = a_.inputs[payload];
      row.load(layout_.record.payload[payload], in.data + token * in.stride, layout_.shape.payloadBytes[payload]);
    }
  }

  MOE_PROTOCOL int64_t composedOffset() const { return layout_.record.head; }
  MOE_PROTOCOL int64_t composedBytes() const { return layout_.record.end - layout_.record.head; }
  MOE_PROTOCOL const std::byte* composed(const std::byte* item) const { return item + headOffset(layout_.shape); }

  template <class Row>
  MOE_PROTOCOL void scatter(const std::byte* item, Row& row) const {
    const auto& [token, count, own] = *reinterpret_cast<const Item*>(item);
    MOE_ROLL for (int32_t d = 0; d < count; ++d) {
      int64_t from = d == own ? layout_.record.head : 0;
      row.store(destinations(item)[d] + from, from, layout_.record.end - from);
    }
  }

  MOE_PROTOCOL void finishedRun(X& x, int64_t i, Lane& lane) const {
    uint32_t run = lane.runs.of(x, i);
    Tokens tokens = tokensOf(run);
    // A dispatch without tokens has one chunk, which is complete when it has been routed.
    if (a_.numTokens == 0 && run == 0) tokens.count = 1;
    if (x.lane() != 0 || tokens.count == 0) return;
    x.add(work_.sentTokens(tokens.first / kChunkTokens), static_cast<uint64_t>(tokens.count));
  }

 private:
  MOE_PROTOCOL Entry load(int64_t firstToken, int32_t at) const {
    return {work_.targets(firstToken)[at], handle_.ids(firstToken)[at],
            layout_.shape.expertLayout() ? work_.indexes(firstToken)[at] : 0, handle_.weights(firstToken)[at]};
  }

  // `count` destinations follow; then the record's head as it travels.
  struct Item {
    int64_t token;
    int32_t count;
    int32_t own;  // the destination that gets the head only, or -1
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
  // Moves a token's destinations, one for each entry that is the first of its rank, to the front. One lane.
  MOE_PROTOCOL void finishItem(std::byte* item, int64_t token) const {
    uint64_t firsts = 0;
    int32_t count = 0, own = -1, repeats = 0;
    const int32_t* ids = head<int32_t>(item, layout_.record.ids);
    const int32_t* indexes = head<int32_t>(item, layout_.record.indexes);
    MOE_ROLL for (int32_t k = 0; k < layout_.shape.topk; ++k) {
      if (layout_.shape.expertLayout() && ids[k] >= 0 && indexes[k] < 0) repeats = 1;
      std::byte* to = destinations(item)[k];
      if (!to) continue;
      firsts |= uint64_t{1} << k;
      if (reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(ownRecords_) < ownBytes_) own = count;
      destinations(item)[count++] = to;
    }
    *reinterpret_cast<Item*>(item) = {token, count, own};
    *head<RecordHead>(item, layout_.record.head) = {static_cast<int32_t>(token), repeats, firsts};
  }
  // The part of the head that lies at `offset` of a record.
  template <class T>
  MOE_PROTOCOL T* head(std::byte* item, int64_t offset) const {
    return reinterpret_cast<T*>(item + headOffset(layout_.shape) + (offset - layout_.record.head));
  }

  // The tokens of a run.
  struct Tokens {
    int64_t first;
    int32_t count;
  };
  MOE_PROTOCOL Tokens tokensOf(uint32_t run) const {
    if (run == Claims<X>::kNone) return {0, 0};
    int64_t chunk = spans_.first(span_), first = run * perRun_, rows = perRun_;
    if (run & kShared) {
      // Chunk after chunk, so that receivers get something to do all the time; spans take turns.
      auto spans = static_cast<uint32_t>(spans_.count), nth = (run & ~kShared) / kRunsPerChunk;
      if (spans_.own + nth / spans >= spans_.chunksIn(nth % spans)) return {0, 0};
      chunk = spans_.first(nth % spans) + spans_.own + nth / spans;
      first = (run & ~kShared) % kRunsPerChunk * kSharedRows;
      rows = kSharedRows;
    }
    first += chunk * kChunkTokens;
    return {first, static_cast<int32_t>(larger(0, smaller(rows, a_.numTokens - first)))};
  }
  MOE_PROTOCOL uint32_t sharedRuns() const {
    return static_cast<uint32_t>((spans_.each - spans_.own) * spans_.count) * kRunsPerChunk;
  }

  // The block's own rows have been taken: on to those of all, once they are routed. A block that starts before the last
  // one that routes cannot wait for that, and leaves them to others.
  MOE_PROTOCOL RunState startSharing(X& x, Lane& lane) const {
    lane.shares = kShared;
    if (sharedRuns() == 0) return RunState::kEnd;
    bool ok = true;
    if (x.lane() == 0) ok = x.started(&a_.common.control()->ticket, static_cast<int>(spans_.count - 1));
    if (!x.warpAll(ok)) return RunState::kEnd;
    MOE_ROLL for (int64_t span = x.lane(); ok && span < spans_.count; span += x.lanes()) {
      ok = x.wait(work_.spanRouted(span), epoch_, Awaited::kHistogram, layout_.shape.rank);
    }
    if (!x.warpAll(ok)) return RunState::kFailed;
    lane.claims.startClaims(x, &a_.common.control()->sentClaims, sharedRuns());
    return RunState::kReady;
  }

  static constexpr uint32_t kShared = uint32_t{1} << 31;  // marks the numbers of runs that all blocks take
  static constexpr int64_t kSharedRows = 2;               // short, so that warps end at about the same time
  static constexpr uint32_t kRunsPerChunk = kChunkTokens / kSharedRows;

  const DispatchArgs& a_;
  const Layout& layout_;
  Workspace work_;
  HandleView handle_;
  Epoch epoch_;
  Spans spans_;
  int64_t span_;
  int64_t warp_, warps_, perRun_;
  const std::byte* ownRecords_;
  uint64_t ownBytes_;  // of the records whose payloads stay with the caller
};

// The chunks of a dispatch, as signalWhenStored goes through them: those of all spans in turn.
class DispatchedChunks {
 public:
  MOE_PROTOCOL DispatchedChunks(const DispatchArgs& a, const Epoch& epoch)
      : a_(a), layout_(a.common.layout), work_(a.common), epoch_(epoch), spans_(a) {}

  MOE_PROTOCOL uint32_t count() const { return static_cast<uint32_t>(spans_.count * spans_.each); }
  MOE_PROTOCOL uint64_t* counter(uint32_t nth) const {
    return chunk(nth) < spans_.chunks ? work_.sentTokens(chunk(nth)) : nullptr;
  }
  MOE_PROTOCOL uint64_t rows(uint32_t nth) const {
    return static_cast<uint64_t>(larger(1, smaller(kChunkTokens, a_.numTokens - chunk(nth) * kChunkTokens)));
  }
  template <class X>
  MOE_PROTOCOL void signal(X& x, uint32_t nth) const {
    x.signalMany(layout_.shape.nranks, epoch_, [&](int peer) {
      return DispatchWindow(layout_, a_.common.windows[peer], epoch_).chunkSignal(layout_.shape.rank, chunk(nth));
    });
  }

 private:
  MOE_PROTOCOL int64_t chunk(uint32_t nth) const { return spans_.first(nth % spans_.count) + nth / spans_.count; }

  const DispatchArgs& a_;
  const Layout& layout_;
  Workspace work_;
  Epoch epoch_;
  Spans spans_;
};

// The sending half of a dispatch. All warps of blocks 0 .. sendBlocks-1; false after a failure.
template <class X>
MOE_PROTOCOL bool sendDispatch(X& x, const DispatchArgs& a, const Epoch& epoch) {
  if (!Router<X>(x, a, epoch).run()) return false;
  if (x.warp() >= x.streamers()) return true;
  SendJob<X> job(x, a, epoch);
  return x.streamRows(job);
}

}  // namespace moe

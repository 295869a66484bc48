// SPDX-License-Identifier: Apache-2.0
// The direct path, sending half of dispatch: the rows, once they are routed.
#pragma once

#include "device/direct_route.h"
#include "device/epochs.h"
#include "device/row_jobs.h"
#include "device/window_view.h"

namespace moe {

// The rows of this block's span, as a stream job. Runs go in token order; the warps of all blocks that send the span
// take turns.
template <class X>
class SendJob {
  // What routing and the caller say of one entry.
  struct Entry {
    std::byte* target;
    int32_t id, index;
    float weight;
  };

 public:
  struct Lane {
    int64_t run = -1;  // the run of which this lane's first entry is known
    Entry entry{};
    uint32_t finished = 0;  // runs of the present chunk that this warp has not told of
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
        perRun_(Grain(spans_.tokensIn(span_, a.numTokens), warps_, 0, {1, false}).rows) {}

  // How many rows this warp goes through, those that nobody wants included.
  MOE_PROTOCOL int64_t rows() const {
    int64_t runs = spans_.chunksIn(span_) * (kChunkTokens / perRun_);
    return warp_ < runs ? ceilDiv(runs - warp_, warps_) * kRunRows : 0;
  }

  MOE_PROTOCOL int64_t rowBytes() const { return layout_.record.end; }
  MOE_PROTOCOL int64_t itemBytes() const { return itemBytes(layout_); }
  MOE_HD static int64_t itemBytes(const Layout& layout) {
    return headOffset(layout.shape) + roundUp(layout.record.end - layout.record.head, 16);
  }

  // Loads what the first entries of a run need, a lane each, so that beginRun need not wait for them.
  MOE_PROTOCOL void prefetchRun(X& x, int64_t i, Lane& lane) const {
    int64_t first = firstToken(i);
    if (x.lane() < rowsOf(first) * layout_.shape.topk) lane.entry = load(first, x.lane());
    lane.run = i;
  }

  // All that the run's records need besides their payloads, lanes in parallel.
  MOE_PROTOCOL bool beginRun(X& x, int64_t i, RunItems items, Lane& lane) const {
    const Shape& shape = layout_.shape;
    int64_t first = firstToken(i);
    int32_t rows = rowsOf(first);
    MOE_ROLL for (int j = x.lane(); j < kRunRows; j += x.lanes()) items.as<Item>(j)->count = 0;
    MOE_ROLL for (int32_t at = x.lane(); at < rows * shape.topk; at += x.lanes()) {
      Entry entry = at == x.lane() && i == lane.run ? lane.entry : load(first, at);
      std::byte* item = items[at / shape.topk];
      int32_t k = at % shape.topk;
      destinations(item)[k] = entry.target;
      head<int32_t>(item, layout_.record.ids)[k] = entry.id;
      head<float>(item, layout_.record.weights)[k] = entry.weight;
      if (shape.expertLayout()) head<int32_t>(item, layout_.record.indexes)[k] = entry.index;
    }
    x.warpBarrier();
    MOE_ROLL for (int j = x.lane(); j < rows; j += x.lanes()) finishItem(items[j], first + j);
    return true;
  }

  MOE_PROTOCOL bool carries(const std::byte* item) const { return reinterpret_cast<const Item*>(item)->count > 0; }

  template <class Row>
  MOE_PROTOCOL void gather(const std::byte* item, Row& row) const {
    int64_t token = reinterpret_cast<const Item*>(item)->token;
    MOE_ROLL for (int payload = 0; payload < layout_.shape.payloads; ++payload) {
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
    MOE_ROLL for (int32_t d = 0; d < count; ++d) row.store(destinations(item)[d], 0, bytes);
  }

  MOE_PROTOCOL void finishedRun(X& x, int64_t i, Lane& lane) const {
    int64_t chunk = firstToken(i) / kChunkTokens;
    ++lane.finished;
    // Arrivals are costly, so a warp arrives once for all its runs of a chunk.
    if (i + kRunRows < rows() && firstToken(i + kRunRows) / kChunkTokens == chunk) return;
    if (x.lane() == 0 &&
        x.arrive(work_.sendDone(chunk), lane.finished) == static_cast<uint32_t>(kChunkTokens / perRun_)) {
      x.reset(work_.sendDone(chunk));
      x.signalLocal(work_.chunkSent(chunk), epoch_);
    }
    lane.finished = 0;
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
  // Moves a token's destinations, one for each entry that is the first of its rank, to the front. One lane.
  MOE_PROTOCOL void finishItem(std::byte* item, int64_t token) const {
    uint64_t firsts = 0;
    int32_t count = 0, repeats = 0;
    const int32_t* ids = head<int32_t>(item, layout_.record.ids);
    const int32_t* indexes = head<int32_t>(item, layout_.record.indexes);
    MOE_ROLL for (int32_t k = 0; k < layout_.shape.topk; ++k) {
      if (layout_.shape.expertLayout() && ids[k] >= 0 && indexes[k] < 0) repeats = 1;
      std::byte* to = destinations(item)[k];
      if (!to) continue;
      firsts |= uint64_t{1} << k;
      destinations(item)[count++] = to;
    }
    *reinterpret_cast<Item*>(item) = {token, count, 0};
    *head<RecordHead>(item, layout_.record.head) = {static_cast<int32_t>(token), repeats, firsts};
  }
  // The part of the head that lies at `offset` of a record.
  template <class T>
  MOE_PROTOCOL T* head(std::byte* item, int64_t offset) const {
    return reinterpret_cast<T*>(item + headOffset(layout_.shape) + (offset - layout_.record.head));
  }

  MOE_PROTOCOL int64_t firstToken(int64_t i) const {
    auto run = static_cast<uint32_t>(warp_ + i / kRunRows * warps_);
    return spans_.first(span_) * kChunkTokens + run * perRun_;
  }
  MOE_PROTOCOL int32_t rowsOf(int64_t firstToken) const {
    return static_cast<int32_t>(larger(0, smaller(perRun_, a_.numTokens - firstToken)));
  }

  const DispatchArgs& a_;
  const Layout& layout_;
  Workspace work_;
  HandleView handle_;
  Epoch epoch_;
  Spans spans_;
  int64_t span_;
  int64_t warp_, warps_, perRun_;
};

// Tells the peers of every chunk that has been sent. All warps of one block, and not one of those that send if there is
// a choice: a fence takes long where the copy engine is busy.
template <class X>
MOE_PROTOCOL bool signalChunks(X& x, const DispatchArgs& a, const Epoch& epoch) {
  const Layout& layout = a.common.layout;
  Workspace work(a.common);
  Spans spans(a);
  bool ok = true;
  MOE_ROLL for (int64_t order = x.warp(); ok && order < spans.count * spans.each; order += x.warps()) {
    int64_t chunk = spans.first(order % spans.count) + order / spans.count;
    if (chunk >= spans.chunks) continue;
    if (x.lane() == 0) {
      ok = x.wait(work.chunkSent(chunk), epoch, Awaited::kSent, layout.shape.rank);
      if (ok) {
        x.signalMany(layout.shape.nranks, epoch, [&](int peer) {
          return DispatchWindow(layout, a.common.windows[peer], epoch).chunkSignal(layout.shape.rank, chunk);
        });
      }
    }
    ok = x.warpAll(ok);
  }
  return ok;
}

// The sending half of a dispatch. All warps of blocks 0 .. sendBlocks-1; false after a failure.
template <class X>
MOE_PROTOCOL bool sendDispatch(X& x, const DispatchArgs& a, const Epoch& epoch) {
  auto buffers = static_cast<uint64_t>(a.common.layout.shape.buffers);
  // Views that have been out for `buffers` epochs end here: the stream has passed their readers.
  if (x.block() == 0 && x.thread() == 0 && epoch > buffers && a.common.control()->releasedDispatch < epoch - buffers) {
    releaseDispatch(x, a.common, epoch - buffers);
  }
  if (!Router<X>(x, a, epoch).run()) return false;
  if (x.warp() >= x.streamers()) return true;
  SendJob<X> job(x, a, epoch);
  return x.streamRows(job.rows(), job);
}

}  // namespace moe

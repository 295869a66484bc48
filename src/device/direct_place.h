// SPDX-License-Identifier: Apache-2.0
// The direct path, receiving half of dispatch: each source's rows are copied to their places as its chunks complete.
#pragma once

#include "device/direct_notes.h"
#include "device/quantize.h"
#include "device/row_jobs.h"
#include "device/window_view.h"

namespace moe {

// The rows of all sources as a stream job.
template <class X>
class PlaceJob {
 public:
  static constexpr bool kTells = false;
  struct Lane {
    Claims<X> claims;
  };

  MOE_PROTOCOL PlaceJob(const X& x, const DispatchArgs& a, const Arrivals<X>& arrivals)
      : a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        arrivals_(arrivals),
        ownInput_(placesOwnInput(a)),
        notes_(a, arrivals),
        perRun_(Grain(allRows(), int64_t{a.common.receiveBlocks} * x.streamers(), 0, {kEvenRuns, 0}).rows),
        runs_(shape_, arrivals.mostOrders(), perRun_) {}

  MOE_PROTOCOL int64_t rowBytes() const {
    int last = shape_.payloads - 1;
    return layout_.record.payload[last] + shape_.payloadBytes[last];
  }
  MOE_PROTOCOL int64_t itemBytes() const { return itemBytes(shape_); }
  MOE_HD static int64_t itemBytes(const Shape& shape) {
    return roundUp(static_cast<int64_t>(sizeof(Item)) + 4 * int64_t{shape.topk}, 8);
  }

  MOE_PROTOCOL void start(X& x, Lane& lane) const {
    lane.claims.startClaims(x, &a_.common.control()->receivedClaims, runs_.count());
  }
  MOE_PROTOCOL void prefetchRun(X&, Lane&) const {}

  MOE_PROTOCOL RunState beginRun(X& x, int64_t, RunItems items, Lane& lane) const {
    uint32_t number = lane.claims.advance(x);
    if (number >= runs_.count()) return RunState::kEnd;
    SourceRuns::Run run = runs_.at(number);
    int64_t first = 0;
    int32_t count = 0;
    if (!notes_.enter(x, run, perRun_, &first, &count)) return RunState::kFailed;
    MOE_ROLL for (int32_t j = x.lane(); j < kRunRows; j += x.lanes()) {
      *items.as<Item>(j) = {run.source, static_cast<int32_t>(first + j), 0, 0};
    }
    x.warpBarrier();
    bool ok =
        notes_.template note<1>(x, run.source, first, count, [&](int32_t j, int32_t k, int32_t token, int32_t row) {
          auto* item = items.as<Item>(j);
          item->rows()[k] = row;
          item->token = token;
          if (row >= 0) item->placed = 1;
        });
    x.warpBarrier();
    return ok ? RunState::kReady : RunState::kFailed;
  }

  MOE_PROTOCOL bool carries(const std::byte* item) const { return reinterpret_cast<const Item*>(item)->placed; }

  template <class Row>
  MOE_PROTOCOL void gather(const std::byte* memory, Row& row) const {
    const auto* item = reinterpret_cast<const Item*>(memory);
    const std::byte* record = arrivals_.window().record(item->source, item->slot);
    MOE_ROLL for (int payload = 0; payload < shape_.payloads; ++payload) {
      int64_t at = layout_.record.payload[payload];
      const RowsIn& in = a_.inputs[payload];
      const std::byte* from =
          ownInput_ && item->source == shape_.rank ? in.data + item->token * in.stride : record + at;
      row.load(at, from, shape_.payloadBytes[payload]);
    }
  }

  MOE_PROTOCOL int64_t composedOffset() const { return 0; }
  MOE_PROTOCOL int64_t composedBytes() const { return 0; }
  MOE_PROTOCOL const std::byte* composed(const std::byte*) const { return nullptr; }

  template <class Row>
  MOE_PROTOCOL void scatter(const std::byte* memory, Row& row) const {
    const auto* item = reinterpret_cast<const Item*>(memory);
    MOE_ROLL for (int k = 0; k < shape_.topk; ++k) {
      int64_t to = item->rows()[k];
      if (to < 0) continue;
      MOE_ROLL for (int payload = 0; payload < shape_.payloads; ++payload) {
        const RowsOut& out = a_.outputs[payload];
        if (shape_.makesScales(payload) && shape_.scaleOrder == moeScalesByColumn) {
          ScaleOutput scales(shape_, out, false);
          row.storeColumn(scales.firstWord(to), scales.wordStride(), layout_.record.payload[payload],
                          shape_.scaleWords());
          continue;
        }
        row.store(out.data + to * out.stride, layout_.record.payload[payload], shape_.payloadBytes[payload]);
      }
    }
  }

  MOE_PROTOCOL void finishedRun(X&, int64_t, Lane&) const {}

 private:
  struct Item {
    int32_t source, slot;
    int32_t placed;  // the output holds a row of this record
    int32_t token;
    // The output row of each entry, or -1; they follow the struct.
    MOE_PROTOCOL int32_t* rows() { return reinterpret_cast<int32_t*>(this + 1); }
    MOE_PROTOCOL const int32_t* rows() const { return reinterpret_cast<const int32_t*>(this + 1); }
  };

  // The last chunks come all at once, and must be shared evenly.
  static constexpr int32_t kEvenRuns = 8;
  MOE_PROTOCOL int64_t allRows() const {
    int64_t rows = 0;
    MOE_ROLL for (int source = 0; source < shape_.nranks; ++source) rows += arrivals_.source(source).rows;
    return rows;
  }

  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  const Arrivals<X>& arrivals_;
  bool ownInput_;
  RunNotes<X> notes_;
  int32_t perRun_;
  SourceRuns runs_;
};

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// The direct path's combine, sending half: the expert's rank adds a token's local rows and writes one partial row into
// the token's own slot at its source: the address came with the token.
#pragma once

#include "device/direct_arrivals.h"
#include "device/direct_signal.h"
#include "device/expert_rows.h"
#include "device/row_jobs.h"
#include "device/window_view.h"

namespace moe {

// The sources to which a rank sends partial rows, in turn, so that every source's link is in use: all of them in expert
// layouts; in moeLayoutRank a rank's own rows are not sent, since whoever adds reads them where they are.
class PartialSources {
 public:
  MOE_PROTOCOL explicit PartialSources(const Shape& shape)
      : ranks_(static_cast<uint32_t>(shape.nranks)),
        first_(static_cast<uint32_t>(shape.rank) + (shape.expertLayout() ? 0 : 1)),
        count_(ranks_ - (shape.expertLayout() ? 0 : 1)) {}

  MOE_PROTOCOL uint32_t count() const { return count_; }
  MOE_PROTOCOL int at(uint32_t nth) const { return static_cast<int>((first_ + nth % count_) % ranks_); }

 private:
  uint32_t ranks_, first_, count_;
};

// What the two ways of sending partial rows share: which records a run has, where their partial rows go, and how they
// are counted. A run is so many contiguous records of a source, or a slice of one; warps claim runs.
template <class X>
class PartialRows {
 public:
  // `warps` share the rows.
  MOE_PROTOCOL PartialRows(const CombineArgs& a, const Epoch& epoch, int64_t warps, Cut cut)
      : a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        handle_(a.common),
        work_(a.common),
        epoch_(epoch),
        sources_(shape_) {
    int64_t all = 0, most = 0;
    MOE_ROLL for (uint32_t nth = 0; nth < sources_.count(); ++nth) {
      int64_t rows = *handle_.sourceRows(sources_.at(nth));
      all += rows;
      most = larger(most, rows);
    }
    grain_ = Grain(all, warps, shape_.combineRowBytes, cut);
    rowBytes_ = static_cast<int32_t>(shape_.combineRowBytes / grain_.slices);
    count_ = static_cast<uint32_t>(ceilDiv(most, grain_.rows) * grain_.slices) * sources_.count();
  }

  MOE_PROTOCOL int64_t rowBytes() const { return rowBytes_; }

 protected:
  // The records of a run: `rows` from `first` on, as far as the source has them.
  struct Records {
    int source;
    int32_t first;
    int64_t offset;  // of the slice
  };
  // Where a record's partial row goes.
  struct Place {
    int32_t token, ordinal;
  };
  // What a lane knows of runs.
  struct Ahead {
    Claims<X> claims;
    uint32_t run = Claims<X>::kNone;  // of which this is known:
    int64_t sourceRows = 0;
    Place place{};  // of the record that is this lane's
    PerRun<X> runs;
  };

  MOE_PROTOCOL void startClaims(X& x, Ahead& ahead) const {
    ahead.claims.startClaims(x, &a_.common.control()->sentClaims, count_);
  }
  // Loads the source's rows and this lane's place. More is loaded than the source has rows for, rather than to wait for
  // their number. False if no run comes.
  MOE_PROTOCOL bool lookAhead(X& x, Ahead& ahead, Records* records) const {
    ahead.run = ahead.claims.next(x);
    if (ahead.run >= count_) return false;
    *records = recordsOf(ahead.run);
    ahead.sourceRows = *handle_.sourceRows(records->source);
    if (x.lane() < grain_.rows && records->first + x.lane() < shape_.maxTokens) {
      ahead.place = loadPlace(*records, x.lane());
    }
    return true;
  }
  // Takes a run; false if there is none. `known`: it is the one that was looked at.
  MOE_PROTOCOL bool take(X& x, int64_t i, Ahead& ahead, Records* records, int32_t* count, bool* known) const {
    uint32_t run = ahead.claims.advance(x);
    if (run >= count_) return false;
    ahead.runs.keep(x, i, run);
    *known = run == ahead.run;
    *records = recordsOf(run);
    *count = countOf(*records, *known ? ahead.sourceRows : *handle_.sourceRows(records->source));
    return true;
  }

  MOE_PROTOCOL Place loadPlace(const Records& records, int j) const {
    return {*handle_.token(records.source, records.first + j), *handle_.ordinal(records.source, records.first + j)};
  }
  MOE_PROTOCOL std::byte* partialRow(const Records& records, const Place& place) const {
    CombineWindow window(layout_, a_.common.windows[records.source], epoch_);
    return window.row(place.token, place.ordinal) + records.offset;
  }

  // The rows of a run have been stored: counts them, each in the chunk of its token.
  MOE_PROTOCOL void countRun(X& x, int64_t i, const Ahead& ahead) const {
    Records records = recordsOf(ahead.runs.of(x, i));
    int32_t count = countOf(records, *handle_.sourceRows(records.source));
    MOE_ROLL for (int j = x.lane(); j < count; j += x.lanes()) {
      int64_t chunk = *handle_.token(records.source, records.first + j) / kChunkTokens;
      x.add(work_.sentPartials(records.source, chunk), static_cast<uint64_t>(kRowParts / grain_.slices));
    }
  }

  const CombineArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  HandleView handle_;
  Workspace work_;
  Epoch epoch_;

 private:
  MOE_PROTOCOL Records recordsOf(uint32_t run) const {
    uint32_t nth = run / static_cast<uint32_t>(grain_.slices);
    return {sources_.at(nth), static_cast<int32_t>(nth / sources_.count()) * grain_.rows,
            int64_t{run % static_cast<uint32_t>(grain_.slices)} * rowBytes_};
  }
  MOE_PROTOCOL int32_t countOf(const Records& records, int64_t sourceRows) const {
    return static_cast<int32_t>(larger(0, smaller(grain_.rows, sourceRows - records.first)));
  }

  PartialSources sources_;
  Grain grain_{0, 1, 0, {1, 0}};
  int32_t rowBytes_ = 0;
  uint32_t count_ = 0;  // runs
};

// Every warp gets several runs, so that all end at about the same time; and where rows of many experts are added, which
// takes a warp long, slices rather than rows.
constexpr int32_t kEvenRuns = 4, kSumSlices = 4;

// Expert layouts: the rows of a token's local experts are added, as a reduce job.
template <class X>
class SumJob : public PartialRows<X> {
  using Records = typename PartialRows<X>::Records;
  // One entry of a record, as the handle has it.
  struct Entry {
    int32_t row;
    float weight;
  };

 public:
  static constexpr bool kOnlyAdds = false;
  struct Lane {
    typename PartialRows<X>::Ahead ahead;
    Entry entry{};  // of the run that is known, the one that is this lane's
  };

  MOE_PROTOCOL SumJob(const X& x, const CombineArgs& a, const Epoch& epoch)
      : PartialRows<X>(a, epoch, int64_t{a.common.sendBlocks} * x.reducers(), {kEvenRuns, kSumSlices}) {}

  MOE_PROTOCOL int64_t itemBytes() const { return ReduceItem::bytes(this->shape_.topk); }
  MOE_PROTOCOL int64_t mostSources() const { return this->shape_.topk; }
  MOE_PROTOCOL bool wide() const {
    const RowsIn& rows = this->a_.rows;
    return (reinterpret_cast<uintptr_t>(rows.data) | static_cast<uintptr_t>(rows.stride | this->rowBytes())) % 16 == 0;
  }
  MOE_PROTOCOL bool weighted() const { return this->a_.applyWeights; }
  MOE_PROTOCOL int32_t type() const { return this->shape_.combineType; }

  MOE_PROTOCOL void start(X& x, Lane& lane) const { this->startClaims(x, lane.ahead); }

  MOE_PROTOCOL void prefetchRun(X& x, Lane& lane) const {
    Records records;
    if (!this->lookAhead(x, lane.ahead, &records)) return;
    int64_t most = smaller(kRunRows, this->shape_.maxTokens - records.first) * this->shape_.topk;
    if (x.lane() < most) lane.entry = loadEntry(records, x.lane());
  }

  MOE_PROTOCOL RunState beginRun(X& x, int64_t i, RunItems items, Lane& lane) const {
    Records records;
    int32_t count = 0, topk = this->shape_.topk;
    bool known = false;
    if (!this->take(x, i, lane.ahead, &records, &count, &known)) return RunState::kEnd;
    MOE_ROLL for (int j = x.lane(); j < kRunRows; j += x.lanes()) {
      std::byte* target = nullptr;
      if (j < count) {
        auto place = known && j == x.lane() ? lane.ahead.place : this->loadPlace(records, j);
        target = this->partialRow(records, place);
      }
      *items.as<ReduceItem>(j) = {target, topk, 0};
    }
    MOE_ROLL for (int32_t at = x.lane(); at < count * topk; at += x.lanes()) {
      Entry entry = known && at == x.lane() ? lane.entry : loadEntry(records, at);
      const std::byte* row = nullptr;
      if (entry.row >= 0) row = this->a_.rows.data + entry.row * this->a_.rows.stride + records.offset;
      items.as<ReduceItem>(at / topk)->sources()[at % topk] = {row, entry.weight};
    }
    return RunState::kReady;
  }

  MOE_PROTOCOL void finishedRun(X& x, int64_t i, Lane& lane) const { this->countRun(x, i, lane.ahead); }

 private:
  MOE_PROTOCOL Entry loadEntry(const Records& records, int32_t at) const {
    return {this->handle_.rows(records.source, records.first)[at],
            this->handle_.rowWeights(records.source, records.first)[at]};
  }
};

// moeLayoutRank: the caller's row is the partial row; a stream job.
template <class X>
class CopyJob : public PartialRows<X> {
  using Records = typename PartialRows<X>::Records;

 public:
  static constexpr bool kTells = true;
  struct Lane {
    typename PartialRows<X>::Ahead ahead;
  };

  MOE_PROTOCOL CopyJob(const X& x, const CombineArgs& a, const Epoch& epoch)
      : PartialRows<X>(a, epoch, int64_t{a.common.sendBlocks} * x.streamers(), {kEvenCopies, 1}), outputs_(a) {}

  MOE_PROTOCOL int64_t itemBytes() const { return sizeof(Item); }

  MOE_PROTOCOL void start(X& x, Lane& lane) const { this->startClaims(x, lane.ahead); }

  MOE_PROTOCOL void prefetchRun(X& x, Lane& lane) const {
    Records records;
    this->lookAhead(x, lane.ahead, &records);
  }

  MOE_PROTOCOL RunState beginRun(X& x, int64_t i, RunItems items, Lane& lane) const {
    Records records;
    int32_t count = 0;
    bool known = false;
    if (!this->take(x, i, lane.ahead, &records, &count, &known)) return RunState::kEnd;
    MOE_ROLL for (int j = x.lane(); j < kRunRows; j += x.lanes()) {
      Item item{nullptr, nullptr};
      if (j < count) {
        auto place = known && j == x.lane() ? lane.ahead.place : this->loadPlace(records, j);
        item.to = this->partialRow(records, place);
        item.from = outputs_.row(records.source, records.first + j, *this->handle_.sourceFirst(records.source));
        item.from = item.from ? item.from + records.offset : this->work_.zeroRow();
      }
      *items.as<Item>(j) = item;
    }
    x.warpBarrier();
    return RunState::kReady;
  }

  MOE_PROTOCOL void finishedRun(X& x, int64_t i, Lane& lane) const { this->countRun(x, i, lane.ahead); }

  MOE_PROTOCOL bool carries(const std::byte* item) const { return reinterpret_cast<const Item*>(item)->to; }
  template <class Row>
  MOE_PROTOCOL void gather(const std::byte* item, Row& row) const {
    row.load(0, reinterpret_cast<const Item*>(item)->from, this->rowBytes());
  }
  template <class Row>
  MOE_PROTOCOL void scatter(const std::byte* item, Row& row) const {
    row.store(reinterpret_cast<const Item*>(item)->to, 0, this->rowBytes());
  }
  MOE_PROTOCOL int64_t composedOffset() const { return 0; }
  MOE_PROTOCOL int64_t composedBytes() const { return 0; }
  MOE_PROTOCOL const std::byte* composed(const std::byte*) const { return nullptr; }

 private:
  static constexpr int32_t kEvenCopies = 2;
  struct Item {
    const std::byte* from;
    std::byte* to;
  };

  ExpertRows outputs_;
};

// The chunks of partial rows, as signalWhenStored goes through them.
class PartialChunks {
 public:
  MOE_PROTOCOL PartialChunks(const CombineArgs& a, const Epoch& epoch)
      : a_(a), layout_(a.common.layout), handle_(a.common), work_(a.common), epoch_(epoch), sources_(layout_.shape) {
    int32_t most = 0;
    MOE_ROLL for (uint32_t nth = 0; nth < sources_.count(); ++nth) {
      int32_t chunks = *handle_.sourceChunks(sources_.at(nth));
      most = chunks > most ? chunks : most;
    }
    count_ = static_cast<uint32_t>(most) * sources_.count();
  }

  MOE_PROTOCOL uint32_t count() const { return count_; }
  MOE_PROTOCOL uint64_t* counter(uint32_t nth) const {
    int source = sources_.at(nth);
    return chunk(nth) < *handle_.sourceChunks(source) ? work_.sentPartials(source, chunk(nth)) : nullptr;
  }
  MOE_PROTOCOL uint64_t rows(uint32_t nth) const {
    ChunkRange range = *handle_.chunkRange(sources_.at(nth), chunk(nth));
    return static_cast<uint64_t>(range.end - range.begin) * kRowParts;
  }
  template <class X>
  MOE_PROTOCOL void signal(X& x, uint32_t nth) const {
    // Not signal(): the fence is what orders this after the counts that waitAny has seen.
    x.signalMany(1, epoch_, [&](int) {
      CombineWindow window(layout_, a_.common.windows[sources_.at(nth)], epoch_);
      return window.chunkSignal(layout_.shape.rank, chunk(nth));
    });
  }

 private:
  MOE_PROTOCOL int32_t chunk(uint32_t nth) const { return static_cast<int32_t>(nth / sources_.count()); }

  const CombineArgs& a_;
  const Layout& layout_;
  HandleView handle_;
  Workspace work_;
  Epoch epoch_;
  PartialSources sources_;
  uint32_t count_;
};

}  // namespace moe

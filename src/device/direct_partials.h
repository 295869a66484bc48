// SPDX-License-Identifier: Apache-2.0
// The direct path's combine, sending half: the expert's rank adds a token's local rows and writes one partial row into
// the token's own slot at its source: the address came with the token.
#pragma once

#include "device/direct_arrivals.h"
#include "device/row_jobs.h"
#include "device/window_view.h"

namespace moe {

// This rank's expert output in moeLayoutRank.
class ExpertRows {
 public:
  MOE_PROTOCOL explicit ExpertRows(const CombineArgs& a)
      : layout_(a.common.layout),
        rows_(a.rows),
        window_(layout_, a.common.window(), Epoch(a.common.handleHead()->dispatchEpoch, layout_.shape)),
        capacity_(a.inPlace ? INT64_MAX : a.common.handleHead()->capacity),
        inPlace_(a.inPlace) {}

  // The row for a source's slot; `first`: row of the source's first slot. Null if the dispatch's output had no room for
  // it, so that it counts as zero.
  MOE_PROTOCOL const std::byte* row(int source, int64_t slot, int64_t first) const {
    if (inPlace_) return window_.record(source, slot) + layout_.record.payload[0];
    return first + slot < capacity_ ? rows_.data + (first + slot) * rows_.stride : nullptr;
  }

 private:
  const Layout& layout_;
  const RowsIn& rows_;
  DispatchWindow window_;
  int64_t capacity_;
  bool inPlace_;
};

// The chunks of partial rows that a rank sends, sources in turn, so that every source's link is in use: all sources' in
// expert layouts; in moeLayoutRank a rank's own rows are not sent, since whoever adds reads them where they are.
class SentChunks {
 public:
  MOE_PROTOCOL explicit SentChunks(const CombineArgs& a)
      : ranks_(static_cast<uint32_t>(a.common.layout.shape.nranks)),
        first_(static_cast<uint32_t>(a.common.layout.shape.rank)),
        sources_(ranks_) {
    const Shape& shape = a.common.layout.shape;
    if (!shape.expertLayout()) {
      ++first_;
      --sources_;
    }
    HandleView handle(a.common);
    int32_t most = 0;
    MOE_ROLL for (uint32_t nth = 0; nth < sources_; ++nth) {
      int source = static_cast<int>((first_ + nth) % ranks_);
      int32_t chunks = *handle.sourceChunks(source);
      most = chunks > most ? chunks : most;
      rows_ += *handle.sourceRows(source);
    }
    count_ = static_cast<uint32_t>(most) * sources_;
  }

  // Chunks up to the longest source's; shorter ones do not have all of theirs.
  MOE_PROTOCOL uint32_t count() const { return count_; }
  MOE_PROTOCOL int64_t rows() const { return rows_; }

  struct Chunk {
    int source;
    int32_t chunk;
  };
  MOE_PROTOCOL Chunk at(uint32_t nth) const {
    return {static_cast<int>((first_ + nth % sources_) % ranks_), static_cast<int32_t>(nth / sources_)};
  }

 private:
  uint32_t ranks_, first_, sources_, count_ = 0;
  int64_t rows_ = 0;
};

// What the two ways of sending partial rows share: which records a run has, where their partial rows go, and the
// signals. Runs are numbered chunk by chunk.
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
        chunks_(a),
        grain_(chunks_.rows(), warps, shape_.combineRowBytes, cut) {}

  MOE_PROTOCOL int64_t rowBytes() const { return shape_.combineRowBytes / grain_.slices; }

 protected:
  // The records of a run.
  struct Records {
    int source;
    int32_t first, count;
    int64_t offset;  // of the slice
  };
  // Where a record's partial row goes.
  struct Place {
    int32_t token, ordinal;
  };

  MOE_PROTOCOL uint32_t perChunk() const { return static_cast<uint32_t>(kChunkTokens / grain_.rows * grain_.slices); }

  // What the handle says of a run's chunk. Loaded a run ahead of its use: a GPU waits where a value is first used.
  struct Chunk {
    ChunkRange range;
    int32_t chunks;
  };
  MOE_PROTOCOL Chunk loadChunk(uint32_t run) const {
    uint32_t nth = run / perChunk();
    if (nth >= chunks_.count()) return {{0, 0}, 0};
    auto chunk = chunks_.at(nth);
    return {*handle_.chunkRange(chunk.source, chunk.chunk), *handle_.sourceChunks(chunk.source)};
  }
  MOE_PROTOCOL Records recordsOf(uint32_t run, const Chunk& known) const {
    auto chunk = chunks_.at(run / perChunk());
    if (chunk.chunk >= known.chunks) return {chunk.source, 0, 0, 0};
    auto slices = static_cast<uint32_t>(grain_.slices);
    int32_t first = known.range.begin + static_cast<int32_t>(run % perChunk() / slices) * grain_.rows;
    int64_t count = smaller(grain_.rows, known.range.end - first);
    return {chunk.source, first, static_cast<int32_t>(larger(0, count)), run % slices * rowBytes()};
  }
  MOE_PROTOCOL Place loadPlace(const Records& records, int j) const {
    return {*handle_.token(records.source, records.first + j), *handle_.ordinal(records.source, records.first + j)};
  }
  MOE_PROTOCOL std::byte* partialRow(const Records& records, const Place& place) const {
    CombineWindow window(layout_, a_.common.windows[records.source], epoch_);
    return window.row(place.token, place.ordinal) + records.offset;
  }

  // `runs` more of the chunk of a run have been stored.
  MOE_PROTOCOL void arrive(X& x, uint32_t run, uint32_t runs) const {
    auto chunk = chunks_.at(run / perChunk());
    if (x.lane() != 0 || chunk.chunk >= *handle_.sourceChunks(chunk.source)) return;
    if (x.arrive(work_.combineDone(chunk.source, chunk.chunk), runs) != perChunk()) return;
    x.reset(work_.combineDone(chunk.source, chunk.chunk));
    x.signalLocal(work_.partialSent(chunk.source, chunk.chunk), epoch_);
  }

  const CombineArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  HandleView handle_;
  Workspace work_;
  Epoch epoch_;
  SentChunks chunks_;
  Grain grain_;
};

// Every warp gets several runs, so that all end at about the same time.
constexpr int kEvenRuns = 4;

// Expert layouts: the rows of a token's local experts are added, as a reduce job.
template <class X>
class SumJob : public PartialRows<X> {
  using Records = typename PartialRows<X>::Records;
  using Place = typename PartialRows<X>::Place;
  // One entry of a record, as the handle has it.
  struct Entry {
    int32_t row;
    float weight;
  };

 public:
  static constexpr bool kOnlyAdds = false;
  struct Lane {
    // What is known ahead: of run `run` its records, this lane's first place and first entry; of run `next` its chunk.
    uint32_t run = UINT32_MAX, next = UINT32_MAX;
    Records records{};
    Place place{};
    Entry entry{};
    typename PartialRows<X>::Chunk chunk{};
  };

  MOE_PROTOCOL SumJob(const X& x, const CombineArgs& a, const Epoch& epoch)
      : PartialRows<X>(a, epoch, int64_t{a.common.sendBlocks} * x.reducers(), {kEvenRuns, true}),
        block_(static_cast<uint32_t>(x.block())),
        blocks_(static_cast<uint32_t>(a.common.sendBlocks)),
        warp_(static_cast<uint32_t>(x.warp())),
        warps_(static_cast<uint32_t>(x.reducers())),
        sources_(static_cast<uint32_t>(this->shape_.nranks)),
        perPart_(this->perChunk() / kParts),
        total_(this->chunks_.count() * this->perChunk()) {}

  MOE_PROTOCOL int64_t itemBytes() const { return ReduceItem::bytes(this->shape_.topk); }
  MOE_PROTOCOL int64_t mostSources() const { return this->shape_.topk; }
  MOE_PROTOCOL bool wide() const {
    const RowsIn& rows = this->a_.rows;
    return (reinterpret_cast<uintptr_t>(rows.data) | static_cast<uintptr_t>(rows.stride | this->rowBytes())) % 16 == 0;
  }
  MOE_PROTOCOL bool weighted() const { return this->a_.applyWeights; }
  MOE_PROTOCOL int32_t type() const { return this->shape_.combineType; }

  MOE_PROTOCOL void start(X&, Lane&) const {}

  MOE_PROTOCOL void prefetchRun(X& x, int64_t i, Lane& lane) const {
    uint32_t run = number(i);
    if (run >= total_) return;
    lane.records = this->recordsOf(run, run == lane.next ? lane.chunk : this->loadChunk(run));
    lane.run = run;
    if (x.lane() < lane.records.count) lane.place = this->loadPlace(lane.records, x.lane());
    if (x.lane() < lane.records.count * this->shape_.topk) lane.entry = loadEntry(lane.records, x.lane());
    lane.next = number(i + kRunRows);
    lane.chunk = this->loadChunk(lane.next);
  }

  MOE_PROTOCOL RunState beginRun(X& x, int64_t i, RunItems items, Lane& lane) const {
    uint32_t run = number(i);
    if (run >= total_) return RunState::kEnd;
    bool known = run == lane.run;
    auto records = known ? lane.records : this->recordsOf(run, this->loadChunk(run));
    int32_t topk = this->shape_.topk;
    MOE_ROLL for (int j = x.lane(); j < kRunRows; j += x.lanes()) {
      std::byte* target = nullptr;
      if (j < records.count) {
        auto place = known && j == x.lane() ? lane.place : this->loadPlace(records, j);
        target = this->partialRow(records, place);
      }
      *items.as<ReduceItem>(j) = {target, topk};
    }
    MOE_ROLL for (int32_t at = x.lane(); at < records.count * topk; at += x.lanes()) {
      Entry entry = known && at == x.lane() ? lane.entry : loadEntry(records, at);
      const std::byte* row = nullptr;
      if (entry.row >= 0) row = this->a_.rows.data + entry.row * this->a_.rows.stride + records.offset;
      items.as<ReduceItem>(at / topk)->sources()[at % topk] = {row, entry.weight};
    }
    return RunState::kReady;
  }

  MOE_PROTOCOL void finishedRun(X& x, int64_t i, Lane&) const { this->arrive(x, number(i), 1); }

 private:
  MOE_PROTOCOL Entry loadEntry(const Records& records, int32_t at) const {
    return {this->handle_.rows(records.source, records.first)[at],
            this->handle_.rowWeights(records.source, records.first)[at]};
  }

  // The run of a row. Blocks take parts of chunks in turn, and a block's warps share its parts. Parts go by source:
  // where the sources divide the blocks, every block sends to one source only, which was measured to be faster.
  MOE_PROTOCOL uint32_t number(int64_t i) const {
    uint32_t ofBlock = warp_ + static_cast<uint32_t>(i / kRunRows) * warps_;
    uint32_t part = block_ + ofBlock / perPart_ * blocks_;
    uint32_t ofSource = part / sources_;
    uint32_t chunk = ofSource / kParts * sources_ + part % sources_;
    return chunk * this->perChunk() + ofSource % kParts * perPart_ + ofBlock % perPart_;
  }

  static constexpr uint32_t kParts = 4;  // of a chunk
  uint32_t block_, blocks_, warp_, warps_, sources_;
  uint32_t perPart_, total_;  // runs
};

// moeLayoutRank: the caller's row is the partial row; a stream job. A block sends every sendBlocks-th chunk. Where
// there are more blocks than chunks, those without one help with the chunk (their number % chunks) of another.
template <class X>
class CopyJob : public PartialRows<X> {
  using Records = typename PartialRows<X>::Records;
  using Place = typename PartialRows<X>::Place;

 public:
  // What is known ahead: of the run of row `row` its records and this lane's place, of that of row `next` its chunk.
  struct Lane {
    int64_t row = -1, next = -1;
    Records records{};
    Place place{};
    typename PartialRows<X>::Chunk chunk{};
    uint32_t finished = 0;  // runs of the present chunk that this warp has not told of
  };

  MOE_PROTOCOL CopyJob(const X& x, const CombineArgs& a, const Epoch& epoch)
      : PartialRows<X>(a, epoch, int64_t{a.common.sendBlocks} * x.streamers(), {1, false}), outputs_(a) {
    auto block = static_cast<uint32_t>(x.block()), blocks = static_cast<uint32_t>(a.common.sendBlocks);
    auto warps = static_cast<uint32_t>(x.streamers()), warp = static_cast<uint32_t>(x.warp());
    uint32_t all = this->chunks_.count();
    if (all == 0) return;
    bool helps = block >= all;
    first_ = block % all;
    step_ = blocks;
    uint32_t chunks = helps ? 1 : (all - 1 - block) / blocks + 1;
    uint32_t sharers = all >= blocks ? 1 : (blocks - 1 - first_) / all + 1;
    warp_ = (helps ? block / all : 0) * warps + warp;
    warps_ = sharers * warps;
    uint32_t runs = chunks * this->perChunk();
    runs_ = warp_ < runs ? (runs - warp_ + warps_ - 1) / warps_ : 0;
  }

  MOE_PROTOCOL int64_t rows() const { return int64_t{runs_} * kRunRows; }
  MOE_PROTOCOL int64_t itemBytes() const { return sizeof(Item); }

  MOE_PROTOCOL void prefetchRun(X& x, int64_t i, Lane& lane) const {
    lane.records = this->recordsOf(number(i), i == lane.next ? lane.chunk : this->loadChunk(number(i)));
    lane.row = i;
    if (x.lane() < lane.records.count) lane.place = this->loadPlace(lane.records, x.lane());
    lane.next = i + kRunRows;
    lane.chunk = this->loadChunk(number(lane.next));
  }

  MOE_PROTOCOL bool beginRun(X& x, int64_t i, RunItems items, Lane& lane) const {
    bool known = i == lane.row;
    auto records = known ? lane.records : this->recordsOf(number(i), this->loadChunk(number(i)));
    MOE_ROLL for (int j = x.lane(); j < kRunRows; j += x.lanes()) {
      Item item{nullptr, nullptr};
      if (j < records.count) {
        auto place = known && j == x.lane() ? lane.place : this->loadPlace(records, j);
        item.to = this->partialRow(records, place);
        item.from = outputs_.row(records.source, records.first + j, *this->handle_.sourceFirst(records.source));
        if (!item.from) item.from = this->work_.zeroRow();
      }
      *items.as<Item>(j) = item;
    }
    x.warpBarrier();
    return true;
  }

  MOE_PROTOCOL void finishedRun(X& x, int64_t i, Lane& lane) const {
    ++lane.finished;
    // As in dispatch: one arrival for all the runs of a chunk.
    uint32_t chunk = number(i) / this->perChunk();
    if (i + kRunRows < rows() && number(i + kRunRows) / this->perChunk() == chunk) return;
    this->arrive(x, number(i), lane.finished);
    lane.finished = 0;
  }

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
  struct Item {
    const std::byte* from;
    std::byte* to;
  };

  MOE_PROTOCOL uint32_t number(int64_t i) const {
    uint32_t run = warp_ + static_cast<uint32_t>(i / kRunRows) * warps_;
    return (first_ + run / this->perChunk() * step_) * this->perChunk() + run % this->perChunk();
  }

  ExpertRows outputs_;
  uint32_t first_ = 0, step_ = 1;  // this block's chunks
  uint32_t warp_ = 0, warps_ = 1;  // among those that share them
  uint32_t runs_ = 0;              // of this warp
};

}  // namespace moe

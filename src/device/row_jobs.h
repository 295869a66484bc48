// SPDX-License-Identifier: Apache-2.0
// What a protocol tells an Exec about a sequence of rows, so that the Exec can keep several of them in flight.
//
// Rows come in runs of kRunRows, some of which may be empty. Each row has an item: memory in which the job notes what
// it needs of the row. All lanes of the warp call everything; an Exec may begin the next run while rows of the last one
// are still under way.
//
// A job does not change; what a lane must remember from call to call is in a Job::Lane of its own. Runs may be claimed
// one by one, so nobody knows beforehand how many a warp gets; rows are numbered as the warp meets them. Of all jobs:
//   void start(x, lane)            before anything else
//   RunState beginRun(x, i, items, lane)
//                                  prepares rows i .. i + kRunRows - 1, waiting for their source where needed; lanes
//                                  share the work; kEnd if no run is left
//   void prefetchRun(x, lane)      may load ahead for the run that comes next; must not wait
//   void finishedRun(x, i, lane)   rows i .. i + kRunRows - 1 have been stored completely; maybe late, never early
//   int64_t itemBytes()            most bytes of an item, a multiple of 8
//   int64_t rowBytes()             end of the last piece of a row
//
// A stream job carries rows: gather -> compose -> n destinations.
//   bool kTells                    false: finishedRun does nothing
//   bool carries(item)             false: nothing to do for this row
//   void gather(item, row)         row.load(offset, from, bytes) for each piece of the row that exists already, and
//                                  row.quantize(QuantizedPiece) for tokens that become another type; they come first
//   int64_t composedBytes()        bytes of the row that beginRun has composed, in the item; 0: none. They come last in
//                                  the row, at composedOffset(), on 16-byte boundaries on both sides
//   const byte* composed(item)     where they are
//   void scatter(item, row)        row.store(to, offset, bytes) for each destination: all of the row, or none of what
//                                  was quantized; row.storeColumn(to, stride, offset, words) for words `stride` bytes
//                                  apart
//
// A reduce job adds rows: items are ReduceItems.
//   bool kOnlyAdds                 weighted() is never true, and finishedRun does nothing
//   bool weighted(); int32_t type()
//   int64_t mostSources()          of one row
//   bool wide()                    every row begins and ends on a multiple of 16 bytes
// Where there are fewer rows than warps, a job may split each of them into slices, and call those its rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "layout.h"

namespace moe {

// The items of one run.
struct RunItems {
  std::byte* base;
  int64_t stride;

  MOE_HD std::byte* operator[](int64_t row) const { return base + row * stride; }
  template <class Item>
  MOE_HD Item* as(int64_t row) const {
    return reinterpret_cast<Item*>(base + row * stride);
  }
};

// How rows may be cut into runs: so that every warp gets `runs` of them if possible, and rows into slices while no warp
// gets more than `slices`.
struct Cut {
  int32_t runs, slices;
};

// A run of one operation, cut so that `warps` warps share `wanted` rows evenly: so many contiguous rows, or one slice
// of a row.
struct Grain {
  int32_t rows, slices;

  MOE_HD Grain(int64_t wanted, int64_t warps, int64_t rowBytes, Cut cut) : rows(kRunRows), slices(1) {
    while (rows > 1 && wanted < rows * warps * cut.runs) rows /= 2;
    while (rows == 1 && slices < kRowParts && wanted * slices * 2 <= warps * cut.slices &&
           rowBytes % (kSliceBytes * slices * 2) == 0) {
      slices *= 2;
    }
  }

 private:
  static constexpr int64_t kSliceBytes = 512;  // a multiple of them
};

enum class RunState : int32_t { kReady, kEnd, kFailed };

// The runs that a warp takes: in turns with the other warps, or from a counter that all share, so that fast warps take
// more of them. The next one is asked for early, since a claim takes long to come back, but no more than one: a slow
// warp must not sit on runs that others could take.
template <class X>
class Claims {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  // first, first + step ... below `end`, then kNone.
  MOE_PROTOCOL void startTurns(X& x, uint32_t first, uint32_t step, uint32_t end) {
    turn_ = first;
    step_ = step;
    end_ = end;
    coming_ = take(x);
  }
  // Whatever the counter says, below `end`; then anything from there on.
  MOE_PROTOCOL void startClaims(X& x, uint32_t* counter, uint32_t end) {
    counter_ = counter;
    end_ = end;
    coming_ = take(x);
  }
  // The run to begin. Nothing is asked for after the end: the counter is reset when all warps are done, and a claim
  // that is still on its way then would take a run of the next operation.
  MOE_PROTOCOL uint32_t advance(X& x) {
    uint32_t now = next(x);
    if (now < end_) coming_ = take(x);
    return now;
  }
  // The run after that. A GPU waits here if it has only just been asked for.
  MOE_PROTOCOL uint32_t next(const X& x) const { return x.broadcast(coming_, 0); }

 private:
  MOE_PROTOCOL uint32_t take(X& x) {
    if (counter_) return x.claim(counter_);
    if (turn_ >= end_) return kNone;
    uint32_t turn = turn_;
    turn_ += step_;
    return turn;
  }

  uint32_t* counter_ = nullptr;
  uint32_t turn_ = 0, step_ = 0, end_ = 0;
  uint32_t coming_ = kNone;
};

// The numbers of a warp's latest runs, kept by its lanes: finishedRun comes late. A warp of one lane finishes a
// run before it begins the next.
template <class X>
class PerRun {
 public:
  MOE_PROTOCOL void keep(const X& x, int64_t i, uint32_t value) {
    if (x.lane() == laneOf(x, i)) value_ = value;
  }
  // All lanes of the warp.
  MOE_PROTOCOL uint32_t of(const X& x, int64_t i) const { return x.broadcast(value_, laneOf(x, i)); }

 private:
  MOE_PROTOCOL static int laneOf(const X& x, int64_t i) {
    return static_cast<int>(static_cast<uint32_t>(i) / static_cast<uint32_t>(kRunRows) %
                            static_cast<uint32_t>(x.lanes()));
  }
  uint32_t value_ = 0;
};

struct ReduceSource {
  const std::byte* row;  // null: left out
  float weight;
};

// result = the sum of `count` sources in their order; without any, zeros. The sources follow the struct.
struct ReduceItem {
  std::byte* result;  // null: nothing to do for this row
  int32_t count;
  int32_t part;  // for the Exec: bytes of each source that are added at a time

  MOE_HD ReduceSource* sources() { return reinterpret_cast<ReduceSource*>(this + 1); }
  MOE_HD static int64_t bytes(int64_t mostSources) {
    return static_cast<int64_t>(sizeof(ReduceItem)) + mostSources * static_cast<int64_t>(sizeof(ReduceSource));
  }
};

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// What a protocol tells an Exec about a sequence of rows, so that the Exec can keep several of them in flight.
//
// Rows come in runs of kRunRows, some of which may be empty. Each row has an item: memory in which the job notes what
// it needs of the row. All lanes of the warp call everything; an Exec may begin the next run while rows of the last one
// are still under way.
//
// A job does not change; what a lane must remember from call to call is in a Job::Lane of its own.
//
// A stream job carries rows: gather -> compose -> n destinations.
//   int64_t itemBytes()            most bytes of an item, a multiple of 8
//   void prefetchRun(x, i, lane)   may load ahead what beginRun of row i will need; must not wait
//   bool beginRun(x, i, items, lane)
//                                  prepares rows i .. i + kRunRows - 1, waiting for their source where needed; lanes
//                                  share the work; false after a failure
//   bool carries(item)             false: nothing to do for this row
//   void gather(item, row)         row.load(offset, from, bytes) for each piece of the row that exists already
//   int64_t composedBytes()        bytes of the row that beginRun has composed, in the item; 0: none. They come last in
//                                  the row, at composedOffset(), on 16-byte boundaries on both sides
//   const byte* composed(item)     where they are
//   void scatter(item, row)        row.store(to, offset, bytes) for each destination
//   int64_t rowBytes()             end of the last piece
//   void finishedRun(x, i, lane)   rows i .. i + kRunRows - 1 have been stored completely; maybe late, never early
//
// A reduce job adds rows: items are ReduceItems. Runs may be claimed one by one, so nobody knows beforehand how many a
// warp gets; rows are numbered as the warp meets them.
//   bool kOnlyAdds                 weighted() is never true, and finishedRun does nothing
//   void start(x, lane)            before anything else
//   RunState beginRun(x, i, items, lane)
//                                  as above; kEnd if no run is left
//   void prefetchRun(x, i, lane)   may load ahead for the run that comes next; must not wait. i: its first row
//   void finishedRun(x, i, lane)   as above
//   int64_t itemBytes(); bool weighted(); int32_t type(); int64_t rowBytes()
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

// How rows may be cut into runs: so that every warp gets `runs` of them if possible, and whether rows may be sliced.
struct Cut {
  int32_t runs;
  bool maySlice;
};

// A run of one operation, cut so that `warps` warps share `wanted` rows evenly: so many contiguous rows, or one slice
// of a row.
struct Grain {
  int32_t rows, slices;

  MOE_HD Grain(int64_t wanted, int64_t warps, int64_t rowBytes, Cut cut) : rows(kRunRows), slices(1) {
    while (rows > 1 && wanted < rows * warps * cut.runs) rows /= 2;
    while (cut.maySlice && rows == 1 && slices < kMostSlices && wanted * slices * 2 <= warps &&
           rowBytes % (kSliceBytes * slices * 2) == 0) {
      slices *= 2;
    }
  }

 private:
  static constexpr int32_t kMostSlices = 4;
  static constexpr int64_t kSliceBytes = 512;  // a multiple of them
};

enum class RunState : int32_t { kReady, kEnd, kFailed };

// The runs that a warp takes: in turns with the other warps, or from a counter that all share, which lets warps help
// that come late. Two are known ahead: a claim takes long to come back.
template <class X>
class Claims {
 public:
  // first, first + step, first + 2 * step ...
  MOE_PROTOCOL void startTurns(uint32_t first, uint32_t step) {
    step_ = step;
    now_ = first;
    next_ = first + step;
    coming_ = next_ + step;
  }
  MOE_PROTOCOL void startClaims(X& x, uint32_t* counter) {
    counter_ = counter;
    now_ = x.broadcast(x.claim(counter));
    next_ = x.broadcast(x.claim(counter));
    coming_ = x.claim(counter);
  }
  MOE_PROTOCOL uint32_t now() const { return now_; }
  MOE_PROTOCOL uint32_t next() const { return next_; }
  // The next run becomes the present one.
  MOE_PROTOCOL void advance(X& x) {
    now_ = next_;
    next_ = counter_ ? x.broadcast(coming_) : coming_;
    coming_ = counter_ ? x.claim(counter_) : coming_ + step_;
  }

 private:
  uint32_t* counter_ = nullptr;
  uint32_t step_ = 0;
  uint32_t now_ = 0, next_ = 0, coming_ = 0;
};

struct ReduceSource {
  const std::byte* row;  // null: left out
  float weight;
};

// result = the sum of `count` sources in their order; without any, zeros. The sources follow the struct.
struct ReduceItem {
  std::byte* result;  // null: nothing to do for this row
  int64_t count;

  MOE_HD ReduceSource* sources() { return reinterpret_cast<ReduceSource*>(this + 1); }
  MOE_HD static int64_t bytes(int64_t mostSources) {
    return static_cast<int64_t>(sizeof(ReduceItem)) + mostSources * static_cast<int64_t>(sizeof(ReduceSource));
  }
};

}  // namespace moe

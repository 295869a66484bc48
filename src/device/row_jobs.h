// SPDX-License-Identifier: Apache-2.0
// What a protocol tells an Exec about a sequence of rows, so that the Exec can keep several of them in flight.
//
// Rows come in runs of kRunRows. Each row has an item: memory in which the job notes what it needs of the row. All
// lanes of the warp call everything; an Exec may begin the next run while rows of the last one are still under way.
//
// A stream job carries rows: gather -> compose -> n destinations.
//   int64_t itemBytes()            most bytes of an item, a multiple of 8
//   bool beginRun(x, i, items)     prepares rows i .. i + kRunRows - 1, waiting for their source where needed; lanes
// share
//                                  the work; false after a failure
//   bool carries(item)             false: nothing to do for this row
//   void gather(item, row)         row.load(offset, from, bytes) for each piece of the row that exists already
//   int64_t composedBytes()        bytes of the row that beginRun has composed, in the item; 0: none. They come last in
//                                  the row, at composedOffset(), on 16-byte boundaries on both sides
//   const byte* composed(item)     where they are
//   void scatter(item, row)        row.store(to, offset, bytes) for each destination
//   int64_t rowBytes()             end of the last piece
//   void finishedRun(x, i)         rows i .. i + kRunRows - 1 have been stored completely; maybe late, never early
//
// A reduce job adds rows: items are ReduceItems; beginRun and finishedRun as above, and
//   int64_t itemBytes(); bool weighted(); int32_t type(); int64_t elements(); int64_t rowBytes()
//   int64_t mostSources()          of one row
//   bool wide()                    every row begins and ends on a multiple of 16 bytes
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

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

// SPDX-License-Identifier: Apache-2.0
// The receiving half of a dispatch: where every row goes, once it is known how many come from whom.
//
// Every receiving block works out the places for itself, so that no block waits for another.
#pragma once

#include "device/args.h"
#include "device/window_view.h"

namespace moe {

constexpr int64_t kUnbounded = INT64_MAX;

// What one block knows about a dispatch that comes in. `counts`: the rows of each source for each local expert, an
// int32[local experts] every `countStride` bytes.
template <class X>
class Places {
 public:
  MOE_PROTOCOL Places(X& x, const DispatchArgs& a, const std::byte* counts, int64_t countStride)
      : x_(x),
        a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        counts_(counts),
        countStride_(countStride),
        local_(shape_.localExperts()) {
    memory_ = x.blockTable(layout_.workspace.placeStride);
    if (!memory_) memory_ = Workspace(a.common).places(x.block());
    bases_ = reinterpret_cast<int64_t*>(memory_ + layout_.workspace.bases);
    offsets_ = reinterpret_cast<int64_t*>(memory_ + layout_.workspace.offsets);
    sources_ = reinterpret_cast<SourceInfo*>(memory_ + layout_.workspace.sources);
  }

  MOE_PROTOCOL int32_t local() const { return local_; }
  MOE_PROTOCOL const SourceInfo& source(int source) const { return sources_[source]; }
  MOE_PROTOCOL const int64_t* offsets() const { return offsets_; }
  // Rows of a source for a local expert.
  MOE_PROTOCOL int32_t expertCount(int source, int32_t expert) const {
    return reinterpret_cast<const int32_t*>(counts_ + source * countStride_)[expert];
  }

  // The first rank that refused its part of the dispatch, or -1. After waitForCounts.
  MOE_PROTOCOL int refusedBy() const {
    MOE_ROLL for (int source = 0; source < shape_.nranks; ++source) {
      if (sources_[source].refusal != 0) return source;
    }
    return -1;
  }

  // Works out where each source's rows, or each source's rows of each expert, begin. All warps of the block.
  MOE_PROTOCOL bool findPlaces() {
    if (!shape_.expertLayout()) {
      if (x_.warp() == 0) startSources();
      return x_.barrier(true);
    }
    bool padded = shape_.layout == moeLayoutExpertPadded;
    if (!x_.barrier(sumExperts(padded ? shape_.capacity : 0))) return false;
    if (padded) return true;
    if (x_.warp() == 0) startExperts();
    x_.barrier(true);
    MOE_ROLL for (int32_t expert = x_.thread(); expert < local_; expert += x_.threads()) {
      MOE_ROLL for (int source = 0; source < shape_.nranks; ++source) {
        bases_[source * local_ + expert] += offsets_[expert];
      }
    }
    return x_.barrier(true);
  }

  // Rank layout: output row of a source's slot.
  MOE_PROTOCOL int64_t sourceRow(int source, int64_t slot) const { return bases_[source] + slot; }
  // Expert layouts: output row of a source's index-th row for a local expert, or -1 if the output does not hold it.
  MOE_PROTOCOL int64_t expertRow(int source, int32_t expert, int32_t index) const {
    int64_t row = bases_[source * local_ + expert] + index;
    return row < endOfRoom(expert) ? row : -1;
  }
  // Rows for a local expert that have arrived, and that the output holds.
  MOE_PROTOCOL int64_t arrived(int32_t expert) const {
    int last = shape_.nranks - 1;
    return bases_[last * local_ + expert] + expertCount(last, expert) - offsets_[expert];
  }
  MOE_PROTOCOL int64_t delivered(int32_t expert) const {
    return larger(0, smaller(arrived(expert), endOfRoom(expert) - offsets_[expert]));
  }
  MOE_PROTOCOL int64_t deliveredFrom(int source) const {
    int64_t rows = sources_[source].rows;
    return a_.views ? rows : larger(0, smaller(rows, a_.capacity - bases_[source]));
  }

  // All lanes of one warp.
  MOE_PROTOCOL moeSizes_t sizes() const {
    moeSizes_t sizes{0, 0, 0, 0};
    MOE_ROLL for (int from = 0; from < shape_.nranks; from += x_.lanes()) {
      int source = from + x_.lane();
      sizes.copies += x_.scan(source < shape_.nranks ? sources_[source].rows : 0).total;
    }
    if (!shape_.expertLayout()) {
      sizes.requiredRows = sizes.copies;
      sizes.rows = a_.views ? sizes.copies : smaller(sizes.copies, a_.capacity);
      sizes.overflow = !a_.views && sizes.requiredRows > a_.capacity ? 1 : 0;
      return sizes;
    }
    int32_t most = 0;
    bool allThere = true;
    MOE_ROLL for (int32_t from = 0; from < local_; from += x_.lanes()) {
      int32_t expert = from + x_.lane();
      int64_t came = expert < local_ ? arrived(expert) : 0;
      int64_t held = expert < local_ ? delivered(expert) : 0;
      most = came > most ? static_cast<int32_t>(came) : most;
      allThere = allThere && held == came;
      sizes.rows += x_.scan(static_cast<int32_t>(held)).total;
    }
    sizes.requiredRows = shape_.layout == moeLayoutExpertPadded ? x_.warpMax(most) : offsets_[local_];
    // The gap after the last expert may reach past an output that holds every row.
    sizes.overflow = x_.warpAll(allThere) ? 0 : 1;
    return sizes;
  }

 protected:
  // The row behind the last one that the output has for a local expert.
  MOE_PROTOCOL int64_t endOfRoom(int32_t expert) const {
    if (shape_.layout != moeLayoutExpertPadded) return a_.capacity;
    return a_.capacity == kUnbounded ? kUnbounded : expert * shape_.capacity + a_.capacity;
  }

  // A thread takes an expert. If all have room for `room` rows, that says where they begin; if that is 0, sums over the
  // sources, and leaves the total in offsets_.
  MOE_PROTOCOL bool sumExperts(int64_t room) {
    bool ok = true;
    MOE_ROLL for (int32_t expert = x_.thread(); expert < local_; expert += x_.threads()) {
      int64_t sum = expert * room;
      MOE_ROLL for (int source = 0; source < shape_.nranks; ++source) {
        int32_t count = expertCount(source, expert);
        if (count < 0 || count > sources_[source].rows) {
          x_.fail(moeInternalError, Awaited::kValidCounts, source, static_cast<uint64_t>(sources_[source].rows),
                  static_cast<uint64_t>(count));
          ok = false;
        }
        bases_[source * local_ + expert] = sum;
        sum += count;
      }
      offsets_[expert] = room > 0 ? expert * room : sum;
    }
    if (room > 0 && x_.thread() == 0) offsets_[local_] = local_ * room;
    return ok;
  }

  // All lanes of one warp.
  MOE_PROTOCOL void startExperts() {
    int64_t next = 0;
    MOE_ROLL for (int32_t from = 0; from < local_; from += x_.lanes()) {
      int32_t expert = from + x_.lane();
      int64_t room = expert < local_ ? roundUp(offsets_[expert], shape_.expertAlign) : 0;
      auto scanned = x_.scan(static_cast<int32_t>(room));
      if (expert < local_) offsets_[expert] = next + scanned.before;
      next += scanned.total;
    }
    if (x_.lane() == 0) offsets_[local_] = next;
  }

  // All lanes of one warp.
  MOE_PROTOCOL void startSources() {
    int64_t next = 0;
    MOE_ROLL for (int from = 0; from < shape_.nranks; from += x_.lanes()) {
      int source = from + x_.lane();
      auto scanned = x_.scan(source < shape_.nranks ? sources_[source].rows : 0);
      if (source < shape_.nranks) bases_[source] = a_.views ? source * shape_.maxTokens : next + scanned.before;
      next += scanned.total;
    }
  }

  X& x_;
  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  const std::byte* counts_;  // [nranks] int32[local experts], countStride_ bytes apart
  int64_t countStride_;
  int32_t local_;
  std::byte* memory_;  // of the block
  int64_t* bases_;     // rank layout: [source] first row; expert layouts: [source][local expert]
  int64_t* offsets_;   // expert layouts: [local expert + 1] first rows
  SourceInfo* sources_;
};

// Number of a warp of receiving block `block` among the first `warps` of all such blocks.
template <class X>
MOE_PROTOCOL int64_t receivingWarp(const X& x, const CommonArgs& common, int block, int warps) {
  return int64_t{block - (common.blocks - common.receiveBlocks)} * warps + x.warp();
}

}  // namespace moe

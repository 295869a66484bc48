// SPDX-License-Identifier: Apache-2.0
// Where the rows lie that combine takes in moeLayoutRank.
#pragma once

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

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// The receiving half of a dispatch: what is noted of every record, in the handle for combine and in the caller's small
// outputs.
#pragma once

#include "device/places.h"
#include "device/window_view.h"

namespace moe {

template <class X>
class Notes {
 public:
  MOE_PROTOCOL Notes(const DispatchArgs& a, const Places<X>& places)
      : a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        places_(places),
        handle_(a.common),
        firstExpert_(shape_.experts.first(shape_.rank)) {}

  // One entry of a record.
  struct Entry {
    RecordHead head;
    int32_t id, index;
    float weight;
  };

  // Entry `k` of the record whose head lies as RecordLayout has it, seen from `base`.
  MOE_PROTOCOL Entry load(const std::byte* base, int k) const {
    return {valueAt<RecordHead>(base, layout_.record.head, 0), valueAt<int32_t>(base, layout_.record.ids, k),
            shape_.expertLayout() ? valueAt<int32_t>(base, layout_.record.indexes, k) : -1,
            valueAt<float>(base, layout_.record.weights, k)};
  }

  // The output row of entry `k` of record `slot` of a source, or -1 if it has none. Rank layout: only the entry that is
  // its token's first of this rank has one.
  MOE_PROTOCOL int32_t rowOf(const Entry& entry, int source, int64_t slot, int k, bool* ok) const {
    if (!shape_.expertLayout()) {
      int64_t row = places_.sourceRow(source, slot);
      return isFirst(entry, k) && (a_.views || row < a_.capacity) ? static_cast<int32_t>(row) : -1;
    }
    if (!isLocal(entry) || entry.index < 0) return -1;
    int32_t expert = entry.id - firstExpert_;
    if (entry.index >= places_.expertCount(source, expert)) *ok = false;
    return *ok ? static_cast<int32_t>(places_.expertRow(source, expert, entry.index)) : -1;
  }

  // The same, and notes the entry. Those that are their token's first of this rank are counted in `found`.
  MOE_PROTOCOL int32_t noteEntry(const Entry& entry, const std::byte* base, int source, int64_t slot, int k,
                                 int32_t* found, bool* ok) const {
    bool first = isFirst(entry, k);
    if (first) {
      ++*found;
      *ok = noteRecord(entry.head, source, slot, k) && *ok;
    }
    int32_t out = rowOf(entry, source, slot, k, ok);
    if (shape_.expertLayout()) {
      noteExpertEntry(entry, base, source, slot, k, out);
      return out;
    }
    int64_t row = places_.sourceRow(source, slot);
    if (!a_.views && row >= a_.capacity) return -1;
    noteRankEntry(entry, row, k, isLocal(entry));
    if (first && a_.outSources) noteSource(row, source, entry.head.token);
    return out;
  }

 private:
  MOE_PROTOCOL bool isLocal(const Entry& entry) const {
    return entry.id >= firstExpert_ && entry.id < firstExpert_ + places_.local();
  }
  MOE_PROTOCOL bool isFirst(const Entry& entry, int k) const {
    return isLocal(entry) && entry.head.rankFirsts >> k & 1;
  }
  template <class T>
  MOE_PROTOCOL static T valueAt(const std::byte* record, int64_t offset, int k) {
    return reinterpret_cast<const T*>(record + offset)[k];
  }
  // What is noted once per record. False if it breaks a rule.
  MOE_PROTOCOL bool noteRecord(const RecordHead& head, int source, int64_t slot, int k) const {
    int32_t ordinal = popcount(head.rankFirsts & ((uint64_t{1} << k) - 1));
    if (head.token < 0 || head.token >= places_.source(source).tokens || ordinal >= shape_.distinct) return false;
    *handle_.token(source, slot) = head.token;
    *handle_.ordinal(source, slot) = ordinal;
    return true;
  }

  MOE_PROTOCOL void noteRankEntry(const Entry& entry, int64_t row, int k, bool local) const {
    int64_t at = row * shape_.topk + k;
    int64_t shown = !local ? -1 : a_.localIds ? entry.id - firstExpert_ : entry.id;
    if (a_.outIds && a_.wideOutIds) static_cast<int64_t*>(a_.outIds)[at] = shown;
    if (a_.outIds && !a_.wideOutIds) static_cast<int32_t*>(a_.outIds)[at] = static_cast<int32_t>(shown);
    if (a_.outWeights) a_.outWeights[at] = local ? entry.weight : 0.0f;
  }

  MOE_PROTOCOL void noteExpertEntry(const Entry& entry, const std::byte* base, int source, int64_t slot, int k,
                                    int32_t row) const {
    float weight = 0;
    if (isLocal(entry) && entry.index >= 0) {
      weight = entry.head.repeats ? repeatedWeight(entry, base, k) : entry.weight;
      if (row >= 0) noteOutputRow(row, source, entry.head.token, entry.id - firstExpert_, weight);
    }
    handle_.rows(source, slot)[k] = row;
    handle_.rowWeights(source, slot)[k] = weight;
  }

  // An expert that the token names again adds its weight to the first row.
  MOE_PROTOCOL float repeatedWeight(const Entry& entry, const std::byte* base, int k) const {
    float weight = entry.weight;
    MOE_ROLL for (int again = k + 1; again < shape_.topk; ++again) {
      if (valueAt<int32_t>(base, layout_.record.ids, again) != entry.id) continue;
      weight += valueAt<float>(base, layout_.record.weights, again);
    }
    return weight;
  }

  MOE_PROTOCOL void noteOutputRow(int64_t row, int source, int32_t token, int32_t expert, float weight) const {
    if (a_.outWeights) a_.outWeights[row] = weight;
    if (a_.outRowExperts) a_.outRowExperts[row] = expert;
    if (a_.outSources) noteSource(row, source, token);
  }

  MOE_PROTOCOL void noteSource(int64_t row, int source, int32_t token) const {
    a_.outSources[2 * row] = source;
    a_.outSources[2 * row + 1] = token;
  }

  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  const Places<X>& places_;
  HandleView handle_;
  int32_t firstExpert_;
};

}  // namespace moe

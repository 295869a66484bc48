// SPDX-License-Identifier: Apache-2.0
// The direct path, receiving half of dispatch: what is noted of every record, in the handle for combine and in the
// caller's small outputs.
#pragma once

#include "device/direct_arrivals.h"
#include "device/window_view.h"

namespace moe {

template <class X>
class Notes {
 public:
  MOE_PROTOCOL Notes(const DispatchArgs& a, const Arrivals<X>& arrivals)
      : a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        arrivals_(arrivals),
        handle_(a.common),
        firstExpert_(shape_.experts.first(shape_.rank)) {}

  // Waits for a run's chunk and finds its records. All lanes of the warp; false after a failure.
  MOE_PROTOCOL bool enter(X& x, const SourceRuns::Run& run, int64_t perRun, int64_t* first, int32_t* count) const {
    int32_t chunk = orderedChunk(arrivals_.source(run.source), run.order);
    ChunkRange range;
    if (!arrivals_.enterChunk(run.source, chunk, &range)) return false;
    if (run.row == 0 && x.lane() == 0 && chunk < arrivals_.source(run.source).chunks) {
      *handle_.chunkRange(run.source, chunk) = range;
    }
    *first = range.begin + run.row;
    *count = static_cast<int32_t>(larger(0, smaller(perRun, range.end - *first)));
    return true;
  }

  // Notes records first .. first+count-1 of a source, and tells take(j, k, token, row) the output row of entry k of
  // record first+j: -1 if it has none. Rank layout: rows are told of the entry that is its token's first of this rank
  // only. All lanes of the warp share the entries and keep kBatch loads in flight; false after a failure.
  template <int kBatch, class Take>
  MOE_PROTOCOL bool note(X& x, int source, int64_t first, int32_t count, Take take) const {
    int32_t entries = count * shape_.topk, found = 0;
    bool ok = true;
    MOE_ROLL for (int32_t from = 0; from < entries; from += kBatch * x.lanes()) {
      Entry batch[kBatch];
      MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
        int32_t at = from + b * x.lanes() + x.lane();
        if (at < entries) batch[b] = load(source, first + at / shape_.topk, at % shape_.topk);
      }
      MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
        int32_t at = from + b * x.lanes() + x.lane();
        if (at >= entries) continue;
        int32_t j = at / shape_.topk, k = at % shape_.topk;
        take(j, k, batch[b].head.token, noteEntry(batch[b], source, first + j, k, &found, &ok));
      }
    }
    // Every record has exactly one entry that is its token's first of this rank.
    found = x.scan(found).total;
    if (x.warpAll(ok) && found == count) return true;
    x.fail(moeInternalError, Awaited::kValidCounts, source, static_cast<uint64_t>(first), static_cast<uint64_t>(count));
    return false;
  }

 private:
  // One entry of a record as it lies in the window.
  struct Entry {
    RecordHead head;
    int32_t id, index;
    float weight;
  };

  MOE_PROTOCOL const std::byte* record(int source, int64_t slot) const {
    return arrivals_.window().record(source, slot);
  }
  template <class T>
  MOE_PROTOCOL static T valueAt(const std::byte* record, int64_t offset, int k) {
    return reinterpret_cast<const T*>(record + offset)[k];
  }
  MOE_PROTOCOL Entry load(int source, int64_t slot, int k) const {
    const std::byte* base = record(source, slot);
    return {valueAt<RecordHead>(base, layout_.record.head, 0), valueAt<int32_t>(base, layout_.record.ids, k),
            shape_.expertLayout() ? valueAt<int32_t>(base, layout_.record.indexes, k) : -1,
            valueAt<float>(base, layout_.record.weights, k)};
  }

  MOE_PROTOCOL int32_t noteEntry(const Entry& entry, int source, int64_t slot, int k, int32_t* found, bool* ok) const {
    bool local = entry.id >= firstExpert_ && entry.id < firstExpert_ + arrivals_.local();
    bool first = local && entry.head.rankFirsts >> k & 1;
    if (first) {
      ++*found;
      *ok = noteRecord(entry.head, source, slot, k) && *ok;
    }
    if (shape_.expertLayout()) return noteExpertEntry(entry, source, slot, k, local, ok);
    int64_t row = arrivals_.sourceRow(source, slot);
    if (!a_.views && row >= a_.capacity) return -1;
    noteRankEntry(entry, row, k, local);
    if (first && a_.outSources) noteSource(row, source, entry.head.token);
    return first ? static_cast<int32_t>(row) : -1;
  }

  // What is noted once per record. False if it breaks a rule.
  MOE_PROTOCOL bool noteRecord(const RecordHead& head, int source, int64_t slot, int k) const {
    int32_t ordinal = popcount(head.rankFirsts & ((uint64_t{1} << k) - 1));
    if (head.token < 0 || head.token >= arrivals_.source(source).tokens || ordinal >= shape_.distinct) return false;
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

  MOE_PROTOCOL int32_t noteExpertEntry(const Entry& entry, int source, int64_t slot, int k, bool local,
                                       bool* ok) const {
    int32_t row = -1;
    float weight = 0;
    if (local && entry.index >= 0) {
      int32_t expert = entry.id - firstExpert_;
      if (entry.index >= arrivals_.window().expertCounts(source)[expert]) *ok = false;
      if (*ok) row = static_cast<int32_t>(arrivals_.expertRow(source, expert, entry.index));
      weight = entry.head.repeats ? repeatedWeight(entry, source, slot, k) : entry.weight;
      if (row >= 0) noteOutputRow(row, source, entry.head.token, expert, weight);
    }
    handle_.rows(source, slot)[k] = row;
    handle_.rowWeights(source, slot)[k] = weight;
    return row;
  }

  // An expert that the token names again adds its weight to the first row.
  MOE_PROTOCOL float repeatedWeight(const Entry& entry, int source, int64_t slot, int k) const {
    const std::byte* base = record(source, slot);
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
  const Arrivals<X>& arrivals_;
  HandleView handle_;
  int32_t firstExpert_;
};

// The rows of all sources stay where they are: notes only. All lanes of every receiving warp; false after a failure.
template <class X>
MOE_PROTOCOL bool noteViews(X& x, const DispatchArgs& a, const Arrivals<X>& arrivals) {
  constexpr int64_t kNotedRows = 16;
  constexpr int kBatch = 4;
  const Shape& shape = a.common.layout.shape;
  Notes<X> notes(a, arrivals);
  SourceRuns runs(shape, arrivals.mostOrders(), kNotedRows);
  auto warps = static_cast<uint32_t>(a.common.receiveBlocks * x.warps());
  MOE_ROLL for (auto nth = static_cast<uint32_t>(receivingWarp(x, a.common, x.warps())); nth < runs.count();
                nth += warps) {
    SourceRuns::Run run = runs.at(nth);
    int64_t first = 0;
    int32_t rows = 0;
    if (!notes.enter(x, run, kNotedRows, &first, &rows)) return false;
    if (!notes.template note<kBatch>(x, run.source, first, rows, [](int32_t, int32_t, int32_t, int32_t) {}))
      return false;
  }
  return true;
}

}  // namespace moe

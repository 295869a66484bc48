// SPDX-License-Identifier: Apache-2.0
// The direct path, receiving half of dispatch: wait for the counts, work out where everything goes, place each source's
// rows as its chunks complete.
//
// Every receiving block works out the places for itself, so that no block waits for another.
#pragma once

#include "device/direct_send.h"
#include "device/epochs.h"
#include "device/window_view.h"

namespace moe {

constexpr int64_t kUnbounded = INT64_MAX;

// What one block knows about a dispatch that comes in.
template <class X>
class Arrivals {
 public:
  MOE_HD Arrivals(X& x, const DispatchArgs& a, uint64_t epoch)
      : x_(x), a_(a), layout_(a.common.layout), shape_(layout_.shape), window_(layout_, a.common.window(), epoch),
        epoch_(epoch), local_(shape_.localExperts()), bases_(Workspace(a.common).placeBases(x.block())),
        offsets_(Workspace(a.common).offsets(x.block())) {}

  MOE_HD const DispatchWindow& window() const { return window_; }
  MOE_HD int64_t local() const { return local_; }
  MOE_HD const CountBlock& counts(int source) const { return *window_.counts(source); }
  MOE_HD const int64_t* offsets() const { return offsets_; }

  // Waits for all counts. All warps of the block.
  MOE_HD bool waitForCounts() {
    bool ok = true;
    for (int source = x_.thread(); ok && source < shape_.nranks; source += x_.threads()) {
      ok = x_.wait(window_.countSignal(source), epoch_, Awaited::kCounts, source) && countsAreValid(source);
    }
    return x_.barrier(ok);
  }

  // The first rank that refused, or -1.
  MOE_HD int refusedBy() const {
    for (int source = 0; source < shape_.nranks; ++source) {
      if (counts(source).refusal != 0) return source;
    }
    return -1;
  }

  // Works out where each source's rows, or each source's rows of each expert, begin. All warps of the block.
  MOE_HD bool findPlaces() {
    bool ok = shape_.expertLayout() ? sumExperts() : sumSources();
    if (!x_.barrier(ok)) return false;
    if (x_.thread() == 0) shape_.expertLayout() ? startExperts() : startSources();
    return x_.barrier(true);
  }

  // Rank layout: output row of a source's slot.
  MOE_HD int64_t sourceRow(int source, int64_t slot) const { return bases_[source] + slot; }
  // Expert layouts: output row of a source's index-th row for a local expert, or -1 if the output does not hold it.
  MOE_HD int64_t expertRow(int source, int64_t expert, int64_t index) const {
    int64_t among = bases_[source * local_ + expert] + index;
    if (shape_.layout == moeLayoutExpertPadded) return among < a_.capacity ? offsets_[expert] + among : -1;
    int64_t row = offsets_[expert] + among;
    return row < a_.capacity ? row : -1;
  }
  // Rows for a local expert that have arrived, and that the output holds.
  MOE_HD int64_t arrived(int64_t expert) const {
    int last = shape_.nranks - 1;
    return bases_[last * local_ + expert] + window_.expertCounts(last)[expert];
  }
  MOE_HD int64_t delivered(int64_t expert) const {
    int64_t room = shape_.layout == moeLayoutExpertPadded ? a_.capacity : a_.capacity - offsets_[expert];
    return larger(0, smaller(arrived(expert), room));
  }
  MOE_HD int64_t deliveredFrom(int source) const {
    return a_.views ? counts(source).rows : larger(0, smaller(counts(source).rows, a_.capacity - bases_[source]));
  }

  // One thread.
  MOE_HD moeSizes_t sizes() const {
    moeSizes_t sizes{0, 0, 0, 0};
    for (int source = 0; source < shape_.nranks; ++source) sizes.copies += counts(source).rows;
    if (!shape_.expertLayout()) {
      sizes.requiredRows = sizes.copies;
      sizes.rows = a_.views ? sizes.copies : smaller(sizes.copies, a_.capacity);
    } else {
      bool padded = shape_.layout == moeLayoutExpertPadded;
      for (int64_t expert = 0; expert < local_; ++expert) {
        sizes.rows += delivered(expert);
        if (padded) sizes.requiredRows = larger(sizes.requiredRows, arrived(expert));
      }
      if (!padded) sizes.requiredRows = offsets_[local_];
    }
    sizes.overflow = !a_.views && sizes.requiredRows > a_.capacity ? 1 : 0;
    // The gap after the last expert may reach past an output that holds every row.
    if (shape_.layout == moeLayoutExpert && sizes.overflow) sizes.overflow = someLeftOut() ? 1 : 0;
    return sizes;
  }

 private:
  MOE_HD bool countsAreValid(int source) {
    const CountBlock& block = counts(source);
    bool ok = block.tokens >= 0 && block.tokens <= shape_.maxTokens && block.rows >= 0 && block.rows <= block.tokens &&
              block.chunks == chunksOf(block.tokens);
    if (!ok) {
      x_.fail(moeInternalError, Awaited::kValidCounts, source, static_cast<uint64_t>(block.tokens),
              static_cast<uint64_t>(block.rows));
    }
    return ok;
  }

  MOE_HD bool someLeftOut() const {
    for (int64_t expert = 0; expert < local_; ++expert) {
      if (delivered(expert) < arrived(expert)) return true;
    }
    return false;
  }

  // A thread takes an expert: sums over the sources, and leaves the total in offsets_.
  MOE_HD bool sumExperts() {
    bool ok = true;
    for (int64_t expert = x_.thread(); expert < local_; expert += x_.threads()) {
      int64_t sum = 0;
      for (int source = 0; source < shape_.nranks; ++source) {
        int64_t count = window_.expertCounts(source)[expert];
        if (count < 0 || count > counts(source).rows) {
          x_.fail(moeInternalError, Awaited::kValidCounts, source, static_cast<uint64_t>(counts(source).rows),
                  static_cast<uint64_t>(count));
          ok = false;
        }
        bases_[source * local_ + expert] = sum;
        sum += count;
      }
      offsets_[expert] = sum;
    }
    return ok;
  }

  MOE_HD bool sumSources() {
    for (int source = x_.thread(); source < shape_.nranks; source += x_.threads()) {
      offsets_[source] = counts(source).rows;
    }
    return true;
  }

  MOE_HD void startExperts() {
    int64_t next = 0;
    for (int64_t expert = 0; expert < local_; ++expert) {
      int64_t rows = offsets_[expert];
      offsets_[expert] = next;
      next += shape_.layout == moeLayoutExpertPadded ? shape_.capacity : roundUp(rows, shape_.expertAlign);
    }
    offsets_[local_] = next;
  }

  MOE_HD void startSources() {
    int64_t next = 0;
    for (int source = 0; source < shape_.nranks; ++source) {
      bases_[source] = a_.views ? source * shape_.maxTokens : next;
      next += offsets_[source];
    }
  }

  X& x_;
  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  DispatchWindow window_;
  uint64_t epoch_;
  int64_t local_;
  int64_t* bases_;    // rank layout: [source]; expert layouts: [source][local expert] rows of earlier sources
  int64_t* offsets_;  // expert layouts: [local expert + 1] first rows
};

// The rows of all sources as a stream job, chunk by chunk, sources in turn so that every source's link is read.
template <class X>
class PlaceJob {
 public:
  MOE_HD PlaceJob(const X& x, const DispatchArgs& a, const Arrivals<X>& arrivals, uint64_t epoch)
      : a_(a), layout_(a.common.layout), shape_(layout_.shape), arrivals_(arrivals), handle_(a.common), epoch_(epoch),
        firstExpert_(shape_.experts.first(shape_.rank)) {
    int64_t block = x.block() - (a.common.blocks - a.common.receiveBlocks);
    warp_ = block * x.warps() + x.warp();
    warps_ = int64_t{a.common.receiveBlocks} * x.warps();
  }

  MOE_HD int64_t rows() const {
    int64_t chunks = 0;
    for (int source = 0; source < shape_.nranks; ++source) {
      chunks = larger(chunks, arrivals_.counts(source).chunks);
    }
    int64_t runs = chunks * kRunsPerChunk * shape_.nranks;
    return warp_ < runs ? ceilDiv(runs - warp_, warps_) * kRunRows : 0;
  }

  MOE_HD RowStep begin(X& x, int64_t i) {
    if (i % kRunRows == 0 && !enterRun(x, i)) return RowStep::kFailed;
    int64_t slot = first_ + i % kRunRows;
    if (slot >= end_) return RowStep::kSkip;
    const std::byte* record = arrivals_.window().record(source_, slot);
    if (!noteRecord(x, record, slot)) return RowStep::kFailed;
    x.warpBarrier();
    return carries(slot) ? RowStep::kCarry : RowStep::kSkip;
  }

  template <class Row>
  MOE_HD void gather(int64_t i, Row& row) const {
    const std::byte* record = arrivals_.window().record(source_, first_ + i % kRunRows);
    for (int payload = 0; payload < shape_.payloads; ++payload) {
      int64_t at = layout_.record.payload[payload];
      row.load(at, record + at, shape_.payloadBytes[payload]);
    }
  }

  MOE_HD int64_t fillOffset() const { return 0; }
  MOE_HD int64_t fillBytes() const { return 0; }
  MOE_HD void fill(X&, int64_t, std::byte*) const {}

  template <class Row>
  MOE_HD void scatter(int64_t i, const Row& row) const {
    int64_t slot = first_ + i % kRunRows;
    if (!shape_.expertLayout()) {
      storePayloads(row, arrivals_.sourceRow(source_, slot));
      return;
    }
    const int32_t* rows = handle_.rows(source_, slot);
    for (int k = 0; k < shape_.topk; ++k) {
      if (rows[k] >= 0) storePayloads(row, rows[k]);
    }
  }

  MOE_HD void finished(X&, int64_t) const {}

 private:
  // Finds the run's source and slots, and waits for its chunk.
  MOE_HD bool enterRun(X& x, int64_t i) {
    int64_t run = warp_ + i / kRunRows * warps_;
    source_ = static_cast<int>((shape_.rank + run % shape_.nranks) % shape_.nranks);
    int64_t inSource = run / shape_.nranks;
    int64_t chunk = inSource / kRunsPerChunk;
    first_ = end_ = 0;
    if (chunk >= arrivals_.counts(source_).chunks) return true;
    bool ok = true;
    if (x.lane() == 0) ok = x.wait(arrivals_.window().chunkSignal(source_, chunk), epoch_, Awaited::kRows, source_);
    if (!x.warpAll(ok)) return false;
    const int32_t* ends = arrivals_.window().chunkEnds(source_);
    int64_t begin = chunk > 0 ? ends[chunk - 1] : 0;
    int64_t end = ends[chunk];
    if (begin < 0 || end < begin || end > begin + kChunkTokens || end > arrivals_.counts(source_).rows) {
      x.fail(moeInternalError, Awaited::kValidCounts, source_, static_cast<uint64_t>(begin), static_cast<uint64_t>(end));
      return false;
    }
    first_ = begin + inSource % kRunsPerChunk * kRunRows;
    end_ = smaller(end, first_ + kRunRows);
    return true;
  }

  MOE_HD bool isLocal(int32_t id) const { return id >= firstExpert_ && id < firstExpert_ + arrivals_.local(); }

  // Takes a record's routing into the handle and the caller's arrays.
  MOE_HD bool noteRecord(X& x, const std::byte* record, int64_t slot) {
    const auto* head = reinterpret_cast<const RecordHead*>(record + layout_.record.head);
    const auto* ids = reinterpret_cast<const int32_t*>(record + layout_.record.ids);
    bool ok = head->token >= 0 && head->token < arrivals_.counts(source_).tokens;
    if (x.lane() == 0) {
      int mine = 0;
      while (mine < shape_.topk && !isLocal(ids[mine])) ++mine;
      ok = ok && mine < shape_.topk;
      int ordinal = popcount(head->rankFirsts & ((uint64_t{1} << (mine % 64)) - 1));
      ok = ok && ordinal < shape_.distinct;
      *handle_.token(source_, slot) = head->token;
      *handle_.ordinal(source_, slot) = ordinal;
    }
    for (int k = x.lane(); ok && k < shape_.topk; k += x.lanes()) {
      ok = shape_.expertLayout() ? noteExpertRow(record, slot, k) : noteRankEntry(record, slot, k);
    }
    ok = x.warpAll(ok);
    if (!ok) {
      x.fail(moeInternalError, Awaited::kValidCounts, source_, static_cast<uint64_t>(slot),
             static_cast<uint64_t>(head->token));
    } else if (!shape_.expertLayout() && a_.outSources && x.lane() == 0 && inOutput(slot)) {
      noteSource(arrivals_.sourceRow(source_, slot), head->token);
    }
    return ok;
  }

  MOE_HD bool inOutput(int64_t slot) const {
    return a_.views || arrivals_.sourceRow(source_, slot) < a_.capacity;
  }

  MOE_HD bool carries(int64_t slot) const {
    if (a_.views) return false;
    if (!shape_.expertLayout()) return inOutput(slot);
    const int32_t* rows = handle_.rows(source_, slot);
    for (int k = 0; k < shape_.topk; ++k) {
      if (rows[k] >= 0) return true;
    }
    return false;
  }

  MOE_HD bool noteRankEntry(const std::byte* record, int64_t slot, int k) const {
    if (!inOutput(slot)) return true;
    int32_t id = reinterpret_cast<const int32_t*>(record + layout_.record.ids)[k];
    bool local = isLocal(id);
    int64_t at = arrivals_.sourceRow(source_, slot) * shape_.topk + k;
    int64_t shown = !local ? -1 : a_.localIds ? id - firstExpert_ : id;
    if (a_.outIds && a_.wideOutIds) static_cast<int64_t*>(a_.outIds)[at] = shown;
    if (a_.outIds && !a_.wideOutIds) static_cast<int32_t*>(a_.outIds)[at] = static_cast<int32_t>(shown);
    if (a_.outWeights) {
      a_.outWeights[at] = local ? reinterpret_cast<const float*>(record + layout_.record.weights)[k] : 0.0f;
    }
    return true;
  }

  MOE_HD bool noteExpertRow(const std::byte* record, int64_t slot, int k) const {
    const auto* head = reinterpret_cast<const RecordHead*>(record + layout_.record.head);
    const auto* ids = reinterpret_cast<const int32_t*>(record + layout_.record.ids);
    int32_t row = -1;
    float weight = 0;
    if (isLocal(ids[k]) && head->expertFirsts >> k & 1) {
      int64_t expert = ids[k] - firstExpert_;
      int32_t index = reinterpret_cast<const int32_t*>(record + layout_.record.indexes)[k];
      if (index < 0 || index >= arrivals_.window().expertCounts(source_)[expert]) return false;
      row = static_cast<int32_t>(arrivals_.expertRow(source_, expert, index));
      // An expert named again by the same token adds its weight to the first row.
      const auto* weights = reinterpret_cast<const float*>(record + layout_.record.weights);
      weight = weights[k];
      for (int again = k + 1; again < shape_.topk; ++again) {
        if (ids[again] == ids[k]) weight += weights[again];
      }
      if (row >= 0) noteOutputRow(row, head->token, static_cast<int32_t>(expert), weight);
    }
    handle_.rows(source_, slot)[k] = row;
    handle_.rowWeights(source_, slot)[k] = weight;
    return true;
  }

  MOE_HD void noteOutputRow(int64_t row, int32_t token, int32_t expert, float weight) const {
    if (a_.outWeights) a_.outWeights[row] = weight;
    if (a_.outRowExperts) a_.outRowExperts[row] = expert;
    if (a_.outSources) noteSource(row, token);
  }

  MOE_HD void noteSource(int64_t row, int32_t token) const {
    a_.outSources[2 * row] = source_;
    a_.outSources[2 * row + 1] = token;
  }

  template <class Row>
  MOE_HD void storePayloads(const Row& row, int64_t to) const {
    for (int payload = 0; payload < shape_.payloads; ++payload) {
      const RowsOut& out = a_.outputs[payload];
      row.store(out.data + to * out.stride, layout_.record.payload[payload], shape_.payloadBytes[payload]);
    }
  }

  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  const Arrivals<X>& arrivals_;
  HandleView handle_;
  uint64_t epoch_;
  int32_t firstExpert_;
  int64_t warp_ = 0, warps_ = 1;
  int source_ = 0;
  int64_t first_ = 0, end_ = 0;
};

}  // namespace moe

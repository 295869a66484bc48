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

// The first rank that refused its part of a dispatch whose counts have all come, or -1.
MOE_PROTOCOL inline int findRefusal(const Shape& shape, const DispatchWindow& window) {
  for (int source = 0; source < shape.nranks; ++source) {
    if (window.counts(source)->refusal != 0) return source;
  }
  return -1;
}

// What one block knows about a dispatch that comes in.
template <class X>
class Arrivals {
 public:
  MOE_PROTOCOL Arrivals(X& x, const DispatchArgs& a, uint64_t epoch)
      : x_(x),
        a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        window_(layout_, a.common.window(), epoch),
        epoch_(epoch),
        local_(shape_.localExperts()),
        bases_(Workspace(a.common).placeBases(x.block())),
        offsets_(Workspace(a.common).offsets(x.block())) {}

  MOE_PROTOCOL const DispatchWindow& window() const { return window_; }
  MOE_PROTOCOL int64_t local() const { return local_; }
  MOE_PROTOCOL const CountBlock& counts(int source) const { return *window_.counts(source); }
  MOE_PROTOCOL const int64_t* offsets() const { return offsets_; }

  // Waits for all counts. All warps of the block.
  MOE_PROTOCOL bool waitForCounts() {
    bool ok = true;
    for (int source = x_.thread(); ok && source < shape_.nranks; source += x_.threads()) {
      ok = x_.wait(window_.countSignal(source), epoch_, Awaited::kCounts, source) && countsAreValid(source);
    }
    return x_.barrier(ok);
  }

  // Works out where each source's rows, or each source's rows of each expert, begin. All warps of the block.
  MOE_PROTOCOL bool findPlaces() {
    bool ok = shape_.expertLayout() ? sumExperts() : sumSources();
    if (!x_.barrier(ok)) return false;
    if (x_.thread() == 0) shape_.expertLayout() ? startExperts() : startSources();
    return x_.barrier(true);
  }

  // Rank layout: output row of a source's slot.
  MOE_PROTOCOL int64_t sourceRow(int source, int64_t slot) const { return bases_[source] + slot; }
  // Expert layouts: output row of a source's index-th row for a local expert, or -1 if the output does not hold it.
  MOE_PROTOCOL int64_t expertRow(int source, int64_t expert, int64_t index) const {
    int64_t among = bases_[source * local_ + expert] + index;
    if (shape_.layout == moeLayoutExpertPadded) return among < a_.capacity ? offsets_[expert] + among : -1;
    int64_t row = offsets_[expert] + among;
    return row < a_.capacity ? row : -1;
  }
  // Rows for a local expert that have arrived, and that the output holds.
  MOE_PROTOCOL int64_t arrived(int64_t expert) const {
    int last = shape_.nranks - 1;
    return bases_[last * local_ + expert] + window_.expertCounts(last)[expert];
  }
  MOE_PROTOCOL int64_t delivered(int64_t expert) const {
    int64_t room = shape_.layout == moeLayoutExpertPadded ? a_.capacity : a_.capacity - offsets_[expert];
    return larger(0, smaller(arrived(expert), room));
  }
  MOE_PROTOCOL int64_t deliveredFrom(int source) const {
    return a_.views ? counts(source).rows : larger(0, smaller(counts(source).rows, a_.capacity - bases_[source]));
  }

  // One thread.
  MOE_PROTOCOL moeSizes_t sizes() const {
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
  MOE_PROTOCOL bool countsAreValid(int source) {
    const CountBlock& block = counts(source);
    bool ok = block.tokens >= 0 && block.tokens <= shape_.maxTokens && block.rows >= 0 && block.rows <= block.tokens &&
              block.chunks == chunksOf(block.tokens);
    if (!ok) {
      x_.fail(moeInternalError, Awaited::kValidCounts, source, static_cast<uint64_t>(block.tokens),
              static_cast<uint64_t>(block.rows));
    }
    return ok;
  }

  MOE_PROTOCOL bool someLeftOut() const {
    for (int64_t expert = 0; expert < local_; ++expert) {
      if (delivered(expert) < arrived(expert)) return true;
    }
    return false;
  }

  // A thread takes an expert: sums over the sources, and leaves the total in offsets_.
  MOE_PROTOCOL bool sumExperts() {
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

  MOE_PROTOCOL bool sumSources() {
    for (int source = x_.thread(); source < shape_.nranks; source += x_.threads()) {
      offsets_[source] = counts(source).rows;
    }
    return true;
  }

  MOE_PROTOCOL void startExperts() {
    int64_t next = 0;
    for (int64_t expert = 0; expert < local_; ++expert) {
      int64_t rows = offsets_[expert];
      offsets_[expert] = next;
      next += shape_.layout == moeLayoutExpertPadded ? shape_.capacity : roundUp(rows, shape_.expertAlign);
    }
    offsets_[local_] = next;
  }

  MOE_PROTOCOL void startSources() {
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

// Which rows of which source a warp takes as its i-th ones: chunk by chunk, sources in turn, so that every source's
// link is in use.
class SourceRuns {
 public:
  MOE_PROTOCOL SourceRuns(const Shape& shape, int64_t warp, int64_t warps)
      : shape_(shape), warp_(warp), warps_(warps) {}

  // Rows that a warp goes through when the longest source has `chunks` chunks.
  MOE_PROTOCOL int64_t rows(int64_t chunks) const {
    int64_t runs = chunks * kRunsPerChunk * shape_.nranks;
    return warp_ < runs ? ceilDiv(runs - warp_, warps_) * kRunRows : 0;
  }
  MOE_PROTOCOL int source(int64_t i) const {
    return static_cast<int>((static_cast<uint32_t>(shape_.rank) + run(i) % ranks()) % ranks());
  }
  MOE_PROTOCOL int64_t chunk(int64_t i) const { return run(i) / ranks() / static_cast<uint32_t>(kRunsPerChunk); }
  // First row of the run among the records of its chunk.
  MOE_PROTOCOL int64_t row(int64_t i) const {
    return run(i) / ranks() % static_cast<uint32_t>(kRunsPerChunk) * kRunRows;
  }

 private:
  // There are fewer than 2^32 runs, and 64-bit divisions are slow on GPUs.
  MOE_PROTOCOL uint32_t run(int64_t i) const { return static_cast<uint32_t>(warp_ + i / kRunRows * warps_); }
  MOE_PROTOCOL uint32_t ranks() const { return static_cast<uint32_t>(shape_.nranks); }

  const Shape& shape_;
  int64_t warp_, warps_;
};

template <class X>
MOE_PROTOCOL int64_t receivingWarp(const X& x, const CommonArgs& common) {
  return int64_t{x.block() - (common.blocks - common.receiveBlocks)} * x.warps() + x.warp();
}

// The rows of all sources as a stream job.
template <class X>
class PlaceJob {
 public:
  MOE_PROTOCOL PlaceJob(const X& x, const DispatchArgs& a, const Arrivals<X>& arrivals, uint64_t epoch)
      : a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        arrivals_(arrivals),
        handle_(a.common),
        epoch_(epoch),
        firstExpert_(shape_.experts.first(shape_.rank)),
        runs_(shape_, receivingWarp(x, a.common), int64_t{a.common.receiveBlocks} * x.warps()) {}

  MOE_PROTOCOL int64_t rows() const {
    int64_t chunks = 0;
    for (int source = 0; source < shape_.nranks; ++source) chunks = larger(chunks, arrivals_.counts(source).chunks);
    return runs_.rows(chunks);
  }

  MOE_PROTOCOL int64_t rowBytes() const {
    int last = shape_.payloads - 1;
    return layout_.record.payload[last] + shape_.payloadBytes[last];
  }
  MOE_PROTOCOL int64_t itemBytes() const { return itemBytes(shape_); }
  MOE_HD static int64_t itemBytes(const Shape& shape) {
    return roundUp(static_cast<int64_t>(sizeof(Item)) + 4 * int64_t{shape.topk}, 8);
  }

  MOE_PROTOCOL bool beginRun(X& x, int64_t i, RunItems items) {
    int source = runs_.source(i);
    for (int j = x.lane(); j < kRunRows; j += x.lanes()) *items.as<Item>(j) = {source, -1, 0, 0};
    int64_t begin = 0, end = 0;
    if (!enterChunk(x, source, runs_.chunk(i), &begin, &end)) return false;
    int64_t first = begin + runs_.row(i);
    auto rows = static_cast<int32_t>(larger(0, smaller(kRunRows, end - first)));
    x.warpBarrier();
    bool ok = true;
    for (int32_t entry = x.lane(); entry < rows * shape_.topk; entry += x.lanes()) {
      int32_t j = entry / shape_.topk;
      Record record(*this, source, first + j);
      ok = noteEntry(*items.as<Item>(j), record, static_cast<int>(entry % shape_.topk)) && ok;
    }
    x.warpBarrier();
    // Every record has exactly one entry that is its token's first of this rank.
    for (int64_t j = x.lane(); j < rows; j += x.lanes()) ok = ok && items.as<Item>(j)->slot >= 0;
    if (!x.warpAll(ok)) {
      x.fail(moeInternalError, Awaited::kValidCounts, source, static_cast<uint64_t>(first),
             static_cast<uint64_t>(rows));
      return false;
    }
    return true;
  }

  MOE_PROTOCOL bool carries(const std::byte* item) const { return reinterpret_cast<const Item*>(item)->placed; }

  template <class Row>
  MOE_PROTOCOL void gather(const std::byte* memory, Row& row) const {
    const auto* item = reinterpret_cast<const Item*>(memory);
    const std::byte* record = arrivals_.window().record(item->source, item->slot);
    for (int payload = 0; payload < shape_.payloads; ++payload) {
      int64_t at = layout_.record.payload[payload];
      row.load(at, record + at, shape_.payloadBytes[payload]);
    }
  }

  MOE_PROTOCOL int64_t composedOffset() const { return 0; }
  MOE_PROTOCOL int64_t composedBytes() const { return 0; }
  MOE_PROTOCOL const std::byte* composed(const std::byte*) const { return nullptr; }

  template <class Row>
  MOE_PROTOCOL void scatter(const std::byte* memory, Row& row) const {
    const auto* item = reinterpret_cast<const Item*>(memory);
    if (!shape_.expertLayout()) {
      storePayloads(row, arrivals_.sourceRow(item->source, item->slot));
      return;
    }
    for (int k = 0; k < shape_.topk; ++k) {
      if (item->rows()[k] >= 0) storePayloads(row, item->rows()[k]);
    }
  }

  MOE_PROTOCOL void finishedRun(X&, int64_t) const {}

 private:
  struct Item {
    int32_t source, slot;
    int32_t placed;  // the output holds a row of this record
    int32_t reserved;
    // Expert layouts: the output row of each entry, or -1; they follow the struct.
    MOE_PROTOCOL int32_t* rows() { return reinterpret_cast<int32_t*>(this + 1); }
    MOE_PROTOCOL const int32_t* rows() const { return reinterpret_cast<const int32_t*>(this + 1); }
  };

  // A record's routing, where it lies in the window.
  struct Record {
    int source;
    int64_t slot;
    RecordHead head;
    const int32_t* ids;
    const float* weights;
    const int32_t* indexes;

    MOE_PROTOCOL Record(const PlaceJob& job, int from, int64_t at) : source(from), slot(at) {
      const std::byte* base = job.arrivals_.window().record(from, at);
      head = *reinterpret_cast<const RecordHead*>(base + job.layout_.record.head);
      ids = reinterpret_cast<const int32_t*>(base + job.layout_.record.ids);
      weights = reinterpret_cast<const float*>(base + job.layout_.record.weights);
      indexes = reinterpret_cast<const int32_t*>(base + job.layout_.record.indexes);
    }
  };

  // Waits for a chunk of a source and finds its records.
  MOE_PROTOCOL bool enterChunk(X& x, int source, int64_t chunk, int64_t* begin, int64_t* end) const {
    if (chunk >= arrivals_.counts(source).chunks) return true;
    bool ok = true;
    if (x.lane() == 0) ok = x.wait(arrivals_.window().chunkSignal(source, chunk), epoch_, Awaited::kRows, source);
    if (!x.warpAll(ok)) return false;
    const int32_t* ends = arrivals_.window().chunkEnds(source);
    *begin = chunk > 0 ? ends[chunk - 1] : 0;
    *end = ends[chunk];
    ok = *begin >= 0 && *end >= *begin && *end <= *begin + kChunkTokens && *end <= arrivals_.counts(source).rows;
    if (!ok) {
      x.fail(moeInternalError, Awaited::kValidCounts, source, static_cast<uint64_t>(*begin),
             static_cast<uint64_t>(*end));
    }
    return ok;
  }

  MOE_PROTOCOL bool isLocal(int32_t id) const { return id >= firstExpert_ && id < firstExpert_ + arrivals_.local(); }

  // Takes one entry of a record into the item, the handle and the caller's arrays. False if it breaks a rule.
  MOE_PROTOCOL bool noteEntry(Item& item, const Record& record, int k) const {
    bool local = isLocal(record.ids[k]);
    if (local && record.head.rankFirsts >> k & 1 && !noteRecord(item, record, k)) return false;
    if (shape_.expertLayout()) return noteExpertRow(item, record, k, local);
    if (inOutput(record)) noteRankEntry(record, k, local);
    return true;
  }

  MOE_PROTOCOL bool inOutput(const Record& record) const {
    return a_.views || arrivals_.sourceRow(record.source, record.slot) < a_.capacity;
  }

  // What is noted once per record, by the entry that is its token's first of this rank.
  MOE_PROTOCOL bool noteRecord(Item& item, const Record& record, int k) const {
    int32_t ordinal = popcount(record.head.rankFirsts & ((uint64_t{1} << k) - 1));
    if (record.head.token < 0 || record.head.token >= arrivals_.counts(record.source).tokens) return false;
    if (ordinal >= shape_.distinct) return false;
    item.slot = static_cast<int32_t>(record.slot);
    *handle_.token(record.source, record.slot) = record.head.token;
    *handle_.ordinal(record.source, record.slot) = ordinal;
    if (shape_.expertLayout() || !inOutput(record)) return true;
    if (!a_.views) item.placed = 1;
    if (a_.outSources) noteSource(arrivals_.sourceRow(record.source, record.slot), record);
    return true;
  }

  MOE_PROTOCOL void noteRankEntry(const Record& record, int k, bool local) const {
    int64_t at = arrivals_.sourceRow(record.source, record.slot) * shape_.topk + k;
    int64_t shown = !local ? -1 : a_.localIds ? record.ids[k] - firstExpert_ : record.ids[k];
    if (a_.outIds && a_.wideOutIds) static_cast<int64_t*>(a_.outIds)[at] = shown;
    if (a_.outIds && !a_.wideOutIds) static_cast<int32_t*>(a_.outIds)[at] = static_cast<int32_t>(shown);
    if (a_.outWeights) a_.outWeights[at] = local ? record.weights[k] : 0.0f;
  }

  MOE_PROTOCOL bool noteExpertRow(Item& item, const Record& record, int k, bool local) const {
    int32_t index = record.indexes[k];
    int32_t row = -1;
    float weight = 0;
    if (local && index >= 0) {
      int64_t expert = record.ids[k] - firstExpert_;
      if (index >= arrivals_.window().expertCounts(record.source)[expert]) return false;
      row = static_cast<int32_t>(arrivals_.expertRow(record.source, expert, index));
      // An expert that the token names again adds its weight to the first row.
      weight = record.weights[k];
      for (int again = k + 1; again < shape_.topk; ++again) {
        if (record.ids[again] == record.ids[k]) weight += record.weights[again];
      }
      if (row >= 0) noteOutputRow(row, record, static_cast<int32_t>(expert), weight);
    }
    item.rows()[k] = row;
    if (row >= 0) item.placed = 1;
    handle_.rows(record.source, record.slot)[k] = row;
    handle_.rowWeights(record.source, record.slot)[k] = weight;
    return true;
  }

  MOE_PROTOCOL void noteOutputRow(int64_t row, const Record& record, int32_t expert, float weight) const {
    if (a_.outWeights) a_.outWeights[row] = weight;
    if (a_.outRowExperts) a_.outRowExperts[row] = expert;
    if (a_.outSources) noteSource(row, record);
  }

  MOE_PROTOCOL void noteSource(int64_t row, const Record& record) const {
    a_.outSources[2 * row] = record.source;
    a_.outSources[2 * row + 1] = record.head.token;
  }

  template <class Row>
  MOE_PROTOCOL void storePayloads(Row& row, int64_t to) const {
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
  SourceRuns runs_;
};

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// The oracle: what a dispatch must deliver and what a combine must return, computed the slow and obvious way from what
// all ranks handed in. It shares no code with the library.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "moe.h"
#include "numbers.h"
#include "quantized.h"

namespace moetest::reference {

using Bytes = std::vector<std::byte>;

// The shape of a communicator, with the config's defaults filled in.
struct Shape {
  Shape(int ranks, const moeConfig_t& given) : nranks(ranks), config(given) {
    if (config.expertAlign == 0) config.expertAlign = 1;
    if (config.capacity == 0) config.capacity = nranks * config.maxTokensPerRank;
  }
  int nranks;
  moeConfig_t config;

  bool quantizes() const { return config.quantize != moeQuantizeNone; }
  int64_t scaleWords() const { return quantizedWords(config.hidden, config.quantize); }
  // As the caller has it.
  int64_t tokenBytes() const { return config.hidden * elementBytes(config.dtype); }
  int64_t combineRowBytes() const { return config.hidden * elementBytes(config.combineDtype); }
  int64_t inputBytes(int input) const { return input == 0 ? tokenBytes() : config.sideRowBytes[input - 1]; }
  int inputs() const { return 1 + config.numSideRows; }
  // As it arrives.
  int64_t payloadBytes(int payload) const {
    if (!quantizes()) return inputBytes(payload);
    return payload == 0 ? config.hidden : payload == 1 ? 4 * scaleWords() : inputBytes(payload - 1);
  }
  int payloads() const { return inputs() + (quantizes() ? 1 : 0); }
  bool makesScales(int payload) const { return quantizes() && payload == 1; }

  int64_t expertsOf(int rank) const { return config.numExperts / nranks + (rank < config.numExperts % nranks ? 1 : 0); }
  int64_t firstExpertOf(int rank) const {
    int64_t first = 0;
    for (int r = 0; r < rank; ++r) first += expertsOf(r);
    return first;
  }
  bool isExpert(int64_t id) const { return id >= 0 && id < config.numExperts; }
  int ownerOf(int64_t expert) const {
    int rank = 0;
    while (expert >= firstExpertOf(rank) + expertsOf(rank)) ++rank;
    return rank;
  }
};

// What one rank hands to one dispatch. `weights` empty: all 1.
struct Sent {
  int64_t numTokens = 0;
  int32_t topk = 0;
  std::vector<int64_t> ids;
  std::vector<float> weights;
  std::vector<Bytes> rows;      // tokens, then side rows, without gaps
  std::vector<Bytes> arriving;  // what becomes of them, scales by row; empty if nothing does

  int64_t id(int64_t token, int k) const { return ids[static_cast<size_t>(token * topk + k)]; }
  float weight(int64_t token, int k) const {
    return weights.empty() ? 1.0f : weights[static_cast<size_t>(token * topk + k)];
  }
};

// One row of an output. source -1: a gap. expert is global, and -1 in the rank layout.
struct Slot {
  int source = -1;
  int64_t token = -1;
  int64_t expert = -1;
  float weight = 0;
};

// What one rank receives from one dispatch.
struct Delivery {
  moeSizes_t sizes{};
  int64_t arrived = 0;         // rows that an output without bound would hold
  std::vector<Slot> slots;     // one per row of the output
  std::vector<int64_t> ids;    // rank layout: [slots][maxTopk], global, -1 for nobody
  std::vector<float> weights;  // beside ids
  std::vector<int64_t> rankCounts, rankOffsets;
  std::vector<int64_t> expertCounts, expertOffsets;
};

// The distinct experts of a token that `rank` owns, in the order in which the token names them, with summed weights.
inline std::vector<std::pair<int64_t, float>> expertsAt(const Shape& shape, const Sent& sent, int64_t token, int rank) {
  std::vector<std::pair<int64_t, float>> found;
  for (int k = 0; k < sent.topk; ++k) {
    int64_t id = sent.id(token, k);
    if (!shape.isExpert(id) || shape.ownerOf(id) != rank) continue;
    auto same = std::find_if(found.begin(), found.end(), [id](const auto& entry) { return entry.first == id; });
    if (same == found.end()) {
      found.emplace_back(id, sent.weight(token, k));
    } else {
      same->second += sent.weight(token, k);
    }
  }
  return found;
}

namespace detail {

inline int64_t roundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Rank layout. With `viewRows` > 0 the rows of source s start at row s * viewRows, as in the window.
inline void deliverByRank(const Shape& shape, const std::vector<Sent>& sents, int rank, int64_t capacity,
                          int64_t viewRows, Delivery* out) {
  auto width = static_cast<size_t>(shape.config.maxTopk);
  out->slots.assign(static_cast<size_t>(capacity), Slot{});
  out->ids.assign(static_cast<size_t>(capacity) * width, -1);
  out->weights.assign(static_cast<size_t>(capacity) * width, 0.0f);
  int64_t next = 0;
  for (int source = 0; source < shape.nranks; ++source) {
    const Sent& sent = sents[static_cast<size_t>(source)];
    if (viewRows > 0) next = source * viewRows;
    out->rankOffsets.push_back(next);
    int64_t before = next;
    for (int64_t token = 0; token < sent.numTokens; ++token) {
      auto experts = expertsAt(shape, sent, token, rank);
      if (experts.empty()) continue;
      int64_t row = next++;
      ++out->sizes.copies;
      if (row >= capacity) continue;
      ++out->sizes.rows;
      out->slots[static_cast<size_t>(row)] = {source, token, -1, 0};
      for (int k = 0; k < sent.topk; ++k) {
        int64_t id = sent.id(token, k);
        if (!shape.isExpert(id) || shape.ownerOf(id) != rank) continue;
        auto at = static_cast<size_t>(row) * width + static_cast<size_t>(k);
        out->ids[at] = id;
        out->weights[at] = sent.weight(token, k);
      }
    }
    // Rows that were left out do not count.
    out->rankCounts.push_back(std::max<int64_t>(0, std::min(next, capacity) - before));
  }
  out->arrived = out->sizes.copies;
  out->sizes.requiredRows = out->sizes.copies;
  out->sizes.overflow = out->sizes.rows < out->sizes.copies;
}

inline void deliverByExpert(const Shape& shape, const std::vector<Sent>& sents, int rank, int64_t capacity,
                            Delivery* out) {
  bool padded = shape.config.layout == moeLayoutExpertPadded;
  auto experts = shape.expertsOf(rank);
  int64_t first = shape.firstExpertOf(rank);
  std::vector<std::vector<Slot>> lists(static_cast<size_t>(experts));
  for (int source = 0; source < shape.nranks; ++source) {
    const Sent& sent = sents[static_cast<size_t>(source)];
    int64_t copies = 0;
    for (int64_t token = 0; token < sent.numTokens; ++token) {
      auto mine = expertsAt(shape, sent, token, rank);
      copies += mine.empty() ? 0 : 1;
      for (auto [expert, weight] : mine) {
        lists[static_cast<size_t>(expert - first)].push_back({source, token, expert, weight});
      }
    }
    out->rankCounts.push_back(copies);
    out->sizes.copies += copies;
  }
  int64_t rows = padded ? experts * capacity : capacity;
  out->slots.assign(static_cast<size_t>(rows), Slot{});
  int64_t start = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const auto& list = lists[static_cast<size_t>(e)];
    auto count = static_cast<int64_t>(list.size());
    out->arrived += count;
    if (padded) start = e * capacity;
    out->expertOffsets.push_back(start);
    int64_t end = padded ? start + capacity : rows;
    for (int64_t i = 0; i < count && start + i < end; ++i) {
      out->slots[static_cast<size_t>(start + i)] = list[static_cast<size_t>(i)];
      ++out->sizes.rows;
      ++out->expertCounts[static_cast<size_t>(e)];
    }
    if (padded) {
      out->sizes.requiredRows = std::max(out->sizes.requiredRows, count);
    } else {
      start += roundUp(count, shape.config.expertAlign);
    }
  }
  if (!padded) out->sizes.requiredRows = start;
  out->expertOffsets.push_back(padded ? rows : start);
  // The gap after the last expert may reach past an output that holds every row.
  out->sizes.overflow = out->sizes.rows < out->arrived;
}

}  // namespace detail

// What `rank` must get. `capacity` is that of moeReceive_t, already resolved: rows of the output, or rows per expert in
// the padded layout. With views it is nranks * maxTokensPerRank.
inline Delivery deliver(const Shape& shape, const std::vector<Sent>& sents, int rank, int64_t capacity, bool views) {
  Delivery out;
  out.expertCounts.assign(static_cast<size_t>(shape.expertsOf(rank)), 0);
  if (shape.config.layout == moeLayoutRank) {
    detail::deliverByRank(shape, sents, rank, capacity, views ? shape.config.maxTokensPerRank : 0, &out);
  } else {
    detail::deliverByExpert(shape, sents, rank, capacity, &out);
  }
  return out;
}

// Says what becomes of the rows.
inline void quantizeSent(const Shape& shape, Sent* sent) {
  sent->arriving.clear();
  if (!shape.quantizes()) return;
  Bytes tokens, scales;
  for (int64_t token = 0; token < sent->numTokens; ++token) {
    const std::byte* row = sent->rows[0].data() + token * shape.tokenBytes();
    QuantizedRow quantized = quantizeRow(row, shape.config.hidden, shape.config.quantize);
    tokens.insert(tokens.end(), quantized.elements.begin(), quantized.elements.end());
    scales.insert(scales.end(), quantized.words.begin(), quantized.words.end());
  }
  sent->arriving = {tokens, scales};
  sent->arriving.insert(sent->arriving.end(), sent->rows.begin() + 1, sent->rows.end());
}

// The bytes of payload `payload` that belong into `slot`.
inline const std::byte* rowOf(const Shape& shape, const std::vector<Sent>& sents, const Slot& slot, int payload) {
  const Sent& sent = sents[static_cast<size_t>(slot.source)];
  const Bytes& rows = (shape.quantizes() ? sent.arriving : sent.rows)[static_cast<size_t>(payload)];
  return rows.data() + slot.token * shape.payloadBytes(payload);
}

// Where each delivered row of one rank lies: (source, token, expert) to row.
using RowIndex = std::map<std::tuple<int, int64_t, int64_t>, int64_t>;

inline RowIndex indexRows(const Delivery& delivery) {
  RowIndex index;
  for (size_t row = 0; row < delivery.slots.size(); ++row) {
    const Slot& slot = delivery.slots[row];
    if (slot.source >= 0) index[{slot.source, slot.token, slot.expert}] = static_cast<int64_t>(row);
  }
  return index;
}

namespace detail {

// A sum begins with its first term, not with zero: so minus zero alone stays minus zero.
inline void addTo(float* sum, float value, bool first) { *sum = first ? value : *sum + value; }

// The row that `rank` sends back for one token: fp32 sum in the order of the token's ids, rounded once.
inline void partialRow(const Shape& shape, const std::vector<std::pair<int64_t, float>>& experts, int source,
                       int64_t token, const RowIndex& index, const Bytes& expertRows, bool applyWeights,
                       std::vector<float>* partial) {
  const auto& config = shape.config;
  std::vector<float> sum(static_cast<size_t>(config.hidden), 0.0f);
  bool first = true;
  auto add = [&](int64_t expert, float weight, bool scaled) {
    auto at = index.find({source, token, expert});
    if (at == index.end()) return;
    const std::byte* row = expertRows.data() + at->second * shape.combineRowBytes();
    for (int64_t h = 0; h < config.hidden; ++h) {
      float value = loadElement(config.combineDtype, row, h);
      if (scaled) value = value * weight;
      addTo(&sum[static_cast<size_t>(h)], value, first);
    }
    first = false;
  };
  if (config.layout == moeLayoutRank) {
    add(-1, 1.0f, false);
  } else {
    for (auto [expert, weight] : experts) add(expert, weight, applyWeights);
  }
  for (size_t h = 0; h < sum.size(); ++h) (*partial)[h] = roundTo(config.combineDtype, sum[h]);
}

}  // namespace detail

// What combine must return to `source`: [numTokens][hidden] in combineDtype. expertRows[r] are the rows that rank r
// gives, in the order of deliveries[r].
inline Bytes combine(const Shape& shape, const std::vector<Sent>& sents, const std::vector<RowIndex>& indexes,
                     const std::vector<Bytes>& expertRows, int source, bool applyWeights) {
  const auto& config = shape.config;
  const Sent& sent = sents[static_cast<size_t>(source)];
  Bytes output(static_cast<size_t>(sent.numTokens * shape.combineRowBytes()));
  std::vector<float> partial(static_cast<size_t>(config.hidden));
  for (int64_t token = 0; token < sent.numTokens; ++token) {
    std::vector<int> ranks;
    for (int k = 0; k < sent.topk; ++k) {
      if (!shape.isExpert(sent.id(token, k))) continue;
      int owner = shape.ownerOf(sent.id(token, k));
      if (std::find(ranks.begin(), ranks.end(), owner) == ranks.end()) ranks.push_back(owner);
    }
    std::vector<float> sum(static_cast<size_t>(config.hidden), 0.0f);
    for (int rank : ranks) {
      auto at = static_cast<size_t>(rank);
      detail::partialRow(shape, expertsAt(shape, sent, token, rank), source, token, indexes[at], expertRows[at],
                         applyWeights, &partial);
      for (size_t h = 0; h < sum.size(); ++h) detail::addTo(&sum[h], partial[h], rank == ranks.front());
    }
    std::byte* row = output.data() + token * shape.combineRowBytes();
    for (int64_t h = 0; h < config.hidden; ++h) storeElement(config.combineDtype, row, h, sum[static_cast<size_t>(h)]);
  }
  return output;
}

}  // namespace moetest::reference

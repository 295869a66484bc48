// SPDX-License-Identifier: Apache-2.0
#include "oracle.h"

#include <algorithm>

namespace moe::perf {
namespace {

// One (token, expert) that `rank` receives, with the token's weights for it added up in order.
struct Pick {
  int source;
  int64_t token;
  int64_t expert;  // local
  float weight;
};

// Experts of `rank` that the token names, in the order in which they first appear.
void pickExperts(const Shape& shape, int rank, int source, int64_t token, const int64_t* ids, const float* weights,
                 std::vector<Pick>* picks) {
  size_t begin = picks->size();
  int64_t first = shape.firstExpert(rank);
  for (int k = 0; k < shape.topk; ++k) {
    if (shape.ownerOf(ids[k]) != rank) continue;
    auto same = std::find_if(picks->begin() + static_cast<std::ptrdiff_t>(begin), picks->end(),
                             [&](const Pick& pick) { return pick.expert == ids[k] - first; });
    if (same == picks->end()) {
      picks->push_back({source, token, ids[k] - first, weights[k]});
    } else {
      same->weight += weights[k];
    }
  }
}

int64_t roundUp(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

void placeByRank(const Shape& shape, const std::vector<Pick>& picks, ExpectedReceive* out) {
  const Pick* last = nullptr;
  for (const Pick& pick : picks) {
    if (last && last->source == pick.source && last->token == pick.token) continue;
    ExpectedRow row;
    row.source = pick.source;
    row.token = pick.token;
    auto source = static_cast<size_t>(pick.source);
    row.index = out->rankCounts[source];
    row.position = out->rankOffsets[source] + row.index;
    row.delivered = shape.capacity == 0 || row.position < shape.capacity;
    if (row.delivered) ++out->rankCounts[source];
    out->rows.push_back(row);
    last = &pick;
  }
  out->sizes.requiredRows = static_cast<int64_t>(out->rows.size());
}

void placeByExpert(const Shape& shape, const std::vector<Pick>& picks, ExpectedReceive* out) {
  bool padded = shape.layout == moeLayoutExpertPadded;
  size_t experts = out->expertCounts.size();
  for (const Pick& pick : picks) ++out->expertCounts[static_cast<size_t>(pick.expert)];
  int64_t most = 0;
  for (size_t expert = 0; expert < experts; ++expert) {
    int64_t count = out->expertCounts[expert];
    most = std::max(most, count);
    out->expertOffsets[expert + 1] =
        out->expertOffsets[expert] + (padded ? shape.capacity : roundUp(count, shape.align));
  }
  std::vector<int64_t> filled(experts, 0);
  for (const Pick& pick : picks) {
    auto expert = static_cast<size_t>(pick.expert);
    ExpectedRow row;
    row.source = pick.source;
    row.token = pick.token;
    row.expert = pick.expert;
    row.weight = pick.weight;
    row.index = filled[expert]++;
    row.position = out->expertOffsets[expert] + row.index;
    row.delivered = padded ? row.index < shape.capacity : shape.capacity == 0 || row.position < shape.capacity;
    out->rows.push_back(row);
  }
  std::sort(out->rows.begin(), out->rows.end(), [](const ExpectedRow& a, const ExpectedRow& b) {
    return a.expert != b.expert ? a.expert < b.expert : a.index < b.index;
  });
  // Only rows that the output holds count as received.
  std::fill(out->expertCounts.begin(), out->expertCounts.end(), 0);
  for (const ExpectedRow& row : out->rows) {
    if (row.delivered) ++out->expertCounts[static_cast<size_t>(row.expert)];
  }
  out->sizes.requiredRows = padded ? most : out->expertOffsets.back();
}

}  // namespace

int64_t Shape::firstExpert(int rank) const {
  return rank * (experts / ranks) + std::min<int64_t>(rank, experts % ranks);
}

int Shape::ownerOf(int64_t expert) const {
  if (expert < 0 || expert >= experts) return -1;
  int64_t share = experts / ranks;
  int64_t longer = experts % ranks;  // this many ranks own one more
  if (expert < longer * (share + 1)) return static_cast<int>(expert / (share + 1));
  return static_cast<int>(longer + (expert - longer * (share + 1)) / share);
}

ExpectedReceive expectReceive(const Shape& shape, int rank, const std::vector<Routes>& routes) {
  ExpectedReceive out;
  out.rankCounts.assign(static_cast<size_t>(shape.ranks), 0);
  out.rankOffsets.assign(static_cast<size_t>(shape.ranks), 0);
  out.expertCounts.assign(static_cast<size_t>(shape.localExperts(rank)), 0);
  out.expertOffsets.assign(static_cast<size_t>(shape.localExperts(rank)) + 1, 0);
  std::vector<Pick> picks;
  for (int source = 0; source < shape.ranks; ++source) {
    const Routes& from = routes[static_cast<size_t>(source)];
    // In views every source's rows begin at its own part of the window.
    out.rankOffsets[static_cast<size_t>(source)] = shape.viewRows > 0 ? source * shape.viewRows : out.sizes.copies;
    for (int64_t token = 0; token < from.tokens; ++token) {
      size_t before = picks.size();
      pickExperts(shape, rank, source, token, from.ids.data() + token * shape.topk,
                  from.weights.data() + token * shape.topk, &picks);
      if (picks.size() == before) continue;
      if (shape.layout != moeLayoutRank) ++out.rankCounts[static_cast<size_t>(source)];
      ++out.sizes.copies;
    }
  }
  if (shape.layout == moeLayoutRank) {
    placeByRank(shape, picks, &out);
  } else {
    placeByExpert(shape, picks, &out);
  }
  for (const ExpectedRow& row : out.rows) out.sizes.rows += row.delivered ? 1 : 0;
  out.sizes.overflow = out.sizes.rows < static_cast<int64_t>(out.rows.size()) ? 1 : 0;
  return out;
}

std::vector<RowRange> deliveredRanges(const ExpectedReceive& expected) {
  std::vector<RowRange> ranges;
  for (const ExpectedRow& row : expected.rows) {
    if (!row.delivered) continue;
    if (ranges.empty() || ranges.back().first + ranges.back().count != row.position) {
      ranges.push_back({row.position, 0});
    }
    ++ranges.back().count;
  }
  return ranges;
}

float rowFactor(const Shape& shape, int rank, const int64_t* ids, const float* weights) {
  float sum = 0;
  for (int k = 0; k < shape.topk; ++k) {
    if (shape.ownerOf(ids[k]) == rank) sum += weights[k];
  }
  return sum;
}

std::vector<LostRow> lostRows(const Shape& shape, int source, const std::vector<Routes>& routes) {
  std::vector<LostRow> lost;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    for (const ExpectedRow& row : expectReceive(shape, rank, routes).rows) {
      if (!row.delivered && row.source == source) lost.push_back({row.token, rank, row.expert});
    }
  }
  std::sort(lost.begin(), lost.end());
  return lost;
}

CombineOracle::CombineOracle(const Shape& shape, const TokenData& data, moeDataType_t combineType)
    : shape_(shape), data_(data), type_(combineType) {
  row_.resize(static_cast<size_t>(std::max(data.rowBytes(), data.hidden() * int64_t{4})));
  scales_.resize(static_cast<size_t>(data.scaleCount()));
  values_.resize(static_cast<size_t>(data.hidden()));
  partial_.resize(static_cast<size_t>(data.hidden()));
  sum_.resize(static_cast<size_t>(data.hidden()));
}

void CombineOracle::expect(const TokenId& id, const int64_t* ids, const float* weights,
                           const std::vector<LostRow>& lost, void* row) {
  data_.fillRow(id, row_.data());
  data_.fillScales(id, scales_.data());
  decodeRow(data_.type(), row_.data(), scales_.data(), data_.hidden(), values_.data());
  std::fill(sum_.begin(), sum_.end(), 0.0f);
  std::vector<int> seen;
  for (int k = 0; k < shape_.topk; ++k) {
    int rank = shape_.ownerOf(ids[k]);
    if (rank < 0 || std::find(seen.begin(), seen.end(), rank) != seen.end()) continue;
    seen.push_back(rank);
    addRank(rank, id.token, ids, weights, lost);
  }
  encodeRow(type_, sum_.data(), data_.hidden(), row);
}

// Adds the partial row that `rank` sends back, rounded to the combine type as it travels.
void CombineOracle::addRank(int rank, int64_t token, const int64_t* ids, const float* weights,
                            const std::vector<LostRow>& lost) {
  std::fill(partial_.begin(), partial_.end(), 0.0f);
  auto isLost = [&](int64_t expert) {
    return !lost.empty() && std::binary_search(lost.begin(), lost.end(), LostRow{token, rank, expert});
  };
  auto add = [&](float weight) {
    for (size_t i = 0; i < partial_.size(); ++i) {
      float product = weight * values_[i];
      partial_[i] += product;
    }
  };
  if (shape_.layout == moeLayoutRank) {
    if (!isLost(-1)) add(rowFactor(shape_, rank, ids, weights));
  } else {
    std::vector<Pick> picks;
    pickExperts(shape_, rank, 0, token, ids, weights, &picks);
    for (const Pick& pick : picks) {
      if (!isLost(pick.expert)) add(pick.weight);
    }
  }
  encodeRow(type_, partial_.data(), data_.hidden(), row_.data());
  decodeRow(type_, row_.data(), nullptr, data_.hidden(), partial_.data());
  for (size_t i = 0; i < sum_.size(); ++i) sum_[i] += partial_[i];
}

double expectedCopies(const Shape& shape, const Routing& routing, int64_t tokens) {
  if (tokens == 0) return 0;
  int64_t copies = 0;
  std::vector<int> owners;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    Routes routes = routing.route(0, rank, tokens);
    for (int64_t token = 0; token < tokens; ++token) {
      owners.clear();
      for (int k = 0; k < shape.topk; ++k) {
        int owner = shape.ownerOf(routes.ids[static_cast<size_t>(token * shape.topk + k)]);
        if (owner >= 0 && std::find(owners.begin(), owners.end(), owner) == owners.end()) owners.push_back(owner);
      }
      copies += static_cast<int64_t>(owners.size());
    }
  }
  return static_cast<double>(copies) / static_cast<double>(tokens * shape.ranks);
}

}  // namespace moe::perf

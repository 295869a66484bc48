// SPDX-License-Identifier: Apache-2.0
// What a dispatch must deliver and a combine return, computed from the routing alone as the header's contract says.
#pragma once

#include <cstdint>
#include <vector>

#include "moe.h"
#include "numbers.h"
#include "routing.h"

namespace moe::perf {

// The shape of a communicator, as far as the oracle needs it.
struct Shape {
  int ranks = 1;
  int64_t experts = 1;
  int topk = 1;
  moeLayout_t layout = moeLayoutRank;
  int64_t align = 1;
  int64_t capacity = 0;  // rows that the output holds, 0: all; expert-padded: rows per expert
  int64_t viewRows = 0;  // views: rows of each source's part of the window; 0: rows are copied out

  int64_t firstExpert(int rank) const;
  int64_t localExperts(int rank) const { return firstExpert(rank + 1) - firstExpert(rank); }
  // -1 for ids that mean nobody.
  int ownerOf(int64_t expert) const;
};

struct ExpectedRow {
  int source = 0;
  int64_t token = 0;
  int64_t index = 0;     // rank layout: among the rows of its source
  int64_t expert = -1;   // expert layouts: local
  float weight = 0;      // expert layouts
  int64_t position = 0;  // in the output
  bool delivered = true;
};

struct ExpectedReceive {
  std::vector<ExpectedRow> rows;
  std::vector<int32_t> rankCounts;
  std::vector<int64_t> rankOffsets;
  std::vector<int32_t> expertCounts;
  std::vector<int64_t> expertOffsets;
  moeSizes_t sizes{};
};

// Rows at positions that follow each other.
struct RowRange {
  int64_t first;
  int64_t count;
};
// Where the delivered rows lie, in ascending order.
std::vector<RowRange> deliveredRanges(const ExpectedReceive& expected);

// What `rank` receives when rank r sends routes[r].
ExpectedReceive expectReceive(const Shape& shape, int rank, const std::vector<Routes>& routes);

// The factor by which the caller multiplies a row of the rank layout: the sum, in order, of its weights at `rank`.
float rowFactor(const Shape& shape, int rank, const int64_t* ids, const float* weights);

// Rows of this source's tokens that did not fit into some rank's output: sorted (token, rank, local expert).
struct LostRow {
  int64_t token;
  int rank;
  int64_t expert;
  auto operator<=>(const LostRow&) const = default;
};
std::vector<LostRow> lostRows(const Shape& shape, int source, const std::vector<Routes>& routes);

// Computes combined rows with the identity as expert.
class CombineOracle {
 public:
  CombineOracle(const Shape& shape, const TokenData& data, moeDataType_t combineType);

  // The combined row of a token into `row`, in the combine type.
  void expect(const TokenId& id, const int64_t* ids, const float* weights, const std::vector<LostRow>& lost, void* row);

 private:
  void addRank(int rank, int64_t token, const int64_t* ids, const float* weights, const std::vector<LostRow>& lost);

  Shape shape_;
  const TokenData& data_;
  moeDataType_t type_;
  std::vector<std::byte> row_;
  std::vector<float> scales_, values_, partial_, sum_;
};

// Distinct ranks per token, over the first `tokens` tokens of every rank.
double expectedCopies(const Shape& shape, const Routing& routing, int64_t tokens);

}  // namespace moe::perf

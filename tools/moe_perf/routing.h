// SPDX-License-Identifier: Apache-2.0
// Which experts each token goes to. Any rank can compute any rank's routing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "numbers.h"
#include "options.h"

namespace moe::perf {

// The routing of one rank's tokens in one call: [tokens][topk] each.
struct Routes {
  int64_t tokens = 0;
  std::vector<int64_t> ids;
  std::vector<float> weights;
};

// A recorded routing: rows of top-k ids and weights.
struct Trace {
  int64_t rows = 0;
  std::vector<int64_t> ids;
  std::vector<float> weights;
};

// Reads records of type "route" from JSON lines. Throws UsageError naming the line.
Trace readTrace(const std::string& path, int64_t experts, int topk);

class Routing {
 public:
  // Throws UsageError for what cannot be, such as node-limited:9 with 8 groups.
  explicit Routing(const Options& options);

  // Must precede route(). Groups of node-limited are nodes when there are several.
  void setShape(int ranks, int nodes);

  Routes route(int64_t set, int rank, int64_t tokens) const;

  // What the header says about this routing; `tokens` is the largest row's.
  std::string describe(int64_t tokens) const;

 private:
  void routeToken(const TokenId& id, int64_t* ids, float* weights) const;
  void routeUniform(uint64_t key, int64_t first, int64_t count, int64_t* ids, int taken, int wanted) const;
  void routeZipf(uint64_t key, int64_t* ids) const;
  void routeGroups(uint64_t key, int64_t* ids) const;
  void routeTrace(int64_t row, int64_t* ids, float* weights) const;
  void makeZipf();
  void makeGroups();

  RoutingSpec spec_;
  uint64_t seed_;
  int64_t experts_;
  int topk_;
  int ranks_ = 1;
  Trace trace_;
  std::vector<double> cumulative_;   // zipf
  std::vector<int64_t> groupStart_;  // node-limited: first expert of each group, and the end
};

}  // namespace moe::perf

// SPDX-License-Identifier: Apache-2.0
// The tokens and the routing that one rank sends.
#pragma once

#include <cstdint>

#include "array.h"
#include "options.h"
#include "routing.h"
#include "team.h"

namespace moe::perf {

class ColdStart;

// What stays the same from row to row.
struct RunContext {
  const Options& options;
  const Routing& routing;
  const TokenData& data;
  Team& team;
  Gpu* gpu = nullptr;           // nullptr: ranks on the host
  bool corruptPending = false;  // --corrupt has not found its row yet; equal on all ranks
  ColdStart* cold = nullptr;    // --flush
};

// Several sets, which calls take in turn, so that no call finds its tokens in a cache. All pointers are for the
// library.
class Inputs {
 public:
  Inputs(const RunContext& context, int rank, int ranks, int64_t tokens);

  int64_t sets() const { return sets_; }
  std::byte* rows(int64_t set) const { return rows_.device() + set * tokens_ * rowBytes_; }
  std::byte* scales(int64_t set) const { return scales_.device() + set * tokens_ * scaleBytes_; }
  std::byte* ids(int64_t set) const { return ids_.device() + set * tokens_ * topk_ * idBytes_; }
  float* weights(int64_t set) const { return weights_.deviceAs<float>() + set * tokens_ * topk_; }

 private:
  int64_t chooseSets(const RunContext& context, int ranks) const;
  void fill(const RunContext& context, int64_t set, int rank);

  int64_t tokens_, rowBytes_, scaleBytes_, idBytes_;
  int topk_;
  int64_t sets_ = 0;
  Array rows_, scales_, ids_, weights_;
};

}  // namespace moe::perf

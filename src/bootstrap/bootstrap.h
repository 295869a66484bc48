// SPDX-License-Identifier: Apache-2.0
// How the ranks of a communicator meet and exchange small facts at init. Nothing on the data path uses it.
#pragma once

#include <string>
#include <vector>

#include "base/wait_limit.h"

namespace moe {

class Bootstrap {
 public:
  Bootstrap(int rank, int nranks) : rank_(rank), nranks_(nranks) {}
  virtual ~Bootstrap() = default;
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;

  int rank() const { return rank_; }
  int nranks() const { return nranks_; }

  // Collective, in the same order on all ranks: result[r] is what rank r gave. Lengths may differ; each is at most
  // kMaxBytes. Throws moeTimeout naming the ranks that did not come, moeRankLost naming one that went away.
  virtual std::vector<std::string> allGather(const std::string& mine, const WaitLimit& limit) = 0;

  static constexpr size_t kMaxBytes = size_t{1} << 20;

 private:
  int rank_;
  int nranks_;
};

}  // namespace moe

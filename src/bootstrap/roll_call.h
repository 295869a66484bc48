// SPDX-License-Identifier: Apache-2.0
// Who has joined a job, who has taken part in the current all-gather, and what the ranks are told when it cannot end
// well. No sockets and no clocks.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/error.h"

namespace moe {

// "rank 3", or "ranks 0, 2, 5-7".
std::string rankList(const std::vector<int>& ranks);

class RollCall {
 public:
  // More ranks than this is taken for a mistake, and refused before memory is set aside for them.
  static constexpr int kMaxRanks = 1 << 16;

  // These return false when the job has ended, or had to be ended; verdict() then says why. The first rank that joins
  // fixes nranks. Joining a job that has ended only counts who has heard of it.
  bool join(int rank, int nranks);
  bool addPart(int rank, std::string part);
  // In good order. Ends the job only if a rank still waits for this one.
  bool leave(int rank);
  // The first verdict stays.
  void end(moeResult_t code, const std::string& text);

  const std::optional<Error>& verdict() const { return verdict_; }
  int nranks() const { return nranks_; }
  bool started() const { return nranks_ > 0; }
  // All ranks have joined.
  bool complete() const { return started() && joinedCount_ == nranks_; }
  bool allLeft() const { return complete() && leftCount_ == nranks_; }
  bool waiting(int rank) const { return state(rank).part.has_value(); }

  // All ranks have given their part.
  bool gathered() const { return started() && partCount_ == nranks_; }
  // Takes the parts and begins the next all-gather.
  std::vector<std::string> takeParts();
  // The ranks that the others wait for: "rank 3, which has not joined".
  std::string missing() const;

 private:
  struct State {
    bool joined = false;
    bool left = false;
    std::optional<std::string> part;
  };
  const State& state(int rank) const { return states_[static_cast<size_t>(rank)]; }
  State& state(int rank) { return states_[static_cast<size_t>(rank)]; }

  int nranks_ = 0;
  int firstRank_ = 0;
  int joinedCount_ = 0;
  int leftCount_ = 0;
  int partCount_ = 0;
  std::vector<State> states_;
  std::optional<Error> verdict_;
};

}  // namespace moe

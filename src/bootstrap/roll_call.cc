// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/roll_call.h"

namespace moe {

std::string rankList(const std::vector<int>& ranks) {
  constexpr size_t kMostRuns = 64;
  std::string text;
  size_t runs = 0;
  for (size_t i = 0; i < ranks.size(); ++runs) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (runs == kMostRuns) return cat("ranks ", text, " and ", ranks.size() - i, " more");
    text += cat(text.empty() ? "" : ", ", ranks[i]);
    if (last == i + 1) text += cat(", ", ranks[last]);
    if (last > i + 1) text += cat("-", ranks[last]);
    i = last + 1;
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

bool RollCall::join(int rank, int nranks) {
  if (verdict_) {
    if (nranks == nranks_ && rank >= 0 && rank < nranks_ && !state(rank).joined) {
      state(rank).joined = true;
      ++joinedCount_;
    }
    return false;
  }
  if (nranks < 1 || nranks > kMaxRanks) {
    end(moeInvalidArgument, cat("rank ", rank, " says nranks = ", nranks, ", which is not from 1 to ", kMaxRanks));
  } else if (started() && nranks != nranks_) {
    end(moeMismatch, cat("rank ", rank, " says nranks = ", nranks, " but rank ", firstRank_, " says ", nranks_,
                         "; pass the same nranks on every rank"));
  } else if (rank < 0 || rank >= nranks) {
    end(moeInvalidArgument, cat("a process joined as rank ", rank, ", which is not from 0 to nranks - 1 = ", nranks - 1,
                                "; ranks count from 0"));
  } else if (started() && state(rank).joined) {
    end(moeMismatch, cat("rank ", rank, " joined twice; give every process a rank of its own, and every communicator",
                         " an id of its own"));
  }
  if (verdict_) return false;
  if (!started()) {
    nranks_ = nranks;
    firstRank_ = rank;
    states_.resize(static_cast<size_t>(nranks));
  }
  state(rank).joined = true;
  ++joinedCount_;
  return true;
}

bool RollCall::addPart(int rank, std::string part) {
  if (verdict_) return false;
  if (state(rank).part) {
    end(moeInternalError, cat("rank ", rank, " gave its part of one all-gather twice"));
    return false;
  }
  state(rank).part = std::move(part);
  ++partCount_;
  std::vector<int> left;
  for (int other = 0; other < nranks_; ++other) {
    if (state(other).left) left.push_back(other);
  }
  if (left.empty()) return true;
  end(moeRankLost, cat(rankList(left), " left before the exchange that rank ", rank, " waits in"));
  return false;
}

bool RollCall::leave(int rank) {
  if (verdict_ || state(rank).left) return !verdict_;
  state(rank).left = true;
  ++leftCount_;
  if (partCount_ == 0 && complete()) return true;
  const char* when = partCount_ > 0 ? " left while others wait for it" : " left before all had joined";
  end(moeRankLost, cat("rank ", rank, when));
  return false;
}

void RollCall::end(moeResult_t code, const std::string& text) {
  if (!verdict_) verdict_.emplace(code, text);
}

std::vector<std::string> RollCall::takeParts() {
  std::vector<std::string> parts;
  for (State& each : states_) {
    parts.push_back(std::move(*each.part));
    each.part.reset();
  }
  partCount_ = 0;
  return parts;
}

std::string RollCall::missing() const {
  std::vector<int> absent;
  std::vector<int> silent;
  for (int rank = 0; rank < nranks_; ++rank) {
    if (!state(rank).joined) {
      absent.push_back(rank);
    } else if (!state(rank).part) {
      silent.push_back(rank);
    }
  }
  std::string text;
  auto verb = [](const std::vector<int>& ranks) { return ranks.size() == 1 ? "has" : "have"; };
  if (!absent.empty()) text = cat(rankList(absent), ", which ", verb(absent), " not joined");
  if (!silent.empty()) {
    text += cat(text.empty() ? "" : ", and for ", rankList(silent), ", which ", verb(silent),
                " joined but not come to this exchange");
  }
  return text;
}

}  // namespace moe

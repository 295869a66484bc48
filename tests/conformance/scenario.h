// SPDX-License-Identifier: Apache-2.0
// A scenario says what every rank does: the config, the data of each call, and the order of the calls. It is a pure
// function of its description, so that each rank, thread or process, can compute it and what must come out of it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "moe.h"
#include "reference.h"

namespace moetest {

// splitmix64: small, seedable, the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // low .. high, both included.
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(next() % static_cast<uint64_t>(high - low + 1));
  }
  bool oneIn(int n) { return between(1, n) == 1; }
  float unit() { return static_cast<float>(next() >> 40) * 0x1p-24f; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<int64_t>(values.size()) - 1)];
  }

 private:
  uint64_t state_;
};

// What one rank does in one call, beyond the data.
struct RankCall {
  reference::Sent sent;
  int32_t idType = moeInt64;
  int32_t receivedIdType = moeInt64;
  int64_t capacity = 0;       // as in moeReceive_t
  int64_t inputGap = 0;       // elements between input rows (bytes for side rows)
  int64_t outputGap = 0;      // the same for outputs
  int64_t misalign = 0;       // elements (bytes for side rows) by which data pointers miss their alignment
  bool views = false;         // leave the rows in the window
  bool exactSizes = false;    // size the outputs by moeGetSizes; for send halves
  bool onlyRows = false;      // every optional output NULL
  bool nullPointers = false;  // with no tokens: NULL for everything
};

enum class Experts {
  kRandom,    // any values
  kIdentity,  // return their token; in the rank layout, times the sum of its weights here
};

struct Call {
  std::vector<RankCall> ranks;
  Experts experts = Experts::kRandom;
  bool applyWeights = true;
  bool reuseRouting = false;  // the ids and weights in `ranks` must then be those of the handle's last dispatch
};

struct Step {
  // kLook: no call; the views of the handle's dispatch must still be what they were.
  enum Kind { kDispatch, kSend, kWait, kCombine, kLook };
  Kind kind;
  int call;
  int handle = 0;
  int variant = 0;  // combine: another set of expert outputs
};

// How long a rank does nothing before a step.
using Pause = std::function<std::chrono::milliseconds(int rank, const Step& step)>;

struct Scenario {
  std::string name;
  int nranks = 1;
  moeConfig_t config = MOE_CONFIG_INIT;
  int handles = 1;
  std::vector<Step> steps;
  std::function<Call(int)> call;
  Pause pause;  // may be empty
};

// What must come out of one call.
class Expected {
 public:
  Expected(const reference::Shape& shape, Call call, uint64_t seed);

  const Call& call() const { return call_; }
  const std::vector<reference::Sent>& sents() const { return sents_; }
  const reference::Delivery& delivery(int rank) const { return deliveries_[static_cast<size_t>(rank)]; }
  // The rows that `rank` gives to combine; gaps are full of NaN.
  const reference::Bytes& expertRows(int rank, int variant) { return outcome(variant).expertRows[at(rank)]; }
  // What combine must return to `rank`.
  const reference::Bytes& combined(int rank, int variant) { return outcome(variant).combined[at(rank)]; }

 private:
  struct Outcome {
    std::vector<reference::Bytes> expertRows, combined;
  };
  static size_t at(int rank) { return static_cast<size_t>(rank); }
  const Outcome& outcome(int variant);
  reference::Bytes makeExpertRows(int rank, int variant) const;

  reference::Shape shape_;
  Call call_;
  uint64_t seed_;
  std::vector<reference::Sent> sents_;
  std::vector<reference::Delivery> deliveries_;
  std::mutex mutex_;
  std::map<int, Outcome> outcomes_;
};

// The expectations of a scenario's calls, computed once for all ranks of a process and dropped when old.
class Expectations {
 public:
  explicit Expectations(const Scenario& scenario) : scenario_(scenario), shape_(scenario.nranks, scenario.config) {}
  const reference::Shape& shape() const { return shape_; }
  std::shared_ptr<Expected> of(int call);

 private:
  const Scenario& scenario_;
  reference::Shape shape_;
  std::mutex mutex_;
  std::map<int, std::shared_ptr<Expected>> recent_;
};

// Routing of one rank's tokens: the id that token `token` of `rank` names at place k.
using Router = std::function<int64_t(Random&, int rank, int64_t token, int k)>;

// A description of a scenario whose calls are all alike.
struct Plan {
  std::string name;
  int nranks = 2;
  moeConfig_t config = MOE_CONFIG_INIT;
  int calls = 2;
  int handles = 1;
  Experts experts = Experts::kRandom;
  bool weights = true;
  std::function<int64_t(int rank, int call)> tokens;  // default: maxTokensPerRank
  std::function<int(int rank, int call)> topk;        // default: maxTopk
  Router router;                                      // default: distinct random experts, one id in sixteen nobody
  std::function<void(Call&, int call)> adjust;        // the last word
  std::vector<Step> steps;                            // default: dispatch, combine per call
  Pause pause;                                        // default: none

  Plan(std::string planName, int ranks, int64_t tokensPerRank, int64_t hidden, int64_t experts, int32_t maxTopk);
  // Changes the config in place and returns the plan.
  Plan& with(const std::function<void(moeConfig_t&)>& change) {
    change(config);
    return *this;
  }
};

Scenario toScenario(Plan plan);

// Random values that every dtype can hold, or any bytes, for one rank's tokens and side rows.
void fillRows(const reference::Shape& shape, Random& random, reference::Sent* sent);

// A seeded scenario in which everything that may vary does.
Scenario randomScenario(uint64_t seed);

}  // namespace moetest

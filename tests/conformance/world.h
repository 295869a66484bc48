// SPDX-License-Identifier: Apache-2.0
// The ways in which the ranks of a communicator can exist, and a scenario run in each of them.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "conformance/driver.h"

namespace moetest {

enum class Way {
  kThreads,    // a thread per rank; they meet by a unique id
  kCallbacks,  // a thread per rank; they meet by the test's all-gather
  kGroup,      // one thread for all ranks: moeCommInitAll, then moeGroupStart and moeGroupEnd around every step
  kProcesses,  // a process per rank
};

const char* wayName(Way way);

// An all-gather between threads.
class ThreadGather {
 public:
  explicit ThreadGather(int nranks);
  // What to give to moeCommInitCallbacks for this rank; lives as long as the gather.
  moeBootstrap_t bootstrap(int rank);
  // From now on every gather fails.
  void fail();

 private:
  struct Seat {
    ThreadGather* gather;
    int rank;
  };
  static int call(void* seat, const void* send, void* receive, size_t bytes);
  int gather(int rank, const void* send, void* receive, size_t bytes);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Seat> seats_;
  std::vector<std::byte> gathered_;
  int arrived_ = 0;
  uint64_t round_ = 0;
  bool failing_ = false;
  std::vector<std::byte> result_;
};

// Runs `body(rank)` in a thread per rank and waits for all of them.
void runThreads(int nranks, const std::function<void(int)>& body);

// Runs a scenario and returns what went wrong, "" if nothing. Scenarios run in processes are found by their name.
std::string runScenario(const Scenario& scenario, Way way, const Backend& backend);

// One rank of a scenario in a process of its own. Returns what went wrong, "" if nothing.
struct RankContext;
std::string runScenarioRank(const Scenario& scenario, RankContext& context, const Backend& backend);

// The ranks of a communicator in this process, destroyed at the end. Empty if that failed, with the text in error().
class LocalComms {
 public:
  LocalComms(int nranks, const moeConfig_t& config, const Backend& backend = hostBackend());
  ~LocalComms();
  LocalComms(LocalComms&& other) noexcept : comms_(std::move(other.comms_)) { other.comms_.clear(); }
  bool ok() const { return !comms_.empty(); }
  moeComm_t operator[](int rank) const { return comms_[static_cast<size_t>(rank)]; }
  const std::string& error() const { return error_; }

 private:
  void join(int nranks, const moeConfig_t& config, const Backend& backend);

  std::vector<moeComm_t> comms_;
  std::string error_;
};

}  // namespace moetest

// SPDX-License-Identifier: Apache-2.0
// How the ranks of a run agree between calls: barriers, and the exchange of a few numbers. Never on the timed path.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "moe.h"

namespace moe::perf {

class Team {
 public:
  Team(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Team() = default;
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  virtual void barrier() = 0;
  // result[r] is what rank r gave; all give equally many. Whole numbers are exact up to 2^53.
  std::vector<std::vector<double>> gather(const std::vector<double>& mine);
  // A barrier that all ranks of one host leave within microseconds of each other: they agree on a time to come.
  void startTogether();

 protected:
  static constexpr size_t kWords = 64;
  // Gathers kWords numbers of each rank into all [size * kWords].
  virtual void gatherWords(const double* mine, double* all) = 0;

 private:
  int rank_;
  int size_;
};

// The memory that the ranks of one host share, zeroed at first; it may be mapped by several processes.
struct SharedBlock {
  static int64_t bytes(int ranks) { return static_cast<int64_t>(sizeof(SharedBlock)) + ranks * kSlotBytes; }
  static constexpr int64_t kSlotBytes = 64 * sizeof(double);

  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> epoch;
  std::atomic<uint32_t> aborted;  // 1: some rank failed; nobody waits any longer
  uint32_t reserved[13];

  double* slot(int rank) { return reinterpret_cast<double*>(this + 1) + rank * 64; }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "the block is shared between processes");

class SharedTeam : public Team {
 public:
  // Throws Failure when a rank does not come within `patience`, and Follower when one failed.
  SharedTeam(SharedBlock* block, int rank, int size, std::chrono::milliseconds patience)
      : Team(rank, size), block_(block), patience_(patience) {}

  void barrier() override;
  void throwIfAborted() const;

 protected:
  void gatherWords(const double* mine, double* all) override;

 private:
  SharedBlock* block_;
  std::chrono::milliseconds patience_;
};

// For ranks that a launcher started: a small communicator of its own, on the host, whose dispatch is the all-gather.
class CommTeam : public Team {
 public:
  // Makes the communicator from the launcher's environment. Collective.
  static std::unique_ptr<CommTeam> join(std::chrono::milliseconds patience);
  ~CommTeam() override;

  void barrier() override;
  // Lets the others go on without this rank, which has failed.
  void abort();

 protected:
  void gatherWords(const double* mine, double* all) override;

 private:
  CommTeam(moeComm_t comm, const moeInfo_t& info, bool* owned);

  moeComm_t comm_;
  moeHandle_t handle_ = nullptr;
  void* handleMemory_ = nullptr;
  std::vector<int32_t> ids_;  // [tokens][kIdsPerToken]: one expert of every rank
  std::vector<double> rows_;  // [tokens][kWords]: the same row again and again
};

}  // namespace moe::perf

// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process.
#include "threads.h"

#include <unistd.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "launch.h"
#include "memory.h"
#include "runner.h"
#include "text.h"

namespace moe::perf {
namespace {

// What the threads of a run share.
struct Shared {
  SharedBlock* block;
  std::vector<moeComm_t> comms;
  moeUniqueId_t id;
  std::mutex reportMutex;
  Report& report;
};

class ThreadWorld : public World {
 public:
  ThreadWorld(Shared& shared, const Options& options, int rank)
      : shared_(shared), team_(shared.block, rank, options.threads, teamPatience(options)) {}

  Team& team() override { return team_; }
  int localRank() const override { return team_.rank(); }

  moeComm_t join(const moeConfig_t& config) override {
    auto rank = static_cast<size_t>(team_.rank());
    // Made together, all would have the one device that a config names.
    bool together = config.device < 0;
    team_.barrier();
    if (rank == 0 && together) {
      require(moeCommInitAll(shared_.comms.data(), team_.size(), &config), "moeCommInitAll");
    } else if (rank == 0) {
      require(moeGetUniqueId(&shared_.id), "moeGetUniqueId");
    }
    team_.barrier();
    if (together) return shared_.comms[rank];
    moeComm_t comm = nullptr;
    require(moeCommInit(&comm, team_.size(), &shared_.id, team_.rank(), &config), "moeCommInit");
    return comm;
  }

  void emit(Json message) override {
    std::lock_guard lock(shared_.reportMutex);
    shared_.report.take(team_.rank(), getpid(), message);
  }

 private:
  Shared& shared_;
  SharedTeam team_;
};

}  // namespace

bool runAsThreads(int count, const std::function<bool(int)>& runOne) {
  std::atomic<bool> complete = true;
  std::vector<std::thread> threads;
  for (int index = 0; index < count; ++index) {
    threads.emplace_back([&, index] {
      if (!runOne(index)) complete = false;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return complete;
}

RankEnd runToEnd(World& world, SharedBlock* block, const Options& options, Routing routing) {
  try {
    runRank(world, options, routing);
    return RankEnd::kDone;
  } catch (const Follower&) {
    return RankEnd::kFollowed;
  } catch (const std::exception& error) {
    block->aborted.store(1, std::memory_order_release);
    world.emit({{"kind", "error"}, {"text", cat("failed: ", error.what())}});
    return RankEnd::kFailed;
  }
}

int runThreads(const Options& options, const Routing& routing, Report& report) {
  Buffer memory(SharedBlock::bytes(options.threads));
  Shared shared{memory.as<SharedBlock>(), std::vector<moeComm_t>(static_cast<size_t>(options.threads)), {}, {}, report};
  bool complete = runAsThreads(options.threads, [&](int rank) {
    ThreadWorld world(shared, options, rank);
    return runToEnd(world, shared.block, options, routing) == RankEnd::kDone;
  });
  return report.finish(complete);
}

}  // namespace moe::perf

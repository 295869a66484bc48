// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process.
#include <unistd.h>

#include <mutex>
#include <thread>

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
  std::mutex reportMutex;
  Report& report;
};

class ThreadWorld : public World {
 public:
  ThreadWorld(Shared& shared, const Options& options, int rank)
      : shared_(shared), team_(shared.block, rank, options.threads, teamPatience(options)) {}

  Team& team() override { return team_; }

  moeComm_t join(const moeConfig_t& config) override {
    team_.barrier();
    if (team_.rank() == 0) {
      require(moeCommInitAll(shared_.comms.data(), team_.size(), &config), "moeCommInitAll");
    }
    team_.barrier();
    return shared_.comms[static_cast<size_t>(team_.rank())];
  }

  void emit(Json message) override {
    std::lock_guard lock(shared_.reportMutex);
    shared_.report.take(team_.rank(), getpid(), message);
  }

 private:
  Shared& shared_;
  SharedTeam team_;
};

// One rank. False if it did not come to its end.
bool runThread(Shared& shared, const Options& options, Routing routing, int rank) {
  ThreadWorld world(shared, options, rank);
  try {
    runRank(world, options, routing);
    return true;
  } catch (const Follower&) {
    return false;
  } catch (const std::exception& error) {
    shared.block->aborted.store(1, std::memory_order_release);
    world.emit({{"kind", "error"}, {"text", cat("failed: ", error.what())}});
    return false;
  }
}

}  // namespace

int runThreads(const Options& options, const Routing& routing, Report& report) {
  Buffer memory(SharedBlock::bytes(options.threads));
  Shared shared{memory.as<SharedBlock>(), std::vector<moeComm_t>(static_cast<size_t>(options.threads)), {}, report};
  std::atomic<bool> complete = true;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options.threads; ++rank) {
    threads.emplace_back([&, rank] {
      if (!runThread(shared, options, routing, rank)) complete = false;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return report.finish(complete);
}

}  // namespace moe::perf

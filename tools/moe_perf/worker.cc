// SPDX-License-Identifier: Apache-2.0
// A process of those that moe_perf -p started.
#include "worker.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "frames.h"
#include "launch.h"
#include "runner.h"
#include "text.h"
#include "threads.h"

namespace moe::perf {
namespace {

// What the ranks of this process share.
struct Process {
  SharedBlock* block;
  moeUniqueId_t id;
  std::mutex pipeMutex;
};

class WorkerWorld : public World {
 public:
  WorkerWorld(const Options& options, Process& process, int rank)
      : process_(process),
        perProcess_(options.perProcess),
        team_(process.block, rank, options.ranks(), teamPatience(options)),
        patience_(teamPatience(options)) {}

  Team& team() override { return team_; }
  int localRank() const override { return team_.rank(); }

  moeComm_t join(const moeConfig_t& config) override {
    // An id is good for one communicator, and is only asked for when all ranks are about to use it.
    team_.barrier();
    if (team_.rank() == 0) emit({{"kind", "need_id"}});
    if (team_.rank() % perProcess_ == 0) process_.id = readId();
    if (perProcess_ > 1) team_.barrier();
    moeUniqueId_t id = process_.id;
    moeComm_t comm = nullptr;
    require(moeCommInit(&comm, team_.size(), &id, team_.rank(), &config), "moeCommInit");
    return comm;
  }

  void emit(Json message) override {
    message["rank"] = team_.rank();
    std::lock_guard lock(process_.pipeMutex);
    writeFrame(kResultFd, message);
  }

 private:
  moeUniqueId_t readId() {
    moeUniqueId_t id;
    size_t got = 0;
    auto deadline = std::chrono::steady_clock::now() + patience_;
    while (got < sizeof id) {
      team_.throwIfAborted();
      if (std::chrono::steady_clock::now() >= deadline) fail("waited ", patience_.count(), " ms for an id");
      pollfd ready{kIdFd, POLLIN, 0};
      if (poll(&ready, 1, 50) <= 0) continue;
      ssize_t bytes = read(kIdFd, reinterpret_cast<char*>(&id) + got, sizeof id - got);
      if (bytes < 0 && errno == EINTR) continue;
      if (bytes <= 0) throw Follower("the starter has gone");
      got += static_cast<size_t>(bytes);
    }
    return id;
  }

  Process& process_;
  int perProcess_;
  SharedTeam team_;
  std::chrono::milliseconds patience_;
};

SharedBlock* mapBlock(int ranks) {
  void* memory =
      mmap(nullptr, static_cast<size_t>(SharedBlock::bytes(ranks)), PROT_READ | PROT_WRITE, MAP_SHARED, kBlockFd, 0);
  if (memory == MAP_FAILED) fail("cannot map what the ranks share: ", std::strerror(errno));
  return static_cast<SharedBlock*>(memory);
}

}  // namespace

bool isWorker() { return std::getenv(kWorkerVariable) != nullptr; }

int runWorker(const Options& options, Routing& routing) {
  int number = 0, starter = 0;
  if (std::sscanf(std::getenv(kWorkerVariable), "%d:%d", &number, &starter) != 2) {
    usage(kWorkerVariable, " is for moe_perf's own use; unset it");
  }
  // No rank outlives the starter, which may have died before this call.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != starter) return 1;
  Process process{mapBlock(options.ranks()), {}, {}};
  bool complete = runAsThreads(options.perProcess, [&](int index) {
    WorkerWorld world(options, process, number * options.perProcess + index);
    RankEnd end = runToEnd(world, process.block, options, routing);
    if (end != RankEnd::kFailed) world.emit({{"kind", end == RankEnd::kDone ? "done" : "followed"}});
    return end == RankEnd::kDone;
  });
  return complete ? 0 : 1;
}

}  // namespace moe::perf

// SPDX-License-Identifier: Apache-2.0
// One rank of those that a launcher started: torchrun, mpirun or srun.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "launch.h"
#include "runner.h"
#include "text.h"

namespace moe::perf {
namespace {

// Only rank 0 reports; the others print what concerns themselves.
class LaunchedWorld : public World {
 public:
  LaunchedWorld(const Options& options, CommTeam& team) : team_(team) {
    if (team.rank() == 0) report_ = std::make_unique<Report>(options);
  }

  Team& team() override { return team_; }

  int localRank() const override {
    for (const char* name : {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"}) {
      if (const char* text = std::getenv(name)) return std::max(0, std::atoi(text));
    }
    return team_.rank();
  }

  moeComm_t join(const moeConfig_t& config) override {
    moeComm_t comm = nullptr;
    require(moeCommInitEnv(&comm, &config), "moeCommInitEnv");
    return comm;
  }

  void emit(Json message) override {
    if (report_) {
      report_->take(team_.rank(), getpid(), message);
    } else if (message["kind"] == "note" || message["kind"] == "error") {
      std::fprintf(stderr, "moe_perf: rank %d (pid %d) %s\n", team_.rank(), getpid(),
                   message["text"].get<std::string>().c_str());
    }
  }

  int finish(bool complete, bool right) {
    if (report_) return report_->finish(complete);
    return complete && right ? 0 : 1;
  }

 private:
  CommTeam& team_;
  std::unique_ptr<Report> report_;
};

}  // namespace

int runLaunched(const Options& options, Routing& routing) {
  std::unique_ptr<CommTeam> team = CommTeam::join(teamPatience(options));
  LaunchedWorld world(options, *team);
  try {
    bool right = runRank(world, options, routing);
    return world.finish(true, right);
  } catch (const Follower&) {
    return world.finish(false, false);
  } catch (const std::exception& error) {
    team->abort();
    world.emit({{"kind", "error"}, {"text", cat("failed: ", error.what())}});
    return world.finish(false, false);
  }
}

}  // namespace moe::perf

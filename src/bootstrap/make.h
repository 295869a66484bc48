// SPDX-License-Identifier: Apache-2.0
// The ways in which ranks can meet.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "bootstrap/device_stage.h"
#include "bootstrap/nccl_library.h"
#include "moe.h"

namespace moe {

// Starts to listen in this process and describes where, for moeGetUniqueId. Listens in a background thread until all
// ranks have met and parted, or none came for `patience`.
moeUniqueId_t makeUniqueId(std::chrono::milliseconds patience);

// Meets the other ranks where `id` says. Collective, like joinLaunched: returns when all ranks have come, and fails on
// all of them when a rank is wrong. Destroying the result leaves; ranks that still wait for it get moeRankLost.
std::unique_ptr<Bootstrap> joinTcp(const moeUniqueId_t& id, int rank, int nranks, const WaitLimit& limit);

// What a launcher put in the environment.
struct LaunchedRank {
  int rank;
  int nranks;
};
// Throws moeInvalidUsage naming the variables looked for when no launcher's are set.
LaunchedRank launchedRank();
// Meets the ranks of the same launch.
std::unique_ptr<Bootstrap> joinLaunched(const LaunchedRank& me, const WaitLimit& limit);

// Through the caller's own all-gather.
std::unique_ptr<Bootstrap> joinCallbacks(const moeBootstrap_t& callbacks, int rank, int nranks);

// What NCCL says of a caller's communicator.
struct NcclGroup {
  NcclCalls calls;
  ncclComm* comm;
  int rank;
  int nranks;
  int device;
};
// Throws moeInvalidArgument when NCCL does not take `comm` for one of its communicators, and moeUnsupported without a
// usable NCCL. Not collective.
NcclGroup askNccl(ncclComm* comm);
// Through that communicator, which must live until the result is gone, but no longer. `stage` is on its device.
std::unique_ptr<Bootstrap> joinNccl(const NcclGroup& group, std::shared_ptr<DeviceStage> stage);

// All ranks of one process: result[r] is for rank r, each used by a thread of its own.
std::vector<std::unique_ptr<Bootstrap>> makeLocal(int nranks);

}  // namespace moe

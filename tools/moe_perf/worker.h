// SPDX-License-Identifier: Apache-2.0
// What the starter hands to the ranks it starts.
#pragma once

namespace moe::perf {

// Set to RANK:STARTER_PID in a started rank's environment.
constexpr char kWorkerVariable[] = "MOE_PERF_WORKER";

// Descriptors of a started rank.
constexpr int kIdFd = 3;      // read: unique ids, one per communicator
constexpr int kResultFd = 4;  // write: frames
constexpr int kBlockFd = 5;   // the SharedBlock

}  // namespace moe::perf

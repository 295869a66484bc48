// SPDX-License-Identifier: Apache-2.0
// What torchrun, Open MPI and srun put in the environment, and how the ranks that they started meet.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "bootstrap/make.h"

namespace moe {

struct Launch {
  std::string launcher;
  LaunchedRank rank{};
  bool oneHost = false;
  // The same text in every rank of the launch, and no other launch's on this host.
  std::string job;
};

// The value of a variable, or nullptr; getenv outside tests.
using EnvironmentLookup = std::function<const char*(const char*)>;

// Throws moeInvalidUsage when no launcher's variables are set, or when they make no sense.
Launch parseLaunch(const EnvironmentLookup& environment);

// How the n-th communicator of a launch is told from the others. All ranks make their communicators in the same order.
using MeetingNumber = uint64_t;

// Ranks of one host and one user, through an abstract Unix socket at rank 0.
std::unique_ptr<Bootstrap> joinOnOneHost(const std::string& job, MeetingNumber number, const LaunchedRank& me,
                                         const WaitLimit& limit);

// Ranks anywhere: rank 0 listens at `commId`, a host:port. Proves itself with `secret`.
std::unique_ptr<Bootstrap> joinAtCommId(const std::string& commId, const std::string& secret, MeetingNumber number,
                                        const LaunchedRank& me, const WaitLimit& limit);

}  // namespace moe

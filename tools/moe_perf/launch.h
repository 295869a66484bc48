// SPDX-License-Identifier: Apache-2.0
// The ways in which moe_perf's ranks come to be. Each returns the exit status.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "options.h"
#include "report.h"
#include "routing.h"

namespace moe::perf {

// Longest wait of one rank for another between two calls, where they make and check data.
std::chrono::milliseconds teamPatience(const Options& options);

// -t: ranks as threads of this process.
int runThreads(const Options& options, const Routing& routing, Report& report);

// -p: starts itself once per rank with the same arguments, and settles what they report.
int runProcesses(const Options& options, const std::vector<std::string>& arguments, Report& report);

// What a process started by runProcesses does. isWorker() says whether this is one.
bool isWorker();
int runWorker(const Options& options, Routing& routing);

// Neither: this process is one rank of a launcher's.
int runLaunched(const Options& options, Routing& routing);

}  // namespace moe::perf

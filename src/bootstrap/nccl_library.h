// SPDX-License-Identifier: Apache-2.0
// The few calls of NCCL that a communicator is asked with. libmoecl does not link NCCL and brings none: a caller who
// has an ncclComm_t has loaded the library that made it, and no other one could read it.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "moe.h"

namespace moe {

// Numbers and types as in NCCL 2's binary interface, so that moecl builds without its header.
constexpr int kNcclSuccess = 0;
constexpr int kNcclInProgress = 7;
constexpr int kNcclInt8 = 0;
// The first version with all that is used here, by communicators that block and those that do not.
constexpr int kNcclOldest = 22000;

struct NcclCalls {
  int (*getVersion)(int* version);
  const char* (*getErrorString)(int result);
  const char* (*getLastError)(ncclComm* comm);
  int (*commCount)(const ncclComm* comm, int* count);
  int (*commUserRank)(const ncclComm* comm, int* rank);
  int (*commCuDevice)(const ncclComm* comm, int* device);
  int (*commGetAsyncError)(ncclComm* comm, int* result);
  int (*allGather)(const void* send, void* receive, size_t count, int type, ncclComm* comm, void* stream);
};

// Gives the address of a function, or null.
using SymbolFinder = std::function<void*(const char* name)>;

// Throws moeUnsupported when `find` lacks a function, and when NCCL is older than kNcclOldest.
NcclCalls findNccl(const SymbolFinder& find);
// Looks in what the process has loaded.
NcclCalls loadedNccl();

// Throws when `result` is an error. `what` is who did what, as in "rank 1: ncclAllGather".
void checkNccl(const NcclCalls& calls, ncclComm* comm, int result, const std::string& what);

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// How tests make and steer communicators of the stand-in for NCCL.
#pragma once

#include <vector>

struct ncclComm;

namespace moe::test {

// Ranks 0 .. nranks - 1 of one communicator; rank r is on device r. Each is for a thread of its own.
std::vector<ncclComm*> simNcclMake(int nranks);
// Ends what the rank waits for; afterwards its calls fail.
void simNcclAbort(ncclComm* comm);
// No call may be under way.
void simNcclDestroy(ncclComm* comm);

// What ncclGetVersion says from now on.
void simNcclSetVersion(int version);
// What ncclCommGetAsyncError says of the rank from now on.
void simNcclSetAsyncError(ncclComm* comm, int result);
// The rank's next all-gather fails with this result.
void simNcclFailNext(ncclComm* comm, int result);
// All-gathers of the rank return ncclInProgress at once and complete in ncclCommGetAsyncError.
void simNcclDoNotBlock(ncclComm* comm);

}  // namespace moe::test

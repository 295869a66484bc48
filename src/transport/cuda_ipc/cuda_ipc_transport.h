// SPDX-License-Identifier: Apache-2.0
// Ranks of one host whose windows lie in GPU memory: NVLink or PCIe peer access. Windows of other processes come as
// descriptors over Unix sockets; ranks of one process share one mapping.
#pragma once

#include "transport/transport.h"

namespace moe {

// `device` is the rank's GPU by its number in this process; it is looked at in allocate(). `states` is shared with the
// communicator that waits on it. The thread's current CUDA device is as before after every call.
std::unique_ptr<Transport> makeCudaIpcTransport(int rank, int nranks, int device, std::shared_ptr<PeerStates> states);

}  // namespace moe

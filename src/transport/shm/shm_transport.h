// SPDX-License-Identifier: Apache-2.0
// Ranks of one host: windows are sealed memfds, passed over Unix sockets. Ranks of one process share one mapping.
#pragma once

#include "transport/transport.h"

namespace moe {

// `states` is shared with the communicator that waits on it.
std::unique_ptr<Transport> makeShmTransport(int rank, int nranks, std::shared_ptr<PeerStates> states);

}  // namespace moe

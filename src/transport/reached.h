// SPDX-License-Identifier: Apache-2.0
// The two ends that the search for a way to a peer can come to.
#pragma once

#include <string>

#include "transport/transport.h"

namespace moe {

// `clause` goes on after "it cannot share memory with rank 3 because".
inline Peer unreachable(const std::string& clause) {
  Peer peer;
  peer.reason = "because " + clause;
  return peer;
}

inline Peer mapped(const Region& region, const char* transport, Reach reach = Reach::kMapped) {
  Peer peer;
  peer.reach = reach;
  peer.window = region.base;
  peer.owner = region.owner;
  peer.transport = transport;
  return peer;
}

}  // namespace moe

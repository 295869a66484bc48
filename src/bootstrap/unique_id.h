// SPDX-License-Identifier: Apache-2.0
// What the 128 bytes of a moeUniqueId_t say.
#pragma once

#include <string>
#include <vector>

#include "bootstrap/hmac.h"
#include "bootstrap/socket.h"
#include "moe.h"

namespace moe {

struct UniqueId {
  static constexpr size_t kMaxAddresses = 4;

  std::vector<SocketAddress> addresses;  // to try in this order; at most kMaxAddresses
  Digest secret{};
};

moeUniqueId_t encodeUniqueId(const UniqueId& id);
// Throws moeInvalidArgument for bytes that are not an id of this version.
UniqueId decodeUniqueId(const moeUniqueId_t& id);

}  // namespace moe

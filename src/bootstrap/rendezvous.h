// SPDX-License-Identifier: Apache-2.0
// Opening the root's sockets.
#pragma once

#include <chrono>
#include <string>

#include "bootstrap/make.h"

namespace moe {

// makeUniqueId with an interface of choice instead of MOE_SOCKET_IFNAME; "" means all of them.
moeUniqueId_t makeUniqueIdOn(const std::string& interfaceName, std::chrono::milliseconds patience);

}  // namespace moe

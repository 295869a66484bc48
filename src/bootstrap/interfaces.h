// SPDX-License-Identifier: Apache-2.0
// The network interfaces of this machine, and which of their addresses a rendezvous offers.
#pragma once

#include <string>
#include <vector>

#include "bootstrap/socket.h"

namespace moe {

struct InterfaceAddress {
  std::string name;
  bool up = false;
  bool loopback = false;
  SocketAddress address;  // port 0
};

// IPv4 and IPv6 addresses in the kernel's order, without link-local ones: those mean nothing on another host.
std::vector<InterfaceAddress> interfaceAddresses();

// At most `most` addresses to offer, best first. With a name, those of that interface alone; it must exist and be up,
// else moeInvalidArgument lists the names that would do. Without, one of each interface before the second of any, IPv4
// before IPv6, and one of loopback last.
std::vector<SocketAddress> chooseAddresses(const std::vector<InterfaceAddress>& all, const std::string& interfaceName,
                                           size_t most);

}  // namespace moe

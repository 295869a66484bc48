// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <memory>

#include "base/error.h"
#include "base/log.h"

namespace moe {
namespace {

bool linkLocal(const SocketAddress& address) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(address.ipBytes()[i]); };
  if (address.family() == AF_INET) return byte(0) == 169 && byte(1) == 254;
  return byte(0) == 0xfe && (byte(1) & 0xc0) == 0x80;
}

// The names for an error text, each once.
std::string namesOf(const std::vector<InterfaceAddress>& all) {
  std::vector<std::string> names;
  for (const InterfaceAddress& entry : all) {
    if (entry.up && std::find(names.begin(), names.end(), entry.name) == names.end()) names.push_back(entry.name);
  }
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

// Which address of its interface this is: 0 for the first. IPv4 counts before IPv6.
size_t ordinal(const std::vector<InterfaceAddress>& all, size_t index) {
  size_t before = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    bool sameFamily = all[i].address.family() == all[index].address.family();
    bool earlier = sameFamily ? i < index : all[i].address.family() == AF_INET;
    if (i != index && all[i].name == all[index].name && earlier) ++before;
  }
  return before;
}

}  // namespace

std::vector<InterfaceAddress> interfaceAddresses() {
  ifaddrs* head = nullptr;
  if (::getifaddrs(&head) != 0) failErrno(errno, "cannot list the network interfaces");
  std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(head, ::freeifaddrs);
  std::vector<InterfaceAddress> result;
  for (const ifaddrs* entry = head; entry; entry = entry->ifa_next) {
    if (!entry->ifa_addr) continue;
    InterfaceAddress found;
    found.name = entry->ifa_name;
    found.up = (entry->ifa_flags & IFF_UP) != 0;
    found.loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    if (entry->ifa_addr->sa_family == AF_INET) {
      const auto* ip = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
      found.address = ipAddress(AF_INET, {reinterpret_cast<const char*>(&ip->sin_addr), 4}, 0);
    } else if (entry->ifa_addr->sa_family == AF_INET6) {
      const auto* ip = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr);
      found.address = ipAddress(AF_INET6, {reinterpret_cast<const char*>(&ip->sin6_addr), 16}, 0);
    } else {
      continue;
    }
    if (!linkLocal(found.address)) result.push_back(std::move(found));
  }
  return result;
}

std::vector<SocketAddress> chooseAddresses(const std::vector<InterfaceAddress>& all, const std::string& interfaceName,
                                           size_t most) {
  struct Ranked {
    bool loopback;
    size_t ordinal;
    size_t index;
    auto operator<=>(const Ranked&) const = default;
  };
  std::vector<Ranked> order;
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i].up || (!interfaceName.empty() && all[i].name != interfaceName)) continue;
    order.push_back({all[i].loopback, ordinal(all, i), i});
  }
  std::sort(order.begin(), order.end());
  if (order.empty() && !interfaceName.empty()) {
    fail(moeInvalidArgument, "MOE_SOCKET_IFNAME=", interfaceName, " names no network interface that is up and has an ",
         "IPv4 or global IPv6 address; there are: ", namesOf(all));
  }
  if (order.empty()) fail(moeSystemError, "no network interface is up, not even loopback, so ranks cannot meet");

  if (order.size() > most) {
    // Loopback keeps the last place, so that ranks on this host always have a way.
    auto loopback = std::find_if(order.begin(), order.end(), [](const Ranked& entry) { return entry.loopback; });
    if (loopback != order.end() && loopback - order.begin() >= static_cast<std::ptrdiff_t>(most)) {
      order[most - 1] = *loopback;
    }
    log(LogLevel::kInfo, "this host has ", order.size(), " addresses and a rendezvous offers only ", most,
        "; MOE_SOCKET_IFNAME chooses an interface");
    order.resize(most);
  }
  std::vector<SocketAddress> result;
  for (const Ranked& entry : order) result.push_back(all[entry.index].address);
  return result;
}

}  // namespace moe

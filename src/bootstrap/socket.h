// SPDX-License-Identifier: Apache-2.0
// Addresses and stream sockets: IPv4, IPv6 and abstract Unix sockets. All sockets are non-blocking and close-on-exec.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_descriptor.h"
#include "base/wait_limit.h"

namespace moe {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  int family() const { return storage.ss_family; }
  // 0 for a Unix socket.
  uint16_t port() const;
  // The 4 or 16 bytes of an IP address.
  std::string_view ipBytes() const;
  bool loopback() const;
  // As people write it: 127.0.0.1:80, [::1]:80, @name.
  std::string text() const;
};

SocketAddress ipAddress(int family, std::string_view ipBytes, uint16_t port);
// Every address of this machine.
SocketAddress anyAddress(int family, uint16_t port);
SocketAddress loopbackAddress(int family, uint16_t port);
// A Unix socket without a file: it vanishes with its owner.
SocketAddress abstractAddress(const std::string& name);

// host:port or [address]:port. Names are looked up without outliving `limit`. `what` names the text in errors.
std::vector<SocketAddress> resolve(const std::string& hostAndPort, const std::string& what, const WaitLimit& limit);

// Sets `error` to 0 or errno; the descriptor is invalid on error.
FileDescriptor listenAt(const SocketAddress& address, int* error);
SocketAddress localAddress(int fd);

// Tries once. On failure the descriptor is invalid and `error` has errno; ETIMEDOUT when the limit has passed. Throws
// moeAborted.
FileDescriptor connectTo(const SocketAddress& address, const WaitLimit& limit, int* error);

// For an established connection: small messages leave at once, and a peer whose host has gone is noticed.
void tuneConnection(int fd, int family);

// The user on the other side of a Unix socket.
uid_t peerUser(int fd);

// Waits for `events` on one descriptor as long as one step of `limit`. Throws moeAborted.
void waitFor(int fd, short events, const WaitLimit& limit);

}  // namespace moe

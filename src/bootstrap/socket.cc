// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/un.h>

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "bootstrap/background_thread.h"

namespace moe {
namespace {

const sockaddr_in& asIpv4(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr_in&>(address.storage);
}

const sockaddr_in6& asIpv6(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr_in6&>(address.storage);
}

const sockaddr* asAny(const SocketAddress& address) { return reinterpret_cast<const sockaddr*>(&address.storage); }

void setOption(int fd, int level, int name, int value) { ::setsockopt(fd, level, name, &value, sizeof value); }

FileDescriptor openSocket(int family) {
  return FileDescriptor(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// A name lookup cannot be given a deadline, so it runs in a thread that may be left behind.
struct Lookup {
  std::mutex mutex;
  std::condition_variable finished;
  bool done = false;
  int error = 0;
  std::vector<SocketAddress> found;
};

void runLookup(Lookup& lookup, const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  int error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &list);
  std::lock_guard lock(lookup.mutex);
  lookup.error = error;
  for (addrinfo* entry = error == 0 ? list : nullptr; entry; entry = entry->ai_next) {
    SocketAddress address;
    if (entry->ai_addrlen > sizeof address.storage) continue;
    std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
    address.length = entry->ai_addrlen;
    bool known = std::any_of(lookup.found.begin(), lookup.found.end(),
                             [&](const SocketAddress& other) { return other.text() == address.text(); });
    if (!known) lookup.found.push_back(address);
  }
  if (error == 0) ::freeaddrinfo(list);
  lookup.done = true;
  lookup.finished.notify_all();
}

}  // namespace

uint16_t SocketAddress::port() const {
  if (family() == AF_INET) return ntohs(asIpv4(*this).sin_port);
  if (family() == AF_INET6) return ntohs(asIpv6(*this).sin6_port);
  return 0;
}

std::string_view SocketAddress::ipBytes() const {
  if (family() == AF_INET) return {reinterpret_cast<const char*>(&asIpv4(*this).sin_addr), 4};
  if (family() == AF_INET6) return {reinterpret_cast<const char*>(&asIpv6(*this).sin6_addr), 16};
  return {};
}

std::string SocketAddress::text() const {
  if (family() == AF_UNIX) {
    const auto& local = reinterpret_cast<const sockaddr_un&>(storage);
    size_t used = length - offsetof(sockaddr_un, sun_path);
    return used > 1 ? cat("@", std::string(local.sun_path + 1, used - 1)) : "a Unix socket";
  }
  char name[INET6_ADDRSTRLEN] = "?";
  ::inet_ntop(family(), ipBytes().data(), name, sizeof name);
  return family() == AF_INET6 ? cat("[", name, "]:", port()) : cat(name, ":", port());
}

bool SocketAddress::loopback() const {
  if (family() == AF_INET) return ipBytes().front() == 127;
  return family() == AF_INET6 && ipBytes() == loopbackAddress(AF_INET6, 0).ipBytes();
}

SocketAddress ipAddress(int family, std::string_view ipBytes, uint16_t port) {
  SocketAddress result;
  result.storage.ss_family = static_cast<sa_family_t>(family);
  if (family == AF_INET) {
    auto& address = reinterpret_cast<sockaddr_in&>(result.storage);
    std::memcpy(&address.sin_addr, ipBytes.data(), std::min(ipBytes.size(), sizeof address.sin_addr));
    address.sin_port = htons(port);
    result.length = sizeof address;
  } else {
    auto& address = reinterpret_cast<sockaddr_in6&>(result.storage);
    std::memcpy(&address.sin6_addr, ipBytes.data(), std::min(ipBytes.size(), sizeof address.sin6_addr));
    address.sin6_port = htons(port);
    result.length = sizeof address;
  }
  return result;
}

SocketAddress anyAddress(int family, uint16_t port) {
  return ipAddress(family, std::string_view("\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", family == AF_INET ? 4 : 16), port);
}

SocketAddress loopbackAddress(int family, uint16_t port) {
  if (family == AF_INET) return ipAddress(AF_INET, std::string_view("\x7f\0\0\1", 4), port);
  return ipAddress(AF_INET6, std::string_view("\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\1", 16), port);
}

SocketAddress abstractAddress(const std::string& name) {
  SocketAddress result;
  auto& address = reinterpret_cast<sockaddr_un&>(result.storage);
  if (name.size() + 1 > sizeof address.sun_path) fail(moeInternalError, "socket name ", name, " is too long");
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

std::vector<SocketAddress> resolve(const std::string& hostAndPort, const std::string& what, const WaitLimit& limit) {
  size_t colon = hostAndPort.rfind(':');
  std::string host = hostAndPort.substr(0, colon);
  std::string port = colon == std::string::npos ? "" : hostAndPort.substr(colon + 1);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  unsigned number = 0;
  auto [end, parseError] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (host.empty() || port.empty() || parseError != std::errc() || end != port.data() + port.size() || number == 0 ||
      number > 65535) {
    fail(moeInvalidArgument, what, "=", hostAndPort, " is not host:port with a port from 1 to 65535",
         " (an IPv6 address goes in brackets: [::1]:4000)");
  }

  auto lookup = std::make_shared<Lookup>();
  startBackgroundThread([lookup, host, port] { runLookup(*lookup, host, port); });
  std::unique_lock lock(lookup->mutex);
  while (!lookup->done) {
    limit.throwIfAborted();
    if (limit.passed()) fail(moeTimeout, what, "=", hostAndPort, ": the look-up of ", host, " took too long");
    lookup->finished.wait_for(lock, std::chrono::milliseconds(std::max(1, limit.pollMilliseconds())));
  }
  if (lookup->error != 0) {
    fail(moeSystemError, what, "=", hostAndPort, ": ", host, " has no address: ", ::gai_strerror(lookup->error));
  }
  return lookup->found;
}

FileDescriptor listenAt(const SocketAddress& address, int* error) {
  FileDescriptor fd = openSocket(address.family());
  if (fd.valid()) {
    if (address.family() != AF_UNIX) setOption(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
    if (address.family() == AF_INET6) setOption(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
  }
  if (!fd.valid() || ::bind(fd.get(), asAny(address), address.length) != 0 || ::listen(fd.get(), SOMAXCONN) != 0) {
    *error = errno;
    return FileDescriptor();
  }
  *error = 0;
  return fd;
}

SocketAddress localAddress(int fd) {
  SocketAddress result;
  result.length = sizeof result.storage;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&result.storage), &result.length) != 0) {
    failErrno(errno, "cannot ask a socket for its address");
  }
  return result;
}

FileDescriptor connectTo(const SocketAddress& address, const WaitLimit& limit, int* error) {
  FileDescriptor fd = openSocket(address.family());
  *error = 0;
  if (!fd.valid() || ::connect(fd.get(), asAny(address), address.length) != 0) *error = errno;
  if (*error == EINPROGRESS) {
    *error = ETIMEDOUT;
    while (!limit.passed()) {
      limit.throwIfAborted();
      pollfd entry{fd.get(), POLLOUT, 0};
      if (::poll(&entry, 1, limit.pollMilliseconds()) <= 0) continue;
      socklen_t size = sizeof *error;
      if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, error, &size) != 0) *error = errno;
      break;
    }
  }
  if (*error != 0) return FileDescriptor();
  tuneConnection(fd.get(), address.family());
  return fd;
}

void tuneConnection(int fd, int family) {
  if (family == AF_UNIX) return;
  constexpr int kIdleSeconds = 10, kProbeSeconds = 5, kProbes = 3;
  setOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  setOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  setOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds);
  setOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, kProbeSeconds);
  setOption(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
}

uid_t peerUser(int fd) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    failErrno(errno, "cannot ask who is on the other side of a Unix socket");
  }
  return credentials.uid;
}

void waitFor(int fd, short events, const WaitLimit& limit) {
  limit.throwIfAborted();
  pollfd entry{fd, events, 0};
  ::poll(&entry, 1, limit.pollMilliseconds());
}

}  // namespace moe

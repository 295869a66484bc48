// SPDX-License-Identifier: Apache-2.0
#include "transport/unix_socket.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/error.h"

namespace moe {
namespace {

constexpr int kSocketType = SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC;
// More than anyone should send, so that a surplus is seen rather than cut by the kernel.
constexpr size_t kMaxDescriptors = 4;

void takeDescriptors(msghdr* message, std::vector<FileDescriptor>* out) {
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      out->emplace_back(fd);
    }
  }
}

ssize_t receiveRetrying(int socket, msghdr* message) {
  ssize_t got;
  do {
    got = ::recvmsg(socket, message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  return got;
}

}  // namespace

FileDescriptor listenUnderFreeName(int backlog, std::string* name) {
  FileDescriptor listener(::socket(AF_UNIX, kSocketType, 0));
  if (!listener.valid()) failErrno(errno, "cannot open a Unix socket to meet the other ranks of this host");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Binding to the family alone makes the kernel choose a free abstract name.
  if (::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(sa_family_t)) != 0) {
    failErrno(errno, "cannot bind a Unix socket to a name that the kernel chooses");
  }
  socklen_t length = sizeof(address);
  if (::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    failErrno(errno, "cannot read the name of a Unix socket");
  }
  if (::listen(listener.get(), backlog) != 0) failErrno(errno, "cannot listen on a Unix socket");
  name->assign(address.sun_path, length - offsetof(sockaddr_un, sun_path));
  return listener;
}

int connectToName(const std::string& name, FileDescriptor* socket) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.empty() || name[0] != '\0' || name.size() > sizeof(address.sun_path)) return EINVAL;
  std::memcpy(address.sun_path, name.data(), name.size());
  FileDescriptor fresh(::socket(AF_UNIX, kSocketType, 0));
  if (!fresh.valid()) failErrno(errno, "cannot open a Unix socket to another rank; see ulimit -n if there are many");
  auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  int result;
  do {
    result = ::connect(fresh.get(), reinterpret_cast<sockaddr*>(&address), length);
  } while (result != 0 && errno == EINTR);
  if (result != 0) return errno;
  *socket = std::move(fresh);
  return 0;
}

FileDescriptor acceptWaiting(const FileDescriptor& listener) {
  for (;;) {
    int fd = ::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) return FileDescriptor(fd);
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EAGAIN) return FileDescriptor();
    failErrno(errno, "cannot accept another rank's Unix socket; see ulimit -n if there are many ranks");
  }
}

std::string refuseOtherUser(const FileDescriptor& socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    return cat("the user of the process at the other end of its socket is unknown: ", std::strerror(errno));
  }
  if (peer.uid == ::geteuid()) return "";
  return cat("the process at its socket runs as user ", peer.uid, " and this one as user ", ::geteuid(),
             "; all ranks of a host must run as one user");
}

FileDescriptor openPeerProcess(const FileDescriptor& socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.pid <= 0) {
    return FileDescriptor();
  }
  return FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, peer.pid, 0)));
}

int sendPacket(const FileDescriptor& socket, std::string_view bytes, int descriptor) {
  iovec data{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(part), &descriptor, sizeof(int));
  }
  ssize_t sent;
  do {
    sent = ::sendmsg(socket.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 ? errno : 0;
}

Packet receivePacket(const FileDescriptor& socket, size_t maxBytes) {
  Packet packet;
  packet.bytes.resize(maxBytes);
  iovec data{packet.bytes.data(), packet.bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got = receiveRetrying(socket.get(), &message);
  // A peer that closed with unread data of ours resets the connection; what it wrote before is still there to be read.
  if (got < 0 && errno == ECONNRESET) got = receiveRetrying(socket.get(), &message);
  if (got <= 0) {
    int error = got < 0 ? errno : 0;
    packet.bytes.clear();
    packet.status = error == EAGAIN ? Packet::kNothingYet : Packet::kClosed;
    packet.error = error == EAGAIN ? 0 : error;
    return packet;
  }
  takeDescriptors(&message, &packet.descriptors);
  packet.status = Packet::kReceived;
  packet.cut = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  packet.bytes.resize(static_cast<size_t>(got));
  return packet;
}

}  // namespace moe

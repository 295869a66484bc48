// SPDX-License-Identifier: Apache-2.0
// Unix sockets with abstract names that keep packet borders and carry descriptors. Nothing here waits.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/file_descriptor.h"

namespace moe {

// A listening socket under a name that the kernel chose and forgets with the socket: no file is left behind, whatever
// happens to this process. Throws moeSystemError.
FileDescriptor listenUnderFreeName(int backlog, std::string* name);

// Connects at once or not at all. Returns 0, or the errno: EAGAIN when the listener's queue is full now.
int connectToName(const std::string& name, FileDescriptor* socket);

// The next connection that waits at `listener`; invalid when there is none. Throws moeSystemError.
FileDescriptor acceptWaiting(const FileDescriptor& listener);

// Empty when the process at the other end runs as the same effective user, else the reason not to talk to it.
std::string refuseOtherUser(const FileDescriptor& socket);

// Becomes readable when the process at the other end is gone, even if children that it forked still hold the socket.
// Invalid where that process cannot be seen from here (another PID namespace, an old kernel).
FileDescriptor openPeerProcess(const FileDescriptor& socket);

// Returns 0 or the errno: EAGAIN when the peer has to read first, ETOOMANYREFS when this user has too many descriptors
// under way. `descriptor` < 0 sends none.
int sendPacket(const FileDescriptor& socket, std::string_view bytes, int descriptor = -1);

struct Packet {
  enum Status { kReceived, kNothingYet, kClosed };
  Status status = kNothingYet;
  int error = 0;                            // for kClosed: the errno, or 0 for an orderly close
  bool cut = false;                         // bytes or descriptors were lost
  std::string bytes;                        // for kReceived
  std::vector<FileDescriptor> descriptors;  // likewise
};

// Packets of more than `maxBytes` are cut.
Packet receivePacket(const FileDescriptor& socket, size_t maxBytes);

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// The middle of the star: a thread to which every rank of one job keeps a connection, and which hands round what they
// give. It serves one job and ends with it.
#pragma once

#include <chrono>
#include <vector>

#include "base/file_descriptor.h"
#include "bootstrap/hmac.h"

namespace moe {

struct RootOptions {
  std::vector<FileDescriptor> listeners;
  Digest secret{};
  // How long to listen while no rank has come at all.
  std::chrono::milliseconds patience{0};
  // Frees the port for the next job as soon as all ranks are here. Otherwise a rank too many is told so.
  bool stopListeningWhenComplete = false;
  // For Unix sockets: connections of other users are closed.
  bool sameUserOnly = false;

  // Limits on connections that have not proved themselves.
  std::chrono::milliseconds handshakeTime{5000};
  // With this many of them, one that is older than `leastHandshakeTime` makes room for the next.
  size_t mostStrangers = 64;
  std::chrono::milliseconds leastHandshakeTime{250};
};

// Returns at once. The thread ends when all ranks have left, a while after a job failed, or when patience runs out.
void startRoot(RootOptions options);

}  // namespace moe

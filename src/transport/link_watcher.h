// SPDX-License-Identifier: Apache-2.0
// A thread that listens on the links to other processes of this host and marks in PeerStates who left, failed or died.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/file_descriptor.h"
#include "transport/transport.h"

namespace moe {

// What a departure looks like on a link.
std::string departurePacket(PeerState state);
// Nothing but kLeft and kAborted can be said; false for any other bytes.
bool parseDeparture(std::string_view packet, PeerState* state);

class LinkWatcher {
 public:
  struct Watched {
    int peer;
    const FileDescriptor* socket;   // must outlive the watcher, as must:
    const FileDescriptor* process;  // invalid if the peer's process cannot be seen
  };

  LinkWatcher(int rank, std::vector<Watched> links, std::shared_ptr<PeerStates> states);
  ~LinkWatcher();
  LinkWatcher(const LinkWatcher&) = delete;
  LinkWatcher& operator=(const LinkWatcher&) = delete;

 private:
  void run();
  // Reads all that has come. False when nothing more can come.
  bool drain(const Watched& link);
  // The peer can say no more: it is dead unless it had said goodbye.
  void end(const Watched& link, const std::string& how);

  int rank_;
  std::vector<Watched> links_;
  std::shared_ptr<PeerStates> states_;
  FileDescriptor stop_;
  std::thread thread_;
};

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// Unix sockets between the ranks of one host that live in different processes: they pass descriptors at init, and
// afterwards tell who leaves, fails or dies. What the descriptors mean is the user's affair.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_descriptor.h"
#include "bootstrap/bootstrap.h"
#include "transport/link_watcher.h"
#include "transport/unix_socket.h"

namespace moe {

class HostLinks {
 public:
  static constexpr size_t kMaxPayload = 4096;

  // Listens from here on. Throws moeSystemError.
  HostLinks(int rank, int nranks);
  // Stops the watch. Peers that were told nothing take this rank for dead.
  ~HostLinks();
  HostLinks(const HostLinks&) = delete;
  HostLinks& operator=(const HostLinks&) = delete;

  // Where and with what token this rank can be reached. It is a secret of the job: send it through the bootstrap only.
  const std::string& address() const { return address_; }

  // Collective over `bootstrap`, once: links this rank with every rank r for which wanted[r] is set on both sides.
  // result[r] is empty for these, else the reason why there is no link, as a clause ("it runs on another host"), the
  // same rank pairs on both sides. Throws moeTimeout naming the ranks waited for, and moeSystemError; even then it has
  // taken its part in the exchange of the bootstrap, so that no other rank waits for it.
  std::vector<std::string> connect(const std::vector<std::string>& addresses, const std::vector<bool>& wanted,
                                   Bootstrap& bootstrap, const WaitLimit& limit);
  bool linked(int peer) const { return links_[static_cast<size_t>(peer)].stage == Stage::kReady; }
  std::vector<int> linkedPeers() const;

  struct Received {
    FileDescriptor descriptor;
    std::string payload;
    std::string failure;  // from exchangeDescriptors: a clause that says why there is nothing
  };
  // These throw moeRankLost when the peer is gone, moeSystemError when it sends anything but exactly one descriptor,
  // and moeTimeout; all name the peer.
  void sendDescriptor(int peer, int descriptor, std::string_view payload, const WaitLimit& limit);
  Received receiveDescriptor(int peer, const WaitLimit& limit);
  // Collective over the linked ranks: sends one descriptor to each and receives one of each. result[r] is rank r's. A
  // peer's failure is noted in its result; throws moeTimeout only. Unlike sends followed by receives it cannot lock up
  // on the limit of descriptors that a user may have under way.
  std::vector<Received> exchangeDescriptors(int descriptor, std::string_view payload, const WaitLimit& limit);

  // Starts to note the departures of the linked ranks. Once, after all descriptors.
  void watch(std::shared_ptr<PeerStates> states);
  // Tells all linked ranks; never waits. Thread-safe once connect() has returned.
  void announce(PeerState state) const;

 private:
  enum class Stage {
    kUnwanted,
    kToDial,        // this rank has to connect to the peer
    kAwaitHello,    // the peer has to connect to this rank
    kAwaitWelcome,  // connected; the peer has to answer
    kReady,
    kFailed,
  };
  struct Address {
    std::string bootId, network, name, token;
  };
  struct Link {
    Stage stage = Stage::kUnwanted;
    Address address;
    FileDescriptor socket;
    FileDescriptor process;
    std::string reason;
  };

  Link& link(int peer) { return links_[static_cast<size_t>(peer)]; }
  static bool parseAddress(std::string_view text, Address* address);
  void prepare(const std::vector<std::string>& addresses, const std::vector<bool>& wanted);
  void dialAll(const WaitLimit& limit);
  void dial(int peer);
  void completeAll(const WaitLimit& limit);
  void turn(const WaitLimit& limit);
  void acceptAll();
  // False when this connection needs no more attention.
  bool hearStranger(FileDescriptor* socket);
  void hearWelcome(int peer);
  void ready(int peer, FileDescriptor socket);
  void markFailed(int peer, const std::string& reason);
  std::string verdict() const;
  void applyVerdicts(const std::vector<std::string>& verdicts);
  std::vector<int> peersIn(Stage stage) const;
  bool trySend(int peer, int descriptor, std::string_view payload);
  bool tryReceive(int peer, Received* received);
  void waitFor(const std::vector<int>& peers, short events, const WaitLimit& limit);

  int rank_;
  Address own_;
  std::string address_;
  FileDescriptor listener_;
  std::vector<FileDescriptor> strangers_;  // accepted, not yet known
  std::vector<Link> links_;
  std::unique_ptr<LinkWatcher> watcher_;  // last, so that it stops before the sockets close
};

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
#include "transport/host_links.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>

#include "base/log.h"
#include "transport/wire.h"

namespace moe {
namespace {

constexpr uint32_t kHelloMagic = 0x6d6f6568;
constexpr uint32_t kDescriptorMagic = 0x6d6f6566;
constexpr size_t kTokenBytes = 32;
constexpr size_t kMaxReasonBytes = 400;
// Room for ranks that connect at the same moment; the kernel lowers it to net.core.somaxconn.
constexpr int kMinBacklog = 64;

std::string randomToken() {
  std::string token(kTokenBytes, '\0');
  ssize_t got = ::getrandom(token.data(), token.size(), 0);
  if (got != static_cast<ssize_t>(token.size())) failErrno(errno, "cannot read random bytes for a token");
  return token;
}

// Tells apart the kernels that ranks run on. Empty if it cannot be read.
std::string readBootId() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

// Tells apart the network namespaces of one kernel: abstract names are looked up in the caller's own.
std::string networkNamespace() {
  struct stat status {};
  if (::stat("/proc/self/ns/net", &status) != 0) return "";
  return cat(status.st_dev, ":", status.st_ino);
}

// The first word between two ranks in either direction; it proves that the sender knows the receiver's token.
std::string helloPacket(int from, int to, const std::string& token) {
  std::string packet;
  putValue(&packet, kHelloMagic);
  putValue(&packet, static_cast<int32_t>(from));
  putValue(&packet, static_cast<int32_t>(to));
  return packet + token;
}

// Takes the same time wherever the difference is.
bool sameToken(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

struct Hello {
  int32_t from = -1;
  int32_t to = -1;
  std::string_view token;
};

bool parseHello(const Packet& packet, Hello* hello) {
  std::string_view rest = packet.bytes;
  uint32_t magic = 0;
  if (packet.cut || !packet.descriptors.empty()) return false;
  if (!takeValue(&rest, &magic) || !takeValue(&rest, &hello->from) || !takeValue(&rest, &hello->to)) return false;
  hello->token = rest;
  return magic == kHelloMagic;
}

constexpr size_t kHelloBytes = 3 * sizeof(uint32_t) + kTokenBytes;

std::string nameRanks(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) text += cat(i == 0 ? "rank " : ", rank ", ranks[i]);
  return text;
}

constexpr char kWhereText[] = "are the ranks in different containers or hosts?";

}  // namespace

HostLinks::HostLinks(int rank, int nranks) : rank_(rank), links_(static_cast<size_t>(nranks)) {
  own_.bootId = readBootId();
  own_.network = networkNamespace();
  own_.token = randomToken();
  listener_ = listenUnderFreeName(std::max(nranks, kMinBacklog), &own_.name);
  for (const std::string* part : {&own_.bootId, &own_.network, &own_.name, &own_.token}) putText(&address_, *part);
}

HostLinks::~HostLinks() = default;

bool HostLinks::parseAddress(std::string_view text, Address* address) {
  for (std::string* part : {&address->bootId, &address->network, &address->name, &address->token}) {
    if (!takeText(&text, part)) return false;
  }
  return text.empty() && address->token.size() == kTokenBytes;
}

std::vector<std::string> HostLinks::connect(const std::vector<std::string>& addresses, const std::vector<bool>& wanted,
                                            Bootstrap& bootstrap, const WaitLimit& limit) {
  std::unique_ptr<Error> failure;
  try {
    prepare(addresses, wanted);
    dialAll(limit);
  } catch (const Error& error) {
    failure = std::make_unique<Error>(error);
    for (size_t peer = 0; peer < links_.size(); ++peer) {
      if (wanted[peer]) markFailed(static_cast<int>(peer), error.text());
    }
  }
  // Whoever could not connect says so here: the other side must not wait for it.
  std::vector<std::string> verdicts = bootstrap.allGather(verdict(), limit);
  if (failure) throw Error(*failure);
  applyVerdicts(verdicts);
  completeAll(limit);
  listener_.reset();
  strangers_.clear();
  std::vector<std::string> reasons;
  for (const Link& one : links_) reasons.push_back(one.stage == Stage::kUnwanted ? "no link was wanted" : one.reason);
  return reasons;
}

std::vector<int> HostLinks::linkedPeers() const { return peersIn(Stage::kReady); }

std::vector<int> HostLinks::peersIn(Stage stage) const {
  std::vector<int> peers;
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (links_[peer].stage == stage) peers.push_back(static_cast<int>(peer));
  }
  return peers;
}

void HostLinks::markFailed(int peer, const std::string& reason) {
  Link& failed = link(peer);
  failed.stage = Stage::kFailed;
  failed.reason = reason;
  failed.socket.reset();
  failed.process.reset();
}

void HostLinks::ready(int peer, FileDescriptor socket) {
  Link& linked = link(peer);
  linked.process = openPeerProcess(socket);
  linked.socket = std::move(socket);
  linked.stage = Stage::kReady;
}

void HostLinks::prepare(const std::vector<std::string>& addresses, const std::vector<bool>& wanted) {
  for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer) {
    auto index = static_cast<size_t>(peer);
    if (!wanted[index] || peer == rank_) continue;
    Address& theirs = link(peer).address;
    auto differ = [](const std::string& a, const std::string& b) { return !a.empty() && !b.empty() && a != b; };
    if (!parseAddress(addresses[index], &theirs)) {
      markFailed(peer, cat("its address of ", addresses[index].size(), " bytes cannot be read"));
    } else if (differ(theirs.bootId, own_.bootId)) {
      markFailed(peer, "it runs on another host");
    } else if (differ(theirs.network, own_.network)) {
      markFailed(peer,
                 "it runs in another network namespace of this host, where its socket cannot be reached; let the "
                 "containers share one network namespace");
    } else {
      link(peer).stage = peer < rank_ ? Stage::kToDial : Stage::kAwaitHello;
    }
  }
}

void HostLinks::dialAll(const WaitLimit& limit) {
  for (;;) {
    for (int peer : peersIn(Stage::kToDial)) dial(peer);
    std::vector<int> waiting = peersIn(Stage::kToDial);
    if (waiting.empty()) return;
    limit.throwIfAborted();
    if (limit.passed()) {
      for (int peer : waiting) markFailed(peer, "the queue of its socket was full until the time ran out");
      return;
    }
    // Queues empty while their owners accept, which this rank must do too: the others may be waiting for it.
    turn(limit);
  }
}

void HostLinks::dial(int peer) {
  FileDescriptor socket;
  int error = connectToName(link(peer).address.name, &socket);
  if (error == EAGAIN) return;
  if (error != 0)
    return markFailed(peer, cat("connecting to its socket failed: ", std::strerror(error), "; ", kWhereText));
  // The token must not reach another user who took over the name.
  if (std::string refusal = refuseOtherUser(socket); !refusal.empty()) return markFailed(peer, refusal);
  error = sendPacket(socket, helloPacket(rank_, peer, link(peer).address.token));
  if (error != 0) return markFailed(peer, cat("greeting it over its socket failed: ", std::strerror(error)));
  link(peer).socket = std::move(socket);
  link(peer).stage = Stage::kAwaitWelcome;
}

std::string HostLinks::verdict() const {
  // A mark and a text per rank: '+' can be linked, '-' cannot because of the text, '0' is not wanted.
  std::string out;
  for (const Link& one : links_) {
    bool wanted = one.stage != Stage::kUnwanted;
    putText(&out, !wanted ? "0" : one.stage != Stage::kFailed ? "+" : "-" + one.reason.substr(0, kMaxReasonBytes));
  }
  return out;
}

void HostLinks::applyVerdicts(const std::vector<std::string>& verdicts) {
  for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer) {
    Stage stage = link(peer).stage;
    if (stage == Stage::kUnwanted || stage == Stage::kFailed) continue;
    std::string_view rest = verdicts[static_cast<size_t>(peer)];
    std::string aboutThisRank;
    bool whole = true;
    for (int to = 0; to <= rank_ && whole; ++to) whole = takeText(&rest, &aboutThisRank);
    if (!whole || aboutThisRank.empty()) {
      markFailed(peer, "its report on its connections cannot be read");
    } else if (aboutThisRank[0] == '0') {
      markFailed(peer, "it does not want to be linked with this rank");
    } else if (aboutThisRank[0] != '+') {
      markFailed(peer, cat("it could not connect: ", aboutThisRank.substr(1)));
    }
  }
}

void HostLinks::completeAll(const WaitLimit& limit) {
  for (;;) {
    std::vector<int> waiting = peersIn(Stage::kAwaitHello);
    for (int peer : peersIn(Stage::kAwaitWelcome)) waiting.push_back(peer);
    if (waiting.empty()) return;
    limit.throwIfAborted();
    if (limit.passed()) {
      fail(moeTimeout, "rank ", rank_, " ran out of time waiting for ", nameRanks(waiting),
           " to finish connecting over Unix sockets; see whether the process is stopped or overloaded");
    }
    turn(limit);
  }
}

void HostLinks::turn(const WaitLimit& limit) {
  std::vector<pollfd> waits{{listener_.get(), POLLIN, 0}};
  for (const FileDescriptor& stranger : strangers_) waits.push_back({stranger.get(), POLLIN, 0});
  std::vector<int> dialed = peersIn(Stage::kAwaitWelcome);
  for (int peer : dialed) waits.push_back({link(peer).socket.get(), POLLIN, 0});
  if (::poll(waits.data(), waits.size(), limit.pollMilliseconds()) < 0) return;
  for (int peer : dialed) hearWelcome(peer);
  acceptAll();
  std::erase_if(strangers_, [this](FileDescriptor& socket) { return !hearStranger(&socket); });
}

void HostLinks::acceptAll() {
  for (;;) {
    FileDescriptor socket = acceptWaiting(listener_);
    if (!socket.valid()) return;
    std::string refusal = refuseOtherUser(socket);
    if (refusal.empty()) {
      strangers_.push_back(std::move(socket));
    } else {
      log(LogLevel::kWarn, "rank ", rank_, " refused a connection to its Unix socket: ", refusal);
    }
  }
}

bool HostLinks::hearStranger(FileDescriptor* socket) {
  Packet packet = receivePacket(*socket, kHelloBytes);
  if (packet.status == Packet::kNothingYet) return true;
  Hello hello;
  bool expected = packet.status == Packet::kReceived && parseHello(packet, &hello) && hello.to == rank_ &&
                  hello.from >= 0 && hello.from < static_cast<int>(links_.size()) &&
                  link(hello.from).stage == Stage::kAwaitHello;
  if (!expected) {
    log(LogLevel::kWarn, "rank ", rank_, " closed a connection to its Unix socket that was not from an expected rank");
    return false;
  }
  if (!sameToken(hello.token, own_.token)) {
    markFailed(hello.from, "the process that connected in its name did not know this rank's token");
    return false;
  }
  int error = sendPacket(*socket, helloPacket(rank_, hello.from, link(hello.from).address.token));
  if (error != 0) {
    markFailed(hello.from, cat("answering it over its socket failed: ", std::strerror(error)));
    return false;
  }
  ready(hello.from, std::move(*socket));
  return false;
}

void HostLinks::hearWelcome(int peer) {
  Packet packet = receivePacket(link(peer).socket, kHelloBytes);
  if (packet.status == Packet::kNothingYet) return;
  Hello hello;
  if (packet.status == Packet::kClosed) {
    markFailed(peer, cat("it closed the connection instead of accepting this rank; ", kWhereText));
  } else if (!parseHello(packet, &hello) || hello.from != peer || hello.to != rank_) {
    markFailed(peer, "the process at its socket is not a rank of this communicator");
  } else if (!sameToken(hello.token, own_.token)) {
    markFailed(peer, "the process at its socket did not know this rank's token");
  } else {
    ready(peer, std::move(link(peer).socket));
  }
}

bool HostLinks::trySend(int peer, int descriptor, std::string_view payload) {
  std::string packet;
  putValue(&packet, kDescriptorMagic);
  packet.append(payload);
  int error = sendPacket(link(peer).socket, packet, descriptor);
  if (error == EAGAIN || error == ETOOMANYREFS) return false;
  if (error == EPIPE || error == ECONNRESET) {
    fail(moeRankLost, "rank ", peer, " closed its connection before it had taken a descriptor");
  }
  if (error != 0) failErrno(error, "sending a descriptor to rank ", peer, " failed");
  return true;
}

bool HostLinks::tryReceive(int peer, Received* received) {
  Packet packet = receivePacket(link(peer).socket, sizeof(kDescriptorMagic) + kMaxPayload);
  if (packet.status == Packet::kNothingYet) return false;
  if (packet.status == Packet::kClosed) {
    fail(moeRankLost, "rank ", peer, " closed its connection before it had sent a descriptor",
         packet.error == 0 ? "" : ": ", packet.error == 0 ? "" : std::strerror(packet.error));
  }
  PeerState said{};
  if (parseDeparture(packet.bytes, &said)) {
    fail(moeRankLost, "rank ", peer, " gave up before it had sent a descriptor");
  }
  std::string_view rest = packet.bytes;
  uint32_t magic = 0;
  if (!takeValue(&rest, &magic) || magic != kDescriptorMagic) {
    fail(moeSystemError, "rank ", peer, " sent ", packet.bytes.size(), " bytes that are not a descriptor's");
  }
  if (packet.cut || packet.descriptors.size() != 1) {
    fail(moeSystemError, "rank ", peer, " sent ", packet.descriptors.size(), packet.cut ? " or more" : "",
         " descriptors with ", rest.size(), " bytes, where one with at most ", kMaxPayload,
         " was expected; see ulimit -n if none came through");
  }
  received->descriptor = std::move(packet.descriptors[0]);
  received->payload = rest;
  return true;
}

void HostLinks::waitFor(const std::vector<int>& peers, short events, const WaitLimit& limit) {
  limit.throwIfAborted();
  if (limit.passed()) {
    fail(moeTimeout, "rank ", rank_, " ran out of time waiting for ", nameRanks(peers), " to ",
         events == POLLIN ? "send" : "take", " a descriptor; see whether the process is stopped or overloaded");
  }
  // A send that the kernel put off is tried again after the poll's time, also without an event: no event says that the
  // user's number of descriptors under way has fallen.
  std::vector<pollfd> waits;
  for (int peer : peers) waits.push_back({link(peer).socket.get(), events, 0});
  ::poll(waits.data(), waits.size(), limit.pollMilliseconds());
}

void HostLinks::sendDescriptor(int peer, int descriptor, std::string_view payload, const WaitLimit& limit) {
  while (!trySend(peer, descriptor, payload)) waitFor({peer}, 0, limit);
}

HostLinks::Received HostLinks::receiveDescriptor(int peer, const WaitLimit& limit) {
  Received received;
  while (!tryReceive(peer, &received)) waitFor({peer}, POLLIN, limit);
  return received;
}

std::vector<HostLinks::Received> HostLinks::exchangeDescriptors(int descriptor, std::string_view payload,
                                                                const WaitLimit& limit) {
  std::vector<Received> received(links_.size());
  std::vector<int> toSend = linkedPeers();
  std::vector<int> toReceive = toSend;
  auto settled = [&](int peer, auto&& attempt) {
    try {
      return attempt(peer);
    } catch (const Error& error) {
      received[static_cast<size_t>(peer)].failure = error.text();
      return true;
    }
  };
  for (;;) {
    std::erase_if(toSend,
                  [&](int peer) { return settled(peer, [&](int to) { return trySend(to, descriptor, payload); }); });
    std::erase_if(toReceive, [&](int peer) {
      return settled(peer, [&](int from) { return tryReceive(from, &received[static_cast<size_t>(from)]); });
    });
    if (toSend.empty() && toReceive.empty()) return received;
    waitFor(toReceive.empty() ? toSend : toReceive, toReceive.empty() ? 0 : POLLIN, limit);
  }
}

void HostLinks::watch(std::shared_ptr<PeerStates> states) {
  std::vector<LinkWatcher::Watched> watched;
  for (int peer : linkedPeers()) watched.push_back({peer, &link(peer).socket, &link(peer).process});
  watcher_ = std::make_unique<LinkWatcher>(rank_, std::move(watched), std::move(states));
}

void HostLinks::announce(PeerState state) const {
  std::string packet = departurePacket(state);
  for (int peer : linkedPeers()) {
    int error = sendPacket(links_[static_cast<size_t>(peer)].socket, packet);
    // A peer that has gone needs no news.
    if (error != 0 && error != EPIPE && error != ECONNRESET) {
      log(LogLevel::kWarn, "rank ", rank_, " could not tell rank ", peer, " that it leaves: ", std::strerror(error));
    }
  }
}

}  // namespace moe

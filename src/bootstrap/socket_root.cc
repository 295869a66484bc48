// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/socket_root.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <list>
#include <memory>
#include <optional>

#include "base/deadline.h"
#include "base/error.h"
#include "base/log.h"
#include "bootstrap/background_thread.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/bytes.h"
#include "bootstrap/frame.h"
#include "bootstrap/handshake.h"
#include "bootstrap/roll_call.h"
#include "bootstrap/socket.h"

namespace moe {
namespace {

using std::chrono::milliseconds;

// How often waiting ranks may hear that others have come.
constexpr milliseconds kMissingEvery{20};
// How long a rank that was told everything may take to close its connection.
constexpr milliseconds kDrainTime{5000};
// How long a failed job stays, to tell ranks that come late.
constexpr milliseconds kLinger{5000};
// How long to leave new connections alone when this process has no descriptor for them.
constexpr milliseconds kAcceptPause{100};
// The longest turn of the loop, and so how late a deadline may be noticed.
constexpr int kLongestTurn = 250;
constexpr size_t kLongestReason = 4096;

enum class Stage {
  kHello,     // nothing is known of it
  kProof,     // it has been challenged
  kJoined,    // it is a rank
  kDraining,  // it has been told everything; waits for its end
  kGone,      // to be removed
};

struct Connection {
  Connection(FileDescriptor fd, milliseconds handshakeTime)
      : channel(std::move(fd)), stageEnds(Deadline::in(handshakeTime)) {}

  FrameChannel channel;
  Stage stage = Stage::kHello;
  const Deadline::Clock::time_point accepted = Deadline::Clock::now();
  Deadline stageEnds;  // of strangers and of kDraining
  Handshake handshake;
  std::string toldMissing;
  bool readable = false;
  bool outputShut = false;

  bool stranger() const { return stage == Stage::kHello || stage == Stage::kProof; }
  int rank() const { return handshake.rank; }
};

class Root {
 public:
  explicit Root(RootOptions options) : options_(std::move(options)), patience_(Deadline::in(options_.patience)) {}

  void run() {
    hashInThreadThatOutlivesExit();
    while (!finished()) {
      makeRoom();
      pollOnce();
      for (Connection& each : connections_) step(each);
      handOutParts();
      tellMissing();
      tellVerdict();
      for (Connection& each : connections_) write(each);
      removeGone();
      if (options_.stopListeningWhenComplete && roll_.complete()) options_.listeners.clear();
    }
  }

 private:
  bool finished() const;
  size_t strangers() const;
  void makeRoom();
  void removeGone();
  int turnMilliseconds() const;
  void pollOnce();
  void acceptFrom(int listener);
  bool admit(const FileDescriptor& fd) const;
  void step(Connection& each);
  void read(Connection& each);
  void write(Connection& each);
  void lose(Connection& each, const std::string& why);
  void handle(Connection& from, Frame frame);
  void handleHello(Connection& from, const Frame& frame);
  void handleProof(Connection& from, const Frame& frame);
  void handleLeave(Connection& from, const Frame& frame);
  void drain(Connection& each);
  void handOutParts();
  void tellMissing();
  void tellVerdict();

  RootOptions options_;
  Deadline patience_;
  Deadline acceptAgain_ = Deadline::in(milliseconds(0));
  std::string acceptProblem_;
  Deadline missingDue_ = Deadline::in(milliseconds(0));
  bool missingUntold_ = false;
  std::optional<Deadline> lingerEnds_;
  std::list<Connection> connections_;
  RollCall roll_;
};

bool Root::finished() const {
  for (const Connection& each : connections_) {
    if (!each.stranger()) return false;
  }
  if (roll_.verdict()) return roll_.complete() || (lingerEnds_ && lingerEnds_->passed());
  if (roll_.started()) return roll_.allLeft();
  return patience_.passed();
}

size_t Root::strangers() const {
  auto isStranger = [](const Connection& each) { return each.stranger(); };
  return static_cast<size_t>(std::count_if(connections_.begin(), connections_.end(), isStranger));
}

void Root::makeRoom() {
  if (strangers() < options_.mostStrangers) return;
  // The list is in order of age.
  auto isStranger = [](const Connection& each) { return each.stranger(); };
  auto oldest = std::find_if(connections_.begin(), connections_.end(), isStranger);
  if (Deadline::Clock::now() - oldest->accepted >= options_.leastHandshakeTime) connections_.erase(oldest);
}

void Root::removeGone() {
  connections_.remove_if([](const Connection& each) { return each.stage == Stage::kGone; });
}

int Root::turnMilliseconds() const {
  int turn = kLongestTurn;
  if (missingUntold_) turn = std::min(turn, missingDue_.millisecondsLeft());
  if (!acceptAgain_.passed()) turn = std::min(turn, acceptAgain_.millisecondsLeft());
  if (strangers() >= options_.mostStrangers) turn = std::min(turn, static_cast<int>(kMissingEvery.count()));
  for (const Connection& each : connections_) {
    if (each.stage != Stage::kJoined) turn = std::min(turn, each.stageEnds.millisecondsLeft());
  }
  if (!roll_.started()) turn = std::min(turn, patience_.millisecondsLeft());
  return turn;
}

void Root::pollOnce() {
  std::vector<pollfd> entries;
  for (const Connection& each : connections_) {
    entries.push_back({each.channel.fd(), static_cast<short>(POLLIN | (each.channel.hasOutput() ? POLLOUT : 0)), 0});
  }
  size_t firstListener = entries.size();
  if (strangers() < options_.mostStrangers && acceptAgain_.passed()) {
    for (const FileDescriptor& each : options_.listeners) entries.push_back({each.get(), POLLIN, 0});
  }
  int ready = ::poll(entries.data(), entries.size(), turnMilliseconds());
  size_t index = 0;
  for (Connection& each : connections_) {
    each.readable = ready > 0 && (entries[index++].revents & (POLLIN | POLLHUP | POLLERR)) != 0;
  }
  for (index = firstListener; ready > 0 && index < entries.size(); ++index) {
    if (entries[index].revents != 0) acceptFrom(entries[index].fd);
  }
}

void Root::acceptFrom(int listener) {
  while (strangers() < options_.mostStrangers) {
    FileDescriptor fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd.valid()) {
      acceptProblem_.clear();
      if (admit(fd)) connections_.emplace_back(std::move(fd), options_.handshakeTime);
      continue;
    }
    // What else accept may say is about one connection that has already gone.
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      std::string problem =
          cat("the process that holds the rendezvous cannot accept connections: ", std::strerror(errno),
              "; raise its limit of open files (ulimit -n)");
      if (acceptProblem_.empty()) log(LogLevel::kWarn, problem);
      acceptProblem_ = problem;
      acceptAgain_ = Deadline::in(kAcceptPause);
    }
    if (errno != EINTR && errno != ECONNABORTED) return;
  }
}

bool Root::admit(const FileDescriptor& fd) const {
  tuneConnection(fd.get(), localAddress(fd.get()).family());
  if (!options_.sameUserOnly || peerUser(fd.get()) == ::geteuid()) return true;
  log(LogLevel::kWarn, "the rendezvous refused a process of user ", peerUser(fd.get()));
  return false;
}

void Root::step(Connection& each) {
  if (each.stage != Stage::kJoined && each.stageEnds.passed()) {
    each.stage = Stage::kGone;
    return;
  }
  if (!each.readable) return;
  each.readable = false;
  try {
    read(each);
  } catch (const Error& error) {
    lose(each, error.text());
  }
}

void Root::read(Connection& each) {
  if (each.stage == Stage::kDraining) {
    if (!each.channel.discard()) each.stage = Stage::kGone;
    return;
  }
  bool open = each.channel.receive();
  while (each.stage != Stage::kDraining && each.stage != Stage::kGone) {
    std::optional<Frame> frame = each.channel.next();
    if (!frame) break;
    handle(each, std::move(*frame));
  }
  if (!open) lose(each, "its connection closed");
}

void Root::write(Connection& each) {
  if (each.stage == Stage::kGone) return;
  try {
    each.channel.flush();
    if (each.stage != Stage::kDraining || each.channel.hasOutput() || each.outputShut) return;
    each.channel.shutdownOutput();
    each.outputShut = true;
  } catch (const Error& error) {
    lose(each, error.text());
  }
}

void Root::lose(Connection& each, const std::string& why) {
  if (each.stage == Stage::kJoined) {
    roll_.end(moeRankLost, cat("rank ", each.rank(), " is lost: ", why));
  } else if (each.stranger()) {
    log(LogLevel::kInfo, "the rendezvous dropped a connection that was no rank's: ", why);
  }
  each.stage = Stage::kGone;
}

void Root::handle(Connection& from, Frame frame) {
  if (from.stage == Stage::kHello && frame.type == FrameType::kHello) return handleHello(from, frame);
  if (from.stage == Stage::kProof && frame.type == FrameType::kProof) return handleProof(from, frame);
  if (from.stage == Stage::kJoined && frame.type == FrameType::kLeave) return handleLeave(from, frame);
  if (from.stage == Stage::kJoined && frame.type == FrameType::kGather) {
    // In a job that has ended, the verdict is on its way.
    roll_.addPart(from.rank(), std::move(frame.payload));
    return;
  }
  fail(moeSystemError, "a frame of type ", static_cast<uint32_t>(frame.type), " came out of order");
}

void Root::handleHello(Connection& from, const Frame& frame) {
  from.handshake = Handshake::parseHello(frame.payload);
  from.handshake.rootNonce = randomDigest();
  from.channel.send(FrameType::kChallenge, from.handshake.challenge(options_.secret));
  from.stage = Stage::kProof;
}

void Root::handleProof(Connection& from, const Frame& frame) {
  if (!from.handshake.proofMatches(frame.payload, options_.secret)) {
    fail(moeSystemError, "it claimed to be rank ", from.rank(), " and does not know the secret");
  }
  from.handshake.sealAsRoot(from.channel, options_.secret);
  from.channel.setMaxPayload(Bootstrap::kMaxBytes);
  from.stage = Stage::kJoined;
  roll_.join(from.rank(), from.handshake.nranks);
}

void Root::handleLeave(Connection& from, const Frame& frame) {
  ByteReader in(frame.payload);
  auto code = static_cast<moeResult_t>(in.number<int32_t>());
  std::string reason(in.rest().substr(0, kLongestReason));
  if (code == moeSuccess) {
    roll_.leave(from.rank());
  } else {
    roll_.end(code == moeTimeout ? moeTimeout : moeRankLost, cat("rank ", from.rank(), " gave up: ", reason));
  }
  drain(from);
}

void Root::drain(Connection& each) {
  each.stage = Stage::kDraining;
  each.stageEnds = Deadline::in(kDrainTime);
}

void Root::handOutParts() {
  if (roll_.verdict() || !roll_.gathered()) return;
  ByteWriter out;
  for (const std::string& part : roll_.takeParts()) out.number(static_cast<uint64_t>(part.size())).bytes(part);
  auto payload = std::make_shared<const SharedPayload>(out.take());
  for (Connection& each : connections_) {
    if (each.stage == Stage::kJoined) each.channel.send(FrameType::kGathered, payload);
    each.toldMissing.clear();
  }
}

void Root::tellMissing() {
  missingUntold_ = false;
  if (roll_.verdict() || !roll_.started()) return;
  std::string text = roll_.missing();
  if (!acceptProblem_.empty()) text += cat(" (", acceptProblem_, ")");
  std::shared_ptr<const SharedPayload> payload;
  for (Connection& each : connections_) {
    if (each.stage != Stage::kJoined || !roll_.waiting(each.rank()) || each.toldMissing == text) continue;
    missingUntold_ = true;
    if (!missingDue_.passed() || each.channel.hasOutput()) continue;
    if (!payload) payload = std::make_shared<const SharedPayload>(text);
    each.channel.send(FrameType::kMissing, payload);
    each.toldMissing = text;
  }
  if (payload) {
    missingDue_ = Deadline::in(kMissingEvery);
    missingUntold_ = false;
  }
}

void Root::tellVerdict() {
  if (!roll_.verdict()) return;
  if (!lingerEnds_) lingerEnds_ = Deadline::in(std::min(kLinger, options_.patience));
  std::string payload =
      ByteWriter().number(static_cast<int32_t>(roll_.verdict()->code())).bytes(roll_.verdict()->text()).take();
  for (Connection& each : connections_) {
    if (each.stage != Stage::kJoined) continue;
    each.channel.send(FrameType::kFailed, payload);
    drain(each);
  }
}

}  // namespace

void startRoot(RootOptions options) {
  // std::function wants a copyable body.
  auto root = std::make_shared<Root>(std::move(options));
  startBackgroundThread([root] { root->run(); });
}

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/socket_bootstrap.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"
#include "bootstrap/bytes.h"
#include "bootstrap/handshake.h"
#include "bootstrap/make.h"
#include "bootstrap/unique_id.h"

namespace moe {
namespace {

using std::chrono::milliseconds;

// The longest that one address may keep the others waiting.
constexpr milliseconds kLongestSlice{3000};
constexpr milliseconds kFirstPause{5};
constexpr milliseconds kLongestPause{50};

// What came of trying one address.
struct Attempt {
  std::optional<FrameChannel> channel;  // past its handshake
  std::string problem;
  bool worthAnotherTry = false;
};

Attempt failedAttempt(std::string problem, bool worthAnotherTry) {
  Attempt result;
  result.problem = std::move(problem);
  result.worthAnotherTry = worthAnotherTry;
  return result;
}

std::string lowered(std::string text) {
  if (!text.empty() && text[0] >= 'A' && text[0] <= 'Z') text[0] = static_cast<char>(text[0] - 'A' + 'a');
  return text;
}

// Before the rank has proved itself, it may go away and come back. Afterwards it counts as joined.
Attempt shakeHands(FrameChannel channel, const Meeting& meeting, Handshake handshake, const WaitLimit& slice) {
  channel.send(FrameType::kHello, handshake.hello());
  std::optional<Frame> frame;
  while (!frame) {
    channel.flush();
    waitFor(channel.fd(), static_cast<short>(POLLIN | (channel.hasOutput() ? POLLOUT : 0)), slice);
    bool open = channel.receive();
    frame = channel.next();
    if (!frame && !open) return failedAttempt("the process there closed the connection", true);
    if (!frame && slice.passed()) return failedAttempt("the process there does not answer", true);
  }
  if (frame->type != FrameType::kChallenge) return failedAttempt("the process there is no rendezvous", false);
  handshake.parseChallenge(frame->payload, meeting.secret);
  channel.send(FrameType::kProof, handshake.proof(meeting.secret));
  handshake.sealAsRank(channel, meeting.secret);
  channel.setMaxPayload(static_cast<uint64_t>(std::max(handshake.nranks, 1)) * (Bootstrap::kMaxBytes + 8));
  Attempt result;
  result.channel.emplace(std::move(channel));
  return result;
}

Attempt tryAddress(const SocketAddress& address, const Meeting& meeting, const Handshake& handshake,
                   const WaitLimit& slice) {
  int error = 0;
  FileDescriptor fd = connectTo(address, slice, &error);
  if (!fd.valid()) {
    bool worthAnotherTry = error == ETIMEDOUT || error == EAGAIN || error == EINTR || error == ECONNRESET;
    return failedAttempt(error == ETIMEDOUT ? "no answer" : lowered(std::strerror(error)), worthAnotherTry);
  }
  if (meeting.sameUserOnly && peerUser(fd.get()) != ::geteuid()) {
    return failedAttempt(cat("a process of user ", peerUser(fd.get()), " listens there"), false);
  }
  try {
    return shakeHands(FrameChannel(std::move(fd)), meeting, handshake, slice);
  } catch (const Error& failure) {
    if (failure.code() == moeAborted) throw;
    return failedAttempt(failure.text(), failure.code() != moeMismatch);
  }
}

[[noreturn]] void failToReach(const Meeting& meeting, int rank, const std::vector<std::string>& problems,
                              bool timedOut) {
  std::string tried;
  for (size_t i = 0; i < problems.size(); ++i) {
    if (problems[i].empty()) continue;
    tried += cat(tried.empty() ? "" : ", ", meeting.addresses[i].text(), " (", problems[i], ")");
  }
  fail(timedOut ? moeTimeout : moeSystemError, "rank ", rank, " cannot reach ", meeting.place, " at ", tried,
       timedOut ? " in time; " : "; ", meeting.hint);
}

// Tries the addresses in turn until one leads to the root.
std::pair<FrameChannel, std::string> findRoot(const Meeting& meeting, const Handshake& handshake,
                                              const WaitLimit& limit) {
  const size_t count = meeting.addresses.size();
  std::vector<std::string> problems(count);
  for (milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    bool hope = false;
    for (size_t i = 0; i < count; ++i) {
      limit.throwIfAborted();
      milliseconds slice(limit.millisecondsLeft() / static_cast<int>(count - i));
      if (count > 1) slice = std::min(slice, kLongestSlice);
      Attempt attempt = tryAddress(meeting.addresses[i], meeting, handshake, limit.within(slice));
      if (attempt.channel) return {std::move(*attempt.channel), meeting.addresses[i].text()};
      // An attempt that the limit cut off says less than the one before it.
      if (problems[i].empty() || !limit.passed()) problems[i] = std::move(attempt.problem);
      hope = hope || attempt.worthAnotherTry || meeting.rootMayComeLater;
    }
    if (!hope || limit.passed()) failToReach(meeting, handshake.rank, problems, hope);
    WaitLimit until = limit.within(pause);
    while (!until.passed()) waitFor(-1, 0, until);
  }
}

}  // namespace

std::unique_ptr<Bootstrap> joinMeeting(const Meeting& meeting, int rank, int nranks, const WaitLimit& limit) {
  Handshake handshake;
  handshake.rank = rank;
  handshake.nranks = nranks;
  handshake.rankNonce = randomDigest();
  auto [channel, where] = findRoot(meeting, handshake, limit);
  auto result = std::make_unique<SocketBootstrap>(std::move(channel), where, rank, nranks);
  // Whoever returns from here knows that everybody has come, with distinct ranks and one nranks.
  result->allGather("", limit);
  return result;
}

std::unique_ptr<Bootstrap> joinTcp(const moeUniqueId_t& id, int rank, int nranks, const WaitLimit& limit) {
  UniqueId known = decodeUniqueId(id);
  Meeting meeting;
  meeting.addresses = known.addresses;
  meeting.secret = known.secret;
  meeting.place = "the rendezvous of this id";
  meeting.hint =
      "is the process that called moeGetUniqueId still alive, is the id from this run, and can its host be reached "
      "from here (there, MOE_SOCKET_IFNAME chooses the network interface)?";
  return joinMeeting(meeting, rank, nranks, limit);
}

SocketBootstrap::SocketBootstrap(FrameChannel channel, std::string where, int rank, int nranks)
    : Bootstrap(rank, nranks), channel_(std::move(channel)), where_(std::move(where)) {}

SocketBootstrap::~SocketBootstrap() {
  if (!failure_) leave(moeSuccess, "");
}

std::vector<std::string> SocketBootstrap::allGather(const std::string& mine, const WaitLimit& limit) {
  if (failure_) throw *failure_;
  try {
    if (mine.size() > kMaxBytes) {
      fail(moeInternalError, "rank ", rank(), " wants to exchange ", mine.size(), " bytes; the limit is ", kMaxBytes);
    }
    return gather(mine, limit);
  } catch (const Error& error) {
    failure_ = error;
    leave(error.code(), error.text());
    throw;
  }
}

std::vector<std::string> SocketBootstrap::gather(const std::string& mine, const WaitLimit& limit) {
  const auto start = Deadline::Clock::now();
  missing_.clear();
  channel_.send(FrameType::kGather, mine);
  for (;;) {
    bool open = exchange();
    while (std::optional<Frame> frame = channel_.next()) {
      if (auto result = handle(*frame)) return std::move(*result);
    }
    if (!open) {
      fail(moeRankLost, "rank ", rank(), " lost the rendezvous at ", where_, ": ",
           lostWhy_.empty() ? "the process that holds it ended, or dropped this rank" : lostWhy_);
    }
    if (limit.passed()) {
      auto waited = std::chrono::duration_cast<milliseconds>(Deadline::Clock::now() - start).count();
      fail(moeTimeout, "rank ", rank(), " stopped after ", waited, " ms of waiting for ",
           missing_.empty() ? cat("the process that holds the rendezvous at ", where_) : missing_);
    }
    waitFor(channel_.fd(), static_cast<short>(POLLIN | (channel_.hasOutput() ? POLLOUT : 0)), limit);
  }
}

// Writes and reads what is possible now. A connection that broke may still hold what the root said before, so reading
// goes on after a failed write.
bool SocketBootstrap::exchange() {
  try {
    channel_.flush();
  } catch (const Error& error) {
    lostWhy_ = error.text();
  }
  try {
    bool open = channel_.receive();
    return open && lostWhy_.empty();
  } catch (const Error& error) {
    lostWhy_ = error.text();
    return false;
  }
}

std::optional<std::vector<std::string>> SocketBootstrap::handle(const Frame& frame) {
  if (frame.type == FrameType::kMissing) {
    missing_ = frame.payload;
    return std::nullopt;
  }
  ByteReader in(frame.payload);
  if (frame.type == FrameType::kFailed) {
    auto code = in.number<int32_t>();
    if (code <= moeSuccess || code >= moeNumResults) code = moeInternalError;
    fail(static_cast<moeResult_t>(code), in.rest());
  }
  if (frame.type != FrameType::kGathered) {
    fail(moeInternalError, "the rendezvous sent a frame of type ", static_cast<uint32_t>(frame.type));
  }
  std::vector<std::string> parts;
  for (int each = 0; each < nranks(); ++each) {
    auto length = in.number<uint64_t>();
    parts.emplace_back(in.bytes(length));
  }
  return parts;
}

void SocketBootstrap::leave(moeResult_t code, const std::string& why) noexcept {
  try {
    channel_.send(FrameType::kLeave, ByteWriter().number(static_cast<int32_t>(code)).bytes(why).take());
    channel_.flush();
    channel_.shutdownOutput();
  } catch (const std::exception&) {
    // Then the root sees the connection close, which says the same with fewer words.
  }
}

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/frame.h"

#include <sys/socket.h>

#include "unit/bootstrap/helpers.h"

namespace moe::test {
namespace {

// The two ends, and the wire between them in the test's hand.
struct Wire {
  Wire() {
    int left[2], right[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, left), 0);
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, right), 0);
    sender = std::make_unique<FrameChannel>(FileDescriptor(left[0]));
    fromSender = FileDescriptor(left[1]);
    receiver = std::make_unique<FrameChannel>(FileDescriptor(right[0]));
    toReceiver = FileDescriptor(right[1]);
  }

  std::string sent(FrameType type, std::string payload) {
    sender->send(type, std::move(payload));
    sender->flush();
    std::string bytes(1 << 16, '\0');
    ssize_t got = ::recv(fromSender.get(), bytes.data(), bytes.size(), 0);
    bytes.resize(got > 0 ? static_cast<size_t>(got) : 0);
    return bytes;
  }
  void deliver(const std::string& bytes) {
    EXPECT_EQ(::send(toReceiver.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    EXPECT_TRUE(receiver->receive());
  }
  void sealBoth() {
    Digest a = randomDigest(), b = randomDigest();
    sender->seal(a, b);
    receiver->seal(b, a);
  }

  std::unique_ptr<FrameChannel> sender, receiver;
  FileDescriptor fromSender, toReceiver;
};

class FrameTest : public testing::Test, protected Wire {};

TEST_F(FrameTest, ArrivesWholeFromSingleBytes) {
  sealBoth();
  std::string bytes = sent(FrameType::kGather, "some payload");
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_FALSE(receiver->next()) << i;
    deliver(bytes.substr(i, 1));
  }
  std::optional<Frame> frame = receiver->next();
  ASSERT_TRUE(frame);
  EXPECT_EQ(frame->type, FrameType::kGather);
  EXPECT_EQ(frame->payload, "some payload");
}

TEST_F(FrameTest, ArrivesApartFromMergedBytes) {
  std::string first = sent(FrameType::kHello, "one");
  std::string second = sent(FrameType::kProof, "");
  std::string third = sent(FrameType::kLeave, "three");
  deliver(first + second + third.substr(0, 60));
  EXPECT_EQ(receiver->next()->payload, "one");
  EXPECT_EQ(receiver->next()->type, FrameType::kProof);
  EXPECT_FALSE(receiver->next());
  deliver(third.substr(60));
  EXPECT_EQ(receiver->next()->payload, "three");
}

TEST_F(FrameTest, EveryBitOfASealedFrameCounts) {
  for (size_t at = 0; at < 60; ++at) {
    Wire fresh;
    fresh.sealBoth();
    std::string bytes = fresh.sent(FrameType::kGather, "four");
    ASSERT_EQ(bytes.size(), 60u);
    bytes[at] ^= 1;
    // An altered length may also make the frame longer than what came: then it is still awaited, and not delivered.
    Outcome outcome = outcomeOf([&] {
      fresh.deliver(bytes);
      if (!fresh.receiver->next()) fail(moeSystemError, "awaited");
    });
    EXPECT_EQ(outcome.code, moeSystemError) << "byte " << at;
  }
}

TEST_F(FrameTest, AFrameCannotBeReplayedOrDropped) {
  sealBoth();
  std::string first = sent(FrameType::kGather, "a");
  std::string second = sent(FrameType::kGather, "b");
  std::string third = sent(FrameType::kGather, "c");
  deliver(first);
  EXPECT_TRUE(receiver->next());
  deliver(third);
  expectAll({outcomeOf([&] { receiver->next(); })}, moeSystemError, "frame 2 where 1 was due");
}

TEST_F(FrameTest, AFrameCannotBeSentBackToItsAuthor) {
  sealBoth();
  std::string mine = sent(FrameType::kGather, "a");
  ASSERT_EQ(::send(fromSender.get(), mine.data(), mine.size(), 0), static_cast<ssize_t>(mine.size()));
  sender->receive();
  expectAll({outcomeOf([&] { sender->next(); })}, moeSystemError, "its seal does not match");
}

TEST_F(FrameTest, ALongFrameIsRefusedBeforeItComes) {
  receiver->setMaxPayload(100);
  deliver(sent(FrameType::kGather, std::string(101, 'x')).substr(0, 56));
  expectAll({outcomeOf([&] { receiver->next(); })}, moeSystemError, "a frame of 101 bytes; at most 100 are allowed");
}

TEST_F(FrameTest, AFullSocketKeepsTheRest) {
  std::string big(4 << 20, 'z');
  sender->send(FrameType::kGather, big);
  sender->flush();
  EXPECT_TRUE(sender->hasOutput());
  std::string bytes;
  char chunk[1 << 16];
  while (bytes.size() < big.size() + 56) {
    ssize_t got = ::recv(fromSender.get(), chunk, sizeof chunk, 0);
    if (got > 0) bytes.append(chunk, static_cast<size_t>(got));
    sender->flush();
  }
  EXPECT_FALSE(sender->hasOutput());
  EXPECT_EQ(bytes.substr(56), big);
}

TEST_F(FrameTest, TheEndOfTheStreamIsSeen) {
  toReceiver.reset();
  EXPECT_FALSE(receiver->receive());
  fromSender.reset();
  sender->send(FrameType::kLeave, "");
  expectAll({outcomeOf([&] { sender->flush(); })}, moeSystemError, "cannot write to a connection");
}

}  // namespace
}  // namespace moe::test

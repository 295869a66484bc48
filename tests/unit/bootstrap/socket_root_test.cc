// SPDX-License-Identifier: Apache-2.0
// What a root does about those who are no ranks of its job.
#include "bootstrap/socket_root.h"

#include <random>

#include "bootstrap/bytes.h"
#include "unit/bootstrap/helpers.h"
#include "unit/bootstrap/raw_client.h"

namespace moe::test {
namespace {

constexpr auto kPlenty = 20s;

// A root with limits of choice.
struct Started {
  moeUniqueId_t id;
  SocketAddress address;
  Digest secret;
};

Started start(const std::function<void(RootOptions&)>& change = nullptr) {
  RootOptions options;
  options.secret = randomDigest();
  options.patience = kPlenty;
  int error = 0;
  options.listeners.push_back(listenAt(loopbackAddress(AF_INET, 0), &error));
  UniqueId id{{localAddress(options.listeners.front().get())}, options.secret};
  if (change) change(options);
  startRoot(std::move(options));
  return {encodeUniqueId(id), id.addresses.front(), id.secret};
}

void expectJobWorks(const Started& root, int nranks) {
  expectAllSucceed(runRanks(upTo(nranks), [&](int rank) {
    auto bootstrap = joinTcp(root.id, rank, nranks, within(kPlenty));
    exchangeAndCheck(*bootstrap, 2, within(kPlenty));
  }));
}

std::string frameHeader(uint32_t type, uint64_t length) {
  const uint32_t magic = 0x464d6f65;
  return ByteWriter().number(magic).number(type).number(length).number(uint64_t{0}).array(Digest{}).take();
}

TEST(SocketRoot, GarbageIsDroppedWhileAJobRuns) {
  Started root = start();
  std::mt19937_64 random(7);
  std::vector<std::unique_ptr<RawClient>> strangers;
  auto stranger = [&](const std::string& bytes) {
    strangers.push_back(std::make_unique<RawClient>(root.address));
    strangers.back()->write(bytes);
  };
  for (int i = 0; i < 8; ++i) {
    std::string noise(4096, '\0');
    for (char& byte : noise) byte = static_cast<char>(random());
    stranger(noise);
  }
  stranger("GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: scanner/1.0\r\nAccept: */*\r\n\r\n");
  stranger(frameHeader(1, UINT64_MAX));
  stranger(frameHeader(1, uint64_t{1} << 40));
  stranger(frameHeader(1, 257));
  stranger(frameHeader(4, 0));     // takes part without having joined
  stranger(frameHeader(3, 0));     // a proof that nobody asked for
  stranger(frameHeader(1, 0));     // a hello that says nothing
  RawClient silent(root.address);  // says nothing
  RawClient slow(root.address);    // stops in the middle
  slow.write(frameHeader(1, 44).substr(0, 10));
  expectJobWorks(root, 4);
  for (size_t i = 0; i < strangers.size(); ++i) EXPECT_TRUE(strangers[i]->closedWithin(2s)) << i;
}

TEST(SocketRoot, SilentAndSlowConnectionsAreDroppedAfterAWhile) {
  Started root = start([](RootOptions& options) { options.handshakeTime = 100ms; });
  RawClient silent(root.address);
  RawClient slow(root.address);
  slow.write(frameHeader(1, 44).substr(0, 10));
  RawClient half(root.address);
  Handshake handshake;
  handshake.nranks = 2;
  half.channel().send(FrameType::kHello, handshake.hello());
  half.channel().flush();
  ASSERT_EQ(half.read()->type, FrameType::kChallenge);
  EXPECT_TRUE(silent.closedWithin(2s));
  EXPECT_TRUE(slow.closedWithin(2s));
  EXPECT_TRUE(half.closedWithin(2s));
  expectJobWorks(root, 2);
}

TEST(SocketRoot, ACrowdOfSilentConnectionsCannotKeepRanksOut) {
  Started root = start([](RootOptions& options) {
    options.mostStrangers = 4;
    options.leastHandshakeTime = 250ms;
  });
  std::vector<std::unique_ptr<RawClient>> crowd;
  for (int i = 0; i < 24; ++i) crowd.push_back(std::make_unique<RawClient>(root.address));
  size_t descriptors = openDescriptors();
  expectJobWorks(root, 4);
  EXPECT_LE(openDescriptors(), descriptors + 8);
}

TEST(SocketRoot, AReplayedHelloAndProofAreRefused) {
  Started root = start();
  // What an eavesdropper has: the rank's whole side of a handshake, right in every bit.
  Handshake handshake;
  handshake.rank = 0;
  handshake.nranks = 2;
  handshake.rankNonce = randomDigest();
  RawClient honest(root.address);
  honest.channel().send(FrameType::kHello, handshake.hello());
  honest.channel().flush();
  std::string hello = handshake.hello();
  handshake.parseChallenge(honest.read()->payload, root.secret);
  std::string proof = handshake.proof(root.secret);
  honest.close();

  RawClient replay(root.address);
  replay.channel().send(FrameType::kHello, hello);
  replay.channel().flush();
  ASSERT_EQ(replay.read()->type, FrameType::kChallenge);
  replay.channel().send(FrameType::kProof, proof);
  replay.channel().flush();
  EXPECT_TRUE(replay.closedWithin(2s));
  expectJobWorks(root, 2);
}

TEST(SocketRoot, ItsOwnProofSentBackIsRefused) {
  Started root = start();
  RawClient client(root.address);
  Handshake handshake;
  handshake.nranks = 2;
  client.channel().send(FrameType::kHello, handshake.hello());
  client.channel().flush();
  std::string challenge = client.read()->payload;
  client.channel().send(FrameType::kProof, challenge.substr(sizeof(Digest)));
  client.channel().flush();
  EXPECT_TRUE(client.closedWithin(2s));
}

TEST(SocketRoot, AFrameWithoutASealLosesTheRank) {
  Started root = start();
  auto outcomes = runRanks({0, 1}, [&](int rank) {
    if (rank == 1) {
      RawClient client(root.address);
      ASSERT_TRUE(client.join(1, 2, root.secret));
      // Well-formed and in sequence, but by somebody without the key.
      client.write(ByteWriter()
                       .number(uint32_t{0x464d6f65})
                       .number(uint32_t{4})
                       .number(uint64_t{0})
                       .number(uint64_t{2})
                       .array(Digest{})
                       .take());
      EXPECT_TRUE(client.closedWithin(2s));
      return;
    }
    joinTcp(root.id, 0, 2, within(kPlenty));
  });
  EXPECT_EQ(outcomes[0].code, moeRankLost);
  EXPECT_NE(outcomes[0].text.find("rank 1 is lost: a frame was altered"), std::string::npos) << outcomes[0].text;
}

TEST(SocketRoot, ARankTooManyIsNamedToAll) {
  Started root = start();
  std::atomic<int> joined{0};
  auto outcomes = runRanks(upTo(2), [&](int rank) {
    auto bootstrap = joinTcp(root.id, rank, 2, within(kPlenty));
    ++joined;
    if (rank == 0) {
      EXPECT_TRUE(eventually(kPlenty, [&] { return joined.load() == 2; }));
      expectAll({outcomeOf([&] { joinTcp(root.id, 1, 2, within(kPlenty)); })}, moeMismatch, "rank 1 joined twice");
    }
    bootstrap->allGather("x", within(kPlenty));
  });
  expectAll(outcomes, moeMismatch, "rank 1 joined twice");
}

TEST(SocketRoot, FreesItsPortWhenComplete) {
  Started root = start([](RootOptions& options) { options.stopListeningWhenComplete = true; });
  expectAllSucceed(runRanks(upTo(2), [&](int rank) {
    auto bootstrap = joinTcp(root.id, rank, 2, within(kPlenty));
    EXPECT_TRUE(eventually(2s, [&] {
      int error = 0;
      connectTo(root.address, within(1s), &error);
      return error == ECONNREFUSED;
    }));
    exchangeAndCheck(*bootstrap, 1, within(kPlenty));
  }));
}

}  // namespace
}  // namespace moe::test

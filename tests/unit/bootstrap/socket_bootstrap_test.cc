// SPDX-License-Identifier: Apache-2.0
// Whole jobs through sockets: that they work, and how they fail.
#include "bootstrap/socket_bootstrap.h"

#include <numeric>

#include "unit/bootstrap/helpers.h"
#include "unit/bootstrap/proxy.h"
#include "unit/bootstrap/raw_client.h"

namespace moe::test {
namespace {

constexpr auto kPlenty = 20s;

void runJob(const moeUniqueId_t& id, int nranks, int exchanges = 3) {
  expectAllSucceed(runRanks(upTo(nranks), [&](int rank) {
    auto bootstrap = joinTcp(id, rank, nranks, within(kPlenty));
    EXPECT_EQ(bootstrap->rank(), rank);
    EXPECT_EQ(bootstrap->nranks(), nranks);
    exchangeAndCheck(*bootstrap, exchanges, within(kPlenty));
  }));
}

class SocketBootstrapSizes : public testing::TestWithParam<int> {};

TEST_P(SocketBootstrapSizes, RanksExchangePartsOfDifferentLengths) { runJob(loopbackId(), GetParam()); }

INSTANTIATE_TEST_SUITE_P(Sizes, SocketBootstrapSizes, testing::Values(1, 2, 4, 16));

TEST(SocketBootstrap, MeetsOnEveryInterface) { runJob(makeUniqueIdOn("", kPlenty), 2); }

TEST(SocketBootstrap, MeetsThroughIpv6) {
  if (!haveIpv6()) GTEST_SKIP() << "this machine has no [::1]";
  moeUniqueId_t id = loopbackId();
  std::vector<SocketAddress> six;
  for (const SocketAddress& each : decodeUniqueId(id).addresses) {
    if (each.family() == AF_INET6) six.push_back(each);
  }
  ASSERT_EQ(six.size(), 1u);
  runJob(withAddresses(id, six), 4);
}

TEST(SocketBootstrap, ExchangesTheLargestPart) {
  moeUniqueId_t id = loopbackId();
  expectAllSucceed(runRanks(upTo(3), [&](int rank) {
    auto bootstrap = joinTcp(id, rank, 3, within(kPlenty));
    std::string mine(Bootstrap::kMaxBytes, static_cast<char>('x' + rank));
    std::vector<std::string> parts = bootstrap->allGather(mine, within(kPlenty));
    for (int each = 0; each < 3; ++each) {
      EXPECT_EQ(parts[static_cast<size_t>(each)], std::string(Bootstrap::kMaxBytes, static_cast<char>('x' + each)));
    }
  }));
}

TEST(SocketBootstrap, RefusesAPartThatIsTooLong) {
  moeUniqueId_t id = loopbackId();
  auto bootstrap = joinTcp(id, 0, 1, within(kPlenty));
  Outcome outcome =
      outcomeOf([&] { bootstrap->allGather(std::string(Bootstrap::kMaxBytes + 1, 'x'), within(kPlenty)); });
  EXPECT_EQ(outcome.code, moeInternalError);
  EXPECT_NE(outcome.text.find("1048577"), std::string::npos) << outcome.text;
}

TEST(SocketBootstrap, PassesOverAnAddressThatRefuses) {
  moeUniqueId_t id = loopbackId();
  std::vector<SocketAddress> addresses = decodeUniqueId(id).addresses;
  addresses.insert(addresses.begin(), closedPort());
  runJob(withAddresses(id, addresses), 4);
}

TEST(SocketBootstrap, PassesOverAnAddressWhereSomethingElseListens) {
  moeUniqueId_t id = loopbackId();
  std::vector<SocketAddress> addresses = decodeUniqueId(id).addresses;
  addresses.insert(addresses.begin(), decodeUniqueId(loopbackId(100ms)).addresses.front());
  runJob(withAddresses(id, addresses), 2);
}

TEST(SocketBootstrap, PassesOverAnAddressThatNeverAnswers) {
  moeUniqueId_t id = loopbackId();
  int error = 0;
  FileDescriptor silent = listenAt(loopbackAddress(AF_INET, 0), &error);
  std::vector<SocketAddress> addresses{localAddress(silent.get()), decodeUniqueId(id).addresses.front()};
  moeUniqueId_t both = withAddresses(id, addresses);
  expectAllSucceed(runRanks(upTo(2), [&](int rank) { joinTcp(both, rank, 2, within(2s)); }));
}

TEST(SocketBootstrap, SaysWhereItLookedWhenNobodyListens) {
  SocketAddress nobody = closedPort();
  moeUniqueId_t id = withAddresses(loopbackId(10ms), {nobody});
  Outcome outcome = outcomeOf([&] { joinTcp(id, 1, 2, within(kPlenty)); });
  EXPECT_EQ(outcome.code, moeSystemError);
  EXPECT_LT(outcome.took, 2s);
  EXPECT_NE(outcome.text.find("rank 1 cannot reach"), std::string::npos) << outcome.text;
  EXPECT_NE(outcome.text.find(nobody.text() + " (connection refused)"), std::string::npos) << outcome.text;
  EXPECT_NE(outcome.text.find("moeGetUniqueId still alive"), std::string::npos) << outcome.text;
}

TEST(SocketBootstrap, EndsInTimeWhenNobodyAnswers) {
  int error = 0;
  FileDescriptor silent = listenAt(loopbackAddress(AF_INET, 0), &error);
  moeUniqueId_t id = withAddresses(loopbackId(10ms), {localAddress(silent.get())});
  Outcome outcome = outcomeOf([&] { joinTcp(id, 0, 2, within(300ms)); });
  EXPECT_EQ(outcome.code, moeTimeout) << outcome.text;
  EXPECT_GE(outcome.took, 290ms);
  EXPECT_LT(outcome.took, 2s);
}

TEST(SocketBootstrap, WrongSecretIsRefusedAndHarmsNobody) {
  moeUniqueId_t id = loopbackId();
  UniqueId forged = decodeUniqueId(id);
  forged.secret[0] ^= 1;
  Outcome outcome = outcomeOf([&] { joinTcp(encodeUniqueId(forged), 1, 2, within(kPlenty)); });
  EXPECT_EQ(outcome.code, moeSystemError);
  EXPECT_NE(outcome.text.find("has another secret"), std::string::npos) << outcome.text;
  runJob(id, 2);
}

TEST(SocketBootstrap, SurvivesBytesThatArriveOneAtATime) {
  moeUniqueId_t id = loopbackId();
  Proxy proxy(decodeUniqueId(id).addresses.front(), Proxy::Mode::kByteAtATime);
  runJob(withAddresses(id, {proxy.address()}), 4);
}

TEST(SocketBootstrap, SurvivesMessagesThatArriveTogether) {
  moeUniqueId_t id = loopbackId();
  Proxy proxy(decodeUniqueId(id).addresses.front(), Proxy::Mode::kMerge);
  runJob(withAddresses(id, {proxy.address()}), 4);
}

TEST(SocketBootstrap, NamesTheMissingRanksWithinTheLimit) {
  moeUniqueId_t id = loopbackId();
  auto outcomes = runRanks({0, 2, 4}, [&](int rank) { joinTcp(id, rank, 8, within(400ms)); });
  expectAll(outcomes, moeTimeout, "waiting for ranks 1, 3, 5-7, which have not joined");
  for (const Outcome& each : outcomes) EXPECT_LT(each.took, 2s);
}

TEST(SocketBootstrap, EachRankKeepsItsOwnLimit) {
  moeUniqueId_t id = loopbackId();
  auto outcomes = runRanks({0, 1}, [&](int rank) { joinTcp(id, rank, 3, within(rank == 0 ? 300ms : 20s)); });
  expectAll(outcomes, moeTimeout, "waiting for rank 2, which has not joined");
  EXPECT_NE(outcomes[1].text.find("rank 0 gave up"), std::string::npos) << outcomes[1].text;
}

TEST(SocketBootstrap, ARankThatComesLateHearsWhatHappened) {
  moeUniqueId_t id = loopbackId();
  Outcome early = outcomeOf([&] { joinTcp(id, 0, 2, within(200ms)); });
  EXPECT_EQ(early.code, moeTimeout);
  Outcome late = outcomeOf([&] { joinTcp(id, 1, 2, within(kPlenty)); });
  EXPECT_EQ(late.code, moeTimeout);
  EXPECT_NE(late.text.find("rank 0 gave up"), std::string::npos) << late.text;
}

TEST(SocketBootstrap, NamesARankThatSkipsAnExchange) {
  moeUniqueId_t id = loopbackId();
  std::atomic<int> done{0};
  auto outcomes = runRanks(upTo(3), [&](int rank) {
    auto bootstrap = joinTcp(id, rank, 3, within(kPlenty));
    if (rank == 1) {
      EXPECT_TRUE(eventually(kPlenty, [&] { return done.load() == 2; }));
      return;
    }
    Outcome outcome = outcomeOf([&] { bootstrap->allGather("x", within(300ms)); });
    ++done;
    if (outcome.code != moeSuccess) throw Error(outcome.code, outcome.text);
  });
  expectAll({outcomes[0], outcomes[2]}, moeTimeout, "rank 1, which has joined but not come to this exchange");
}

TEST(SocketBootstrap, DuplicateRankIsNamedToAll) {
  moeUniqueId_t id = loopbackId();
  expectAll(runRanks({0, 2, 2, 3}, [&](int rank) { joinTcp(id, rank, 4, within(kPlenty)); }), moeMismatch,
            "rank 2 joined twice");
}

TEST(SocketBootstrap, DifferentSizesAreNamedToAll) {
  moeUniqueId_t id = loopbackId();
  auto outcomes = runRanks({0, 1}, [&](int rank) { joinTcp(id, rank, rank == 1 ? 3 : 4, within(kPlenty)); });
  for (const Outcome& each : outcomes) {
    EXPECT_EQ(each.code, moeMismatch) << each.text;
    bool named = each.text.find("rank 1 says nranks = 3 but rank 0 says 4") != std::string::npos ||
                 each.text.find("rank 0 says nranks = 4 but rank 1 says 3") != std::string::npos;
    EXPECT_TRUE(named) << each.text;
  }
}

TEST(SocketBootstrap, RankOutOfRangeIsNamedToAll) {
  moeUniqueId_t id = loopbackId();
  expectAll(runRanks({0, 1, 3}, [&](int rank) { joinTcp(id, rank, 3, within(kPlenty)); }), moeInvalidArgument,
            "a process joined as rank 3, which is not from 0 to nranks - 1 = 2");
}

TEST(SocketBootstrap, ImpossibleSizeIsRefused) {
  for (int nranks : {0, -1, 1 << 30}) {
    moeUniqueId_t id = loopbackId(500ms);
    expectAll({outcomeOf([&] { joinTcp(id, 0, nranks, within(kPlenty)); })}, moeInvalidArgument,
              cat("nranks = ", nranks));
  }
}

TEST(SocketBootstrap, ARankThatVanishesIsNamedAtOnce) {
  moeUniqueId_t id = loopbackId();
  Digest secret = decodeUniqueId(id).secret;
  auto outcomes = runRanks(upTo(3), [&](int rank) {
    if (rank == 2) {
      RawClient client(decodeUniqueId(id).addresses.front());
      ASSERT_TRUE(client.join(2, 3, secret));
      client.channel().send(FrameType::kGather, "");
      client.channel().flush();
      std::optional<Frame> frame;
      while (!frame || frame->type == FrameType::kMissing) frame = client.read();
      EXPECT_EQ(frame->type, FrameType::kGathered);
      return;
    }
    auto bootstrap = joinTcp(id, rank, 3, within(kPlenty));
    bootstrap->allGather("x", within(kPlenty));
  });
  EXPECT_EQ(outcomes[2].code, moeSuccess);
  expectAll({outcomes[0], outcomes[1]}, moeRankLost, "rank 2 is lost");
  EXPECT_LT(outcomes[0].took, 1s);
}

TEST(SocketBootstrap, ARankThatLeavesIsNamed) {
  moeUniqueId_t id = loopbackId();
  auto outcomes = runRanks(upTo(3), [&](int rank) {
    auto bootstrap = joinTcp(id, rank, 3, within(kPlenty));
    if (rank != 1) bootstrap->allGather("x", within(kPlenty));
  });
  EXPECT_EQ(outcomes[1].code, moeSuccess);
  for (int rank : {0, 2}) {
    EXPECT_EQ(outcomes[static_cast<size_t>(rank)].code, moeRankLost);
    EXPECT_NE(outcomes[static_cast<size_t>(rank)].text.find("rank 1 left"), std::string::npos);
  }
}

TEST(SocketBootstrap, TheEndOfTheRootIsReported) {
  int error = 0;
  FileDescriptor listener = listenAt(loopbackAddress(AF_INET, 0), &error);
  UniqueId id{{localAddress(listener.get())}, randomDigest()};
  std::thread root([&] {
    waitFor(listener.get(), POLLIN, within(kPlenty));
    while (::poll(nullptr, 0, 0) == 0) {
      FileDescriptor fd(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK));
      if (!fd.valid()) continue;
      FrameChannel channel(std::move(fd));
      auto readOne = [&] {
        for (;;) {
          if (auto frame = channel.next()) return *frame;
          waitFor(channel.fd(), POLLIN, within(1s));
          channel.receive();
        }
      };
      Handshake handshake = Handshake::parseHello(readOne().payload);
      handshake.rootNonce = randomDigest();
      channel.send(FrameType::kChallenge, handshake.challenge(id.secret));
      channel.flush();
      readOne();
      return;
    }
  });
  Outcome outcome = outcomeOf([&] { joinTcp(encodeUniqueId(id), 0, 2, within(kPlenty)); });
  root.join();
  EXPECT_EQ(outcome.code, moeRankLost);
  EXPECT_NE(outcome.text.find("rank 0 lost the rendezvous at 127.0.0.1"), std::string::npos) << outcome.text;
}

TEST(SocketBootstrap, AbortIsSeenWithin100Milliseconds) {
  moeUniqueId_t id = loopbackId();
  std::atomic<bool> aborted{false};
  std::chrono::steady_clock::time_point at;
  std::thread aborter;
  auto outcomes = runRanks({0, 1}, [&](int rank) {
    if (rank == 1) {
      joinTcp(id, 1, 3, within(kPlenty));
      return;
    }
    aborter = std::thread([&] {
      std::this_thread::sleep_for(100ms);
      at = std::chrono::steady_clock::now();
      aborted.store(true);
    });
    joinTcp(id, 0, 3, within(kPlenty, &aborted));
  });
  auto seen = std::chrono::steady_clock::now() - at;
  aborter.join();
  EXPECT_EQ(outcomes[0].code, moeAborted);
  EXPECT_LT(seen, 100ms);
  EXPECT_EQ(outcomes[1].code, moeRankLost);
  EXPECT_NE(outcomes[1].text.find("rank 0 gave up: the communicator was aborted"), std::string::npos)
      << outcomes[1].text;
}

TEST(SocketBootstrap, AFailedBootstrapKeepsFailingWithTheSameText) {
  moeUniqueId_t id = loopbackId();
  auto outcomes = runRanks(upTo(2), [&](int rank) {
    auto bootstrap = joinTcp(id, rank, 2, within(kPlenty));
    if (rank == 1) return;
    Outcome first = outcomeOf([&] { bootstrap->allGather("x", within(kPlenty)); });
    Outcome second = outcomeOf([&] { bootstrap->allGather("x", within(kPlenty)); });
    EXPECT_EQ(first.code, moeRankLost);
    EXPECT_EQ(second.code, first.code);
    EXPECT_EQ(second.text, first.text);
  });
  expectAllSucceed(outcomes);
}

TEST(SocketBootstrap, TwoJobsAtOnceDoNotMix) {
  moeUniqueId_t ids[2] = {loopbackId(), loopbackId()};
  expectAllSucceed(runRanks(upTo(8), [&](int each) {
    auto bootstrap = joinTcp(ids[each / 4], each % 4, 4, within(kPlenty));
    for (const std::string& part : bootstrap->allGather(cat("job ", each / 4), within(kPlenty))) {
      EXPECT_EQ(part, cat("job ", each / 4));
    }
  }));
}

TEST(SocketBootstrap, FiftyJobsLeaveNothingBehind) {
  runJob(loopbackId(), 2);
  // Roots of earlier tests may still listen; what counts is that this does not grow.
  size_t descriptors = openDescriptors(), threads = runningThreads();
  for (int job = 0; job < 50; ++job) runJob(loopbackId(), 2, 1);
  EXPECT_TRUE(eventually(5s, [&] { return openDescriptors() <= descriptors && runningThreads() <= threads; }))
      << openDescriptors() << " descriptors, " << runningThreads() << " threads; before: " << descriptors << ", "
      << threads;
}

TEST(SocketBootstrap, ARootThatNobodyJoinsRunsOutOfPatience) {
  moeUniqueId_t id = loopbackId(50ms);
  SocketAddress address = decodeUniqueId(id).addresses.front();
  EXPECT_TRUE(eventually(3s, [&] {
    int error = 0;
    connectTo(address, within(1s), &error);
    return error == ECONNREFUSED;
  }));
}

}  // namespace
}  // namespace moe::test

// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/local_bootstrap.h"

#include "unit/bootstrap/helpers.h"

namespace moe::test {
namespace {

constexpr auto kPlenty = 20s;

class LocalBootstrapSizes : public testing::TestWithParam<int> {};

TEST_P(LocalBootstrapSizes, RanksExchangeParts) {
  auto ranks = makeLocal(GetParam());
  expectAllSucceed(runRanks(upTo(GetParam()), [&](int rank) {
    auto& mine = ranks[static_cast<size_t>(rank)];
    EXPECT_EQ(mine->rank(), rank);
    exchangeAndCheck(*mine, 50, within(kPlenty));
    mine.reset();
  }));
}

INSTANTIATE_TEST_SUITE_P(Sizes, LocalBootstrapSizes, testing::Values(1, 2, 4, 16));

TEST(LocalBootstrap, NamesTheRanksThatDoNotCome) {
  auto ranks = makeLocal(5);
  auto outcomes = runRanks(
      {0, 2}, [&](int rank) { ranks[static_cast<size_t>(rank)]->allGather("x", within(rank == 0 ? 100ms : 20s)); });
  expectAll(outcomes, moeTimeout, "waiting for ranks 1, 3, 4, which have joined but not come to this exchange");
  expectAll({outcomeOf([&] { ranks[3]->allGather("x", within(kPlenty)); })}, moeTimeout, "rank 0 gave up");
}

TEST(LocalBootstrap, NamesARankThatWasDestroyed) {
  auto ranks = makeLocal(3);
  auto outcomes = runRanks(upTo(3), [&](int rank) {
    if (rank == 1) {
      ranks[1].reset();
      return;
    }
    ranks[static_cast<size_t>(rank)]->allGather("x", within(kPlenty));
  });
  for (int rank : {0, 2}) {
    EXPECT_EQ(outcomes[static_cast<size_t>(rank)].code, moeRankLost);
    EXPECT_NE(outcomes[static_cast<size_t>(rank)].text.find("rank 1 left"), std::string::npos);
  }
}

TEST(LocalBootstrap, AnAbortIsSeenByTheRankAndToldToTheOthers) {
  auto ranks = makeLocal(3);
  std::atomic<bool> aborted{false};
  std::atomic<int> started{0};
  std::chrono::milliseconds took{0};
  std::thread aborter([&] {
    eventually(kPlenty, [&] { return started.load() == 2; });
    aborted.store(true);
    auto at = std::chrono::steady_clock::now();
    eventually(kPlenty, [&] { return started.load() == 0; });
    took = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - at);
  });
  auto outcomes = runRanks({0, 1}, [&](int rank) {
    ++started;
    Outcome outcome = outcomeOf(
        [&] { ranks[static_cast<size_t>(rank)]->allGather("x", within(kPlenty, rank == 0 ? &aborted : nullptr)); });
    --started;
    throw Error(outcome.code, outcome.text);
  });
  aborter.join();
  EXPECT_EQ(outcomes[0].code, moeAborted);
  EXPECT_EQ(outcomes[1].code, moeRankLost);
  EXPECT_NE(outcomes[1].text.find("rank 0 gave up"), std::string::npos) << outcomes[1].text;
  EXPECT_LT(took, 100ms);
}

TEST(LocalBootstrap, RefusesAPartThatIsTooLong) {
  auto ranks = makeLocal(1);
  std::string tooLong(Bootstrap::kMaxBytes + 1, 'x');
  EXPECT_EQ(outcomeOf([&] { ranks[0]->allGather(tooLong, within(kPlenty)); }).code, moeInternalError);
}

TEST(LocalBootstrap, RefusesNoRanks) {
  expectAll({outcomeOf([] { makeLocal(RollCall::kMaxRanks + 1); })}, moeInvalidArgument, "nranks = 65537");
}

}  // namespace
}  // namespace moe::test

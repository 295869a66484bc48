// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/callback_bootstrap.h"

#include <barrier>
#include <cstring>

#include "unit/bootstrap/helpers.h"

namespace moe::test {
namespace {

constexpr auto kPlenty = 20s;

// A caller's all-gather over threads, and ways for it to be wrong.
struct Gatherer {
  explicit Gatherer(int nranks) : ready(nranks), parts(static_cast<size_t>(nranks)) {}
  std::barrier<> ready;
  std::vector<std::string> parts;
  int failAtCall = -1;
  bool reversed = false;
};

struct Caller {
  Gatherer* all;
  int rank;
  int calls = 0;
};

int allGather(void* context, const void* send, void* receive, size_t bytes) {
  auto* caller = static_cast<Caller*>(context);
  Gatherer& all = *caller->all;
  if (caller->calls++ == all.failAtCall) return 17;
  all.parts[static_cast<size_t>(caller->rank)].assign(static_cast<const char*>(send), bytes);
  all.ready.arrive_and_wait();
  for (size_t i = 0; i < all.parts.size(); ++i) {
    const std::string& part = all.parts[all.reversed ? all.parts.size() - 1 - i : i];
    EXPECT_EQ(part.size(), bytes);
    std::memcpy(static_cast<char*>(receive) + i * bytes, part.data(), bytes);
  }
  all.ready.arrive_and_wait();
  return 0;
}

std::vector<Outcome> runCallers(Gatherer& all, int nranks, const std::function<void(Bootstrap&)>& body) {
  return runRanks(upTo(nranks), [&](int rank) {
    Caller caller{&all, rank};
    moeBootstrap_t callbacks = MOE_BOOTSTRAP_INIT;
    callbacks.context = &caller;
    callbacks.allGather = allGather;
    auto bootstrap = joinCallbacks(callbacks, rank, nranks);
    body(*bootstrap);
  });
}

class CallbackBootstrapSizes : public testing::TestWithParam<int> {};

TEST_P(CallbackBootstrapSizes, RanksExchangePartsOfDifferentLengths) {
  Gatherer all(GetParam());
  expectAllSucceed(runCallers(all, GetParam(), [](Bootstrap& mine) { exchangeAndCheck(mine, 3, within(kPlenty)); }));
}

INSTANTIATE_TEST_SUITE_P(Sizes, CallbackBootstrapSizes, testing::Values(1, 2, 4, 16));

TEST(CallbackBootstrap, NothingFromAnybodyIsFine) {
  Gatherer all(2);
  expectAllSucceed(runCallers(all, 2, [](Bootstrap& mine) {
    EXPECT_EQ(mine.allGather("", within(kPlenty)), (std::vector<std::string>{"", ""}));
  }));
}

TEST(CallbackBootstrap, AFailureOfTheCallbackIsNamed) {
  for (int call : {0, 1}) {
    Gatherer all(2);
    all.failAtCall = call;
    auto outcomes = runCallers(all, 2, [](Bootstrap& mine) { mine.allGather("x", within(kPlenty)); });
    expectAll(outcomes, moeSystemError, "bootstrap->allGather returned 17 on rank ");
    expectAll(outcomes, moeSystemError, call == 0 ? "lengths" : "contents");
  }
}

TEST(CallbackBootstrap, PiecesInTheWrongOrderAreNoticed) {
  Gatherer all(2);
  all.reversed = true;
  expectAll(runCallers(all, 2, [](Bootstrap& mine) { mine.allGather("x", within(kPlenty)); }), moeInvalidUsage,
            "wrong bytes at place 0: rank 1");
}

TEST(CallbackBootstrap, AMissingFunctionIsRefused) {
  expectAll({outcomeOf([] { joinCallbacks(moeBootstrap_t MOE_BOOTSTRAP_INIT, 0, 1); })}, moeInvalidArgument,
            "bootstrap->allGather is NULL");
}

TEST(CallbackBootstrap, NothingIsCalledAfterAnAbortOrTheDeadline) {
  Gatherer all(1);
  all.failAtCall = 0;  // would be reported if it were called
  std::atomic<bool> aborted{true};
  expectAll(runCallers(all, 1, [&](Bootstrap& mine) { mine.allGather("x", within(kPlenty, &aborted)); }), moeAborted,
            "aborted");
  expectAll(runCallers(all, 1, [](Bootstrap& mine) { mine.allGather("x", within(0ms)); }), moeTimeout, "no time left");
}

}  // namespace
}  // namespace moe::test

// SPDX-License-Identifier: Apache-2.0
// A call that one rank refuses fails on every rank, breaks nothing, and the next call is exact.
#include <gtest/gtest.h>

#include <climits>
#include <memory>

#include "conformance/on_backend.h"
#include "conformance/simple_call.h"
#include "conformance/world.h"

namespace moetest {
namespace {

constexpr int kRanks = 4;
constexpr int kBad = 2;

struct BadCall {
  const char* name;
  void (*spoil)(SimpleCall&);
  const char* word;  // that the refusing rank's text has
  moeResult_t code = moeInvalidArgument;
};

struct Setup {
  BadCall bad;
  const Backend* backend;
};

void PrintTo(const Setup& setup, std::ostream* out) { *out << setup.bad.name << " " << setup.backend->name(); }

template <size_t Count>
std::vector<Setup> onHost(const BadCall (&calls)[Count]) {
  std::vector<Setup> all;
  for (const BadCall& bad : calls) all.push_back({bad, &hostBackend()});
  return all;
}

template <size_t Count>
std::vector<Setup> onGpus(const BadCall (&calls)[Count]) {
  std::vector<Setup> all;
  for (const Backend* backend : cudaBackends()) {
    for (const BadCall& bad : calls) all.push_back({bad, backend});
  }
  return all;
}

std::string gpuName(const testing::TestParamInfo<Setup>& info) {
  return std::string(info.param.bad.name) + "_" + info.param.backend->name();
}

// What every rank's call returned, and its text.
struct Outcome {
  moeResult_t code[kRanks];
  std::string text[kRanks];
};

class Ranks {
 public:
  Ranks(const Backend& backend, const moeConfig_t& config) : comms_(kRanks, config, backend) {
    for (int rank = 0; comms_.ok() && rank < kRanks; ++rank) {
      calls_.push_back(std::make_unique<SimpleCall>(comms_[rank], config, rank, kRanks, backend));
    }
  }
  bool ok() const { return comms_.ok(); }
  const std::string& error() const { return comms_.error(); }
  SimpleCall& operator[](int rank) { return *calls_[static_cast<size_t>(rank)]; }
  Outcome each(const std::function<moeResult_t(SimpleCall&, int)>& run) {
    Outcome outcome;
    runThreads(kRanks, [&](int rank) {
      outcome.code[rank] = run((*this)[rank], rank);
      if (outcome.code[rank] != moeSuccess) outcome.text[rank] = moeGetLastError();
    });
    return outcome;
  }
  void expectHealthy(int round) {
    std::string wrong[kRanks];
    runThreads(kRanks, [&](int rank) { wrong[rank] = (*this)[rank].runBoth(round); });
    for (const std::string& text : wrong) EXPECT_EQ(text, "");
  }

 private:
  LocalComms comms_;
  std::vector<std::unique_ptr<SimpleCall>> calls_;
};

void expectRefusal(const Outcome& outcome, const BadCall& bad) {
  EXPECT_EQ(outcome.code[kBad], bad.code) << outcome.text[kBad];
  EXPECT_NE(outcome.text[kBad].find(bad.word), std::string::npos) << outcome.text[kBad];
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == kBad) continue;
    EXPECT_EQ(outcome.code[rank], moePeerRefused) << outcome.text[rank];
    EXPECT_NE(outcome.text[rank].find("rank 2"), std::string::npos) << outcome.text[rank];
  }
}

class ThreadRanksDispatch : public OnBackend<Setup> {};

TEST_P(ThreadRanksDispatch, RefusedByOneRank) {
  const auto& [bad, backend] = GetParam();
  Ranks ranks(*backend, simpleConfig());
  ASSERT_TRUE(ranks.ok()) << ranks.error();
  ranks.expectHealthy(0);
  for (int round = 1; round < 4; ++round) {
    bad.spoil(ranks[kBad]);
    expectRefusal(ranks.each([](SimpleCall& call, int) { return call.runDispatch(); }), bad);
    ranks.expectHealthy(round);
  }
}

const BadCall kBadDispatches[] = {
    {"TooManyTokens", [](SimpleCall& c) { c.dispatch.numTokens = 9; }, "9"},
    {"HugeTokens", [](SimpleCall& c) { c.dispatch.numTokens = INT64_MAX; }, "numTokens"},
    {"NegativeTokens", [](SimpleCall& c) { c.dispatch.numTokens = -1; }, "numTokens"},
    {"TopkAboveMax", [](SimpleCall& c) { c.dispatch.topk = 3; }, "topk"},
    {"NegativeTopk", [](SimpleCall& c) { c.dispatch.topk = -1; }, "topk"},
    {"NoIds", [](SimpleCall& c) { c.dispatch.ids = nullptr; }, "ids"},
    {"BadIdType", [](SimpleCall& c) { c.dispatch.idType = 2; }, "idType"},
    {"NoInputs", [](SimpleCall& c) { c.dispatch.inputs = nullptr; }, "inputs"},
    {"NumInputsZero", [](SimpleCall& c) { c.dispatch.numInputs = 0; }, "numInputs"},
    {"NumInputsTwo", [](SimpleCall& c) { c.dispatch.numInputs = 2; }, "numInputs"},
    {"NoTokenData", [](SimpleCall& c) { c.input.data = nullptr; }, "data"},
    {"WrongRowBytes", [](SimpleCall& c) { c.input.rowBytes = 30; }, "rowBytes"},
    {"StrideTooSmall", [](SimpleCall& c) { c.input.strideBytes = 31; }, "strideBytes"},
    {"NegativeStride", [](SimpleCall& c) { c.input.strideBytes = -32; }, "strideBytes"},
    {"WrongRole", [](SimpleCall& c) { c.input.role = moeRoleOpaque; }, "role"},
    {"UnknownRole", [](SimpleCall& c) { c.input.role = 9; }, "role"},
    {"ReservedSet", [](SimpleCall& c) { c.input.reserved = 1; }, "reserved"},
    {"UnknownFlag", [](SimpleCall& c) { c.dispatch.flags = 1 << 20; }, "flags"},
    {"SizeZero", [](SimpleCall& c) { c.dispatch.size = 0; }, "size"},
    {"NoReceive", [](SimpleCall& c) { c.dispatch.receive = nullptr; }, "receive"},
    {"ReceiveSizeZero", [](SimpleCall& c) { c.receive.size = 0; }, "size"},
    {"NegativeCapacity", [](SimpleCall& c) { c.receive.capacity = -1; }, "capacity"},
    {"CapacityWithViews",
     [](SimpleCall& c) {
       c.receive.rows = nullptr;
       c.receive.capacity = 4;
     },
     "capacity"},
    {"NoOutputData",
     [](SimpleCall& c) {
       c.receive.capacity = 8;
       c.receivedRows.data = nullptr;
     },
     "data"},
    {"ReceiveReservedSet", [](SimpleCall& c) { c.receive.reserved = 1; }, "reserved"},
    {"WrongOutputRowBytes", [](SimpleCall& c) { c.receivedRows.rowBytes = 64; }, "rowBytes"},
    {"BadReceivedIdType", [](SimpleCall& c) { c.receive.idType = -1; }, "idType"},
};

INSTANTIATE_TEST_SUITE_P(Refusal, ThreadRanksDispatch, testing::ValuesIn(onHost(kBadDispatches)),
                         [](const auto& info) { return std::string(info.param.bad.name); });
INSTANTIATE_TEST_SUITE_P(GpuRefusal, ThreadRanksDispatch, testing::ValuesIn(onGpus(kBadDispatches)), gpuName);

class ThreadRanksCombine : public OnBackend<Setup> {};

TEST_P(ThreadRanksCombine, RefusedByOneRank) {
  const auto& [bad, backend] = GetParam();
  Ranks ranks(*backend, simpleConfig());
  ASSERT_TRUE(ranks.ok()) << ranks.error();
  for (int round = 0; round < 3; ++round) {
    for (int rank = 0; rank < kRanks; ++rank) ranks[rank].reset(round);
    Outcome dispatched = ranks.each([](SimpleCall& call, int) { return call.runDispatch(); });
    for (int rank = 0; rank < kRanks; ++rank) ASSERT_EQ(dispatched.code[rank], moeSuccess) << dispatched.text[rank];
    bad.spoil(ranks[kBad]);
    expectRefusal(ranks.each([](SimpleCall& call, int) { return call.runCombine(); }), bad);
    // The handle is as it was: the same combine with valid arguments works.
    Outcome again = ranks.each([](SimpleCall& call, int) {
      call.resetCombine();
      return call.runCombine();
    });
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(again.code[rank], moeSuccess) << again.text[rank];
      EXPECT_EQ(ranks[rank].wrongOutput(), "");
    }
    ranks.expectHealthy(10 + round);
  }
}

const BadCall kBadCombines[] = {
    {"NoRows", [](SimpleCall& c) { c.combine.rows = nullptr; }, "rows"},
    {"NoOutput", [](SimpleCall& c) { c.combine.output = nullptr; }, "output"},
    {"RowStrideTooSmall", [](SimpleCall& c) { c.combine.rowStride = 8; }, "rowStride"},
    {"OutputStrideTooSmall", [](SimpleCall& c) { c.combine.outputStride = 31; }, "outputStride"},
    {"NegativeStride", [](SimpleCall& c) { c.combine.rowStride = -64; }, "rowStride"},
    {"UnknownFlag", [](SimpleCall& c) { c.combine.flags = 1 << 9; }, "flags"},
    {"SizeZero", [](SimpleCall& c) { c.combine.size = 0; }, "size"},
    {"ReservedSet", [](SimpleCall& c) { c.combine.reserved = 7; }, "reserved"},
};

INSTANTIATE_TEST_SUITE_P(Refusal, ThreadRanksCombine, testing::ValuesIn(onHost(kBadCombines)),
                         [](const auto& info) { return std::string(info.param.bad.name); });
INSTANTIATE_TEST_SUITE_P(GpuRefusal, ThreadRanksCombine, testing::ValuesIn(onGpus(kBadCombines)), gpuName);

class ThreadRanksRefusal : public OnBackend<const Backend*> {};

INSTANTIATE_TEST_SUITE_P(ThreadRanks, ThreadRanksRefusal, testing::Values(&hostBackend()), backendName);
INSTANTIATE_TEST_SUITE_P(GpuRefusal, ThreadRanksRefusal, testing::ValuesIn(cudaBackends()), backendName);

TEST_P(ThreadRanksRefusal, SeveralRanksRefuseAtOnce) {
  Ranks ranks(*GetParam(), simpleConfig());
  ASSERT_TRUE(ranks.ok()) << ranks.error();
  ranks[1].dispatch.numTokens = 100;
  ranks[3].dispatch.ids = nullptr;
  Outcome outcome = ranks.each([](SimpleCall& call, int) { return call.runDispatch(); });
  EXPECT_EQ(outcome.code[0], moePeerRefused) << outcome.text[0];
  EXPECT_EQ(outcome.code[1], moeInvalidArgument) << outcome.text[1];
  EXPECT_EQ(outcome.code[2], moePeerRefused) << outcome.text[2];
  EXPECT_EQ(outcome.code[3], moeInvalidArgument) << outcome.text[3];
  ranks.expectHealthy(1);
}

// Nothing of it is left to be told later, by whichever way the ranks were told.
TEST_P(ThreadRanksRefusal, IsReportedOnce) {
  Ranks ranks(*GetParam(), simpleConfig());
  ASSERT_TRUE(ranks.ok()) << ranks.error();
  ranks[kBad].dispatch.ids = nullptr;
  expectRefusal(ranks.each([](SimpleCall& call, int) { return call.runDispatch(); }), {"", nullptr, "ids"});
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == kBad) continue;
    moeResult_t state = moeInternalError;
    EXPECT_EQ(moeCommGetAsyncError(ranks[rank].comm, &state), moeSuccess);
    EXPECT_EQ(state, moeSuccess) << moeGetLastError();
  }
  ranks.expectHealthy(1);
}

TEST_P(ThreadRanksRefusal, NoHandleOnOneRank) {
  Ranks ranks(*GetParam(), simpleConfig());
  ASSERT_TRUE(ranks.ok()) << ranks.error();
  Outcome outcome = ranks.each([](SimpleCall& call, int rank) {
    return call.runDispatch(&call.dispatch, rank == kBad ? nullptr : call.handle.get());
  });
  expectRefusal(outcome, {"", nullptr, "handle"});
  ranks.expectHealthy(1);
}

TEST_P(ThreadRanksRefusal, NoArgumentsOnOneRank) {
  Ranks ranks(*GetParam(), simpleConfig());
  ASSERT_TRUE(ranks.ok()) << ranks.error();
  Outcome outcome = ranks.each([](SimpleCall& call, int rank) {
    return call.runDispatch(rank == kBad ? nullptr : &call.dispatch, call.handle.get());
  });
  expectRefusal(outcome, {"", nullptr, "args"});
  ranks.expectHealthy(1);
}

TEST_P(ThreadRanksRefusal, ReuseWithoutARouting) {
  Ranks ranks(*GetParam(), simpleConfig());
  ASSERT_TRUE(ranks.ok()) << ranks.error();
  Outcome outcome = ranks.each([](SimpleCall& call, int rank) {
    if (rank == kBad) call.dispatch.flags = MOE_REUSE_ROUTING;
    return call.runDispatch();
  });
  EXPECT_TRUE(outcome.code[kBad] == moeInvalidArgument || outcome.code[kBad] == moeInvalidUsage) << outcome.text[kBad];
  EXPECT_EQ(outcome.code[0], moePeerRefused) << outcome.text[0];
  ranks.expectHealthy(1);
}

TEST_P(ThreadRanksRefusal, ViewsInAnExpertLayout) {
  moeConfig_t config = simpleConfig();
  config.layout = moeLayoutExpert;
  Ranks ranks(*GetParam(), config);
  ASSERT_TRUE(ranks.ok()) << ranks.error();
  Outcome outcome = ranks.each([](SimpleCall& call, int rank) {
    if (rank == kBad) call.receive.rows = nullptr;
    return call.runDispatch();
  });
  expectRefusal(outcome, {"", nullptr, "moeLayoutRank"});
}

// A combine on a handle whose dispatch was refused, or that never had one.
TEST_P(ThreadRanksRefusal, CombineWithoutADispatch) {
  Ranks ranks(*GetParam(), simpleConfig());
  ASSERT_TRUE(ranks.ok()) << ranks.error();
  Outcome fresh = ranks.each([](SimpleCall& call, int) { return call.runCombine(); });
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_NE(fresh.code[rank], moeSuccess);
  ranks[kBad].dispatch.numTokens = 99;
  ranks.each([](SimpleCall& call, int) { return call.runDispatch(); });
  Outcome failed = ranks.each([](SimpleCall& call, int) { return call.runCombine(); });
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_NE(failed.code[rank], moeSuccess);
  ranks.expectHealthy(1);
}

// One rank alone gives a handle without a dispatch, or one that was destroyed.
TEST_P(ThreadRanksRefusal, OneRankCombinesAFreshHandle) {
  Ranks ranks(*GetParam(), simpleConfig());
  ASSERT_TRUE(ranks.ok()) << ranks.error();
  ranks.each([](SimpleCall& call, int) { return call.runDispatch(); });
  Handle fresh = ranks[kBad].anotherHandle();
  Outcome outcome = ranks.each(
      [&](SimpleCall& call, int rank) { return call.runCombine(rank == kBad ? fresh.get() : call.handle.get()); });
  expectRefusal(outcome, {"", nullptr, "handle", moeInvalidUsage});
  ranks.expectHealthy(1);
}

TEST_P(ThreadRanksRefusal, OneRankUsesADestroyedHandle) {
  Ranks ranks(*GetParam(), simpleConfig());
  ASSERT_TRUE(ranks.ok()) << ranks.error();
  moeHandle_t gone = ranks[kBad].anotherHandle().get();
  Outcome dispatched = ranks.each([&](SimpleCall& call, int rank) {
    return call.runDispatch(&call.dispatch, rank == kBad ? gone : call.handle.get());
  });
  expectRefusal(dispatched, {"", nullptr, "handle", moeInvalidUsage});
  ranks.expectHealthy(1);
  Outcome combined =
      ranks.each([&](SimpleCall& call, int rank) { return call.runCombine(rank == kBad ? gone : call.handle.get()); });
  expectRefusal(combined, {"", nullptr, "handle", moeInvalidUsage});
  ranks.expectHealthy(2);
}

// Rank 0 combines dispatch 1 while the others combine dispatch 2: never wrong data.
TEST_P(ThreadRanksRefusal, HandlesMixedUpBetweenRanks) {
  Ranks ranks(*GetParam(), simpleConfig());
  ASSERT_TRUE(ranks.ok()) << ranks.error();
  std::vector<Handle> second;
  for (int rank = 0; rank < kRanks; ++rank) second.push_back(ranks[rank].anotherHandle());
  auto handleOf = [&](SimpleCall& call, int rank, bool other) {
    return other ? second[static_cast<size_t>(rank)].get() : call.handle.get();
  };
  for (bool other : {false, true}) {
    Outcome done = ranks.each(
        [&](SimpleCall& call, int rank) { return call.runDispatch(&call.dispatch, handleOf(call, rank, other)); });
    for (int rank = 0; rank < kRanks; ++rank) ASSERT_EQ(done.code[rank], moeSuccess) << done.text[rank];
  }
  Outcome mixed =
      ranks.each([&](SimpleCall& call, int rank) { return call.runCombine(handleOf(call, rank, rank != 0)); });
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(mixed.code[rank], moeMismatch) << mixed.text[rank];
  ranks.expectHealthy(1);
}

TEST_P(ThreadRanksRefusal, HandleOfAnotherCommunicator) {
  Ranks ranks(*GetParam(), simpleConfig()), others(*GetParam(), simpleConfig());
  ASSERT_TRUE(ranks.ok() && others.ok());
  Outcome outcome = ranks.each([&](SimpleCall& call, int rank) {
    return call.runDispatch(&call.dispatch, rank == kBad ? others[rank].handle.get() : call.handle.get());
  });
  expectRefusal(outcome, {"", nullptr, "handle"});
  ranks.expectHealthy(1);
  others.expectHealthy(2);
}

TEST_P(ThreadRanksRefusal, ThirdSendHalfIsTooMany) {
  Ranks ranks(*GetParam(), simpleConfig());
  ASSERT_TRUE(ranks.ok()) << ranks.error();
  std::vector<Handle> handles;
  for (int i = 0; i < 3 * kRanks; ++i) handles.push_back(ranks[i % kRanks].anotherHandle());
  auto handleOf = [&](int rank, int i) { return handles[static_cast<size_t>(i * kRanks + rank)].get(); };
  for (int rank = 0; rank < kRanks; ++rank) ranks[rank].dispatch.flags = MOE_SEND_HALF;
  for (int i = 0; i < 2; ++i) {
    Outcome sent =
        ranks.each([&](SimpleCall& call, int rank) { return call.runDispatch(&call.dispatch, handleOf(rank, i)); });
    for (int rank = 0; rank < kRanks; ++rank) ASSERT_EQ(sent.code[rank], moeSuccess) << sent.text[rank];
  }
  Outcome third =
      ranks.each([&](SimpleCall& call, int rank) { return call.runDispatch(&call.dispatch, handleOf(rank, 2)); });
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(third.code[rank], moeTooManyInFlight) << third.text[rank];
  // In the other order, and then there is room again.
  for (int i : {1, 0}) {
    Outcome waited =
        ranks.each([&](SimpleCall& call, int rank) { return call.runWait(&call.receive, handleOf(rank, i)); });
    for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(waited.code[rank], moeSuccess) << waited.text[rank];
  }
  ranks.expectHealthy(1);
}

// A refused wait concerns its rank alone: what was sent is there, and a valid wait gets it.
TEST_P(ThreadRanksRefusal, WaitMayBeTriedAgain) {
  Ranks ranks(*GetParam(), simpleConfig());
  ASSERT_TRUE(ranks.ok()) << ranks.error();
  Outcome outcome = ranks.each([](SimpleCall& call, int rank) {
    call.dispatch.flags = MOE_SEND_HALF;
    moeResult_t result = call.runDispatch();
    if (result != moeSuccess) return result;
    if (rank == kBad) {
      moeReceive_t bad = call.receive;
      bad.capacity = -7;
      if (call.runWait(&bad, call.handle.get()) != moeInvalidArgument) return moeInternalError;
    }
    result = call.runWait(&call.receive, call.handle.get());
    return result != moeSuccess ? result : call.runCombine();
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(outcome.code[rank], moeSuccess) << outcome.text[rank];
    EXPECT_EQ(ranks[rank].wrongOutput(), "");
  }
}

TEST_P(ThreadRanksRefusal, OverflowIsAnErrorWhenAsked) {
  // On a GPU the call has returned before the rows come: there the sizes tell.
  if (GetParam()->asynchronous()) GTEST_SKIP() << "only where calls return when they are over";
  moeConfig_t config = simpleConfig();
  config.overflowIsError = 1;
  Ranks ranks(*GetParam(), config);
  ASSERT_TRUE(ranks.ok()) << ranks.error();
  ranks[kBad].receive.capacity = 2;
  Outcome outcome = ranks.each([](SimpleCall& call, int) { return call.runDispatch(); });
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(outcome.code[rank], rank == kBad ? moeOverflow : moeSuccess) << outcome.text[rank];
  }
  EXPECT_NE(outcome.text[kBad].find("2"), std::string::npos) << outcome.text[kBad];
  ranks.expectHealthy(1);
}

}  // namespace
}  // namespace moetest

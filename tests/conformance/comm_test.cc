// SPDX-License-Identifier: Apache-2.0
// The life of a communicator: init in all forms and failures of it, finalize, destroy, abort, groups.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>

#include "conformance/rank_process.h"
#include "conformance/simple_call.h"
#include "conformance/world.h"

namespace moetest {
namespace {

struct Inits {
  explicit Inits(int n) : nranks(n), comms(at(n), nullptr), code(at(n), moeSuccess), text(at(n)), took(at(n)) {}
  ~Inits() {
    for (moeComm_t comm : comms) moeCommDestroy(comm);
  }
  static size_t at(int i) { return static_cast<size_t>(i); }
  int nranks;
  std::vector<moeComm_t> comms;
  std::vector<moeResult_t> code;
  std::vector<std::string> text;
  std::vector<milliseconds> took;
};

// Inits the ranks that `present` names, each in a thread, by a unique id.
std::unique_ptr<Inits> initAll(const std::vector<moeConfig_t>& configs, const std::vector<int>& present) {
  auto result = std::make_unique<Inits>(static_cast<int>(configs.size()));
  moeUniqueId_t id;
  EXPECT_EQ(moeGetUniqueId(&id), moeSuccess) << moeGetLastError();
  std::vector<std::thread> threads;
  for (int rank : present) {
    threads.emplace_back([&, rank] {
      auto at = static_cast<size_t>(rank);
      Clock::time_point start = Clock::now();
      result->code[at] = moeCommInit(&result->comms[at], result->nranks, &id, rank, &configs[at]);
      result->took[at] = since(start);
      if (result->code[at] != moeSuccess) result->text[at] = moeGetLastError();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return result;
}

bool has(const std::string& text, const std::string& word) { return text.find(word) != std::string::npos; }

TEST(ThreadRanksInit, MismatchIsToldToAllWithAllValues) {
  std::vector<moeConfig_t> configs(4, simpleConfig(64));
  configs[2].maxTokensPerRank = 128;
  auto inits = initAll(configs, {0, 1, 2, 3});
  for (size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(inits->code[rank], moeMismatch) << inits->text[rank];
    EXPECT_TRUE(has(inits->text[rank], "maxTokensPerRank") && has(inits->text[rank], "64") &&
                has(inits->text[rank], "128"))
        << inits->text[rank];
    EXPECT_EQ(inits->comms[rank], nullptr);
  }
}

TEST(ThreadRanksInit, EveryFieldThatMustAgreeIsCompared) {
  const std::vector<std::pair<const char*, void (*)(moeConfig_t&)>> changes = {
      {"hidden", [](moeConfig_t& c) { c.hidden = 32; }},
      {"numExperts", [](moeConfig_t& c) { c.numExperts = 9; }},
      {"maxTopk", [](moeConfig_t& c) { c.maxTopk = 3; }},
      {"dtype", [](moeConfig_t& c) { c.dtype = moeFloat16; }},
      {"combineDtype", [](moeConfig_t& c) { c.combineDtype = moeFloat32; }},
      {"layout", [](moeConfig_t& c) { c.layout = moeLayoutExpert; }},
      {"numSideRows", [](moeConfig_t& c) { c.numSideRows = 1, c.sideRowBytes[0] = 4; }},
      {"buffers", [](moeConfig_t& c) { c.buffers = 3; }},
      {"quantize", [](moeConfig_t& c) { c.quantize = moeQuantizeUe8m0; }},
  };
  for (const auto& [name, change] : changes) {
    std::vector<moeConfig_t> configs(2, simpleConfig());
    change(configs[1]);
    auto inits = initAll(configs, {0, 1});
    for (size_t rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(inits->code[rank], moeMismatch) << name << ": " << inits->text[rank];
      EXPECT_TRUE(has(inits->text[rank], name)) << inits->text[rank];
    }
  }
}

TEST(ThreadRanksInit, LocalFieldsMayDiffer) {
  std::vector<moeConfig_t> configs(2, simpleConfig());
  configs[1].timeoutMs = 2345;
  configs[1].localIds = 1;
  configs[1].overflowIsError = 1;
  configs[1].numSms = 3;
  auto inits = initAll(configs, {0, 1});
  for (size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(inits->code[rank], moeSuccess) << inits->text[rank];
}

TEST(ThreadRanksInit, DefaultAndItsValueAgree) {
  std::vector<moeConfig_t> configs(2, simpleConfig());
  configs[0].buffers = 0;
  configs[1].buffers = 2;
  configs[0].layout = configs[1].layout = moeLayoutExpertPadded;
  configs[1].capacity = 2 * 8;
  auto inits = initAll(configs, {0, 1});
  for (size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(inits->code[rank], moeSuccess) << inits->text[rank];
}

TEST(ThreadRanksInit, BadArgumentOfOneRankIsToldToAll) {
  std::vector<moeConfig_t> configs(4, simpleConfig());
  configs[2].maxTokensPerRank = -1;
  auto inits = initAll(configs, {0, 1, 2, 3});
  for (size_t rank = 0; rank < 4; ++rank) {
    EXPECT_NE(inits->code[rank], moeSuccess);
    EXPECT_NE(inits->code[rank], moeTimeout) << inits->text[rank];
    EXPECT_LT(inits->took[rank], milliseconds(5000)) << rank;
    EXPECT_TRUE(has(inits->text[rank], "maxTokensPerRank")) << inits->text[rank];
    if (rank != 2) {
      EXPECT_TRUE(has(inits->text[rank], "rank 2")) << inits->text[rank];
    }
  }
}

TEST(ThreadRanksInit, MissingRankIsNamedInTime) {
  moeConfig_t config = simpleConfig();
  config.timeoutMs = 400;
  auto inits = initAll(std::vector<moeConfig_t>(4, config), {0, 1, 2});
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(inits->code[rank], moeTimeout) << inits->text[rank];
    EXPECT_TRUE(has(inits->text[rank], "3")) << inits->text[rank];
    EXPECT_LT(inits->took[rank], milliseconds(2500));
  }
}

TEST(ThreadRanksInit, FailingCallbackFailsTheInit) {
  ThreadGather gather(2);
  gather.fail();
  runThreads(2, [&](int rank) {
    moeBootstrap_t bootstrap = gather.bootstrap(rank);
    moeConfig_t config = simpleConfig();
    moeComm_t comm = nullptr;
    EXPECT_NE(moeCommInitCallbacks(&comm, 2, rank, &bootstrap, &config), moeSuccess);
    EXPECT_TRUE(has(moeGetLastError(), "allGather")) << moeGetLastError();
    EXPECT_EQ(comm, nullptr);
  });
}

TEST(ThreadRanksInit, NonBlockingReportsProgress) {
  moeConfig_t config = simpleConfig();
  config.nonBlocking = 1;
  moeUniqueId_t id;
  ASSERT_EQ(moeGetUniqueId(&id), moeSuccess) << moeGetLastError();
  moeComm_t comms[2] = {nullptr, nullptr};
  ASSERT_EQ(moeCommInit(&comms[0], 2, &id, 0, &config), moeSuccess) << moeGetLastError();
  moeResult_t state = moeSuccess;
  ASSERT_EQ(moeCommGetAsyncError(comms[0], &state), moeSuccess);
  EXPECT_EQ(state, moeInProgress) << "rank 1 has not come";
  moeInfo_t info = MOE_INFO_INIT;
  EXPECT_EQ(moeGetInfo(comms[0], &info), moeInProgress);
  moeDispatchArgs_t args = MOE_DISPATCH_ARGS_INIT;
  EXPECT_EQ(moeDispatch(comms[0], &args, nullptr, nullptr), moeInProgress);
  ASSERT_EQ(moeCommInit(&comms[1], 2, &id, 1, &config), moeSuccess) << moeGetLastError();
  for (moeComm_t comm : comms) {
    Clock::time_point start = Clock::now();
    do {
      ASSERT_EQ(moeCommGetAsyncError(comm, &state), moeSuccess);
      std::this_thread::yield();
    } while (state == moeInProgress && since(start) < milliseconds(10000));
    EXPECT_EQ(state, moeSuccess) << moeGetLastError();
  }
  runThreads(2, [&](int rank) { EXPECT_EQ(SimpleCall(comms[rank], config, rank, 2).runBoth(), ""); });
  for (moeComm_t comm : comms) EXPECT_EQ(moeCommDestroy(comm), moeSuccess);
}

TEST(ThreadRanksInit, UnfinishedInitCanBeDestroyed) {
  moeConfig_t config = simpleConfig();
  config.nonBlocking = 1;
  config.timeoutMs = 30000;
  moeUniqueId_t id;
  ASSERT_EQ(moeGetUniqueId(&id), moeSuccess);
  moeComm_t comm = nullptr;
  ASSERT_EQ(moeCommInit(&comm, 2, &id, 0, &config), moeSuccess) << moeGetLastError();
  Clock::time_point start = Clock::now();
  EXPECT_EQ(moeCommDestroy(comm), moeSuccess) << moeGetLastError();
  EXPECT_LT(since(start), milliseconds(3000));
}

TEST(ThreadRanksLife, SecondDestroyIsRefused) {
  moeComm_t comms[2];
  moeConfig_t config = simpleConfig();
  ASSERT_EQ(moeCommInitAll(comms, 2, &config), moeSuccess) << moeGetLastError();
  for (moeComm_t comm : comms) EXPECT_EQ(moeCommDestroy(comm), moeSuccess) << moeGetLastError();
  for (moeComm_t comm : comms) {
    EXPECT_EQ(moeCommDestroy(comm), moeInvalidUsage);
    moeInfo_t info = MOE_INFO_INIT;
    EXPECT_NE(moeGetInfo(comm, &info), moeSuccess);
    EXPECT_NE(moeCommFinalize(comm), moeSuccess);
  }
}

TEST(ThreadRanksLife, DestroyWithLiveHandles) {
  moeComm_t comm;
  moeConfig_t config = simpleConfig();
  ASSERT_EQ(moeCommInitAll(&comm, 1, &config), moeSuccess) << moeGetLastError();
  SimpleCall call(comm, config, 0, 1);
  EXPECT_EQ(call.runBoth(), "");
  moeResult_t destroyed = moeCommDestroy(comm);
  EXPECT_TRUE(destroyed == moeSuccess || destroyed == moeInvalidUsage);
  // The handle goes after its communicator here, which is wrong and must not crash.
}

TEST(ThreadRanksLife, CallsAfterAPeerHasLeftNameIt) {
  moeComm_t comms[2];
  moeConfig_t config = simpleConfig();
  ASSERT_EQ(moeCommInitAll(comms, 2, &config), moeSuccess) << moeGetLastError();
  {
    SimpleCall call(comms[0], config, 0, 2);
    EXPECT_EQ(moeCommFinalize(comms[1]), moeSuccess) << moeGetLastError();
    Clock::time_point start = Clock::now();
    EXPECT_EQ(call.runDispatch(), moeRankLost) << moeGetLastError();
    EXPECT_TRUE(has(moeGetLastError(), "rank 1")) << moeGetLastError();
    EXPECT_LT(since(start), milliseconds(1000));
    int32_t lost[2] = {7, 7};
    EXPECT_EQ(moeCommGetDead(comms[0], lost), moeSuccess);
    EXPECT_EQ(lost[0], 0);
  }
  for (moeComm_t comm : comms) EXPECT_EQ(moeCommDestroy(comm), moeSuccess) << moeGetLastError();
}

TEST(ThreadRanksLife, CallsAfterFinalizeAreRefused) {
  moeComm_t comm;
  moeConfig_t config = simpleConfig();
  ASSERT_EQ(moeCommInitAll(&comm, 1, &config), moeSuccess);
  {
    SimpleCall call(comm, config, 0, 1);
    EXPECT_EQ(call.runBoth(), "");
    EXPECT_EQ(moeCommFinalize(comm), moeSuccess);
    EXPECT_EQ(call.runDispatch(), moeInvalidUsage) << moeGetLastError();
  }
  EXPECT_EQ(moeCommDestroy(comm), moeSuccess);
}

TEST(ThreadRanksLife, AbortEndsAWaitingDispatch) {
  moeComm_t comms[2];
  moeConfig_t config = simpleConfig();
  config.timeoutMs = 30000;
  ASSERT_EQ(moeCommInitAll(comms, 2, &config), moeSuccess) << moeGetLastError();
  {
    SimpleCall waiting(comms[0], config, 0, 2), peer(comms[1], config, 1, 2);
    std::atomic<bool> entered{false};
    Clock::time_point ended;
    moeResult_t result = moeSuccess;
    std::thread blocked([&] {
      entered = true;
      result = waiting.runDispatch();
      ended = Clock::now();
    });
    while (!entered) std::this_thread::yield();
    Clock::time_point aborted = Clock::now();
    EXPECT_EQ(moeCommAbort(comms[0]), moeSuccess);
    blocked.join();
    EXPECT_EQ(result, moeAborted);
    EXPECT_LT(ended - aborted, milliseconds(200));
    moeResult_t state = moeSuccess;
    EXPECT_EQ(moeCommGetAsyncError(comms[0], &state), moeSuccess);
    EXPECT_EQ(state, moeAborted);
    EXPECT_EQ(waiting.runDispatch(), moeAborted) << "later calls fail at once";
    EXPECT_EQ(peer.runDispatch(), moeRankLost) << moeGetLastError();
    EXPECT_TRUE(has(moeGetLastError(), "rank 0")) << moeGetLastError();
    int32_t lost[2] = {7, 7};
    EXPECT_EQ(moeCommGetDead(comms[1], lost), moeSuccess);
    EXPECT_EQ(lost[0], 1);
    EXPECT_EQ(lost[1], 0);
  }
  for (moeComm_t comm : comms) EXPECT_EQ(moeCommDestroy(comm), moeSuccess) << moeGetLastError();
}

TEST(ThreadRanksLife, TimeoutNamesTheRankThatDidNotCome) {
  moeComm_t comms[3];
  moeConfig_t config = simpleConfig();
  config.timeoutMs = 300;
  ASSERT_EQ(moeCommInitAll(comms, 3, &config), moeSuccess) << moeGetLastError();
  for (int rank = 0; rank < 2; ++rank) {
    SimpleCall call(comms[rank], config, rank, 3);
    Clock::time_point start = Clock::now();
    moeResult_t result = call.runDispatch();
    std::string text = moeGetLastError();
    // Rank 0's failure may reach rank 1 before its own deadline does.
    EXPECT_TRUE(result == moeTimeout || (rank == 1 && result == moeRankLost)) << text;
    if (result == moeTimeout) {
      EXPECT_TRUE(has(text, "rank 2") || has(text, "rank 1")) << text;
      EXPECT_GE(since(start), milliseconds(295));
    }
    EXPECT_LT(since(start), milliseconds(1500));
  }
  for (moeComm_t comm : comms) EXPECT_EQ(moeCommDestroy(comm), moeSuccess) << moeGetLastError();
}

TEST(ThreadRanksGroup, EndWithoutStartIsRefused) {
  EXPECT_EQ(moeGroupEnd(), moeInvalidUsage);
  EXPECT_EQ(moeGroupStart(), moeSuccess);
  EXPECT_EQ(moeGroupEnd(), moeSuccess) << "an empty group";
  EXPECT_EQ(moeGroupEnd(), moeInvalidUsage);
}

TEST(ThreadRanksGroup, OneThreadInitsAllRanksAndNests) {
  moeUniqueId_t id;
  moeConfig_t config = simpleConfig();
  moeComm_t comms[3] = {nullptr, nullptr, nullptr};
  ASSERT_EQ(moeGetUniqueId(&id), moeSuccess);
  ASSERT_EQ(moeGroupStart(), moeSuccess);
  for (int rank = 0; rank < 3; ++rank) ASSERT_EQ(moeCommInit(&comms[rank], 3, &id, rank, &config), moeSuccess);
  ASSERT_EQ(moeGroupEnd(), moeSuccess) << moeGetLastError();
  std::vector<std::unique_ptr<SimpleCall>> calls;
  for (int rank = 0; rank < 3; ++rank) calls.push_back(std::make_unique<SimpleCall>(comms[rank], config, rank, 3));
  ASSERT_EQ(moeGroupStart(), moeSuccess);
  for (auto& call : calls) {
    ASSERT_EQ(moeGroupStart(), moeSuccess);
    ASSERT_EQ(call->runDispatch(), moeSuccess);
    ASSERT_EQ(moeGroupEnd(), moeSuccess) << "an inner end runs nothing";
  }
  // In order within a communicator: the combine comes after the dispatch.
  for (auto& call : calls) ASSERT_EQ(call->runCombine(), moeSuccess);
  ASSERT_EQ(moeGroupEnd(), moeSuccess) << moeGetLastError();
  for (auto& call : calls) EXPECT_EQ(call->wrongOutput(), "");
  calls.clear();
  for (moeComm_t comm : comms) EXPECT_EQ(moeCommDestroy(comm), moeSuccess);
}

TEST(ThreadRanksGroup, FirstFailureIsReturnedAndNothingBreaks) {
  moeComm_t comms[2];
  moeConfig_t config = simpleConfig();
  ASSERT_EQ(moeCommInitAll(comms, 2, &config), moeSuccess);
  {
    SimpleCall a(comms[0], config, 0, 2), b(comms[1], config, 1, 2);
    b.dispatch.numTokens = 9;
    ASSERT_EQ(moeGroupStart(), moeSuccess);
    a.runDispatch();
    b.runDispatch();
    moeResult_t result = moeGroupEnd();
    EXPECT_TRUE(result == moeInvalidArgument || result == moePeerRefused) << moeGetLastError();
    b.reset();
    ASSERT_EQ(moeGroupStart(), moeSuccess);
    a.runDispatch();
    b.runDispatch();
    a.runCombine();
    b.runCombine();
    EXPECT_EQ(moeGroupEnd(), moeSuccess) << moeGetLastError();
    EXPECT_EQ(a.wrongOutput() + b.wrongOutput(), "");
  }
  for (moeComm_t comm : comms) EXPECT_EQ(moeCommDestroy(comm), moeSuccess);
}

}  // namespace
}  // namespace moetest

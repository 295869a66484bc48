// SPDX-License-Identifier: Apache-2.0
// Over the stand-in for NCCL of tests/simnccl/, which these tests are linked to, and memory of the host.
#include "bootstrap/nccl_bootstrap.h"

#include <dlfcn.h>

#include <cstring>

#include "simnccl/simnccl.h"
#include "unit/bootstrap/helpers.h"

namespace moe::test {
namespace {

constexpr auto kPlenty = 20s;

// Host memory in place of a GPU's, and a stream that is idle after a few questions, or never.
class HostStage final : public DeviceStage {
 public:
  explicit HostStage(std::atomic<int>* live, bool endless = false) : live_(live), endless_(endless) { ++*live_; }
  ~HostStage() override { --*live_; }
  void* stream() const override { return nullptr; }
  void onDevice(const std::function<void()>& body) override { body(); }
  Room begin(std::string_view piece, size_t receiveBytes) override {
    send_ = piece;
    receive_.assign(receiveBytes, '\0');
    return {send_.data(), receive_.data()};
  }
  void fetch() override { questions_ = 3; }
  bool idle() override { return !endless_ && questions_-- == 0; }
  std::string answer() const override { return receive_; }

 private:
  std::atomic<int>* live_;
  bool endless_;
  std::string send_, receive_;
  int questions_ = 0;
};

// A communicator of the stand-in, and the stages made for it.
struct Group {
  explicit Group(int nranks) : comms(simNcclMake(nranks)) {}
  // Calls that were left behind end here.
  ~Group() {
    for (ncclComm* comm : comms) simNcclAbort(comm);
    EXPECT_TRUE(eventually(kPlenty, [this] { return stages == 0; }));
    for (ncclComm* comm : comms) simNcclDestroy(comm);
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  std::unique_ptr<Bootstrap> join(int rank, bool endless = false) {
    return joinNccl(askNccl(comms[static_cast<size_t>(rank)]), std::make_shared<HostStage>(&stages, endless));
  }
  std::vector<Outcome> run(const std::vector<int>& ranks, const std::function<void(Bootstrap&)>& body) {
    return runRanks(ranks, [&](int rank) { body(*join(rank)); });
  }

  std::vector<ncclComm*> comms;
  std::atomic<int> stages{0};
};

class NcclBootstrapSizes : public testing::TestWithParam<int> {};

TEST_P(NcclBootstrapSizes, RanksExchangePartsOfDifferentLengths) {
  Group group(GetParam());
  expectAllSucceed(group.run(upTo(GetParam()), [](Bootstrap& mine) { exchangeAndCheck(mine, 3, within(kPlenty)); }));
}

TEST_P(NcclBootstrapSizes, CommunicatorsThatDoNotBlockWorkToo) {
  Group group(GetParam());
  for (ncclComm* comm : group.comms) simNcclDoNotBlock(comm);
  expectAllSucceed(group.run(upTo(GetParam()), [](Bootstrap& mine) { exchangeAndCheck(mine, 3, within(kPlenty)); }));
}

INSTANTIATE_TEST_SUITE_P(Sizes, NcclBootstrapSizes, testing::Values(1, 2, 5));

TEST(NcclBootstrap, RankSizeAndDeviceAreNccls) {
  Group group(3);
  NcclGroup asked = askNccl(group.comms[2]);
  EXPECT_EQ(asked.rank, 2);
  EXPECT_EQ(asked.nranks, 3);
  EXPECT_EQ(asked.device, 2);
}

TEST(NcclBootstrap, WhatIsNoCommunicatorIsRefused) {
  expectAll({outcomeOf([] { askNccl(nullptr); })}, moeInvalidArgument, "nccl is NULL");
  int elsewhere = 0;
  expectAll({outcomeOf([&] { askNccl(reinterpret_cast<ncclComm*>(&elsewhere)); })}, moeInvalidArgument,
            "nccl: ncclCommCount failed: simulated result 4: no more is known");
}

TEST(NcclBootstrap, APeerThatNeverComesIsATimeout) {
  for (bool blocks : {true, false}) {
    Group group(2);
    if (!blocks) simNcclDoNotBlock(group.comms[1]);
    auto outcomes = group.run({1}, [](Bootstrap& mine) { mine.allGather("x", within(100ms)); });
    expectAll(outcomes, moeTimeout, "rank 1 of 2 (CUDA device 1) found no end of the NCCL all-gather for the lengths");
    expectAll(outcomes, moeTimeout, "ncclCommAbort");
  }
}

TEST(NcclBootstrap, AStreamThatNeverEndsIsATimeout) {
  Group group(1);
  expectAll({outcomeOf([&] { group.join(0, true)->allGather("x", within(100ms)); })}, moeTimeout, "found no end");
}

TEST(NcclBootstrap, AnAbortEndsTheWait) {
  for (bool blocks : {true, false}) {
    Group group(2);
    if (!blocks) simNcclDoNotBlock(group.comms[0]);
    std::atomic<bool> aborted{false};
    std::thread aborter([&] { aborted = true; });
    auto outcomes = group.run({0}, [&](Bootstrap& mine) { mine.allGather("x", within(kPlenty, &aborted)); });
    aborter.join();
    expectAll(outcomes, moeAborted, "aborted");
    EXPECT_LT(outcomes[0].took, kPlenty);
  }
}

TEST(NcclBootstrap, AFailedCallIsNamed) {
  Group group(1);
  simNcclFailNext(group.comms[0], 5);
  expectAll(group.run({0}, [](Bootstrap& mine) { mine.allGather("x", within(kPlenty)); }), moeInvalidUsage,
            "rank 0: ncclAllGather for the lengths failed: simulated result 5: no more is known");
}

TEST(NcclBootstrap, AnErrorInTheBackgroundEndsTheWait) {
  Group group(2);
  simNcclSetAsyncError(group.comms[0], 6);
  Outcome waiting = outcomeOf([&] {
    simNcclDoNotBlock(group.comms[0]);
    group.join(0)->allGather("x", within(kPlenty));
  });
  expectAll({waiting}, moeRankLost, "rank 0: the NCCL communicator, in its all-gather for the lengths, failed");
  // The same behind an all-gather that has been enqueued.
  Group alone(1);
  auto mine = alone.join(0, true);
  simNcclSetAsyncError(alone.comms[0], 6);
  expectAll({outcomeOf([&] { mine->allGather("x", within(kPlenty)); })}, moeRankLost, "in its all-gather");
}

TEST(NcclBootstrap, NothingIsCalledAfterTheDeadline) {
  Group group(1);
  simNcclFailNext(group.comms[0], 5);  // would be reported if it were called
  expectAll(group.run({0}, [](Bootstrap& mine) { mine.allGather("x", within(0ms)); }), moeTimeout, "timeoutMs");
}

#ifndef MOE_HAVE_CUDA
TEST(NcclBootstrap, ABuildWithoutCudaSaysSo) {
  Group group(1);
  moeConfig_t config = MOE_CONFIG_INIT;
  moeComm_t comm = nullptr;
  EXPECT_EQ(moeCommInitNccl(&comm, group.comms[0], &config), moeUnsupported);
  EXPECT_NE(std::string(moeGetLastError()).find("this build of moecl has no CUDA"), std::string::npos);
}
#endif

TEST(NcclLibrary, AVersionThatIsTooOldIsRefused) {
  struct Case {
    int version;
    const char* text;
  };
  for (Case one : {Case{21903, "is 2.19.3; moecl needs 2.20.0 or newer"}, Case{2804, "is 2.8.4; moecl needs"}}) {
    simNcclSetVersion(one.version);
    Outcome outcome = outcomeOf([] { loadedNccl(); });
    simNcclSetVersion(22809);
    expectAll({outcome}, moeUnsupported, one.text);
  }
  simNcclSetVersion(22000);
  Outcome oldest = outcomeOf([] { loadedNccl(); });
  simNcclSetVersion(22809);
  expectAllSucceed({oldest});
}

TEST(NcclLibrary, AMissingFunctionIsNamed) {
  for (std::string missing : {"ncclGetVersion", "ncclCommGetAsyncError", "ncclAllGather"}) {
    auto find = [&](const char* name) { return missing == name ? nullptr : ::dlsym(RTLD_DEFAULT, name); };
    expectAll({outcomeOf([&] { findNccl(find); })}, moeUnsupported, "no NCCL with " + missing);
  }
}

}  // namespace
}  // namespace moe::test

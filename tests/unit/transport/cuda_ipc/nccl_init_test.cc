// SPDX-License-Identifier: Apache-2.0
// moeCommInitNccl from end to end, with stand-ins for NCCL and for CUDA's driver. The ranks themselves run on the host.
#include <gtest/gtest.h>

#include "moe.h"
#include "simnccl/simnccl.h"
#include "transport/cuda_ipc/cuda_stage.h"
#include "unit/transport/cuda_ipc/cuda_rank.h"

namespace moe {
namespace {

using namespace moe::test;

moeConfig_t hostConfig() {
  moeConfig_t config = MOE_CONFIG_INIT;
  config.maxTokensPerRank = 4, config.hidden = 8, config.numExperts = 4, config.maxTopk = 2;
  config.backend = moeBackendHost;
  config.timeoutMs = 20000;
  return config;
}

struct Result {
  moeResult_t code;
  std::string text;
};

class CudaIpcNcclInit : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!simulated()) GTEST_SKIP() << "needs the stand-in for libcuda.so.1";
  }

  // Each of `ranks` inits in a thread of its own; communicators are destroyed at once.
  static std::vector<Result> init(const std::vector<ncclComm*>& ranks,
                                  const std::function<void(int, moeConfig_t*)>& change) {
    std::vector<Result> results(ranks.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < ranks.size(); ++i) {
      threads.emplace_back([&, i] {
        moeConfig_t config = hostConfig();
        change(static_cast<int>(i), &config);
        moeComm_t comm = nullptr;
        results[i].code = moeCommInitNccl(&comm, ranks[i], &config);
        results[i].text = moeGetLastError();
        moeInfo_t info = MOE_INFO_INIT;
        if (results[i].code == moeSuccess) {
          EXPECT_EQ(moeGetInfo(comm, &info), moeSuccess);
          EXPECT_EQ(info.rank, static_cast<int>(i));
          EXPECT_EQ(info.nranks, static_cast<int>(ranks.size()));
        }
        EXPECT_EQ(moeCommDestroy(comm), moeSuccess);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return results;
  }
};

TEST_F(CudaIpcNcclInit, RanksMeetThroughNcclAndLeaveNothing) {
  std::vector<ncclComm*> nccl = simNcclMake(4);
  for (const Result& one : init(nccl, [](int rank, moeConfig_t*config) { config->device = rank % 2 ? rank : -1; })) {
    EXPECT_EQ(one.code, moeSuccess) << one.text;
  }
  // A thread that called NCCL may still be on its way out.
  EXPECT_TRUE(eventually([] { return liveThings() == 0; }));
  for (ncclComm* comm : nccl) simNcclDestroy(comm);
}

TEST_F(CudaIpcNcclInit, OneThreadDrivesSeveralRanksInAGroup) {
  std::vector<ncclComm*> nccl = simNcclMake(3);
  moeConfig_t config = hostConfig();
  moeComm_t comms[3] = {};
  ASSERT_EQ(moeGroupStart(), moeSuccess);
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(moeCommInitNccl(&comms[rank], nccl[rank], &config), moeSuccess) << moeGetLastError();
  }
  EXPECT_EQ(moeGroupEnd(), moeSuccess) << moeGetLastError();
  // The NCCL communicator is not needed any more.
  for (ncclComm* comm : nccl) simNcclDestroy(comm);
  for (moeComm_t comm : comms) EXPECT_EQ(moeCommDestroy(comm), moeSuccess) << moeGetLastError();
  EXPECT_TRUE(eventually([] { return liveThings() == 0; }));
}

TEST_F(CudaIpcNcclInit, AnotherDeviceThanNcclsIsRefusedOnAllRanks) {
  std::vector<ncclComm*> nccl = simNcclMake(2);
  std::vector<Result> results = init(nccl, [](int rank, moeConfig_t* config) {
    if (rank == 1) config->device = 3;
  });
  const std::string wanted =
      "config.device = 3, but the NCCL communicator's rank 1 is on CUDA device 1; pass that or -1";
  for (const Result& one : results) {
    EXPECT_EQ(one.code, moeInvalidArgument);
    EXPECT_TRUE(contains(one.text, wanted)) << one.text;
  }
  EXPECT_TRUE(contains(results[0].text, "rank 1 cannot take part")) << results[0].text;
  for (ncclComm* comm : nccl) simNcclDestroy(comm);
}

TEST_F(CudaIpcNcclInit, ConfigsAreComparedAsEver) {
  std::vector<ncclComm*> nccl = simNcclMake(2);
  for (const Result& one : init(nccl, [](int rank, moeConfig_t*config) { config->hidden += rank; })) {
    EXPECT_EQ(one.code, moeMismatch);
    EXPECT_TRUE(contains(one.text, "config.hidden differs (rank 0: 8, rank 1: 9)")) << one.text;
  }
  for (ncclComm* comm : nccl) simNcclDestroy(comm);
}

TEST_F(CudaIpcNcclInit, WhatCannotBeIsRefusedBeforeAnyWait) {
  moeConfig_t config = hostConfig();
  moeComm_t comm = nullptr;
  EXPECT_EQ(moeCommInitNccl(&comm, nullptr, &config), moeInvalidArgument);
  EXPECT_TRUE(contains(moeGetLastError(), "nccl is NULL")) << moeGetLastError();
  std::vector<ncclComm*> nccl = simNcclMake(1);
  EXPECT_EQ(moeCommInitNccl(nullptr, nccl[0], &config), moeInvalidArgument);
  simNcclSetVersion(21903);
  EXPECT_EQ(moeCommInitNccl(&comm, nccl[0], &config), moeUnsupported);
  simNcclSetVersion(22809);
  EXPECT_EQ(comm, nullptr);
  simNcclDestroy(nccl[0]);
}

TEST_F(CudaIpcNcclInit, DriverThatRefusesIsNamed) {
  std::vector<ncclComm*> nccl = simNcclMake(1);
  for (const char* call : {"cuStreamCreate", "cuMemHostAlloc", "cuMemAlloc_v2", "cuMemcpyHtoDAsync_v2",
                           "cuMemcpyDtoHAsync_v2", "cuStreamQuery"}) {
    makeFail(call, 801);
    std::vector<Result> results = init(nccl, [](int, moeConfig_t*) {});
    makeFail(call, 0);
    EXPECT_EQ(results[0].code, moeDeviceError) << call;
    std::string name = std::string(call).substr(0, std::string(call).find('_'));
    EXPECT_TRUE(contains(results[0].text, name) && contains(results[0].text, "GPU-1010")) << results[0].text;
    EXPECT_TRUE(eventually([] { return liveThings() == 0; })) << call;
  }
  simNcclDestroy(nccl[0]);
}

// In a process of its own: what the GPU never lets go of stays allocated.
TEST_F(CudaIpcNcclInit, WorkThatNeverEndsIsATimeoutAndIsNotFreed) {
  ForkedRanks ranks(1, [](Bootstrap&) {
    std::vector<ncclComm*> nccl = simNcclMake(1);
    makeTrouble(2);
    std::vector<Result> results = init(nccl, [](int, moeConfig_t* config) { config->timeoutMs = 200; });
    makeTrouble(0);
    EXPECT_EQ(results[0].code, moeTimeout);
    EXPECT_TRUE(contains(results[0].text, "found no end of the NCCL all-gather")) << results[0].text;
    EXPECT_GT(liveThings(), 0);
  });
  ranks.expectSuccess();
}

}  // namespace
}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
#include "transport/cuda_ipc/cuda_ipc_transport.h"

#include <gtest/gtest.h>

#include "base/settings.h"
#include "unit/transport/cuda_ipc/cuda_rank.h"

namespace moe {
namespace {

using namespace moe::test;

class CudaIpcRanks : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (countGpus() < GetParam()) GTEST_SKIP() << "needs " << GetParam() << " GPUs";
  }
};
INSTANTIATE_TEST_SUITE_P(Sizes, CudaIpcRanks, ::testing::Values(1, 2, 4));

TEST_P(CudaIpcRanks, ThreadsShareOneMappingOfEachWindow) {
  std::vector<std::byte*> bases(static_cast<size_t>(GetParam()));
  runThreads(GetParam(), [&](Bootstrap& bootstrap) {
    CudaRank me(bootstrap);
    bases[static_cast<size_t>(me.rank)] = me.window.base;
    me.connect(bootstrap);
    me.expectAllReached("local");
    for (int r = 0; r < me.nranks; ++r) EXPECT_EQ(me.peer(r).window, bases[static_cast<size_t>(r)]);
    me.expectWordsCross(bootstrap);
    me.transport->announce(PeerState::kLeft);
    for (int r = 0; r < me.nranks; ++r) {
      if (r != me.rank) {
        EXPECT_TRUE(me.sees(r, PeerState::kLeft));
      }
    }
    EXPECT_FALSE(me.states->anyLost());
  });
  EXPECT_EQ(liveThings(), 0);
}

TEST_P(CudaIpcRanks, ProcessesMapEachOthersWindows) {
  ForkedRanks ranks(GetParam(), [](Bootstrap& bootstrap) {
    {
      // Sizes may differ.
      CudaRank me(bootstrap, bootstrap.rank(), 5000 + (static_cast<size_t>(bootstrap.rank()) << 22));
      me.connect(bootstrap);
      me.expectAllReached("cuda_ipc");
      me.expectWordsCross(bootstrap);
      me.transport->announce(PeerState::kLeft);
      for (int r = 0; r < me.nranks; ++r) {
        if (r != me.rank) {
          EXPECT_TRUE(me.sees(r, PeerState::kLeft));
        }
      }
      bootstrap.allGather("", patience());
      EXPECT_FALSE(me.states->anyLost());
    }
    EXPECT_EQ(liveThings(), 0);
  });
  ranks.expectSuccess();
}

class CudaIpc : public ::testing::Test {
 protected:
  void SetUp() override {
    if (countGpus() < 2) GTEST_SKIP() << "needs 2 GPUs";
  }
};

TEST_F(CudaIpc, KilledRankIsDeadAndItsWindowStaysUsable) {
  ForkedRanks ranks(2, [](Bootstrap& bootstrap) {
    CudaRank me(bootstrap);
    me.connect(bootstrap);
    if (me.rank == 1) ::raise(SIGKILL);
    EXPECT_TRUE(me.sees(1, PeerState::kDead));
    me.write(me.peer(1).window, 0, 7);
    EXPECT_EQ(me.read(me.peer(1).window, 0), 7u);
  });
  ranks.expectSuccess(1);
}

TEST_F(CudaIpc, DestructionWithoutAWordIsAnAbort) {
  runThreads(2, [](Bootstrap& bootstrap) {
    CudaRank me(bootstrap);
    me.connect(bootstrap);
    if (me.rank == 1) return;
    EXPECT_TRUE(me.sees(1, PeerState::kAborted));
    // Memory of a rank that is gone stays mapped as long as a peer holds it.
    me.write(me.peer(1).window, 0, 7);
  });
  EXPECT_EQ(liveThings(), 0);
}

TEST_F(CudaIpc, ThreadsShareAGpuOnlyWhenAllowed) {
  runThreads(2, [](Bootstrap& bootstrap) {
    CudaRank me(bootstrap, 0);
    me.connect(bootstrap);
    if (settings().allowSharedGpu != 0) {
      me.expectAllReached("local");
      me.expectWordsCross(bootstrap);
    } else {
      const Peer& other = me.peer(1 - me.rank);
      EXPECT_EQ(other.reach, Reach::kNone);
      EXPECT_TRUE(contains(other.reason, cat("because both run on ", me.gpu->name(), "; give each rank its own GPU")))
          << other.reason;
      EXPECT_TRUE(contains(other.reason, "MOE_ALLOW_SHARED_GPU=1"));
    }
    me.transport->announce(PeerState::kLeft);
  });
}

TEST_F(CudaIpc, ProcessesNeverShareAGpu) {
  ForkedRanks ranks(2, [](Bootstrap& bootstrap) {
    CudaRank me(bootstrap, 0);
    me.connect(bootstrap);
    EXPECT_EQ(me.peer(1 - me.rank).reach, Reach::kNone);
    EXPECT_TRUE(contains(me.peer(1 - me.rank).reason, "both run on GPU-")) << me.peer(1 - me.rank).reason;
    bootstrap.allGather("", patience());
  });
  ranks.expectSuccess();
}

TEST_F(CudaIpc, DeviceThatDoesNotExistIsNamed) {
  auto states = std::make_shared<PeerStates>(1);
  Error error = errorOf([&] { makeCudaIpcTransport(0, 1, 1000, states)->allocate(1); });
  EXPECT_EQ(error.code(), moeInvalidArgument);
  EXPECT_TRUE(contains(error.text(), "device 1000 does not exist")) << error.text();
  EXPECT_EQ(errorOf([&] { makeCudaIpcTransport(0, 1, 0, states)->allocate(0); }).code(), moeSuccess)
      << "room for the probe is always needed";
}

// What goes wrong here can be made to go wrong by the stand-in alone.
class CudaIpcFaults : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!simulated()) GTEST_SKIP() << "needs the stand-in for libcuda.so.1";
  }

  // Two processes; `fault` strikes rank 1 after it has its window. What each then says of the other: {reach, reason}.
  static void connectTwo(const std::function<void()>& fault, const std::function<void(CudaRank&)>& check) {
    ForkedRanks ranks(2, [&](Bootstrap& bootstrap) {
      CudaRank me(bootstrap);
      if (me.rank == 1) fault();
      me.connect(bootstrap);
      check(me);
      bootstrap.allGather("", patience());
    });
    ranks.expectSuccess();
  }
  static void expectNamed(const Peer& peer, const std::vector<std::string>& parts) {
    EXPECT_EQ(peer.reach, Reach::kNone);
    for (const std::string& part : parts) EXPECT_TRUE(contains(peer.reason, part)) << part << " in " << peer.reason;
  }
  const std::string kGpu0 = "GPU-10101010-1010-1010-1010-101010101010";
  const std::string kGpu1 = "GPU-11111111-1111-1111-1111-111111111111";
};

TEST_F(CudaIpcFaults, DriverThatRefusesIsNamed) {
  struct Case {
    const char* call;
    const char* text;
  };
  for (Case one : {Case{"cuMemImportFromShareableHandle", "cuMemImportFromShareableHandle"},
                   Case{"cuMemAddressReserve", "cuMemAddressReserve"}, Case{"cuMemMap", "cuMemMap"},
                   Case{"cuMemSetAccess", "cuMemSetAccess"}, Case{"cuDeviceCanAccessPeer", "cuDeviceCanAccessPeer"}}) {
    connectTwo([&] { makeFail(one.call, 801); },
               [&](CudaRank& me) {
                 if (me.rank == 0) {
                   EXPECT_EQ(me.peer(1).reach, Reach::kMapped) << me.peer(1).reason;
                 } else {
                   expectNamed(me.peer(0), {kGpu0, kGpu1, one.text});
                   if (std::string(one.call) != "cuDeviceCanAccessPeer") expectNamed(me.peer(0), {"CUDA_ERROR_801"});
                 }
               });
  }
}

TEST_F(CudaIpcFaults, DataThatDoesNotGetThroughIsNoticedOnBothSides) {
  connectTwo([] { makeTrouble(1); },
             [&](CudaRank& me) {
               expectNamed(me.peer(1 - me.rank), {kGpu0, kGpu1, "data does not get through",
                                                  me.rank == 0 ? "what the peer wrote to this rank is 0"
                                                               : "what this rank wrote to the peer"});
             });
}

TEST_F(CudaIpcFaults, CopyThatNeverEndsIsATimeoutOnAllRanks) {
  ForkedRanks ranks(2, [](Bootstrap& bootstrap) {
    CudaRank me(bootstrap);
    if (me.rank == 1) makeTrouble(2);
    WaitLimit limit(Deadline::in(milliseconds(1500)));
    EXPECT_EQ(errorOf([&] { me.transport->connect(me.window, bootstrap, limit); }).code(), moeTimeout);
  });
  ranks.expectSuccess();
}

TEST_F(CudaIpcFaults, FailureOfOneRankAloneReachesAll) {
  ForkedRanks ranks(2, [](Bootstrap& bootstrap) {
    CudaRank me(bootstrap);
    if (me.rank == 1) makeFail("cuMemExportToShareableHandle", 304);
    Error error = errorOf([&] { me.connect(bootstrap); });
    EXPECT_EQ(error.code(), moeDeviceError);
    EXPECT_TRUE(contains(error.text(), "rank 1 could not share its GPU's memory: cuMemExportToShareableHandle on GPU-"))
        << error.text();
  });
  ranks.expectSuccess();
}

TEST_F(CudaIpcFaults, FailedAllocationLeavesNothing) {
  auto states = std::make_shared<PeerStates>(1);
  for (const char* call :
       {"cuDeviceGetAttribute", "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve", "cuMemMap",
        "cuMemSetAccess", "cuMemHostAlloc", "cuStreamCreate", "cuMemsetD8Async", "cuStreamQuery"}) {
    makeFail(call, 2);
    Error error = errorOf([&] { makeCudaIpcTransport(0, 1, 1, states)->allocate(1); });
    makeFail(call, 0);
    EXPECT_EQ(error.code(), moeOutOfMemory) << call;
    EXPECT_TRUE(contains(error.text(), call) && contains(error.text(), kGpu1)) << error.text();
    EXPECT_EQ(liveThings(), 0) << call;
  }
}

}  // namespace
}  // namespace moe

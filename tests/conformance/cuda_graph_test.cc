// SPDX-License-Identifier: Apache-2.0
// What may and what may not be captured in a CUDA graph. Whether replays are exact, gpu_hash_check --graphs 1 shows,
// and the Exact cases with CONFORMANCE_GRAPHS=1.
#include <gtest/gtest.h>

#include "conformance/cuda_on_stream.h"

namespace moetest {
namespace {

testing::AssertionResult errorSays(const std::string& words) {
  std::string text = moeGetLastError();
  if (text.find(words) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "the error does not say \"" << words << "\": " << text;
}

class Graphs : public OnStream {
 protected:
  void begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    ASSERT_EQ(cudaStreamBeginCapture(stream_, mode), cudaSuccess);
  }
  // Ends a capture and runs what it has caught, if that is wanted.
  cudaError_t end(bool run) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t made = nullptr;
    cudaError_t error = cudaStreamEndCapture(stream_, &graph);
    if (error != cudaSuccess) return error;
    if (run) error = cudaGraphInstantiate(&made, graph, 0);
    if (run && error == cudaSuccess) error = cudaGraphLaunch(made, stream_);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
    if (made) cudaGraphExecDestroy(made);
    cudaGraphDestroy(graph);
    return error;
  }
};

// Field case 80: nothing is left to be set up by the first call.
TEST_P(Graphs, FirstCallsAreCaptured) {
  LocalComms comms(1, config_, *GetParam());
  ASSERT_TRUE(comms.ok());
  SimpleCall call(comms[0], config_, 0, 1, *GetParam());
  begin(cudaStreamCaptureModeGlobal);
  EXPECT_EQ(moeDispatch(comms[0], &call.dispatch, call.handle.get(), stream_), moeSuccess) << moeGetLastError();
  EXPECT_EQ(moeCombine(comms[0], &call.combine, call.handle.get(), stream_), moeSuccess) << moeGetLastError();
  ASSERT_EQ(end(true), cudaSuccess);
  EXPECT_EQ(call.wrongOutput(), "");
  EXPECT_EQ(call.runBoth(1), "") << "calls that are not captured still work";
}

// Field case 80.
TEST_P(Graphs, NoCommunicatorIsMadeInACapture) {
  moeUniqueId_t id;
  ASSERT_EQ(moeGetUniqueId(&id), moeSuccess) << moeGetLastError();
  begin(cudaStreamCaptureModeGlobal);
  moeComm_t comm = nullptr;
  EXPECT_EQ(moeCommInit(&comm, 1, &id, 0, &config_), moeInvalidUsage);
  EXPECT_TRUE(errorSays("capturing a graph"));
  end(false);
  cudaGetLastError();
  LocalComms comms(1, config_, *GetParam());
  ASSERT_TRUE(comms.ok());
  SimpleCall call(comms[0], config_, 0, 1, *GetParam());
  EXPECT_EQ(call.runBoth(), "");
}

// Field case 81.
TEST_P(Graphs, SizesAreNotReadInACapture) {
  LocalComms comms(1, config_, *GetParam());
  ASSERT_TRUE(comms.ok());
  SimpleCall call(comms[0], config_, 0, 1, *GetParam());
  call.dispatch.flags = MOE_SEND_HALF;
  begin();
  EXPECT_EQ(moeDispatch(comms[0], &call.dispatch, call.handle.get(), stream_), moeSuccess) << moeGetLastError();
  moeSizes_t sizes{};
  EXPECT_EQ(moeGetSizes(comms[0], call.handle.get(), &sizes), moeInvalidUsage);
  EXPECT_TRUE(errorSays("capturing a graph"));
  EXPECT_EQ(moeWait(comms[0], call.handle.get(), &call.receive, stream_), moeSuccess) << moeGetLastError();
  EXPECT_EQ(moeCombine(comms[0], &call.combine, call.handle.get(), stream_), moeSuccess) << moeGetLastError();
  ASSERT_EQ(end(true), cudaSuccess) << "the refused call has spoiled the capture";
  EXPECT_EQ(call.wrongOutput(), "");
  EXPECT_EQ(moeGetSizes(comms[0], call.handle.get(), &sizes), moeSuccess) << moeGetLastError();
  EXPECT_EQ(sizes.rows, config_.maxTokensPerRank);
}

TEST_P(Graphs, ViewsAreRefused) {
  LocalComms comms(1, config_, *GetParam());
  ASSERT_TRUE(comms.ok());
  SimpleCall call(comms[0], config_, 0, 1, *GetParam());
  call.receive.rows = nullptr;
  EXPECT_EQ(call.runDispatch(), moeSuccess) << "before the first capture";
  begin();
  EXPECT_EQ(moeDispatch(comms[0], &call.dispatch, call.handle.get(), stream_), moeInvalidUsage);
  EXPECT_TRUE(errorSays("views"));
  ASSERT_EQ(end(true), cudaSuccess);
  moeStats_t stats = MOE_STATS_INIT;
  ASSERT_EQ(moeGetStats(comms[0], &stats), moeSuccess) << moeGetLastError();
  EXPECT_EQ(stats.dispatches, 1u) << "a call that is refused in a capture becomes part of nothing";
  EXPECT_EQ(call.runDispatch(), moeInvalidUsage) << "after it, replays move views";
  EXPECT_EQ(call.runBoth(2), "");
}

TEST_P(Graphs, ABrokenCaptureIsNamed) {
  LocalComms comms(1, config_, *GetParam());
  ASSERT_TRUE(comms.ok());
  SimpleCall call(comms[0], config_, 0, 1, *GetParam());
  begin();
  EXPECT_NE(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(moeDispatch(comms[0], &call.dispatch, call.handle.get(), stream_), moeInvalidUsage);
  EXPECT_TRUE(errorSays("capture"));
  end(false);
  cudaGetLastError();
  EXPECT_EQ(call.runBoth(1), "");
}

INSTANTIATE_TEST_SUITE_P(Gpu, Graphs, testing::Values(&cudaBackend(1)), backendName);

class GraphsOfTwo : public OnBackend<const Backend*> {};

// Field case 82: rank 0 replays a graph of all its tokens, rank 1 makes calls of three.
TEST_P(GraphsOfTwo, RanksDifferInSize) {
  constexpr int64_t kTokens[] = {64, 3};
  moeConfig_t config = simpleConfig(kTokens[0], 128, 8, 2);
  LocalComms comms(2, config, *GetParam());
  ASSERT_TRUE(comms.ok()) << comms.error();
  std::shared_ptr<Device> devices[] = {GetParam()->device(0), GetParam()->device(1)};
  std::string wrong[2];
  runThreads(2, [&](int rank) {
    SimpleCall call(comms[rank], config, rank, 2, *GetParam());
    Device& device = *devices[rank];
    call.dispatch.numTokens = kTokens[rank];
    auto both = [&] {
      moeResult_t result = moeDispatch(comms[rank], &call.dispatch, call.handle.get(), device.stream());
      return result != moeSuccess ? result : moeCombine(comms[rank], &call.combine, call.handle.get(), device.stream());
    };
    for (int round = 0; round < 20 && wrong[rank].empty(); ++round) {
      call.reset(round);
      call.dispatch.numTokens = kTokens[rank];
      moeResult_t result = moeSuccess;
      if (rank == 1) {
        result = both();
      } else if (!device.replay(both, &result)) {
        wrong[rank] = "no graph was made";
      }
      result = outcomeOf(result, comms[rank], device);
      if (result != moeSuccess) wrong[rank] = SimpleCall::describe("round", result);
      if (wrong[rank].empty()) wrong[rank] = call.wrongOutput(kTokens[rank]);
    }
  });
  EXPECT_EQ(wrong[0], "");
  EXPECT_EQ(wrong[1], "");
}

INSTANTIATE_TEST_SUITE_P(Gpu, GraphsOfTwo, testing::Values(&cudaBackend(2)), backendName);

}  // namespace
}  // namespace moetest

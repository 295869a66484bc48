// SPDX-License-Identifier: Apache-2.0
// Operations happen in their stream: after what was put into it before them, and whatever the host does meanwhile.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "conformance/cuda_on_stream.h"

namespace moetest {
namespace {

constexpr auto kDelay = std::chrono::milliseconds(100);

void sleepInStream(cudaStream_t stream) {
  ASSERT_EQ(cudaLaunchHostFunc(
                stream, [](void*) { std::this_thread::sleep_for(kDelay); }, nullptr),
            cudaSuccess);
}

class Streams : public OnStream {
 protected:
  void enqueue(SimpleCall& call) {
    ASSERT_EQ(moeDispatch(call.comm, &call.dispatch, call.handle.get(), stream_), moeSuccess) << moeGetLastError();
    ASSERT_EQ(moeCombine(call.comm, &call.combine, call.handle.get(), stream_), moeSuccess) << moeGetLastError();
  }
};

// Field case 79.
TEST_P(Streams, IdsAreWrittenByWhatComesBefore) {
  LocalComms comms(1, config_, *GetParam());
  ASSERT_TRUE(comms.ok()) << comms.error();
  SimpleCall call(comms[0], config_, 0, 1, *GetParam());
  size_t bytes = static_cast<size_t>(config_.maxTokensPerRank * config_.maxTopk) * 8;
  auto* ids = const_cast<void*>(call.dispatch.ids);
  void* right = nullptr;
  ASSERT_EQ(cudaHostAlloc(&right, bytes, cudaHostAllocDefault), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(right, ids, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
  ASSERT_EQ(cudaMemset(ids, 0xff, bytes), cudaSuccess) << "nobody's, until the stream has written them";
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  sleepInStream(stream_);
  ASSERT_EQ(cudaMemcpyAsync(ids, right, bytes, cudaMemcpyHostToDevice, stream_), cudaSuccess);
  enqueue(call);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(call.wrongOutput(), "");
  cudaFreeHost(right);
}

// Field case 78: the handle, the arguments and small pinned memory go while the operations are still queued.
TEST_P(Streams, HandlesMayGoBeforeTheirOperationsRun) {
  LocalComms comms(1, config_, *GetParam());
  ASSERT_TRUE(comms.ok()) << comms.error();
  SimpleCall call(comms[0], config_, 0, 1, *GetParam());
  moeInfo_t info = MOE_INFO_INIT;
  ASSERT_EQ(moeGetInfo(comms[0], &info), moeSuccess);
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, info.handleBytes), cudaSuccess);
  moeHandle_t handle = nullptr;
  ASSERT_EQ(moeHandleInit(comms[0], memory, info.handleBytes, &handle), moeSuccess) << moeGetLastError();
  sleepInStream(stream_);
  ASSERT_EQ(moeDispatch(comms[0], &call.dispatch, handle, stream_), moeSuccess) << moeGetLastError();
  ASSERT_EQ(moeCombine(comms[0], &call.combine, handle, stream_), moeSuccess) << moeGetLastError();
  ASSERT_EQ(moeHandleDestroy(handle), moeSuccess);
  std::memset(static_cast<void*>(&call.input), 0xee, sizeof call.input);
  std::memset(static_cast<void*>(&call.receivedRows), 0xee, sizeof call.receivedRows);
  std::vector<void*> blocks(1000);
  for (void*& block : blocks) {
    ASSERT_EQ(cudaHostAlloc(&block, 64, cudaHostAllocDefault), cudaSuccess);
    std::memset(block, 0xee, 64);
  }
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(call.wrongOutput(), "");
  for (void* block : blocks) cudaFreeHost(block);
  cudaFree(memory);
}

INSTANTIATE_TEST_SUITE_P(Gpu, Streams, testing::Values(&cudaBackend(1)), backendName);

}  // namespace
}  // namespace moetest

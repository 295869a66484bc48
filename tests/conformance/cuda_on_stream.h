// SPDX-License-Identifier: Apache-2.0
// A test of one rank on a GPU, with a stream of its own. Only in builds with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "conformance/cuda_backend.h"
#include "conformance/on_backend.h"
#include "conformance/simple_call.h"
#include "conformance/world.h"

namespace moetest {

class OnStream : public OnBackend<const Backend*> {
 protected:
  void SetUp() override {
    OnBackend::SetUp();
    if (IsSkipped()) return;
    config_ = simpleConfig();
    GetParam()->configure(&config_, 0, 1);
    ASSERT_EQ(cudaSetDevice(config_.device), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    if (stream_) cudaStreamDestroy(stream_);
  }

  moeConfig_t config_ = MOE_CONFIG_INIT;
  cudaStream_t stream_ = nullptr;
};

}  // namespace moetest

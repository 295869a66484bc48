// SPDX-License-Identifier: Apache-2.0
// Small copies between the host and GPU windows, at init. They go through a stream of their own: the application's work
// neither waits for them nor is waited for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/wait_limit.h"
#include "transport/cuda_ipc/gpu.h"

namespace moe {

// One thread.
class CopyQueue {
 public:
  // `words`: how many words may be under way.
  CopyQueue(std::shared_ptr<const Gpu> gpu, size_t words);
  ~CopyQueue();
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  // `memory` stays as long as a copy could touch it, even if the queue is given up with copies under way.
  void keep(std::shared_ptr<void> memory) { kept_.push_back(std::move(memory)); }

  // These start something and throw moeDeviceError.
  void zero(std::byte* at, size_t bytes);
  void write(std::byte* to, uint64_t word);
  void read(const std::byte* from);

  // Waits for all that was started; result: the words that were read, in order. Throws moeDeviceError, moeTimeout and
  // moeAborted.
  std::vector<uint64_t> finish(const WaitLimit& limit);
  // After an error: waits likewise, and forgets what was read and what went wrong.
  void discard(const WaitLimit& limit);

 private:
  CUresult settle(const WaitLimit& limit);
  uint64_t* nextWord();

  const std::shared_ptr<const Gpu> gpu_;
  const size_t capacity_;
  CUstream stream_ = nullptr;
  uint64_t* staging_ = nullptr;  // pinned, or copies to the host would wait without a limit
  size_t used_ = 0;
  std::vector<size_t> reads_;
  bool busy_ = false;
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace moe

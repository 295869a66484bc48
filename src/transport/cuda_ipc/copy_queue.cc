// SPDX-License-Identifier: Apache-2.0
#include "transport/cuda_ipc/copy_queue.h"

#include <thread>

#include "base/error.h"
#include "base/log.h"

namespace moe {
namespace {

// Init is not in such a hurry that it should burn a core.
constexpr std::chrono::microseconds kPollPause{20};

CUdeviceptr addressOf(const std::byte* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

}  // namespace

CopyQueue::CopyQueue(std::shared_ptr<const Gpu> gpu, size_t words) : gpu_(std::move(gpu)), capacity_(words) {
  Gpu::Current current(*gpu_);
  void* staging = nullptr;
  gpu_->check(driver().memHostAlloc(&staging, words * sizeof(uint64_t), CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc");
  CUresult made = driver().streamCreate(&stream_, CU_STREAM_NON_BLOCKING);
  if (made != CUDA_SUCCESS) gpu_->note(driver().memFreeHost(staging), "cuMemFreeHost");
  gpu_->check(made, "cuStreamCreate");
  staging_ = static_cast<uint64_t*>(staging);
}

CopyQueue::~CopyQueue() {
  try {
    if (busy_) {
      // What copies may still touch must never be freed, nor its GPU's context.
      kept_.push_back(std::const_pointer_cast<Gpu>(gpu_));
      new std::vector<std::shared_ptr<void>>(std::move(kept_));
      log(LogLevel::kWarn, "copies on ", gpu_->name(), " were given up while under way; their memory stays allocated");
      return;
    }
    Gpu::Current current(*gpu_);
    gpu_->note(driver().streamDestroy(stream_), "cuStreamDestroy");
    gpu_->note(driver().memFreeHost(staging_), "cuMemFreeHost");
  } catch (const std::exception& error) {
    log(LogLevel::kWarn, error.what());
  }
}

uint64_t* CopyQueue::nextWord() {
  if (used_ == capacity_) fail(moeInternalError, "more than ", capacity_, " words were put into a queue of copies");
  return staging_ + used_++;
}

void CopyQueue::zero(std::byte* at, size_t bytes) {
  Gpu::Current current(*gpu_);
  gpu_->check(driver().memsetD8Async(addressOf(at), 0, bytes, stream_), "cuMemsetD8Async");
  busy_ = true;
}

void CopyQueue::write(std::byte* to, uint64_t word) {
  Gpu::Current current(*gpu_);
  uint64_t* staged = nextWord();
  *staged = word;
  gpu_->check(driver().memcpyHtoDAsync(addressOf(to), staged, sizeof(word), stream_), "cuMemcpyHtoDAsync");
  busy_ = true;
}

void CopyQueue::read(const std::byte* from) {
  Gpu::Current current(*gpu_);
  uint64_t* staged = nextWord();
  *staged = 0;
  gpu_->check(driver().memcpyDtoHAsync(staged, addressOf(from), sizeof(*staged), stream_), "cuMemcpyDtoHAsync");
  busy_ = true;
  reads_.push_back(used_ - 1);
}

CUresult CopyQueue::settle(const WaitLimit& limit) {
  Gpu::Current current(*gpu_);
  CUresult state = CUDA_ERROR_NOT_READY;
  while ((state = driver().streamQuery(stream_)) == CUDA_ERROR_NOT_READY) {
    limit.throwIfAborted();
    if (limit.passed()) {
      fail(moeTimeout, gpu_->name(), " did not finish a small copy in time; see whether other work holds the GPU");
    }
    std::this_thread::sleep_for(kPollPause);
  }
  // An error, too, says that nothing is under way any more.
  busy_ = false;
  return state;
}

std::vector<uint64_t> CopyQueue::finish(const WaitLimit& limit) {
  gpu_->check(settle(limit), "cuStreamQuery after a copy");
  std::vector<uint64_t> words;
  for (size_t index : reads_) words.push_back(staging_[index]);
  reads_.clear();
  used_ = 0;
  return words;
}

void CopyQueue::discard(const WaitLimit& limit) {
  settle(limit);
  reads_.clear();
  used_ = 0;
}

}  // namespace moe

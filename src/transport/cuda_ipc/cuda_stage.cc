// SPDX-License-Identifier: Apache-2.0
#include "transport/cuda_ipc/cuda_stage.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/deadline.h"
#include "base/error.h"
#include "base/log.h"
#include "transport/cuda_ipc/gpu.h"

namespace moe {
namespace {

// Where the answer begins is rounded up to this; and pieces of this size never need new memory.
constexpr size_t kLeastBytes = 4096;
// An exchange that is given up may be about to end: after an error, say, that came up while it ran.
constexpr std::chrono::milliseconds kGrace{100};

class CudaStage final : public DeviceStage {
 public:
  explicit CudaStage(int device) : gpu_(Gpu::open(device)) {
    Gpu::Current current(*gpu_);
    gpu_->check(driver().streamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  }
  ~CudaStage() override;

  void* stream() const override { return stream_; }
  void onDevice(const std::function<void()>& body) override {
    Gpu::Current current(*gpu_);
    body();
  }
  Room begin(std::string_view piece, size_t receiveBytes) override;
  void fetch() override;
  bool idle() override;
  std::string answer() const override { return {reinterpret_cast<const char*>(host_) + answerAt_, answerBytes_}; }

 private:
  // Whether anything is under way, after some patience. Errors end it, too.
  bool working();
  void reserve(size_t bytes);
  void release();

  const std::shared_ptr<const Gpu> gpu_;
  CUstream stream_ = nullptr;
  // The same bytes twice: the piece, and from answerAt_ on the answer. Pinned, or copies would not be asynchronous.
  std::byte* host_ = nullptr;
  CUdeviceptr memory_ = 0;
  size_t capacity_ = 0;
  size_t answerAt_ = 0, answerBytes_ = 0;
  bool busy_ = false;
};

CudaStage::~CudaStage() {
  try {
    // With work under way its memory must never be freed, nor the GPU's context.
    if (working()) {
      new std::shared_ptr<const Gpu>(gpu_);
      log(LogLevel::kWarn, "an exchange on ", gpu_->name(), " was given up while under way; its ", 2 * capacity_,
          " bytes stay allocated");
      return;
    }
    Gpu::Current current(*gpu_);
    release();
    gpu_->note(driver().streamDestroy(stream_), "cuStreamDestroy");
  } catch (const std::exception& error) {
    log(LogLevel::kWarn, error.what());
  }
}

DeviceStage::Room CudaStage::begin(std::string_view piece, size_t receiveBytes) {
  Gpu::Current current(*gpu_);
  answerAt_ = (piece.size() + kLeastBytes - 1) / kLeastBytes * kLeastBytes;
  answerBytes_ = receiveBytes;
  reserve(answerAt_ + answerBytes_);
  std::memcpy(host_, piece.data(), piece.size());
  gpu_->check(driver().memcpyHtoDAsync(memory_, host_, piece.size(), stream_), "cuMemcpyHtoDAsync");
  busy_ = true;
  return {reinterpret_cast<void*>(memory_), reinterpret_cast<void*>(memory_ + answerAt_)};
}

void CudaStage::fetch() {
  Gpu::Current current(*gpu_);
  gpu_->check(driver().memcpyDtoHAsync(host_ + answerAt_, memory_ + answerAt_, answerBytes_, stream_),
              "cuMemcpyDtoHAsync");
  busy_ = true;
}

bool CudaStage::idle() {
  Gpu::Current current(*gpu_);
  CUresult state = driver().streamQuery(stream_);
  if (state == CUDA_ERROR_NOT_READY) return false;
  // An error, too, says that nothing is under way any more.
  busy_ = false;
  gpu_->check(state, "cuStreamQuery after an exchange");
  return true;
}

bool CudaStage::working() {
  Deadline grace = Deadline::in(kGrace);
  while (busy_) {
    taking([this] { return idle(); });
    if (!busy_ || grace.passed()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return busy_;
}

// The last exchange is over.
void CudaStage::reserve(size_t bytes) {
  if (bytes <= capacity_) return;
  release();
  size_t wanted = std::max(bytes, 2 * kLeastBytes);
  void* host = nullptr;
  gpu_->check(driver().memHostAlloc(&host, wanted, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc");
  host_ = static_cast<std::byte*>(host);
  gpu_->check(driver().memAlloc(&memory_, wanted), "cuMemAlloc");
  capacity_ = wanted;
}

void CudaStage::release() {
  if (memory_ != 0) gpu_->note(driver().memFree(memory_), "cuMemFree");
  if (host_) gpu_->note(driver().memFreeHost(host_), "cuMemFreeHost");
  memory_ = 0;
  host_ = nullptr;
  capacity_ = 0;
}

}  // namespace

std::shared_ptr<DeviceStage> makeCudaStage(int device) { return std::make_shared<CudaStage>(device); }

}  // namespace moe

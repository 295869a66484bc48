// SPDX-License-Identifier: Apache-2.0
#include "transport/cuda_ipc/device_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include "unit/transport/cuda_ipc/cuda_rank.h"

namespace moe {
namespace {

using namespace moe::test;

class CudaIpcMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cudaDeviceCount() < 1) GTEST_SKIP() << "needs a GPU";
    gpu_ = Gpu::open(0);
  }
  Error errorOfImport(const FileDescriptor& descriptor, size_t bytes) {
    return errorOf([&] { DeviceMemory::import(gpu_, descriptor, bytes); });
  }
  std::shared_ptr<const Gpu> gpu_;
};

TEST_F(CudaIpcMemory, IsZeroedAndRoundedUp) {
  auto memory = DeviceMemory::create(gpu_, 1);
  EXPECT_GE(memory->bytes(), 4096u);
  CopyQueue queue(gpu_, 2);
  queue.read(memory->base());
  queue.read(memory->base() + memory->bytes() - 8);
  EXPECT_EQ(queue.finish(patience()), (std::vector<uint64_t>{0, 0}));
}

TEST_F(CudaIpcMemory, ImportIsTheSameMemory) {
  auto memory = DeviceMemory::create(gpu_, 1);
  auto again = DeviceMemory::import(gpu_, memory->exportDescriptor(), memory->bytes());
  EXPECT_NE(again->base(), memory->base());
  CopyQueue queue(gpu_, 2);
  queue.write(again->base(), 42);
  queue.read(memory->base());
  EXPECT_EQ(queue.finish(patience()), std::vector<uint64_t>{42});
}

TEST_F(CudaIpcMemory, ImportRefusesWhatCannotBeRight) {
  auto memory = DeviceMemory::create(gpu_, 1);
  FileDescriptor exported = memory->exportDescriptor();
  EXPECT_EQ(errorOfImport(exported, 0).code(), moeMismatch);
  EXPECT_EQ(errorOfImport(exported, memory->bytes() + 8).code(), moeMismatch);
  EXPECT_EQ(errorOfImport(exported, SIZE_MAX).code(), moeMismatch);
  Error larger = errorOfImport(exported, 2 * memory->bytes());
  EXPECT_EQ(larger.code(), moeDeviceError);
  EXPECT_TRUE(contains(larger.text(), "cuMemMap on ")) << larger.text();
  Error foreign = errorOfImport(FileDescriptor(::open("/dev/null", O_RDWR | O_CLOEXEC)), memory->bytes());
  EXPECT_EQ(foreign.code(), moeDeviceError);
  EXPECT_TRUE(contains(foreign.text(), "cuMemImportFromShareableHandle on ")) << foreign.text();
}

TEST_F(CudaIpcMemory, RefusesSizesThatNoGpuHas) {
  EXPECT_EQ(errorOf([&] { DeviceMemory::create(gpu_, 0); }).code(), moeInvalidArgument);
  EXPECT_EQ(errorOf([&] { DeviceMemory::create(gpu_, SIZE_MAX); }).code(), moeOutOfMemory);
}

TEST_F(CudaIpcMemory, DevicesHaveNames) {
  EXPECT_FALSE(cudaDeviceName(0).empty());
  EXPECT_EQ(errorOf([] { cudaDeviceName(-1); }).code(), moeInvalidArgument);
  EXPECT_EQ(errorOf([] { cudaDeviceName(cudaDeviceCount()); }).code(), moeInvalidArgument);
}

}  // namespace
}  // namespace moe

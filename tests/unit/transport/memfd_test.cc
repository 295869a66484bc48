// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/memfd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "unit/transport/test_ranks.h"

namespace moe {
namespace {

size_t pageBytes() { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }

FileDescriptor plainMemfd(size_t bytes, int seals = 0) {
  FileDescriptor memory(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(memory.get(), static_cast<off_t>(bytes)), 0);
  if (seals != 0) {
    EXPECT_EQ(::fcntl(memory.get(), F_ADD_SEALS, seals), 0);
  }
  return memory;
}

moeResult_t codeOf(const std::function<void()>& call, std::string* text) {
  try {
    call();
  } catch (const Error& error) {
    *text = error.text();
    return error.code();
  }
  return moeSuccess;
}

TEST(Memfd, SizesAreWholePages) {
  EXPECT_EQ(windowBytesFor(1), pageBytes());
  EXPECT_EQ(windowBytesFor(pageBytes()), pageBytes());
  EXPECT_EQ(windowBytesFor(pageBytes() + 1), 2 * pageBytes());
}

TEST(Memfd, ImpossibleSizesAreRefusedWithTheNumber) {
  std::string text;
  EXPECT_EQ(codeOf([] { windowBytesFor(0); }, &text), moeInvalidArgument);
  for (size_t bytes : {size_t{1} << 60, SIZE_MAX, SIZE_MAX - 1}) {
    EXPECT_EQ(codeOf([&] { windowBytesFor(bytes); }, &text), moeOutOfMemory);
    EXPECT_NE(text.find(cat(bytes)), std::string::npos) << text;
  }
}

TEST(Memfd, SizeIsFixedAndMemoryZeroed) {
  size_t bytes = 3 * pageBytes();
  FileDescriptor memory = makeSealedMemfd(bytes);
  EXPECT_NE(::ftruncate(memory.get(), 0), 0);
  EXPECT_NE(::ftruncate(memory.get(), static_cast<off_t>(2 * bytes)), 0);
  EXPECT_NE(::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_WRITE), 0);
  EXPECT_EQ(::fcntl(memory.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  EXPECT_EQ(refuseMemfd(memory, bytes), "");
  Region region = mapMemfd(memory, bytes);
  EXPECT_EQ(region.bytes, bytes);
  for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(region.base[i], std::byte{0});
}

TEST(Memfd, BigWindowsTakeNoMemoryUntilUsed) {
  size_t bytes = size_t{1} << 30;
  FileDescriptor memory = makeSealedMemfd(bytes);
  Region region = mapMemfd(memory, bytes);
  region.base[bytes - 1] = std::byte{1};
  struct stat status {};
  ASSERT_EQ(::fstat(memory.get(), &status), 0);
  EXPECT_LE(static_cast<size_t>(status.st_blocks) * 512, size_t{4} << 20);
}

TEST(Memfd, FileSizeLimitIsAnErrorAndNoSignal) {
  test::ForkedRanks ranks(1, [](Bootstrap&) {
    rlimit tight{};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &tight), 0);
    tight.rlim_cur = pageBytes();
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &tight), 0);
    std::string text;
    EXPECT_EQ(codeOf([] { makeSealedMemfd(2 * pageBytes()); }, &text), moeOutOfMemory);
    EXPECT_NE(text.find("ulimit -f"), std::string::npos) << text;
  });
  ranks.expectSuccess();
}

TEST(Memfd, UnsafeDescriptorsAreRefused) {
  size_t bytes = 2 * pageBytes();
  EXPECT_NE(refuseMemfd(plainMemfd(bytes), bytes).find("not sealed against shrinking"), std::string::npos);
  EXPECT_NE(refuseMemfd(plainMemfd(bytes, F_SEAL_GROW), bytes).find("not sealed"), std::string::npos);
  EXPECT_NE(refuseMemfd(plainMemfd(pageBytes(), F_SEAL_SHRINK), bytes).find("had announced"), std::string::npos);
  EXPECT_NE(refuseMemfd(FileDescriptor(::open("/dev/null", O_RDWR | O_CLOEXEC)), bytes).find("not sealable"),
            std::string::npos);
  EXPECT_EQ(refuseMemfd(plainMemfd(bytes, F_SEAL_SHRINK), bytes), "");
}

}  // namespace
}  // namespace moe

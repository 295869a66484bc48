// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace moe {
namespace {

// Linux 6.3; kernels that know it may be set up to refuse memfds without it.
constexpr unsigned kNoExecSeal = 0x0008;

// RAM and swap: pages beyond could never all be in use.
uint64_t hostMemoryBytes() {
  struct sysinfo info {};
  if (::sysinfo(&info) != 0) return UINT64_MAX;
  return (uint64_t{info.totalram} + info.totalswap) * info.mem_unit;
}

int createMemfd(unsigned flags) { return ::memfd_create("moecl-window", flags); }

}  // namespace

size_t windowBytesFor(size_t bytes) {
  if (bytes == 0) fail(moeInvalidArgument, "a window of 0 bytes was asked for; it needs at least 1");
  uint64_t host = hostMemoryBytes();
  if (bytes > static_cast<size_t>(PTRDIFF_MAX) / 2 || bytes > host) {
    fail(moeOutOfMemory, "a window of ", bytes, " bytes was asked for, but this host has ", host,
         " bytes of memory and swap; lower maxTokensPerRank, hidden, maxTopk or buffers");
  }
  auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

FileDescriptor makeSealedMemfd(size_t bytes) {
  // Growing a file past this limit would raise SIGXFSZ in place of an error.
  rlimit files{};
  if (::getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur != RLIM_INFINITY && bytes > files.rlim_cur) {
    fail(moeOutOfMemory, "a window of ", bytes, " bytes is larger than this process may make a file (", files.rlim_cur,
         " bytes, ulimit -f)");
  }
  FileDescriptor memory(createMemfd(MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal));
  if (!memory.valid() && errno == EINVAL) memory.reset(createMemfd(MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.valid()) failErrno(errno, "cannot create shared memory for a window");
  if (::ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0) {
    failErrno(errno, "cannot size shared memory for a window to ", bytes, " bytes");
  }
  if (::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    failErrno(errno, "cannot seal the size of a window's shared memory");
  }
  return memory;
}

std::string refuseMemfd(const FileDescriptor& memory, size_t bytes) {
  int seals = ::fcntl(memory.get(), F_GET_SEALS);
  if (seals < 0) return cat("it sent a descriptor that is not sealable memory: ", std::strerror(errno));
  if ((seals & F_SEAL_SHRINK) == 0) return "it sent shared memory that is not sealed against shrinking";
  struct stat status {};
  if (::fstat(memory.get(), &status) != 0) {
    return cat("the size of the shared memory that it sent cannot be read: ", std::strerror(errno));
  }
  if (status.st_size < 0 || static_cast<uint64_t>(status.st_size) < bytes) {
    return cat("it sent shared memory of ", status.st_size, " bytes and had announced ", bytes);
  }
  return "";
}

Region mapMemfd(const FileDescriptor& memory, size_t bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory.get(), 0);
  if (base == MAP_FAILED) {
    failErrno(errno, "cannot map a window of ", bytes, " bytes; see ulimit -v and vm.max_map_count");
  }
  Region region;
  region.owner = std::shared_ptr<void>(base, [bytes](void* start) { ::munmap(start, bytes); });
  region.base = static_cast<std::byte*>(base);
  region.bytes = bytes;
  return region;
}

}  // namespace moe

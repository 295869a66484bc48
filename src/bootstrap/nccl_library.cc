// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/nccl_library.h"

#include <dlfcn.h>

#include "base/error.h"

namespace moe {
namespace {

constexpr char kLibrary[] = "libnccl.so.2";

template <class Function>
void resolve(const SymbolFinder& find, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(find(name));
  if (!*function) {
    fail(moeUnsupported, "this process has loaded no NCCL with ", name, ": neither does the program export it, nor is ",
         kLibrary, " loaded. The library that made the ncclComm_t must be a shared NCCL 2.20 or newer");
  }
}

// As in nccl.h.
moeResult_t resultOf(int result) {
  switch (result) {
    case 1: return moeDeviceError;      // ncclUnhandledCudaError
    case 4: return moeInvalidArgument;  // ncclInvalidArgument
    case 5: return moeInvalidUsage;     // ncclInvalidUsage
    case 6: return moeRankLost;         // ncclRemoteError
    case kNcclInProgress: return moeInvalidUsage;
    default: return moeSystemError;
  }
}

}  // namespace

NcclCalls findNccl(const SymbolFinder& find) {
  NcclCalls calls{};
  resolve(find, "ncclGetVersion", &calls.getVersion);
  int version = 0;
  int result = calls.getVersion(&version);
  if (result != kNcclSuccess) fail(moeUnsupported, "ncclGetVersion failed with result ", result);
  if (version < kNcclOldest) {
    // Versions before 2.9 were written with one digit less.
    int major = version / (version < 10000 ? 1000 : 10000);
    int minor = version / 100 % (version < 10000 ? 10 : 100);
    fail(moeUnsupported, "the NCCL in this process is ", major, ".", minor, ".", version % 100,
         "; moecl needs 2.20.0 or newer to meet through it. Load a newer one, or use moeCommInit");
  }
  resolve(find, "ncclGetErrorString", &calls.getErrorString);
  resolve(find, "ncclGetLastError", &calls.getLastError);
  resolve(find, "ncclCommCount", &calls.commCount);
  resolve(find, "ncclCommUserRank", &calls.commUserRank);
  resolve(find, "ncclCommCuDevice", &calls.commCuDevice);
  resolve(find, "ncclCommGetAsyncError", &calls.commGetAsyncError);
  resolve(find, "ncclAllGather", &calls.allGather);
  return calls;
}

NcclCalls loadedNccl() {
  if (::dlsym(RTLD_DEFAULT, "ncclAllGather")) {
    return findNccl([](const char* name) { return ::dlsym(RTLD_DEFAULT, name); });
  }
  // Python loads extensions, and with them NCCL, where RTLD_DEFAULT does not look. A library that is not loaded yet
  // cannot have made the communicator. The handle is kept: what was found stays valid.
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  return findNccl([library](const char* name) { return library ? ::dlsym(library, name) : nullptr; });
}

void checkNccl(const NcclCalls& calls, ncclComm* comm, int result, const std::string& what) {
  if (result == kNcclSuccess) return;
  const char* detail = calls.getLastError(comm);
  bool said = detail && *detail;
  fail(resultOf(result), what, " failed: ", calls.getErrorString(result), said ? ": " : "", said ? detail : "",
       result == kNcclInProgress
           ? "; the NCCL communicator is busy: wait until ncclCommGetAsyncError says ncclSuccess, then call again"
           : "");
}

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// How tests steer the stand-in for CUDA's driver. They find these functions in the libcuda.so.1 that is loaded; a real
// one has none of them.
#pragma once

#include <dlfcn.h>

namespace moe::test {

// From now on calls of this name, as libcuda exports it, fail with `result`; 0 makes them work again.
using SimCudaFail = void (*)(const char* call, int result);
// 1: what a GPU writes to another one's memory is lost. 2: it never finishes. 0: all is well.
using SimCudaTrouble = void (*)(int kind);
// Handles, address ranges, mappings, contexts held, streams and pinned buffers of this process.
using SimCudaLive = int (*)();

template <class Function>
Function simCuda(const char* name) {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return library ? reinterpret_cast<Function>(::dlsym(library, name)) : nullptr;
}

}  // namespace moe::test

// SPDX-License-Identifier: Apache-2.0
// Operations on CPU threads: the caller's, and where MOE_HOST_BLOCKS or MOE_HOST_WARPS ask for more, threads that stay
// for the communicator's life.
#pragma once

#include <memory>

#include "device/backend.h"
#include "device/exec_host.h"

namespace moe {

// For communicators of this layout. `guard` ends waits; it must outlive the backend. Throws moeInternalError when a row
// of the layout needs more memory than a HostExec has for it.
std::unique_ptr<Backend> makeHostBackend(const Layout& layout, int blocks, int warps, WaitGuard* guard);

}  // namespace moe

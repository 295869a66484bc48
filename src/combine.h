// SPDX-License-Identifier: Apache-2.0
// moeCombine: from the caller's arguments to one plain struct, and back to a result.
#pragma once

#include "comm.h"
#include "handle.h"

namespace moe {

// Throws Error. A combine that this rank refuses, also for arguments that could not even be read, is refused on all
// ranks before it throws.
void combine(Comm& comm, const OrError<moeCombineArgs_t>& args, const OrError<moeHandle*>& handle, void* stream);

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// moeCombine: from the caller's arguments to one plain struct, and back to a result.
#pragma once

#include "comm.h"
#include "handle.h"

namespace moe {

// Each throws Error. A combine that this rank refuses is refused on all ranks before it throws. refuseCombine is for a
// refusal that was found before there were arguments; it returns when the peers have heard.
void refuseCombine(Comm& comm, moeResult_t code, void* stream);
void combine(Comm& comm, const moeCombineArgs_t& args, moeHandle* handle, void* stream);

}  // namespace moe

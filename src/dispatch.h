// SPDX-License-Identifier: Apache-2.0
// moeDispatch, moeWait and their queries: from the caller's arguments to one plain struct, and back to a result.
#pragma once

#include "comm.h"
#include "handle.h"

namespace moe {

// Each throws Error. A dispatch that this rank refuses, also for arguments that could not even be read, is refused on
// all ranks before it throws.
void dispatch(Comm& comm, const OrError<moeDispatchArgs_t>& args, const OrError<moeHandle*>& handle, void* stream);
void wait(Comm& comm, moeHandle* handle, const moeReceive_t& receive, void* stream);
moeSizes_t getSizes(Comm& comm, moeHandle* handle);
void getViews(Comm& comm, const moeHandle* handle, moeRows_t* views, int numViews);

// Whether the rows of a dispatch that asked for views still stand in the window.
bool viewsStand(const Comm& comm, const moeHandle& handle);
// Throws unless `handle` is a handle of `comm`.
void checkHandle(const Comm& comm, const moeHandle* handle);

}  // namespace moe

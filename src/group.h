// SPDX-License-Identifier: Apache-2.0
// moeGroupStart/End: one thread drives several ranks. Calls are noted, and run at the end of the outermost group.
#pragma once

#include <functional>
#include <string>

#include "moe.h"

namespace moe {

// True between moeGroupStart and moeGroupEnd of this thread.
bool inGroup();
void groupStart();
// Notes a call of `key`, the communicator or, for an init, where it will be stored. `call` returns a result and leaves
// a failure's text in *text.
void groupNote(const void* key, std::function<moeResult_t(std::string* text)> call);
// Ends a group. At the end of the outermost one runs the noted calls: those of one key in order, different keys at
// once. Throws the first failure in the order in which the calls were noted.
void groupEnd();

}  // namespace moe

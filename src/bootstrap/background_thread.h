// SPDX-License-Identifier: Apache-2.0
// Threads that nobody waits for: they own what they use, and the process may exit while they run.
#pragma once

#include <functional>

namespace moe {

// Runs `body` in a detached thread that takes none of the application's signals. What `body` throws is logged. Throws
// moeSystemError if there can be no more threads.
void startBackgroundThread(std::function<void()> body);

}  // namespace moe

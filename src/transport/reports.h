// SPDX-License-Identifier: Apache-2.0
// What a rank tells all others after a step that can fail on it alone: that it failed, or something they need next. So
// nobody waits for a rank that has given up, and all fail alike.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "bootstrap/bootstrap.h"

namespace moe {

// Collective: runs `step` and exchanges what it returns; result[r] is rank r's. When the step failed anywhere, throws
// the failure of the lowest such rank, which the text names: the same on all ranks, but that "aborted" means this rank
// itself. `what` is what the step could not do then, as in "share its memory".
std::vector<std::string> exchangeReports(const std::function<std::string()>& step, const char* what,
                                         Bootstrap& bootstrap, const WaitLimit& limit);

}  // namespace moe

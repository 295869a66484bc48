// SPDX-License-Identifier: Apache-2.0
// Whether data really gets through: mappings have been seen that the driver granted and that led nowhere.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/cuda_ipc/gpu.h"
#include "transport/transport.h"

namespace moe {

// How much of the start of every window the probe uses: a word for each rank.
size_t probeBytes(int nranks);

// Collective over `bootstrap`: each rank writes a word to every window that it has mapped, reads it back, and looks for
// the words of the others in its own. A peer for which this or the driver fails becomes Reach::kNone in `peers`, with a
// reason that names both GPUs, of which gpuNames has one a rank. The windows are zeroed again when it returns. Throws,
// on all ranks alike, what failed on one rank alone.
void probePeers(const std::shared_ptr<const Gpu>& gpu, const Region& window, const std::vector<std::string>& gpuNames,
                Bootstrap& bootstrap, const WaitLimit& limit, std::vector<Peer>* peers);

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
#include "reach.h"

#include <unistd.h>

#include <cstdint>

#include "machine.h"

namespace moe::perf {

Offer Offer::make(Gpu& gpu, void* memory) {
  Offer offer;
  offer.host = hostNumber();
  offer.process = getpid();
  offer.device = gpu.device();
  offer.location = static_cast<double>(gpu.location());
  offer.address = static_cast<double>(reinterpret_cast<uintptr_t>(memory));
  offer.named = gpu.nameMemory(memory, &offer.name);
  return offer;
}

std::vector<double> Offer::words() const {
  std::vector<double> all{host, process, device, location, address, named ? 1.0 : 0.0};
  all.insert(all.end(), name.begin(), name.end());
  return all;
}

Offer Offer::of(const std::vector<double>& words) {
  Offer offer{words[0], words[1], words[2], words[3], words[4], {}, words[5] != 0};
  for (size_t i = 0; i < offer.name.size(); ++i) offer.name[i] = static_cast<uint32_t>(words[6 + i]);
  return offer;
}

ReachedMemory::ReachedMemory(Gpu& gpu, const Offer& mine, const Offer& theirs) : gpu_(&gpu) {
  if (theirs.host != mine.host) return;
  if (theirs.process == mine.process) {
    bool reached = gpu.reachDevice(static_cast<int>(theirs.device));
    if (reached) memory_ = reinterpret_cast<void*>(static_cast<uintptr_t>(theirs.address));
  } else if (theirs.named) {
    memory_ = foreign_ = gpu.reachMemory(theirs.name);
  }
}

void ReachedMemory::leave() {
  if (foreign_) gpu_->leave(std::exchange(foreign_, nullptr));
  memory_ = nullptr;
}

}  // namespace moe::perf

// SPDX-License-Identifier: Apache-2.0
// What a rank sees of the run around it, however the ranks were started.
#pragma once

#include <nlohmann/json.hpp>

#include "moe.h"
#include "team.h"

namespace moe::perf {

using Json = nlohmann::ordered_json;

class World {
 public:
  virtual ~World() = default;
  virtual Team& team() = 0;
  // This rank's number among those of its host, as far as that is known: it chooses the GPU.
  virtual int localRank() const = 0;
  // Joins a new communicator with the other ranks. Collective.
  virtual moeComm_t join(const moeConfig_t& config) = 0;
  // Hands a message to whoever reports. Messages have a "kind": header, row, progress (rank 0 only), note, error, done.
  virtual void emit(Json message) = 0;
};

}  // namespace moe::perf

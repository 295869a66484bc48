// SPDX-License-Identifier: Apache-2.0
// The little of NCCL that the baseline and --init nccl need, opened at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "team.h"

namespace moe::perf {

// Types and numbers as in NCCL 2's binary interface, written out so that moe_perf builds without its header.
struct NcclId {
  char internal[128];
};
enum class NcclType : int { kInt8 = 0, kInt32 = 2 };

struct NcclCalls;

// One rank of an NCCL communicator. Errors throw Failure.
class Nccl {
 public:
  // Collective: a rank that cannot take part is known to all before any waits inside NCCL. `location` tells GPUs apart;
  // `option` is the one that wants NCCL, for texts.
  Nccl(Team& team, int64_t location, const char* option);
  ~Nccl();
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  int version() const { return version_; }
  void groupStart();
  void groupEnd();
  void send(const void* data, size_t count, NcclType type, int peer, void* stream);
  void receive(void* data, size_t count, NcclType type, int peer, void* stream);
  // The ncclComm_t.
  void* comm() const { return comm_; }
  // Ends what is under way, also when peers have gone.
  void abort();

 private:
  void check(int result, const char* call) const;

  std::unique_ptr<NcclCalls> calls_;
  void* comm_ = nullptr;
  int version_ = 0;
};

}  // namespace moe::perf

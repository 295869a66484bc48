// SPDX-License-Identifier: Apache-2.0
// Where a communicator's operations run.
#pragma once

#include <memory>
#include <vector>

#include "device/args.h"

namespace moe {

// How an operation ended, as far as it is known when the call returns.
struct Outcome {
  bool ok = true;  // false: `failure` says which wait did not end
  Failure failure{};
  Refusal refusal{};  // code != 0: a rank refused its part
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Most blocks that an operation uses; the workspace has room for so many.
  virtual int blocks() const = 0;
  // Private device memory, zeroed. It lives as long as the backend.
  virtual std::byte* allocate(size_t bytes) = 0;
  // Memory of zeros that host threads and operations both see at once, for the PeerStates.
  virtual std::shared_ptr<void> allocateNotices(size_t bytes) = 0;
  // Copies the table of windows to where operations can read it.
  virtual std::byte* const* publish(const std::vector<std::byte*>& windows) = 0;

  // Each fills in blocks, sendBlocks, receiveBlocks and outcome of args.common. An asynchronous backend returns at
  // once; poll() tells later what went wrong.
  virtual Outcome dispatch(DispatchArgs& args, void* stream) = 0;
  virtual Outcome combine(CombineArgs& args, void* stream) = 0;
  // Waits for the counts of a dispatch whose send half is done, and gives its sizes for an output without bound.
  virtual Outcome count(DispatchArgs& args, void* stream, moeSizes_t* sizes) = 0;

  // What has gone wrong in asynchronous operations. A failure stays; a refusal is told until somebody takes it. Any
  // thread.
  virtual Outcome poll(bool takeRefusal) = 0;
  // True if operations are complete, and what they wrote can be read, when a call returns.
  virtual bool synchronous() const = 0;
  // Whether what is launched on the stream becomes part of a graph, and runs whenever that is replayed; and whether
  // that has been so before.
  virtual bool capturing(void* stream) = 0;
  virtual bool captured() const = 0;
  // Waits until no operation runs, replayed ones included. Bounded, since all their waits are.
  virtual void drain() = 0;
  // What the last block of the operations so far has written. Waits for those that were not captured.
  virtual Control readControl(const std::byte* control) = 0;
  virtual HandleHead readHandle(const std::byte* head) = 0;
};

}  // namespace moe

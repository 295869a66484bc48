// SPDX-License-Identifier: Apache-2.0
// Meeting through a caller's NCCL communicator: no socket, no id. Every rank's GPU takes part, so bytes go through
// device memory.
#pragma once

#include <functional>
#include <memory>

#include "bootstrap/device_stage.h"
#include "bootstrap/make.h"
#include "bootstrap/piece_bootstrap.h"

namespace moe {

// NCCL waits for peers without end, on the host too when it connects to them for the first time. So it is called in a
// thread of its own, which is left behind when the time is up; it then owns what NCCL still uses.
class NcclBootstrap final : public PieceBootstrap {
 public:
  NcclBootstrap(const NcclGroup& group, std::shared_ptr<DeviceStage> stage);

 private:
  std::string call(const std::string& piece, const char* what, const WaitLimit& limit) override;
  const char* name() const override { return "the NCCL communicator's ncclAllGather"; }

  // Puts the all-gather into the stage's stream.
  void enqueue(const DeviceStage::Room& room, size_t bytes, const char* what, const WaitLimit& limit);
  // False while NCCL works on the host. Throws what has gone wrong in the background.
  bool ncclReady(const char* what) const;
  void waitUntil(const std::function<bool()>& done, const char* what, const WaitLimit& limit) const;
  [[noreturn]] void failLate(const char* what) const;

  const NcclGroup group_;
  const std::shared_ptr<DeviceStage> stage_;
};

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// All ranks in one process: they meet at a condition variable.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "bootstrap/roll_call.h"

namespace moe {

class LocalBootstrap final : public Bootstrap {
 public:
  // What the ranks share.
  struct Room {
    std::mutex mutex;
    std::condition_variable changed;
    RollCall roll;
    uint64_t round = 0;
    // Of the round before `round`. Its readers have all come, so it stays until the last of them has taken it.
    std::shared_ptr<const std::vector<std::string>> gathered;
  };

  // All ranks have joined the room's roll call.
  LocalBootstrap(std::shared_ptr<Room> room, int rank, int nranks);
  ~LocalBootstrap() override;

  std::vector<std::string> allGather(const std::string& mine, const WaitLimit& limit) override;

 private:
  std::vector<std::string> gather(const std::string& mine, const WaitLimit& limit);

  std::shared_ptr<Room> room_;
};

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/local_bootstrap.h"

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "bootstrap/make.h"

namespace moe {

LocalBootstrap::LocalBootstrap(std::shared_ptr<Room> room, int rank, int nranks)
    : Bootstrap(rank, nranks), room_(std::move(room)) {}

LocalBootstrap::~LocalBootstrap() {
  std::lock_guard lock(room_->mutex);
  room_->roll.leave(rank());
  room_->changed.notify_all();
}

std::vector<std::string> LocalBootstrap::allGather(const std::string& mine, const WaitLimit& limit) {
  try {
    if (mine.size() > kMaxBytes) {
      fail(moeInternalError, "rank ", rank(), " wants to exchange ", mine.size(), " bytes; the limit is ", kMaxBytes);
    }
    return gather(mine, limit);
  } catch (const Error& error) {
    std::lock_guard lock(room_->mutex);
    room_->roll.end(error.code() == moeTimeout ? moeTimeout : moeRankLost,
                    cat("rank ", rank(), " gave up: ", error.text()));
    room_->changed.notify_all();
    throw;
  }
}

std::vector<std::string> LocalBootstrap::gather(const std::string& mine, const WaitLimit& limit) {
  const auto start = Deadline::Clock::now();
  std::unique_lock lock(room_->mutex);
  const uint64_t round = room_->round;
  RollCall& roll = room_->roll;
  roll.addPart(rank(), mine);
  if (!roll.verdict() && roll.gathered()) {
    room_->gathered = std::make_shared<const std::vector<std::string>>(roll.takeParts());
    ++room_->round;
  }
  room_->changed.notify_all();
  // No rank can end the next round before this one has taken the result of its own.
  while (room_->round == round) {
    if (roll.verdict()) throw *roll.verdict();
    limit.throwIfAborted();
    if (limit.passed()) {
      auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Deadline::Clock::now() - start).count();
      fail(moeTimeout, "rank ", rank(), " stopped after ", waited, " ms of waiting for ", roll.missing());
    }
    room_->changed.wait_for(lock, std::chrono::milliseconds(std::max(1, limit.pollMilliseconds())));
  }
  auto gathered = room_->gathered;
  lock.unlock();
  return *gathered;
}

std::vector<std::unique_ptr<Bootstrap>> makeLocal(int nranks) {
  auto room = std::make_shared<LocalBootstrap::Room>();
  std::vector<std::unique_ptr<Bootstrap>> ranks;
  for (int rank = 0; rank < nranks; ++rank) {
    if (!room->roll.join(rank, nranks)) throw *room->roll.verdict();
    ranks.push_back(std::make_unique<LocalBootstrap>(room, rank, nranks));
  }
  return ranks;
}

}  // namespace moe

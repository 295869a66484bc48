// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/nccl_bootstrap.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "base/error.h"
#include "bootstrap/background_thread.h"

namespace moe {
namespace {

// Init is not in such a hurry that it should burn a core.
constexpr std::chrono::microseconds kPollPause{50};

// One call of ncclAllGather in a thread of its own.
struct Enqueueing {
  std::mutex mutex;
  std::condition_variable changed;
  bool abandoned = false;  // nobody waits any more
  std::optional<OrError<int>> result;
};

}  // namespace

NcclBootstrap::NcclBootstrap(const NcclGroup& group, std::shared_ptr<DeviceStage> stage)
    : PieceBootstrap(group.rank, group.nranks), group_(group), stage_(std::move(stage)) {}

std::string NcclBootstrap::call(const std::string& piece, const char* what, const WaitLimit& limit) {
  limit.throwIfAborted();
  if (limit.passed()) failLate(what);
  DeviceStage::Room room = stage_->begin(piece, piece.size() * static_cast<size_t>(nranks()));
  enqueue(room, piece.size(), what, limit);
  // A communicator that does not block may not have put anything into the stream yet.
  waitUntil([&] { return ncclReady(what); }, what, limit);
  stage_->fetch();
  auto arrived = [&] {
    if (stage_->idle()) return true;
    ncclReady(what);
    return false;
  };
  waitUntil(arrived, what, limit);
  return stage_->answer();
}

void NcclBootstrap::enqueue(const DeviceStage::Room& room, size_t bytes, const char* what, const WaitLimit& limit) {
  auto state = std::make_shared<Enqueueing>();
  startBackgroundThread([state, group = group_, stage = stage_, room, bytes]() mutable {
    {
      std::lock_guard lock(state->mutex);
      if (state->abandoned) return;
    }
    OrError<int> result = taking([&] {
      int code = kNcclSuccess;
      stage->onDevice([&] {
        code = group.calls.allGather(room.send, room.receive, bytes, kNcclInt8, group.comm, stage->stream());
      });
      return code;
    });
    // Unless this thread was left behind, memory is freed by who waits, and not some time after the init.
    stage.reset();
    std::lock_guard lock(state->mutex);
    state->result = std::move(result);
    state->changed.notify_all();
  });
  std::unique_lock lock(state->mutex);
  while (!state->result) {
    try {
      limit.throwIfAborted();
      if (limit.passed()) failLate(what);
    } catch (const Error&) {
      state->abandoned = true;
      throw;
    }
    state->changed.wait_for(lock, std::chrono::milliseconds(std::max(1, limit.pollMilliseconds())));
  }
  int code = valueOrThrow(*state->result);
  if (code == kNcclInProgress) return;
  checkNccl(group_.calls, group_.comm, code, cat("rank ", rank(), ": ncclAllGather for the ", what));
}

bool NcclBootstrap::ncclReady(const char* what) const {
  std::string who = cat("rank ", rank(), ": the NCCL communicator, in its all-gather for the ", what, ",");
  int state = kNcclSuccess;
  checkNccl(group_.calls, group_.comm, group_.calls.commGetAsyncError(group_.comm, &state), who);
  if (state == kNcclInProgress) return false;
  checkNccl(group_.calls, group_.comm, state, who);
  return true;
}

void NcclBootstrap::waitUntil(const std::function<bool()>& done, const char* what, const WaitLimit& limit) const {
  while (!done()) {
    limit.throwIfAborted();
    if (limit.passed()) failLate(what);
    std::this_thread::sleep_for(kPollPause);
  }
}

void NcclBootstrap::failLate(const char* what) const {
  fail(moeTimeout, "rank ", rank(), " of ", nranks(), " (CUDA device ", group_.device,
       ") found no end of the NCCL all-gather for the ", what,
       " within config.timeoutMs: another rank has not called moeCommInitNccl, has failed before it could, uses the "
       "NCCL "
       "communicator in another order, or other work holds a GPU. The NCCL communicator may have an all-gather under "
       "way for ever: end it with ncclCommAbort");
}

NcclGroup askNccl(ncclComm* comm) {
  if (!comm) fail(moeInvalidArgument, "nccl is NULL; pass an ncclComm_t whose init has finished");
  NcclGroup group{};
  group.calls = loadedNccl();
  group.comm = comm;
  checkNccl(group.calls, comm, group.calls.commCount(comm, &group.nranks), "nccl: ncclCommCount");
  checkNccl(group.calls, comm, group.calls.commUserRank(comm, &group.rank), "nccl: ncclCommUserRank");
  checkNccl(group.calls, comm, group.calls.commCuDevice(comm, &group.device), "nccl: ncclCommCuDevice");
  return group;
}

std::unique_ptr<Bootstrap> joinNccl(const NcclGroup& group, std::shared_ptr<DeviceStage> stage) {
  return std::make_unique<NcclBootstrap>(group, std::move(stage));
}

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// A stand-in for libnccl.so.2 between the threads of one process, on memory that the host can touch: what
// src/bootstrap/nccl_*.cc calls, and no more. Like the real one it waits for peers without end, and knows a destroyed
// communicator when it is shown one.
#include "simnccl/simnccl.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>

namespace {

// As in nccl.h.
constexpr int kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kInProgress = 7;

// Where the ranks of one communicator meet.
struct Room {
  explicit Room(int nranks) : parts(static_cast<size_t>(nranks)) {}
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> parts;  // of the round that gathers
  std::vector<std::string> whole;  // of the round before
  int arrived = 0;
  uint64_t round = 0;
};

std::atomic<int> version{22809};

}  // namespace

struct ncclComm {
  std::shared_ptr<Room> room;
  int rank = 0;
  std::atomic<bool> aborted{false};
  std::atomic<int> asyncError{kSuccess};
  std::atomic<int> failNext{kSuccess};
  std::atomic<bool> blocking{true};
  // Of an all-gather that does not block.
  void* pending = nullptr;
  uint64_t pendingRound = 0;
};

namespace {

struct Live {
  std::mutex mutex;
  std::set<const ncclComm*> comms;
};

Live& live() {
  static Live& once = *new Live;
  return once;
}

bool known(const ncclComm* comm) {
  std::lock_guard lock(live().mutex);
  return live().comms.count(comm) > 0;
}

// Under the room's mutex. Nobody can end another round before this rank has taken this one's result.
void take(Room& room, void* receive) {
  auto* to = static_cast<char*>(receive);
  for (const std::string& part : room.whole) {
    std::memcpy(to, part.data(), part.size());
    to += part.size();
  }
}

}  // namespace

namespace moe::test {

std::vector<ncclComm*> simNcclMake(int nranks) {
  auto room = std::make_shared<Room>(nranks);
  std::vector<ncclComm*> comms;
  for (int rank = 0; rank < nranks; ++rank) {
    auto comm = std::make_unique<ncclComm>();
    comm->room = room;
    comm->rank = rank;
    comms.push_back(comm.release());
    std::lock_guard lock(live().mutex);
    live().comms.insert(comms.back());
  }
  return comms;
}

void simNcclAbort(ncclComm* comm) {
  std::lock_guard lock(comm->room->mutex);
  comm->aborted = true;
  comm->room->changed.notify_all();
}

void simNcclDestroy(ncclComm* comm) {
  {
    std::lock_guard lock(live().mutex);
    live().comms.erase(comm);
  }
  delete comm;
}

void simNcclSetVersion(int now) { version = now; }
void simNcclSetAsyncError(ncclComm* comm, int result) { comm->asyncError = result; }
void simNcclFailNext(ncclComm* comm, int result) { comm->failNext = result; }
void simNcclDoNotBlock(ncclComm* comm) { comm->blocking = false; }

}  // namespace moe::test

extern "C" {

int ncclGetVersion(int* now) {
  *now = version;
  return kSuccess;
}
const char* ncclGetErrorString(int result) {
  thread_local std::string text;
  text = "simulated result " + std::to_string(result);
  return text.c_str();
}
const char* ncclGetLastError(ncclComm*) { return "no more is known"; }
int ncclCommCount(const ncclComm* comm, int* count) {
  if (!known(comm)) return kInvalidArgument;
  *count = static_cast<int>(comm->room->parts.size());
  return kSuccess;
}
int ncclCommUserRank(const ncclComm* comm, int* rank) {
  if (!known(comm)) return kInvalidArgument;
  *rank = comm->rank;
  return kSuccess;
}
int ncclCommCuDevice(const ncclComm* comm, int* device) { return ncclCommUserRank(comm, device); }

int ncclCommGetAsyncError(ncclComm* comm, int* result) {
  if (!known(comm)) return kInvalidArgument;
  *result = comm->asyncError;
  if (*result != kSuccess || !comm->pending) return kSuccess;
  std::lock_guard lock(comm->room->mutex);
  if (comm->room->round == comm->pendingRound) {
    *result = kInProgress;
  } else {
    take(*comm->room, comm->pending);
    comm->pending = nullptr;
  }
  return kSuccess;
}

int ncclAllGather(const void* send, void* receive, size_t count, int type, ncclComm* comm, void*) {
  if (!known(comm) || type != 0) return kInvalidArgument;
  if (int asked = comm->failNext.exchange(kSuccess); asked != kSuccess) return asked;
  Room& room = *comm->room;
  std::unique_lock lock(room.mutex);
  const uint64_t round = room.round;
  room.parts[static_cast<size_t>(comm->rank)].assign(static_cast<const char*>(send), count);
  if (++room.arrived == static_cast<int>(room.parts.size())) {
    room.whole = room.parts;
    room.arrived = 0;
    ++room.round;
    room.changed.notify_all();
  }
  if (!comm->blocking) {
    comm->pending = receive;
    comm->pendingRound = round;
    return kInProgress;
  }
  room.changed.wait(lock, [&] { return room.round != round || comm->aborted; });
  if (room.round == round) return kSystemError;
  take(room, receive);
  return kSuccess;
}

}  // extern "C"

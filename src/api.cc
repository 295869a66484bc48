// SPDX-License-Identifier: Apache-2.0
// The extern "C" edge: checks pointers, catches everything, keeps the text of the last error.
#include <algorithm>
#include <cstring>
#include <new>

#include "accelerator.h"
#include "base/log.h"
#include "base/settings.h"
#include "bootstrap/make.h"
#include "combine.h"
#include "comm.h"
#include "config.h"
#include "dispatch.h"
#include "group.h"
#include "live_objects.h"

struct moeComm {
  template <class... Args>
  explicit moeComm(Args&&... args) : comm(std::forward<Args>(args)...) {}
  moe::Comm comm;
};

namespace moe {
namespace {

// A root that nobody joins gives up after this long.
constexpr auto kRootPatience = std::chrono::minutes(10);

std::string& lastError() {
  thread_local std::string text;
  return text;
}

// Never destroyed: a process may exit while communicators live.
LiveObjects<moeComm>& liveComms() {
  static auto& once = *new LiveObjects<moeComm>;
  return once;
}
LiveObjects<moeHandle>& liveHandles() {
  static auto& once = *new LiveObjects<moeHandle>;
  return once;
}

// Runs `body` and turns what it throws into a result and a text.
template <class Body>
moeResult_t caught(std::string* text, Body&& body) noexcept {
  try {
    body();
    return moeSuccess;
  } catch (const Error& error) {
    *text = error.text();
    return error.code();
  } catch (const std::bad_alloc&) {
    *text = "out of host memory";
    return moeOutOfMemory;
  } catch (const std::exception& error) {
    *text = cat("internal error: ", error.what());
    return moeInternalError;
  }
}

template <class Body>
moeResult_t edge(Body&& body) noexcept {
  static const bool warned = [] {
    for (const std::string& warning : settingsWarnings()) log(LogLevel::kWarn, warning);
    log(LogLevel::kInfo, "settings:\n", settingsTable());
    return true;
  }();
  (void)warned;
  return caught(&lastError(), std::forward<Body>(body));
}

// Runs `call` now, or at the end of the thread's group.
template <class Call>
void nowOrInGroup(const void* key, Call call) {
  if (inGroup()) {
    groupNote(key, [call](std::string* text) { return caught(text, call); });
  } else {
    call();
  }
}

Comm& live(moeComm_t comm) {
  if (!comm) fail(moeInvalidArgument, "comm is NULL");
  if (!liveComms().contains(comm)) {
    fail(moeInvalidUsage, "comm is no live communicator: it was destroyed, or never made");
  }
  return comm->comm;
}

moeHandle* live(moeHandle_t handle) {
  if (handle && !liveHandles().contains(handle)) {
    fail(moeInvalidUsage, "handle is no live handle: it was destroyed, or never made");
  }
  return handle;
}

template <class T>
T* needed(T* pointer, const char* name) {
  if (!pointer) fail(moeInvalidArgument, name, " is NULL");
  return pointer;
}

void initInto(moeComm_t* out, int nranks, int rank, Join join, const moeConfig_t* config, int device = -1) {
  auto made = std::make_unique<moeComm>(nranks, rank, std::move(join), config, device);
  Comm& comm = made->comm;
  comm.start();
  *out = liveComms().add(std::move(made));
}

// Most blocks of one operation, as the backend would say. Settles which backend that is: a GPU is only looked for when
// one is asked for, since that initializes CUDA in this process.
int predictBlocks(moeConfig_t* config) {
  std::string reason;
  if (config->backend == moeBackendCuda && gpuUsable(&config->device, &reason)) return gpuBlocks(config->device);
  config->backend = moeBackendHost;
  return settings().hostBlocks;
}

// Copies a config of any version, so that a grouped or non-blocking init may outlive the caller's.
struct ConfigCopy {
  explicit ConfigCopy(const moeConfig_t* config) {
    if (config) {
      const auto* bytes = reinterpret_cast<const char*>(config);
      bytes_.assign(bytes, bytes + std::max(sizeof(size_t), std::min<size_t>(config->size, 4096)));
      bytes_.resize(std::max(bytes_.size(), sizeof(moeConfig_t)));
    }
  }
  const moeConfig_t* get() const {
    return bytes_.empty() ? nullptr : reinterpret_cast<const moeConfig_t*>(bytes_.data());
  }

 private:
  std::vector<char> bytes_;
};

}  // namespace
}  // namespace moe

using namespace moe;

const char* moeGetErrorString(moeResult_t result) {
  static const char* const names[] = {"success",
                                      "invalid argument",
                                      "invalid usage",
                                      "mismatch between ranks",
                                      "system error",
                                      "out of memory",
                                      "unsupported",
                                      "internal error",
                                      "timeout",
                                      "aborted",
                                      "rank lost",
                                      "refused by a peer",
                                      "too many in flight",
                                      "overflow",
                                      "in progress",
                                      "device error"};
  static_assert(sizeof(names) / sizeof(names[0]) == moeNumResults);
  return result >= 0 && result < moeNumResults ? names[result] : "unknown result";
}

const char* moeGetLastError(void) { return lastError().c_str(); }

moeResult_t moeGetVersion(int* version) {
  return edge([&] { *needed(version, "version") = MOE_VERSION; });
}

moeResult_t moeSetLogFunction(moeLogFunction_t function, void* context) {
  return edge([&] { setLogFunction(function, context); });
}

moeResult_t moeGetSettings(char* text, size_t capacity, size_t* neededBytes) {
  return edge([&] {
    std::string table = settingsTable();
    if (capacity > 0) {
      needed(text, "text");
      size_t length = std::min(table.size(), capacity - 1);
      std::memcpy(text, table.data(), length);
      text[length] = 0;
    }
    if (neededBytes) *neededBytes = table.size() + 1;
  });
}

moeResult_t moeGetUniqueId(moeUniqueId_t* id) {
  return edge([&] { *needed(id, "id") = makeUniqueId(kRootPatience); });
}

moeResult_t moeCommInit(moeComm_t* comm, int nranks, const moeUniqueId_t* id, int rank, const moeConfig_t* config) {
  return edge([&] {
    needed(comm, "comm");
    moeUniqueId_t where = *needed(id, "id");
    Join join = [=](const WaitLimit& limit) { return joinTcp(where, rank, nranks, limit); };
    nowOrInGroup(comm, [=, copy = ConfigCopy(config)] { initInto(comm, nranks, rank, join, copy.get()); });
  });
}

moeResult_t moeCommInitEnv(moeComm_t* comm, const moeConfig_t* config) {
  return edge([&] {
    needed(comm, "comm");
    LaunchedRank me = launchedRank();
    Join join = [me](const WaitLimit& limit) { return joinLaunched(me, limit); };
    nowOrInGroup(comm, [=, copy = ConfigCopy(config)] { initInto(comm, me.nranks, me.rank, join, copy.get()); });
  });
}

moeResult_t moeCommInitCallbacks(moeComm_t* comm, int nranks, int rank, const moeBootstrap_t* bootstrap,
                                 const moeConfig_t* config) {
  return edge([&] {
    needed(comm, "comm");
    moeBootstrap_t callbacks = takeStruct(bootstrap, "bootstrap", moeBootstrap_t MOE_BOOTSTRAP_INIT);
    if (!callbacks.allGather) fail(moeInvalidArgument, "bootstrap->allGather is NULL");
    Join join = [=](const WaitLimit&) { return joinCallbacks(callbacks, rank, nranks); };
    nowOrInGroup(comm, [=, copy = ConfigCopy(config)] { initInto(comm, nranks, rank, join, copy.get()); });
  });
}

moeResult_t moeCommInitNccl(moeComm_t* comm, ncclComm* nccl, const moeConfig_t* config) {
  return edge([&] {
    needed(comm, "comm");
    if (!builtWithCuda()) {
      fail(moeUnsupported,
           "moeCommInitNccl needs GPUs, and this build of moecl has no CUDA; use moeCommInit, or build ",
           "with MOE_CUDA=ON");
    }
    NcclGroup group = askNccl(nccl);
    Join join = [=](const WaitLimit&) { return joinNccl(group, makeGpuStage(group.device)); };
    nowOrInGroup(comm, [=, copy = ConfigCopy(config)] {
      initInto(comm, group.nranks, group.rank, join, copy.get(), group.device);
    });
  });
}

moeResult_t moeCommInitAll(moeComm_t* comms, int nranks, const moeConfig_t* config) {
  return edge([&] {
    needed(comms, "comms");
    if (nranks < 1) fail(moeInvalidArgument, "nranks = ", nranks, ", but a communicator has at least 1 rank");
    moeConfig_t shared = completeConfig(config, nranks);
    int gpus = shared.device < 0 && shared.backend != moeBackendHost ? gpuCount() : 0;
    auto meetings = std::make_shared<std::vector<std::unique_ptr<Bootstrap>>>(makeLocal(nranks));
    std::vector<std::unique_ptr<moeComm>> made(static_cast<size_t>(nranks));
    groupStart();
    for (int rank = 0; rank < nranks; ++rank) {
      auto* slot = &made[static_cast<size_t>(rank)];
      groupNote(slot, [=](std::string* text) {
        return caught(text, [&] {
          Join join = [=](const WaitLimit&) { return std::move((*meetings)[static_cast<size_t>(rank)]); };
          moeConfig_t mine = shared;
          if (gpus > 0) mine.device = rank % gpus;
          auto one = std::make_unique<moeComm>(nranks, rank, std::move(join), &mine);
          one->comm.start();
          *slot = std::move(one);
        });
      });
    }
    groupEnd();
    for (int rank = 0; rank < nranks; ++rank) comms[rank] = liveComms().add(std::move(made[static_cast<size_t>(rank)]));
  });
}

moeResult_t moeGroupStart(void) {
  return edge([] { groupStart(); });
}
moeResult_t moeGroupEnd(void) {
  return edge([] { groupEnd(); });
}

moeResult_t moeCommGetAsyncError(moeComm_t comm, moeResult_t* state) {
  return edge([&] {
    needed(state, "state");
    std::string text;
    *state = live(comm).state(&text);
    if (*state != moeSuccess && *state != moeInProgress) lastError() = text;
  });
}

moeResult_t moeCommAbort(moeComm_t comm) {
  return edge([&] { live(comm).abort(); });
}
moeResult_t moeCommFinalize(moeComm_t comm) {
  return edge([&] { live(comm).finalize(); });
}

moeResult_t moeCommDestroy(moeComm_t comm) {
  return edge([&] {
    if (!comm) return;
    live(comm);
    std::unique_ptr<moeComm> last = liveComms().remove(comm);
    moeResult_t state = moeInProgress;
    std::string text;
    if (last) state = last->comm.state(&text);
    if (state != moeInProgress) last->comm.finalize();
  });
}

moeResult_t moeGetInfo(moeComm_t comm, moeInfo_t* info) {
  return edge([&] {
    takeStruct(info, "info", moeInfo_t MOE_INFO_INIT, kFirstInfoBytes);
    Comm& target = live(comm);
    target.requireReady();
    giveStruct(target.info(), info);
  });
}

moeResult_t moePredictInfo(int nranks, int rank, const moeConfig_t* config, moeInfo_t* info) {
  return edge([&] {
    takeStruct(info, "info", moeInfo_t MOE_INFO_INIT, kFirstInfoBytes);
    moeConfig_t complete = completeConfig(config, nranks);
    if (rank < 0 || rank >= nranks) {
      fail(moeInvalidArgument, "rank = ", rank, ", but the ranks are 0 .. ", nranks - 1);
    }
    giveStruct(predictInfo(complete, makeLayout(complete, nranks, rank, predictBlocks(&complete))), info);
  });
}

moeResult_t moeGetStats(moeComm_t comm, moeStats_t* stats) {
  return edge([&] {
    takeStruct(stats, "stats", moeStats_t MOE_STATS_INIT);
    Comm& target = live(comm);
    target.requireReady();
    giveStruct(target.stats(), stats);
  });
}

moeResult_t moeGetExpertOwner(moeComm_t comm, int64_t expert, int* rank, int* localIndex) {
  return edge([&] {
    Comm& target = live(comm);
    target.requireReady();
    const ExpertMap& experts = target.layout().shape.experts;
    if (!experts.valid(expert)) {
      fail(moeInvalidArgument, "expert = ", expert, ", but the experts are 0 .. ", experts.experts - 1);
    }
    int owner = experts.owner(static_cast<int32_t>(expert));
    if (rank) *rank = owner;
    if (localIndex) *localIndex = static_cast<int>(expert - experts.first(owner));
  });
}

moeResult_t moeCommGetDead(moeComm_t comm, int32_t* lost) {
  return edge([&] {
    needed(lost, "lost");
    std::vector<int32_t> ranks = live(comm).lostRanks();
    std::copy(ranks.begin(), ranks.end(), lost);
  });
}

moeResult_t moeHandleBytes(moeComm_t comm, size_t* bytes) {
  return edge([&] {
    needed(bytes, "bytes");
    Comm& target = live(comm);
    target.requireReady();
    *bytes = static_cast<size_t>(target.layout().handle.bytes);
  });
}

moeResult_t moeHandleInit(moeComm_t comm, void* memory, size_t bytes, moeHandle_t* handle) {
  return edge([&] {
    needed(handle, "handle");
    Comm& target = live(comm);
    target.requireReady();
    auto least = static_cast<size_t>(target.layout().handle.bytes);
    if (bytes < least) {
      fail(moeInvalidArgument, "bytes = ", bytes, ", but a handle of this communicator needs ", least,
           " (moeHandleBytes)");
    }
    if (reinterpret_cast<uintptr_t>(needed(memory, "memory")) % 256 != 0) {
      fail(moeInvalidArgument, "memory = ", memory, " is not aligned to 256 bytes");
    }
    auto made = std::make_unique<moeHandle>();
    made->comm = &target;
    made->memory = static_cast<std::byte*>(memory);
    *handle = liveHandles().add(std::move(made));
  });
}

moeResult_t moeHandleDestroy(moeHandle_t handle) {
  return edge([&] {
    if (handle && !liveHandles().remove(handle)) {
      fail(moeInvalidUsage, "handle is no live handle: it was destroyed already, or never made");
    }
  });
}

moeResult_t moeDispatch(moeComm_t comm, const moeDispatchArgs_t* args, moeHandle_t handle, void* stream) {
  return edge([&] {
    Comm& target = live(comm);
    auto taken = taking([=] { return takeStruct(args, "args", moeDispatchArgs_t MOE_DISPATCH_ARGS_INIT); });
    nowOrInGroup(comm, [=, &target] { dispatch(target, taken, taking([=] { return live(handle); }), stream); });
  });
}

moeResult_t moeWait(moeComm_t comm, moeHandle_t handle, const moeReceive_t* receive, void* stream) {
  return edge([&] {
    Comm& target = live(comm);
    moeReceive_t copy = takeStruct(receive, "receive", moeReceive_t MOE_RECEIVE_INIT);
    nowOrInGroup(comm, [=, &target] { wait(target, live(handle), copy, stream); });
  });
}

moeResult_t moeGetSizes(moeComm_t comm, moeHandle_t handle, moeSizes_t* sizes) {
  return edge([&] {
    needed(sizes, "sizes");
    *sizes = getSizes(live(comm), live(handle));
  });
}

moeResult_t moeGetViews(moeComm_t comm, moeHandle_t handle, moeRows_t* views, int numViews) {
  return edge([&] { getViews(live(comm), live(handle), views, numViews); });
}

moeResult_t moeCombine(moeComm_t comm, const moeCombineArgs_t* args, moeHandle_t handle, void* stream) {
  return edge([&] {
    Comm& target = live(comm);
    auto taken = taking([=] { return takeStruct(args, "args", moeCombineArgs_t MOE_COMBINE_ARGS_INIT); });
    nowOrInGroup(comm, [=, &target] { combine(target, taken, taking([=] { return live(handle); }), stream); });
  });
}

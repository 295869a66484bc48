// SPDX-License-Identifier: Apache-2.0
#include "team.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <thread>

#include "text.h"

namespace moe::perf {
namespace {

// Ranks that are still computing should have the cores for themselves: after this many yields a waiting rank sleeps.
constexpr int kYields = 2000;

// Time for the slowest rank to learn when to start.
constexpr double kStartMarginUs = 500;
// Ranks that leave a barrier are not this far apart: clocks that are belong to several hosts.
constexpr double kOneClockUs = 100000;

constexpr int kIdsPerToken = MOE_MAX_TOPK;
constexpr int64_t kTeamExperts = 4096;
constexpr int64_t kTeamTokens = kTeamExperts / kIdsPerToken;
constexpr size_t kHandleAlignment = 256;

double nowUs() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

std::vector<std::vector<double>> Team::gather(const std::vector<double>& mine) {
  std::vector<std::vector<double>> result(static_cast<size_t>(size_));
  std::vector<double> words(kWords), all(static_cast<size_t>(size_) * kWords);
  for (size_t begin = 0; begin < mine.size(); begin += kWords) {
    size_t count = std::min(kWords, mine.size() - begin);
    std::copy_n(mine.begin() + static_cast<std::ptrdiff_t>(begin), count, words.begin());
    gatherWords(words.data(), all.data());
    for (size_t rank = 0; rank < result.size(); ++rank) {
      const double* from = all.data() + rank * kWords;
      result[rank].insert(result[rank].end(), from, from + count);
    }
  }
  return result;
}

void Team::startTogether() {
  barrier();
  double earliest = nowUs(), latest = earliest;
  for (const auto& rank : gather({earliest})) {
    earliest = std::min(earliest, rank[0]);
    latest = std::max(latest, rank[0]);
  }
  if (latest - earliest > kOneClockUs) return;
  while (nowUs() < latest + kStartMarginUs) {
  }
}

void SharedTeam::throwIfAborted() const {
  if (block_->aborted.load(std::memory_order_acquire)) throw Follower("another rank failed");
}

void SharedTeam::barrier() {
  uint32_t epoch = block_->epoch.load(std::memory_order_acquire);
  uint32_t before = block_->arrived.fetch_add(1, std::memory_order_acq_rel);
  if (before + 1 == static_cast<uint32_t>(size())) {
    block_->arrived.store(0, std::memory_order_relaxed);
    block_->epoch.store(epoch + 1, std::memory_order_release);
    return;
  }
  auto deadline = std::chrono::steady_clock::now() + patience_;
  for (int turn = 0; block_->epoch.load(std::memory_order_acquire) == epoch; ++turn) {
    throwIfAborted();
    if (std::chrono::steady_clock::now() >= deadline) {
      fail("waited ", patience_.count(), " ms for the other ranks between two calls; ",
           block_->arrived.load(std::memory_order_relaxed), " of ", size(), " came. Is a rank stopped?");
    }
    if (turn < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

void SharedTeam::gatherWords(const double* mine, double* all) {
  std::memcpy(block_->slot(rank()), mine, kWords * sizeof(double));
  barrier();
  for (int rank = 0; rank < size(); ++rank) {
    std::memcpy(all + static_cast<size_t>(rank) * kWords, block_->slot(rank), kWords * sizeof(double));
  }
  // Nobody may overwrite a slot before all have read it.
  barrier();
}

std::unique_ptr<CommTeam> CommTeam::join(std::chrono::milliseconds patience) {
  moeConfig_t config = MOE_CONFIG_INIT;
  config.maxTokensPerRank = kTeamTokens;
  // The library moves the rows' bytes as they are, so fp32 pairs can carry doubles.
  config.hidden = kWords * 2;
  config.dtype = moeFloat32;
  config.combineDtype = moeFloat32;
  config.numExperts = kTeamExperts;
  config.maxTopk = kIdsPerToken;
  config.backend = moeBackendHost;
  config.timeoutMs = static_cast<int32_t>(patience.count());
  moeComm_t comm = nullptr;
  require(moeCommInitEnv(&comm, &config), "moeCommInitEnv");
  moeInfo_t info = MOE_INFO_INIT;
  bool owned = false;
  try {
    require(moeGetInfo(comm, &info), "moeGetInfo");
    if (info.nranks > kTeamExperts) fail(info.nranks, " ranks: moe_perf can drive at most ", kTeamExperts);
    return std::unique_ptr<CommTeam>(new CommTeam(comm, info, &owned));
  } catch (...) {
    if (!owned) moeCommDestroy(comm);
    throw;
  }
}

CommTeam::CommTeam(moeComm_t comm, const moeInfo_t& info, bool* owned) : Team(info.rank, info.nranks), comm_(comm) {
  int64_t tokens = (info.nranks + kIdsPerToken - 1) / kIdsPerToken;
  ids_.assign(static_cast<size_t>(tokens * kIdsPerToken), -1);
  rows_.assign(static_cast<size_t>(tokens) * kWords, 0.0);
  for (int64_t expert = kTeamExperts - 1; expert >= 0; --expert) {
    int owner = 0;
    require(moeGetExpertOwner(comm, expert, &owner, nullptr), "moeGetExpertOwner");
    ids_[static_cast<size_t>(owner)] = static_cast<int32_t>(expert);
  }
  size_t bytes = (info.handleBytes + kHandleAlignment - 1) / kHandleAlignment * kHandleAlignment;
  handleMemory_ = std::aligned_alloc(kHandleAlignment, bytes);
  if (!handleMemory_) fail("a handle of ", bytes, " bytes: out of memory");
  moeResult_t made = moeHandleInit(comm, handleMemory_, bytes, &handle_);
  if (made != moeSuccess) std::free(handleMemory_);
  require(made, "moeHandleInit");
  *owned = true;
}

CommTeam::~CommTeam() {
  moeHandleDestroy(handle_);
  moeCommDestroy(comm_);
  std::free(handleMemory_);
}

void CommTeam::abort() { moeCommAbort(comm_); }

void CommTeam::barrier() {
  std::vector<double> all(static_cast<size_t>(size()) * kWords);
  std::vector<double> nothing(kWords, 0.0);
  gatherWords(nothing.data(), all.data());
}

void CommTeam::gatherWords(const double* mine, double* all) {
  constexpr int64_t kRowBytes = kWords * sizeof(double);
  for (size_t at = 0; at < rows_.size(); at += kWords) std::copy_n(mine, kWords, rows_.begin() + static_cast<long>(at));
  moeRows_t input{rows_.data(), kRowBytes, 0, moeRoleTokens, 0};
  moeReceive_t receive = MOE_RECEIVE_INIT;
  moeDispatchArgs_t args = MOE_DISPATCH_ARGS_INIT;
  args.numTokens = static_cast<int64_t>(rows_.size() / kWords);
  args.topk = kIdsPerToken;
  args.idType = moeInt32;
  args.ids = ids_.data();
  args.inputs = &input;
  args.numInputs = 1;
  args.receive = &receive;
  require(moeDispatch(comm_, &args, handle_, nullptr), "moeDispatch (between two calls)");
  moeRows_t view{};
  require(moeGetViews(comm_, handle_, &view, 1), "moeGetViews");
  int64_t stride = view.strideBytes ? view.strideBytes : view.rowBytes;
  for (int rank = 0; rank < size(); ++rank) {
    // Every source sends exactly one of its tokens here, so its first row is that one.
    const auto* row = static_cast<const std::byte*>(view.data) + rank * kTeamTokens * stride;
    std::memcpy(all + static_cast<size_t>(rank) * kWords, row, kRowBytes);
  }
}

}  // namespace moe::perf

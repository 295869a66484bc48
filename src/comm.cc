// SPDX-License-Identifier: Apache-2.0
#include "comm.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "accelerator.h"
#include "base/log.h"
#include "base/settings.h"
#include "base/trace_range.h"
#include "config.h"
#include "device/host_backend.h"
#include "transport/reports.h"
#include "transport/shm/shm_transport.h"

namespace moe {
namespace {

constexpr auto kFallbackPatience = std::chrono::milliseconds(10000);
// How long a wait that ends because a peer left looks out for the death that made it leave.
constexpr auto kDeathGrace = std::chrono::milliseconds(50);

// What a rank tells the others about its config. Fixed size, so that a rank of another version is recognized.
struct Introduction {
  int32_t version;
  int32_t refusal;  // moeResult_t
  moeConfig_t config;
  char text[1024];  // of a refusal
};

// Before the ranks meet, so that a rank without the wanted backend can tell the others.
void chooseBackend(moeConfig_t* config) {
  std::string reason;
  bool usable = config->backend != moeBackendHost && gpuUsable(&config->device, &reason);
  if (config->backend == moeBackendAuto) config->backend = usable ? moeBackendCuda : moeBackendHost;
  if (config->backend == moeBackendCuda && !usable) {
    fail(moeUnsupported, "config.backend = moeBackendCuda, but ", reason, "; use moeBackendHost or moeBackendAuto");
  }
}

// An NCCL communicator has chosen the device already.
void takeDevice(moeConfig_t* config, int rank, int device) {
  if (config->device >= 0 && config->device != device) {
    fail(moeInvalidArgument, "config.device = ", config->device, ", but the NCCL communicator's rank ", rank,
         " is on CUDA device ", device, "; pass that or -1");
  }
  config->device = device;
}

const char* awaitedText(Awaited awaited) {
  switch (awaited) {
    case Awaited::kConsumed: return "to finish reading an earlier call's rows";
    case Awaited::kHistogram: return "to count its tokens";
    case Awaited::kSent: return "to send its rows";
    case Awaited::kCounts: return "to send its counts";
    case Awaited::kRows: return "to send its rows";
    case Awaited::kCombineHead: return "to begin its combine";
    case Awaited::kCombineRows: return "to send its partial rows";
    case Awaited::kValidCounts:
    case Awaited::kNothing: break;
  }
  return "to do its part";
}

}  // namespace

Comm::Comm(int nranks, int rank, Join join, const moeConfig_t* given, int device)
    : nranks_(nranks), rank_(rank), join_(std::move(join)), config_ MOE_CONFIG_INIT {
  if (nranks < 1) fail(moeInvalidArgument, "nranks = ", nranks, ", but a communicator has at least 1 rank");
  if (rank < 0 || rank >= nranks) {
    fail(moeInvalidArgument, "rank = ", rank, ", but the ranks are 0 .. ", nranks - 1);
  }
  config_.timeoutMs = static_cast<int32_t>(kFallbackPatience.count());
  try {
    config_ = completeConfig(given, nranks);
    if (device >= 0) takeDevice(&config_, rank, device);
    chooseBackend(&config_);
    nonBlocking_ = config_.nonBlocking != 0;
    pendingHalves.reserve(static_cast<size_t>(config_.buffers));
  } catch (const Error& error) {
    refused_ = std::make_unique<Error>(error);
  }
}

Comm::~Comm() {
  aborted_.store(true, std::memory_order_release);
  if (initThread_.joinable()) initThread_.join();
  // No kernel may run while windows are unmapped under it. A GPU that fails here has stopped running them.
  if (backend_) taking([this] { return backend_->drain(), true; });
}

void Comm::start() {
  if (!nonBlocking_) {
    initialize();
    state_.store(moeSuccess, std::memory_order_release);
    return;
  }
  initThread_ = std::thread([this] {
    moeResult_t result = moeSuccess;
    std::string text;
    try {
      initialize();
    } catch (const Error& error) {
      result = error.code();
      text = error.text();
    } catch (const std::exception& error) {
      result = moeInternalError;
      text = error.what();
    }
    std::lock_guard lock(textMutex_);
    text_ = text;
    state_.store(result, std::memory_order_release);
  });
}

void Comm::initialize() {
  TraceRange range("moeCommInit");
  WaitLimit limit(Deadline::in(std::chrono::milliseconds(config_.timeoutMs)), &aborted_);
  std::unique_ptr<Bootstrap> bootstrap = join_(limit);
  join_ = nullptr;
  agreeOnConfig(*bootstrap, limit);
  exchangeReports(
      [this] {
        allocateMemory();
        return std::string();
      },
      "set up its memory", *bootstrap, limit);
  reachPeers(*bootstrap, limit);
  log(LogLevel::kInfo, "rank ", rank_, " of ", nranks_, ": path ",
      config_.path == moePathLowLatency ? "low-latency" : "direct", ", backend ",
      config_.backend == moeBackendCuda ? "cuda" : "host", ", layout ", layoutName(config_.layout), ", window ",
      layout_.window.bytes, " bytes, record ", recordBytes(layout_), " bytes");
}

void Comm::makeBackend() {
  if (config_.backend == moeBackendCuda) {
    backend_ = makeGpuBackend(config_, nranks_, rank_);
  } else {
    const int blocks = settings().hostBlocks;
    backend_ = makeHostBackend(makeLayout(config_, nranks_, rank_, blocks), blocks, settings().hostWarps, this);
  }
  states_ = std::make_shared<PeerStates>(nranks_, backend_->allocateNotices(PeerStates::bytes(nranks_)));
}

void Comm::agreeOnConfig(Bootstrap& bootstrap, const WaitLimit& limit) {
  Introduction mine{};
  mine.version = MOE_VERSION;
  mine.config = config_;
  if (refused_) {
    mine.refusal = refused_->code();
    std::strncpy(mine.text, refused_->text().c_str(), sizeof(mine.text) - 1);
  }
  std::string bytes(reinterpret_cast<const char*>(&mine), sizeof(mine));
  std::vector<std::string> all = bootstrap.allGather(bytes, limit);
  if (refused_) throw *refused_;
  std::vector<moeConfig_t> configs;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    Introduction theirs{};
    std::memcpy(&theirs, all[rank].data(), std::min(all[rank].size(), sizeof(theirs)));
    theirs.text[sizeof(theirs.text) - 1] = 0;
    if (theirs.version != MOE_VERSION || all[rank].size() != sizeof(theirs)) {
      fail(moeMismatch, "rank ", rank, " runs moecl version ", theirs.version, ", this rank ", rank_, " version ",
           MOE_VERSION, "; all ranks must load the same library");
    }
    if (theirs.refusal != moeSuccess) {
      fail(static_cast<moeResult_t>(theirs.refusal), "rank ", rank, " cannot take part: ", theirs.text);
    }
    configs.push_back(theirs.config);
  }
  compareConfigs(configs);
}

void Comm::allocateMemory() {
  makeBackend();
  layout_ = makeLayout(config_, nranks_, rank_, backend_->blocks());
  workspace_ = backend_->allocate(static_cast<size_t>(layout_.workspace.bytes));
  transport_ = config_.backend == moeBackendCuda ? makeGpuTransport(rank_, nranks_, config_.device, states_)
                                                 : makeShmTransport(rank_, nranks_, states_);
  window_ = transport_->allocate(static_cast<size_t>(layout_.window.bytes));
}

// Maps all windows, or fails on every rank with the list of all pairs that cannot reach each other.
void Comm::reachPeers(Bootstrap& bootstrap, const WaitLimit& limit) {
  peers_ = transport_->connect(window_, bootstrap, limit);
  std::vector<std::byte*> windows;
  std::string unreachable;
  for (int peer = 0; peer < nranks_; ++peer) {
    const Peer& reached = peers_[static_cast<size_t>(peer)];
    windows.push_back(reached.window);
    if (reached.reach != Reach::kNone) continue;
    unreachable += cat(unreachable.empty() ? "" : "; ", "rank ", rank_, " cannot share memory with rank ", peer, " ",
                       reached.reason);
  }
  std::string all;
  for (const std::string& one : exchangeReports([&] { return unreachable; }, "reach its peers", bootstrap, limit)) {
    if (!one.empty()) all += cat(all.empty() ? "" : "; ", one);
  }
  if (!all.empty()) fail(moeUnsupported, all);
  windows_.all = backend_->publish(windows);
  std::copy_n(windows.begin(), std::min<size_t>(windows.size(), WindowTable::kNear), windows_.near);
}

void Comm::requireReady() {
  moeResult_t now = state_.load(std::memory_order_acquire);
  if (now == moeInProgress) {
    fail(moeInProgress,
         "the communicator's init has not finished; poll moeCommGetAsyncError until it is not "
         "moeInProgress");
  }
  if (now != moeSuccess) {
    std::string text;
    state(&text);
    throw Error(now, text);
  }
  if (finalized_.load(std::memory_order_acquire)) {
    fail(moeInvalidUsage, "the communicator was finalized; only moeCommDestroy may follow");
  }
  if (!backend_->synchronous()) {
    Outcome outcome = backend_->poll(false);
    if (!outcome.ok) settle(outcome, "operation");
  }
  if (!states_->anyLost()) return;
  Failure failure = trouble();
  if (failure.code != moeSuccess) {
    breakWith(static_cast<moeResult_t>(failure.code), describe(failure, "communicator"));
  }
}

moeResult_t Comm::state(std::string* text) {
  moeResult_t now = state_.load(std::memory_order_acquire);
  if (now == moeInProgress) return now;
  if (now == moeSuccess) now = lookForTrouble(text);
  if (now != moeSuccess && text->empty()) {
    std::lock_guard lock(textMutex_);
    *text = text_;
  }
  return now;
}

// What operations that run on their own, or departed ranks, have brought since the last call.
moeResult_t Comm::lookForTrouble(std::string* text) {
  try {
    settle(backend_->poll(true), "operation");
    if (!states_->anyLost()) return moeSuccess;
    Failure failure = trouble();
    if (failure.code == moeSuccess) return moeSuccess;
    *text = describe(failure, "communicator");
    return static_cast<moeResult_t>(failure.code);
  } catch (const Error& error) {
    *text = error.text();
    return error.code();
  }
}

void Comm::abort() {
  aborted_.store(true, std::memory_order_release);
  {
    std::lock_guard lock(textMutex_);
    moeResult_t fine = moeSuccess;
    if (state_.compare_exchange_strong(fine, moeAborted)) {
      text_ = cat("rank ", rank_, ": moeCommAbort was called on this communicator");
    }
  }
  if (state_.load(std::memory_order_acquire) == moeInProgress || !transport_) return;
  states_->setAborted();
  transport_->announce(PeerState::kAborted);
}

void Comm::finalize() {
  if (state_.load(std::memory_order_acquire) == moeInProgress) {
    fail(moeInProgress, "the communicator's init has not finished; poll moeCommGetAsyncError before moeCommFinalize");
  }
  if (finalized_.exchange(true) || !transport_) return;
  backend_->drain();
  transport_->announce(aborted_.load(std::memory_order_acquire) ? PeerState::kAborted : PeerState::kLeft);
}

int32_t Comm::check(int peer) {
  if (aborted_.load(std::memory_order_acquire)) return moeAborted;
  return states_->get(peer) != PeerState::kAlive || states_->anyLost() ? moeRankLost : moeSuccess;
}

// When a rank dies, others may fail and leave in turn; the one to name is the dead one.
int Comm::blame(int peer) {
  if (aborted_.load(std::memory_order_acquire)) return rank_;
  Deadline grace = Deadline::in(kDeathGrace);
  int worst = peer;
  while (true) {
    for (int rank = 0; rank < nranks_; ++rank) {
      if (states_->get(rank) > states_->get(worst)) worst = rank;
    }
    if (states_->get(worst) == PeerState::kDead || grace.passed()) return worst;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// A lost rank or an abort that no operation has met yet; code moeSuccess if there is none.
Failure Comm::trouble() {
  Failure failure{};
  failure.code = check(rank_);
  if (failure.code != moeSuccess) failure.peer = blame(rank_);
  return failure;
}

std::string Comm::describe(const Failure& failure, const char* operation) const {
  switch (failure.code) {
    case moeAborted: return cat("rank ", rank_, ": moeCommAbort ended this ", operation);
    case moeTimeout:
      return cat("rank ", rank_, " waited ", config_.timeoutMs, " ms in its ", operation, " for rank ", failure.peer,
                 " ", awaitedText(failure.awaited), " (expected epoch ", failure.expected, ", saw ", failure.seen,
                 "); rank ", failure.peer,
                 " has not made this call, is stopped, or is slower than config.timeoutMs allows");
    case moeRankLost: {
      PeerState state = states_->get(failure.peer);
      const char* how = state == PeerState::kDead      ? " is lost: its process ended or its connection broke"
                        : state == PeerState::kAborted ? " is lost: it aborted its communicator"
                                                       : " has left: it finalized its communicator";
      return cat("rank ", failure.peer, how, "; rank ", rank_, "'s ", operation,
                 " cannot go on. Destroy this communicator and make one of the ranks that remain");
    }
    default:
      return cat("rank ", failure.peer, " sent counts to rank ", rank_, " that break the protocol (", failure.expected,
                 ", ", failure.seen, ") in its ", operation, "; its memory is corrupt or it runs another library");
  }
}

void Comm::breakWith(moeResult_t code, const std::string& text) {
  {
    std::lock_guard lock(textMutex_);
    moeResult_t fine = moeSuccess;
    if (state_.compare_exchange_strong(fine, code)) text_ = text;
  }
  log(LogLevel::kInfo, text);
  throw Error(code, text);
}

void Comm::settle(const Outcome& outcome, const char* operation) {
  if (!outcome.ok) breakWith(static_cast<moeResult_t>(outcome.failure.code), describe(outcome.failure, operation));
  const Refusal& refusal = outcome.refusal;
  if (refusal.code == moeSuccess) return;
  if (refusal.code == moeMismatch && refusal.seen != refusal.expected) {
    fail(moeMismatch, "rank ", refusal.peer, " combines its dispatch number ", refusal.seen, ", rank ", rank_,
         " its dispatch number ", refusal.expected, "; all ranks must combine the handles of the same dispatch");
  }
  fail(moePeerRefused, "rank ", refusal.peer, " refused its part of this ", operation, " (",
       moeGetErrorString(static_cast<moeResult_t>(refusal.code)),
       "), so nothing was delivered; its own error says why");
}

CommonArgs Comm::commonArgs(std::byte* handle) const {
  CommonArgs common{};
  common.layout = layout_;
  common.windows = windows_;
  common.workspace = workspace_;
  common.handle = handle;
  return common;
}

std::vector<int32_t> Comm::lostRanks() const {
  std::vector<int32_t> lost;
  bool met = state_.load(std::memory_order_acquire) != moeInProgress && states_;
  for (int rank = 0; rank < nranks_; ++rank) lost.push_back(met && states_->get(rank) >= PeerState::kAborted ? 1 : 0);
  return lost;
}

moeInfo_t predictInfo(const moeConfig_t& config, const Layout& layout) {
  const Shape& shape = layout.shape;
  moeInfo_t info = MOE_INFO_INIT;
  info.rank = shape.rank;
  info.nranks = shape.nranks;
  info.nodes = 1;
  info.path = config.path;
  info.slots = config.slots;
  info.format = config.format;
  info.backend = config.backend;
  info.localExperts = shape.localExperts();
  info.firstExpert = shape.experts.first(shape.rank);
  info.rowCapacity = shape.rowCapacity;
  info.recordBytes = recordBytes(layout);
  info.combineBytes = partialBytes(layout);
  info.windowBytes = static_cast<uint64_t>(layout.window.bytes);
  info.workspaceBytes = static_cast<uint64_t>(layout.workspace.bytes);
  info.handleBytes = static_cast<uint64_t>(layout.handle.bytes);
  info.scaleBytes = scaleBytes(shape);
  return info;
}

moeInfo_t Comm::info() const {
  moeInfo_t info = predictInfo(config_, layout_);
  const char* name = "self";
  for (const Peer& peer : peers_) {
    if (peer.reach != Reach::kSelf) name = peer.transport;
  }
  std::strncpy(info.transport, name, sizeof(info.transport) - 1);
  return info;
}

moeStats_t Comm::stats() {
  Control control = backend_->readControl(workspace_ + layout_.workspace.control);
  moeStats_t stats = MOE_STATS_INIT;
  stats.dispatches = control.dispatchEpoch;
  stats.combines = control.combineEpoch;
  stats.tokens = control.tokens;
  stats.selfRows = control.selfRows;
  stats.mappedRows = control.mappedRows;
  auto record = static_cast<uint64_t>(recordBytes(layout_));
  auto partial = static_cast<uint64_t>(partialBytes(layout_));
  stats.selfBytes = control.selfRows * record + control.selfCombineRows * partial;
  stats.mappedBytes = control.mappedRows * record + control.mappedCombineRows * partial;
  stats.combineRows = control.selfCombineRows + control.mappedCombineRows;
  if (stats.tokens > 0) {
    stats.copiesPerToken = static_cast<double>(stats.selfRows + stats.mappedRows) / static_cast<double>(stats.tokens);
  }
  return stats;
}

}  // namespace moe

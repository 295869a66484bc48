// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "base/error.h"
#include "base/settings.h"
#include "device/cuda_backend.h"
#include "device/kernels.h"
#include "device/low_latency_window.h"
#include "device/row_jobs.h"
#include "device/window_view.h"

namespace moe {
namespace {

void check(cudaError_t error, const char* call, int device) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  if (error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread) {
    fail(moeInvalidUsage, call, " on GPU ", device, ": ", cudaGetErrorName(error),
         "; a stream of this process is capturing a graph, and this cannot happen meanwhile: do it before the capture "
         "begins or after it has ended");
  }
  fail(error == cudaErrorMemoryAllocation ? moeOutOfMemory : moeDeviceError, call, " on GPU ", device, ": ",
       cudaGetErrorName(error), " (", cudaGetErrorString(error), ")");
}

// Makes a device current for a scope.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice", device);
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice", device);
    changed_ = before_ != device;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Parts of rows that are added, for the rows of a token's experts and for its partial rows: small, so that all warps
// have stages.
constexpr int64_t kSumStageBytes = 8192;
constexpr int32_t kSumWarps = 8;
// With fewer warps, two stages a warp are better than three.
constexpr int64_t kLeastStreamers = 3;
// Blocks that send one chunk when tokens are few.
constexpr int64_t kMostSenders = kChunkTokens / kRunRows;
// Communicators for so many tokens at most combine with more SMs.
constexpr int64_t kFewTokens = 1024;
// Larger tables stay in device memory.
constexpr int64_t kMostTableBytes = 16384;

// What a block of the low-latency path keeps there at most.
constexpr int64_t kMostScratchBytes = 131072;

// How the work of an operation is spread.
struct Spread {
  int send, receive;  // blocks
  bool together;      // the same blocks do both
};

// The kernels' reports, in pinned memory.
struct Reports {
  Failure failure;
  Refusal refusal;
  moeSizes_t sizes;
};

class CudaBackend : public Backend {
 public:
  CudaBackend(const moeConfig_t& config, int nranks, int rank)
      : device_(config.device), numSms_(config.numSms), timeoutMs_(config.timeoutMs), nranks_(nranks), rank_(rank) {
    OnDevice on(device_);
    check(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device_), "cudaDeviceGetAttribute", device_);
    check(cudaDeviceGetAttribute(&sharedBytes_, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_),
          "cudaDeviceGetAttribute", device_);
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_), "cudaDeviceGetAttribute",
          device_);
    staged_ = major >= 9;
    for (Kernel kernel : kKernels) {
      const void* address = kernelAddress(kernel);
      cudaFuncAttributes attributes{};
      check(cudaFuncGetAttributes(&attributes, address), "loading a kernel (cudaFuncGetAttributes)", device_);
      spare_ = std::max(spare_, static_cast<int>(attributes.sharedSizeBytes));
    }
    for (Kernel kernel : kKernels) {
      check(cudaFuncSetAttribute(kernelAddress(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 sharedBytes_ - spare_),
            "cudaFuncSetAttribute", device_);
    }
    check(cudaStreamCreateWithFlags(&own_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", device_);
    check(cudaEventCreateWithFlags(&last_, cudaEventDisableTiming), "cudaEventCreateWithFlags", device_);
    reports_ = static_cast<Reports*>(pinned(sizeof(Reports)));
    failed_ = reinterpret_cast<uint32_t*>(allocate(sizeof(uint32_t)));
  }

  ~CudaBackend() override {
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(device_);
    captured_ ? cudaDeviceSynchronize() : cudaEventSynchronize(last_);
    cudaEventDestroy(last_);
    cudaStreamDestroy(own_);
    for (void* memory : deviceMemory_) cudaFree(memory);
    cudaFreeHost(reports_);
    cudaSetDevice(before);
  }

  int blocks() const override { return sms_; }

  std::byte* allocate(size_t bytes) override {
    OnDevice on(device_);
    void* memory = nullptr;
    check(cudaMalloc(&memory, std::max<size_t>(bytes, 1)), "cudaMalloc of a workspace", device_);
    deviceMemory_.push_back(memory);
    check(cudaMemsetAsync(memory, 0, bytes, own_), "cudaMemsetAsync", device_);
    check(cudaStreamSynchronize(own_), "cudaStreamSynchronize", device_);
    return static_cast<std::byte*>(memory);
  }

  // Not the backend's own: peers in this process may still note this rank's end there.
  std::shared_ptr<void> allocateNotices(size_t bytes) override {
    std::shared_ptr<void> memory(pinned(bytes), [](void* pointer) { cudaFreeHost(pointer); });
    notices_ = static_cast<const Notices*>(memory.get());
    return memory;
  }

  std::byte* const* publish(const std::vector<std::byte*>& windows) override {
    auto* table = reinterpret_cast<std::byte**>(allocate(windows.size() * sizeof(windows[0])));
    OnDevice on(device_);
    copy(table, windows.data(), windows.size() * sizeof(windows[0]));
    return table;
  }

  Outcome dispatch(DispatchArgs& args, void* stream) override {
    if (args.common.layout.shape.path == moePathLowLatency) return slotDispatch(Kernel::kSlotDispatch, args, stream);
    int64_t chunks = ceilDiv(std::max<int64_t>(args.numTokens, 1), kChunkTokens);
    bool copies = !args.views && args.phases & kPhaseReceive;
    Spread spread = dispatchSpread(args.common.layout.shape, copies);
    if (args.phases == kPhaseSend) spread.receive = 0;
    if (args.phases == kPhaseReceive) spread.send = 0;
    spread.send = static_cast<int>(std::min<int64_t>(spread.send, chunks * kMostSenders));
    DispatchLaunch launch{args, {}};
    const Layout& layout = args.common.layout;
    launch.grid.itemBytes = static_cast<int32_t>(roundUp(dispatchItemBytes(layout), 16));
    launch.grid.tableBytes = tableBytes(layout);
    launch.grid.stream =
        staging(kDispatchWarps, room(launch.grid), bareWarpBytes(launch.grid), layout.record.end, kLeastStreamers);
    launch.grid.warps = launch.grid.stream.warps;
    run(Kernel::kDispatch, &launch, &launch.op.common, spread, stream);
    return {};
  }

  Outcome combine(CombineArgs& args, void* stream) override {
    const Shape& shape = args.common.layout.shape;
    CombineLaunch launch{args, {}};
    if (shape.path == moePathLowLatency) {
      run(Kernel::kSlotCombine, &launch, &launch.op.common, slotSpread(shape, 1), stream);
      return {};
    }
    int64_t most = shape.expertLayout() ? shape.topk : shape.distinct;
    launch.grid.itemBytes = static_cast<int32_t>(roundUp(ReduceItem::bytes(most), 16));
    launch.grid.warps = kCombineWarps;
    int64_t forStages = room(launch.grid) - kCombineWarps * bareWarpBytes(launch.grid);
    if (!shape.expertLayout()) {
      launch.grid.stream = staging(kCombineWarps, forStages, 0, shape.combineRowBytes, kLeastStreamers);
    }
    int32_t warps = shape.expertLayout() ? kSumWarps : kCombineWarps;
    launch.grid.reduce = staging(warps, forStages, 0, larger(kSumStageBytes, 512 * most), warps);
    run(Kernel::kCombine, &launch, &launch.op.common, combineSpread(shape), stream);
    return {};
  }

  Outcome count(DispatchArgs& args, void* stream, moeSizes_t* sizes) override {
    if (args.common.layout.shape.path == moePathLowLatency) {
      slotDispatch(Kernel::kSlotCount, args, stream);
    } else {
      DispatchLaunch launch{args, {}};
      launch.grid.tableBytes = tableBytes(args.common.layout);
      run(Kernel::kCount, &launch, &launch.op.common, {0, 1, false}, stream);
    }
    OnDevice on(device_);
    auto* head = reinterpret_cast<HandleHead*>(args.common.handle + args.common.layout.handle.head);
    check(cudaMemcpyAsync(&reports_->sizes, &head->sizes, sizeof(moeSizes_t), cudaMemcpyDeviceToHost,
                          static_cast<cudaStream_t>(stream)),
          "cudaMemcpyAsync", device_);
    // The kernel's waits are bounded, so this one is.
    check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize", device_);
    *sizes = reports_->sizes;
    return poll(true);
  }

  Outcome poll(bool takeRefusal) override {
    std::lock_guard lock(pollMutex_);
    Outcome outcome;
    auto* reports = const_cast<volatile Reports*>(reports_);
    if (reports->failure.claimed) {
      outcome.ok = false;
      outcome.failure = reports_->failure;
    }
    if (reports->refusal.code) {
      outcome.refusal = reports_->refusal;
      if (takeRefusal) reports->refusal.code = 0;
    }
    return outcome;
  }

  bool synchronous() const override { return false; }

  bool capturing(void* stream) override {
    OnDevice on(device_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "cudaStreamIsCapturing", device_);
    if (status == cudaStreamCaptureStatusInvalidated) {
      fail(moeInvalidUsage, "the capture of this stream has failed in an earlier call; end it and begin a new one");
    }
    bool active = status == cudaStreamCaptureStatusActive;
    captured_ = captured_ || active;
    return active;
  }
  bool captured() const override { return captured_; }

  // Nobody says which streams graphs are replayed in.
  void drain() override {
    OnDevice on(device_);
    if (captured_) check(cudaDeviceSynchronize(), "cudaDeviceSynchronize", device_);
    check(cudaEventSynchronize(last_), "cudaEventSynchronize", device_);
  }

  Control readControl(const std::byte* control) override {
    Control result{};
    read(&result, control, sizeof(result));
    return result;
  }
  HandleHead readHandle(const std::byte* head) override {
    HandleHead result{};
    read(&result, head, sizeof(result));
    return result;
  }

 private:
  Outcome slotDispatch(Kernel kernel, DispatchArgs& args, void* stream) {
    const Layout& layout = args.common.layout;
    Spread spread = kernel == Kernel::kSlotCount ? Spread{1, 1, true} : slotSpread(layout.shape, 1 << kMostSpread);
    DispatchLaunch launch{args, {}};
    launch.grid.tableBytes = tableBytes(layout);
    int64_t scratch = slotScratchBytes(layout);
    if (scratch <= kMostScratchBytes) launch.grid.stream = {1, 1, static_cast<int32_t>(roundUp(scratch, 128))};
    // A half does not know how much comes, or has no use for teams.
    if (args.phases == kPhaseBoth) spreadRows(&launch.op.common, spread.send, args.numTokens);
    bool few = kernel == Kernel::kSlotDispatch && launch.op.common.allSpread > 0;
    run(few ? Kernel::kFewRowsDispatch : kernel, &launch, &launch.op.common, spread, stream);
    return {};
  }

  // A signal tells of what one block has sent, so that blocks cannot share a row there.
  static void spreadRows(CommonArgs* common, int blocks, int64_t tokens) {
    const Layout& layout = common->layout;
    if (layout.shape.signals()) return;
    common->blocks = blocks;
    int workers = SlotRoles(*common, true).workers;
    common->ownSpread = spreadOf(tokens, workers, layout.slot.allSlices);
    common->allSpread = spreadOf(tokens * layout.shape.nranks, workers, layout.slot.allSlices);
  }

  void* pinned(size_t bytes) {
    OnDevice on(device_);
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc", device_);
    std::memset(memory, 0, bytes);
    return memory;
  }

  // On a stream of the backend's own, so that neither other streams nor other ranks on this GPU are waited for.
  void copy(void* to, const void* from, size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, own_), "cudaMemcpyAsync", device_);
    check(cudaStreamSynchronize(own_), "cudaStreamSynchronize", device_);
  }

  void read(void* to, const void* from, size_t bytes) {
    OnDevice on(device_);
    check(cudaEventSynchronize(last_), "cudaEventSynchronize", device_);
    copy(to, from, bytes);
  }

  // Measured on two H200s: docs/performance.md.
  // Lanes quantize what the copy engine would carry, so that takes more SMs than the link needs.
  Spread dispatchSpread(const Shape& shape, bool places) const {
    if (shape.quantizes()) return places ? spread(50, 80, 2, 5) : spread(70, 12, 6, 7);
    return places ? spread(17, 110, 1, 3) : spread(17, 6, 13, 15);
  }
  // Where rows are added before they are sent, all of them are read first. Few tokens are a matter of latency, which
  // more SMs make shorter; many of the link, which few SMs fill.
  Spread combineSpread(const Shape& shape) const {
    if (shape.expertLayout()) return spread(100, 31, 2, 3);
    return shape.maxTokens <= kFewTokens ? spread(24, 60, 2, 5) : spread(9, 14, 2, 5);
  }

  // Low latency: `sharing` blocks for each row that may come, one that counts, and one that tells what was read.
  Spread slotSpread(const Shape& shape, int64_t sharing) const {
    int limit = numSms_ > 0 ? std::min(numSms_, sms_) : sms_;
    auto blocks = static_cast<int>(std::min<int64_t>(limit, sharing * shape.nranks * shape.maxTokens + 2));
    return {blocks, blocks, true};
  }

  static int32_t tableBytes(const Layout& layout) {
    int64_t bytes = roundUp(layout.workspace.placeStride, 128);
    return bytes <= kMostTableBytes ? static_cast<int32_t>(bytes) : 0;
  }

  // As many blocks as wanted and one that signals, or what config.numSms leaves, of which `part` in `of` send.
  Spread spread(int send, int receive, int part, int of) const {
    int limit = numSms_ > 0 ? std::min(numSms_, sms_) : sms_;
    if (limit < 3) return {1, 1, true};
    if (limit > send + receive) return {send, receive, false};
    int sending = std::max(1, (limit - 1) * part / of);
    return {sending, limit - 1 - sending, false};
  }

  // What a block has for stages, items and barriers.
  int64_t room(const CudaGrid& grid) const { return sharedBytes_ - spare_ - 128 - grid.tableBytes; }

  // As many warps of `most` as fit, each with `bare` bytes and its stages: three if that leaves `least` warps, else
  // two.
  Staging staging(int32_t most, int64_t room, int64_t bare, int64_t bytes, int64_t least) const {
    auto stage = static_cast<int32_t>(roundUp(bytes, 128));
    for (int32_t stages : {3, 2}) {
      if (!staged_) break;
      int64_t warps = room / (bare + int64_t{stages} * stage);
      if (warps < (stages == 3 ? least : 1)) continue;
      return {static_cast<int32_t>(std::min<int64_t>(warps, most)), stages, stage};
    }
    return {most, 0, 0};
  }

  template <class Launch>
  void run(Kernel kernel, Launch* launch, CommonArgs* common, Spread spread, void* stream) {
    OnDevice on(device_);
    auto target = static_cast<cudaStream_t>(stream);
    // Nobody tells the device of a stream that is capturing.
    bool captures = capturing(stream);
    if (!captures) requireOwnStream(target);
    int signalling = spread.send > 0 ? 1 : 0;
    // One of the two may be left out.
    int most = std::max(spread.send, spread.receive);
    int blocks = spread.together ? most : spread.send + signalling + spread.receive;
    common->blocks = blocks;
    common->sendBlocks = spread.send;
    common->signalBlock = spread.together ? 0 : spread.send;
    common->receiveBlocks = spread.receive;
    common->outcome = &reports_->refusal;
    CudaGrid& grid = launch->grid;
    grid.notices = notices_;
    grid.failure = &reports_->failure;
    grid.failed = failed_;
    grid.timeoutNs = static_cast<uint64_t>(timeoutMs_) * 1000000;
    grid.nranks = nranks_;
    grid.rank = rank_;
    void* arguments[] = {launch};
    auto shared = static_cast<size_t>(moe::sharedBytes(grid));
    grid.itemsAt = static_cast<int32_t>(stagesBytes(grid));
    grid.tableAt = static_cast<int32_t>(shared) - grid.tableBytes;
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(32 * warpsOf(kernel)));
    config.dynamicSmemBytes = shared;
    config.stream = target;
    config.attrs = &early;
    config.numAttrs = startsEarly(kernel, blocks) ? 1 : 0;
    check(cudaLaunchKernelExC(&config, kernelAddress(kernel), arguments), "cudaLaunchKernelExC", device_);
    if (!captures) check(cudaEventRecord(last_, target), "cudaEventRecord", device_);
  }

  // Whether a kernel may be launched while one of ours before it still runs, in a graph or a stream: it waits where it
  // begins, on SMs of its own. Measured, that is slower where it takes SMs that the other is just leaving. And where
  // ranks share a GPU, one's kernel may need those SMs to end.
  bool startsEarly(Kernel kernel, int blocks) const {
    return lowLatency(kernel) && staged_ && 2 * blocks <= sms_ && settings().allowSharedGpu == 0;
  }

  void requireOwnStream(cudaStream_t stream) const {
    if (!stream) return;
    int owner = device_;
    check(cudaStreamGetDevice(stream, &owner), "cudaStreamGetDevice", device_);
    if (owner != device_) {
      fail(moeInvalidArgument, "stream belongs to GPU ", owner, ", but the communicator's rank ", rank_,
           " runs on GPU ", device_);
    }
  }

  const int device_;
  const int numSms_;
  const int timeoutMs_;
  const int nranks_, rank_;
  int sms_ = 0;
  int sharedBytes_ = 0;         // a block may have
  int spare_ = 0;               // shared memory that kernels use themselves
  bool staged_ = false;         // the GPU has the copy engine
  cudaStream_t own_ = nullptr;  // for copies at init and for queries
  cudaEvent_t last_ = nullptr;  // after the operation that was launched last, and not captured
  bool captured_ = false;       // there may be graphs with operations
  Reports* reports_ = nullptr;
  const Notices* notices_ = nullptr;
  uint32_t* failed_ = nullptr;
  std::mutex pollMutex_;
  std::vector<void*> deviceMemory_;
};

}  // namespace

bool chooseCudaDevice(int32_t* device, std::string* reason) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    *reason = cat("no GPU can be used here (cudaGetDeviceCount: ", cudaGetErrorString(error), ")");
    return false;
  }
  int chosen = *device;
  if (chosen < 0 && cudaGetDevice(&chosen) != cudaSuccess) chosen = 0;
  if (chosen >= count) {
    *reason = cat("config.device = ", chosen, " does not exist; this process sees GPUs 0 to ", count - 1);
    return false;
  }
  *device = chosen;
  return true;
}

std::unique_ptr<Backend> makeCudaBackend(const moeConfig_t& config, int nranks, int rank) {
  return std::make_unique<CudaBackend>(config, nranks, rank);
}

}  // namespace moe

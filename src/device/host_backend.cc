// SPDX-License-Identifier: Apache-2.0
#include "device/host_backend.h"

#include <sys/mman.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "device/direct_combine.h"
#include "device/direct_dispatch.h"
#include "device/low_latency_combine.h"
#include "device/low_latency_dispatch.h"

namespace moe {
namespace {

// Anonymous memory that is zeroed by nature and takes no space until it is touched.
class Pages {
 public:
  explicit Pages(size_t bytes) : bytes_(bytes > 0 ? bytes : 1) {
    memory_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) failErrno(errno, "cannot allocate a workspace of ", bytes, " bytes");
  }
  ~Pages() { ::munmap(memory_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::byte* base() const { return static_cast<std::byte*>(memory_); }

 private:
  void* memory_;
  size_t bytes_;
};

// Runs a function on every warp of the grid; the caller is the first of them.
class Team {
 public:
  using Task = void (*)(void* context, int thread);

  explicit Team(int threads) {
    for (int thread = 1; thread < threads; ++thread) {
      members_.emplace_back([this, thread] { serve(thread); });
    }
  }
  ~Team() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& member : members_) member.join();
  }

  void run(Task task, void* context) {
    if (members_.empty()) return task(context, 0);
    {
      std::lock_guard lock(mutex_);
      task_ = task;
      context_ = context;
      running_ = static_cast<int>(members_.size());
      ++round_;
    }
    wake_.notify_all();
    task(context, 0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void serve(int thread) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
      if (stopping_) return;
      seen = round_;
      lock.unlock();
      task_(context_, thread);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  int running_ = 0;
  uint64_t round_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> members_;
};

class HostBackend : public Backend {
 public:
  HostBackend(int blocks, int warps, WaitGuard* guard)
      : grid_(blocks, warps, guard),
        memory_(static_cast<size_t>(blocks * warps) * HostExec::kMemoryBytes),
        team_(blocks * warps) {}

  int blocks() const override { return grid_.blocks; }

  std::byte* allocate(size_t bytes) override {
    allocations_.push_back(std::make_unique<Pages>(bytes));
    return allocations_.back()->base();
  }

  std::shared_ptr<void> allocateNotices(size_t bytes) override {
    return {new uint64_t[bytes / 8 + 1]{}, [](void* memory) { delete[] static_cast<uint64_t*>(memory); }};
  }

  std::byte* const* publish(const std::vector<std::byte*>& windows) override {
    windows_ = windows;
    return windows_.data();
  }

  Outcome dispatch(DispatchArgs& args, void*) override {
    return run(args, [](HostExec& exec, const DispatchArgs& a) {
      lowLatency(a.common) ? slotDispatch(exec, a) : directDispatch(exec, a);
    });
  }
  Outcome count(DispatchArgs& args, void*, moeSizes_t* sizes) override {
    Outcome outcome = run(args, [](HostExec& exec, const DispatchArgs& a) {
      if (exec.block() == 0) lowLatency(a.common) ? slotCount(exec, a) : countDispatch(exec, a);
    });
    *sizes = args.common.handleHead()->sizes;
    return outcome;
  }

  Outcome poll(bool) override { return {}; }
  bool synchronous() const override { return true; }
  bool capturing(void*) override { return false; }
  bool captured() const override { return false; }
  void drain() override {}
  Outcome combine(CombineArgs& args, void*) override {
    return run(args, [](HostExec& exec, const CombineArgs& a) {
      lowLatency(a.common) ? slotCombine(exec, a) : directCombine(exec, a);
    });
  }

  Control readControl(const std::byte* control) override { return *reinterpret_cast<const Control*>(control); }
  HandleHead readHandle(const std::byte* head) override { return *reinterpret_cast<const HandleHead*>(head); }

 private:
  static bool lowLatency(const CommonArgs& common) { return common.layout.shape.path == moePathLowLatency; }

  template <class Args, class Operation>
  Outcome run(Args& args, Operation operation) {
    Outcome outcome;
    args.common.blocks = args.common.sendBlocks = args.common.receiveBlocks = grid_.blocks;
    args.common.signalBlock = grid_.blocks - 1;
    args.common.outcome = &outcome.refusal;
    grid_.failure = {};
    struct Context {
      HostBackend* self;
      const Args* args;
      Operation* operation;
    } context{this, &args, &operation};
    team_.run(
        [](void* opaque, int thread) {
          auto* work = static_cast<Context*>(opaque);
          HostGrid& grid = work->self->grid_;
          HostExec exec(grid, thread / grid.warps, thread % grid.warps,
                        work->self->memory_.data() + static_cast<size_t>(thread) * HostExec::kMemoryBytes);
          (*work->operation)(exec, *work->args);
        },
        &context);
    outcome.failure = grid_.failure;
    outcome.ok = grid_.failure.claimed == 0;
    return outcome;
  }

  HostGrid grid_;
  std::vector<std::byte> memory_;  // of the warps
  std::vector<std::unique_ptr<Pages>> allocations_;
  std::vector<std::byte*> windows_;
  Team team_;  // last: its threads end before what they use
};

// HostExec's items have one size, fixed for the largest legal shape; the jobs say what they need.
void requireItemsFit(const Layout& layout) {
  const Shape& shape = layout.shape;
  struct Need {
    const char* job;
    int64_t bytes;
  };
  for (Need need :
       {Need{"sends", SendJob<HostExec>::itemBytes(layout)}, Need{"places", PlaceJob<HostExec>::itemBytes(shape)},
        Need{"adds", ReduceItem::bytes(larger(larger(shape.topk, shape.distinct), 1))}}) {
    if (need.bytes <= HostExec::kItemBytes) continue;
    fail(moeInternalError, "rank ", shape.rank, ": the job that ", need.job, " rows needs ", need.bytes,
         " bytes for one of them (maxTopk ", shape.topk, ", ", shape.payloads,
         " payloads), but HostExec::kItemBytes is ", HostExec::kItemBytes, "; raise that");
  }
}

}  // namespace

std::unique_ptr<Backend> makeHostBackend(const Layout& layout, int blocks, int warps, WaitGuard* guard) {
  requireItemsFit(layout);
  return std::make_unique<HostBackend>(blocks, warps, guard);
}

}  // namespace moe

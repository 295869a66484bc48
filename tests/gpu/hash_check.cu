// SPDX-License-Identifier: Apache-2.0
// Many dispatches and combines between ranks that are threads of this process, with routing, sizes and data that change
// every call and delays injected at random. Every row is checked on its GPU against a hash of (source, token, call).
// With --graphs 1 ranks choose, each for itself, between replays of a graph for each power of two of tokens and calls
// that are not captured.
// Needs no test framework. Exit codes: 0 no mismatch, 1 a mismatch or an error, 77 no GPU.
#include <cuda_runtime.h>
#include <moe.h>

#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Shape {
  int ranks = 2, calls = 200, hidden = 7168, experts = 256, topk = 8, align = 1, stall = 0, sms = 0, gpus = 0;
  int64_t tokens = 512;
  int layout = moeLayoutRank;
  bool views = true;
  bool shared = false;  // ranks share a GPU
  bool absent = false;  // the last rank makes no calls, and the others' must time out and do no harm
  bool graphs = false;
};

[[noreturn]] void die(const std::string& text) {
  std::fprintf(stderr, "hash_check: %s\n", text.c_str());
  // Other threads may be inside CUDA, which std::exit would take down under them.
  std::_Exit(1);
}
void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) die(std::string(what) + ": " + cudaGetErrorString(error));
}
void check(moeResult_t result, const char* what) {
  if (result != moeSuccess) die(std::string(what) + ": " + moeGetErrorString(result) + ": " + moeGetLastError());
}

__host__ __device__ inline uint32_t mix(uint64_t key) {
  key ^= key >> 33;
  key *= 0xff51afd7ed558ccdull;
  key ^= key >> 33;
  key *= 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(key ^ (key >> 33));
}
__host__ __device__ inline int64_t tokensOf(int call, int rank, const Shape& s) {
  uint32_t h = mix(uint64_t(call) * 977 + uint64_t(rank) * 131 + 5);
  if (!s.graphs) return h % static_cast<uint64_t>(s.tokens + 1);
  int64_t tokens = 1;
  for (uint32_t step = h % 16; step > 0 && 2 * tokens <= s.tokens; --step) tokens *= 2;
  return tokens;
}
// A few ids are nobody's, and a few repeat.
__host__ __device__ inline int64_t idOf(int call, int rank, int64_t token, int k, int experts) {
  uint32_t h = mix((uint64_t(call) << 40) ^ (uint64_t(rank) << 32) ^ (uint64_t(token) << 7) ^ uint64_t(k));
  return h % 29 == 0 ? -1 : static_cast<int64_t>((h >> 5) % static_cast<uint32_t>(experts));
}
__host__ __device__ inline int ownerOf(int64_t id, int experts, int ranks) {
  int share = experts / ranks, extra = experts % ranks;
  int64_t larger = int64_t(extra) * (share + 1);
  return static_cast<int>(id < larger ? id / (share + 1) : extra + (id - larger) / share);
}
// Small integers, exact in bf16 also when so many of them are added.
constexpr int kMostCopies = 16;
__device__ inline float valueOf(int call, int source, int64_t token, int64_t h) {
  return static_cast<float>(static_cast<int>((source * 131 + token * 7 + call * 3 + h) % 32) - 16);
}
__device__ inline uint16_t toBf16(float value) { return static_cast<uint16_t>(__float_as_uint(value) >> 16); }

__global__ void makeInputs(uint16_t* rows, int64_t* ids, const int* now, int rank, int64_t tokens, Shape s) {
  int call = *now;
  for (int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    for (int h = threadIdx.x; h < s.hidden; h += blockDim.x) {
      rows[token * s.hidden + h] = toBf16(valueOf(call, rank, token, h));
    }
    for (int k = threadIdx.x; k < s.topk; k += blockDim.x) {
      ids[token * s.topk + k] = idOf(call, rank, token, k, s.experts);
    }
  }
}

// Copies that one token makes: rows of rank `at` (or of all ranks if -1) in the layout.
__device__ int copiesOf(int call, int source, int64_t token, int at, const Shape& s) {
  int copies = 0;
  for (int k = 0; k < s.topk; ++k) {
    int64_t id = idOf(call, source, token, k, s.experts);
    if (id < 0) continue;
    int owner = ownerOf(id, s.experts, s.ranks);
    bool first = at < 0 || owner == at;
    for (int before = 0; first && before < k; ++before) {
      int64_t other = idOf(call, source, token, before, s.experts);
      if (other < 0) continue;
      first = s.layout == moeLayoutRank ? ownerOf(other, s.experts, s.ranks) != owner : other != id;
    }
    copies += first;
  }
  return copies;
}

struct Counters {
  unsigned long long wrong, rows, expected;
};

__global__ void countExpected(Counters* counters, const int* now, int rank, Shape s) {
  int call = *now;
  for (int source = 0; source < s.ranks; ++source) {
    int64_t tokens = tokensOf(call, source, s);
    for (int64_t t = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; t < tokens; t += int64_t(gridDim.x) * blockDim.x) {
      int copies = copiesOf(call, source, t, rank, s);
      if (copies) atomicAdd(&counters->expected, static_cast<unsigned long long>(copies));
    }
  }
}

__global__ void checkRows(Counters* counters, const std::byte* rows, int64_t stride, const int32_t* sources,
                          int64_t capacity, const int* now, Shape s) {
  int call = *now;
  for (int64_t row = blockIdx.x; row < capacity; row += gridDim.x) {
    int source = sources[2 * row];
    int64_t token = sources[2 * row + 1];
    if (source < 0) continue;
    const auto* values = reinterpret_cast<const uint16_t*>(rows + row * stride);
    bool wrong = false;
    for (int h = threadIdx.x; h < s.hidden; h += blockDim.x) {
      wrong = wrong || values[h] != toBf16(valueOf(call, source, token, h));
    }
    int any = __syncthreads_or(wrong);
    if (threadIdx.x == 0) {
      atomicAdd(&counters->rows, 1ull);
      if (any) atomicAdd(&counters->wrong, 1ull);
    }
  }
}

__global__ void checkSums(Counters* counters, const uint16_t* sums, const int* now, int rank, int64_t tokens, Shape s) {
  int call = *now;
  for (int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    auto copies = static_cast<float>(copiesOf(call, rank, token, -1, s));
    bool wrong = false;
    for (int h = threadIdx.x; h < s.hidden; h += blockDim.x) {
      float got = __uint_as_float(static_cast<uint32_t>(sums[token * s.hidden + h]) << 16);
      wrong = wrong || got != copies * valueOf(call, rank, token, h);
    }
    if (__syncthreads_or(wrong) && threadIdx.x == 0) atomicAdd(&counters->wrong, 1ull);
  }
}

__global__ void setCall(int* now, int call) { *now = call; }

__global__ void spin(long long cycles) {
  long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

template <class T>
T* device(size_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T) + 256), "cudaMalloc");
  check(cudaMemset(memory, 0xa5, count * sizeof(T)), "cudaMemset");
  return static_cast<T*>(memory);
}

// One rank: its memory, and what it does in a call. What changes from call to call lies in device memory, so that a
// captured call can be replayed.
class Rank {
 public:
  Rank(moeComm_t comm, int rank, int gpu, const Shape& s) : comm_(comm), rank_(rank), s_(s) {
    check(cudaSetDevice(gpu), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    moeInfo_t info = MOE_INFO_INIT;
    check(moeGetInfo(comm, &info), "moeGetInfo");
    rowBytes_ = int64_t(s.hidden) * 2;
    capacity_ = info.rowCapacity;
    x_ = device<uint16_t>(size_t(s.tokens) * s.hidden);
    ids_ = device<int64_t>(size_t(s.tokens) * s.topk);
    sums_ = device<uint16_t>(size_t(s.tokens) * s.hidden);
    rows_ = s.views ? nullptr : device<std::byte>(size_t(capacity_) * rowBytes_);
    sources_ = device<int32_t>(size_t(capacity_) * 2);
    counters_ = device<Counters>(1);
    now_ = device<int>(1);
    check(cudaMemset(counters_, 0, sizeof(Counters)), "cudaMemset");
    check(moeHandleInit(comm, device<std::byte>(info.handleBytes), info.handleBytes, &handle_), "moeHandleInit");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  void capture() {
    for (int64_t tokens = 1; tokens <= s_.tokens; tokens *= 2) {
      cudaGraph_t graph;
      // No other thread's calls are any business of this capture.
      check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
      enqueue(tokens, [] {});
      check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
      graphs_.push_back(nullptr);
      check(cudaGraphInstantiate(&graphs_.back(), graph, 0), "cudaGraphInstantiate");
      check(cudaGraphUpload(graphs_.back(), stream_), "cudaGraphUpload");
      check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    }
    synchronize();
  }

  // `launched` is called after each operation's launch.
  template <class Launched>
  void run(int call, Launched launched) {
    int64_t tokens = tokensOf(call, rank_, s_);
    setCall<<<1, 1, 0, stream_>>>(now_, call);
    stall(call, 31);
    if (s_.graphs && mix(uint64_t(call) * 41 + uint64_t(rank_)) % 4 != 0) {
      size_t nth = 0;
      while (int64_t{1} << nth < tokens) ++nth;
      check(cudaGraphLaunch(graphs_.at(nth), stream_), "cudaGraphLaunch");
    } else {
      enqueue(tokens, [&] {
        launched();
        stall(call, 37);
      });
    }
    if (call % 50 == 49) synchronize();
  }

  Counters finish() {
    synchronize();
    moeResult_t state;
    check(moeCommGetAsyncError(comm_, &state), "moeCommGetAsyncError");
    if (s_.absent) return {state != moeTimeout, 0, 0};
    check(state, "operation");
    Counters result;
    check(cudaMemcpy(&result, counters_, sizeof result, cudaMemcpyDeviceToHost), "cudaMemcpy");
    check(moeHandleDestroy(handle_), "moeHandleDestroy");
    return result;
  }

 private:
  void synchronize() { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }
  void stall(int call, uint64_t salt) {
    if (s_.stall && mix(uint64_t(call) * salt + uint64_t(rank_)) % 7 == 0) {
      spin<<<1, 1, 0, stream_>>>(s_.stall * 1000ll);
    }
  }

  template <class Launched>
  void enqueue(int64_t tokens, Launched launched) {
    makeInputs<<<64, 256, 0, stream_>>>(x_, ids_, now_, rank_, tokens, s_);
    moeRows_t in = {x_, rowBytes_, 0, moeRoleTokens, 0}, out = {rows_, rowBytes_, 0, moeRoleTokens, 0};
    moeReceive_t receive = MOE_RECEIVE_INIT;
    receive.rows = s_.views ? nullptr : &out;
    receive.sources = sources_;
    moeDispatchArgs_t send = MOE_DISPATCH_ARGS_INIT;
    send.numTokens = tokens;
    send.topk = s_.topk;
    send.ids = ids_;
    send.inputs = &in;
    send.numInputs = 1;
    send.receive = &receive;
    check(moeDispatch(comm_, &send, handle_, stream_), "moeDispatch");
    launched();
    moeRows_t view = out;
    if (s_.views) check(moeGetViews(comm_, handle_, &view, 1), "moeGetViews");
    int64_t stride = view.strideBytes ? view.strideBytes : rowBytes_;
    checkRows<<<128, 256, 0, stream_>>>(counters_, static_cast<std::byte*>(view.data), stride, sources_, capacity_,
                                        now_, s_);
    countExpected<<<32, 256, 0, stream_>>>(counters_, now_, rank_, s_);
    moeCombineArgs_t back = MOE_COMBINE_ARGS_INIT;
    back.rows = rows_;
    back.output = sums_;
    check(moeCombine(comm_, &back, handle_, stream_), "moeCombine");
    launched();
    checkSums<<<64, 256, 0, stream_>>>(counters_, sums_, now_, rank_, tokens, s_);
  }

  moeComm_t comm_;
  int rank_;
  Shape s_;
  cudaStream_t stream_ = nullptr;
  int64_t rowBytes_ = 0, capacity_ = 0;
  uint16_t *x_ = nullptr, *sums_ = nullptr;
  int64_t* ids_ = nullptr;
  std::byte* rows_ = nullptr;
  int32_t* sources_ = nullptr;
  Counters* counters_ = nullptr;
  int* now_ = nullptr;  // the call
  moeHandle_t handle_ = nullptr;
  std::vector<cudaGraphExec_t> graphs_;  // for 1, 2, 4 ... tokens
};

Counters runRank(moeComm_t comm, int rank, int gpu, const Shape& s, std::barrier<>& ready) {
  Rank mine(comm, rank, gpu, s);
  if (s.graphs) mine.capture();
  // Ranks may share a GPU: nobody synchronizes a whole device once operations wait for each other.
  ready.arrive_and_wait();
  if (s.absent && rank == s.ranks - 1) return {};
  // CUDA may put what one stream must wait for before what another could run. Where ranks share a GPU, nobody therefore
  // launches what follows an operation until all have launched the operation.
  auto meet = [&] {
    if (s.shared && !s.absent) ready.arrive_and_wait();
  };
  for (int call = 0; call < s.calls; ++call) mine.run(call, meet);
  return mine.finish();
}

Shape parse(int argc, char** argv) {
  Shape s;
  for (int i = 1; i + 1 < argc; i += 2) {
    std::string name = argv[i], value = argv[i + 1];
    auto number = std::atoi(value.c_str());
    if (name == "--ranks")
      s.ranks = number;
    else if (name == "--calls")
      s.calls = number;
    else if (name == "--tokens")
      s.tokens = number;
    else if (name == "--hidden")
      s.hidden = number;
    else if (name == "--experts")
      s.experts = number;
    else if (name == "--topk")
      s.topk = number;
    else if (name == "--align")
      s.align = number;
    else if (name == "--stall")
      s.stall = number;
    else if (name == "--sms")
      s.sms = number;
    else if (name == "--gpus")
      s.gpus = number;
    else if (name == "--graphs")
      s.graphs = number != 0;
    else if (name == "--absent")
      s.absent = number != 0;
    else if (name == "--layout") {
      s.views = value == "views";
      s.layout = value == "expert" ? moeLayoutExpert : value == "padded" ? moeLayoutExpertPadded : moeLayoutRank;
    } else
      die("unknown option " + name);
  }
  // Views move from replay to replay.
  if (s.graphs && s.views) die("--graphs 1 needs a layout other than views");
  if (s.topk > kMostCopies && s.layout != moeLayoutRank) die("--topk must be at most 16: sums of more are not exact");
  return s;
}

}  // namespace

int main(int argc, char** argv) {
  Shape s = parse(argc, argv);
  // A kernel that is loaded at its first launch waits for those that run, which may wait for this very rank; and so do
  // streams that share a hardware queue.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("MOE_ALLOW_SHARED_GPU", "1", 1);
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
    std::puts("hash_check: skipped, no GPU");
    return 77;
  }
  if (s.gpus > 0 && s.gpus < gpus) gpus = s.gpus;
  std::vector<moeComm_t> comms(static_cast<size_t>(s.ranks));
  moeConfig_t config = MOE_CONFIG_INIT;
  config.maxTokensPerRank = s.tokens;
  config.hidden = s.hidden;
  config.numExperts = s.experts;
  config.maxTopk = s.topk;
  config.layout = s.layout;
  config.expertAlign = s.align;
  config.backend = moeBackendCuda;
  if (s.absent) config.timeoutMs = 3000;  // init, too, must be done by then
  // Ranks that share a GPU need room for each other's kernels.
  int perGpu = (s.ranks + gpus - 1) / gpus;
  s.shared = perGpu > 1;
  // Making a graph may wait for all that runs on its GPU.
  if (s.graphs && s.shared) {
    std::puts("hash_check: skipped, graphs need a GPU for each rank");
    return 77;
  }
  config.numSms = s.sms > 0 || perGpu == 1 ? s.sms : 120 / perGpu;  // per GPU
  moeUniqueId_t id;
  check(moeGetUniqueId(&id), "moeGetUniqueId");
  std::vector<Counters> results(static_cast<size_t>(s.ranks));
  std::barrier ready(s.ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < s.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      auto at = static_cast<size_t>(rank);
      moeConfig_t mine = config;
      mine.device = rank % gpus;
      check(moeCommInit(&comms[at], s.ranks, &id, rank, &mine), "moeCommInit");
      results[at] = runRank(comms[at], rank, rank % gpus, s, ready);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (moeComm_t comm : comms) check(moeCommDestroy(comm), "moeCommDestroy");
  bool ok = true;
  for (int rank = 0; rank < s.ranks; ++rank) {
    const Counters& c = results[static_cast<size_t>(rank)];
    ok = ok && c.wrong == 0 && c.rows == c.expected && (c.rows > 0 || s.absent);
    std::printf("rank %d: %llu rows, %llu expected, %llu wrong rows or sums\n", rank, c.rows, c.expected, c.wrong);
  }
  std::printf("hash_check: %d calls, %d ranks: %s\n", s.calls, s.ranks, ok ? "OK" : "FAILED");
  return ok ? 0 : 1;
}

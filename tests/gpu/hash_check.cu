// SPDX-License-Identifier: Apache-2.0
// Many dispatches and combines between ranks that are threads of this process, with routing, sizes and data that change
// every call and delays injected at random. Every row is checked on its GPU against a hash of (source, token, call).
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
__host__ __device__ inline int64_t tokensOf(int call, int rank, int64_t most) {
  return mix(uint64_t(call) * 977 + uint64_t(rank) * 131 + 5) % static_cast<uint64_t>(most + 1);
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
// Small integers, exact in bf16 also when 16 of them are added.
__device__ inline float valueOf(int call, int source, int64_t token, int64_t h) {
  return static_cast<float>(static_cast<int>((source * 131 + token * 7 + call * 3 + h) % 32) - 16);
}
__device__ inline uint16_t toBf16(float value) { return static_cast<uint16_t>(__float_as_uint(value) >> 16); }

__global__ void makeInputs(uint16_t* rows, int64_t* ids, int call, int rank, int64_t tokens, Shape s) {
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

__global__ void countExpected(Counters* counters, int call, int rank, Shape s) {
  for (int source = 0; source < s.ranks; ++source) {
    int64_t tokens = tokensOf(call, source, s.tokens);
    for (int64_t t = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; t < tokens; t += int64_t(gridDim.x) * blockDim.x) {
      int copies = copiesOf(call, source, t, rank, s);
      if (copies) atomicAdd(&counters->expected, static_cast<unsigned long long>(copies));
    }
  }
}

__global__ void checkRows(Counters* counters, const std::byte* rows, int64_t stride, const int32_t* sources,
                          int64_t capacity, int call, Shape s) {
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

__global__ void checkSums(Counters* counters, const uint16_t* sums, int call, int rank, int64_t tokens, Shape s) {
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

Counters runRank(moeComm_t comm, int rank, int gpu, Shape s, std::barrier<>& ready) {
  // CUDA may put what one stream must wait for before what another could run. Where ranks share a GPU, nobody therefore
  // launches what follows an operation until all have launched the operation.
  auto meet = [&] {
    if (s.shared && !s.absent) ready.arrive_and_wait();
  };
  check(cudaSetDevice(gpu), "cudaSetDevice");
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  moeInfo_t info = MOE_INFO_INIT;
  check(moeGetInfo(comm, &info), "moeGetInfo");
  int64_t rowBytes = int64_t(s.hidden) * 2;
  int64_t capacity = info.rowCapacity;
  auto* x = device<uint16_t>(size_t(s.tokens) * s.hidden);
  auto* ids = device<int64_t>(size_t(s.tokens) * s.topk);
  auto* sums = device<uint16_t>(size_t(s.tokens) * s.hidden);
  auto* rows = s.views ? nullptr : device<std::byte>(size_t(capacity) * rowBytes);
  auto* sources = device<int32_t>(size_t(capacity) * 2);
  auto* counters = device<Counters>(1);
  check(cudaMemset(counters, 0, sizeof(Counters)), "cudaMemset");
  moeHandle_t handle;
  check(moeHandleInit(comm, device<std::byte>(info.handleBytes), info.handleBytes, &handle), "moeHandleInit");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  // Ranks may share a GPU: nobody synchronizes a whole device once operations wait for each other.
  ready.arrive_and_wait();
  if (s.absent && rank == s.ranks - 1) return {};
  for (int call = 0; call < s.calls; ++call) {
    int64_t tokens = tokensOf(call, rank, s.tokens);
    makeInputs<<<64, 256, 0, stream>>>(x, ids, call, rank, tokens, s);
    if (s.stall && mix(uint64_t(call) * 31 + uint64_t(rank)) % 7 == 0) spin<<<1, 1, 0, stream>>>(s.stall * 1000ll);
    moeRows_t in = {x, rowBytes, 0, moeRoleTokens, 0}, out = {rows, rowBytes, 0, moeRoleTokens, 0};
    moeReceive_t receive = MOE_RECEIVE_INIT;
    receive.rows = s.views ? nullptr : &out;
    receive.sources = sources;
    moeDispatchArgs_t send = MOE_DISPATCH_ARGS_INIT;
    send.numTokens = tokens;
    send.topk = s.topk;
    send.ids = ids;
    send.inputs = &in;
    send.numInputs = 1;
    send.receive = &receive;
    check(moeDispatch(comm, &send, handle, stream), "moeDispatch");
    meet();
    moeRows_t view = out;
    if (s.views) check(moeGetViews(comm, handle, &view, 1), "moeGetViews");
    int64_t stride = view.strideBytes ? view.strideBytes : rowBytes;
    checkRows<<<128, 256, 0, stream>>>(counters, static_cast<std::byte*>(view.data), stride, sources, capacity, call,
                                       s);
    countExpected<<<32, 256, 0, stream>>>(counters, call, rank, s);
    if (s.stall && mix(uint64_t(call) * 37 + uint64_t(rank)) % 7 == 0) spin<<<1, 1, 0, stream>>>(s.stall * 1000ll);
    moeCombineArgs_t back = MOE_COMBINE_ARGS_INIT;
    back.rows = rows;
    back.output = sums;
    check(moeCombine(comm, &back, handle, stream), "moeCombine");
    meet();
    checkSums<<<64, 256, 0, stream>>>(counters, sums, call, rank, tokens, s);
    if (call % 50 == 49) check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  moeResult_t state;
  check(moeCommGetAsyncError(comm, &state), "moeCommGetAsyncError");
  if (s.absent) return {state != moeTimeout, 0, 0};
  check(state, "operation");
  Counters result;
  check(cudaMemcpy(&result, counters, sizeof result, cudaMemcpyDeviceToHost), "cudaMemcpy");
  check(moeHandleDestroy(handle), "moeHandleDestroy");
  return result;
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
    else if (name == "--absent")
      s.absent = number != 0;
    else if (name == "--layout") {
      s.views = value == "views";
      s.layout = value == "expert" ? moeLayoutExpert : value == "padded" ? moeLayoutExpertPadded : moeLayoutRank;
    } else
      die("unknown option " + name);
  }
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

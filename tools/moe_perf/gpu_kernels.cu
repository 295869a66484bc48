// SPDX-License-Identifier: Apache-2.0
#include "elements.cuh"
#include "gpu_kernels.h"
#include "numbers.h"

namespace moe::perf {
namespace {

// Longer than any rank takes to enqueue what it has to, shorter than anybody's patience with a spinning GPU.
constexpr uint64_t kGateNs = 30000000000u;
// Longer than the hosts of all ranks take to open their gates.
constexpr uint64_t kMeetingNs = 5000000000u;
constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 8192;

__device__ uint64_t nowNs() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void gateKernel(const volatile uint32_t* opened, uint32_t turn) {
  uint64_t start = nowNs();
  while (static_cast<int32_t>(*opened - turn) < 0 && nowNs() - start < kGateNs) {
  }
}

__device__ void storeRelease(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
}

__device__ uint32_t loadAcquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// A thread for each rank: tells it that this rank has come, and waits for it. Once somebody was late, the meetings that
// are enqueued already let pass at once, so that the time for all of them is bounded, too.
__global__ void meetingKernel(Meeting m, uint32_t turn) {
  auto other = static_cast<int32_t>(threadIdx.x);
  if (other >= m.ranks) return;
  storeRelease(m.peers[other] + m.rank, turn);
  if (loadAcquire(m.late)) return;
  uint64_t start = nowNs();
  while (static_cast<int32_t>(loadAcquire(m.words + other) - turn) < 0) {
    if (nowNs() - start < kMeetingNs) continue;
    storeRelease(m.late, 1);
    return;
  }
}

__device__ float factorOf(const ExpertRows& job, int64_t row) {
  if (!job.weights) return 1.0f;
  float sum = 0;
  for (int64_t at = row * job.topk; at < (row + 1) * job.topk; ++at) {
    int64_t id = job.wideIds ? static_cast<const int64_t*>(job.ids)[at] : static_cast<const int32_t*>(job.ids)[at];
    if (id >= 0) sum = __fadd_rn(sum, job.weights[at]);
  }
  return sum;
}

__device__ float scaleOf(const ExpertRows& job, const std::byte* scales, int64_t group) {
  if (!job.packedScales) return reinterpret_cast<const float*>(scales)[group];
  return __uint_as_float(static_cast<uint32_t>(scales[group]) << 23);
}

// The same arithmetic, operation by operation, as RowRun::multiplyRow does on the host. Input and output may be the
// same rows.
__global__ void expertKernel(ExpertRows job) {
  for (int64_t row = blockIdx.x; row < job.rows; row += gridDim.x) {
    float factor = factorOf(job, row);
    const std::byte* input = job.input + row * job.inputStride;
    const std::byte* scales = job.scales + row * job.scaleStride;
    for (int64_t i = threadIdx.x; i < job.elements; i += blockDim.x) {
      float value = decodeElement(job.type, input, i);
      if (job.type == moeFloat8e4m3) value = __fmul_rn(value, scaleOf(job, scales, i / kScaleGroup));
      encodeElement(job.combineType, job.output + row * job.outputStride, i, __fmul_rn(value, factor));
    }
  }
}

// Each thread has several loads under way before its first store.
__global__ void copyKernel(uint4* to, const uint4* from, int64_t count) {
  constexpr int kUnroll = 8;
  int64_t step = int64_t{gridDim.x} * blockDim.x;
  int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; at + (kUnroll - 1) * step < count; at += kUnroll * step) {
    uint4 words[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) words[i] = from[at + i * step];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) to[at + i * step] = words[i];
  }
  for (; at < count; at += step) to[at] = from[at];
}

}  // namespace

void launchCopy(void* to, const void* from, int64_t bytes, int sms, cudaStream_t stream) {
  constexpr int kCopyThreads = 512, kBlocksPerSm = 2;
  copyKernel<<<static_cast<unsigned>(sms * kBlocksPerSm), kCopyThreads, 0, stream>>>(
      static_cast<uint4*>(to), static_cast<const uint4*>(from), bytes / int64_t{sizeof(uint4)});
}

void launchGate(const uint32_t* opened, uint32_t turn, cudaStream_t stream) {
  gateKernel<<<1, 1, 0, stream>>>(opened, turn);
}

void launchMeeting(const Meeting& meeting, uint32_t turn, cudaStream_t stream) {
  // One block: it holds as many threads as there can be ranks.
  meetingKernel<<<1, static_cast<unsigned>(meeting.ranks > 0 ? meeting.ranks : 1), 0, stream>>>(meeting, turn);
}

void launchExpert(const ExpertRows& rows, cudaStream_t stream) {
  int64_t blocks = rows.rows < kMaxBlocks ? rows.rows : kMaxBlocks;
  // Without rows it is launched all the same, so that it is loaded.
  expertKernel<<<static_cast<unsigned>(blocks > 0 ? blocks : 1), kThreads, 0, stream>>>(rows);
}

}  // namespace moe::perf

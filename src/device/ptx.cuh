// SPDX-License-Identifier: Apache-2.0
// The PTX that moecl needs, one instruction or short sequence a function. Nothing else but numbers.h contains asm.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/numbers.h"

namespace moe::ptx {

// Bulk copies (TMA) exist from sm_90 on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasBulk = true;
#else
constexpr bool kHasBulk = false;
#endif

__device__ __forceinline__ uint64_t loadAcquireSys(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t loadRelaxedSys(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t loadRelaxedSys(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t loadRelaxedGpu(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void storeReleaseSys(uint64_t* word, uint64_t value) {
#ifdef MOE_MUTANT_RELAXED_SIGNAL
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#endif
}
__device__ __forceinline__ void storeReleaseGpu(uint64_t* word, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ void storeRelaxedSys(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ void fenceSys() {
#ifndef MOE_MUTANT_RELAXED_SIGNAL
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#endif
}
// Until the kernel before this one is over, if it let this one start earlier; and lets the next one start.
__device__ __forceinline__ void awaitKernelBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void startKernelAfter() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// A tagged word of 16 bytes, in one access.
struct TaggedWord {
  uint32_t data[3], tag;
};
__device__ __forceinline__ TaggedWord loadTagged(const std::byte* word) {
  uint64_t low, high;
  asm volatile("{\n.reg .b128 word;\nld.relaxed.sys.global.b128 word, [%2];\nmov.b128 {%0, %1}, word;\n}"
               : "=l"(low), "=l"(high)
               : "l"(word)
               : "memory");
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high)},
          static_cast<uint32_t>(high >> 32)};
}
__device__ __forceinline__ void storeTagged(std::byte* word, const TaggedWord& value) {
#ifdef MOE_MUTANT_EARLY_TAG
  asm volatile("st.relaxed.sys.global.u32 [%0 + 12], %1;" ::"l"(word), "r"(value.tag) : "memory");
#endif
  uint64_t low = value.data[0] | static_cast<uint64_t>(value.data[1]) << 32;
  uint64_t high = value.data[2] | static_cast<uint64_t>(value.tag) << 32;
  asm volatile("{\n.reg .b128 word;\nmov.b128 word, {%1, %2};\nst.relaxed.sys.global.b128 [%0], word;\n}" ::"l"(word),
               "l"(low), "l"(high)
               : "memory");
}
__device__ __forceinline__ uint64_t loadRelaxedGpu(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t loadAcquireGpu(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t addAcqRelGpu(uint64_t* word, uint64_t amount) {
  uint64_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(amount) : "memory");
  return before;
}
// What the word was: `value` has replaced it if that is `expected`.
__device__ __forceinline__ uint64_t exchangeAcqRelGpu(uint64_t* word, uint64_t expected, uint64_t value) {
  uint64_t before;
  asm volatile("atom.cas.acq_rel.gpu.global.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(word), "l"(expected), "l"(value)
               : "memory");
  return before;
}
__device__ __forceinline__ uint32_t addAcqRelGpu(uint32_t* word, uint32_t amount) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(amount) : "memory");
  return before;
}
__device__ __forceinline__ void addReleaseGpu(uint64_t* word, uint64_t amount) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(amount) : "memory");
}
__device__ __forceinline__ uint64_t globalTimerNs() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
__device__ __forceinline__ uint32_t lanesBelow() {
  uint32_t mask;
  asm volatile("mov.u32 %0, %lanemask_lt;" : "=r"(mask));
  return mask;
}

// A barrier of `threads` threads of the block, whole warps; true if all said ok.
__device__ __forceinline__ bool barrierAll(int barrier, int threads, bool ok) {
  uint32_t all;
  asm volatile(
      "{\n .reg .pred mine, every;\n setp.ne.u32 mine, %3, 0;\n barrier.cta.red.and.pred every, %1, %2, mine;\n"
      " selp.u32 %0, 1, 0, every;\n}"
      : "=r"(all)
      : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(ok))
      : "memory");
  return all != 0;
}

// Has a line brought into the second-level cache.
__device__ __forceinline__ void prefetch(const std::byte* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// An address that is worked out here, and not again where it is used.
__device__ __forceinline__ std::byte* opaque(std::byte* address) {
  asm volatile("" : "+l"(address));
  return address;
}

// A load that passes by the first-level cache, for what is read once.
__device__ __forceinline__ int4 loadOnce(const std::byte* from) {
  int4 words;
  asm volatile("ld.global.L1::no_allocate.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from)
               : "memory");
  return words;
}

// A store whose address is known to be global: what the compiler takes for any address costs more.
__device__ __forceinline__ void storeGlobal(std::byte* to, int4 words) {
  asm volatile("st.global.v4.s32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

// Two floats rounded to bfloat16, the first in the lower half.
__device__ __forceinline__ int packBfloat16(float low, float high) {
  int word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ __forceinline__ uint32_t sharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ int4 loadShared(uint32_t address) {
  int4 words;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}

// Orders ordinary accesses with those of the copy engine, in device memory or in this block's shared memory.
__device__ __forceinline__ void fenceProxyGlobal() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}
__device__ __forceinline__ void fenceProxyShared() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void barrierInit(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(sharedAddress(barrier)) : "memory");
}
// After barrierInit: the copy engine may use the barriers.
__device__ __forceinline__ void barrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// The one arrival of a phase, together with the bytes that the phase waits for.
__device__ __forceinline__ void barrierArriveExpect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(sharedAddress(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrierExpect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(sharedAddress(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(sharedAddress(barrier)) : "memory");
}
__device__ __forceinline__ bool barrierTryWait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(sharedAddress(barrier)), "r"(parity)
               : "memory");
  return done;
}
__device__ __forceinline__ void bulkLoad(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   sharedAddress(shared)),
               "l"(global), "r"(bytes), "r"(sharedAddress(barrier))
               : "memory");
}
__device__ __forceinline__ void bulkStore(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(sharedAddress(shared)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulkCommit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most N of this thread's store groups have not yet read their shared memory.
template <int N>
__device__ __forceinline__ void bulkWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// Until at most N of this thread's store groups are incomplete.
template <int N>
__device__ __forceinline__ void bulkWait() {
#ifdef MOE_MUTANT_UNFINISHED_STORES
  bulkWaitRead<N>();
#elif !defined(MOE_MUTANT_EARLY_SIGNAL)
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
#endif
}
#endif

// Two floats as e4m3, the first in the lower byte.
__device__ __forceinline__ uint32_t float8Pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return Float8e4m3::store(low) | uint32_t{Float8e4m3::store(high)} << 8;
#endif
}

}  // namespace moe::ptx

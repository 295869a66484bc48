// SPDX-License-Identifier: Apache-2.0
// The GPU's Exec: warps of 32 lanes. From sm_90 on, rows are staged through shared memory by the copy engine, several
// in flight per warp; elsewhere, and for rows too large to stage, lanes copy 16 bytes each.
#pragma once

#include "device/args.h"
#include "device/exec_cuda_grid.h"
#include "device/numbers.h"
#include "device/ptx.cuh"
#include "device/quantize.h"
#include "device/row_jobs.h"
#include "device/tagged.h"
#include "layout.h"

namespace moe {

// A row between its sources and its destinations, in shared memory.
struct StagedRow {
  std::byte* stage;
  uint64_t* barrier;
  int lane;
  bool ordinary = false;  // lanes have read or written the stage themselves

  __device__ void load(int64_t offset, const std::byte* from, int64_t bytes);
  __device__ void quantize(const QuantizedPiece& piece);
  __device__ void store(std::byte* to, int64_t offset, int64_t bytes);
  __device__ void storeColumn(std::byte* to, int64_t stride, int64_t offset, int64_t words);
};

// A row that lanes copy from where it lies.
struct DirectRow {
  struct Piece {
    int64_t offset, bytes;
    const std::byte* from;
  };
  Piece pieces[kMaxPayloads + 1];
  int count = 0;
  int lane;
  QuantizedPiece quantized{};

  __device__ explicit DirectRow(int lane) : lane(lane) {}
  __device__ void load(int64_t offset, const std::byte* from, int64_t bytes) {
    pieces[count++] = {offset, bytes, from};
  }
  __device__ void quantize(const QuantizedPiece& piece) { quantized = piece; }
  __device__ void store(std::byte* to, int64_t offset, int64_t bytes) const;
  __device__ void storeColumn(std::byte* to, int64_t stride, int64_t offset, int64_t words) const;
};

class CudaExec {
 public:
  static constexpr int kSlices = 1;
  static constexpr int kTeams = 1;
  static constexpr bool kSpreads = false;

  __device__ CudaExec team(int) const { return *this; }
  __device__ int number() const { return 0; }

  // All threads of the block. `shared`: sharedBytes(grid).
  __device__ CudaExec(const CudaGrid& grid, Control* control, std::byte* shared);
  // The same for operations that stream no rows, and whose blocks have no order: at once. usable() then must be asked
  // by all threads, which may be told different things.
  __device__ CudaExec(const CudaGrid& grid, std::byte* shared);

  // False after a failure of this rank: what earlier operations have left is not to be relied on.
  __device__ bool usable() const { return block_ >= 0 && !failed_; }
  __device__ bool failed() const { return ptx::loadRelaxedGpu(grid_.failed) != 0; }
  __device__ int block() const { return block_; }
  __device__ int warp() const { return static_cast<int>(threadIdx.x) / 32; }
  __device__ int warps() const { return static_cast<int>(blockDim.x) / 32; }
  // Warps of a block that take part in streamRows, and in reduceRows: the first ones.
  __device__ int streamers() const { return grid_.stream.warps; }
  __device__ int reducers() const { return grid_.reduce.warps; }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ int lanes() const { return 32; }
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return static_cast<int>(blockDim.x); }

  __device__ bool has(const uint64_t* word, uint64_t value) const;
  __device__ bool sees(const uint64_t* word, uint64_t value) const { return ptx::loadAcquireSys(word) >= value; }
  __device__ bool wait(const uint64_t* word, uint64_t expected, Awaited awaited, int peer);
  __device__ bool waitAny(const uint64_t* word, uint64_t expected, Awaited awaited, int peer, bool* came);
  __device__ void signal(uint64_t* word, uint64_t value) { ptx::storeReleaseSys(word, value); }
  __device__ void signalLocal(uint64_t* word, uint64_t value) { ptx::storeReleaseGpu(word, value); }
  template <class WordOf>
  __device__ void signalMany(int count, uint64_t value, WordOf wordOf) {
    ptx::fenceSys();
    for (int i = 0; i < count; ++i) ptx::storeRelaxedSys(wordOf(i), value);
  }
  __device__ void add(uint64_t* counter, uint64_t amount) { ptx::addReleaseGpu(counter, amount); }
  __device__ uint32_t arrive(uint32_t* counter) { return ptx::addAcqRelGpu(counter, 1) + 1; }
  __device__ void reset(uint32_t* counter) { *static_cast<volatile uint32_t*>(counter) = 0; }
  __device__ uint32_t claim(uint32_t* counter) { return lane() == 0 ? atomicAdd(counter, 1u) : 0; }
  __device__ uint32_t broadcast(uint32_t value, int lane) const { return __shfl_sync(~0u, value, lane); }
  __device__ void addShared(int32_t* word, int32_t amount) { atomicAdd(word, amount); }
  __device__ void addBlock(int32_t* word, int32_t amount) { atomicAdd(word, amount); }

  __device__ void putTagged(std::byte* word, uint32_t tag, uint32_t a, uint32_t b, uint32_t c) {
    ptx::storeTagged(word, {{a, b, c}, tag});
  }
  __device__ void putUnit(std::byte* row, int64_t unit, uint32_t tag, const Unit& data);
  __device__ bool getTagged(const std::byte* word, uint32_t tag, Awaited awaited, int peer, uint32_t* data) const;
  __device__ bool getUnit(const std::byte* row, int64_t unit, uint32_t tag, Awaited awaited, int peer,
                          Unit* data) const;
  __device__ bool getTaggedPair(const std::byte* word, int64_t stride, uint32_t tag, Awaited awaited, int peer,
                                uint32_t* data) const;
  struct Peek {
    ptx::TaggedWord words[kUnitWords];
  };
  __device__ Peek peekUnit(const std::byte* row, int64_t unit) const;
  __device__ bool takePeek(const Peek& peek, uint32_t tag, Unit* data) const;
  __device__ static Unit loadUnit(const std::byte* row, int64_t unit, int64_t bytes);
  __device__ static QuantizedUnit loadQuantized(const std::byte* row, int64_t unit, int64_t elements, bool powerOfTwo);
  __device__ static void prefetchUnit(const std::byte* row, int64_t unit, int64_t wide, int64_t bytes) {
    auto first = static_cast<uint32_t>(Unit::vectorAt(unit, 0));
#pragma unroll
    for (int v = 0; v < Unit::kVectors; ++v) {
      int64_t at = wide * (first + static_cast<uint32_t>(v * kUnitsPerBlock * Unit::kVectorBytes));
      if (at < bytes) ptx::prefetch(row + at);
    }
  }
  __device__ static void storeUnit(std::byte* row, int64_t unit, int64_t bytes, const Unit& data);

  template <class RowOf, class Use>
  __device__ static void forRows(uint64_t rows, RowOf rowOf, Use use);
  template <class RowOf>
  __device__ static void storeUnits(uint64_t rows, RowOf rowOf, int64_t unit, int64_t bytes, const Unit& data);

  __device__ std::byte* blockScratch(int64_t bytes) { return bytes <= grid_.itemsAt ? shared_ : nullptr; }
  __device__ std::byte* operationScratch() { return grid_.itemsAt > 0 ? shared_ : nullptr; }
  // What lanes did to the stages comes before what the copy engine will do to them.
  __device__ void doneWithScratch() { ptx::fenceProxyShared(); }
  __device__ std::byte* blockTable(int64_t bytes) {
    return bytes <= grid_.tableBytes ? shared_ + grid_.tableAt : nullptr;
  }
  __device__ void warpBarrier() { __syncwarp(); }
  __device__ bool warpAll(bool ok) const { return __all_sync(~0u, ok); }
  __device__ uint32_t ballot(bool ok) const { return __ballot_sync(~0u, ok); }
  __device__ bool barrier(bool ok) { return __syncthreads_and(ok); }
  __device__ bool started(const uint32_t* ticket, int block) const {
    return ptx::loadRelaxedGpu(ticket) > static_cast<uint32_t>(block);
  }
  template <class Done>
  __device__ bool waitBriefly(Done done) const;
  __device__ uint64_t addTo(uint64_t* word, uint64_t amount) { return ptx::addAcqRelGpu(word, amount) + amount; }
  __device__ bool exchange(uint64_t* word, uint64_t* seen, uint64_t value) {
    uint64_t before = *seen;
    *seen = ptx::exchangeAcqRelGpu(word, before, value);
    return *seen == before;
  }
  // A lane has a word each, so that nothing waits for them here.
  struct Words {
    uint64_t mine;
  };
  __device__ Words loadWords(const uint64_t* words) const {
    return {static_cast<const volatile uint64_t*>(words)[lane() % kSharedWords]};
  }
  __device__ uint64_t wordOf(const Words& words, int number) const { return __shfl_sync(~0u, words.mine, number); }
  __device__ uint64_t peek(const uint64_t* word) const { return ptx::loadRelaxedGpu(word); }
  __device__ uint64_t look(const uint64_t* word) const { return ptx::loadAcquireGpu(word); }
  __device__ void hurryUntil(const uint64_t* word, uint32_t value);
  __device__ bool lastBlock(uint32_t* counter, int blocks);

  struct Match {
    int below, total;
  };
  __device__ Match match(int32_t key) const {
    uint32_t same = __match_any_sync(~0u, key);
    return {__popc(same & ptx::lanesBelow()), __popc(same)};
  }

  struct Scan {
    int32_t before, total;
  };
  __device__ Scan scan(int32_t value) const {
    int32_t sum = value;
    for (int step = 1; step < 32; step *= 2) {
      int32_t below = __shfl_up_sync(~0u, sum, step);
      if (lane() >= step) sum += below;
    }
    return {sum - value, __shfl_sync(~0u, sum, 31)};
  }

  __device__ int32_t warpMax(int32_t value) const { return __reduce_max_sync(~0u, value); }

  __device__ void fail(int32_t code, Awaited awaited, int peer, uint64_t expected, uint64_t seen);

  template <class Job>
  __device__ bool streamRows(const Job& job) {
    if constexpr (ptx::kHasBulk) {
      if (grid_.stream.stages > 0) return streamStaged(job);
    }
    return streamDirect(job);
  }
  template <class Job>
  __device__ bool reduceRows(const Job& job);

 private:
  template <class Job>
  __device__ bool streamStaged(const Job& job);
  template <class Job>
  __device__ bool streamDirect(const Job& job);
  template <int kNewer, class Job>
  __device__ void finishStreamed(const Job& job, typename Job::Lane& mine, int i);
  template <class Number, class Job>
  __device__ bool reduceRowsOf(const Job& job);
  template <class Number, bool kWeighted, class Job>
  __device__ bool reduceRowsOf(const Job& job);
  template <class Number, bool kWeighted, class Job>
  __device__ bool reduceStaged(const Job& job);
  template <class Number, bool kWeighted, class Job>
  __device__ bool reduceDirect(const Job& job);
  __device__ void loadPart(ReduceItem& item, int stage, int offset, int bytes);
  template <class Number, bool kWeighted>
  __device__ void addPart(ReduceItem& item, int stage, int offset, int bytes);
  template <class Job>
  __device__ RunState beginReduceRun(const Job& job, typename Job::Lane& lane, int i);
  template <class Job>
  __device__ void publishRun(const Job& job, typename Job::Lane& lane, int i, int newer);
  template <class Job>
  __device__ void stageRow(const std::byte* item, int stage, const Job& job);

  __device__ std::byte* stageAt(const Staging& staging, int stage) const {
    return shared_ + warp() * staging.warpBytes() + stage * int64_t{staging.bytes};
  }
  __device__ static int nextStage(const Staging& staging, int stage) {
    return stage + 1 == staging.stages ? 0 : stage + 1;
  }
  __device__ void awaitStage(int stage);

  // The items of the run that starts at row i.
  __device__ RunItems items(int i) const {
    unsigned first = static_cast<unsigned>(i) % (kItemRuns * kRunRows) / kRunRows * kRunRows;
    return {items_ + first * static_cast<unsigned>(grid_.itemBytes), grid_.itemBytes};
  }
  __device__ std::byte* item(int i) const {
    return items_ + static_cast<unsigned>(i) % (kItemRuns * kRunRows) * static_cast<unsigned>(grid_.itemBytes);
  }

  const CudaGrid& grid_;
  int block_;
  uint32_t failed_ = 0;  // as one thread of the block sees it
  std::byte* shared_;
  std::byte* items_ = nullptr;
  uint64_t* barriers_ = nullptr;
  uint32_t phases_ = 0;  // of the barriers, a bit a stage
};

// A part of a block's warps as a block of its own.
class CudaTeam : public CudaExec {
 public:
  static constexpr bool kSpreads = true;

  __device__ CudaTeam(const CudaExec& exec, int number, int threads)
      : CudaExec(exec), number_(number), first_(number * threads), threads_(threads) {}

  __device__ int number() const { return number_; }
  __device__ int warp() const { return thread() / 32; }
  __device__ int warps() const { return threads_ / 32; }
  __device__ int thread() const { return static_cast<int>(threadIdx.x) - first_; }
  __device__ int threads() const { return threads_; }
  __device__ bool barrier(bool ok) { return ptx::barrierAll(1 + number_, threads_, ok); }

 private:
  int number_, first_, threads_;
};

// Of operations of few rows.
class FewRowsExec : public CudaExec {
 public:
  static constexpr int kTeams = 2;
  static constexpr bool kSpreads = true;

  using CudaExec::CudaExec;
  // This thread's of `teams` teams: 1, or kTeams.
  __device__ CudaTeam team(int teams) const {
    int each = teams == 1 ? threads() : threads() / kTeams;
    return CudaTeam(*this, thread() < each ? 0 : 1, each);
  }
};

}  // namespace moe

#include "device/exec_cuda_quantize.cuh"
#include "device/exec_cuda_reduce.cuh"
#include "device/exec_cuda_stream.cuh"
#include "device/exec_cuda_tagged.cuh"
#include "device/exec_cuda_wait.cuh"

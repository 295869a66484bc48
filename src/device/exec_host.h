// SPDX-License-Identifier: Apache-2.0
// The host's Exec: a warp is one thread of one lane. Shared words are std::atomic_ref with release and acquire only,
// since ThreadSanitizer does not understand fences; waits yield, since ranks may be many and cores few.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "device/failure.h"
#include "device/numbers.h"
#include "device/quantize.h"
#include "device/row_jobs.h"
#include "device/tagged.h"
#include "layout.h"

namespace moe {

// A barrier for the warps of one block that also agrees on whether all is well.
class HostBarrier {
 public:
  explicit HostBarrier(int threads) : threads_(threads) {}
  bool arrive(bool ok);

 private:
  int threads_;
  std::atomic<int> waiting_{0};
  std::atomic<uint32_t> generation_{0};
  std::atomic<bool> ok_{true};
  bool agreed_ = true;
};

// Ends waits that cannot succeed: abort, lost peers, and patience. Implemented by the communicator.
class WaitGuard {
 public:
  virtual ~WaitGuard() = default;
  // moeSuccess to go on waiting for `peer`; else the reason to stop.
  virtual int32_t check(int peer) = 0;
  // The rank to name after check() said stop. May take its time.
  virtual int blame(int peer) = 0;
  // The longest that one wait may take.
  virtual std::chrono::milliseconds patience() const = 0;
};

// What the threads of one operation share.
struct HostGrid {
  HostGrid(int blocks, int warps, WaitGuard* guard);

  int blocks, warps;
  WaitGuard* guard;
  Failure failure{};
  struct Block {
    explicit Block(int warps) : barrier(warps) {}
    HostBarrier barrier;
    uint32_t shared = 0;
    // See HostExec::hurryUntil.
    std::atomic<const uint64_t*> awaited{nullptr};
    std::atomic<uint32_t> awaitedValue{0};
  };
  std::vector<std::unique_ptr<Block>> blockState;
};

class HostExec {
 public:
  // Slices of a row that a warp takes at a time: all of them.
  static constexpr int kSlices = 1 << 20;

  // `memory`: kMemoryBytes of this warp's own.
  HostExec(HostGrid& grid, int block, int warp, std::byte* memory)
      : grid_(grid), block_(block), warp_(warp), items_{memory, kItemBytes} {}

  // The largest item: one pointer and the routing of each entry, or a source to add for each.
  static constexpr int64_t kItemBytes = 128 + 20 * MOE_MAX_TOPK + kRecordAlign;
  static constexpr int64_t kMemoryBytes = kRunRows * kItemBytes;

  // False after a failure of this rank: what earlier operations have left is not to be relied on.
  bool usable() const { return true; }
  // Whether this operation has failed by now.
  bool failed() const;
  int block() const { return block_; }
  int warp() const { return warp_; }
  int warps() const { return grid_.warps; }
  // Warps of a block that take part in streamRows, and in reduceRows: the first ones.
  int streamers() const { return grid_.warps; }
  int reducers() const { return grid_.warps; }
  int lane() const { return 0; }
  int lanes() const { return 1; }
  int thread() const { return warp_; }  // within the block
  int threads() const { return grid_.warps; }

  // Some of a block's warps, which work apart from the others and are as a block of their own: team number() of
  // `teams`, 1 or kTeams. Hosts have few warps: all of them do one thing after the other, and no row is shared by
  // blocks.
  static constexpr int kTeams = 1;
  static constexpr bool kSpreads = false;
  HostExec team(int) const { return *this; }
  int number() const { return 0; }

  // Whether *word >= value already, so that wait() would not wait.
  bool has(const uint64_t* word, uint64_t value) const {
    return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire) >= value;
  }
  // The same, if the copy engine is not used next.
  bool sees(const uint64_t* word, uint64_t value) const { return has(word, value); }
  // Waits until *word >= expected; data that its writer wrote before may then be read. False after a failure, which is
  // recorded, or when the wait is given up. `peer` is the rank whose doing is awaited.
  bool wait(const uint64_t* word, uint64_t expected, Awaited awaited, int peer);
  // Makes everything that this thread wrote, or learned of through a barrier or arrive, visible to who sees the value.
  void signal(uint64_t* word, uint64_t value) {
#ifdef MOE_MUTANT_RELAXED_SIGNAL
    std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_relaxed);
#else
    std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_release);
#endif
  }
  // signal() for a word that only this rank waits for.
  void signalLocal(uint64_t* word, uint64_t value) { signal(word, value); }
  // signal() for the words wordOf(0) .. wordOf(count - 1), at the price of one fence.
  template <class WordOf>
  void signalMany(int count, uint64_t value, WordOf wordOf) {
    for (int i = 0; i < count; ++i) signal(wordOf(i), value);
  }
  // Waits until some lane's word has come, and says whether it is this one's; a lane without a word passes null. What
  // the writers of the words wrote before may be told of by a signal next. All lanes of the warp; false after a
  // failure.
  bool waitAny(const uint64_t* word, uint64_t expected, Awaited awaited, int peer, bool* came) {
    *came = word && wait(word, expected, awaited, peer);
    return *came || !word;
  }
  // Adds to a counter that others of this rank wait for; as signal() in all else.
  void add(uint64_t* counter, uint64_t amount) {
    std::atomic_ref<uint64_t>(*counter).fetch_add(amount, std::memory_order_release);
  }
  // Adds one to a counter of this rank and returns the new value. Who brings it to its target sees what all others
  // wrote before they arrived.
  uint32_t arrive(uint32_t* counter) {
    return std::atomic_ref<uint32_t>(*counter).fetch_add(1, std::memory_order_acq_rel) + 1;
  }
  void reset(uint32_t* counter) { std::atomic_ref<uint32_t>(*counter).store(0, std::memory_order_relaxed); }
  // The next number from a counter that all warps of this rank share, in lane 0.
  uint32_t claim(uint32_t* counter) {
    return std::atomic_ref<uint32_t>(*counter).fetch_add(1, std::memory_order_relaxed);
  }
  // The value of one lane.
  uint32_t broadcast(uint32_t value, int) const { return value; }
  // Adds to a word that several lanes of one warp may add to.
  void addShared(int32_t* word, int32_t amount) { *word += amount; }
  // Adds to a word that several warps of the block may add to; a barrier shows the sum to all.
  void addBlock(int32_t* word, int32_t amount) {
    std::atomic_ref<int32_t>(*word).fetch_add(amount, std::memory_order_relaxed);
  }

  // From now on this block's waits are given up, without a failure, if they have lasted a while and the low half of
  // *word is still below `value`. One thread.
  void hurryUntil(const uint64_t* word, uint32_t value);

  // Writes one tagged word, or the four of a unit. Whoever finds the tag finds the data.
  void putTagged(std::byte* word, uint32_t tag, uint32_t a, uint32_t b, uint32_t c);
  void putUnit(std::byte* row, int64_t unit, uint32_t tag, const Unit& data);
  // Waits for a word with that tag, or for four, and takes the data. False after a failure, which is recorded, or when
  // the wait is given up. `peer` is the rank whose doing is awaited.
  bool getTagged(const std::byte* word, uint32_t tag, Awaited awaited, int peer, uint32_t* data);
  bool getUnit(const std::byte* row, int64_t unit, uint32_t tag, Awaited awaited, int peer, Unit* data);
  // Two words, `stride` bytes apart.
  bool getTaggedPair(const std::byte* word, int64_t stride, uint32_t tag, Awaited awaited, int peer, uint32_t* data) {
    return getTagged(word, tag, awaited, peer, data) && getTagged(word + stride, tag, awaited, peer, data + 3);
  }
  // Looks at the four words of a unit without waiting for them; takePeek says whether they had come. Hosts need not
  // look ahead.
  struct Peek {};
  Peek peekUnit(const std::byte*, int64_t) const { return {}; }
  bool takePeek(const Peek&, uint32_t, Unit*) const { return false; }
  // A unit of a row of `bytes` bytes, which may lie at any address.
  static Unit loadUnit(const std::byte* row, int64_t unit, int64_t bytes) {
    Unit data{};
    for (int v = 0; v < Unit::kVectors; ++v) {
      if (int64_t size = Unit::vectorBytes(unit, v, bytes)) {
        std::memcpy(data.words + 4 * v, row + Unit::vectorAt(unit, v), static_cast<size_t>(size));
      }
    }
    return data;
  }
  static void storeUnit(std::byte* row, int64_t unit, int64_t bytes, const Unit& data) {
    for (int v = 0; v < Unit::kVectors; ++v) {
      if (int64_t size = Unit::vectorBytes(unit, v, bytes)) {
        std::memcpy(row + Unit::vectorAt(unit, v), data.words + 4 * v, static_cast<size_t>(size));
      }
    }
  }

  // Calls use(rowOf(k)) for each bit k of `rows`, which all lanes have in common, in their order. All lanes of the
  // warp.
  template <class RowOf, class Use>
  static void forRows(uint64_t rows, RowOf rowOf, Use use) {
    for (; rows != 0; rows &= rows - 1) use(rowOf(lowestBit(rows)));
  }
  // storeUnit() for those rows.
  template <class RowOf>
  static void storeUnits(uint64_t rows, RowOf rowOf, int64_t unit, int64_t bytes, const Unit& data) {
    forRows(rows, rowOf, [&](std::byte* row) { storeUnit(row, unit, bytes, data); });
  }

  // As loadUnit, of a row of `elements` elements of bf16, as e4m3. All lanes of the warp, whose units belong to one
  // block.
  static QuantizedUnit loadQuantized(const std::byte* row, int64_t unit, int64_t elements, bool powerOfTwo);
  // Has a unit brought closer whose vectors are `wide` times as long, in a row of `bytes` bytes. Hosts do that
  // themselves.
  static void prefetchUnit(const std::byte*, int64_t, int64_t, int64_t) {}

  // Fast memory of the block until the next streamRows or reduceRows, or null where there is none of that size. All
  // threads say when they are done with it, before a barrier.
  std::byte* blockScratch(int64_t) { return nullptr; }
  // The same for operations that stream and add no rows, of the size that the host has found for the operation.
  std::byte* operationScratch() { return nullptr; }
  void doneWithScratch() {}
  // Fast memory of the block that lasts as long as the operation, or null where there is none of that size.
  std::byte* blockTable(int64_t) { return nullptr; }

  void warpBarrier() {}
  bool warpAll(bool ok) const { return ok; }
  // A bit for each lane that says so.
  uint32_t ballot(bool ok) const { return ok ? 1 : 0; }
  // All warps of the block; true if all said ok.
  bool barrier(bool ok) { return grid_.blockState[static_cast<size_t>(block_)]->barrier.arrive(ok); }
  // True if block `block` runs or has run; `ticket` counts those that have started. One thread.
  bool started(const uint32_t*, int) const { return true; }
  // Waits until done() is true, but not for long: whether it is. One thread.
  template <class Done>
  bool waitBriefly(Done done) const;
  // Adds to a word of this rank and returns the new value; or replaces it by `value` if it is *seen, which else becomes
  // what it is. Both as arrive() in all else.
  uint64_t addTo(uint64_t* word, uint64_t amount) {
    return std::atomic_ref<uint64_t>(*word).fetch_add(amount, std::memory_order_acq_rel) + amount;
  }
  bool exchange(uint64_t* word, uint64_t* seen, uint64_t value) {
    return std::atomic_ref<uint64_t>(*word).compare_exchange_strong(*seen, value, std::memory_order_acq_rel,
                                                                    std::memory_order_acquire);
  }
  // The first kSharedWords words from there on, and one of them: what they were at some time between the two. All lanes
  // of the warp.
  struct Words {
    const uint64_t* first;
  };
  Words loadWords(const uint64_t* words) const { return {words}; }
  uint64_t wordOf(const Words& words, int number) const { return words.first[number]; }
  // Such a word; peek() says nothing of what came before its value, and so costs others nothing.
  uint64_t peek(uint64_t* word) const { return std::atomic_ref<uint64_t>(*word).load(std::memory_order_relaxed); }
  uint64_t look(uint64_t* word) const { return std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire); }
  // All warps of the block: true in the block that comes last of `blocks`.
  bool lastBlock(uint32_t* counter, int blocks);

  // How many lanes of the warp hold the same key: below this one, and in all. Keys < 0 match nothing.
  struct Match {
    int below, total;
  };
  Match match(int32_t) const { return {0, 1}; }
  // The sum of the values of the lanes below this one, and of all.
  struct Scan {
    int32_t before, total;
  };
  Scan scan(int32_t value) const { return {0, value}; }
  int32_t warpMax(int32_t value) const { return value; }

  void fail(int32_t code, Awaited awaited, int peer, uint64_t expected, uint64_t seen);

  // Carries the rows of a job (see row_jobs.h). False after a failure.
  template <class Job>
  bool streamRows(const Job& job);
  // Adds rows and writes the sums. False after a failure.
  template <class Job>
  bool reduceRows(const Job& job);

 private:
  // Goes through the runs of a job and hands over the item of each row. False after a failure.
  template <class Job, class Handle>
  bool goThrough(const Job& job, Handle handle);
  template <class Job>
  static void addRow(ReduceItem& item, const Job& job);
  // Looks again and again until look() says that the word is as expected; `seen` is what it saw.
  using Look = bool (*)(const void* word, uint64_t expected, uint64_t* seen);
  bool mayGiveUp() const;
  bool waitSlow(Look look, const void* word, uint64_t expected, Awaited awaited, int peer);

  HostGrid& grid_;
  int block_, warp_;
  RunItems items_;
};

// The pieces of one row in flight: where each range of it lies.
class HostRow {
 public:
  void load(int64_t offset, const std::byte* from, int64_t bytes) { pieces_[count_++] = {offset, bytes, from}; }
  void quantize(const QuantizedPiece& piece) { quantized_ = piece; }
  void store(std::byte* to, int64_t offset, int64_t bytes) const {
    if (offset == 0 && quantized_.from) writeQuantized(quantized_, to);
    for (int i = 0; i < count_; ++i) {
      const Piece& piece = pieces_[i];
      int64_t begin = larger(offset, piece.offset);
      int64_t end = smaller(offset + bytes, piece.offset + piece.bytes);
      if (begin >= end) continue;
      std::memcpy(to + (begin - offset), piece.from + (begin - piece.offset), static_cast<size_t>(end - begin));
    }
  }
  void storeColumn(std::byte* to, int64_t stride, int64_t offset, int64_t words) const {
    for (int64_t w = 0; w < words; ++w) store(to + w * stride, offset + w * kScaleWord, kScaleWord);
  }

 private:
  struct Piece {
    int64_t offset, bytes;
    const std::byte* from;
  };
  static void writeQuantized(const QuantizedPiece& piece, std::byte* row);

  Piece pieces_[kMaxPayloads + 1]{};
  int count_ = 0;
  QuantizedPiece quantized_{};
};

template <class Done>
bool HostExec::waitBriefly(Done done) const {
  constexpr auto kBriefly = std::chrono::milliseconds(1);
  auto start = std::chrono::steady_clock::now();
  while (!done()) {
    if (std::chrono::steady_clock::now() - start > kBriefly) return false;
    std::this_thread::yield();
  }
  return true;
}

template <class Job, class Handle>
bool HostExec::goThrough(const Job& job, Handle handle) {
  typename Job::Lane lane;
  job.start(*this, lane);
  for (int64_t i = 0;; i += kRunRows) {
    RunState state = job.beginRun(*this, i, items_, lane);
    if (state != RunState::kReady) return state == RunState::kEnd;
    job.prefetchRun(*this, lane);
    for (int64_t j = 0; j < kRunRows; ++j) handle(items_[j]);
    job.finishedRun(*this, i, lane);
  }
}

template <class Job>
bool HostExec::streamRows(const Job& job) {
  return goThrough(job, [&](const std::byte* item) {
    if (!job.carries(item)) return;
    HostRow row;
    job.gather(item, row);
    if (job.composedBytes() > 0) row.load(job.composedOffset(), job.composed(item), job.composedBytes());
    job.scatter(item, row);
  });
}

// result[e] = sum over the sources of weight * source[e], in their order. Written so that the compiler can vectorize.
template <class Number>
void reduceRow(ReduceItem& item, bool weighted, int64_t bytes) {
  int64_t elements = bytes / static_cast<int64_t>(sizeof(Number));
  constexpr int64_t kBlock = 256;
  float sum[kBlock];
  for (int64_t first = 0; first < elements; first += kBlock) {
    int64_t n = smaller(kBlock, elements - first);
    for (int64_t e = 0; e < n; ++e) sum[e] = 0;
    for (int64_t s = 0; s < item.count; ++s) {
      const std::byte* from = item.sources()[s].row + first * static_cast<int64_t>(sizeof(Number));
      float weight = weighted ? item.sources()[s].weight : 1.0f;
      for (int64_t e = 0; e < n; ++e) {
        Number value;
        std::memcpy(&value, from + e * static_cast<int64_t>(sizeof(Number)), sizeof(Number));
        float product = weight * Number::load(value);
        sum[e] = s == 0 ? product : sum[e] + product;
      }
    }
    std::byte* to = item.result + first * static_cast<int64_t>(sizeof(Number));
    for (int64_t e = 0; e < n; ++e) {
      Number value = Number::store(sum[e]);
      std::memcpy(to + e * static_cast<int64_t>(sizeof(Number)), &value, sizeof(Number));
    }
  }
}

template <class Job>
bool HostExec::reduceRows(const Job& job) {
  return goThrough(job, [&](std::byte* memory) {
    auto& item = *reinterpret_cast<ReduceItem*>(memory);
    if (item.result) addRow(item, job);
  });
}

template <class Job>
void HostExec::addRow(ReduceItem& item, const Job& job) {
  int32_t count = 0;
  for (int32_t s = 0; s < item.count; ++s) {
    if (item.sources()[s].row) item.sources()[count++] = item.sources()[s];
  }
  item.count = count;
  if (count == 1 && !job.weighted()) {
    std::memcpy(item.result, item.sources()[0].row, static_cast<size_t>(job.rowBytes()));
  } else if (job.type() == moeFloat32) {
    reduceRow<Float32>(item, job.weighted(), job.rowBytes());
  } else if (job.type() == moeFloat16) {
    reduceRow<Float16>(item, job.weighted(), job.rowBytes());
  } else {
    reduceRow<Bfloat16>(item, job.weighted(), job.rowBytes());
  }
}

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// One rank's part of one row: its buffers, and the timed and checked calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "array.h"
#include "check.h"
#include "gpu.h"
#include "inputs.h"
#include "memory.h"
#include "moe.h"
#include "numbers.h"
#include "options.h"
#include "oracle.h"
#include "routing.h"
#include "team.h"

namespace moe::perf {

// What this rank measured; vectors have one entry per timed iteration, or per replay of a graph.
struct RowMeasures {
  std::vector<double> dispatchUs, combineUs, rows;
  std::vector<double> roundtripUs;  // --graph and --flush: of a dispatch and a combine that follow each other
  std::vector<double> dispatchHostUs, combineHostUs;  // GPUs: inside the library's calls
  int64_t calls = 0, combines = 0;                    // dispatches and combines that the following sums are about
  uint64_t dispatchBytes = 0, combineBytes = 0;       // written by the library
  uint64_t dispatchAway = 0, combineAway = 0;         // GPUs: of those, to other ranks
  uint64_t copies = 0, tokens = 0;
  int64_t overflowed = 0;    // iterations with more rows than the output holds
  int64_t requiredRows = 0;  // the most that any iteration needed
  int64_t checkedRows = 0;
  int64_t inputSets = 0;
  Verdict verdict;
};

// Most calls that are enqueued together on a GPU. Streams hold only about a thousand commands.
constexpr int kBatchCalls = 33;

class RowRun {
 public:
  RowRun(RunContext& context, moeComm_t comm, const moeInfo_t& info, int64_t tokens, int64_t maxTokens);
  ~RowRun();
  RowRun(const RowRun&) = delete;
  RowRun& operator=(const RowRun&) = delete;

  RowMeasures run();

 private:
  // Iterations that are enqueued together on a GPU.
  struct Batch {
    int64_t firstCall;
    int lead;   // untimed ones at first, which take up what the ranks' starts differ by
    int count;  // after them
    bool timed;
    bool check;  // the last one
  };

  void makeOutputs();
  void bindReceive();
  void bindReceived();
  void poison(const ExpectedReceive& expected);
  void iterate(int64_t set, bool timed, bool check);
  void stall() const;
  void expect(int64_t set, std::vector<Routes>* routes, ExpectedReceive* expected);
  void noteSizes(const moeSizes_t& sizes, bool timed);
  void dispatch(int64_t set);
  void takeExactSizes();
  void combine();
  void locateRows();
  int64_t countAt(size_t source) const;
  void runExpert();
  void runRankExpert();
  void runExpertDequantise();
  void multiplyRow(int source, int64_t index, int64_t position, float factor);
  void checkDispatch(int64_t set, const std::vector<Routes>& routes, const ExpectedReceive& expected);
  void checkCombine(int64_t set, const std::vector<Routes>& routes, bool anyOverflow);
  bool anyRankOverflowed(const moeSizes_t& sizes) const;
  moeStats_t stats() const;

  // On a GPU.
  RowMeasures runOnGpu();
  void runBatch(const Batch& batch);
  void enqueue(const Batch& batch, bool lastCombines);
  void takeTimes(const Batch& batch, bool lastCombines);
  void takeSizes(const Batch& batch);
  void combineAndCheck(const Batch& batch, int64_t set, const std::vector<Routes>& routes);
  void takeStats(const moeStats_t& before);
  // The other ways to time on a GPU: see row_run_modes.cc.
  void runReplays();
  void timeReplays(Op op, std::vector<double>* us);
  void dispatchInto(int slot, int64_t call);
  void runCold(int64_t firstCall);
  void timeCold(int64_t firstCall, bool together);
  void enqueueCold(const Batch& batch, bool together);
  void takeColdTimes(const Batch& batch, bool together);
  bool gated() const { return !options_.exact && options_.stallRank < 0; }
  void begin();
  void complete();
  void fetchReceived(const ExpectedReceive& expected);
  void runExpertOnGpu(int64_t position, int64_t count);

  RunContext& context_;
  const Options& options_;
  moeComm_t comm_;
  moeInfo_t info_;
  int64_t tokens_;
  int64_t maxTokens_;
  Shape shape_;
  moeHandle_t handle_ = nullptr;
  int64_t rowCapacity_ = 0;  // rows that the outputs hold
  std::vector<Routes> inputRoutes_;
  Inputs inputs_;
  Array handleMemory_;
  Array rows_, scaleRows_, ids_, weights_, sources_, rowExperts_, rankCounts_, rankOffsets_, expertCounts_,
      expertOffsets_, sizes_, expertRows_, combined_;
  Buffer viewCopy_, viewScalesCopy_;  // GPU: on the host
  moeRows_t outputs_[2] = {};
  moeRows_t views_[2] = {};
  moeReceive_t receive_ = MOE_RECEIVE_INIT;
  Received received_;                   // on the host
  std::vector<float> values_, scales_;  // of one row
  RowMeasures measures_;
};

}  // namespace moe::perf

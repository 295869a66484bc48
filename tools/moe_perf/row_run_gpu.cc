// SPDX-License-Identifier: Apache-2.0
// A row on GPUs. Unless --graph or --flush ask for another way (row_run_modes.cc), calls are enqueued behind a gate
// that all ranks open together, with marks between them, so that the times are the GPUs' own and not those of launches.
#include <algorithm>
#include <chrono>
#include <thread>

#include "row_run.h"
#include "text.h"

namespace moe::perf {
namespace {

using Clock = std::chrono::steady_clock;

// Before a dispatch, after it, and after its combine.
constexpr size_t kMarksPerCall = 3;

double microsecondsSince(Clock::time_point from) {
  return std::chrono::duration<double, std::micro>(Clock::now() - from).count();
}

}  // namespace

RowMeasures RowRun::runOnGpu() {
  context_.gpu->reserveMarks(kMarksPerCall * kBatchCalls);
  int64_t call = 0;
  for (int i = 0; i < options_.warmups; ++i) runBatch({call++, 0, 1, false, options_.check});
  if (options_.graph || options_.flush) {
    options_.graph ? runReplays() : runCold(call);
    if (options_.check) runBatch({call, 0, 1, false, true});
    return std::move(measures_);
  }
  for (int left = options_.iterations; left > 0;) {
    Batch batch{call, 0, 1, true, false};
    if (gated()) {
      batch.lead = 1;
      batch.count = std::min(kBatchCalls - 1, left);
    }
    left -= batch.count;
    call += batch.lead + batch.count;
    batch.check = options_.check && left == 0;
    runBatch(batch);
  }
  return std::move(measures_);
}

// Whoever closes a gate does so after a barrier: no rank may still free or read memory then, which waits for its whole
// GPU and so for the gates of other ranks on it.
void RowRun::begin() {
  context_.team.barrier();
  if (gated()) context_.gpu->closeGate();
}

void RowRun::complete() {
  if (gated()) {
    context_.team.startTogether();
    context_.gpu->openGate();
  }
  context_.gpu->synchronize();
  moeResult_t state = moeSuccess;
  require(moeCommGetAsyncError(comm_, &state), "moeCommGetAsyncError");
  require(state, "an operation on the GPU");
}

void RowRun::runBatch(const Batch& batch) {
  int64_t set = (batch.firstCall + batch.lead + batch.count - 1) % inputs_.sets();
  std::vector<Routes> routes;
  ExpectedReceive expected;
  if (batch.check) expect(set, &routes, &expected);
  moeStats_t before = stats();
  // The last dispatch of a checked batch is looked at before its rows go on to the expert.
  bool lastCombines = options_.op != Op::kDispatch && !batch.check;
  // Before the gate closes: making a graph may wait for what runs on the GPU.
  if (options_.graph) context_.gpu->capture([&] { enqueue(batch, lastCombines); });
  begin();
  options_.graph ? context_.gpu->replay() : enqueue(batch, lastCombines);
  complete();
  takeTimes(batch, lastCombines);
  takeSizes(batch);
  if (batch.check) {
    locateRows();
    fetchReceived(expected);
    checkDispatch(set, routes, expected);
    if (options_.op != Op::kDispatch) combineAndCheck(batch, set, routes);
  }
  if (batch.timed) takeStats(before);
}

void RowRun::enqueue(const Batch& batch, bool lastCombines) {
  Gpu& gpu = *context_.gpu;
  int calls = batch.lead + batch.count;
  for (int i = 0; i < calls; ++i) {
    bool timed = batch.timed && i >= batch.lead;
    size_t mark = kMarksPerCall * static_cast<size_t>(i);
    stall();
    receive_.sizes = sizes_.deviceAs<moeSizes_t>() + i;
    if (timed) gpu.mark(mark);
    Clock::time_point start = Clock::now();
    dispatch((batch.firstCall + i) % inputs_.sets());
    if (timed) measures_.dispatchHostUs.push_back(microsecondsSince(start));
    if (timed) gpu.mark(mark + 1);
    if (options_.op == Op::kDispatch || (i + 1 == calls && !lastCombines)) continue;
    stall();
    start = Clock::now();
    combine();
    if (timed) measures_.combineHostUs.push_back(microsecondsSince(start));
    if (timed) gpu.mark(mark + 2);
  }
}

void RowRun::takeTimes(const Batch& batch, bool lastCombines) {
  if (!batch.timed) return;
  int calls = batch.lead + batch.count;
  for (int i = batch.lead; i < calls; ++i) {
    size_t mark = kMarksPerCall * static_cast<size_t>(i);
    measures_.dispatchUs.push_back(context_.gpu->microsecondsBetween(mark, mark + 1));
    if (options_.op == Op::kDispatch || (i + 1 == calls && !lastCombines)) continue;
    measures_.combineUs.push_back(context_.gpu->microsecondsBetween(mark + 1, mark + 2));
  }
}

void RowRun::takeSizes(const Batch& batch) {
  sizes_.fetch();
  for (int i = 0; i < batch.lead + batch.count; ++i) {
    received_.sizes = sizes_.hostAs<moeSizes_t>() + i;
    noteSizes(*received_.sizes, batch.timed && i >= batch.lead);
  }
}

// The combine of the batch's last dispatch, by itself.
void RowRun::combineAndCheck(const Batch& batch, int64_t set, const std::vector<Routes>& routes) {
  bool overflow = anyRankOverflowed(*received_.sizes);
  runExpert();
  auto enqueueCombine = [&] {
    stall();
    if (batch.timed) context_.gpu->mark(0);
    Clock::time_point start = Clock::now();
    combine();
    if (batch.timed) measures_.combineHostUs.push_back(microsecondsSince(start));
    if (batch.timed) context_.gpu->mark(1);
  };
  if (options_.graph) context_.gpu->capture(enqueueCombine);
  begin();
  options_.graph ? context_.gpu->replay() : enqueueCombine();
  complete();
  if (batch.timed) measures_.combineUs.push_back(context_.gpu->microsecondsBetween(0, 1));
  combined_.fetch();
  checkCombine(set, routes, overflow);
}

void RowRun::takeStats(const moeStats_t& before) {
  moeStats_t after = stats();
  uint64_t copies = after.selfRows + after.mappedRows - before.selfRows - before.mappedRows;
  uint64_t bytes = after.selfBytes + after.mappedBytes - before.selfBytes - before.mappedBytes;
  uint64_t dispatched = copies * static_cast<uint64_t>(info_.recordBytes);
  measures_.calls += static_cast<int64_t>(after.dispatches - before.dispatches);
  measures_.combines += static_cast<int64_t>(after.combines - before.combines);
  measures_.copies += copies;
  measures_.tokens += after.tokens - before.tokens;
  measures_.dispatchBytes += dispatched;
  measures_.combineBytes += bytes - dispatched;
  uint64_t away = (after.mappedRows - before.mappedRows) * static_cast<uint64_t>(info_.recordBytes);
  measures_.dispatchAway += away;
  measures_.combineAway += after.mappedBytes - before.mappedBytes - away;
}

void RowRun::fetchReceived(const ExpectedReceive& expected) {
  for (const Array* array :
       {&ids_, &weights_, &sources_, &rowExperts_, &rankCounts_, &rankOffsets_, &expertCounts_, &expertOffsets_}) {
    array->fetch();
  }
  const TokenData& data = context_.data;
  const moeRows_t* rows = options_.views() ? views_ : outputs_;
  for (const RowRange& range : deliveredRanges(expected)) {
    auto copy = [&](const moeRows_t& from, const moeRows_t& to, int64_t rowBytes) {
      int64_t stride = from.strideBytes ? from.strideBytes : from.rowBytes;
      context_.gpu->copyRowsOut(static_cast<std::byte*>(to.data) + range.first * rowBytes, rowBytes,
                                static_cast<std::byte*>(from.data) + range.first * stride, stride, rowBytes,
                                range.count);
    };
    copy(rows[0], received_.tokens, data.rowBytes());
    if (data.scaleCount() > 0) copy(rows[1], received_.scales, data.scaleBytes());
  }
}

// In views, too, a row's position counts from the first row of the first source.
void RowRun::runExpertOnGpu(int64_t position, int64_t count) {
  const moeRows_t* from = options_.views() ? views_ : outputs_;
  auto strideOf = [](const moeRows_t& rows) { return rows.strideBytes ? rows.strideBytes : rows.rowBytes; };
  int64_t combineBytes = options_.hidden * static_cast<int64_t>(elementBytes(options_.combineDtype()));
  ExpertRows job;
  job.rows = count;
  job.elements = options_.hidden;
  job.type = context_.data.type();
  job.combineType = options_.combineDtype();
  job.inputStride = strideOf(from[0]);
  job.input = static_cast<const std::byte*>(from[0].data) + position * job.inputStride;
  job.output = static_cast<std::byte*>(from[0].data) + position * job.inputStride;
  job.outputStride = job.inputStride;
  if (job.type == moeFloat8e4m3) {
    job.packedScales = context_.data.packs();
    job.scaleStride = strideOf(from[1]);
    job.scales = static_cast<const std::byte*>(from[1].data) + position * job.scaleStride;
    job.output = expertRows_.device() + position * combineBytes;
    job.outputStride = combineBytes;
  }
  if (options_.layout == moeLayoutRank) {
    int64_t entry = position * options_.topk;
    job.ids = ids_.device() + entry * (options_.ids == moeInt32 ? 4 : 8);
    job.weights = weights_.deviceAs<float>() + entry;
    job.topk = options_.topk;
    job.wideIds = options_.ids == moeInt64;
  }
  context_.gpu->runExpert(job);
}

}  // namespace moe::perf

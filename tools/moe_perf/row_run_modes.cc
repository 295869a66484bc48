// SPDX-License-Identifier: Apache-2.0
// The ways of timing on GPUs that the command line asks for:
//   --graph  replays of graphs that hold nothing but operations of one kind, timed as a whole: what an operation costs
//            where it follows others, without the events that would lie between them.
//   --flush  calls of which each starts from a cold cache on all GPUs at the same time: what it costs by itself, and
//            with the events around it.
// The check of both is a dispatch and a combine of their own, after all that is timed.
#include <algorithm>

#include "cold_start.h"
#include "row_run.h"

namespace moe::perf {
namespace {

static_assert(kReplayCalls < kBatchCalls,
              "each dispatch of a replay, and the one before it, needs a place for its sizes");

// Calls that are enqueued together: with what comes before each of them they are a dozen commands.
constexpr int kColdCalls = 16;
// Before and after a dispatch, before and after its combine.
constexpr size_t kMarksPerColdCall = 4;

}  // namespace

// Its sizes are those of the slot.
void RowRun::dispatchInto(int slot, int64_t call) {
  receive_.sizes = sizes_.deviceAs<moeSizes_t>() + slot;
  dispatch(call % inputs_.sets());
}

void RowRun::runReplays() {
  // A combine can be captured once its handle has had a dispatch.
  begin();
  dispatchInto(0, 0);
  complete();
  if (options_.op != Op::kCombine) timeReplays(Op::kDispatch, &measures_.dispatchUs);
  if (options_.op != Op::kDispatch) timeReplays(Op::kCombine, &measures_.combineUs);
  if (options_.op == Op::kRoundtrip) timeReplays(Op::kRoundtrip, &measures_.roundtripUs);
}

// Dispatches alone, combines of one dispatch, or both in turn. Each graph has inputs that the ones before it have not.
void RowRun::timeReplays(Op op, std::vector<double>* us) {
  Gpu& gpu = *context_.gpu;
  moeStats_t before = stats();
  for (int i = 0; i < options_.replays(); ++i) {
    int64_t first = int64_t{i} * kReplayCalls;
    gpu.capture([&] {
      for (int slot = 1; slot <= kReplayCalls; ++slot) {
        if (op != Op::kCombine) dispatchInto(slot, first + slot);
        if (op != Op::kDispatch) combine();
      }
    });
    begin();
    // Untimed, this takes up what the ranks' starts differ by. It is also the dispatch that combines alone are of.
    dispatchInto(0, first);
    if (op != Op::kDispatch) combine();
    gpu.mark(0);
    gpu.replay();
    gpu.mark(1);
    complete();
    us->push_back(gpu.microsecondsBetween(0, 1) / kReplayCalls);
    takeSizes(op == Op::kCombine ? Batch{0, 0, 1, true, false} : Batch{0, 1, kReplayCalls, true, false});
  }
  takeStats(before);
}

void RowRun::runCold(int64_t firstCall) {
  timeCold(firstCall, false);
  if (options_.op == Op::kRoundtrip) timeCold(firstCall, true);
}

// Dispatches and combines each by itself, or a combine right after its dispatch and both as one.
void RowRun::timeCold(int64_t firstCall, bool together) {
  moeStats_t before = stats();
  for (int done = 0; done < options_.iterations;) {
    Batch batch{firstCall + done, 0, std::min(kColdCalls, options_.iterations - done), true, false};
    done += batch.count;
    begin();
    enqueueCold(batch, together);
    complete();
    context_.cold->requireTogether();
    takeColdTimes(batch, together);
    takeSizes(batch);
  }
  takeStats(before);
}

void RowRun::enqueueCold(const Batch& batch, bool together) {
  Gpu& gpu = *context_.gpu;
  auto start = [&](size_t mark) {
    context_.cold->enqueue();
    gpu.mark(mark);
  };
  for (int i = 0; i < batch.count; ++i) {
    size_t mark = kMarksPerColdCall * static_cast<size_t>(i);
    receive_.sizes = sizes_.deviceAs<moeSizes_t>() + i;
    start(mark);
    dispatch((batch.firstCall + i) % inputs_.sets());
    if (!together) gpu.mark(mark + 1);
    if (options_.op == Op::kDispatch) continue;
    if (!together) start(mark + 2);
    combine();
    gpu.mark(mark + 3);
  }
}

void RowRun::takeColdTimes(const Batch& batch, bool together) {
  Gpu& gpu = *context_.gpu;
  for (int i = 0; i < batch.count; ++i) {
    size_t mark = kMarksPerColdCall * static_cast<size_t>(i);
    if (together) {
      measures_.roundtripUs.push_back(gpu.microsecondsBetween(mark, mark + 3));
      continue;
    }
    measures_.dispatchUs.push_back(gpu.microsecondsBetween(mark, mark + 1));
    if (options_.op == Op::kDispatch) continue;
    measures_.combineUs.push_back(gpu.microsecondsBetween(mark + 2, mark + 3));
  }
}

}  // namespace moe::perf

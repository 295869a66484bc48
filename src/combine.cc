// SPDX-License-Identifier: Apache-2.0
#include "combine.h"

#include "base/trace_range.h"
#include "config.h"
#include "dispatch.h"

namespace moe {
namespace {

int64_t checkStride(int64_t stride, int64_t rowBytes, const char* name) {
  if (stride != 0 && stride < rowBytes) {
    fail(moeInvalidArgument, name, " = ", stride, " is less than a row's ", rowBytes,
         " bytes; pass 0 for rows that follow each other");
  }
  return stride != 0 ? stride : rowBytes;
}

// Whether the host knows that no row was delivered.
bool nothingDelivered(Comm& comm, const moeHandle& handle) {
  if (!comm.backend().synchronous()) return handle.knownEmpty;
  return comm.backend().readHandle(handle.memory + comm.layout().handle.head).sizes.rows == 0;
}

void takeRows(Comm& comm, const moeCombineArgs_t& args, const moeHandle& handle, CombineArgs* plan) {
  const Layout& layout = comm.layout();
  plan->rows = {static_cast<const std::byte*>(args.rows),
                checkStride(args.rowStride, layout.shape.combineRowBytes, "args.rowStride")};
  if (args.rows) return;
  bool stand = viewsStand(comm, handle);
  if (!stand && nothingDelivered(comm, handle)) return;
  if (!stand) {
    fail(moeInvalidArgument, "args.rows is NULL, but the rows delivered to rank ", comm.rank(),
         " are not in views (receive.rows = NULL in a dispatch fewer than config.buffers = ", comm.config().buffers,
         " dispatches ago that was not combined yet)");
  }
  if (layout.shape.combineRowBytes > layout.shape.payloadBytes[0]) {
    fail(moeInvalidArgument, "args.rows is NULL, but a row of ", dataTypeName(comm.config().combineDtype),
         " does not fit in place of a row of ", dataTypeName(comm.config().dtype), " in the view; pass rows");
  }
  plan->inPlace = 1;
}

CombineArgs planCombine(Comm& comm, const moeCombineArgs_t& args, const moeHandle* handle) {
  const Layout& layout = comm.layout();
  CombineArgs plan{};
  plan.common = comm.commonArgs(handle->memory);
  if (args.flags & ~MOE_APPLY_WEIGHTS) {
    fail(moeInvalidArgument, "args.flags = ", args.flags, " has unknown bits; known: MOE_APPLY_WEIGHTS (1)");
  }
  if (args.reserved != 0) fail(moeInvalidArgument, "args.reserved = ", args.reserved, ", but it must be 0");
  plan.applyWeights = args.flags & MOE_APPLY_WEIGHTS;
  if (plan.applyWeights && !layout.shape.expertLayout()) {
    fail(moeInvalidArgument,
         "args.flags has MOE_APPLY_WEIGHTS, but in moeLayoutRank a row is already the weighted sum ",
         "over its rank's experts; apply the weights when you make that sum");
  }
  takeRows(comm, args, *handle, &plan);
  if (!args.output && handle->numTokens > 0) {
    fail(moeInvalidArgument, "args.output is NULL, but the handle's dispatch had ", handle->numTokens, " tokens");
  }
  plan.output = {static_cast<std::byte*>(args.output),
                 checkStride(args.outputStride, layout.shape.combineRowBytes, "args.outputStride")};
  return plan;
}

// Takes part in a combine without rows, and says that this rank refuses it.
void refuse(Comm& comm, moeResult_t code, void* stream) {
  CombineArgs plan{};
  plan.common = comm.commonArgs(nullptr);
  plan.common.refusal = code;
  Outcome outcome = comm.backend().combine(plan, stream);
  if (!outcome.ok) comm.settle(outcome, "combine");
}

}  // namespace

void combine(Comm& comm, const OrError<moeCombineArgs_t>& givenArgs, const OrError<moeHandle*>& givenHandle,
             void* stream) {
  TraceRange range("moeCombine");
  comm.requireReady();
  const auto* named = std::get_if<moeHandle*>(&givenHandle);
  // A dispatch that was refused was refused for all ranks: nobody's combine of it gets past here, and no peer waits.
  if (named && *named && (*named)->comm == &comm && (*named)->state == HandleState::kFailed) {
    fail(moeInvalidUsage, "moeCombine: the handle's last dispatch was refused, so there is nothing to combine");
  }
  CombineArgs plan{};
  moeHandle* handle = nullptr;
  try {
    const moeCombineArgs_t& args = valueOrThrow(givenArgs);
    handle = valueOrThrow(givenHandle);
    checkHandle(comm, handle);
    if (handle->state != HandleState::kReceived) {
      fail(moeInvalidUsage, "moeCombine: the handle has no completed dispatch",
           handle->state == HandleState::kSent ? "; call moeWait first" : "");
    }
    plan = planCombine(comm, args, handle);
  } catch (const Error& error) {
    if (!comm.backend().capturing(stream)) refuse(comm, error.code(), stream);
    throw;
  }
  Outcome outcome = comm.backend().combine(plan, stream);
  handle->views = false;
  comm.settle(outcome, "combine");
}

}  // namespace moe

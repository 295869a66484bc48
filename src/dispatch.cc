// SPDX-License-Identifier: Apache-2.0
#include "dispatch.h"

#include <vector>

#include "base/trace_range.h"
#include "config.h"
#include "device/window_view.h"

namespace moe {
namespace {

void requireAligned(const void* pointer, size_t to, const char* name) {
  if (reinterpret_cast<uintptr_t>(pointer) % to != 0) {
    fail(moeInvalidArgument, name, " = ", pointer, " is not aligned to its element size of ", to, " bytes");
  }
}

int32_t roleOf(const Shape& shape, int payload) {
  if (payload == 0) return moeRoleTokens;
  return shape.makesScales(payload) ? moeRoleScales : moeRoleOpaque;
}

// One array of rows, as the config wants it.
struct WantedRows {
  std::string name;
  int64_t bytes;
  std::string why;  // so many bytes
  bool tokens;
  int64_t columns;      // rows in a column of scales, or -1: rows follow each other
  int64_t elementSize;  // to which address and stride must be aligned
};

// Entry `entry` of the rows that the caller gives, or of those that it receives.
WantedRows wantedRows(const Shape& shape, int entry, bool received, int64_t capacity) {
  int payload = received ? entry : shape.payloadOfInput(entry);
  WantedRows wanted{
      cat(received ? "receive.rows[" : "args.inputs[", entry, "]"), shape.payloadBytes[payload], "", entry == 0, -1, 1};
  if (shape.makesScales(payload)) {
    wanted.why = "the words of a row's scales";
    wanted.elementSize = kScaleWord;
    if (shape.scaleOrder == moeScalesByColumn) wanted.columns = capacity;
  } else if (payload > 0) {
    wanted.why = cat("sideRowBytes[", payload - shape.payloadOfInput(1), "]");
  } else if (received) {
    wanted.why = shape.quantizes() ? "hidden, as fp8" : "hidden * element size";
  } else {
    wanted.why = "hidden * element size";
    wanted.bytes = inputBytes(shape);
    if (shape.quantizes()) wanted.elementSize = 2;
  }
  return wanted;
}

// The distance between columns of scales.
int64_t checkColumns(const moeRows_t& rows, const WantedRows& wanted) {
  constexpr int64_t kAlign = 16;
  int64_t least = scaleColumnBytes(wanted.columns);
  if (rows.strideBytes != 0 && (rows.strideBytes < least || rows.strideBytes % kAlign != 0)) {
    fail(moeInvalidArgument, wanted.name, ".strideBytes = ", rows.strideBytes, ", but columns of ", wanted.columns,
         " scales are at least ", least, " bytes apart, by a multiple of ", kAlign, "; pass 0 for ", least);
  }
  return rows.strideBytes != 0 ? rows.strideBytes : least;
}

// Checks one array of rows against the config; returns its stride.
int64_t checkRows(const moeRows_t& rows, const WantedRows& wanted, bool mayBeNull) {
  const auto& [name, bytes, why, tokens, columns, elementSize] = wanted;
  if (rows.rowBytes != bytes) {
    fail(moeInvalidArgument, name, ".rowBytes = ", rows.rowBytes, ", but the config fixes ", bytes, " (", why, ")");
  }
  if (rows.role < 0 || rows.role >= moeNumRoles || tokens != (rows.role == moeRoleTokens)) {
    fail(moeInvalidArgument, name, ".role = ", rows.role, ", but entry 0 is moeRoleTokens (0) and the others are ",
         "moeRoleScales (1) or moeRoleOpaque (2)");
  }
  if (rows.reserved != 0) fail(moeInvalidArgument, name, ".reserved = ", rows.reserved, ", but it must be 0");
  if (!rows.data && !mayBeNull) fail(moeInvalidArgument, name, ".data is NULL");
  requireAligned(rows.data, static_cast<size_t>(elementSize), cat(name, ".data").c_str());
  if (columns >= 0) return checkColumns(rows, wanted);
  if (rows.strideBytes != 0 && (rows.strideBytes < bytes || rows.strideBytes % elementSize != 0)) {
    fail(moeInvalidArgument, name, ".strideBytes = ", rows.strideBytes, ", but a row has ", bytes, " bytes",
         elementSize > 1 ? cat(" of elements of ", elementSize) : "", "; pass 0 for rows that follow each other");
  }
  return rows.strideBytes != 0 ? rows.strideBytes : bytes;
}

void checkIdType(int32_t type, const char* name) {
  if (type < 0 || type >= moeNumIdTypes) {
    fail(moeInvalidArgument, name, " = ", type, ", but it must be moeInt32 (0) or moeInt64 (1)");
  }
}

void checkRouting(const Comm& comm, const moeDispatchArgs_t& args, const moeHandle& handle) {
  const moeConfig_t& config = comm.config();
  if (args.numTokens < 0 || args.numTokens > config.maxTokensPerRank) {
    fail(moeInvalidArgument, "args.numTokens = ", args.numTokens,
         ", but it must be from 0 to config.maxTokensPerRank = ", config.maxTokensPerRank);
  }
  if (args.flags & ~(MOE_SEND_HALF | MOE_REUSE_ROUTING)) {
    fail(moeInvalidArgument, "args.flags = ", args.flags, " has unknown bits; known: MOE_SEND_HALF (1), ",
         "MOE_REUSE_ROUTING (2)");
  }
  if (args.flags & MOE_REUSE_ROUTING) {
    if (!handle.routed) {
      fail(moeInvalidArgument, "args.flags has MOE_REUSE_ROUTING, but the handle holds no routing of a completed ",
           "dispatch");
    }
    if (args.numTokens != handle.numTokens) {
      fail(moeInvalidArgument, "args.numTokens = ", args.numTokens,
           " with MOE_REUSE_ROUTING, but the handle's dispatch ", "had ", handle.numTokens, " tokens");
    }
    return;
  }
  if (args.topk < 0 || args.topk > config.maxTopk) {
    fail(moeInvalidArgument, "args.topk = ", args.topk, ", but it must be from 0 to config.maxTopk = ", config.maxTopk);
  }
  checkIdType(args.idType, "args.idType");
  if (args.numTokens > 0 && args.topk > 0) {
    if (!args.ids) {
      fail(moeInvalidArgument, "args.ids is NULL, but args.numTokens = ", args.numTokens,
           " and args.topk = ", args.topk);
    }
    requireAligned(args.ids, args.idType == moeInt64 ? 8 : 4, "args.ids");
  }
  requireAligned(args.weights, 4, "args.weights");
}

void takeInputs(const Comm& comm, const moeDispatchArgs_t& args, DispatchArgs* plan) {
  const Shape& shape = comm.layout().shape;
  int inputs = shape.payloads - (shape.quantizes() ? 1 : 0);
  if (args.numTokens == 0 && args.numInputs == 0) return;
  if (args.numInputs != inputs) {
    fail(moeInvalidArgument, "args.numInputs = ", args.numInputs, ", but it must be ", inputs,
         " (the tokens and config.numSideRows = ", inputs - 1, " side rows)");
  }
  if (!args.inputs) fail(moeInvalidArgument, "args.inputs is NULL, but args.numInputs = ", args.numInputs);
  for (int input = 0; input < inputs; ++input) {
    const moeRows_t& rows = args.inputs[input];
    int64_t stride = checkRows(rows, wantedRows(shape, input, false, 0), args.numTokens == 0);
    plan->inputs[shape.payloadOfInput(input)] = {static_cast<const std::byte*>(rows.data), stride};
  }
}

void takeOutputRows(const Comm& comm, const moeReceive_t& receive, bool knownEmpty, DispatchArgs* plan) {
  const Shape& shape = comm.layout().shape;
  bool padded = shape.layout == moeLayoutExpertPadded;
  int64_t most = padded ? shape.capacity : shape.rowCapacity;
  if (receive.capacity < 0) fail(moeInvalidArgument, "receive.capacity = ", receive.capacity, " is negative");
  if (padded && receive.capacity != 0 && receive.capacity != shape.capacity) {
    fail(moeInvalidArgument, "receive.capacity = ", receive.capacity, ", but in moeLayoutExpertPadded it is fixed by ",
         "config.capacity = ", shape.capacity, "; pass that or 0");
  }
  plan->capacity = receive.capacity != 0 ? receive.capacity : most;
  // An output of which the caller knows that it stays empty has no address: frameworks pass NULL for no rows.
  if (knownEmpty && receive.capacity == 0 && !receive.rows[0].data) plan->capacity = 0;
  for (int payload = 0; payload < shape.payloads; ++payload) {
    const moeRows_t& rows = receive.rows[payload];
    bool empty = plan->capacity == 0 || shape.rowCapacity == 0;
    int64_t stride = checkRows(rows, wantedRows(shape, payload, true, plan->capacity), empty);
    plan->outputs[payload] = {static_cast<std::byte*>(rows.data), stride};
  }
}

void takeOutputs(const Comm& comm, const moeReceive_t& receive, bool knownEmpty, DispatchArgs* plan) {
  const Shape& shape = comm.layout().shape;
  checkIdType(receive.idType, "receive.idType");
  if (receive.reserved != 0) fail(moeInvalidArgument, "receive.reserved = ", receive.reserved, ", but it must be 0");
  plan->views = receive.rows == nullptr;
  if (!plan->views) {
    takeOutputRows(comm, receive, knownEmpty, plan);
  } else if (shape.layout != moeLayoutRank) {
    fail(moeInvalidArgument, "receive.rows is NULL, which asks for views, but config.layout is ",
         layoutName(shape.layout), "; only moeLayoutRank has views");
  } else if (shape.scaleOrder != moeScalesByRow) {
    fail(moeInvalidArgument,
         "receive.rows is NULL, which asks for views, but config.scaleOrder is moeScalesByColumn (1); ",
         "in views scales lie by row");
  } else if (receive.capacity != 0) {
    fail(moeInvalidArgument, "receive.capacity = ", receive.capacity, " with views (receive.rows is NULL); pass 0");
  }
  requireAligned(receive.ids, receive.idType == moeInt64 ? 8 : 4, "receive.ids");
  requireAligned(receive.weights, 4, "receive.weights");
  requireAligned(receive.sources, 4, "receive.sources");
  requireAligned(receive.rowExperts, 4, "receive.rowExperts");
  requireAligned(receive.rankCounts, 4, "receive.rankCounts");
  requireAligned(receive.rankOffsets, 8, "receive.rankOffsets");
  requireAligned(receive.expertCounts, 4, "receive.expertCounts");
  requireAligned(receive.expertOffsets, 8, "receive.expertOffsets");
  requireAligned(receive.sizes, 8, "receive.sizes");
  bool expert = shape.expertLayout();
  plan->localIds = comm.config().localIds != 0;
  plan->wideOutIds = receive.idType == moeInt64;
  plan->outIds = expert ? nullptr : receive.ids;
  plan->outWeights = receive.weights;
  plan->outSources = receive.sources;
  plan->outRowExperts = expert ? receive.rowExperts : nullptr;
  plan->outRankCounts = receive.rankCounts;
  plan->outRankOffsets = receive.rankOffsets;
  plan->outExpertCounts = receive.expertCounts;
  plan->outExpertOffsets = receive.expertOffsets;
  plan->outSizes = receive.sizes;
}

DispatchArgs planDispatch(const Comm& comm, const moeDispatchArgs_t& args, const moeHandle* handle) {
  checkHandle(comm, handle);
  if (handle->state == HandleState::kSent) {
    fail(moeInvalidArgument, "handle still awaits the moeWait of its send half; use another handle or wait first");
  }
  checkRouting(comm, args, *handle);
  DispatchArgs plan{};
  plan.common = comm.commonArgs(handle->memory);
  bool half = args.flags & MOE_SEND_HALF;
  bool reuse = args.flags & MOE_REUSE_ROUTING;
  plan.phases = half ? kPhaseSend : kPhaseBoth;
  plan.numTokens = args.numTokens;
  // In a repeated dispatch the ids are in the handle. Without any entries there is nothing to read, but the pointer
  // still says that the routing is new.
  static const int64_t kNoIds = 0;
  plan.topk = reuse ? comm.config().maxTopk : args.topk;
  plan.wideIds = args.idType == moeInt64;
  plan.ids = reuse ? nullptr : args.ids && args.topk > 0 ? args.ids : &kNoIds;
  plan.weights = reuse ? nullptr : args.weights;
  takeInputs(comm, args, &plan);
  if (!half) {
    if (!args.receive) fail(moeInvalidArgument, "args.receive is NULL; pass where to receive, or MOE_SEND_HALF");
    takeOutputs(comm, takeStruct(args.receive, "args.receive", moeReceive_t MOE_RECEIVE_INIT), false, &plan);
  }
  return plan;
}

// Takes part in a dispatch without tokens and without outputs, and says that this rank refuses it.
void refuse(Comm& comm, moeResult_t code, void* stream) {
  DispatchArgs plan{};
  plan.common = comm.commonArgs(nullptr);
  plan.common.refusal = code;
  plan.phases = kPhaseBoth;
  Outcome outcome = comm.backend().dispatch(plan, stream);
  ++comm.dispatchesSent;
  if (!outcome.ok) comm.settle(outcome, "dispatch");
}

void checkOverflow(Comm& comm, moeHandle* handle) {
  // On a GPU the rows have not come yet: the sizes tell, on the device or through moeGetSizes.
  if (!comm.config().overflowIsError || !comm.backend().synchronous()) return;
  HandleHead head = comm.backend().readHandle(handle->memory + comm.layout().handle.head);
  if (!head.sizes.overflow) return;
  fail(moeOverflow, "rank ", comm.rank(), " received more rows than its output holds: ", head.sizes.requiredRows,
       " rows are required, ", head.capacity, " fit; ", head.sizes.rows,
       " were delivered. The dispatch is complete and its handle may be combined; the rows left out count as zero");
}

// A dispatch writes where the one `buffers` before it was received, so that one must have been waited for. All ranks
// make the same calls, so all see this, and none needs to be told.
void checkInFlight(const Comm& comm) {
  auto buffers = static_cast<uint64_t>(comm.config().buffers);
  uint64_t next = comm.dispatchesSent + 1;
  for (uint64_t epoch : comm.pendingHalves) {
    if (epoch + buffers > next) continue;
    fail(moeTooManyInFlight, "the send half of dispatch number ", epoch,
         " still awaits its moeWait, and dispatch number ", next, " needs its buffer (config.buffers = ", buffers,
         "); complete it first, or raise config.buffers");
  }
}

// Which buffer a dispatch uses, and so where its views lie, follows from its epoch; and replays move the epoch on.
void checkViews(Comm& comm, const DispatchArgs& plan, void* stream) {
  if (!plan.views || !(comm.backend().capturing(stream) || comm.backend().captured())) return;
  fail(moeInvalidUsage, "receive.rows is NULL, which asks for views, but operations of this communicator are captured ",
       "in graphs, and each replay moves the views elsewhere; pass receive.rows");
}

void noteReceived(moeHandle* handle, bool views) {
  handle->state = HandleState::kReceived;
  handle->routed = true;
  handle->views = views;
}

}  // namespace

void checkHandle(const Comm& comm, const moeHandle* handle) {
  if (!handle) fail(moeInvalidArgument, "handle is NULL; make one with moeHandleInit");
  if (handle->comm != &comm) fail(moeInvalidArgument, "handle belongs to another communicator");
}

void dispatch(Comm& comm, const OrError<moeDispatchArgs_t>& givenArgs, const OrError<moeHandle*>& givenHandle,
              void* stream) {
  TraceRange range("moeDispatch");
  comm.requireReady();
  checkInFlight(comm);
  DispatchArgs plan{};
  moeHandle* handle = nullptr;
  try {
    handle = valueOrThrow(givenHandle);
    plan = planDispatch(comm, valueOrThrow(givenArgs), handle);
    checkViews(comm, plan, stream);
  } catch (const Error& error) {
    if (handle && handle->comm == &comm && handle->state != HandleState::kSent) handle->state = HandleState::kFailed;
    // Nothing runs while a stream captures: no peer waits for this call.
    if (!comm.backend().capturing(stream)) refuse(comm, error.code(), stream);
    throw;
  }
  handle->state = HandleState::kFailed;
  handle->knownEmpty = false;
  Outcome outcome = comm.backend().dispatch(plan, stream);
  ++comm.dispatchesSent;
  comm.settle(outcome, "dispatch");
  handle->epoch = comm.dispatchesSent;
  handle->stream = stream;
  handle->numTokens = plan.numTokens;
  if (plan.phases == kPhaseSend) {
    handle->state = HandleState::kSent;
    comm.pendingHalves.push_back(handle->epoch);
    return;
  }
  noteReceived(handle, plan.views);
  checkOverflow(comm, handle);
}

void wait(Comm& comm, moeHandle* handle, const moeReceive_t& receive, void* stream) {
  TraceRange range("moeWait");
  comm.requireReady();
  checkHandle(comm, handle);
  if (handle->state != HandleState::kSent) {
    fail(moeInvalidUsage, "moeWait: the handle has no send half under way; start one with MOE_SEND_HALF");
  }
  DispatchArgs plan{};
  plan.common = comm.commonArgs(handle->memory);
  plan.phases = kPhaseReceive;
  takeOutputs(comm, receive, handle->knownEmpty, &plan);
  checkViews(comm, plan, stream);
  handle->state = HandleState::kFailed;
  std::erase(comm.pendingHalves, handle->epoch);
  Outcome outcome = comm.backend().dispatch(plan, stream);
  comm.settle(outcome, "dispatch");
  noteReceived(handle, plan.views);
  checkOverflow(comm, handle);
}

moeSizes_t getSizes(Comm& comm, moeHandle* handle) {
  comm.requireReady();
  checkHandle(comm, handle);
  if (handle->state != HandleState::kSent && handle->state != HandleState::kReceived) {
    fail(moeInvalidUsage, "moeGetSizes: the handle has no dispatch whose counts could be known");
  }
  if (comm.backend().capturing(handle->stream)) {
    fail(moeInvalidUsage, "moeGetSizes: the stream of the handle's dispatch is capturing a graph, and the host cannot ",
         "wait for what has not run; read receive.sizes on the device, or call this after a replay");
  }
  moeSizes_t sizes{};
  if (handle->state == HandleState::kSent) {
    DispatchArgs plan{};
    plan.common = comm.commonArgs(handle->memory);
    plan.capacity = INT64_MAX;
    comm.settle(comm.backend().count(plan, handle->stream, &sizes), "dispatch");
  } else {
    sizes = comm.backend().readHandle(handle->memory + comm.layout().handle.head).sizes;
  }
  handle->knownEmpty = sizes.requiredRows == 0;
  return sizes;
}

bool viewsStand(const Comm& comm, const moeHandle& handle) {
  auto buffers = static_cast<uint64_t>(comm.config().buffers);
  return handle.views && comm.dispatchesSent - handle.epoch < buffers;
}

void getViews(Comm& comm, const moeHandle* handle, moeRows_t* views, int numViews) {
  comm.requireReady();
  checkHandle(comm, handle);
  const Layout& layout = comm.layout();
  if (!views) fail(moeInvalidArgument, "views is NULL");
  if (numViews != layout.shape.payloads) {
    fail(moeInvalidArgument, "numViews = ", numViews, ", but there are ", layout.shape.payloads, " payloads");
  }
  if (handle->state != HandleState::kReceived || !viewsStand(comm, *handle)) {
    fail(moeInvalidUsage, "moeGetViews: the handle's rows are not in the window: its dispatch asked for no views ",
         "(receive.rows = NULL), was combined, or ", comm.config().buffers, " later dispatches have passed");
  }
  DispatchWindow window(layout, comm.window(), Epoch(handle->epoch, layout.shape));
  for (int payload = 0; payload < layout.shape.payloads; ++payload) {
    views[payload] = {window.record(0, 0) + layout.record.payload[payload], layout.shape.payloadBytes[payload],
                      layout.record.stride, roleOf(layout.shape, payload), 0};
  }
}

}  // namespace moe

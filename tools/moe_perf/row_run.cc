// SPDX-License-Identifier: Apache-2.0
#include "row_run.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

#include "text.h"

namespace moe::perf {
namespace {

using Clock = std::chrono::steady_clock;

// Rows past the expected ones that are poisoned too, to see what a call writes there.
constexpr int64_t kPoisonSlack = 16;

double microseconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::micro>(to - from).count();
}

}  // namespace

RowRun::RowRun(RunContext& context, moeComm_t comm, const moeInfo_t& info, int64_t tokens, int64_t maxTokens)
    : context_(context),
      options_(context.options),
      comm_(comm),
      info_(info),
      tokens_(tokens),
      maxTokens_(maxTokens),
      inputs_(context, info.rank, info.nranks, tokens) {
  shape_.ranks = info.nranks;
  shape_.experts = options_.experts;
  shape_.topk = options_.topk;
  shape_.layout = options_.layout;
  shape_.align = options_.align;
  shape_.capacity = options_.budget;
  if (options_.layout == moeLayoutExpertPadded && options_.budget == 0) shape_.capacity = info.nranks * maxTokens;
  if (options_.views()) shape_.viewRows = maxTokens;
  values_.resize(static_cast<size_t>(options_.hidden));
  measures_.inputSets = inputs_.sets();
  makeOutputs();
  bindReceive();
  bindReceived();
  handleMemory_ = Array(static_cast<int64_t>(info.handleBytes), context.gpu);
  require(moeHandleInit(comm, handleMemory_.device(), info.handleBytes, &handle_), "moeHandleInit");
}

RowRun::~RowRun() {
  if (context_.gpu && std::uncaught_exceptions() > 0) {
    // Freeing buffers waits for the GPU, and what runs there may wait for ranks that have failed.
    moeCommAbort(comm_);
    context_.gpu->openGate();
  }
  moeHandleDestroy(handle_);
}

// Worst-case outputs are reserved only; on the host, what calls and poison touch takes up memory.
void RowRun::makeOutputs() {
  const TokenData& data = context_.data;
  Gpu* gpu = context_.gpu;
  bool padded = options_.layout == moeLayoutExpertPadded;
  rowCapacity_ = options_.budget > 0 && !padded ? options_.budget : info_.rowCapacity;
  int64_t idBytes = options_.ids == moeInt32 ? 4 : 8;
  bool byRank = options_.layout == moeLayoutRank;
  int64_t combineBytes = options_.hidden * static_cast<int64_t>(elementBytes(options_.combineDtype()));
  if (!options_.views()) {
    rows_ = Array(rowCapacity_ * data.rowBytes(), gpu);
    scaleRows_ = Array(rowCapacity_ * data.scaleBytes(), gpu);
  } else if (gpu) {
    viewCopy_ = Buffer(rowCapacity_ * data.rowBytes());
    viewScalesCopy_ = Buffer(rowCapacity_ * data.scaleBytes());
  }
  if (byRank) ids_ = Array(rowCapacity_ * options_.topk * idBytes, gpu);
  weights_ = Array(rowCapacity_ * (byRank ? options_.topk : 1) * 4, gpu);
  sources_ = Array(rowCapacity_ * 8, gpu);
  if (!byRank) rowExperts_ = Array(rowCapacity_ * 4, gpu);
  rankCounts_ = Array(info_.nranks * int64_t{4}, gpu);
  rankOffsets_ = Array(info_.nranks * int64_t{8}, gpu);
  expertCounts_ = Array(info_.localExperts * int64_t{4}, gpu);
  expertOffsets_ = Array((info_.localExperts + int64_t{1}) * 8, gpu);
  sizes_ = Array(kBatchCalls * static_cast<int64_t>(sizeof(moeSizes_t)), gpu);
  if (data.type() == moeFloat8e4m3) expertRows_ = Array(rowCapacity_ * combineBytes, gpu);
  combined_ = Array(tokens_ * combineBytes, gpu);
}

void RowRun::bindReceive() {
  const TokenData& data = context_.data;
  outputs_[0] = {rows_.device(), data.rowBytes(), 0, moeRoleTokens, 0};
  outputs_[1] = {scaleRows_.device(), data.scaleBytes(), 0, moeRoleScales, 0};
  bool byRank = options_.layout == moeLayoutRank;
  receive_.rows = options_.views() ? nullptr : outputs_;
  receive_.capacity = options_.layout == moeLayoutExpertPadded ? 0 : options_.budget;
  receive_.idType = options_.ids;
  receive_.ids = ids_.device();
  receive_.weights = weights_.deviceAs<float>();
  receive_.sources = sources_.deviceAs<int32_t>();
  receive_.rowExperts = rowExperts_.deviceAs<int32_t>();
  receive_.rankCounts = rankCounts_.deviceAs<int32_t>();
  receive_.rankOffsets = byRank ? rankOffsets_.deviceAs<int64_t>() : nullptr;
  receive_.expertCounts = byRank ? nullptr : expertCounts_.deviceAs<int32_t>();
  receive_.expertOffsets = byRank ? nullptr : expertOffsets_.deviceAs<int64_t>();
  receive_.sizes = sizes_.deviceAs<moeSizes_t>();
}

void RowRun::bindReceived() {
  const TokenData& data = context_.data;
  bool copied = context_.gpu && options_.views();
  received_.views = options_.views();
  received_.maxTokens = maxTokens_;
  received_.tokens = {copied ? viewCopy_.data() : rows_.host(), data.rowBytes(), 0, moeRoleTokens, 0};
  received_.scales = {copied ? viewScalesCopy_.data() : scaleRows_.host(), data.scaleBytes(), 0, moeRoleScales, 0};
  received_.capacity = rowCapacity_;
  received_.firstExpert = info_.firstExpert;
  received_.idType = options_.ids;
  received_.ids = ids_.host();
  received_.weights = weights_.hostAs<float>();
  received_.sources = sources_.hostAs<int32_t>();
  received_.rowExperts = rowExperts_.hostAs<int32_t>();
  received_.rankCounts = rankCounts_.hostAs<int32_t>();
  received_.rankOffsets = rankOffsets_.hostAs<int64_t>();
  received_.expertCounts = expertCounts_.hostAs<int32_t>();
  received_.expertOffsets = expertOffsets_.hostAs<int64_t>();
  received_.sizes = sizes_.hostAs<moeSizes_t>();
}

// Fills every output that the coming call must write with values that no right answer has.
void RowRun::poison(const ExpectedReceive& expected) {
  constexpr unsigned char kNan = 0xff;  // every float type of all ones is a NaN
  constexpr unsigned char kOdd = 0xa5;
  int64_t combineBytes = options_.hidden * static_cast<int64_t>(elementBytes(options_.combineDtype()));
  for (const RowRange& range : deliveredRanges(expected)) {
    auto poisonRows = [&](const Array& array, int64_t rowBytes) {
      array.poison(kNan, range.first * rowBytes, range.count * rowBytes);
    };
    poisonRows(rows_, context_.data.rowBytes());
    poisonRows(scaleRows_, context_.data.scaleBytes());
    poisonRows(expertRows_, combineBytes);
  }
  int64_t end = expected.rows.empty() ? 0 : expected.rows.back().position + 1;
  if (options_.layout != moeLayoutRank) end = expected.expertOffsets.back();
  int64_t used = std::min(rowCapacity_, end + kPoisonSlack);
  if (used > 0) {
    for (const Array* array : {&ids_, &sources_, &rowExperts_}) {
      array->poison(kOdd, 0, array->bytes() / rowCapacity_ * used);
    }
    weights_.poison(kNan, 0, weights_.bytes() / rowCapacity_ * used);
  }
  for (const Array* array : {&rankCounts_, &rankOffsets_, &expertCounts_, &expertOffsets_, &sizes_}) {
    array->poison(kOdd, 0, array->bytes());
  }
  combined_.poison(kNan, 0, combined_.bytes());
}

RowMeasures RowRun::run() {
  if (context_.gpu) return runOnGpu();
  int64_t call = 0;
  for (int i = 0; i < options_.warmups; ++i) iterate(call++ % inputs_.sets(), false, options_.check);
  for (int i = 0; i < options_.iterations; ++i) {
    iterate(call++ % inputs_.sets(), true, options_.check && i + 1 == options_.iterations);
  }
  return std::move(measures_);
}

// What the coming call must deliver. Its outputs are poisoned.
void RowRun::expect(int64_t set, std::vector<Routes>* routes, ExpectedReceive* expected) {
  for (int rank = 0; rank < shape_.ranks; ++rank) routes->push_back(context_.routing.route(set, rank, tokens_));
  *expected = expectReceive(shape_, info_.rank, *routes);
  poison(*expected);
}

void RowRun::noteSizes(const moeSizes_t& sizes, bool timed) {
  measures_.overflowed += sizes.overflow;
  measures_.requiredRows = std::max(measures_.requiredRows, sizes.requiredRows);
  if (timed) measures_.rows.push_back(static_cast<double>(sizes.rows));
}

void RowRun::iterate(int64_t set, bool timed, bool check) {
  std::vector<Routes> routes;
  ExpectedReceive expected;
  if (check) expect(set, &routes, &expected);
  moeStats_t before = stats();
  context_.team.barrier();
  Clock::time_point start = Clock::now();
  stall();
  dispatch(set);
  Clock::time_point end = Clock::now();
  moeStats_t between = stats();
  locateRows();
  noteSizes(*received_.sizes, timed);
  if (timed) {
    measures_.dispatchUs.push_back(microseconds(start, end));
    ++measures_.calls;
    measures_.dispatchBytes += between.selfBytes + between.mappedBytes - before.selfBytes - before.mappedBytes;
    measures_.copies += between.selfRows + between.mappedRows - before.selfRows - before.mappedRows;
    measures_.tokens += between.tokens - before.tokens;
  }
  if (check) checkDispatch(set, routes, expected);
  if (options_.op == Op::kDispatch) return;

  runExpert();
  context_.team.barrier();
  start = Clock::now();
  stall();
  combine();
  end = Clock::now();
  moeStats_t after = stats();
  if (timed) {
    measures_.combineUs.push_back(microseconds(start, end));
    ++measures_.combines;
    measures_.combineBytes += after.selfBytes + after.mappedBytes - between.selfBytes - between.mappedBytes;
  }
  if (check) checkCombine(set, routes, anyRankOverflowed(*received_.sizes));
}

bool RowRun::anyRankOverflowed(const moeSizes_t& sizes) const {
  bool any = false;
  for (const auto& rank : context_.team.gather({static_cast<double>(sizes.overflow)})) any = any || rank[0] != 0;
  return any;
}

void RowRun::stall() const {
  if (options_.stallRank == info_.rank) std::this_thread::sleep_for(std::chrono::milliseconds(options_.stallMs));
}

void RowRun::dispatch(int64_t set) {
  const TokenData& data = context_.data;
  int sides = data.inputScaleBytes() > 0 ? 1 : 0;
  moeRows_t inputs[2] = {{inputs_.rows(set), data.inputBytes(), 0, moeRoleTokens, 0}, {}};
  if (sides) inputs[1] = {inputs_.scales(set), data.inputScaleBytes(), 0, moeRoleScales, 0};
  moeDispatchArgs_t args = MOE_DISPATCH_ARGS_INIT;
  args.numTokens = tokens_;
  args.topk = options_.topk;
  args.idType = options_.ids;
  // A rank without tokens passes no pointers, as callers do.
  if (tokens_ > 0) {
    args.ids = inputs_.ids(set);
    args.weights = inputs_.weights(set);
    args.inputs = inputs;
    args.numInputs = 1 + sides;
  }
  void* stream = context_.gpu ? context_.gpu->stream() : nullptr;
  if (!options_.exact && !options_.halves) {
    args.receive = &receive_;
    require(moeDispatch(comm_, &args, handle_, stream), "moeDispatch");
    return;
  }
  args.flags = MOE_SEND_HALF;
  require(moeDispatch(comm_, &args, handle_, stream), "moeDispatch (send half)");
  if (options_.exact) takeExactSizes();
  require(moeWait(comm_, handle_, &receive_, stream), "moeWait");
}

void RowRun::takeExactSizes() {
  moeSizes_t sizes{};
  require(moeGetSizes(comm_, handle_, &sizes), "moeGetSizes");
  if (options_.layout != moeLayoutExpertPadded) {
    if (sizes.requiredRows > rowCapacity_) {
      fail("moeGetSizes says that ", sizes.requiredRows, " rows are required, but the worst case is ", rowCapacity_);
    }
    // 0 would ask for the worst case.
    receive_.capacity = std::max<int64_t>(1, sizes.requiredRows);
    received_.capacity = std::min(rowCapacity_, receive_.capacity);
  }
}

// Where the rows of the last dispatch lie.
void RowRun::locateRows() {
  if (!options_.views()) return;
  require(moeGetViews(comm_, handle_, views_, context_.data.scaleCount() > 0 ? 2 : 1), "moeGetViews");
  if (context_.gpu) return;
  received_.tokens = views_[0];
  received_.scales = views_[1];
}

int64_t RowRun::countAt(size_t source) const {
  int64_t count = received_.rankCounts[source];
  int64_t offset = received_.rankOffsets[source];
  if (count < 0 || count > tokens_ || offset < 0 || (count > 0 && offset + count > received_.capacity)) {
    fail("moeDispatch gave ", count, " rows at ", offset, " from rank ", source, ", which has ", tokens_,
         " tokens; the output holds ", received_.capacity, " rows");
  }
  return count;
}

// The expert is the identity. What it costs is not timed.
void RowRun::runExpert() {
  if (options_.layout == moeLayoutRank) {
    runRankExpert();
  } else if (context_.data.type() == moeFloat8e4m3) {
    runExpertDequantise();
  }
}

// Rank layout: each row becomes its token's weighted sum over this rank's experts.
void RowRun::runRankExpert() {
  for (int source = 0; source < shape_.ranks; ++source) {
    int64_t count = countAt(static_cast<size_t>(source));
    int64_t offset = received_.rankOffsets[source];
    if (context_.gpu) {
      runExpertOnGpu(offset, count);
      continue;
    }
    for (int64_t index = 0; index < count; ++index) {
      float factor = 0;
      for (int64_t at = (offset + index) * shape_.topk; at < (offset + index + 1) * shape_.topk; ++at) {
        if (received_.idAt(at) >= 0) factor += received_.weights[at];
      }
      multiplyRow(source, index, offset + index, factor);
    }
  }
}

void RowRun::runExpertDequantise() {
  for (int64_t expert = 0; expert < info_.localExperts; ++expert) {
    int64_t begin = received_.expertOffsets[expert];
    int64_t end = begin + received_.expertCounts[expert];
    if (end > begin && (begin < 0 || end > received_.capacity)) {
      fail("moeDispatch placed local expert ", expert, " at ", begin, " to ", end, "; the output holds ",
           received_.capacity, " rows");
    }
    if (context_.gpu) {
      runExpertOnGpu(begin, end - begin);
      continue;
    }
    for (int64_t position = begin; position < end; ++position) multiplyRow(0, 0, position, 1.0f);
  }
}

void RowRun::multiplyRow(int source, int64_t index, int64_t position, float factor) {
  std::byte* row = received_.tokenRow(source, index, position);
  std::byte* target = row;
  moeDataType_t type = context_.data.type();
  if (type == moeFloat8e4m3) {
    target = expertRows_.host() + position * options_.hidden * static_cast<int64_t>(elementBytes(moeBfloat16));
    scales_.resize(static_cast<size_t>(context_.data.scaleCount()));
    context_.data.readScales(received_.scaleRow(source, index, position), scales_.data());
  }
  decodeRow(type, row, scales_.data(), options_.hidden, values_.data());
  for (float& value : values_) value *= factor;
  encodeRow(options_.combineDtype(), values_.data(), options_.hidden, target);
}

void RowRun::combine() {
  moeCombineArgs_t args = MOE_COMBINE_ARGS_INIT;
  args.rows = context_.data.type() == moeFloat8e4m3 ? expertRows_.device()
              : options_.views()                    ? nullptr
                                                    : rows_.device();
  args.output = combined_.device();
  args.flags = options_.layout == moeLayoutRank ? 0 : MOE_APPLY_WEIGHTS;
  require(moeCombine(comm_, &args, handle_, context_.gpu ? context_.gpu->stream() : nullptr), "moeCombine");
}

void RowRun::checkDispatch(int64_t set, const std::vector<Routes>& routes, const ExpectedReceive& expected) {
  std::byte* flipped = nullptr;
  if (context_.corruptPending) {
    // The lowest rank that got a row flips a bit of one of them.
    int chosen = -1;
    auto received = context_.team.gather({static_cast<double>(expected.sizes.rows)});
    for (int rank = shape_.ranks - 1; rank >= 0; --rank) {
      if (received[static_cast<size_t>(rank)][0] > 0) chosen = rank;
    }
    context_.corruptPending = chosen < 0;
    if (chosen == info_.rank) {
      for (const ExpectedRow& row : expected.rows) {
        int64_t index = shape_.layout == moeLayoutRank ? row.index : 0;
        if (row.delivered) flipped = received_.tokenRow(row.source, index, row.position);
      }
      *flipped ^= std::byte{1};
    }
  }
  Verdict verdict = checkReceived(shape_, context_.data, set, routes, expected, received_);
  measures_.verdict.add(verdict);
  measures_.checkedRows += expected.sizes.rows;
  if (flipped) *flipped ^= std::byte{1};
}

void RowRun::checkCombine(int64_t set, const std::vector<Routes>& routes, bool anyOverflow) {
  std::vector<LostRow> lost;
  if (anyOverflow) lost = lostRows(shape_, info_.rank, routes);
  CombineOracle oracle(shape_, context_.data, options_.combineDtype());
  measures_.verdict.add(checkCombined(oracle, shape_, context_.data, options_.combineDtype(), set, info_.rank,
                                      routes[static_cast<size_t>(info_.rank)], lost, combined_.host()));
  measures_.checkedRows += tokens_;
}

moeStats_t RowRun::stats() const {
  moeStats_t stats = MOE_STATS_INIT;
  require(moeGetStats(comm_, &stats), "moeGetStats");
  return stats;
}

}  // namespace moe::perf

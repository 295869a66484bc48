// SPDX-License-Identifier: Apache-2.0
#include "row_run.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "machine.h"
#include "text.h"

namespace moe::perf {
namespace {

using Clock = std::chrono::steady_clock;

// Inputs of all ranks together, so that no call finds its tokens in a cache.
constexpr int64_t kColdBytes = int64_t{128} << 20;
constexpr int64_t kMaxSets = 4096;
// Rows past the expected ones that are poisoned too, to see what a call writes there.
constexpr int64_t kPoisonSlack = 16;

double microseconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::micro>(to - from).count();
}

}  // namespace

RowRun::RowRun(RunContext& context, moeComm_t comm, const moeInfo_t& info, int64_t tokens, int64_t maxTokens)
    : context_(context), options_(context.options), comm_(comm), info_(info), tokens_(tokens), maxTokens_(maxTokens) {
  shape_.ranks = info.nranks;
  shape_.experts = options_.experts;
  shape_.topk = options_.topk;
  shape_.layout = options_.layout;
  shape_.align = options_.align;
  shape_.capacity = options_.budget;
  if (options_.layout == moeLayoutExpertPadded && options_.budget == 0) shape_.capacity = info.nranks * maxTokens;
  if (options_.views()) shape_.viewRows = maxTokens;
  values_.resize(static_cast<size_t>(options_.hidden));
  makeInputs();
  makeOutputs();
  bindReceive();
  handleMemory_ = Buffer(static_cast<int64_t>(info.handleBytes));
  require(moeHandleInit(comm, handleMemory_.data(), info.handleBytes, &handle_), "moeHandleInit");
}

RowRun::~RowRun() { moeHandleDestroy(handle_); }

std::byte* RowRun::inputRow(int64_t set) const { return inputs_.data() + set * tokens_ * context_.data.rowBytes(); }

std::byte* RowRun::inputScales(int64_t set) const {
  return scaleInputs_.data() + set * tokens_ * context_.data.scaleBytes();
}

void RowRun::makeInputs() {
  const TokenData& data = context_.data;
  int64_t setBytes = tokens_ * (data.rowBytes() + data.scaleBytes());
  int64_t total = std::min(kColdBytes, availableMemory() / 8);
  sets_ = setBytes == 0 ? 2 : std::clamp<int64_t>(total / (setBytes * info_.nranks) + 1, 2, kMaxSets);
  // All ranks must send the same set in the same call, and each sees another amount of free memory.
  for (const auto& rank : context_.team.gather({static_cast<double>(sets_)})) {
    sets_ = std::min(sets_, static_cast<int64_t>(rank[0]));
  }
  inputs_ = Buffer(sets_ * tokens_ * data.rowBytes());
  scaleInputs_ = Buffer(sets_ * tokens_ * data.scaleBytes());
  for (int64_t set = 0; set < sets_; ++set) {
    for (int64_t token = 0; token < tokens_; ++token) {
      TokenId id{set, info_.rank, token};
      data.fillRow(id, inputRow(set) + token * data.rowBytes());
      if (data.scaleCount() > 0) {
        data.fillScales(id, reinterpret_cast<float*>(inputScales(set) + token * data.scaleBytes()));
      }
    }
    inputRoutes_.push_back(context_.routing.route(set, info_.rank, tokens_));
    const std::vector<int64_t>& ids = inputRoutes_.back().ids;
    if (options_.ids == moeInt32) inputIds32_.emplace_back(ids.begin(), ids.end());
  }
  measures_.inputSets = sets_;
}

// Worst-case outputs are reserved only; what calls and poison touch takes up memory.
void RowRun::makeOutputs() {
  const TokenData& data = context_.data;
  bool padded = options_.layout == moeLayoutExpertPadded;
  rowCapacity_ = options_.budget > 0 && !padded ? options_.budget : info_.rowCapacity;
  int64_t idBytes = options_.ids == moeInt32 ? 4 : 8;
  bool byRank = options_.layout == moeLayoutRank;
  int64_t combineBytes = options_.hidden * static_cast<int64_t>(elementBytes(options_.combineDtype()));
  if (!options_.views()) {
    rows_ = Buffer(rowCapacity_ * data.rowBytes());
    scaleRows_ = Buffer(rowCapacity_ * data.scaleBytes());
  }
  if (byRank) ids_ = Buffer(rowCapacity_ * options_.topk * idBytes);
  weights_ = Buffer(rowCapacity_ * (byRank ? options_.topk : 1) * 4);
  sources_ = Buffer(rowCapacity_ * 8);
  if (!byRank) rowExperts_ = Buffer(rowCapacity_ * 4);
  rankCounts_ = Buffer(info_.nranks * int64_t{4});
  rankOffsets_ = Buffer(info_.nranks * int64_t{8});
  expertCounts_ = Buffer(info_.localExperts * int64_t{4});
  expertOffsets_ = Buffer((info_.localExperts + int64_t{1}) * 8);
  sizes_ = Buffer(sizeof(moeSizes_t));
  if (options_.dtype == moeFloat8e4m3) expertRows_ = Buffer(rowCapacity_ * combineBytes);
  combined_ = Buffer(tokens_ * combineBytes);
}

void RowRun::bindReceive() {
  const TokenData& data = context_.data;
  outputs_[0] = {rows_.data(), data.rowBytes(), 0, moeRoleTokens, 0};
  outputs_[1] = {scaleRows_.data(), data.scaleBytes(), 0, moeRoleScales, 0};
  bool byRank = options_.layout == moeLayoutRank;
  receive_.rows = options_.views() ? nullptr : outputs_;
  receive_.capacity = options_.layout == moeLayoutExpertPadded ? 0 : options_.budget;
  receive_.idType = options_.ids;
  receive_.ids = ids_.data();
  receive_.weights = weights_.as<float>();
  receive_.sources = sources_.as<int32_t>();
  receive_.rowExperts = rowExperts_.as<int32_t>();
  receive_.rankCounts = rankCounts_.as<int32_t>();
  receive_.rankOffsets = byRank ? rankOffsets_.as<int64_t>() : nullptr;
  receive_.expertCounts = byRank ? nullptr : expertCounts_.as<int32_t>();
  receive_.expertOffsets = byRank ? nullptr : expertOffsets_.as<int64_t>();
  receive_.sizes = sizes_.as<moeSizes_t>();

  received_.views = options_.views();
  received_.maxTokens = maxTokens_;
  received_.tokens = outputs_[0];
  received_.scales = outputs_[1];
  received_.capacity = rowCapacity_;
  received_.firstExpert = info_.firstExpert;
  received_.idType = options_.ids;
  received_.ids = ids_.data();
  received_.weights = receive_.weights;
  received_.sources = receive_.sources;
  received_.rowExperts = receive_.rowExperts;
  received_.rankCounts = receive_.rankCounts;
  received_.rankOffsets = receive_.rankOffsets;
  received_.expertCounts = receive_.expertCounts;
  received_.expertOffsets = receive_.expertOffsets;
  received_.sizes = receive_.sizes;
}

// Fills every output that the coming call must write with values that no right answer has.
void RowRun::poison(const ExpectedReceive& expected) {
  constexpr unsigned char kNan = 0xff;  // every float type of all ones is a NaN
  constexpr unsigned char kOdd = 0xa5;
  auto poisonRows = [&](const Buffer& buffer, unsigned char pattern, int64_t rowBytes) {
    for (const ExpectedRow& row : expected.rows) {
      if (row.delivered && buffer.data()) std::memset(buffer.data() + row.position * rowBytes, pattern, rowBytes);
    }
  };
  int64_t combineBytes = options_.hidden * static_cast<int64_t>(elementBytes(options_.combineDtype()));
  poisonRows(rows_, kNan, context_.data.rowBytes());
  poisonRows(scaleRows_, kNan, context_.data.scaleBytes());
  poisonRows(expertRows_, kNan, combineBytes);
  int64_t end = expected.rows.empty() ? 0 : expected.rows.back().position + 1;
  if (options_.layout != moeLayoutRank) end = expected.expertOffsets.back();
  int64_t used = std::min(rowCapacity_, end + kPoisonSlack);
  if (used > 0) {
    for (const Buffer* buffer : {&ids_, &sources_, &rowExperts_}) {
      buffer->poison(kOdd, buffer->bytes() / rowCapacity_ * used);
    }
    weights_.poison(kNan, weights_.bytes() / rowCapacity_ * used);
  }
  for (const Buffer* buffer : {&rankCounts_, &rankOffsets_, &expertCounts_, &expertOffsets_, &sizes_}) {
    buffer->poison(kOdd, buffer->bytes());
  }
  combined_.poison(kNan, combined_.bytes());
}

RowMeasures RowRun::run() {
  int64_t call = 0;
  for (int i = 0; i < options_.warmups; ++i) iterate(call++ % sets_, false, options_.check);
  for (int i = 0; i < options_.iterations; ++i) {
    iterate(call++ % sets_, true, options_.check && i + 1 == options_.iterations);
  }
  return std::move(measures_);
}

void RowRun::iterate(int64_t set, bool timed, bool check) {
  std::vector<Routes> routes;
  ExpectedReceive expected;
  if (check) {
    for (int rank = 0; rank < shape_.ranks; ++rank) routes.push_back(context_.routing.route(set, rank, tokens_));
    expected = expectReceive(shape_, info_.rank, routes);
    poison(expected);
  }
  moeStats_t before = stats();
  context_.team.barrier();
  Clock::time_point start = Clock::now();
  stall();
  dispatch(set);
  Clock::time_point end = Clock::now();
  moeStats_t between = stats();
  locateRows();
  const moeSizes_t& sizes = *received_.sizes;
  measures_.overflowed += sizes.overflow;
  measures_.requiredRows = std::max(measures_.requiredRows, sizes.requiredRows);
  if (timed) {
    measures_.dispatchUs.push_back(microseconds(start, end));
    measures_.rows.push_back(static_cast<double>(sizes.rows));
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
    measures_.combineBytes += after.selfBytes + after.mappedBytes - between.selfBytes - between.mappedBytes;
  }
  if (!check) return;
  bool anyOverflow = false;
  for (const auto& rank : context_.team.gather({static_cast<double>(sizes.overflow)})) {
    anyOverflow = anyOverflow || rank[0] != 0;
  }
  checkCombine(set, routes, anyOverflow);
}

void RowRun::stall() const {
  if (options_.stallRank == info_.rank) std::this_thread::sleep_for(std::chrono::milliseconds(options_.stallMs));
}

void RowRun::dispatch(int64_t set) {
  const TokenData& data = context_.data;
  const Routes& routes = inputRoutes_[static_cast<size_t>(set)];
  int sides = data.scaleCount() > 0 ? 1 : 0;
  moeRows_t inputs[2] = {{inputRow(set), data.rowBytes(), 0, moeRoleTokens, 0}, {}};
  if (sides) inputs[1] = {inputScales(set), data.scaleBytes(), 0, moeRoleScales, 0};
  moeDispatchArgs_t args = MOE_DISPATCH_ARGS_INIT;
  args.numTokens = tokens_;
  args.topk = options_.topk;
  args.idType = options_.ids;
  // A rank without tokens passes no pointers, as callers do.
  if (tokens_ > 0) {
    args.ids = options_.ids == moeInt32 ? static_cast<const void*>(inputIds32_[static_cast<size_t>(set)].data())
                                        : routes.ids.data();
    args.weights = routes.weights.data();
    args.inputs = inputs;
    args.numInputs = 1 + sides;
  }
  if (!options_.exact) {
    args.receive = &receive_;
    require(moeDispatch(comm_, &args, handle_, nullptr), "moeDispatch");
    return;
  }
  args.flags = MOE_SEND_HALF;
  require(moeDispatch(comm_, &args, handle_, nullptr), "moeDispatch (send half)");
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
  require(moeWait(comm_, handle_, &receive_, nullptr), "moeWait");
}

// Where the rows of the last dispatch lie.
void RowRun::locateRows() {
  if (!options_.views()) return;
  moeRows_t views[2] = {};
  require(moeGetViews(comm_, handle_, views, context_.data.scaleCount() > 0 ? 2 : 1), "moeGetViews");
  received_.tokens = views[0];
  received_.scales = views[1];
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
  } else if (options_.dtype == moeFloat8e4m3) {
    runExpertDequantise();
  }
}

// Rank layout: each row becomes its token's weighted sum over this rank's experts.
void RowRun::runRankExpert() {
  for (int source = 0; source < shape_.ranks; ++source) {
    int64_t count = countAt(static_cast<size_t>(source));
    int64_t offset = received_.rankOffsets[source];
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
    for (int64_t position = begin; position < end; ++position) multiplyRow(0, 0, position, 1.0f);
  }
}

void RowRun::multiplyRow(int source, int64_t index, int64_t position, float factor) {
  std::byte* row = received_.tokenRow(source, index, position);
  std::byte* target = row;
  const float* scales = nullptr;
  if (options_.dtype == moeFloat8e4m3) {
    target = expertRows_.data() + position * options_.hidden * static_cast<int64_t>(elementBytes(moeBfloat16));
    scales = reinterpret_cast<const float*>(received_.scaleRow(source, index, position));
  }
  decodeRow(options_.dtype, row, scales, options_.hidden, values_.data());
  for (float& value : values_) value *= factor;
  encodeRow(options_.combineDtype(), values_.data(), options_.hidden, target);
}

void RowRun::combine() {
  moeCombineArgs_t args = MOE_COMBINE_ARGS_INIT;
  args.rows = options_.dtype == moeFloat8e4m3 ? expertRows_.data() : options_.views() ? nullptr : rows_.data();
  args.output = combined_.data();
  args.flags = options_.layout == moeLayoutRank ? 0 : MOE_APPLY_WEIGHTS;
  require(moeCombine(comm_, &args, handle_, nullptr), "moeCombine");
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
                                      routes[static_cast<size_t>(info_.rank)], lost, combined_.data()));
  measures_.checkedRows += tokens_;
}

moeStats_t RowRun::stats() const {
  moeStats_t stats = MOE_STATS_INIT;
  require(moeGetStats(comm_, &stats), "moeGetStats");
  return stats;
}

}  // namespace moe::perf

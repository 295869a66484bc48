// SPDX-License-Identifier: Apache-2.0
// A layer as users of NCCL write it, at its best: each token is packed once per rank with all that belongs to it,
// counts are exchanged and read on the host, and grouped sends and receives of exactly those sizes move the rest.
#include "baseline.h"
#include "text.h"

#ifdef MOE_HAVE_CUDA
#include <algorithm>
#include <chrono>
#include <exception>
#include <numeric>

#include "baseline_kernels.h"
#include "cold_start.h"
#include "nccl.h"

namespace moe::perf {
namespace {

using Clock = std::chrono::steady_clock;

double microsecondsSince(Clock::time_point from) {
  return std::chrono::duration<double, std::micro>(Clock::now() - from).count();
}

int64_t roundUp16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

BaselineShape shapeFor(const RunContext& context, const moeInfo_t& info, int64_t tokens) {
  BaselineShape shape;
  shape.rank = info.rank;
  shape.ranks = info.nranks;
  shape.topk = context.options.topk;
  shape.wideIds = context.options.ids == moeInt64;
  shape.tokens = tokens;
  shape.experts = context.options.experts;
  shape.hidden = context.options.hidden;
  shape.combineType = context.options.combineDtype();
  shape.rowBytes = context.data.rowBytes();
  shape.scaleBytes = context.data.scaleBytes();
  shape.scalesAt = roundUp16(shape.rowBytes);
  shape.idsAt = shape.scalesAt + roundUp16(shape.scaleBytes);
  shape.weightsAt = shape.idsAt + shape.topk * int64_t{4};
  shape.tokenAt = shape.weightsAt + shape.topk * int64_t{4};
  shape.recordBytes = roundUp16(shape.tokenAt + 4);
  return shape;
}

// Counts that the host reads during a call.
class HostCounts {
 public:
  HostCounts(Gpu& gpu, int count) : gpu_(gpu), data_(static_cast<int32_t*>(gpu.allocateHost(count * int64_t{4}))) {}
  ~HostCounts() { gpu_.releaseHost(data_); }
  HostCounts(const HostCounts&) = delete;
  HostCounts& operator=(const HostCounts&) = delete;
  int32_t* data() const { return data_; }

 private:
  Gpu& gpu_;
  int32_t* data_;
};

// One size.
class NcclRow {
 public:
  NcclRow(RunContext& context, const moeInfo_t& info, Nccl& nccl, int64_t tokens);
  ~NcclRow();
  NcclRow(const NcclRow&) = delete;
  NcclRow& operator=(const NcclRow&) = delete;

  RowMeasures run();

 private:
  void iterate(int64_t call, bool timed, bool check);
  void timeCombine(bool gated, bool timed);
  void dispatch(int64_t set);
  void combine();
  void exchange(const Array& from, const int32_t* sent, const Array& to, const int32_t* received, int64_t bytes);
  void wait();
  void poison() const;
  void runExpert() const;
  void checkDispatch(int64_t set, const std::vector<Routes>& routes);
  void checkCombine(int64_t set, const std::vector<Routes>& routes);
  cudaStream_t stream() const { return static_cast<cudaStream_t>(gpu_.stream()); }
  const Array& combineRows() const { return context_.data.type() == moeFloat8e4m3 ? expertRows_ : rows_; }

  RunContext& context_;
  const Options& options_;
  Gpu& gpu_;
  Nccl& nccl_;
  const moeInfo_t& info_;
  BaselineShape shape_;
  Shape oracleShape_;
  Inputs inputs_;
  Array planTokens_, slots_, counts_, sendRecords_, receiveRecords_;
  Array rows_, scaleRows_, ids_, weights_, sources_, expertRows_, partials_, combined_;
  HostCounts hostCounts_;
  const int32_t* sendCounts_;
  const int32_t* receiveCounts_;
  BaselinePlan plan_{};
  const void* lastIds_ = nullptr;
  int64_t sent_ = 0, received_ = 0;
  RowMeasures measures_;
};

NcclRow::NcclRow(RunContext& context, const moeInfo_t& info, Nccl& nccl, int64_t tokens)
    : context_(context),
      options_(context.options),
      gpu_(*context.gpu),
      nccl_(nccl),
      info_(info),
      shape_(shapeFor(context, info, tokens)),
      inputs_(context, info.rank, info.nranks, tokens),
      hostCounts_(gpu_, 2 * info.nranks),
      sendCounts_(hostCounts_.data()),
      receiveCounts_(hostCounts_.data() + info.nranks) {
  oracleShape_.ranks = info.nranks;
  oracleShape_.experts = options_.experts;
  oracleShape_.topk = options_.topk;
  int64_t most = tokens * std::min(shape_.topk, shape_.ranks);  // sent
  int64_t rows = tokens * shape_.ranks;                         // received
  int64_t combineBytes = shape_.hidden * static_cast<int64_t>(elementBytes(options_.combineDtype()));
  planTokens_ = Array(rows * 4, &gpu_);
  slots_ = Array(tokens * shape_.topk * 4, &gpu_);
  counts_ = Array(2 * shape_.ranks * int64_t{4}, &gpu_);
  sendRecords_ = Array(most * shape_.recordBytes, &gpu_);
  receiveRecords_ = Array(rows * shape_.recordBytes, &gpu_);
  rows_ = Array(rows * shape_.rowBytes, &gpu_);
  scaleRows_ = Array(rows * shape_.scaleBytes, &gpu_);
  ids_ = Array(rows * shape_.topk * (shape_.wideIds ? 8 : 4), &gpu_);
  weights_ = Array(rows * shape_.topk * 4, &gpu_);
  sources_ = Array(rows * 8, &gpu_);
  if (context_.data.type() == moeFloat8e4m3) expertRows_ = Array(rows * combineBytes, &gpu_);
  partials_ = Array(most * combineBytes, &gpu_);
  combined_ = Array(tokens * combineBytes, &gpu_);
  plan_ = {planTokens_.deviceAs<int32_t>(), slots_.deviceAs<int32_t>(), counts_.deviceAs<int32_t>()};
  measures_.inputSets = inputs_.sets();
}

NcclRow::~NcclRow() {
  if (std::uncaught_exceptions() == 0) return;
  // Freeing buffers waits for the GPU, and what runs there may wait for ranks that have failed.
  nccl_.abort();
  gpu_.openGate();
}

RowMeasures NcclRow::run() {
  gpu_.reserveMarks(4);
  int64_t call = 0;
  for (int i = 0; i < options_.warmups; ++i) iterate(call++, false, options_.check);
  for (int i = 0; i < options_.iterations; ++i) iterate(call++, true, options_.check && i + 1 == options_.iterations);
  if (context_.cold) context_.cold->requireTogether();
  return std::move(measures_);
}

// A dispatch waits on the host for its counts, so it cannot be enqueued behind a gate; a combine can.
void NcclRow::iterate(int64_t call, bool timed, bool check) {
  int64_t set = call % inputs_.sets();
  std::vector<Routes> routes;
  if (check) {
    for (int rank = 0; rank < shape_.ranks; ++rank) routes.push_back(context_.routing.route(set, rank, shape_.tokens));
    poison();
  }
  context_.team.startTogether();
  if (context_.cold) context_.cold->enqueue();
  gpu_.mark(0);
  Clock::time_point start = Clock::now();
  dispatch(set);
  double hostUs = microsecondsSince(start);
  gpu_.mark(1);
  wait();
  if (timed) {
    measures_.dispatchUs.push_back(gpu_.microsecondsBetween(0, 1));
    measures_.dispatchHostUs.push_back(hostUs);
    measures_.rows.push_back(static_cast<double>(received_));
    ++measures_.calls;
    measures_.copies += static_cast<uint64_t>(sent_);
    measures_.tokens += static_cast<uint64_t>(shape_.tokens);
    measures_.dispatchBytes += static_cast<uint64_t>(sent_ * shape_.recordBytes);
    measures_.dispatchAway += static_cast<uint64_t>((sent_ - sendCounts_[shape_.rank]) * shape_.recordBytes);
  }
  if (check) checkDispatch(set, routes);
  if (options_.op == Op::kDispatch) return;
  if (check) runExpert();
  // NCCL's first calls set up connections, for which the GPU should be free.
  timeCombine(call > 0, timed);
  if (check) checkCombine(set, routes);
}

void NcclRow::timeCombine(bool gated, bool timed) {
  context_.team.barrier();
  if (gated) gpu_.closeGate();
  if (context_.cold) context_.cold->enqueue();
  gpu_.mark(2);
  Clock::time_point start = Clock::now();
  combine();
  double hostUs = microsecondsSince(start);
  gpu_.mark(3);
  if (gated) {
    context_.team.startTogether();
    gpu_.openGate();
  }
  wait();
  if (!timed) return;
  int64_t bytes = shape_.hidden * static_cast<int64_t>(elementBytes(options_.combineDtype()));
  measures_.combineUs.push_back(gpu_.microsecondsBetween(2, 3));
  ++measures_.combines;
  measures_.combineHostUs.push_back(hostUs);
  measures_.combineBytes += static_cast<uint64_t>(received_ * bytes);
  measures_.combineAway += static_cast<uint64_t>((received_ - receiveCounts_[shape_.rank]) * bytes);
}

void NcclRow::dispatch(int64_t set) {
  lastIds_ = inputs_.ids(set);
  launchPlan(shape_, lastIds_, plan_, stream());
  auto* counts = counts_.deviceAs<int32_t>();
  nccl_.groupStart();
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    nccl_.send(counts + rank, 1, NcclType::kInt32, rank, stream());
    nccl_.receive(counts + shape_.ranks + rank, 1, NcclType::kInt32, rank, stream());
  }
  nccl_.groupEnd();
  gpu_.enqueueCopyOut(hostCounts_.data(), counts, counts_.bytes());
  wait();
  sent_ = std::accumulate(sendCounts_, sendCounts_ + shape_.ranks, int64_t{0});
  received_ = std::accumulate(receiveCounts_, receiveCounts_ + shape_.ranks, int64_t{0});
  if (received_ > shape_.tokens * shape_.ranks) fail("NCCL brought counts of ", received_, " rows");
  launchPack(shape_, plan_, inputs_.rows(set), inputs_.scales(set), lastIds_, inputs_.weights(set),
             sendRecords_.device(), sent_, stream());
  exchange(sendRecords_, sendCounts_, receiveRecords_, receiveCounts_, shape_.recordBytes);
  BaselineRows to{rows_.device(), scaleRows_.device(), ids_.device(), weights_.deviceAs<float>(),
                  sources_.deviceAs<int32_t>()};
  launchUnpack(shape_, receiveRecords_.device(), counts + shape_.ranks, received_, to, stream());
}

// Received rows lie by source, so they can be sent back as they are.
void NcclRow::combine() {
  int64_t bytes = shape_.hidden * static_cast<int64_t>(elementBytes(options_.combineDtype()));
  exchange(combineRows(), receiveCounts_, partials_, sendCounts_, bytes);
  launchReduce(shape_, plan_, lastIds_, partials_.device(), combined_.device(), stream());
}

// Rows of `bytes`, ordered by rank on both sides.
void NcclRow::exchange(const Array& from, const int32_t* sent, const Array& to, const int32_t* received,
                       int64_t bytes) {
  int64_t fromRow = 0, toRow = 0;
  nccl_.groupStart();
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    auto size = [&](int32_t rows) { return static_cast<size_t>(rows * bytes); };
    if (sent[rank] > 0) {
      nccl_.send(from.device() + fromRow * bytes, size(sent[rank]), NcclType::kInt8, rank, stream());
    }
    if (received[rank] > 0) {
      nccl_.receive(to.device() + toRow * bytes, size(received[rank]), NcclType::kInt8, rank, stream());
    }
    fromRow += sent[rank];
    toRow += received[rank];
  }
  nccl_.groupEnd();
}

// NCCL waits for peers without end.
void NcclRow::wait() {
  auto deadline = Clock::now() + std::chrono::milliseconds(options_.timeoutMs);
  while (!gpu_.idle()) {
    if (Clock::now() < deadline) continue;
    nccl_.abort();
    fail("NCCL's part took more than ", options_.timeoutMs, " ms (--timeout-ms); another rank may have failed");
  }
}

void NcclRow::poison() const {
  for (const Array* array : {&rows_, &scaleRows_, &ids_, &weights_, &sources_, &expertRows_, &combined_}) {
    array->poison(0xff, 0, array->bytes());
  }
}

void NcclRow::runExpert() const {
  ExpertRows job;
  job.rows = received_;
  job.elements = shape_.hidden;
  job.type = context_.data.type();
  job.combineType = options_.combineDtype();
  job.input = rows_.device();
  job.inputStride = shape_.rowBytes;
  job.scales = scaleRows_.device();
  job.scaleStride = shape_.scaleBytes;
  job.output = combineRows().device();
  job.outputStride = shape_.hidden * static_cast<int64_t>(elementBytes(options_.combineDtype()));
  job.ids = ids_.device();
  job.weights = weights_.deviceAs<float>();
  job.topk = shape_.topk;
  job.wideIds = shape_.wideIds;
  gpu_.runExpert(job);
}

void NcclRow::checkDispatch(int64_t set, const std::vector<Routes>& routes) {
  ExpectedReceive expected = expectReceive(oracleShape_, shape_.rank, routes);
  for (const Array* array : {&rows_, &scaleRows_, &ids_, &weights_, &sources_}) {
    array->fetch(0, array->bytes() / std::max<int64_t>(1, shape_.tokens * shape_.ranks) * received_);
  }
  std::vector<int64_t> offsets(static_cast<size_t>(shape_.ranks), 0);
  for (size_t rank = 1; rank < offsets.size(); ++rank) offsets[rank] = offsets[rank - 1] + receiveCounts_[rank - 1];
  moeSizes_t sizes{received_, received_, 0, received_};
  Received got;
  got.tokens = {rows_.host(), shape_.rowBytes, 0, moeRoleTokens, 0};
  got.scales = {scaleRows_.host(), shape_.scaleBytes, 0, moeRoleScales, 0};
  got.capacity = received_;
  got.firstExpert = info_.firstExpert;
  got.idType = options_.ids;
  got.ids = ids_.host();
  got.weights = weights_.hostAs<float>();
  got.sources = sources_.hostAs<int32_t>();
  got.rankCounts = receiveCounts_;
  got.rankOffsets = offsets.data();
  got.sizes = &sizes;
  measures_.verdict.add(checkReceived(oracleShape_, context_.data, set, routes, expected, got));
  measures_.checkedRows += expected.sizes.rows;
}

void NcclRow::checkCombine(int64_t set, const std::vector<Routes>& routes) {
  combined_.fetch();
  CombineOracle oracle(oracleShape_, context_.data, options_.combineDtype());
  measures_.verdict.add(checkCombined(oracle, oracleShape_, context_.data, options_.combineDtype(), set, shape_.rank,
                                      routes[static_cast<size_t>(shape_.rank)], {}, combined_.host()));
  measures_.checkedRows += shape_.tokens;
}

class NcclBaseline : public Baseline {
 public:
  NcclBaseline(RunContext& context, const moeInfo_t& info)
      : context_(context), info_(info), nccl_(context.team, context.gpu->location(), "--baseline nccl") {}

  std::string describe() const override {
    int version = nccl_.version();
    return cat("NCCL ", version / 10000, ".", version / 100 % 100, ".", version % 100,
               ", grouped sends and receives; one record of ", recordBytes(),
               " B per (token, rank); dispatch waits on the host for its counts");
  }
  int64_t recordBytes() const override { return shapeFor(context_, info_, 0).recordBytes; }
  RowMeasures run(int64_t tokens) override { return NcclRow(context_, info_, nccl_, tokens).run(); }

 private:
  RunContext& context_;
  moeInfo_t info_;
  Nccl nccl_;
};

}  // namespace

std::unique_ptr<Baseline> makeNcclBaseline(RunContext& context, const moeInfo_t& info) {
  if (!context.gpu) fail("--baseline nccl: ranks run on the host; NCCL needs GPUs");
  return std::make_unique<NcclBaseline>(context, info);
}

}  // namespace moe::perf

#else

namespace moe::perf {

std::unique_ptr<Baseline> makeNcclBaseline(RunContext&, const moeInfo_t&) {
  fail("--baseline nccl: this build of moe_perf has no CUDA");
}

}  // namespace moe::perf
#endif

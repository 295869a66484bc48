// SPDX-License-Identifier: Apache-2.0
#include "runner.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "baseline.h"
#include "cold_start.h"
#include "gpu.h"
#include "gpu_limit.h"
#include "machine.h"
#include "nccl.h"
#include "row_run.h"
#include "text.h"

namespace moe::perf {
namespace {

constexpr int64_t kModelTokens = 1024;
constexpr char kHostLimit[] = "memcpy of as many bytes per rank, all ranks at once, out of the cache, median";

// Owns a communicator. When an error unwinds, it is aborted first, so that nobody waits for this rank.
class Comm {
 public:
  explicit Comm(moeComm_t comm) : comm_(comm) {}
  Comm(Comm&& other) noexcept : comm_(std::exchange(other.comm_, nullptr)) {}
  Comm& operator=(Comm&& other) noexcept {
    std::swap(comm_, other.comm_);
    return *this;
  }
  ~Comm() {
    if (comm_ && std::uncaught_exceptions() > 0) moeCommAbort(comm_);
    moeCommDestroy(comm_);
  }
  moeComm_t get() const { return comm_; }

 private:
  moeComm_t comm_;
};

moeConfig_t configFor(const Options& options, int64_t maxTokens) {
  moeConfig_t config = MOE_CONFIG_INIT;
  config.maxTokensPerRank = std::max<int64_t>(1, maxTokens);
  config.hidden = options.hidden;
  config.numExperts = options.experts;
  config.maxTopk = options.topk;
  config.dtype = options.dtype;
  config.combineDtype = options.combineDtype();
  config.layout = options.layout;
  config.expertAlign = options.align;
  if (options.layout == moeLayoutExpertPadded) config.capacity = options.budget;
  config.quantize = options.quantize;
  if (options.dtype == moeFloat8e4m3) {
    config.numSideRows = 1;
    config.sideRowBytes[0] = TokenData(0, options.dtype, options.quantize, options.hidden).inputScaleBytes();
  }
  config.path = options.path;
  config.slots = options.slots;
  config.format = options.format;
  config.backend = options.backend;
  config.numSms = options.sms;
  config.timeoutMs = options.timeoutMs;
  return config;
}

std::string versionText(int version) { return cat(version / 10000, ".", version / 100 % 100, ".", version % 100); }

double percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  auto at = static_cast<size_t>(std::max(1.0, std::ceil(share * static_cast<double>(values.size())))) - 1;
  return values[at];
}

std::vector<double> slowestOf(Team& team, const std::vector<double>& mine) {
  std::vector<double> slowest(mine.size(), 0.0);
  for (const auto& rank : team.gather(mine)) {
    for (size_t i = 0; i < rank.size(); ++i) slowest[i] = std::max(slowest[i], rank[i]);
  }
  return slowest;
}

// The GPU for a rank, if there is one to choose.
std::unique_ptr<Gpu> chooseGpu(const Options& options, int localRank) {
  int count = options.backend == moeBackendHost ? 0 : gpuCount();
  return count > 0 ? makeGpu(localRank % count) : nullptr;
}

class Runner {
 public:
  Runner(World& world, const Options& options, Routing& routing)
      : world_(world),
        team_(world.team()),
        options_(options),
        routing_(routing),
        data_(options.seed, options.dtype, options.quantize, options.hidden),
        gpu_(chooseGpu(options, world.localRank())),
        context_{options, routing, data_, team_, gpu_.get(), options.corrupt} {}

  bool run();

 private:
  void join(int64_t maxTokens);
  moeComm_t joinNccl(const moeConfig_t& config);
  void emitHeader();
  Json modelOf() const;
  Json outputOf() const;
  std::string timesOf() const;
  std::string modeTimesOf() const;
  void prepareFlush();
  void runRow(int64_t tokens, int64_t maxTokens);
  void runBaseline(int64_t tokens);
  void noteWrongRows(const char* whose, int64_t tokens, const RowMeasures& mine);
  Json gatherTimes(const std::vector<double>& mine);
  Json gatherRow(int64_t tokens, const RowMeasures& mine, int64_t recordBytes);
  void addRates(const RowMeasures& mine, Json* row);
  void gatherFaults(const RowMeasures& mine, Json* row);

  World& world_;
  Team& team_;
  const Options& options_;
  Routing& routing_;
  TokenData data_;
  std::unique_ptr<Gpu> gpu_;  // outlives the communicator
  RunContext context_;
  GpuLimit gpuLimit_;
  std::optional<CopyLimit> copyLimit_;  // on the host
  std::unique_ptr<ColdStart> cold_;     // --flush
  double eventUs_ = 0;                  // --flush: an event's own part in a time
  std::unique_ptr<Baseline> baseline_;
  std::unique_ptr<Nccl> nccl_;  // of --init
  Comm comm_{nullptr};
  moeInfo_t info_ = MOE_INFO_INIT;
  bool right_ = true;
};

void Runner::join(int64_t maxTokens) {
  bool first = comm_.get() == nullptr;
  comm_ = Comm(nullptr);  // the old one goes before the new one takes memory
  moeConfig_t config = configFor(options_, maxTokens);
  if (gpu_) config.device = gpu_->device();
  comm_ = Comm(options_.init == InitKind::kNccl ? joinNccl(config) : world_.join(config));
  info_ = MOE_INFO_INIT;
  require(moeGetInfo(comm_.get(), &info_), "moeGetInfo");
  bool onGpu = info_.backend == moeBackendCuda;
  if (onGpu && !gpu_) {
    fail("the library chose the ", nameOf(moeBackendCuda),
         " backend, but this build of moe_perf has no CUDA; pass --backend host");
  }
  context_.gpu = onGpu ? gpu_.get() : nullptr;
  if (options_.graph && !onGpu) fail("--graph: ranks run on the host; graphs need GPUs");
  if (options_.flush && !onGpu) fail("--flush: ranks run on the host; only a GPU's cache is flushed");
  if (!first) return;
  if (onGpu) {
    gpuLimit_ = measureGpuLimit(team_, *gpu_);
  } else {
    copyLimit_.emplace(team_);
  }
  if (options_.stallRank >= info_.nranks)
    usage("--stall: there is no rank ", options_.stallRank, " among ", info_.nranks);
  routing_.setShape(info_.nranks, info_.nodes);
  if (options_.flush) prepareFlush();
  if (options_.baseline == BaselineKind::kNccl) baseline_ = makeNcclBaseline(context_, info_);
  emitHeader();
}

void Runner::prepareFlush() {
  cold_ = std::make_unique<ColdStart>(team_, *gpu_);
  context_.cold = cold_.get();
  eventUs_ = percentile(slowestOf(team_, cold_->emptyPairs()), 0.5);
}

// One NCCL communicator for all rows: that it serves several inits is part of what is shown.
moeComm_t Runner::joinNccl(const moeConfig_t& config) {
  if (!gpu_) fail("--init nccl: ranks run on the host; NCCL needs GPUs");
  if (!nccl_) nccl_ = std::make_unique<Nccl>(team_, gpu_->location(), "--init nccl");
  moeComm_t comm = nullptr;
  require(moeCommInitNccl(&comm, static_cast<ncclComm*>(nccl_->comm()), &config), "moeCommInitNccl");
  return comm;
}

void Runner::emitHeader() {
  auto ranks = team_.gather({static_cast<double>(getpid()), context_.gpu ? 1.0 * context_.gpu->device() : -1.0});
  if (team_.rank() != 0) return;
  int library = 0;
  require(moeGetVersion(&library), "moeGetVersion");
  Json header;
  header["kind"] = "header";
  header["tool_version"] = versionText(MOE_VERSION);
  header["library_version"] = versionText(library);
  header["machine"] = {{"cpu", cpuModel()}, {"cores", usableCores()}, {"memory_bytes", totalMemory()}};
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    Json line{{"rank", rank}, {"pid", static_cast<int64_t>(ranks[rank][0])}};
    // One node is all that this version knows.
    line["node"] = info_.nodes == 1 ? Json(0) : Json("?");
    line["device"] = nameOf(static_cast<moeBackend_t>(info_.backend));
    if (context_.gpu) line["device"] = cat(nameOf(moeBackendCuda), ":", ranks[rank][1]);
    header["ranks"].push_back(line);
  }
  if (context_.gpu) header["machine"]["gpu"] = context_.gpu->describe();
  header["times"] = timesOf();
  if (options_.graph) header["timing"] = "graph replays";
  if (options_.flush) {
    header["timing"] = "cold calls";
    header["event_us"] = eventUs_;
  }
  header["limit"] = context_.gpu ? gpuLimit_.text : kHostLimit;
  header["wire"] =
      gpuLimit_.between ? "bytes that the library writes to other ranks" : "bytes that the library writes per rank";
  header["nodes"] = info_.nodes;
  header["transport"] = info_.transport;
  header["path"] = nameOf(static_cast<moePath_t>(info_.path));
  header["path_origin"] = options_.path == moePathAuto ? "chosen by the library" : "as asked";
  if (info_.path == moePathLowLatency) {
    header["slots"] = nameOf(static_cast<moeSlots_t>(info_.slots));
    header["format"] = nameOf(static_cast<moeFormat_t>(info_.format));
  }
  header["routing"] = routing_.describe(options_.last);
  header["output"] = outputOf();
  header["model"] = modelOf();
  if (baseline_) header["baseline"] = baseline_->describe();
  header["input_sets"] = "rotated, so that calls find their tokens out of the cache";
  world_.emit(header);
}

Json Runner::outputOf() const {
  if (options_.views()) {
    bool inPlace = data_.type() != moeFloat8e4m3;
    return cat("views of the window, no copy out; combine ", inPlace ? "in place" : "from a buffer");
  }
  if (options_.exact) return "copied out into outputs of the exact size, after a host wait for it";
  if (options_.budget == 0) return "copied out into outputs for the worst case";
  bool padded = options_.layout == moeLayoutExpertPadded;
  return cat("copied out into outputs of ", options_.budget, padded ? " rows per expert" : " rows");
}

std::string Runner::modeTimesOf() const {
  if (options_.graph) {
    return cat(
        "graph replays: us per operation of the slowest rank, ", options_.replays(), " replays of a graph of ",
        kReplayCalls, " operations of a kind, after ", options_.warmups,
        " warm-up calls; between CUDA events around each replay, which follows a gate that all GPUs pass together ",
        "and an untimed call", options_.op == Op::kDispatch ? "" : "; combines alone read the rows of one dispatch",
        baseline_ ? "; the baseline's are single calls" : "");
  }
  return cat("cold calls: us of the slowest rank, ", options_.iterations, " calls of a kind after ", options_.warmups,
             " more; between CUDA events around each call, which starts on all GPUs at the same time, ",
             cold_->flushBytes() >> 20, " MiB written over the L2 cache before it; two events without a call are ",
             std::round(eventUs_ * 10) / 10, " us apart, which is part of every figure");
}

std::string Runner::timesOf() const {
  if (options_.graph || options_.flush) return modeTimesOf();
  std::string calls =
      cat("us of the slowest rank, ", options_.iterations, " calls after ", options_.warmups, " more; ");
  if (!context_.gpu) return calls + "every call starts with all ranks at a barrier";
  if (options_.exact || options_.stallRank >= 0) {
    return calls + "between CUDA events around each call; every call starts with all ranks at a barrier";
  }
  return cat(calls, "between CUDA events around each call, up to ", kBatchCalls - 1,
             " enqueued back to back behind a gate that all GPUs pass together");
}

// What the routing makes necessary, before anything is measured.
Json Runner::modelOf() const {
  Shape shape;
  shape.ranks = info_.nranks;
  shape.experts = options_.experts;
  shape.topk = options_.topk;
  int64_t tokens = std::min(kModelTokens, options_.last);
  double copies = expectedCopies(shape, routing_, tokens);
  Json model;
  model["tokens_sampled"] = tokens * info_.nranks;
  model["copies_per_token"] = copies;
  model["payload_bytes"] = data_.rowBytes() + data_.scaleBytes();
  model["record_bytes"] = info_.recordBytes;
  model["combine_bytes"] = info_.combineBytes;
  model["dispatch_bytes_per_token"] = copies * static_cast<double>(info_.recordBytes);
  model["combine_bytes_per_token"] = copies * static_cast<double>(info_.combineBytes);
  return model;
}

bool Runner::run() {
  for (int64_t tokens : sizeSequence(options_)) {
    int64_t maxTokens = std::max<int64_t>(1, options_.maxTokens > 0 ? options_.maxTokens : tokens);
    if (options_.maxTokens == 0 || comm_.get() == nullptr) join(maxTokens);
    if (team_.rank() == 0) world_.emit({{"kind", "progress"}, {"text", cat(tokens, " tokens per rank ...")}});
    runRow(tokens, maxTokens);
    if (baseline_) runBaseline(tokens);
    team_.barrier();
  }
  if (cold_) {
    cold_->leave();
    team_.barrier();
  }
  if (context_.corruptPending) {
    // All ranks know; one tells.
    if (team_.rank() != 0) throw Follower("--corrupt found no row");
    fail("--corrupt found no row to corrupt: no rank received a row in a checked iteration. Use more tokens, or -w 1");
  }
  return right_;
}

void Runner::runRow(int64_t tokens, int64_t maxTokens) {
  RowMeasures mine;
  {
    RowRun row(context_, comm_.get(), info_, tokens, maxTokens);
    mine = row.run();
  }
  noteWrongRows("", tokens, mine);
  if (mine.overflowed > 0) {
    bool padded = options_.layout == moeLayoutExpertPadded;
    std::string text =
        cat("the outputs of ", options_.budget, padded ? " rows per expert" : " rows", " overflowed in ",
            mine.overflowed, " calls at ", tokens, " tokens per rank, and rows were lost; ", mine.requiredRows,
            " would have held everything: pass --budget ", mine.requiredRows, padded ? "" : " or --exact");
    world_.emit({{"kind", "note"}, {"text", text}});
  }
  Json row = gatherRow(tokens, mine, info_.recordBytes);
  row["path"] = nameOf(static_cast<moePath_t>(info_.path));
  if (info_.path == moePathLowLatency) row["format"] = nameOf(static_cast<moeFormat_t>(info_.format));
  row["window_bytes"] = info_.windowBytes;
  row["workspace_bytes"] = info_.workspaceBytes;
  if (team_.rank() == 0) world_.emit(row);
}

void Runner::runBaseline(int64_t tokens) {
  RowMeasures mine = baseline_->run(tokens);
  noteWrongRows("of the baseline ", tokens, mine);
  Json row = gatherRow(tokens, mine, baseline_->recordBytes());
  row["path"] = nameOf(options_.baseline);
  row["baseline"] = true;
  if (team_.rank() == 0) world_.emit(row);
}

void Runner::noteWrongRows(const char* whose, int64_t tokens, const RowMeasures& mine) {
  int64_t wrong = mine.verdict.wrongRows();
  if (wrong == 0) return;
  world_.emit({{"kind", "note"},
               {"text", cat(wrong, wrong == 1 ? " wrong row " : " wrong rows ", whose, "at ", tokens,
                            " tokens per rank; the first: ", mine.verdict.first())}});
}

// Collective, as is what follows.
Json Runner::gatherTimes(const std::vector<double>& mine) {
  std::vector<double> slowest = slowestOf(team_, mine);
  return {{"p50_us", percentile(slowest, 0.5)}, {"p99_us", percentile(slowest, 0.99)}, {"us", slowest}};
}

// The row as all ranks know it afterwards.
Json Runner::gatherRow(int64_t tokens, const RowMeasures& mine, int64_t recordBytes) {
  Json row;
  row["kind"] = "row";
  row["tokens"] = tokens;
  auto [least, most] = std::minmax_element(mine.rows.begin(), mine.rows.end());
  double sum = std::accumulate(mine.rows.begin(), mine.rows.end(), 0.0);
  auto ranks = team_.gather({*least, *most, sum / static_cast<double>(mine.rows.size())});
  double low = ranks[0][0], high = 0, busiest = 0;
  for (const auto& rank : ranks) {
    low = std::min(low, rank[0]);
    high = std::max(high, rank[1]);
    busiest = std::max(busiest, rank[2]);
  }
  row["rows_min"] = static_cast<int64_t>(low);
  row["rows_max"] = static_cast<int64_t>(high);
  row["rows_busiest_mean"] = busiest;
  for (auto [name, times, host] : {std::tuple{"dispatch", &mine.dispatchUs, &mine.dispatchHostUs},
                                   std::tuple{"combine", &mine.combineUs, &mine.combineHostUs}}) {
    bool timed = options_.op == Op::kRoundtrip || name == std::string(nameOf(options_.op));
    if (!timed) continue;
    row[name] = gatherTimes(*times);
    if (!host->empty()) row[name]["host_p50_us"] = slowestOf(team_, {percentile(*host, 0.5)})[0];
  }
  if (!mine.roundtripUs.empty()) row["roundtrip"] = gatherTimes(mine.roundtripUs);
  addRates(mine, &row);
  gatherFaults(mine, &row);
  row["input_sets"] = mine.inputSets;
  row["record_bytes"] = recordBytes;
  return row;
}

// Bandwidths of the operation in the table's columns: dispatch, or combine when only that is timed.
void Runner::addRates(const RowMeasures& mine, Json* row) {
  auto sum = [&](double value) {
    double total = 0;
    for (const auto& rank : team_.gather({value})) total += rank[0];
    return total;
  };
  double calls[] = {static_cast<double>(mine.calls) * info_.nranks,
                    static_cast<double>(std::max<int64_t>(1, mine.combines)) * info_.nranks};
  double copies = sum(static_cast<double>(mine.copies));
  double tokens = sum(static_cast<double>(mine.tokens));
  (*row)["copies_per_token"] = tokens > 0 ? copies / tokens : 0.0;
  // What stays on a GPU does not use what connects them.
  bool away = gpuLimit_.between;
  double bytes[] = {sum(static_cast<double>(away ? mine.dispatchAway : mine.dispatchBytes)) / calls[0],
                    sum(static_cast<double>(away ? mine.combineAway : mine.combineBytes)) / calls[1]};
  double payload[] = {
      static_cast<double>(data_.rowBytes() + data_.scaleBytes()),
      static_cast<double>(options_.hidden) * static_cast<double>(elementBytes(options_.combineDtype()))};
  const char* names[] = {"dispatch", "combine"};
  for (int i = 0; i < 2; ++i) {
    if (!row->contains(names[i])) continue;
    Json& part = (*row)[names[i]];
    double us = part["p50_us"];
    double limit = copyLimit_ ? copyLimit_->measure(std::llround(bytes[i])) : gpuLimit_.gbs;
    double wire = us > 0 ? bytes[i] / us / 1e3 : 0;
    part["wire_bytes_per_rank"] = bytes[i];
    part["algbw_gbs"] = us > 0 ? (*row)["rows_busiest_mean"].get<double>() * payload[i] / us / 1e3 : 0;
    part["wire_gbs"] = wire;
    part["limit_gbs"] = limit;
    part["limit_share"] = limit > 0 ? wire / limit : 0;
  }
}

void Runner::gatherFaults(const RowMeasures& mine, Json* row) {
  int64_t wrong = 0, checked = 0, overflowed = 0;
  Json perRank = Json::array();
  for (const auto& rank : team_.gather({static_cast<double>(mine.verdict.wrongRows()),
                                        static_cast<double>(mine.checkedRows), static_cast<double>(mine.overflowed)})) {
    wrong += static_cast<int64_t>(rank[0]);
    checked += static_cast<int64_t>(rank[1]);
    overflowed += static_cast<int64_t>(rank[2]);
    perRank.push_back(static_cast<int64_t>(rank[0]));
  }
  (*row)["checked_rows"] = checked;
  (*row)["wrong_rows"] = wrong;
  (*row)["wrong_rows_by_rank"] = perRank;
  (*row)["overflowed_calls"] = overflowed;
  right_ = right_ && wrong == 0 && overflowed == 0;
}

}  // namespace

bool runRank(World& world, const Options& options, Routing& routing) { return Runner(world, options, routing).run(); }

}  // namespace moe::perf

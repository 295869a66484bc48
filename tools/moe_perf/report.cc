// SPDX-License-Identifier: Apache-2.0
#include "report.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "text.h"

namespace moe::perf {
namespace {

Json optionsJson(const Options& o) {
  Json json;
  json["b"] = o.first;
  json["e"] = o.last;
  json["f"] = o.factor;
  json["n"] = o.iterations;
  json["w"] = o.warmups;
  json["c"] = o.check ? 1 : 0;
  json["p"] = o.processes;
  json["t"] = o.threads;
  json["per_process"] = o.perProcess;
  json["hidden"] = o.hidden;
  json["experts"] = o.experts;
  json["topk"] = o.topk;
  json["dtype"] = nameOf(o.dtype);
  json["combine_dtype"] = nameOf(o.combineDtype());
  json["quant"] = nameOf(o.quantize);
  json["layout"] = nameOf(o.layout);
  json["align"] = o.align;
  json["exact"] = o.exact;
  json["budget"] = o.budget;
  json["views"] = o.views();
  json["ids"] = nameOf(o.ids);
  json["backend"] = nameOf(o.backend);
  json["path"] = nameOf(o.path);
  json["op"] = nameOf(o.op);
  json["routing"] = nameOf(o.routing);
  json["sms"] = o.sms;
  json["max_tokens"] = o.maxTokens;
  json["timeout_ms"] = o.timeoutMs;
  json["seed"] = o.seed;
  if (o.stallRank >= 0) json["stall"] = {{"rank", o.stallRank}, {"ms", o.stallMs}};
  json["corrupt"] = o.corrupt;
  json["halves"] = o.halves;
  json["graph"] = o.graph;
  json["flush"] = o.flush;
  json["baseline"] = nameOf(o.baseline);
  json["init"] = nameOf(o.init);
  json["deterministic"] = o.deterministic;
  return json;
}

const char* launchName(const Options& o) {
  if (o.processes > 0) return o.perProcess > 1 ? "threads of several processes" : "processes";
  return o.threads > 0 ? "threads of one process" : "a launcher's ranks";
}

// The columns that only some ways of timing have.
std::string roundtripColumns(const Options& o, const std::string& p50, const std::string& p99) {
  char text[64];
  std::snprintf(text, sizeof text, " %11s %11s", p50.c_str(), p99.c_str());
  return o.roundtripTimed() ? text : "";
}

}  // namespace

Report::Report(const Options& options)
    : options_(options), out_(options.json == "-" ? stderr : stdout), progress_(isatty(STDERR_FILENO) == 1) {
  document_["tool"] = "moe_perf";
  document_["options"] = optionsJson(options);
  document_["rows"] = Json::array();
  document_["baseline_rows"] = Json::array();
  document_["errors"] = Json::array();
  document_["notes"] = Json::array();
}

void Report::take(int rank, int pid, const Json& message) {
  std::string kind = message.value("kind", "");
  if (kind == "progress" && progress_) {
    clearProgress();
    std::fprintf(stderr, "moe_perf: %s", message.value("text", "").c_str());
    std::fflush(stderr);
    progressShown_ = true;
    return;
  }
  if (kind == "header") printHeader(message);
  if (kind == "row") printRow(message);
  if (kind == "note") {
    clearProgress();
    std::string text = cat("rank ", rank, " (pid ", pid, "): ", message.value("text", ""));
    std::fprintf(stderr, "moe_perf: %s\n", text.c_str());
    document_["notes"].push_back(text);
  }
  if (kind == "error") rankError(rank, pid, message.value("text", ""));
}

void Report::error(const std::string& text) {
  clearProgress();
  std::fprintf(stderr, "moe_perf: %s\n", text.c_str());
  document_["errors"].push_back(text);
}

void Report::rankError(int rank, int pid, const std::string& text) {
  error(cat("rank ", rank, " (pid ", pid, ") ", text));
}

void Report::clearProgress() {
  if (progressShown_) std::fprintf(stderr, "\r\033[K");
  progressShown_ = false;
}

void Report::printHeader(const Json& header) {
  clearProgress();
  for (const auto& [key, value] : header.items()) {
    if (key != "kind") document_[key] = value;
  }
  const Options& o = options_;
  const Json& machine = header["machine"];
  std::string cpu = machine["cpu"];
  std::fprintf(out_, "# moe_perf %s, moecl %s\n", header["tool_version"].get<std::string>().c_str(),
               header["library_version"].get<std::string>().c_str());
  std::fprintf(out_, "# machine: %s, %d cores, %.1f GiB\n", cpu.c_str(), machine["cores"].get<int>(),
               machine["memory_bytes"].get<double>() / (1 << 30));
  if (machine.contains("gpu")) std::fprintf(out_, "# gpu: %s\n", machine["gpu"].get<std::string>().c_str());
  std::fprintf(out_, "# %zu ranks on %d node%s as %s%s\n", header["ranks"].size(), header["nodes"].get<int>(),
               header["nodes"] == 1 ? "" : "s", launchName(o),
               o.init == InitKind::kNccl ? ", which met through NCCL" : "");
  for (const Json& rank : header["ranks"]) {
    std::fprintf(out_, "# rank %d pid %d node %s device %s\n", rank["rank"].get<int>(), rank["pid"].get<int>(),
                 rank["node"].is_string() ? "?" : rank["node"].dump().c_str(),
                 rank["device"].get<std::string>().c_str());
  }
  std::fprintf(out_, "# reach: mapped inside a node; transport %s\n", header["transport"].get<std::string>().c_str());
  std::fprintf(out_, "# path: %s, %s\n", header["path"].get<std::string>().c_str(),
               header["path_origin"].get<std::string>().c_str());
  if (header.contains("slots")) {
    std::fprintf(out_, "# slots: of each %s; format: %s\n", header["slots"].get<std::string>().c_str(),
                 header["format"].get<std::string>().c_str());
  }
  std::fprintf(out_,
               "# layer: hidden %lld, experts %lld, top-%d, %s dispatch%s, %s combine, layout %s, align %lld, ids %s\n",
               static_cast<long long>(o.hidden), static_cast<long long>(o.experts), o.topk, nameOf(o.dtype),
               o.quantize == moeQuantizeNone ? "" : cat(" quantized to ", nameOf(o.quantize)).c_str(),
               nameOf(o.combineDtype()), nameOf(o.layout), static_cast<long long>(o.align), nameOf(o.ids));
  std::fprintf(out_, "# output: %s; rows come in a fixed order\n", header["output"].get<std::string>().c_str());
  std::fprintf(out_, "# routing: %s, seed %llu\n", header["routing"].get<std::string>().c_str(),
               static_cast<unsigned long long>(o.seed));
  if (o.stallRank >= 0) std::fprintf(out_, "# stall: rank %d sleeps %d ms before each call\n", o.stallRank, o.stallMs);
  const Json& model = header["model"];
  std::fprintf(
      out_,
      "# byte model: %.3f copies per token expected; dispatch %lld B of payload in %lld B records, %.0f B per "
      "token; combine %lld B rows, %.0f B per token\n",
      model["copies_per_token"].get<double>(), static_cast<long long>(model["payload_bytes"].get<int64_t>()),
      static_cast<long long>(model["record_bytes"].get<int64_t>()), model["dispatch_bytes_per_token"].get<double>(),
      static_cast<long long>(model["combine_bytes"].get<int64_t>()), model["combine_bytes_per_token"].get<double>());
  if (header.contains("baseline")) {
    std::fprintf(out_, "# baseline: %s\n", header["baseline"].get<std::string>().c_str());
  }
  printColumns(header);
}

void Report::printColumns(const Json& header) {
  std::string times = header["times"], wire = header["wire"], limit = header["limit"];
  bool baseline = options_.baseline != BaselineKind::kNone;
  const char* subject = options_.op == Op::kCombine ? "combine" : "dispatch";
  std::fprintf(out_,
               "# times: %s\n"
               "# algbw: payload bytes of the rank that gets most / %s p50; wire: %s / %s p50\n"
               "# limit: %s; share: wire / limit\n",
               times.c_str(), subject, wire.c_str(), subject, limit.c_str());
  std::fprintf(out_, "#%9s %9s %9s %11s %11s %11s %11s%s %9s %9s %9s %7s %8s %7s%s\n", "tokens", "rows", "rows",
               "dispatch", "dispatch", "combine", "combine",
               roundtripColumns(options_, "round trip", "round trip").c_str(), "algbw", "wire", "limit", "share",
               "copies", "wrong", baseline ? "    path" : "");
  std::fprintf(out_, "#%9s %9s %9s %11s %11s %11s %11s%s %9s %9s %9s %7s %8s %7s\n", "per rank", "min", "max", "p50 us",
               "p99 us", "p50 us", "p99 us", roundtripColumns(options_, "p50 us", "p99 us").c_str(), "GB/s", "GB/s",
               "GB/s", "%", "per tok", "rows");
  std::fflush(out_);
}

void Report::printRow(const Json& row) {
  clearProgress();
  Json stored = row;
  stored.erase("kind");
  document_[row.contains("baseline") ? "baseline_rows" : "rows"].push_back(stored);
  wrong_ += row["wrong_rows"].get<int64_t>();
  overflowed_ += row["overflowed_calls"].get<int64_t>();
  auto number = [](const Json& from, const char* key, int digits) {
    char text[64];
    std::snprintf(text, sizeof text, "%.*f", digits, from.value(key, 0.0));
    return std::string(text);
  };
  auto time = [&](const char* op, const char* key) { return row.contains(op) ? number(row[op], key, 1) : "-"; };
  const Json& rates = row.contains("dispatch") ? row["dispatch"] : row["combine"];
  bool moved = rates["limit_gbs"].get<double>() > 0;
  std::string share = "-";
  if (moved) share = number(Json{{"share", 100 * rates["limit_share"].get<double>()}}, "share", 1);
  std::string wrong = options_.check ? std::to_string(row["wrong_rows"].get<int64_t>()) : "-";
  // Only beside a baseline does each row say whose it is.
  std::string path = options_.baseline == BaselineKind::kNone ? "" : cat("  ", row.value("path", "?"));
  std::string trip = roundtripColumns(options_, time("roundtrip", "p50_us"), time("roundtrip", "p99_us"));
  std::fprintf(out_, " %9lld %9lld %9lld %11s %11s %11s %11s%s %9s %9s %9s %7s %8s %7s%s\n",
               static_cast<long long>(row["tokens"].get<int64_t>()),
               static_cast<long long>(row["rows_min"].get<int64_t>()),
               static_cast<long long>(row["rows_max"].get<int64_t>()), time("dispatch", "p50_us").c_str(),
               time("dispatch", "p99_us").c_str(), time("combine", "p50_us").c_str(), time("combine", "p99_us").c_str(),
               trip.c_str(), number(rates, "algbw_gbs", 3).c_str(), number(rates, "wire_gbs", 3).c_str(),
               moved ? number(rates, "limit_gbs", 3).c_str() : "-", share.c_str(),
               number(row, "copies_per_token", 3).c_str(), wrong.c_str(), path.c_str());
  printHostTimes(row);
  std::fflush(out_);
}

// On GPUs a call returns before it is complete.
void Report::printHostTimes(const Json& row) {
  std::string text;
  for (const char* op : {"dispatch", "combine"}) {
    if (!row.contains(op) || !row[op].contains("host_p50_us")) continue;
    char time[64];
    std::snprintf(time, sizeof time, "%s %.1f us", op, row[op]["host_p50_us"].get<double>());
    text += cat(text.empty() ? "" : ", ", time);
  }
  if (!text.empty()) std::fprintf(out_, "#   inside the call on the host, p50: %s\n", text.c_str());
}

int Report::finish(bool complete) {
  clearProgress();
  size_t expected = sizeSequence(options_).size();
  size_t rows = document_["rows"].size();
  int64_t checked = 0;
  for (const char* kind : {"rows", "baseline_rows"}) {
    for (const Json& row : document_[kind]) checked += row["checked_rows"].get<int64_t>();
  }
  bool ok = complete && rows == expected && wrong_ == 0 && overflowed_ == 0 && document_["errors"].empty();
  document_["totals"] = {{"rows", rows},
                         {"rows_asked", expected},
                         {"checked_rows", checked},
                         {"wrong_rows", wrong_},
                         {"overflowed_calls", overflowed_}};
  document_["result"] = ok ? "OK" : "FAILED";
  std::string checks = options_.check ? cat(checked, " received and combined rows checked, ", wrong_, " wrong")
                                      : "nothing checked (-c 0)";
  std::string overflow = overflowed_ > 0 ? cat(", ", overflowed_, " calls overflowed") : "";
  std::fprintf(out_, "# %zu of %zu sizes, %s%s: %s\n", rows, expected, checks.c_str(), overflow.c_str(),
               ok ? "OK" : "FAILED");
  std::fflush(out_);
  try {
    writeJson();
  } catch (const Failure& failure) {
    error(failure.what());
    return 1;
  }
  return ok ? 0 : 1;
}

void Report::writeJson() {
  if (options_.json.empty()) return;
  std::string text = document_.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  bool toStdout = options_.json == "-";
  std::FILE* file = toStdout ? stdout : std::fopen(options_.json.c_str(), "we");
  if (!file) fail("--json ", options_.json, ": ", std::strerror(errno));
  bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  written = (toStdout ? std::fflush(file) : std::fclose(file)) == 0 && written;
  if (!written) fail("--json ", options_.json, ": cannot be written: ", std::strerror(errno));
}

}  // namespace moe::perf

// SPDX-License-Identifier: Apache-2.0
#include "options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>

#include "text.h"

namespace moe::perf {
namespace {

constexpr int kMaxRanks = 1024;
constexpr int64_t kMaxTokens = int64_t{1} << 24;
constexpr int64_t kMaxHidden = int64_t{1} << 20;
constexpr int64_t kMaxExperts = int64_t{1} << 20;

template <class Value>
struct Name {
  const char* text;
  Value value;
};

constexpr Name<moeDataType_t> kDataTypes[] = {
    {"bf16", moeBfloat16}, {"fp16", moeFloat16}, {"fp32", moeFloat32}, {"fp8", moeFloat8e4m3}};
constexpr Name<moeQuantize_t> kQuantizes[] = {
    {"none", moeQuantizeNone}, {"fp8", moeQuantizeFloat32}, {"fp8-ue8m0", moeQuantizeUe8m0}};
constexpr Name<moeLayout_t> kLayouts[] = {
    {"rank", moeLayoutRank}, {"expert", moeLayoutExpert}, {"expert-padded", moeLayoutExpertPadded}};
constexpr Name<moeIdType_t> kIdTypes[] = {{"int32", moeInt32}, {"int64", moeInt64}};
constexpr Name<moeBackend_t> kBackends[] = {
    {"auto", moeBackendAuto}, {"host", moeBackendHost}, {"cuda", moeBackendCuda}};
constexpr Name<moePath_t> kPaths[] = {
    {"auto", moePathAuto}, {"direct", moePathDirect}, {"low-latency", moePathLowLatency}};
constexpr Name<moeSlots_t> kSlots[] = {{"auto", moeSlotsAuto}, {"expert", moeSlotsExpert}, {"rank", moeSlotsRank}};
constexpr Name<moeFormat_t> kFormats[] = {
    {"auto", moeFormatAuto}, {"tagged", moeFormatTagged}, {"signalled", moeFormatSignalled}};
constexpr Name<Op> kOps[] = {{"roundtrip", Op::kRoundtrip}, {"dispatch", Op::kDispatch}, {"combine", Op::kCombine}};
constexpr Name<BaselineKind> kBaselines[] = {{"none", BaselineKind::kNone}, {"nccl", BaselineKind::kNccl}};
constexpr Name<InitKind> kInits[] = {{"auto", InitKind::kAuto}, {"nccl", InitKind::kNccl}};
constexpr Name<RoutingKind> kRoutings[] = {
    {"uniform", RoutingKind::kUniform}, {"zipf", RoutingKind::kZipf},     {"node-limited", RoutingKind::kNodeLimited},
    {"same", RoutingKind::kSame},       {"masked", RoutingKind::kMasked}, {"last", RoutingKind::kLast},
    {"file", RoutingKind::kFile}};

// Options whose features this version lacks: the values that are known, and those of them that mean "without it".
struct Later {
  const char* option;
  std::vector<std::string> known;    // all values, in the order of the documentation; empty: a number or a file
  std::vector<std::string> without;  // these are accepted
};

const std::vector<Later>& laterOptions() {
  static const std::vector<Later>& table = *new std::vector<Later>{
      {"--baseline", {"none", "nccl", "mpi"}, {"none", "nccl"}},
      {"--nodes", {}, {"0", "1"}},
      {"--transport", {"auto", "tcp", "verbs"}, {"auto"}},
      {"--path", {"auto", "direct", "hybrid", "low-latency", "bounded", "pull"}, {"auto", "direct", "low-latency"}},
      {"--window", {}, {}},
      {"--block-m", {}, {}},
      {"--tune", {}, {}},
  };
  return table;
}

std::string hyphens(std::string text) {
  std::replace(text.begin(), text.end(), '_', '-');
  return text;
}

std::string joined(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += cat(out.empty() ? "" : ", ", word);
  return out;
}

template <class Value, size_t count>
Value parseName(const char* option, const std::string& text, const Name<Value> (&names)[count]) {
  std::vector<std::string> known;
  for (const auto& name : names) {
    if (hyphens(text) == name.text) return name.value;
    known.emplace_back(name.text);
  }
  usage(option, " ", text, ": unknown value; known: ", joined(known));
}

template <class Value, size_t count>
const char* textOf(Value value, const Name<Value> (&names)[count]) {
  for (const auto& name : names) {
    if (name.value == value) return name.text;
  }
  return "?";
}

double parseParameter(const std::string& whole, const std::string& text, const char* rule, double low, double high) {
  double value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || !(value >= low && value <= high)) {
    usage("--routing ", whole, ": the part after the colon must be ", rule);
  }
  return value;
}

RoutingSpec parseRouting(const std::string& text) {
  size_t colon = text.find(':');
  std::string name = hyphens(text.substr(0, colon));
  std::string rest = colon == std::string::npos ? "" : text.substr(colon + 1);
  RoutingSpec spec;
  bool known = false;
  for (const auto& entry : kRoutings) {
    if (name != entry.text) continue;
    spec.kind = entry.value;
    known = true;
  }
  if (!known) {
    usage("--routing ", text,
          ": unknown value; known: uniform, zipf:A, node-limited:M, same, masked:P, last, file:PATH");
  }
  switch (spec.kind) {
    case RoutingKind::kZipf: spec.parameter = parseParameter(text, rest, "a skew from 0 to 20", 0, 20); break;
    case RoutingKind::kMasked: spec.parameter = parseParameter(text, rest, "a probability from 0 to 1", 0, 1); break;
    case RoutingKind::kNodeLimited:
      spec.parameter = parseParameter(text, rest, "a whole number of groups, at least 1", 1, kMaxRanks);
      if (spec.parameter != std::floor(spec.parameter)) {
        usage("--routing ", text, ": the part after the colon must be a whole number of groups, at least 1");
      }
      break;
    case RoutingKind::kFile:
      if (rest.empty()) usage("--routing ", text, ": the part after the colon must be the trace's path");
      spec.path = rest;
      break;
    default:
      if (colon != std::string::npos) usage("--routing ", text, ": ", name, " takes nothing after a colon");
  }
  return spec;
}

void parseStall(const std::string& text, Options* options) {
  const char* end = text.data() + text.size();
  auto [middle, rankError] = std::from_chars(text.data(), end, options->stallRank);
  bool good = rankError == std::errc() && middle != end && *middle == ':' && options->stallRank >= 0;
  if (good) {
    auto [stop, timeError] = std::from_chars(middle + 1, end, options->stallMs);
    good = timeError == std::errc() && stop == end && options->stallMs >= 0 && options->stallMs <= 600000;
  }
  if (!good) usage("--stall ", text, ": must be RANK:MS, a rank and 0 to 600000 milliseconds, such as 1:50");
}

// The texts of options that are parsed further once CLI11 has split the command line.
struct Texts {
  std::string dtype = "bf16", quantize = "none", layout = "rank", ids = "int64", backend = "auto", path = "auto",
              slots = "auto", format = "auto", op = "roundtrip", baseline = "none", init = "auto";
  std::string routing = "uniform", stall;
  int check = 1;
  int gpus = 1;
  // By the index of laterOptions(); --path and --baseline are in both.
  std::vector<std::string> later = std::vector<std::string>(laterOptions().size());
};

void declareSizes(CLI::App& app, Options& o, Texts& t) {
  app.add_option("-b", o.first, "tokens per rank of the first row (128)");
  app.add_option("-e", o.last, "tokens per rank of the last row, which always runs (128, or -b if that is more)");
  app.add_option("-f", o.factor, "factor from row to row, above 1; after 0 comes 1 (2)");
  app.add_option("-n", o.iterations, "timed iterations (20)");
  app.add_option("-w", o.warmups, "warm-up iterations (5)");
  app.add_option("-c", t.check, "1: compare every received and every combined row with the oracle; 0: do not (1)");
  app.add_option("-p", o.processes, "ranks as processes that moe_perf starts");
  app.add_option("-g", t.gpus,
                 "ranks that each process drives as threads, each on a GPU of its own: -p P -g N makes P * N ranks. "
                 "Without -p: as -t N");
  app.add_option("-t", o.threads,
                 "ranks as threads of one process. Without -p and -t: rank and size come from the "
                 "launcher's environment (torchrun, mpirun, srun)");
  app.add_option("--hidden", o.hidden, "elements in a token's row (7168)");
  app.add_option("--experts", o.experts, "experts of all ranks together (256)");
  app.add_option("--topk", o.topk, "experts per token (8)");
  app.add_option("--dtype", t.dtype, "bf16, fp16, fp32, or fp8 with an fp32 scale per 128 values (bf16)");
  app.add_option("--quant", t.quantize,
                 "none, or what dispatch makes of bf16: fp8 with fp32 scales, or fp8-ue8m0 with exponents (none)");
  app.add_option("--layout", t.layout, "rank, expert or expert-padded (rank)");
  app.add_option("--align", o.align, "--layout expert: each expert's first row is a multiple of this (1)");
  app.add_flag("--exact", o.exact, "wait on the host for the sizes, then receive into outputs of exactly that size");
  app.add_option("--budget", o.budget, "rows that the outputs hold (expert-padded: per expert); 0: the worst case (0)");
  app.add_option("--ids", t.ids, "int32 or int64 (int64)");
}

void declareChoices(CLI::App& app, Options& o, Texts& t) {
  app.add_option("--backend", t.backend, "auto, host or cuda (auto)");
  app.add_option("--path", t.path, "auto, direct or low-latency (auto)");
  app.add_option("--slots", t.slots,
                 "low latency: a copy of a token for each rank or for each expert: auto, expert or rank (auto)");
  app.add_option("--format", t.format,
                 "low latency: words that are tagged, or rows that a signal follows: auto, tagged or signalled (auto)");
  app.add_option("--op", t.op, "what is timed: roundtrip, dispatch or combine (roundtrip)");
  app.add_option("--routing", t.routing,
                 "uniform, zipf:A, node-limited:M, same, masked:P, last or file:PATH (uniform)");
  app.add_flag("--halves", o.halves, "each dispatch is a send half and a moeWait");
  app.add_flag("--graph", o.graph,
               cat("GPUs: times are those of CUDA graphs of ", kReplayCalls,
                   " operations, replayed until there were -n, but at least ", kLeastReplays, " times"));
  app.add_flag("--flush", o.flush,
               "GPUs: each timed call starts with an overwritten L2 cache, on all GPUs at the same time");
  app.add_option("--sms", o.sms, "most SMs that an operation may use; 0: the library chooses (0)");
  app.add_option("--max-tokens", o.maxTokens, "one communicator of this size for all rows, in place of one per row");
  app.add_option("--timeout-ms", o.timeoutMs, "longest wait for another rank (10000)");
  app.add_option("--seed", o.seed, "of tokens and routing (1)");
  app.add_option("--json", o.json, "write everything to this file as JSON; - is stdout, and text then goes to stderr");
  app.add_option("--stall", t.stall, "RANK:MS: that rank sleeps before each call; its sleep is part of the times");
  app.add_option("--baseline", t.baseline,
                 "none, or nccl: the same layer through NCCL too, with rows of its own (none)");
  app.add_option("--init", t.init,
                 "how ranks meet: auto, as their launch has it, or nccl: through an NCCL communicator (auto)");
  app.add_flag("--corrupt", o.corrupt, "flip one bit of one received row before its check, which must then fail");
  app.add_flag("--deterministic", o.deterministic, "fixed row order; rows of this version always come in one");
  app.add_flag("--version", o.version, "print the versions and exit");
  for (size_t i = 0; i < laterOptions().size(); ++i) {
    const Later& later = laterOptions()[i];
    std::string name = later.option;
    if (name == "--path" || name == "--baseline") continue;
    std::string text =
        later.without.empty() ? "not in this version" : cat("only ", joined(later.without), " in this version");
    app.add_option(name, t.later[i], text)->group("Of other versions");
  }
}

void refuseLater(const Texts& texts) {
  for (size_t i = 0; i < laterOptions().size(); ++i) {
    const Later& later = laterOptions()[i];
    std::string name = later.option;
    std::string value = name == "--path" ? texts.path : name == "--baseline" ? texts.baseline : texts.later[i];
    if (value.empty()) continue;
    auto among = [&](const std::vector<std::string>& list) {
      return std::find(list.begin(), list.end(), hyphens(value)) != list.end();
    };
    if (among(later.without)) continue;
    if (!later.known.empty() && !among(later.known)) {
      usage(later.option, " ", value, ": unknown value; known: ", joined(later.known));
    }
    std::string advice = later.without.empty() ? "; leave it out" : cat("; it has: ", joined(later.without));
    usage(later.option, " ", value, ": this version does not have it", advice);
  }
}

template <class Value>
void requireRange(const char* option, Value value, Value low, Value high) {
  if (value < low || value > high) usage(option, " ", value, ": must be from ", low, " to ", high);
}

void checkFlush(const Options& o) {
  if (!o.flush) return;
  if (o.backend == moeBackendHost) usage("--flush: only a GPU's cache is flushed; leave out --backend host");
  if (o.graph) usage("--flush and --graph exclude each other: replays run from a warm cache");
  if (o.exact) usage("--flush and --exact exclude each other: a host's wait would come between the start and the call");
  if (o.stallRank >= 0) usage("--flush and --stall exclude each other: all ranks start at the same time");
}

void checkRanges(const Options& o) {
  requireRange<int64_t>("-b", o.first, 0, kMaxTokens);
  requireRange<int64_t>("-e", o.last, 0, kMaxTokens);
  if (o.last < o.first) usage("-e ", o.last, ": must not be smaller than -b ", o.first);
  if (!(o.factor > 1) || !std::isfinite(o.factor)) usage("-f ", o.factor, ": must be more than 1");
  requireRange("-n", o.iterations, 1, 1000000);
  requireRange("-w", o.warmups, 0, 1000000);
  requireRange<int64_t>("--hidden", o.hidden, 1, kMaxHidden);
  requireRange<int64_t>("--experts", o.experts, 1, kMaxExperts);
  requireRange("--topk", o.topk, 1, MOE_MAX_TOPK);
  if (o.topk > o.experts) usage("--topk ", o.topk, ": must not be more than --experts ", o.experts);
  requireRange<int64_t>("--align", o.align, 1, 1 << 20);
  if (o.align != 1 && o.layout != moeLayoutExpert) usage("--align ", o.align, ": needs --layout expert");
  requireRange<int64_t>("--budget", o.budget, 0, int64_t{1} << 40);
  if (o.exact && o.budgetGiven) usage("--exact and --budget exclude each other: leave one out");
  requireRange("--sms", o.sms, 0, 1024);
  requireRange<int64_t>("--max-tokens", o.maxTokens, 0, kMaxTokens);
  if (o.maxTokens > 0 && o.last > o.maxTokens) {
    usage("--max-tokens ", o.maxTokens, ": must not be smaller than -e ", o.last);
  }
  if (o.quantize != moeQuantizeNone && o.dtype != moeBfloat16) {
    usage("--quant ", nameOf(o.quantize), ": dispatch quantizes bf16; leave out --dtype");
  }
  if (o.quantize != moeQuantizeNone && o.baseline == BaselineKind::kNccl) {
    usage("--quant and --baseline nccl exclude each other: NCCL carries what it is given");
  }
  if (o.baseline == BaselineKind::kNccl && o.layout != moeLayoutRank) {
    usage("--baseline nccl: has only --layout rank");
  }
  if (o.baseline == BaselineKind::kNccl && o.backend == moeBackendHost) {
    usage("--baseline nccl: NCCL needs GPUs; leave out --backend host");
  }
  if (o.init == InitKind::kNccl && o.backend == moeBackendHost) {
    usage("--init nccl: NCCL needs GPUs; leave out --backend host");
  }
  if (o.graph && o.backend == moeBackendHost) usage("--graph: graphs need GPUs; leave out --backend host");
  if (o.graph && o.exact) usage("--graph and --exact exclude each other: a host's wait cannot be captured");
  if (o.graph && o.stallRank >= 0) usage("--graph and --stall exclude each other: replays do not sleep");
  checkFlush(o);
  requireRange("--timeout-ms", o.timeoutMs, 1, 3600000);
  if (o.corrupt && !o.check) usage("--corrupt needs the check: leave out -c 0");
}

void takeLaunch(const CLI::App& app, int gpus, Options* options) {
  Options& o = *options;
  if (app.count("-p") && app.count("-t")) usage("-p and -t exclude each other: leave one out");
  if (app.count("-g") && app.count("-t")) usage("-g and -t exclude each other: leave one out");
  if (app.count("-p")) requireRange("-p", o.processes, 1, kMaxRanks);
  if (app.count("-t")) requireRange("-t", o.threads, 1, kMaxRanks);
  if (app.count("-g")) {
    requireRange("-g", gpus, 1, kMaxRanks);
    if (o.backend == moeBackendHost) usage("-g ", gpus, ": --backend host drives no GPUs; use -t");
    (o.processes > 0 ? o.perProcess : o.threads) = gpus;
  }
  int ranks = o.ranks();
  if (ranks > kMaxRanks) usage("-p ", o.processes, " -g ", gpus, ": at most ", kMaxRanks, " ranks");
  if (ranks > 0 && o.stallRank >= ranks) usage("--stall: there is no rank ", o.stallRank, " among ", ranks);
}

std::vector<std::string> knownNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

// Lets CLI11 see hyphens wherever an option's name was spelt with underscores, and split the line.
void splitLine(CLI::App& app, std::vector<std::string> arguments) {
  for (std::string& argument : arguments) {
    if (!argument.starts_with("--")) continue;
    size_t equals = argument.find('=');
    argument = hyphens(argument.substr(0, equals)) + (equals == std::string::npos ? "" : argument.substr(equals));
  }
  std::reverse(arguments.begin(), arguments.end());
  app.allow_extras();
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    usage(error.what(), "; see moe_perf --help");
  }
  std::vector<std::string> extras = app.remaining();
  if (!extras.empty()) usage(extras.front(), ": unknown option; known: ", joined(knownNames(app)));
}

}  // namespace

Options parseOptions(const std::vector<std::string>& arguments) {
  Options o;
  Texts t;
  CLI::App app("Times and checks moecl's dispatch and combine.", "moe_perf");
  app.set_help_flag();
  // Scripts add options behind their usual ones: the last one counts.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_flag("-h,--help", o.help, "print this text and exit");
  declareSizes(app, o, t);
  declareChoices(app, o, t);
  splitLine(app, arguments);
  if (o.help) o.helpText = app.help();
  if (o.help || o.version) return o;

  refuseLater(t);
  o.dtype = parseName("--dtype", t.dtype, kDataTypes);
  o.quantize = parseName("--quant", t.quantize, kQuantizes);
  o.layout = parseName("--layout", t.layout, kLayouts);
  o.ids = parseName("--ids", t.ids, kIdTypes);
  o.backend = parseName("--backend", t.backend, kBackends);
  o.path = parseName("--path", t.path, kPaths);
  o.slots = parseName("--slots", t.slots, kSlots);
  o.format = parseName("--format", t.format, kFormats);
  o.op = parseName("--op", t.op, kOps);
  o.baseline = parseName("--baseline", t.baseline, kBaselines);
  o.init = parseName("--init", t.init, kInits);
  o.routing = parseRouting(t.routing);
  if (app.count("--stall")) parseStall(t.stall, &o);
  requireRange("-c", t.check, 0, 1);
  o.check = t.check == 1;
  o.budgetGiven = app.count("--budget") > 0;
  if (app.count("-e") == 0) o.last = std::max(o.first, o.last);
  checkRanges(o);
  takeLaunch(app, t.gpus, &o);
  return o;
}

std::vector<int64_t> sizeSequence(const Options& options) {
  std::vector<int64_t> sizes;
  int64_t size = options.first;
  while (size < options.last) {
    sizes.push_back(size);
    double next = std::floor(static_cast<double>(size) * options.factor);
    if (next > static_cast<double>(options.last)) break;
    size = std::max(size + 1, static_cast<int64_t>(next));
  }
  sizes.push_back(options.last);
  return sizes;
}

const char* nameOf(moeDataType_t value) { return textOf(value, kDataTypes); }
const char* nameOf(moeQuantize_t value) { return textOf(value, kQuantizes); }
const char* nameOf(moeLayout_t value) { return textOf(value, kLayouts); }
const char* nameOf(moeIdType_t value) { return textOf(value, kIdTypes); }
const char* nameOf(moeBackend_t value) { return textOf(value, kBackends); }
const char* nameOf(moePath_t value) { return textOf(value, kPaths); }
const char* nameOf(moeSlots_t value) { return textOf(value, kSlots); }
const char* nameOf(moeFormat_t value) { return textOf(value, kFormats); }
const char* nameOf(Op value) { return textOf(value, kOps); }
const char* nameOf(BaselineKind value) { return textOf(value, kBaselines); }
const char* nameOf(InitKind value) { return textOf(value, kInits); }

std::string nameOf(const RoutingSpec& routing) {
  std::string name = textOf(routing.kind, kRoutings);
  if (routing.kind == RoutingKind::kFile) return name + ":" + routing.path;
  bool plain =
      routing.kind == RoutingKind::kUniform || routing.kind == RoutingKind::kSame || routing.kind == RoutingKind::kLast;
  return plain ? name : cat(name, ":", routing.parameter);
}

}  // namespace moe::perf

// SPDX-License-Identifier: Apache-2.0
// The command line of moe_perf.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "moe.h"

namespace moe::perf {

enum class Op { kRoundtrip, kDispatch, kCombine };

enum class BaselineKind { kNone, kNccl };

// How ranks meet: as their kind of launch has it, or through an NCCL communicator.
enum class InitKind { kAuto, kNccl };

enum class RoutingKind { kUniform, kZipf, kNodeLimited, kSame, kMasked, kLast, kFile };

struct RoutingSpec {
  RoutingKind kind = RoutingKind::kUniform;
  double parameter = 0;  // zipf: skew; node-limited: groups; masked: probability
  std::string path;      // file
};

// --graph: operations of one graph. A median and a p99 of fewer replays would say little.
constexpr int kReplayCalls = 32;
constexpr int kLeastReplays = 10;

struct Options {
  int64_t first = 128;
  int64_t last = 128;
  double factor = 2;
  int iterations = 20;
  int warmups = 5;
  bool check = true;
  int processes = 0;
  int threads = 0;
  int perProcess = 1;  // ranks of each of those processes, as threads
  int64_t hidden = 7168;
  int64_t experts = 256;
  int topk = 8;
  moeDataType_t dtype = moeBfloat16;
  moeQuantize_t quantize = moeQuantizeNone;
  moeLayout_t layout = moeLayoutRank;
  int64_t align = 1;
  bool exact = false;
  bool budgetGiven = false;
  int64_t budget = 0;
  moeIdType_t ids = moeInt64;
  moeBackend_t backend = moeBackendAuto;
  moePath_t path = moePathAuto;
  moeSlots_t slots = moeSlotsAuto;
  moeFormat_t format = moeFormatAuto;
  Op op = Op::kRoundtrip;
  RoutingSpec routing;
  int sms = 0;
  int64_t maxTokens = 0;  // 0: one communicator per row
  int timeoutMs = 10000;
  uint64_t seed = 1;
  std::string json;  // "": none, "-": stdout
  int stallRank = -1;
  int stallMs = 0;
  bool corrupt = false;
  bool halves = false;
  bool graph = false;
  bool flush = false;
  BaselineKind baseline = BaselineKind::kNone;
  InitKind init = InitKind::kAuto;
  bool deterministic = false;

  // Set when the command line asks for a text in place of a run.
  bool help = false;
  bool version = false;
  std::string helpText;

  // Of moe_perf's own ranks; 0 if a launcher starts them.
  int ranks() const { return processes * perProcess + threads; }
  // Rows stay in the window and are never copied out. Graphs cannot have that.
  bool views() const { return layout == moeLayoutRank && !exact && !budgetGiven && !graph; }
  // Ways to time on GPUs that also have a figure for a dispatch and a combine together.
  bool roundtripTimed() const { return (graph || flush) && op == Op::kRoundtrip; }
  // As many as hold the iterations that were asked for.
  int replays() const { return std::max(kLeastReplays, (iterations + kReplayCalls - 1) / kReplayCalls); }
  moeDataType_t combineDtype() const { return dtype == moeFloat8e4m3 ? moeBfloat16 : dtype; }
};

// Throws UsageError. `arguments` are those after the program's name.
Options parseOptions(const std::vector<std::string>& arguments);

// The tokens per rank of each row.
std::vector<int64_t> sizeSequence(const Options& options);

// The value's spelling on the command line.
const char* nameOf(moeDataType_t value);
const char* nameOf(moeQuantize_t value);
const char* nameOf(moeLayout_t value);
const char* nameOf(moeIdType_t value);
const char* nameOf(moeBackend_t value);
const char* nameOf(moePath_t value);
const char* nameOf(moeSlots_t value);
const char* nameOf(moeFormat_t value);
const char* nameOf(Op value);
const char* nameOf(BaselineKind value);
const char* nameOf(InitKind value);
std::string nameOf(const RoutingSpec& routing);

}  // namespace moe::perf

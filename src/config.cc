// SPDX-License-Identifier: Apache-2.0
#include "config.h"

#include "base/settings.h"
#include "layout.h"

namespace moe {
namespace {

constexpr int kDefaultTimeoutMs = 10000;
constexpr int kMaxBuffers = 8;
// The low-latency path is the faster one up to so many tokens per rank: docs/performance.md.
constexpr int64_t kLowLatencyTokens = 512;
// Up to so many bytes that a rank may return at once, words with tags are faster than signals: the same.
constexpr int64_t kTaggedBytes = int64_t{5} << 20;
constexpr const char* kOnlyLowLatency =
    "only the low-latency path has a choice there; take moePathLowLatency (2) as config.path, or 0 here";
constexpr int kMaxRanks = 1 << 16;

void require(bool holds, const char* field, int64_t value, const std::string& rule) {
  if (!holds) fail(moeInvalidArgument, "config.", field, " = ", value, ", but ", rule);
}

void checkShape(const moeConfig_t& config) {
  require(config.maxTokensPerRank >= 1 && config.maxTokensPerRank <= INT32_MAX, "maxTokensPerRank",
          config.maxTokensPerRank, cat("it must be from 1 to ", INT32_MAX));
  require(config.hidden >= 1 && config.hidden <= (int64_t{1} << 28), "hidden", config.hidden,
          cat("it must be from 1 to ", int64_t{1} << 28, " elements"));
  require(config.numExperts >= 1 && config.numExperts <= INT32_MAX, "numExperts", config.numExperts,
          cat("it must be from 1 to ", INT32_MAX));
  require(config.maxTopk >= 1 && config.maxTopk <= MOE_MAX_TOPK, "maxTopk", config.maxTopk,
          cat("it must be from 1 to ", MOE_MAX_TOPK));
  require(config.numSideRows >= 0 && config.numSideRows <= MOE_MAX_SIDE_ROWS, "numSideRows", config.numSideRows,
          cat("it must be from 0 to ", MOE_MAX_SIDE_ROWS));
  for (int side = 0; side < config.numSideRows; ++side) {
    if (config.sideRowBytes[side] < 1 || config.sideRowBytes[side] > (int64_t{1} << 28)) {
      fail(moeInvalidArgument, "config.sideRowBytes[", side, "] = ", config.sideRowBytes[side],
           ", but a side row has from 1 to ", int64_t{1} << 28, " bytes");
    }
  }
}

void checkChoices(const moeConfig_t& config) {
  if (config.dtype < 0 || config.dtype >= moeNumDataTypes) {
    fail(moeInvalidArgument, "config.dtype = ", config.dtype,
         ", which is no moeDataType_t; supported: bf16 (0), fp16 (1), fp32 (2), fp8 e4m3 (3)");
  }
  if (config.combineDtype < 0 || config.combineDtype >= moeFloat8e4m3) {
    fail(moeInvalidArgument, "config.combineDtype = ", config.combineDtype,
         ", but combine adds rows in one of: bf16 (0), fp16 (1), fp32 (2)");
  }
  require(config.layout >= 0 && config.layout < moeNumLayouts, "layout", config.layout,
          "it must be moeLayoutRank (0), moeLayoutExpert (1) or moeLayoutExpertPadded (2)");
  require(config.buffers >= 2 && config.buffers <= kMaxBuffers, "buffers", config.buffers,
          cat("it must be from 2 to ", kMaxBuffers));
  require(config.path >= 0 && config.path < moeNumPaths, "path", config.path,
          "this version knows moePathAuto (0), moePathDirect (1) and moePathLowLatency (2)");
  require(config.backend >= 0 && config.backend < moeNumBackends, "backend", config.backend,
          "it must be moeBackendAuto (0), moeBackendHost (1) or moeBackendCuda (2)");
  require(config.timeoutMs >= 1, "timeoutMs", config.timeoutMs, "it must be at least 1 millisecond");
  require(config.numSms >= 0, "numSms", config.numSms, "it must be 0 (chosen by the path) or more");
  require(config.device >= -1, "device", config.device, "it must be -1 (the current one) or a device number");
  require(config.expertAlign >= 1 && config.expertAlign <= 65536, "expertAlign", config.expertAlign,
          "it must be from 1 to 65536 rows");
  require(config.capacity >= 0, "capacity", config.capacity, "it must be 0 (the worst case) or more rows per expert");
}

void checkQuantize(const moeConfig_t& config) {
  require(config.quantize >= 0 && config.quantize < moeNumQuantizes, "quantize", config.quantize,
          "it must be moeQuantizeNone (0), moeQuantizeFloat32 (1) or moeQuantizeUe8m0 (2)");
  require(config.scaleOrder >= 0 && config.scaleOrder < moeNumScaleOrders, "scaleOrder", config.scaleOrder,
          "it must be moeScalesByRow (0) or moeScalesByColumn (1)");
  if (config.quantize == moeQuantizeNone || config.dtype == moeBfloat16) return;
  fail(moeInvalidArgument, "config.quantize = ", config.quantize, " with config.dtype = ", config.dtype, " (",
       dataTypeName(config.dtype), "), but dispatch quantizes bf16 (0); set dtype to what dispatch is given");
}

void checkSlots(const moeConfig_t& config) {
  require(config.slots >= 0 && config.slots < moeNumSlots, "slots", config.slots,
          "it must be moeSlotsAuto (0), moeSlotsRank (1) or moeSlotsExpert (2)");
  require(config.format >= 0 && config.format < moeNumFormats, "format", config.format,
          "it must be moeFormatAuto (0), moeFormatTagged (1) or moeFormatSignalled (2)");
  require(config.slots != moeSlotsExpert || config.layout != moeLayoutRank, "slots", config.slots,
          "in moeLayoutRank a token has one row at a rank; take moeSlotsRank (1) or an expert layout");
}

// What only the low-latency path has. After the path is known.
void chooseSlots(moeConfig_t* config, int nranks) {
  if (config->path != moePathLowLatency) {
    require(config->slots == moeSlotsAuto, "slots", config->slots, kOnlyLowLatency);
    require(config->format == moeFormatAuto, "format", config->format, kOnlyLowLatency);
    return;
  }
  if (config->slots == moeSlotsAuto && config->layout != moeLayoutRank) config->slots = settings().slots;
  if (config->slots == moeSlotsAuto) config->slots = moeSlotsRank;
  if (config->format == moeFormatAuto) config->format = settings().format;
  if (config->format == moeFormatAuto) {
    int64_t rows = config->maxTokensPerRank * smaller(config->maxTopk, nranks);
    bool few = rows <= kTaggedBytes / (config->hidden * dataTypeBytes(config->combineDtype));
    config->format = few ? moeFormatTagged : moeFormatSignalled;
  }
}

// Row numbers are 32-bit in handles; everything that could exceed them is refused here, before any allocation.
void checkRows(const moeConfig_t& config, int nranks) {
  int64_t local = ceilDiv(config.numExperts, nranks);
  auto arriving = static_cast<double>(nranks) * static_cast<double>(config.maxTokensPerRank);
  double rows = arriving;
  if (config.layout == moeLayoutExpert) {
    rows = arriving * static_cast<double>(smaller(config.maxTopk, local)) +
           static_cast<double>(local) * static_cast<double>(config.expertAlign);
  } else if (config.layout == moeLayoutExpertPadded) {
    rows = static_cast<double>(local) * static_cast<double>(config.capacity);
  }
  if (rows > static_cast<double>(INT32_MAX) || arriving > static_cast<double>(INT32_MAX)) {
    double most =
        static_cast<double>(config.maxTokensPerRank) * static_cast<double>(INT32_MAX) / std::max(rows, arriving);
    fail(moeInvalidArgument, "config.maxTokensPerRank = ", config.maxTokensPerRank, " with ", nranks,
         " ranks in layout ", layoutName(config.layout), " could bring ",
         static_cast<int64_t>(std::max(rows, arriving)), " rows to one rank, but at most ", INT32_MAX,
         " are supported; the largest legal value is about ", static_cast<int64_t>(most));
  }
}

struct Field {
  const char* name;
  int64_t (*get)(const moeConfig_t&);
};

// Every field that must be the same on all ranks.
const std::vector<Field>& sharedFields() {
  static const std::vector<Field> fields = {
      {"maxTokensPerRank", [](const moeConfig_t& c) { return c.maxTokensPerRank; }},
      {"hidden", [](const moeConfig_t& c) { return c.hidden; }},
      {"numExperts", [](const moeConfig_t& c) { return c.numExperts; }},
      {"maxTopk", [](const moeConfig_t& c) { return int64_t{c.maxTopk}; }},
      {"dtype", [](const moeConfig_t& c) { return int64_t{c.dtype}; }},
      {"combineDtype", [](const moeConfig_t& c) { return int64_t{c.combineDtype}; }},
      {"layout", [](const moeConfig_t& c) { return int64_t{c.layout}; }},
      {"expertAlign", [](const moeConfig_t& c) { return c.expertAlign; }},
      {"capacity", [](const moeConfig_t& c) { return c.capacity; }},
      {"numSideRows", [](const moeConfig_t& c) { return int64_t{c.numSideRows}; }},
      {"buffers", [](const moeConfig_t& c) { return int64_t{c.buffers}; }},
      {"sideRowBytes[0]", [](const moeConfig_t& c) { return c.sideRowBytes[0]; }},
      {"sideRowBytes[1]", [](const moeConfig_t& c) { return c.sideRowBytes[1]; }},
      {"sideRowBytes[2]", [](const moeConfig_t& c) { return c.sideRowBytes[2]; }},
      {"sideRowBytes[3]", [](const moeConfig_t& c) { return c.sideRowBytes[3]; }},
      {"path", [](const moeConfig_t& c) { return int64_t{c.path}; }},
      {"backend", [](const moeConfig_t& c) { return int64_t{c.backend}; }},
      {"quantize", [](const moeConfig_t& c) { return int64_t{c.quantize}; }},
      {"scaleOrder", [](const moeConfig_t& c) { return int64_t{c.scaleOrder}; }},
      {"slots", [](const moeConfig_t& c) { return int64_t{c.slots}; }},
      {"format", [](const moeConfig_t& c) { return int64_t{c.format}; }},
  };
  return fields;
}

}  // namespace

const char* dataTypeName(int32_t type) {
  static const char* const names[] = {"bf16", "fp16", "fp32", "fp8"};
  return type >= 0 && type < moeNumDataTypes ? names[type] : "unknown";
}

const char* layoutName(int32_t layout) {
  static const char* const names[] = {"rank", "expert", "expert-padded"};
  return layout >= 0 && layout < moeNumLayouts ? names[layout] : "unknown";
}

moeConfig_t completeConfig(const moeConfig_t* given, int nranks) {
  moeConfig_t config = takeStruct(given, "config", moeConfig_t MOE_CONFIG_INIT, kFirstConfigBytes);
  if (nranks < 1 || nranks > kMaxRanks)
    fail(moeInvalidArgument, "nranks = ", nranks, ", but it must be from 1 to ", kMaxRanks);
  if (config.expertAlign == 0) config.expertAlign = 1;
  if (config.buffers == 0) config.buffers = 2;
  if (config.timeoutMs == 0) config.timeoutMs = kDefaultTimeoutMs;
  checkShape(config);
  checkChoices(config);
  checkQuantize(config);
  checkSlots(config);
  if (config.quantize == moeQuantizeNone) config.scaleOrder = moeScalesByRow;
  if (config.layout != moeLayoutExpert) config.expertAlign = 1;
  if (config.layout != moeLayoutExpertPadded) {
    config.capacity = 0;
  } else if (config.capacity == 0) {
    config.capacity = int64_t{nranks} * config.maxTokensPerRank;
  }
  for (int side = config.numSideRows; side < MOE_MAX_SIDE_ROWS; ++side) config.sideRowBytes[side] = 0;
  if (config.path == moePathAuto) config.path = settings().path;
  if (config.path == moePathAuto) {
    bool asked = config.slots != moeSlotsAuto || config.format != moeFormatAuto;
    config.path = asked || config.maxTokensPerRank <= kLowLatencyTokens ? moePathLowLatency : moePathDirect;
  }
  chooseSlots(&config, nranks);
  checkRows(config, nranks);
  return config;
}

void compareConfigs(const std::vector<moeConfig_t>& ofRanks) {
  std::string differences;
  for (const Field& field : sharedFields()) {
    bool differs = false;
    std::string values;
    for (size_t rank = 0; rank < ofRanks.size(); ++rank) {
      int64_t value = field.get(ofRanks[rank]);
      differs = differs || value != field.get(ofRanks[0]);
      values += cat(rank ? ", " : "", "rank ", rank, ": ", value);
    }
    if (differs) differences += cat(differences.empty() ? "" : "; ", "config.", field.name, " differs (", values, ")");
  }
  if (!differences.empty()) fail(moeMismatch, differences, "; every rank must pass the same value");
}

}  // namespace moe

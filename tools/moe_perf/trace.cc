// SPDX-License-Identifier: Apache-2.0
// Reading a recorded routing.
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "routing.h"
#include "text.h"

namespace moe::perf {
namespace {

using Json = nlohmann::json;

class Reader {
 public:
  Reader(std::string path, int64_t experts, int topk) : path_(std::move(path)), experts_(experts), topk_(topk) {}

  Trace read() {
    std::ifstream file(path_);
    if (!file) usage("--routing file:", path_, ": cannot be opened");
    std::string line;
    while (std::getline(file, line)) {
      ++line_;
      if (line.find_first_not_of(" \t\r") != std::string::npos) readLine(line);
    }
    if (file.bad()) usage("--routing file:", path_, ": cannot be read past line ", line_);
    if (trace_.rows == 0) usage("--routing file:", path_, ": has no record of type \"route\"");
    return std::move(trace_);
  }

 private:
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    usage("--routing file:", path_, ": line ", line_, ": ", parts...);
  }

  void readLine(const std::string& line) {
    Json record = Json::parse(line, nullptr, false);
    if (record.is_discarded() || !record.is_object()) refuse("is not a JSON object");
    if (!record.contains("type") || record["type"] != "route") return;
    const Json& ids = field(record, "topk_ids");
    const Json& weights = field(record, "topk_weights");
    for (const Json& id : ids) {
      if (!id.is_number_integer()) refuse("topk_ids has ", id.dump(), ", which is not a whole number");
      // A number above the range of int64 must not wrap into it.
      bool huge = id.is_number_unsigned() && id.get<uint64_t>() >= static_cast<uint64_t>(experts_);
      if (huge || id.get<int64_t>() < 0) {
        refuse("expert id ", id.dump(), " is outside 0 .. ", experts_ - 1, "; pass --experts as in the trace");
      }
      trace_.ids.push_back(id.get<int64_t>());
    }
    for (const Json& weight : weights) {
      if (!weight.is_number() || !std::isfinite(weight.get<float>())) {
        refuse("topk_weights has ", weight.dump(), ", which is not a finite number");
      }
      trace_.weights.push_back(weight.get<float>());
    }
    ++trace_.rows;
  }

  const Json& field(const Json& record, const char* name) const {
    auto found = record.find(name);
    if (found == record.end() || !found->is_array()) refuse("has no list ", name);
    if (found->size() != static_cast<size_t>(topk_)) {
      refuse(name, " has ", found->size(), " entries, but --topk is ", topk_, "; pass --topk as in the trace");
    }
    return *found;
  }

  std::string path_;
  int64_t experts_;
  int topk_;
  int64_t line_ = 0;
  Trace trace_;
};

}  // namespace

Trace readTrace(const std::string& path, int64_t experts, int topk) { return Reader(path, experts, topk).read(); }

}  // namespace moe::perf

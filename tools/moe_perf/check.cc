// SPDX-License-Identifier: Apache-2.0
#include "check.h"

#include <bit>
#include <cstring>

namespace moe::perf {
namespace {

class ReceiveCheck {
 public:
  ReceiveCheck(const Shape& shape, const TokenData& data, int64_t set, const std::vector<Routes>& routes,
               const ExpectedReceive& expected, const Received& got)
      : shape_(shape), data_(data), set_(set), routes_(routes), expected_(expected), got_(got) {
    row_.resize(static_cast<size_t>(data.rowBytes()));
    scales_.resize(static_cast<size_t>(data.scaleBytes()));
  }

  Verdict run() {
    checkSizes();
    checkCounts();
    for (const ExpectedRow& row : expected_.rows) {
      if (row.delivered) checkRow(row);
    }
    if (shape_.layout == moeLayoutRank) {
      checkTail();
    } else {
      checkGaps();
    }
    return verdict_;
  }

 private:
  void checkSizes() {
    const moeSizes_t& want = expected_.sizes;
    const moeSizes_t& have = *got_.sizes;
    if (want.rows != have.rows || want.requiredRows != have.requiredRows || want.overflow != have.overflow ||
        want.copies != have.copies) {
      verdict_.wrong("sizes: expected ", want.rows, " rows, ", want.requiredRows, " required, overflow ", want.overflow,
                     ", ", want.copies, " copies; got ", have.rows, ", ", have.requiredRows, ", ", have.overflow, ", ",
                     have.copies);
    }
  }

  template <class T>
  void compare(const char* name, const std::vector<T>& want, const T* have) {
    for (size_t i = 0; i < want.size(); ++i) {
      if (want[i] != have[i]) verdict_.wrong(name, "[", i, "]: expected ", want[i], ", got ", have[i]);
    }
  }

  void checkCounts() {
    compare("rankCounts", expected_.rankCounts, got_.rankCounts);
    if (shape_.layout == moeLayoutRank) {
      compare("rankOffsets", expected_.rankOffsets, got_.rankOffsets);
    } else {
      compare("expertCounts", expected_.expertCounts, got_.expertCounts);
      compare("expertOffsets", expected_.expertOffsets, got_.expertOffsets);
    }
  }

  void checkRow(const ExpectedRow& row) {
    std::string what = rowFault(row);
    if (what.empty()) return;
    verdict_.wrong("received row ", row.position, " (token ", row.token, " of rank ", row.source,
                   row.expert >= 0 ? cat(", local expert ", row.expert) : "", "): ", what);
  }

  // "" if all is well.
  std::string rowFault(const ExpectedRow& row) {
    int64_t index = shape_.layout == moeLayoutRank ? row.index : 0;
    TokenId id{set_, row.source, row.token};
    data_.fillRow(id, row_.data());
    std::string fault = bytesFault("payload", row_, got_.tokenRow(row.source, index, row.position));
    if (fault.empty() && data_.scaleCount() > 0) {
      data_.fillScaleRow(id, scales_.data());
      fault = bytesFault("scales", scales_, got_.scaleRow(row.source, index, row.position));
    }
    if (!fault.empty()) return fault;
    const int32_t* source = got_.sources + 2 * row.position;
    if (source[0] != row.source || source[1] != row.token) {
      return cat("its source is given as token ", source[1], " of rank ", source[0]);
    }
    return shape_.layout == moeLayoutRank ? idsFault(row) : expertFault(row);
  }

  template <class T>
  std::string bytesFault(const char* name, const std::vector<T>& want, const std::byte* have) const {
    size_t bytes = want.size() * sizeof(T);
    if (std::memcmp(want.data(), have, bytes) == 0) return "";
    const auto* expected = reinterpret_cast<const std::byte*>(want.data());
    size_t at = 0, bad = 0;
    for (size_t i = bytes; i-- > 0;) {
      if (expected[i] == have[i]) continue;
      at = i;
      ++bad;
    }
    return cat(name, " differs in ", bad, " of ", bytes, " bytes; first at byte ", at, ": expected ",
               std::to_integer<int>(expected[at]), ", got ", std::to_integer<int>(have[at]));
  }

  std::string idsFault(const ExpectedRow& row) const {
    const Routes& routes = routes_[static_cast<size_t>(row.source)];
    for (int k = 0; k < shape_.topk; ++k) {
      int64_t sent = routes.ids[static_cast<size_t>(row.token * shape_.topk + k)];
      bool mine = sent >= got_.firstExpert && sent < got_.firstExpert + std::ssize(expected_.expertCounts);
      int64_t at = row.position * shape_.topk + k;
      int64_t want = mine ? sent : -1;
      if (got_.idAt(at) != want) return cat("id ", k, ": expected ", want, ", got ", got_.idAt(at));
      float weight = routes.weights[static_cast<size_t>(row.token * shape_.topk + k)];
      if (mine && std::bit_cast<uint32_t>(got_.weights[at]) != std::bit_cast<uint32_t>(weight)) {
        return cat("weight ", k, ": expected ", weight, ", got ", got_.weights[at]);
      }
    }
    return "";
  }

  std::string expertFault(const ExpectedRow& row) const {
    if (got_.rowExperts[row.position] != row.expert) return cat("rowExperts says ", got_.rowExperts[row.position]);
    float weight = got_.weights[row.position];
    if (std::bit_cast<uint32_t>(weight) == std::bit_cast<uint32_t>(row.weight)) return "";
    return cat("weight: expected ", row.weight, ", got ", weight);
  }

  // Rank layout: ids past the last row, or in views past each source's last row, are -1.
  void checkTail() {
    if (!got_.views) return checkEmpty(expected_.sizes.rows, got_.capacity);
    for (size_t source = 0; source < expected_.rankCounts.size(); ++source) {
      int64_t first = expected_.rankOffsets[source];
      checkEmpty(first + expected_.rankCounts[source], first + got_.maxTokens);
    }
  }

  void checkEmpty(int64_t first, int64_t end) {
    for (int64_t position = first; position < end; ++position) {
      for (int k = 0; k < shape_.topk; ++k) {
        int64_t id = got_.idAt(position * shape_.topk + k);
        if (id == -1) continue;
        verdict_.wrong("row ", position, " past the last one has id ", id, ", expected -1");
        break;
      }
    }
  }

  // Expert layouts: rows between experts belong to nobody.
  void checkGaps() {
    for (size_t expert = 0; expert < expected_.expertCounts.size(); ++expert) {
      int64_t end = std::min(expected_.expertOffsets[expert + 1], got_.capacity);
      int64_t first = expected_.expertOffsets[expert] + expected_.expertCounts[expert];
      for (int64_t at = first; at < end; ++at) {
        const int32_t* source = got_.sources + 2 * at;
        bool empty = source[0] == -1 && source[1] == -1 && got_.rowExperts[at] == -1 && got_.weights[at] == 0;
        if (empty) continue;
        verdict_.wrong("gap row ", at, " after local expert ", expert, ": source ", source[0], ", ", source[1],
                       ", expert ", got_.rowExperts[at], ", weight ", got_.weights[at], "; expected -1, -1, -1, 0");
      }
    }
  }

  const Shape& shape_;
  const TokenData& data_;
  int64_t set_;
  const std::vector<Routes>& routes_;
  const ExpectedReceive& expected_;
  const Received& got_;
  std::vector<std::byte> row_;
  std::vector<std::byte> scales_;
  Verdict verdict_;
};

}  // namespace

Verdict checkReceived(const Shape& shape, const TokenData& data, int64_t set, const std::vector<Routes>& routes,
                      const ExpectedReceive& expected, const Received& got) {
  return ReceiveCheck(shape, data, set, routes, expected, got).run();
}

Verdict checkCombined(CombineOracle& oracle, const Shape& shape, const TokenData& data, moeDataType_t type, int64_t set,
                      int rank, const Routes& routes, const std::vector<LostRow>& lost, const void* output) {
  Verdict verdict;
  size_t bytes = static_cast<size_t>(data.hidden()) * elementBytes(type);
  std::vector<std::byte> want(bytes);
  std::vector<float> wanted(static_cast<size_t>(data.hidden())), values(static_cast<size_t>(data.hidden()));
  for (int64_t token = 0; token < routes.tokens; ++token) {
    const int64_t* ids = routes.ids.data() + token * shape.topk;
    oracle.expect({set, rank, token}, ids, routes.weights.data() + token * shape.topk, lost, want.data());
    const auto* have = static_cast<const std::byte*>(output) + static_cast<size_t>(token) * bytes;
    if (std::memcmp(want.data(), have, bytes) == 0) continue;
    decodeRow(type, want.data(), nullptr, data.hidden(), wanted.data());
    decodeRow(type, have, nullptr, data.hidden(), values.data());
    size_t at = 0;
    while (at + 1 < values.size() && std::bit_cast<uint32_t>(values[at]) == std::bit_cast<uint32_t>(wanted[at])) {
      ++at;
    }
    verdict.wrong("combined row of token ", token, ": element ", at, ": expected ", wanted[at], ", got ", values[at]);
  }
  return verdict;
}

}  // namespace moe::perf

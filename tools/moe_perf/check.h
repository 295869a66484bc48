// SPDX-License-Identifier: Apache-2.0
// Compares what a rank got with the oracle.
#pragma once

#include <cstdint>
#include <string>

#include "oracle.h"
#include "text.h"

namespace moe::perf {

// What a dispatch delivered.
struct Received {
  bool views = false;
  int64_t maxTokens = 0;  // views: rows of each source's part
  moeRows_t tokens{};     // where the rows lie
  moeRows_t scales{};     // fp8 only
  int64_t capacity = 0;   // rows that the outputs hold
  int64_t firstExpert = 0;
  moeIdType_t idType = moeInt64;
  const void* ids = nullptr;
  const float* weights = nullptr;
  const int32_t* sources = nullptr;
  const int32_t* rowExperts = nullptr;
  const int32_t* rankCounts = nullptr;
  const int64_t* rankOffsets = nullptr;
  const int32_t* expertCounts = nullptr;
  const int64_t* expertOffsets = nullptr;
  const moeSizes_t* sizes = nullptr;

  std::byte* tokenRow(int source, int64_t index, int64_t position) const {
    return rowOf(tokens, source, index, position);
  }
  std::byte* scaleRow(int source, int64_t index, int64_t position) const {
    return rowOf(scales, source, index, position);
  }
  int64_t idAt(int64_t at) const {
    return idType == moeInt32 ? static_cast<const int32_t*>(ids)[at] : static_cast<const int64_t*>(ids)[at];
  }

 private:
  std::byte* rowOf(const moeRows_t& rows, int source, int64_t index, int64_t position) const {
    int64_t stride = rows.strideBytes ? rows.strideBytes : rows.rowBytes;
    return static_cast<std::byte*>(rows.data) + (views ? source * maxTokens + index : position) * stride;
  }
};

// Counts wrong rows and keeps the first one's description.
class Verdict {
 public:
  template <class... Parts>
  void wrong(const Parts&... parts) {
    if (wrong_++ == 0) first_ = cat(parts...);
  }
  int64_t wrongRows() const { return wrong_; }
  const std::string& first() const { return first_; }
  void add(const Verdict& other) {
    if (wrong_ == 0) first_ = other.first_;
    wrong_ += other.wrong_;
  }

 private:
  int64_t wrong_ = 0;
  std::string first_;
};

// A row is wrong once, whatever is wrong about it; so is each wrong count, offset or size.
Verdict checkReceived(const Shape& shape, const TokenData& data, int64_t set, const std::vector<Routes>& routes,
                      const ExpectedReceive& expected, const Received& got);

Verdict checkCombined(CombineOracle& oracle, const Shape& shape, const TokenData& data, moeDataType_t type, int64_t set,
                      int rank, const Routes& routes, const std::vector<LostRow>& lost, const void* output);

}  // namespace moe::perf

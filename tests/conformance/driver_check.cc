// SPDX-License-Identifier: Apache-2.0
// The comparing half of the driver.
#include <cstring>

#include "conformance/driver.h"

namespace moetest {
namespace {

using reference::Bytes;
using reference::Delivery;
using reference::Slot;

size_t size(int64_t value) { return static_cast<size_t>(value); }

template <class T>
T elementOf(const Bytes& bytes, size_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

size_t firstDifference(const std::byte* a, const std::byte* b, size_t bytes) {
  size_t at = 0;
  while (at < bytes && a[at] == b[at]) ++at;
  return at;
}

}  // namespace

void Driver::checkColumns(Exchange& x, const Step& step, int payload) {
  const Delivery& want = x.expected->delivery(rank_);
  const Buffer& buffer = x.outputs[size(payload)];
  Bytes got = buffer.read();
  if (!buffer.guardsIntact()) report_.add(where(step), "scales were written outside their buffer");
  int64_t rows = columnRows(x), words = shape_.scaleWords(), stride = columnStride(x);
  auto wordAt = [&](int64_t row, int64_t word) {
    return got.data() + ((row / rows) * words + word) * stride + row % rows * 4;
  };
  for (size_t row = 0; row < want.slots.size(); ++row) {
    const Slot& slot = want.slots[row];
    if (slot.source < 0) continue;
    const std::byte* right = reference::rowOf(shape_, x.expected->sents(), slot, payload);
    for (int64_t word = 0; word < words; ++word) {
      if (std::memcmp(wordAt(static_cast<int64_t>(row), word), right + word * 4, 4) == 0) continue;
      report_.add(where(step), "scale word ", word, " of row ", row, " (token ", slot.token, " of rank ", slot.source,
                  ") is wrong");
      return;
    }
  }
  for (int64_t column = 0; column * stride < static_cast<int64_t>(got.size()); ++column) {
    for (int64_t at = rows * 4; at < stride; ++at) {
      if (got[size(column * stride + at)] == std::byte{kPoison}) continue;
      report_.add(where(step), "the space after column ", column, " of the scales was written");
      return;
    }
  }
}

void Driver::checkRows(Exchange& x, const Step& step, int payload) {
  if (byColumn(payload)) return checkColumns(x, step, payload);
  const RankCall& call = options(x);
  const Delivery& want = x.expected->delivery(rank_);
  auto rowBytes = size(shape_.payloadBytes(payload));
  size_t stride = rowBytes + size(call.outputGap * outputUnit(payload));
  Bytes got;
  if (call.views) {
    const moeRows_t& view = x.views[size(payload)];
    stride = size(view.strideBytes ? view.strideBytes : view.rowBytes);
    if (view.rowBytes != static_cast<int64_t>(rowBytes)) {
      report_.add(where(step), "view ", payload, " has rows of ", view.rowBytes, " bytes, want ", rowBytes);
      return;
    }
    got.resize(want.slots.empty() ? 0 : (want.slots.size() - 1) * stride + rowBytes);
    device_->copyOut(got.data(), view.data, got.size());
  } else {
    const Buffer& buffer = x.outputs[size(payload)];
    got = buffer.read();
    if (!buffer.guardsIntact()) report_.add(where(step), "payload ", payload, " was written outside its buffer");
  }
  for (size_t row = 0; row < want.slots.size(); ++row) {
    const Slot& slot = want.slots[row];
    const std::byte* bytes = got.data() + row * stride;
    if (slot.source >= 0) {
      const std::byte* right = reference::rowOf(shape_, x.expected->sents(), slot, payload);
      size_t at = firstDifference(bytes, right, rowBytes);
      if (at < rowBytes) {
        report_.add(where(step), "payload ", payload, " row ", row, " (token ", slot.token, " of rank ", slot.source,
                    ") differs from byte ", at, " on");
        return;
      }
    }
    if (call.views) continue;
    for (size_t at = rowBytes; at < stride; ++at) {
      if (bytes[at] == std::byte{kPoison}) continue;
      report_.add(where(step), "payload ", payload, ": the space after row ", row, " was written");
      return;
    }
  }
}

void Driver::checkIds(Exchange& x, const Step& step) {
  if (!x.receive.ids) return;
  const Delivery& want = x.expected->delivery(rank_);
  Bytes got = x.gotIds.read();
  bool wide = x.receive.idType == moeInt64;
  for (size_t i = 0; i < want.ids.size(); ++i) {
    int64_t id = wide ? elementOf<int64_t>(got, i) : elementOf<int32_t>(got, i);
    int64_t right = want.ids[i];
    if (right >= 0 && config_.localIds) right -= shape_.firstExpertOf(rank_);
    if (id == right) continue;
    report_.add(where(step), "id ", i % size(config_.maxTopk), " of row ", i / size(config_.maxTopk), " is ", id,
                ", want ", right);
    return;
  }
  if (!x.gotIds.guardsIntact()) report_.add(where(step), "ids were written outside their buffer");
}

void Driver::checkSlots(Exchange& x, const Step& step) {
  const Delivery& want = x.expected->delivery(rank_);
  bool byRank = config_.layout == moeLayoutRank;
  Bytes weights = x.gotWeights.read(), sources = x.sources.read(), experts = x.rowExperts.read();
  size_t width = byRank ? size(config_.maxTopk) : 1;
  for (size_t row = 0; row < want.slots.size(); ++row) {
    const Slot& slot = want.slots[row];
    for (size_t k = 0; k < width; ++k) {
      float weight = elementOf<float>(weights, row * width + k);
      float right = byRank ? want.weights[row * width + k] : slot.weight;
      if (floatBits(weight) == floatBits(right)) continue;
      report_.add(where(step), "weight ", k, " of row ", row, " is ", weight, ", want ", right);
      return;
    }
    auto source = elementOf<int32_t>(sources, 2 * row), token = elementOf<int32_t>(sources, 2 * row + 1);
    if (source != slot.source || token != slot.token) {
      report_.add(where(step), "source of row ", row, " is rank ", source, " token ", token, ", want ", slot.source,
                  " ", slot.token);
      return;
    }
    if (byRank) continue;
    int64_t right = slot.source < 0 ? -1 : slot.expert - shape_.firstExpertOf(rank_);
    if (elementOf<int32_t>(experts, row) != right) {
      report_.add(where(step), "expert of row ", row, " is ", elementOf<int32_t>(experts, row), ", want ", right);
      return;
    }
  }
  for (const Buffer* buffer : {&x.gotWeights, &x.sources, &x.rowExperts}) {
    if (!buffer->guardsIntact()) report_.add(where(step), "row data were written outside their buffer");
  }
}

template <class T>
void Driver::checkArray(const Step& step, const char* what, const Buffer& buffer, const std::vector<int64_t>& want) {
  Bytes got = buffer.read();
  for (size_t i = 0; i < want.size(); ++i) {
    if (elementOf<T>(got, i) == want[i]) continue;
    report_.add(where(step), what, "[", i, "] is ", elementOf<T>(got, i), ", want ", want[i]);
    return;
  }
  if (!buffer.guardsIntact()) report_.add(where(step), what, " was written outside its buffer");
}

void Driver::checkCounts(Exchange& x, const Step& step) {
  const Delivery& want = x.expected->delivery(rank_);
  checkArray<int32_t>(step, "rankCounts", x.rankCounts, want.rankCounts);
  if (config_.layout == moeLayoutRank) {
    checkArray<int64_t>(step, "rankOffsets", x.rankOffsets, want.rankOffsets);
  } else {
    checkArray<int32_t>(step, "expertCounts", x.expertCounts, want.expertCounts);
    checkArray<int64_t>(step, "expertOffsets", x.expertOffsets, want.expertOffsets);
  }
  Bytes bytes = x.sizes.read();
  auto got = elementOf<moeSizes_t>(bytes, 0);
  const moeSizes_t& right = want.sizes;
  bool same = got.rows == right.rows && got.overflow == right.overflow && got.copies == right.copies &&
              got.requiredRows == right.requiredRows;
  if (!same || !x.sizes.guardsIntact()) {
    report_.add(where(step), "sizes are rows ", got.rows, " required ", got.requiredRows, " overflow ", got.overflow,
                " copies ", got.copies, ", want ", right.rows, " ", right.requiredRows, " ", right.overflow, " ",
                right.copies);
  }
}

void Driver::checkReceived(Exchange& x, const Step& step) {
  if (!options(x).onlyRows) {
    checkCounts(x, step);
    checkSlots(x, step);
    checkIds(x, step);
  }
  for (int payload = 0; payload < shape_.payloads(); ++payload) checkRows(x, step, payload);
}

void Driver::checkCombined(Exchange& x, const Step& step) {
  const RankCall& call = options(x);
  const Bytes& want = x.expected->combined(rank_, step.variant);
  auto rowBytes = size(shape_.combineRowBytes());
  size_t stride = rowBytes + size(call.outputGap * elementBytes(config_.combineDtype));
  Bytes got = x.combined.read();
  for (size_t token = 0; token < size(call.sent.numTokens); ++token) {
    const std::byte* row = got.data() + token * stride;
    size_t at = firstDifference(row, want.data() + token * rowBytes, rowBytes);
    if (at < rowBytes) {
      int64_t h = static_cast<int64_t>(at) / elementBytes(config_.combineDtype);
      report_.add(where(step), "token ", token, " element ", h, " is ", loadElement(config_.combineDtype, row, h),
                  ", want ", loadElement(config_.combineDtype, want.data() + token * rowBytes, h));
      return;
    }
    for (at = rowBytes; at < stride; ++at) {
      if (row[at] == std::byte{kPoison}) continue;
      report_.add(where(step), "the space after output row ", token, " was written");
      return;
    }
  }
  if (!x.combined.guardsIntact()) report_.add(where(step), "the output was written outside its buffer");
}

}  // namespace moetest

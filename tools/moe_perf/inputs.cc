// SPDX-License-Identifier: Apache-2.0
#include "inputs.h"

#include <algorithm>

#include "machine.h"

namespace moe::perf {
namespace {

// More than any cache holds.
constexpr int64_t kColdBytes = int64_t{128} << 20;
constexpr int64_t kMaxSets = 4096, kReplaySets = 16384;

}  // namespace

Inputs::Inputs(const RunContext& context, int rank, int ranks, int64_t tokens)
    : tokens_(tokens),
      rowBytes_(context.data.inputBytes()),
      scaleBytes_(context.data.inputScaleBytes()),
      idBytes_(context.options.ids == moeInt32 ? 4 : 8),
      topk_(context.options.topk),
      sets_(chooseSets(context, ranks)) {
  rows_ = Array(sets_ * tokens * rowBytes_, context.gpu);
  scales_ = Array(sets_ * tokens * scaleBytes_, context.gpu);
  ids_ = Array(sets_ * tokens * topk_ * idBytes_, context.gpu);
  weights_ = Array(sets_ * tokens * topk_ * 4, context.gpu);
  for (int64_t set = 0; set < sets_; ++set) fill(context, set, rank);
  for (const Array* array : {&rows_, &scales_, &ids_, &weights_}) array->push();
}

int64_t Inputs::chooseSets(const RunContext& context, int ranks) const {
  int64_t setBytes = tokens_ * (rowBytes_ + scaleBytes_);
  if (setBytes == 0) return 2;
  // Ranks on the host share a cache; a GPU's has its own.
  if (context.gpu) {
    int64_t calls = int64_t{2} * context.options.iterations + context.options.warmups;
    // Of the sets for replays, those that are used first are out of the cache once the last have been filled.
    int64_t most = context.options.graph ? kReplaySets : std::clamp<int64_t>(calls, 2, kMaxSets);
    return std::clamp<int64_t>(kColdBytes / setBytes + 1, 2, most);
  }
  int64_t total = std::min(kColdBytes, availableMemory() / 8);
  int64_t sets = std::clamp<int64_t>(total / (setBytes * ranks) + 1, 2, kMaxSets);
  // All ranks must send the same set in the same call, and each sees another amount of free memory.
  for (const auto& rank : context.team.gather({static_cast<double>(sets)})) {
    sets = std::min(sets, static_cast<int64_t>(rank[0]));
  }
  return sets;
}

// The host's copies.
void Inputs::fill(const RunContext& context, int64_t set, int rank) {
  const TokenData& data = context.data;
  int64_t first = set * tokens_;
  for (int64_t token = 0; token < tokens_; ++token) {
    TokenId id{set, rank, token};
    data.fillInput(id, rows_.host() + (first + token) * rowBytes_);
    if (scaleBytes_ > 0) data.fillScaleRow(id, scales_.host() + (first + token) * scaleBytes_);
  }
  Routes routes = context.routing.route(set, rank, tokens_);
  int64_t entry = first * topk_;
  std::copy(routes.weights.begin(), routes.weights.end(), weights_.hostAs<float>() + entry);
  if (idBytes_ == 8) {
    std::copy(routes.ids.begin(), routes.ids.end(), ids_.hostAs<int64_t>() + entry);
  } else {
    std::transform(routes.ids.begin(), routes.ids.end(), ids_.hostAs<int32_t>() + entry,
                   [](int64_t id) { return static_cast<int32_t>(id); });
  }
}

}  // namespace moe::perf

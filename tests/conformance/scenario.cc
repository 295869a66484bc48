// SPDX-License-Identifier: Apache-2.0
#include "conformance/scenario.h"

#include <cmath>
#include <utility>

namespace moetest {
namespace {

using reference::Bytes;
using reference::Shape;
using reference::Slot;

uint64_t mix(uint64_t a, uint64_t b) { return Random(a * 0x9e3779b97f4a7c15u + b).next(); }

// Names are the seeds of the data, so that a case has the same data wherever it runs.
uint64_t seedOf(const std::string& name) {
  uint64_t seed = 0;
  for (char c : name) seed = mix(seed, static_cast<unsigned char>(c));
  return seed;
}

int64_t anyExpert(Random& random, const moeConfig_t& config, const std::vector<int64_t>& taken) {
  if (random.oneIn(16)) return -1;
  int64_t id = random.between(0, config.numExperts - 1);
  for (int tries = 0; tries < 8; ++tries) {
    if (std::find(taken.begin(), taken.end(), id) == taken.end()) break;
    id = (id + 1) % config.numExperts;
  }
  return id;
}

reference::Sent makeSent(const Plan& plan, const Shape& shape, int rank, int call) {
  Random random(mix(mix(seedOf(plan.name), static_cast<uint64_t>(call)), static_cast<uint64_t>(rank)));
  reference::Sent sent;
  sent.numTokens = plan.tokens ? plan.tokens(rank, call) : plan.config.maxTokensPerRank;
  sent.topk = plan.topk ? plan.topk(rank, call) : plan.config.maxTopk;
  for (int64_t token = 0; token < sent.numTokens; ++token) {
    std::vector<int64_t> ids;
    for (int k = 0; k < sent.topk; ++k) {
      ids.push_back(plan.router ? plan.router(random, rank, token, k) : anyExpert(random, plan.config, ids));
    }
    sent.ids.insert(sent.ids.end(), ids.begin(), ids.end());
  }
  if (plan.weights) {
    for (size_t i = 0; i < sent.ids.size(); ++i) sent.weights.push_back(random.unit());
  }
  fillRows(shape, random, &sent);
  return sent;
}

// Of any bytes nearly every group would have a NaN or an infinity. Here groups differ in magnitude; some are zero, or
// tiny, and a few stay as they are.
void tameRows(const Shape& shape, Random& random, Bytes* rows) {
  int64_t hidden = shape.config.hidden;
  int64_t tokens = static_cast<int64_t>(rows->size()) / shape.tokenBytes();
  for (int64_t token = 0; token < tokens; ++token) {
    float magnitude = 0;
    bool wild = false;
    for (int64_t h = 0; h < hidden; ++h) {
      if (h % MOE_QUANTIZE_GROUP == 0) {
        wild = random.oneIn(32);
        magnitude = random.oneIn(16) ? 0.0f : std::ldexp(1.0f, static_cast<int>(random.between(-134, 126)));
      }
      if (!wild) storeElement(moeBfloat16, rows->data(), token * hidden + h, (random.unit() * 2 - 1) * magnitude);
    }
  }
}

int64_t resolvedCapacity(const Shape& shape, int rank, const RankCall& options) {
  if (options.capacity > 0 && !options.exactSizes) return options.capacity;
  if (shape.config.layout == moeLayoutExpertPadded) return shape.config.capacity;
  if (shape.config.layout == moeLayoutRank) return shape.nranks * shape.config.maxTokensPerRank;
  moeInfo_t info = MOE_INFO_INIT;
  moeConfig_t config = shape.config;
  config.backend = moeBackendHost;  // rows are as many on all of them, and no GPU need be asked
  if (moePredictInfo(shape.nranks, rank, &config, &info) != moeSuccess) return 0;
  return info.rowCapacity;
}

}  // namespace

void fillRows(const Shape& shape, Random& random, reference::Sent* sent) {
  for (int input = 0; input < shape.inputs(); ++input) {
    Bytes bytes(static_cast<size_t>(sent->numTokens * shape.inputBytes(input)));
    size_t at = 0;
    for (; at + 8 <= bytes.size(); at += 8) {
      uint64_t word = random.next();
      std::memcpy(&bytes[at], &word, 8);
    }
    for (; at < bytes.size(); ++at) bytes[at] = static_cast<std::byte>(random.next());
    sent->rows.push_back(std::move(bytes));
  }
  if (shape.quantizes()) tameRows(shape, random, &sent->rows[0]);
}

Expected::Expected(const Shape& shape, Call call, uint64_t seed) : shape_(shape), call_(std::move(call)), seed_(seed) {
  for (const RankCall& rank : call_.ranks) {
    sents_.push_back(rank.sent);
    reference::quantizeSent(shape_, &sents_.back());
  }
  for (int rank = 0; rank < shape_.nranks; ++rank) {
    const RankCall& options = call_.ranks[at(rank)];
    int64_t capacity = resolvedCapacity(shape_, rank, options);
    if (options.exactSizes) {
      capacity =
          std::max<int64_t>(1, reference::deliver(shape_, sents_, rank, capacity, options.views).sizes.requiredRows);
      if (shape_.config.layout == moeLayoutExpertPadded) capacity = shape_.config.capacity;
    }
    deliveries_.push_back(reference::deliver(shape_, sents_, rank, capacity, options.views));
  }
}

Bytes Expected::makeExpertRows(int rank, int variant) const {
  const auto& config = shape_.config;
  const auto& slots = delivery(rank).slots;
  auto rowBytes = static_cast<size_t>(shape_.combineRowBytes());
  Bytes rows(slots.size() * rowBytes, std::byte{0xff});
  for (size_t i = 0; i < slots.size(); ++i) {
    const Slot& slot = slots[i];
    if (slot.source < 0) continue;
    std::byte* row = rows.data() + i * rowBytes;
    if (call_.experts == Experts::kIdentity) {
      const std::byte* token = reference::rowOf(shape_, sents_, slot, 0);
      float scale = 1;
      if (config.layout == moeLayoutRank) {
        scale = 0;
        auto width = static_cast<size_t>(config.maxTopk);
        for (size_t k = 0; k < width; ++k) scale += delivery(rank).weights[i * width + k];
      }
      for (int64_t h = 0; h < config.hidden; ++h) {
        storeElement(config.combineDtype, row, h, scale * loadElement(config.dtype, token, h));
      }
      continue;
    }
    Random random(mix(mix(mix(seed_, static_cast<uint64_t>(variant)), static_cast<uint64_t>(rank)), i));
    for (int64_t h = 0; h < config.hidden; ++h) {
      storeElement(config.combineDtype, row, h, random.unit() * 4 - 2);
    }
  }
  return rows;
}

const Expected::Outcome& Expected::outcome(int variant) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto [place, isNew] = outcomes_.try_emplace(variant);
  Outcome& result = place->second;
  if (!isNew) return result;
  std::vector<reference::RowIndex> indexes;
  for (int rank = 0; rank < shape_.nranks; ++rank) {
    result.expertRows.push_back(makeExpertRows(rank, variant));
    indexes.push_back(reference::indexRows(delivery(rank)));
  }
  for (int rank = 0; rank < shape_.nranks; ++rank) {
    result.combined.push_back(reference::combine(shape_, sents_, indexes, result.expertRows, rank, call_.applyWeights));
  }
  return result;
}

std::shared_ptr<Expected> Expectations::of(int call) {
  constexpr int kKept = 6;
  std::lock_guard<std::mutex> lock(mutex_);
  auto& place = recent_[call];
  if (!place) {
    uint64_t seed = mix(seedOf(scenario_.name), static_cast<uint64_t>(call));
    place = std::make_shared<Expected>(shape_, scenario_.call(call), seed);
  }
  std::shared_ptr<Expected> result = place;
  std::erase_if(recent_, [call](const auto& entry) { return entry.first <= call - kKept; });
  return result;
}

Plan::Plan(std::string planName, int ranks, int64_t tokensPerRank, int64_t hidden, int64_t experts, int32_t maxTopk)
    : name(std::move(planName)), nranks(ranks) {
  config.maxTokensPerRank = tokensPerRank;
  config.hidden = hidden;
  config.numExperts = experts;
  config.maxTopk = maxTopk;
  config.timeoutMs = 30000;
}

Scenario toScenario(Plan plan) {
  Scenario scenario;
  scenario.name = plan.name;
  scenario.nranks = plan.nranks;
  scenario.config = plan.config;
  scenario.handles = plan.handles;
  scenario.steps = plan.steps;
  scenario.pause = plan.pause;
  if (scenario.steps.empty()) {
    for (int call = 0; call < plan.calls; ++call) {
      scenario.steps.push_back({Step::kDispatch, call, call % plan.handles});
      scenario.steps.push_back({Step::kCombine, call, call % plan.handles});
    }
  }
  scenario.call = [plan = std::move(plan)](int number) {
    Shape shape(plan.nranks, plan.config);
    Call call;
    call.experts = plan.experts;
    for (int rank = 0; rank < plan.nranks; ++rank) {
      RankCall options;
      options.sent = makeSent(plan, shape, rank, number);
      call.ranks.push_back(std::move(options));
    }
    if (plan.adjust) plan.adjust(call, number);
    return call;
  };
  return scenario;
}

}  // namespace moetest

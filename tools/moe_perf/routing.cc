// SPDX-License-Identifier: Apache-2.0
#include "routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "text.h"

namespace moe::perf {
namespace {

constexpr int kGroupsOnOneNode = 8;
// Draws that may hit an expert the token already has, before the next free one is taken instead.
constexpr int kMaxRedraws = 64;

// A stream of well mixed numbers from one key.
class Draws {
 public:
  explicit Draws(uint64_t key) : key_(key) {}
  uint64_t next() { return mix(key_ + count_++); }
  int64_t below(int64_t limit) { return static_cast<int64_t>(next() % static_cast<uint64_t>(limit)); }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  uint64_t key_;
  uint64_t count_ = 0;
};

bool among(const int64_t* ids, int count, int64_t id) { return std::find(ids, ids + count, id) != ids + count; }

// Takes `drawn`, or the first expert after it within [first, first + count) that the token does not have yet.
int64_t nextFree(const int64_t* ids, int taken, int64_t drawn, int64_t first, int64_t count) {
  while (among(ids, taken, drawn)) drawn = drawn + 1 == first + count ? first : drawn + 1;
  return drawn;
}

void shuffle(Draws& draws, int64_t* ids, int count) {
  for (int i = count - 1; i > 0; --i) std::swap(ids[i], ids[draws.below(i + 1)]);
}

}  // namespace

Routing::Routing(const Options& options)
    : spec_(options.routing), seed_(mix(options.seed ^ 0x726f757465)), experts_(options.experts), topk_(options.topk) {
  if (spec_.kind == RoutingKind::kFile) trace_ = readTrace(spec_.path, experts_, topk_);
  if (spec_.kind == RoutingKind::kZipf) makeZipf();
}

void Routing::setShape(int ranks, int nodes) {
  ranks_ = ranks;
  groupStart_.clear();
  if (spec_.kind != RoutingKind::kNodeLimited) return;
  int groups = nodes > 1 ? nodes : static_cast<int>(std::min<int64_t>(kGroupsOnOneNode, experts_));
  for (int group = 0; group <= groups; ++group) {
    int64_t longer = std::min<int64_t>(group, experts_ % groups);
    groupStart_.push_back(group * (experts_ / groups) + longer);
  }
  makeGroups();
}

void Routing::makeZipf() {
  double sum = 0;
  for (int64_t expert = 0; expert < experts_; ++expert) {
    sum += std::pow(static_cast<double>(expert + 1), -spec_.parameter);
    cumulative_.push_back(sum);
  }
}

// Refuses what cannot be drawn: each of the M groups needs at least one of the top-k, and together they need enough.
void Routing::makeGroups() {
  auto groups = static_cast<int64_t>(groupStart_.size()) - 1;
  auto wanted = static_cast<int64_t>(spec_.parameter);
  std::string name = cat("--routing node-limited:", wanted);
  if (wanted > groups) usage(name, ": there are ", groups, " groups of experts");
  if (wanted > topk_) usage(name, ": must not be more than --topk ", topk_);
  // Larger groups come first, so the last ones are the smallest.
  int64_t smallest = groupStart_[static_cast<size_t>(groups)] - groupStart_[static_cast<size_t>(groups - wanted)];
  if (smallest < topk_) usage(name, ": ", wanted, " groups may have only ", smallest, " experts, --topk is ", topk_);
}

Routes Routing::route(int64_t set, int rank, int64_t tokens) const {
  Routes routes;
  routes.tokens = tokens;
  routes.ids.resize(static_cast<size_t>(tokens * topk_));
  routes.weights.resize(static_cast<size_t>(tokens * topk_));
  for (int64_t token = 0; token < tokens; ++token) {
    int64_t* ids = routes.ids.data() + token * topk_;
    float* weights = routes.weights.data() + token * topk_;
    if (spec_.kind == RoutingKind::kFile) {
      routeTrace(rank + ranks_ * (set * tokens + token), ids, weights);
    } else {
      routeToken({set, rank, token}, ids, weights);
    }
  }
  return routes;
}

void Routing::routeToken(const TokenId& id, int64_t* ids, float* weights) const {
  uint64_t key = keyOf(seed_, id);
  for (int k = 0; k < topk_; ++k) {
    weights[k] = static_cast<float>(1 + mix(key ^ static_cast<uint64_t>(k + 1) << 32) % 255) / 256;
  }
  switch (spec_.kind) {
    case RoutingKind::kZipf: routeZipf(key, ids); break;
    case RoutingKind::kNodeLimited: routeGroups(key, ids); break;
    case RoutingKind::kSame: routeUniform(keyOf(seed_, {0, 0, 0}), 0, experts_, ids, 0, topk_); break;
    case RoutingKind::kLast: std::fill(ids, ids + topk_, experts_ - 1); break;
    default: routeUniform(key, 0, experts_, ids, 0, topk_);
  }
  if (spec_.kind != RoutingKind::kMasked) return;
  Draws masks(mix(key ^ 0x6d61736b));
  for (int k = 0; k < topk_; ++k) {
    if (masks.unit() < spec_.parameter) ids[k] = -1;
  }
}

// Fills ids[taken .. wanted) with different experts of [first, first + count).
void Routing::routeUniform(uint64_t key, int64_t first, int64_t count, int64_t* ids, int taken, int wanted) const {
  Draws draws(key);
  if (2 * wanted > count) {
    // Redraws would be many: shuffle the experts that are left.
    std::vector<int64_t> left;
    for (int64_t expert = first; expert < first + count; ++expert) {
      if (!among(ids, taken, expert)) left.push_back(expert);
    }
    shuffle(draws, left.data(), static_cast<int>(left.size()));
    std::copy_n(left.begin(), wanted - taken, ids + taken);
    return;
  }
  while (taken < wanted) {
    int64_t expert = first + draws.below(count);
    if (!among(ids, taken, expert)) ids[taken++] = expert;
  }
}

void Routing::routeZipf(uint64_t key, int64_t* ids) const {
  Draws draws(key);
  for (int k = 0; k < topk_; ++k) {
    int64_t expert = 0;
    for (int redraw = 0; redraw < kMaxRedraws; ++redraw) {
      auto above = std::upper_bound(cumulative_.begin(), cumulative_.end(), draws.unit() * cumulative_.back());
      expert = std::min<int64_t>(above - cumulative_.begin(), experts_ - 1);
      if (!among(ids, k, expert)) break;
    }
    ids[k] = nextFree(ids, k, expert, 0, experts_);
  }
}

void Routing::routeGroups(uint64_t key, int64_t* ids) const {
  Draws draws(key);
  auto groups = static_cast<int>(groupStart_.size()) - 1;
  auto wanted = static_cast<int>(spec_.parameter);
  std::vector<int64_t> order(static_cast<size_t>(groups));
  std::iota(order.begin(), order.end(), 0);
  shuffle(draws, order.data(), groups);
  // One expert of each chosen group, then the rest from their union.
  std::vector<int64_t> pool;
  for (int i = 0; i < wanted; ++i) {
    int64_t first = groupStart_[static_cast<size_t>(order[static_cast<size_t>(i)])];
    int64_t end = groupStart_[static_cast<size_t>(order[static_cast<size_t>(i)]) + 1];
    ids[i] = first + draws.below(end - first);
    for (int64_t expert = first; expert < end; ++expert) {
      if (expert != ids[i]) pool.push_back(expert);
    }
  }
  for (int k = wanted; k < topk_; ++k) {
    auto at = static_cast<size_t>(draws.below(static_cast<int64_t>(pool.size())));
    ids[k] = pool[at];
    pool[at] = pool.back();
    pool.pop_back();
  }
  shuffle(draws, ids, topk_);
}

void Routing::routeTrace(int64_t row, int64_t* ids, float* weights) const {
  int64_t at = row % trace_.rows * topk_;
  std::copy_n(trace_.ids.begin() + at, topk_, ids);
  std::copy_n(trace_.weights.begin() + at, topk_, weights);
}

std::string Routing::describe(int64_t tokens) const {
  std::string text = nameOf(spec_);
  if (spec_.kind == RoutingKind::kFile) {
    text += cat(" (", trace_.rows, " rows dealt to ", ranks_, " ranks in turn");
    if (ranks_ * tokens > trace_.rows) text += cat("; repeated, because ", ranks_ * tokens, " are needed");
    text += ")";
  }
  if (spec_.kind == RoutingKind::kNodeLimited) text += cat(" of ", groupStart_.size() - 1, " groups of experts");
  return text;
}

}  // namespace moe::perf

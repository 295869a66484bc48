// SPDX-License-Identifier: Apache-2.0
// Situations that went wrong for users of libraries that do the same job; ../field_cases.md has the list. Shapes are
// theirs, made smaller. Experts return their tokens, so that what must come back is weight times token.
#include "conformance/cases.h"

namespace moetest {
namespace {

// Small integers, so that sums of up to eight rows are exact in bf16.
void countingTokens(Call& call, const moeConfig_t& config) {
  for (size_t rank = 0; rank < call.ranks.size(); ++rank) {
    auto& sent = call.ranks[rank].sent;
    for (int64_t t = 0; t < sent.numTokens; ++t) {
      for (int64_t h = 0; h < config.hidden; ++h) {
        auto value = static_cast<float>((131 * static_cast<int64_t>(rank) + 7 * t + h) % 64 - 32);
        storeElement(config.dtype, sent.rows[0].data(), t * config.hidden + h, value);
      }
    }
    std::fill(sent.weights.begin(), sent.weights.end(), 1.0f);
  }
}

Plan identity(const std::string& name, int ranks, int64_t tokens, int64_t hidden, int64_t experts, int32_t topk) {
  Plan plan(name, ranks, tokens, hidden, experts, topk);
  plan.experts = Experts::kIdentity;
  plan.adjust = [config = plan.config](Call& call, int) { countingTokens(call, config); };
  return plan;
}

void addPadding(Cases& cases) {
  Plan half = identity("field_half_padding", 4, 128, 32, 16, 8);
  half.router = [](Random& random, int rank, int64_t token, int k) -> int64_t {
    return rank > 0 && token >= 64 ? -1 : (random.between(0, 1) * 8 + k) % 16;
  };
  add(cases, half);

  Plan rows = identity("field_masked_rows", 2, 3, 16, 8, 4);
  rows.router = [](Random&, int, int64_t token, int k) -> int64_t {
    static constexpr int64_t kIds[3][4] = {{0, -1, 5, -1}, {-1, -1, -1, -1}, {7, -1, -1, -1}};
    return kIds[token][k];
  };
  add(cases, rows, Cost::kSmall, true);

  Plan room = identity("field_receive_area_larger_than_used", 2, 16, 16, 4, 2);
  room.tokens = [](int, int) { return 3; };
  add(cases, room);

  Plan sole = identity("field_one_sender_two_experts_each", 4, 64, 256, 256, 2);
  sole.router = [](Random&, int rank, int64_t, int k) -> int64_t { return rank == 0 ? k : -1; };
  sole.calls = 20;
  add(cases, sole, Cost::kBig, true);
}

void addUneven(Cases& cases) {
  Plan bound = identity("field_receive_bound_of_all_ranks", 4, 512, 16, 8, 2);
  bound.tokens = [](int rank, int) -> int64_t { return rank == 0 ? 1 : 512; };
  bound.router = [](Random&, int, int64_t, int k) -> int64_t { return k; };
  add(cases, bound, Cost::kBig);
  bound.name = "field_receive_bound_of_all_ranks_by_expert";
  add(cases, bound.with([](moeConfig_t& c) { c.layout = moeLayoutExpert; }), Cost::kBig);

  Plan six = identity("field_seventy_two_expert_rows", 4, 4, 16, 24, 6);
  six.with([](moeConfig_t& c) { c.layout = moeLayoutExpert; });
  six.calls = 12;
  six.tokens = [](int rank, int call) -> int64_t { return rank == 0 || (call > 0 && call < 11) ? 0 : 4; };
  six.router = [](Random&, int, int64_t, int k) -> int64_t { return k; };
  add(cases, six, Cost::kSmall, true);

  Plan chunked = identity("field_empty_second_chunk", 8, 2048, 16, 16, 2);
  chunked.tokens = [](int rank, int call) -> int64_t { return rank == 0 ? 2048 : call == 0 ? 1 : 0; };
  add(cases, chunked, Cost::kBig);

  Plan tiny = identity("field_one_token_bound", 2, 1, 32, 4, 1);
  tiny.calls = 100;
  tiny.tokens = [](int rank, int call) -> int64_t { return (call + rank) % 3 ? 1 : 0; };
  add(cases, tiny, Cost::kSmall, true);

  Plan sparse = identity("field_one_rank_has_work", 2, 4, 32, 4, 2);
  sparse.calls = 100;
  sparse.tokens = [](int rank, int) -> int64_t { return rank == 0 ? 1 : 0; };
  add(cases, sparse);

  Plan idle = identity("field_rank_without_received_rows", 2, 8, 32, 4, 2);
  idle.router = [](Random&, int, int64_t, int k) -> int64_t { return k; };
  idle.weights = true;
  add(cases, idle);

  // All tokens to rank 0, then the same routing with new tokens: no rows for rank 1 in any of the four directions.
  Plan reuse = identity("field_no_rows_and_reuse", 2, 8, 32, 4, 2);
  reuse.router = idle.router;
  reuse.adjust = [config = reuse.config](Call& call, int number) {
    countingTokens(call, config);
    call.reuseRouting = number > 0;
  };
  add(cases, reuse);

  Plan once = identity("field_two_experts_of_one_rank", 2, 1, 16, 4, 2);
  once.router = [](Random&, int, int64_t, int k) -> int64_t { return k; };
  add(cases, once);
  once.name = "field_two_experts_of_one_rank_by_expert";
  add(cases, once.with([](moeConfig_t& c) { c.layout = moeLayoutExpert; }));
}

void addRepetition(Cases& cases) {
  Plan loop("field_reused_buffers", 4, 64, 64, 16, 2);
  loop.calls = 120;
  add(cases, loop, Cost::kBig, true);
  Plan full = identity("field_full_load", 8, 32, 256, 64, 8);
  full.calls = 6;
  add(cases, full, Cost::kBig);
  Plan large = identity("field_full_load_long", 8, 256, 7168, 256, 8);
  large.calls = 4;
  add(cases, large, Cost::kLong);
  Plan sole = identity("field_one_sender_long", 4, 1024, 7168, 256, 2);
  sole.router = [](Random&, int rank, int64_t, int k) -> int64_t { return rank == 0 ? k : -1; };
  sole.calls = 4;
  add(cases, sole, Cost::kLong);
}

// One rank runs ahead and the other is slow to read: nothing that it has not read may be overwritten. No combine makes
// the fast one wait.
void addSlowReader(Cases& cases) {
  constexpr auto kBehind = std::chrono::milliseconds(50);
  Plan halves("field_slow_reader_of_halves", 2, 64, 64, 8, 2);
  halves.handles = 2;
  halves.steps = {{Step::kSend, 0, 0}, {Step::kSend, 1, 1}};
  for (int call = 0; call < 6; ++call) {
    halves.steps.push_back({Step::kWait, call, call % 2});
    if (call < 4) halves.steps.push_back({Step::kSend, call + 2, call % 2});
  }
  halves.pause = [=](int rank, const Step& step) {
    return rank == 1 && step.kind == Step::kWait ? kBehind : std::chrono::milliseconds(0);
  };
  add(cases, halves, Cost::kSmall, true);

  Plan views("field_slow_reader_of_views", 2, 64, 64, 8, 2);
  views.handles = 2;
  views.adjust = [](Call& call, int) {
    for (RankCall& rank : call.ranks) rank.views = true;
  };
  views.steps = {{Step::kDispatch, 0, 0}};
  for (int call = 1; call < 6; ++call) {
    views.steps.push_back({Step::kDispatch, call, call % 2});
    views.steps.push_back({Step::kLook, call - 1, (call - 1) % 2});
  }
  views.pause = [=](int rank, const Step& step) {
    return rank == 1 && step.kind == Step::kLook ? kBehind : std::chrono::milliseconds(0);
  };
  add(cases, views, Cost::kSmall, true);
}

// Eight rows that differ by eight powers of two: wrong with a narrow accumulator.
void addPrecision(Cases& cases) {
  Plan plan("field_sum_of_large_and_small", 8, 2, 16, 8, 8);
  plan.experts = Experts::kIdentity;
  plan.router = [](Random&, int, int64_t, int k) -> int64_t { return k; };
  plan.adjust = [config = plan.config](Call& call, int) {
    countingTokens(call, config);
    for (RankCall& rank : call.ranks) {
      for (size_t i = 0; i < rank.sent.weights.size(); ++i) {
        rank.sent.weights[i] = (i % 8 == 0 ? 256.0f : 1.0f) * (0.125f + (i % 2 ? 0x1p-10f : -0x1p-10f));
      }
    }
  };
  add(cases, plan.with([](moeConfig_t& c) { c.layout = moeLayoutExpert; }));
}

}  // namespace

void addFieldCases(Cases& cases) {
  addPadding(cases);
  addUneven(cases);
  addRepetition(cases);
  addSlowReader(cases);
  addPrecision(cases);
}

}  // namespace moetest

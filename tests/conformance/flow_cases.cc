// SPDX-License-Identifier: Apache-2.0
// Sizes that change, ranks with nothing to do, several handles, repeated dispatches and combines.
#include "conformance/cases.h"

namespace moetest {
namespace {

void silence(RankCall* rank) {
  rank->sent.numTokens = 0;
  rank->sent.topk = 0;
  rank->sent.ids.clear();
  rank->sent.weights.clear();
  for (auto& rows : rank->sent.rows) rows.clear();
  rank->nullPointers = true;
}

void addEmpty(Cases& cases) {
  for (int layout : {moeLayoutRank, moeLayoutExpert, moeLayoutExpertPadded}) {
    std::string suffix = "_layout_" + std::to_string(layout);
    auto with = [layout](moeConfig_t& c) { c.layout = layout; };
    Plan idle("idle_rank_null_pointers" + suffix, 4, 8, 32, 8, 2);
    idle.router = [](Random& random, int, int64_t, int) { return random.pick<int64_t>({0, 1, 2, 3, 6, 7}); };
    idle.adjust = [](Call& call, int) { silence(&call.ranks[1]); };
    add(cases, idle.with(with), Cost::kSmall, layout == 0);

    Plan nobody("nobody_sends" + suffix, 3, 8, 16, 6, 2);
    nobody.calls = 4;
    nobody.adjust = [](Call& call, int number) {
      for (RankCall& rank : call.ranks) {
        if (number < 3) silence(&rank);
      }
    };
    add(cases, nobody.with(with));

    Plan masked("only_masked_ids" + suffix, 3, 8, 16, 6, 2);
    masked.router = [](Random&, int rank, int64_t, int k) -> int64_t { return rank == 1 ? k : -1; };
    add(cases, masked.with(with));
  }
  Plan zeros("random_zeros", 4, 12, 8, 8, 2);
  zeros.calls = 150;
  zeros.tokens = [](int rank, int call) -> int64_t {
    Random random(static_cast<uint64_t>(call * 4 + rank));
    return random.oneIn(2) ? 0 : random.between(0, 12);
  };
  // Zero row, zero column and zero diagonal of the send matrix, by turns.
  zeros.router = [](Random& random, int rank, int64_t, int) -> int64_t {
    int64_t owner = random.between(0, 3);
    return owner == rank || owner == 2 ? -1 : 2 * owner + random.between(0, 1);
  };
  add(cases, zeros, Cost::kBig, true);
}

void addChanging(Cases& cases) {
  Plan sizes("sizes_change_every_call", 4, 256, 48, 16, 2);
  sizes.calls = 18;
  sizes.tokens = [](int rank, int call) -> int64_t {
    static constexpr int64_t kTokens[] = {256, 1, 2, 256, 8, 1};
    return std::min<int64_t>(256, kTokens[call % 6] + (kTokens[call % 6] < 256 ? rank : 0));
  };
  add(cases, sizes, Cost::kBig, true);

  Plan chunks("sizes_around_a_chunk", 3, 200, 16, 6, 2);
  chunks.calls = 12;
  chunks.tokens = [](int rank, int call) -> int64_t {
    static constexpr int64_t kTokens[] = {63, 64, 65, 127, 128, 129, 1, 192, 193, 200, 0, 3};
    return kTokens[(call + 5 * rank) % 12];
  };
  add(cases, chunks);
  chunks.name = "sizes_around_a_chunk_by_expert";
  add(cases, chunks.with([](moeConfig_t& c) { c.layout = moeLayoutExpert; }));

  Plan topk("topk_changes_and_differs", 3, 12, 24, 9, 8);
  topk.calls = 9;
  topk.topk = [](int rank, int call) { return (rank * 3 + call) % 9; };
  add(cases, topk);
  topk.name = "topk_changes_and_differs_by_expert";
  add(cases, topk.with([](moeConfig_t& c) { c.layout = moeLayoutExpert; }), Cost::kSmall, true);

  Plan uneven("uneven_counts", 4, 1000, 16, 8, 2);
  uneven.calls = 4;
  uneven.tokens = [](int rank, int call) -> int64_t {
    static constexpr int64_t kTokens[4][4] = {{10, 20, 30, 40}, {400, 1, 1, 1}, {0, 0, 0, 5}, {1000, 1000, 1000, 1000}};
    return kTokens[call][rank];
  };
  add(cases, uneven, Cost::kBig, true);
}

// With one or two SMs the same blocks send and receive, and in a half they do one of the two.
void addFewSms(Cases& cases) {
  for (int sms : {1, 2, 3}) {
    for (int layout : {moeLayoutRank, moeLayoutExpert}) {
      Plan few("sms_" + std::to_string(sms) + "_layout_" + std::to_string(layout), 2, 70, 32, 6, 2);
      for (int call = 0; call < 3; ++call) {
        few.steps.push_back({call == 1 ? Step::kDispatch : Step::kSend, call});
        if (call != 1) few.steps.push_back({Step::kWait, call});
        few.steps.push_back({Step::kCombine, call});
      }
      add(cases, few.with([sms, layout](moeConfig_t& c) {
        c.numSms = sms;
        c.layout = layout;
      }));
    }
  }
}

void addHandles(Cases& cases) {
  for (int layout : {moeLayoutRank, moeLayoutExpert}) {
    std::string suffix = layout ? "_by_expert" : "";
    auto with = [layout](moeConfig_t& c) { c.layout = layout; };
    Plan twice("combine_twice" + suffix, 3, 10, 32, 6, 2);
    twice.steps = {{Step::kDispatch, 0},      {Step::kCombine, 0, 0, 0}, {Step::kCombine, 0, 0, 1},
                   {Step::kCombine, 0, 0, 2}, {Step::kDispatch, 1},      {Step::kCombine, 1, 0, 3},
                   {Step::kCombine, 1, 0, 3}};
    add(cases, twice.with(with), Cost::kSmall, layout == 0);

    Plan live("two_live_handles" + suffix, 3, 10, 32, 6, 2);
    live.handles = 2;
    for (int pair = 0; pair < 4; ++pair) {
      int first = 2 * pair, second = first + 1;
      live.steps.push_back({Step::kDispatch, first, 0});
      live.steps.push_back({Step::kDispatch, second, 1});
      live.steps.push_back({Step::kCombine, pair % 2 ? first : second, pair % 2 ? 0 : 1});
      live.steps.push_back({Step::kCombine, pair % 2 ? second : first, pair % 2 ? 1 : 0});
    }
    add(cases, live.with(with));

    // The old handle's combine comes after more dispatches than there are buffers.
    Plan old("old_handle" + suffix, 2, 10, 16, 4, 2);
    old.handles = 2;
    old.steps.push_back({Step::kDispatch, 0, 0});
    for (int call = 1; call < 8; ++call) old.steps.push_back({Step::kDispatch, call, 1});
    old.steps.push_back({Step::kCombine, 0, 0});
    old.steps.push_back({Step::kCombine, 7, 1});
    add(cases, old.with(with));

    // Calls 1 and 2 repeat the routing of call 0 with other tokens.
    Plan reuse("reuse_routing" + suffix, 3, 10, 32, 6, 3);
    reuse.tokens = [](int rank, int) { return 4 + 3 * rank; };
    reuse.router = [](Random&, int rank, int64_t token, int k) { return (rank * 5 + token * 3 + 2 * k) % 7 - 1; };
    reuse.adjust = [](Call& call, int number) {
      for (RankCall& rank : call.ranks) {
        for (size_t i = 0; i < rank.sent.weights.size(); ++i) {
          rank.sent.weights[i] = 0.25f + static_cast<float>(i) * 0.0625f;
        }
      }
      call.reuseRouting = number > 0;
    };
    reuse.steps = {{Step::kDispatch, 0}, {Step::kCombine, 0}, {Step::kDispatch, 1},
                   {Step::kDispatch, 2}, {Step::kCombine, 2}, {Step::kCombine, 2, 0, 1}};
    add(cases, reuse.with(with), Cost::kSmall, layout == 1);
  }
  Plan few("only_rows_asked", 3, 10, 32, 6, 2);
  few.adjust = [](Call& call, int) {
    for (RankCall& rank : call.ranks) rank.onlyRows = true;
  };
  add(cases, few);
  few.name = "only_rows_asked_by_expert";
  add(cases, few.with([](moeConfig_t& c) { c.layout = moeLayoutExpert; }));
  Plan buffers("eight_buffers", 2, 6, 16, 4, 2);
  buffers.calls = 20;
  add(cases, buffers.with([](moeConfig_t& c) { c.buffers = 8; }));
}

}  // namespace

void addFlowCases(Cases& cases) {
  addEmpty(cases);
  addChanging(cases);
  addFewSms(cases);
  addHandles(cases);
}

}  // namespace moetest

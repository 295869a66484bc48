// SPDX-License-Identifier: Apache-2.0
// Layouts, alignment, budgets, views and exact sizes.
#include "conformance/cases.h"

namespace moetest {
namespace {

std::string numbered(const std::string& what, int64_t number) { return what + "_" + std::to_string(number); }

void addAlignment(Cases& cases) {
  for (int64_t align : {1, 16, 128}) {
    Plan plan(numbered("align", align), 3, 20, 32, 10, 3);
    plan.with([align](moeConfig_t& c) {
      c.layout = moeLayoutExpert;
      c.expertAlign = align;
      c.numSideRows = 1;
      c.sideRowBytes[0] = 12;
    });
    add(cases, plan, Cost::kSmall, align == 128);
  }
  Plan gaps("align_with_idle_experts", 2, 6, 16, 32, 2);
  gaps.router = [](Random&, int rank, int64_t token, int k) { return (rank + token) % 3 * 7 + k * 11; };
  add(cases, gaps.with([](moeConfig_t& c) {
    c.layout = moeLayoutExpert;
    c.expertAlign = 16;
  }));
  for (int64_t capacity : {0, 24, 96}) {
    Plan plan(numbered("padded_capacity", capacity), 3, 12, 24, 5, 2);
    plan.with([capacity](moeConfig_t& c) {
      c.layout = moeLayoutExpertPadded;
      c.capacity = capacity;
    });
    add(cases, plan, Cost::kSmall, capacity == 24);
  }
  Plan overflow("padded_overflow", 3, 16, 24, 4, 2);
  overflow.router = [](Random& random, int, int64_t, int k) { return k == 0 ? 1 : random.between(0, 3); };
  add(cases, overflow.with([](moeConfig_t& c) {
    c.layout = moeLayoutExpertPadded;
    c.capacity = 11;
  }));
}

// Four ranks of 64 tokens; the first `rows` of them go to rank 0.
Plan budgetPlan(const std::string& name, int layout, int64_t rows, int64_t capacity) {
  Plan plan(name, 4, 64, 24, 8, 2);
  plan.config.layout = layout;
  plan.router = [rows](Random&, int rank, int64_t token, int k) {
    return rank * 64 + token < rows && k == 0 ? (rank + token) % 2 : 2 + rank + k;
  };
  plan.adjust = [capacity](Call& call, int) { call.ranks[0].capacity = capacity; };
  return plan;
}

void addBudgets(Cases& cases) {
  for (int layout : {moeLayoutRank, moeLayoutExpert}) {
    for (int64_t rows : {127, 128, 129, 250}) {
      std::string name = numbered(layout ? "budget_by_expert" : "budget", rows);
      add(cases, budgetPlan(name, layout, rows, 128), Cost::kSmall, rows == 129);
    }
  }
  for (int64_t capacity : {1, 15, 16, 17, 100, 127}) {
    Plan plan = budgetPlan(numbered("budget_aligned", capacity), moeLayoutExpert, 120, capacity);
    add(cases, plan.with([](moeConfig_t& c) { c.expertAlign = 16; }));
  }
  Plan larger = budgetPlan("capacity_above_the_worst_case", moeLayoutExpert, 100, 1000);
  add(cases, larger);
}

void addViews(Cases& cases) {
  for (int ranks : {1, 2, 5}) {
    Plan plan(numbered("views", ranks), ranks, 17, 40, 3 * ranks, 2);
    plan.calls = 5;
    plan.tokens = [](int rank, int call) { return (rank * 5 + call * 7) % 18; };
    plan.adjust = [](Call& call, int) {
      for (RankCall& rank : call.ranks) rank.views = true;
    };
    add(cases, plan.with([](moeConfig_t& c) {
      c.numSideRows = 1;
      c.sideRowBytes[0] = 9;
    }),
        Cost::kSmall, ranks == 2);
  }
  Plan mixed("views_on_some_ranks", 4, 12, 33, 8, 2);
  mixed.calls = 6;
  mixed.adjust = [](Call& call, int number) {
    for (size_t rank = 0; rank < call.ranks.size(); ++rank) {
      call.ranks[rank].views = (rank + static_cast<size_t>(number)) % 2 == 0;
    }
  };
  add(cases, mixed);
  Plan two("views_of_two_handles", 3, 12, 32, 6, 2);
  two.handles = 2;
  two.adjust = mixed.adjust;
  two.steps = {{Step::kDispatch, 0, 0}, {Step::kDispatch, 1, 1}, {Step::kCombine, 0, 0}, {Step::kCombine, 1, 1},
               {Step::kDispatch, 2, 1}, {Step::kDispatch, 3, 0}, {Step::kCombine, 3, 0}, {Step::kCombine, 2, 1}};
  add(cases, two);
}

void addHalves(Cases& cases) {
  for (int layout : {moeLayoutRank, moeLayoutExpert, moeLayoutExpertPadded}) {
    for (int exact : {0, 1}) {
      Plan plan(numbered(exact ? "exact_sizes" : "halves", layout), 4, 20, 32, 10, 2);
      plan.with([layout](moeConfig_t& c) {
        c.layout = layout;
        if (layout == moeLayoutExpert) c.expertAlign = 8;
      });
      plan.tokens = [](int rank, int call) { return (rank * 9 + call * 13) % 21; };
      plan.adjust = [exact](Call& call, int) {
        for (RankCall& rank : call.ranks) rank.exactSizes = exact != 0;
      };
      for (int call = 0; call < 3; ++call) {
        plan.steps.push_back({Step::kSend, call});
        plan.steps.push_back({Step::kWait, call});
        plan.steps.push_back({Step::kCombine, call});
      }
      add(cases, plan, Cost::kSmall, layout == moeLayoutExpert);
    }
  }
  Plan pipelined("halves_two_in_flight", 3, 16, 32, 9, 2);
  pipelined.handles = 2;
  pipelined.steps.push_back({Step::kSend, 0, 0});
  for (int call = 1; call < 6; ++call) {
    pipelined.steps.push_back({Step::kSend, call, call % 2});
    pipelined.steps.push_back({Step::kWait, call - 1, (call - 1) % 2});
    pipelined.steps.push_back({Step::kCombine, call - 1, (call - 1) % 2});
  }
  pipelined.steps.push_back({Step::kWait, 5, 1});
  pipelined.steps.push_back({Step::kCombine, 5, 1});
  add(cases, pipelined, Cost::kSmall, true);
  Plan deep("halves_four_buffers_any_order", 2, 8, 16, 4, 2);
  deep.handles = 4;
  deep.with([](moeConfig_t& c) { c.buffers = 4; });
  for (int round = 0; round < 3; ++round) {
    for (int h = 0; h < 4; ++h) deep.steps.push_back({Step::kSend, round * 4 + h, h});
    for (int h : {1, 3, 0, 2}) deep.steps.push_back({Step::kWait, round * 4 + h, h});
    for (int h : {2, 0, 3, 1}) deep.steps.push_back({Step::kCombine, round * 4 + h, h});
  }
  add(cases, deep);
  Plan views("halves_with_views", 3, 9, 16, 6, 2);
  views.adjust = [](Call& call, int) {
    for (RankCall& rank : call.ranks) rank.views = true;
  };
  views.steps = {{Step::kSend, 0}, {Step::kWait, 0}, {Step::kCombine, 0},
                 {Step::kSend, 1}, {Step::kWait, 1}, {Step::kCombine, 1}};
  add(cases, views);
}

}  // namespace

void addLayoutCases(Cases& cases) {
  addAlignment(cases);
  addBudgets(cases);
  addViews(cases);
  addHalves(cases);
}

}  // namespace moetest

// SPDX-License-Identifier: Apache-2.0
// Numbers of ranks, hidden sizes, top-k, experts: no size is special.
#include "conformance/cases.h"

namespace moetest {
namespace {

std::string numbered(const std::string& what, int64_t number) { return what + "_" + std::to_string(number); }

void addRanks(Cases& cases) {
  for (int ranks : {1, 2, 3, 4, 5, 6, 7, 8, 16}) {
    Plan plan(numbered("ranks", ranks), ranks, 16, 64, 6 * ranks, 2);
    add(cases, plan, ranks > 8 ? Cost::kBig : Cost::kSmall, ranks == 1 || ranks == 3 || ranks == 6);
    plan.name = numbered("ranks_by_expert", ranks);
    add(cases, plan.with([](moeConfig_t& c) { c.layout = moeLayoutExpert; }), Cost::kBig);
  }
}

void addHidden(Cases& cases) {
  for (int64_t hidden : {1, 16, 120, 136, 640, 1536, 2048, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192}) {
    Plan plan(numbered("hidden", hidden), 2, 5, hidden, 8, 2);
    add(cases, plan, hidden <= 136 || hidden == 2880 ? Cost::kSmall : Cost::kBig);
    plan.name = numbered("hidden_by_expert", hidden);
    plan.with([](moeConfig_t& c) { c.layout = moeLayoutExpert; });
    add(cases, plan, Cost::kBig);
  }
  Plan plan("hidden_2880_four_ranks", 4, 16, 2880, 8, 2);
  add(cases, plan, Cost::kBig, true);
}

void addTopk(Cases& cases) {
  for (int k : {1, 2, 4, 8, 9, 10, 12, 16, 64}) {
    Plan plan(numbered("topk", k), 2, 4, 32, 896, k);
    add(cases, plan, Cost::kSmall);
    plan.name = numbered("topk_by_expert", k);
    add(cases, plan.with([](moeConfig_t& c) { c.layout = moeLayoutExpert; }), Cost::kSmall);
    plan.name = numbered("topk_of_eight_ranks", k);
    plan.nranks = 8;
    add(cases, plan, Cost::kBig);
  }
  Plan wide("topk_16_hidden_3584", 2, 4, 3584, 896, 16);
  add(cases, wide.with([](moeConfig_t& c) { c.layout = moeLayoutExpert; }), Cost::kBig);
}

void addExperts(Cases& cases) {
  for (int layout : {moeLayoutRank, moeLayoutExpert, moeLayoutExpertPadded}) {
    auto named = [layout](const char* name) { return numbered(name, layout); };
    auto with = [layout](moeConfig_t& c) { c.layout = layout; };
    add(cases, Plan(named("experts_do_not_divide"), 3, 16, 32, 256, 8).with(with), Cost::kSmall);
    add(cases, Plan(named("ranks_without_experts"), 4, 8, 16, 2, 2).with(with), Cost::kSmall, layout == 0);
    add(cases, Plan(named("one_expert_of_three_ranks"), 3, 8, 16, 1, 1).with(with), Cost::kSmall);
    for (int64_t perRank : {17, 33, 256}) {
      Plan last(named(("last_expert_of_" + std::to_string(perRank)).c_str()), 2, 8, 128, 2 * perRank, 2);
      last.router = [perRank](Random&, int, int64_t, int k) { return (k + 1) * perRank - 1; };
      add(cases, last.with(with), Cost::kSmall);
    }
    Plan one(named("all_to_one_expert"), 4, 32, 48, 8, 2);
    one.router = [](Random&, int, int64_t, int k) -> int64_t { return k == 0 ? 5 : -1; };
    add(cases, one.with(with), Cost::kSmall);
  }
}

}  // namespace

void addShapeCases(Cases& cases) {
  addRanks(cases);
  addHidden(cases);
  addTopk(cases);
  addExperts(cases);
}

}  // namespace moetest

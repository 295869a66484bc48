// SPDX-License-Identifier: Apache-2.0
// Every scenario, in every way in which ranks exist: all that comes out equals the reference bit for bit.
#include <gtest/gtest.h>

#include <ostream>

#include "conformance/cases.h"
#include "conformance/rank_process.h"
#include "conformance/world.h"

namespace moetest {
namespace {

struct Setup {
  std::string scenario;
  Way way;
  const Backend* backend;
};

void PrintTo(const Setup& setup, std::ostream* out) { *out << setup.scenario << " " << wayName(setup.way); }

std::string setupName(const testing::TestParamInfo<Setup>& info) {
  return info.param.scenario + "_" + wayName(info.param.way) + "_" + info.param.backend->name;
}

std::vector<Setup> setups(Cost cost, bool processes) {
  std::vector<Setup> all;
  int turn = 0;
  for (const Case& one : allCases()) {
    if (one.cost != cost) continue;
    if (processes) {
      if (one.processes) all.push_back({one.name, Way::kProcesses, &hostBackend()});
      continue;
    }
    if (cost != Cost::kLong) all.push_back({one.name, Way::kGroup, &hostBackend()});
    all.push_back({one.name, ++turn % 3 ? Way::kCallbacks : Way::kThreads, &hostBackend()});
  }
  return all;
}

void runSetup(const Setup& setup) {
  const Case* found = findCase(setup.scenario);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(runScenario(found->make(), setup.way, *setup.backend), "");
}

class Exact : public testing::TestWithParam<Setup> {};

TEST_P(Exact, Rows) { runSetup(GetParam()); }

// The prefix says what a filter for a sanitizer wants to know.
INSTANTIATE_TEST_SUITE_P(ThreadRanks, Exact, testing::ValuesIn(setups(Cost::kSmall, false)), setupName);
INSTANTIATE_TEST_SUITE_P(BigThreads, Exact, testing::ValuesIn(setups(Cost::kBig, false)), setupName);
INSTANTIATE_TEST_SUITE_P(ProcessRanks, Exact, testing::ValuesIn(setups(Cost::kSmall, true)), setupName);
INSTANTIATE_TEST_SUITE_P(BigProcesses, Exact, testing::ValuesIn(setups(Cost::kBig, true)), setupName);

class Large : public testing::TestWithParam<Setup> {};

TEST_P(Large, Rows_long) { runSetup(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Threads, Large, testing::ValuesIn(setups(Cost::kLong, false)), setupName);

const RankProgramEntry kScenario("scenario", [](RankContext& context) {
  const Case* found = findCase(context.arguments.at(0));
  if (!found) return 2;
  return runScenarioRank(found->make(), context, hostBackend());
});

}  // namespace
}  // namespace moetest

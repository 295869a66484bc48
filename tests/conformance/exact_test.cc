// SPDX-License-Identifier: Apache-2.0
// Every scenario, in every way in which ranks exist: all that comes out equals the reference bit for bit.
#include <gtest/gtest.h>

#include <ostream>

#include "conformance/cases.h"
#include "conformance/on_backend.h"
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
  return info.param.scenario + "_" + wayName(info.param.way) + "_" + info.param.backend->name();
}

std::vector<Setup> setups(Cost cost, bool processes) {
  std::vector<Setup> all;
  int turn = 0;
  for (const Case& one : allCases()) {
    if (one.cost != cost || one.onlyGpus) continue;
    if (processes) {
      if (one.processes) all.push_back({one.name, Way::kProcesses, &hostBackend()});
      continue;
    }
    if (cost != Cost::kLong) all.push_back({one.name, Way::kGroup, &hostBackend()});
    all.push_back({one.name, ++turn % 3 ? Way::kCallbacks : Way::kThreads, &hostBackend()});
  }
  return all;
}

// A process is too slow to begin on a GPU for one test each, so that here they are kept: all cases of two ranks.
std::vector<Setup> gpuSetups(Way way, bool longOnes = false) {
  std::vector<Setup> all;
  for (const Backend* backend : cudaBackends()) {
    bool one = backend == cudaBackends().front();
    if (one ? way == Way::kProcesses : way == Way::kGroup) continue;
    for (const Case& known : allCases()) {
      if ((known.cost == Cost::kLong) != longOnes) continue;
      int nranks = known.nranks;
      if (way == Way::kProcesses && nranks != 2) continue;
      if (way == Way::kGroup && !known.processes) continue;
      if (!one && nranks == 1) continue;
      all.push_back({known.name, way, backend});
    }
  }
  return all;
}

void runSetup(const Setup& setup) {
  const Case* found = findCase(setup.scenario);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(runScenario(found->make(), setup.way, *setup.backend), "");
}

class Exact : public OnBackend<Setup> {};

TEST_P(Exact, Rows) { runSetup(GetParam()); }

// The prefix says what a filter for a sanitizer wants to know.
INSTANTIATE_TEST_SUITE_P(ThreadRanks, Exact, testing::ValuesIn(setups(Cost::kSmall, false)), setupName);
INSTANTIATE_TEST_SUITE_P(BigThreads, Exact, testing::ValuesIn(setups(Cost::kBig, false)), setupName);
INSTANTIATE_TEST_SUITE_P(ProcessRanks, Exact, testing::ValuesIn(setups(Cost::kSmall, true)), setupName);
INSTANTIATE_TEST_SUITE_P(BigProcesses, Exact, testing::ValuesIn(setups(Cost::kBig, true)), setupName);
INSTANTIATE_TEST_SUITE_P(GpuThreads, Exact, testing::ValuesIn(gpuSetups(Way::kThreads)), setupName);
INSTANTIATE_TEST_SUITE_P(GpuGroup, Exact, testing::ValuesIn(gpuSetups(Way::kGroup)), setupName);
INSTANTIATE_TEST_SUITE_P(GpuProcesses, Exact, testing::ValuesIn(gpuSetups(Way::kProcesses)), setupName);

class Large : public OnBackend<Setup> {};

TEST_P(Large, Rows_long) { runSetup(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Threads, Large, testing::ValuesIn(setups(Cost::kLong, false)), setupName);
INSTANTIATE_TEST_SUITE_P(GpuThreads, Large, testing::ValuesIn(gpuSetups(Way::kThreads, true)), setupName);

std::string oneLine(std::string text) {
  for (char& c : text) c = c == '\n' ? ' ' : c;
  return text;
}

std::string runNamed(const std::string& name, RankContext& context, const Backend* backend) {
  const Case* found = findCase(name);
  if (!found || !backend) return "no scenario " + name + ", or no such backend";
  return runScenarioRank(found->make(), context, *backend);
}

// scenario BACKEND NAME: one and out.
const RankProgramEntry kScenario("scenario", [](RankContext& context) {
  std::string wrong = runNamed(context.arguments.at(1), context, findBackend(context.arguments.at(0)));
  if (wrong.empty()) return 0;
  context.parent.tell(wrong);
  return 1;
});

// scenarios BACKEND: whichever the parent names, until it is gone.
const RankProgramEntry kScenarios("scenarios", [](RankContext& context) {
  constexpr milliseconds kIdle(600000);
  while (auto name = context.parent.hear(kIdle)) {
    std::string wrong = runNamed(*name, context, findBackend(context.arguments.at(0)));
    context.parent.tell(wrong.empty() ? "fine" : oneLine(wrong));
  }
  return 0;
});

}  // namespace
}  // namespace moetest

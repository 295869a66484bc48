// SPDX-License-Identifier: Apache-2.0
// Random shapes, routings and orders of calls, from seeds. A failure prints its seed: run it again with
// MOECL_TEST_SEED=<seed> and --gtest_filter=*Property*.
#include <gtest/gtest.h>

#include <cstdlib>

#include "conformance/on_backend.h"
#include "conformance/world.h"

namespace moetest {
namespace {

moeConfig_t randomConfig(Random& random, int nranks) {
  moeConfig_t config = MOE_CONFIG_INIT;
  config.maxTokensPerRank = random.oneIn(8) ? random.between(60, 300) : random.between(1, 24);
  config.hidden = random.pick<int64_t>({1, 2, 3, 7, 8, 16, 31, 64, 120, 129, 200});
  config.numExperts = random.oneIn(4) ? random.between(1, nranks) : random.between(1, 5 * nranks);
  config.maxTopk = static_cast<int32_t>(random.pick<int64_t>({1, 2, 2, 3, 4, 8, 9, 17, 64}));
  config.dtype = random.pick({0, 1, 2, 3});
  config.combineDtype = random.pick({0, 1, 2});
  config.layout = random.pick({0, 1, 2});
  config.localIds = random.pick({0, 1});
  config.buffers = random.pick({0, 2, 3, 8});
  config.timeoutMs = 30000;
  if (config.layout == moeLayoutExpert) config.expertAlign = random.pick<int64_t>({0, 1, 2, 7, 16, 128});
  if (config.layout == moeLayoutExpertPadded && random.oneIn(2)) {
    config.capacity = random.between(1, nranks * config.maxTokensPerRank);
  }
  config.numSideRows = random.pick({0, 0, 1, 2, 4});
  for (int i = 0; i < config.numSideRows; ++i) config.sideRowBytes[i] = random.between(1, 70);
  return config;
}

int64_t randomId(Random& random, const moeConfig_t& config, int mood) {
  switch (mood) {
    case 0: return random.between(0, config.numExperts - 1);                        // duplicates as they come
    case 1: return random.between(-2, config.numExperts + 1);                       // and nobody
    case 2: return std::min<int64_t>(random.between(0, 1), config.numExperts - 1);  // a hot spot
    case 3: return -1;
    default: return random.oneIn(3) ? -1 : random.between(0, config.numExperts - 1);
  }
}

RankCall randomRankCall(Random& random, const reference::Shape& shape, bool halves, bool views) {
  const moeConfig_t& config = shape.config;
  RankCall call;
  call.sent.numTokens = random.oneIn(5) ? 0 : random.between(0, config.maxTokensPerRank);
  call.sent.topk = random.oneIn(3) ? static_cast<int32_t>(random.between(0, config.maxTopk)) : config.maxTopk;
  int mood = static_cast<int>(random.between(0, 4));
  for (int64_t i = 0; i < call.sent.numTokens * call.sent.topk; ++i) {
    call.sent.ids.push_back(randomId(random, config, mood));
  }
  if (!random.oneIn(5)) {
    for (size_t i = 0; i < call.sent.ids.size(); ++i) call.sent.weights.push_back(random.unit() - 0.25f);
  }
  fillRows(shape, random, &call.sent);
  call.idType = random.pick({moeInt32, moeInt64});
  call.receivedIdType = random.pick({moeInt32, moeInt64});
  call.inputGap = random.pick<int64_t>({0, 0, 1, 8});
  call.outputGap = random.pick<int64_t>({0, 0, 1, 8});
  call.misalign = random.pick<int64_t>({0, 0, 1, 4});
  call.nullPointers = random.oneIn(2);
  call.onlyRows = random.oneIn(8);
  bool canView = views && config.layout == moeLayoutRank && config.dtype == config.combineDtype;
  call.views = canView && random.oneIn(3);
  call.exactSizes = halves && !call.views && random.oneIn(2);
  if (config.layout != moeLayoutExpertPadded && !call.views && !call.exactSizes && random.oneIn(3)) {
    call.capacity = random.between(1, shape.nranks * config.maxTokensPerRank);
  }
  return call;
}

// The first combine ends the life of views, so calls with a second one have none: `combines` says how many each has.
std::vector<Step> randomSteps(Random& random, int calls, bool halves, std::vector<int>* combines) {
  std::vector<Step> steps;
  for (int call = 0; call < calls; ++call) {
    if (halves) {
      steps.push_back({Step::kSend, call});
      steps.push_back({Step::kWait, call});
    } else {
      steps.push_back({Step::kDispatch, call});
    }
    combines->push_back(random.pick({0, 1, 1, 1, 2}));
    for (int variant = 0; variant < combines->back(); ++variant) steps.push_back({Step::kCombine, call, 0, variant});
  }
  return steps;
}

}  // namespace

Scenario randomScenario(uint64_t seed) {
  Random random(seed);
  Scenario scenario;
  scenario.name = "seed " + std::to_string(seed);
  scenario.nranks = static_cast<int>(random.pick<int64_t>({1, 2, 2, 3, 4, 5, 7}));
  scenario.config = randomConfig(random, scenario.nranks);
  bool halves = random.oneIn(3);
  std::vector<int> combines;
  scenario.steps = randomSteps(random, static_cast<int>(random.between(1, 5)), halves, &combines);
  scenario.call = [seed, halves, combines, nranks = scenario.nranks, config = scenario.config](int number) {
    bool views = combines[static_cast<size_t>(number)] < 2;
    reference::Shape shape(nranks, config);
    Random data(seed * 1000 + static_cast<uint64_t>(number));
    Call call;
    call.applyWeights = data.oneIn(2);
    for (int rank = 0; rank < nranks; ++rank) call.ranks.push_back(randomRankCall(data, shape, halves, views));
    return call;
  };
  return scenario;
}

namespace {

void runSeeds(uint64_t first, uint64_t count) {
  if (const char* only = std::getenv("MOECL_TEST_SEED")) first = std::strtoull(only, nullptr, 10), count = 1;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    Way way = seed % 2 ? Way::kGroup : seed % 8 ? Way::kCallbacks : Way::kThreads;
    std::string wrong = runScenario(randomScenario(seed), way, hostBackend());
    ASSERT_EQ(wrong, "") << "seed " << seed << " by " << wayName(way);
  }
}

class Property : public testing::TestWithParam<int> {};
TEST_P(Property, RandomCalls) { runSeeds(static_cast<uint64_t>(GetParam()) * 1000, 30); }
INSTANTIATE_TEST_SUITE_P(ThreadRanks, Property, testing::Range(1, 11));

class ManySeeds : public testing::TestWithParam<int> {};
TEST_P(ManySeeds, RandomCalls_long) { runSeeds(static_cast<uint64_t>(GetParam()) * 100000, 400); }
INSTANTIATE_TEST_SUITE_P(Property, ManySeeds, testing::Range(1, 9));

class GpuProperty : public OnBackend<const Backend*> {};
TEST_P(GpuProperty, RandomCalls) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    ASSERT_EQ(runScenario(randomScenario(seed), Way::kThreads, *GetParam()), "") << "seed " << seed;
  }
}
INSTANTIATE_TEST_SUITE_P(Gpu, GpuProperty, testing::ValuesIn(cudaBackends()), backendName);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GpuProperty);

}  // namespace
}  // namespace moetest

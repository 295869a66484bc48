// SPDX-License-Identifier: Apache-2.0
// Every scenario that must be exact. Each is written once and runs for every backend, in every way in which ranks
// exist.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "conformance/scenario.h"

namespace moetest {

enum class Cost {
  kSmall,  // also under ThreadSanitizer
  kBig,
  kLong,  // not in the quick suite
};

struct Case {
  std::string name;
  Cost cost;
  bool processes;  // also with a process per rank
  int nranks;
  std::function<Scenario()> make;
  bool onlyGpus = false;  // the host runs others that are like it
};

using Cases = std::vector<Case>;

void addShapeCases(Cases& cases);
void addValueCases(Cases& cases);
void addLayoutCases(Cases& cases);
void addFlowCases(Cases& cases);
void addFieldCases(Cases& cases);
void addQuantizeCases(Cases& cases);

const Cases& allCases();
// Null if there is none.
const Case* findCase(const std::string& name);

inline void add(Cases& cases, const Plan& plan, Cost cost = Cost::kSmall, bool processes = false) {
  cases.push_back({plan.name, cost, processes, plan.nranks, [plan] { return toScenario(plan); }});
}

}  // namespace moetest

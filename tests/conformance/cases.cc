// SPDX-License-Identifier: Apache-2.0
#include "conformance/cases.h"

namespace moetest {

const Cases& allCases() {
  static const Cases& all = *[] {
    auto* cases = new Cases;
    addShapeCases(*cases);
    addValueCases(*cases);
    addLayoutCases(*cases);
    addFlowCases(*cases);
    addFieldCases(*cases);
    addQuantizeCases(*cases);
    return cases;
  }();
  return all;
}

const Case* findCase(const std::string& name) {
  for (const Case& one : allCases()) {
    if (one.name == name) return &one;
  }
  return nullptr;
}

}  // namespace moetest

// SPDX-License-Identifier: Apache-2.0
// A test whose parameter says on which backend it runs, or is that backend. Skipped by name where that cannot run.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "conformance/device.h"

namespace moetest {

// GoogleTest would print the address.
inline void PrintTo(const Backend* backend, std::ostream* out) { *out << backend->name(); }

inline const Backend& backendOf(const Backend* backend) { return *backend; }
template <class Parameter>
const Backend& backendOf(const Parameter& parameter) {
  return *parameter.backend;
}

template <class Parameter>
class OnBackend : public testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override {
    std::string why = backendOf(this->GetParam()).missing();
    if (!why.empty()) GTEST_SKIP() << why;
  }
};

inline std::string backendName(const testing::TestParamInfo<const Backend*>& info) { return info.param->name(); }

}  // namespace moetest

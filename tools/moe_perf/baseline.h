// SPDX-License-Identifier: Apache-2.0
// The same layer through another library, timed and checked by the same rules.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "inputs.h"
#include "moe.h"
#include "row_run.h"

namespace moe::perf {

class Baseline {
 public:
  virtual ~Baseline() = default;
  virtual std::string describe() const = 0;
  virtual int64_t recordBytes() const = 0;
  // Collective.
  virtual RowMeasures run(int64_t tokens) = 0;
};

// Ranks on GPUs, layout rank. Collective; throws Failure with what to do where NCCL cannot be used.
std::unique_ptr<Baseline> makeNcclBaseline(RunContext& context, const moeInfo_t& info);

}  // namespace moe::perf

// SPDX-License-Identifier: Apache-2.0
// Meeting through an all-gather of fixed-size pieces that the caller brings.
#pragma once

#include "bootstrap/piece_bootstrap.h"
#include "moe.h"

namespace moe {

// The caller's function cannot be interrupted, so the limit is looked at between its calls.
class CallbackBootstrap final : public PieceBootstrap {
 public:
  CallbackBootstrap(const moeBootstrap_t& callbacks, int rank, int nranks);

 private:
  std::string call(const std::string& piece, const char* what, const WaitLimit& limit) override;
  const char* name() const override { return "bootstrap->allGather"; }

  moeBootstrap_t callbacks_;
};

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// Meeting through an all-gather of fixed-size pieces that the caller brings.
#pragma once

#include "bootstrap/bootstrap.h"
#include "moe.h"

namespace moe {

// Lengths differ between ranks and the caller's all-gather wants equal ones: it is called once for the lengths, and
// once for the pieces, padded to the longest. It cannot be interrupted, so the limit is looked at between the calls.
class CallbackBootstrap final : public Bootstrap {
 public:
  CallbackBootstrap(const moeBootstrap_t& callbacks, int rank, int nranks);

  std::vector<std::string> allGather(const std::string& mine, const WaitLimit& limit) override;

 private:
  // One call: `piece` of every rank, in rank order.
  std::string call(const std::string& piece, const char* what, const WaitLimit& limit) const;

  moeBootstrap_t callbacks_;
  uint64_t round_ = 0;
};

}  // namespace moe

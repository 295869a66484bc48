// SPDX-License-Identifier: Apache-2.0
// Meeting through an all-gather that takes pieces of one size, as others bring it.
#pragma once

#include "bootstrap/bootstrap.h"

namespace moe {

// Lengths differ between ranks and such an all-gather wants equal ones: it is called once for the lengths, and once for
// the pieces, padded to the longest.
class PieceBootstrap : public Bootstrap {
 public:
  using Bootstrap::Bootstrap;

  std::vector<std::string> allGather(const std::string& mine, const WaitLimit& limit) final;

 protected:
  // One call: `piece` of every rank, in rank order, all equally long. `what` is what it carries, for texts.
  virtual std::string call(const std::string& piece, const char* what, const WaitLimit& limit) = 0;
  // Whose all-gather it is, for texts.
  virtual const char* name() const = 0;

 private:
  uint64_t round_ = 0;
};

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/callback_bootstrap.h"

#include <memory>

#include "base/error.h"
#include "bootstrap/make.h"

namespace moe {

CallbackBootstrap::CallbackBootstrap(const moeBootstrap_t& callbacks, int rank, int nranks)
    : PieceBootstrap(rank, nranks), callbacks_(callbacks) {
  if (!callbacks_.allGather) fail(moeInvalidArgument, "bootstrap->allGather is NULL; give a function");
}

std::string CallbackBootstrap::call(const std::string& piece, const char* what, const WaitLimit& limit) {
  limit.throwIfAborted();
  if (limit.passed()) {
    fail(moeTimeout, "rank ", rank(), " has no time left to call ", name(), " for the ", what);
  }
  std::string all(piece.size() * static_cast<size_t>(nranks()), '\0');
  int code = callbacks_.allGather(callbacks_.context, piece.data(), all.data(), piece.size());
  if (code != 0) {
    fail(moeSystemError, name(), " returned ", code, " on rank ", rank(), " for the ", what, " (", piece.size(),
         " bytes a rank); 0 means success");
  }
  return all;
}

std::unique_ptr<Bootstrap> joinCallbacks(const moeBootstrap_t& callbacks, int rank, int nranks) {
  return std::make_unique<CallbackBootstrap>(callbacks, rank, nranks);
}

}  // namespace moe

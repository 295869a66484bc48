// SPDX-License-Identifier: Apache-2.0
// How a rank and the root prove to each other that they know the job's secret, without sending it.
//
//   rank -> root  kHello      version, rank, nranks, nonce of the rank
//   root -> rank  kChallenge  nonce of the root, HMAC(secret, "root" ...)
//   rank -> root  kProof      HMAC(secret, "rank" ...)
//
// Each HMAC covers its role, both nonces, rank and nranks, so that no message can be replayed in another connection,
// sent back to its author, or used for another rank. The keys that seal the later frames come from the same values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "bootstrap/frame.h"
#include "bootstrap/hmac.h"

namespace moe {

// What both sides know after the challenge.
struct Handshake {
  int32_t rank = 0;
  int32_t nranks = 0;
  Digest rankNonce{};
  Digest rootNonce{};

  // Payloads. The parsers throw moeSystemError for payloads that are not ones; parseChallenge throws moeMismatch when
  // the root's proof is wrong.
  std::string hello() const;
  static Handshake parseHello(std::string_view payload);
  std::string challenge(const Digest& secret) const;
  void parseChallenge(std::string_view payload, const Digest& secret);
  std::string proof(const Digest& secret) const;
  bool proofMatches(std::string_view payload, const Digest& secret) const;

  // Seals the channel of that side.
  void sealAsRank(FrameChannel& channel, const Digest& secret) const;
  void sealAsRoot(FrameChannel& channel, const Digest& secret) const;

 private:
  Digest bound(const Digest& secret, std::string_view role) const;
};

}  // namespace moe

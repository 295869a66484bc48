// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/handshake.h"

#include "base/error.h"
#include "bootstrap/bytes.h"

namespace moe {
namespace {

constexpr uint32_t kProtocolVersion = 1;

void checkEnd(const ByteReader& in, const char* what) {
  if (!in.rest().empty()) fail(moeSystemError, "a ", what, " has ", in.rest().size(), " bytes too many");
}

}  // namespace

Digest Handshake::bound(const Digest& secret, std::string_view role) const {
  return hmacSha256(secret, ByteWriter()
                                .bytes("moecl rendezvous ")
                                .number(kProtocolVersion)
                                .array(rankNonce)
                                .array(rootNonce)
                                .number(rank)
                                .number(nranks)
                                .bytes(role)
                                .take());
}

std::string Handshake::hello() const {
  return ByteWriter().number(kProtocolVersion).number(rank).number(nranks).array(rankNonce).take();
}

Handshake Handshake::parseHello(std::string_view payload) {
  ByteReader in(payload);
  if (auto version = in.number<uint32_t>(); version != kProtocolVersion) {
    fail(moeSystemError, "a rank speaks version ", version, " of the rendezvous protocol and this process version ",
         kProtocolVersion);
  }
  Handshake result;
  result.rank = in.number<int32_t>();
  result.nranks = in.number<int32_t>();
  result.rankNonce = in.array<Digest>();
  checkEnd(in, "hello");
  return result;
}

std::string Handshake::challenge(const Digest& secret) const {
  return ByteWriter().array(rootNonce).array(bound(secret, "root")).take();
}

void Handshake::parseChallenge(std::string_view payload, const Digest& secret) {
  ByteReader in(payload);
  rootNonce = in.array<Digest>();
  auto proof = in.array<Digest>();
  checkEnd(in, "challenge");
  if (!equalSecrets(proof, bound(secret, "root"))) fail(moeMismatch, "the process there has another secret");
}

std::string Handshake::proof(const Digest& secret) const { return ByteWriter().array(bound(secret, "rank")).take(); }

bool Handshake::proofMatches(std::string_view payload, const Digest& secret) const {
  return payload.size() == sizeof(Digest) && equalSecrets(ByteReader(payload).array<Digest>(), bound(secret, "rank"));
}

void Handshake::sealAsRank(FrameChannel& channel, const Digest& secret) const {
  channel.seal(bound(secret, "rank to root"), bound(secret, "root to rank"));
}

void Handshake::sealAsRoot(FrameChannel& channel, const Digest& secret) const {
  channel.seal(bound(secret, "root to rank"), bound(secret, "rank to root"));
}

}  // namespace moe

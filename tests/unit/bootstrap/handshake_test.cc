// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/handshake.h"

#include "unit/bootstrap/helpers.h"

namespace moe::test {
namespace {

struct BothSides {
  Digest secret = randomDigest();
  Handshake rank;
  Handshake root;
  BothSides() {
    rank.rank = 3;
    rank.nranks = 8;
    rank.rankNonce = randomDigest();
    root = Handshake::parseHello(rank.hello());
    root.rootNonce = randomDigest();
  }
};

TEST(Handshake, BothSidesProveThemselves) {
  BothSides sides;
  EXPECT_EQ(sides.root.rank, 3);
  EXPECT_EQ(sides.root.nranks, 8);
  sides.rank.parseChallenge(sides.root.challenge(sides.secret), sides.secret);
  EXPECT_TRUE(sides.root.proofMatches(sides.rank.proof(sides.secret), sides.secret));
}

TEST(Handshake, ARootWithoutTheSecretIsFoundOut) {
  BothSides sides;
  Digest other = randomDigest();
  expectAll({outcomeOf([&] { sides.rank.parseChallenge(sides.root.challenge(other), sides.secret); })}, moeMismatch,
            "another secret");
}

TEST(Handshake, AProofHoldsForItsOwnClaimsAlone) {
  BothSides sides;
  sides.rank.parseChallenge(sides.root.challenge(sides.secret), sides.secret);
  const std::string proof = sides.rank.proof(sides.secret);
  auto refused = [&](const std::function<void(Handshake&)>& change) {
    Handshake other = sides.root;
    change(other);
    return !other.proofMatches(proof, sides.secret);
  };
  EXPECT_FALSE(refused([](Handshake&) {}));
  EXPECT_TRUE(refused([](Handshake& h) { h.rank = 4; }));
  EXPECT_TRUE(refused([](Handshake& h) { h.nranks = 9; }));
  EXPECT_TRUE(refused([](Handshake& h) { h.rankNonce[31] ^= 1; }));
  EXPECT_TRUE(refused([](Handshake& h) { h.rootNonce[0] ^= 1; }));
  EXPECT_FALSE(sides.root.proofMatches("", sides.secret));
  EXPECT_FALSE(sides.root.proofMatches(proof + "x", sides.secret));
  EXPECT_FALSE(sides.root.proofMatches(sides.root.challenge(sides.secret).substr(sizeof(Digest)), sides.secret));
}

TEST(Handshake, RefusesPayloadsOfOtherLengths) {
  BothSides sides;
  const std::string hello = sides.rank.hello();
  for (size_t length = 0; length < hello.size(); ++length) {
    EXPECT_EQ(outcomeOf([&] { Handshake::parseHello(hello.substr(0, length)); }).code, moeSystemError) << length;
  }
  expectAll({outcomeOf([&] { Handshake::parseHello(hello + "x"); })}, moeSystemError, "1 bytes too many");
  std::string newer = hello;
  newer[0] = 2;
  expectAll({outcomeOf([&] { Handshake::parseHello(newer); })}, moeSystemError, "version 2");
}

}  // namespace
}  // namespace moe::test

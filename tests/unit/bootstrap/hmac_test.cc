// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/hmac.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <string>
#include <thread>

#include "bootstrap/background_thread.h"

namespace moe {
namespace {

std::string hex(const Digest& digest) {
  std::string text;
  for (unsigned char byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

TEST(Hmac, Sha256MatchesThePublishedVector) {
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Hmac, MatchesRfc4231Case1) {
  // A key shorter than a block is padded with zeros, so the 20-byte key of the RFC is this one.
  Digest key{};
  for (size_t i = 0; i < 20; ++i) key[i] = 0x0b;
  EXPECT_EQ(hex(hmacSha256(key, "Hi There")), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
}

TEST(Hmac, TellsSecretsApart) {
  Digest a = randomDigest();
  for (size_t i = 0; i < a.size(); ++i) {
    Digest b = a;
    EXPECT_TRUE(equalSecrets(a, b));
    b[i] ^= 1;
    EXPECT_FALSE(equalSecrets(a, b)) << i;
  }
  EXPECT_FALSE(equalSecrets(a, randomDigest()));
}

// Exits while background threads hash without a pause.
[[noreturn]] void exitBesideHashing() {
  static std::array<std::atomic<int>, 4> rounds{};
  for (std::atomic<int>& mine : rounds) {
    startBackgroundThread([&mine] {
      hashInThreadThatOutlivesExit();
      for (;;) {
        hmacSha256(Digest{}, "data");
        ++mine;
      }
    });
  }
  for (std::atomic<int>& each : rounds) {
    while (each.load() < 10) std::this_thread::yield();
  }
  std::exit(7);
}

TEST(HmacDeathTest, TheProcessMayExitWhileThreadsHash) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (int repeat = 0; repeat < 5; ++repeat) EXPECT_EXIT(exitBesideHashing(), testing::ExitedWithCode(7), "^$");
}

}  // namespace
}  // namespace moe

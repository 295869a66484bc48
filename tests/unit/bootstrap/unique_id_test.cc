// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/unique_id.h"

#include "unit/bootstrap/helpers.h"

namespace moe::test {
namespace {

UniqueId fullId() {
  return {{ipAddress(AF_INET, std::string("\x0a\1\2\3", 4), 4711), loopbackAddress(AF_INET6, 65535),
           loopbackAddress(AF_INET, 1), loopbackAddress(AF_INET, 2)},
          randomDigest()};
}

TEST(UniqueIdFormat, KeepsAddressesAndSecret) {
  UniqueId id = fullId();
  UniqueId back = decodeUniqueId(encodeUniqueId(id));
  EXPECT_EQ(back.secret, id.secret);
  ASSERT_EQ(back.addresses.size(), 4u);
  EXPECT_EQ(back.addresses[0].text(), "10.1.2.3:4711");
  EXPECT_EQ(back.addresses[1].text(), "[::1]:65535");
  EXPECT_EQ(back.addresses[2].text(), "127.0.0.1:1");
  EXPECT_EQ(back.addresses[3].text(), "127.0.0.1:2");
}

void expectRefused(size_t at, char value, const std::string& wanted) {
  moeUniqueId_t id = encodeUniqueId(fullId());
  id.internal[at] = value;
  expectAll({outcomeOf([&] { decodeUniqueId(id); })}, moeInvalidArgument, wanted);
}

TEST(UniqueIdFormat, RefusesWhatIsNoId) {
  expectAll({outcomeOf([&] { decodeUniqueId(moeUniqueId_t{}); })}, moeInvalidArgument,
            "was not made by moeGetUniqueId; copy all 128 bytes");
  expectRefused(0, 'M', "was not made by moeGetUniqueId");
  expectRefused(5, 2, "id has format 2 and this moecl reads format 1");
  expectRefused(6, 0, "claims 0 addresses");
  expectRefused(6, 5, "claims 5 addresses");
  expectRefused(7, 9, "its address 0 has family 9");
}

TEST(UniqueIdFormat, TwoIdsDifferInTheirSecrets) {
  EXPECT_NE(decodeUniqueId(loopbackId(10ms)).secret, decodeUniqueId(loopbackId(10ms)).secret);
}

}  // namespace
}  // namespace moe::test

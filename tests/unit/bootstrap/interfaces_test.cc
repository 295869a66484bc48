// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/interfaces.h"

#include "unit/bootstrap/helpers.h"

namespace moe::test {
namespace {

InterfaceAddress ipv4(const std::string& name, char last, bool up = true, bool loopback = false) {
  std::string bytes = loopback ? std::string("\x7f\0\0\1", 4) : std::string("\x0a\0\0", 3) + last;
  return {name, up, loopback, ipAddress(AF_INET, bytes, 0)};
}
InterfaceAddress ipv6(const std::string& name, char last, bool loopback = false) {
  std::string bytes = loopback ? std::string(15, '\0') + '\1' : "\xfd" + std::string(14, '\0') + last;
  return {name, true, loopback, ipAddress(AF_INET6, bytes, 0)};
}

std::vector<std::string> chosen(const std::vector<InterfaceAddress>& all, const std::string& name, size_t most) {
  std::vector<std::string> texts;
  for (const SocketAddress& each : chooseAddresses(all, name, most)) texts.push_back(each.text());
  return texts;
}

using Texts = std::vector<std::string>;

const std::vector<InterfaceAddress> kHost = {ipv4("lo", 0, true, true), ipv6("lo", 0, true), ipv4("eth0", 1),
                                             ipv6("eth0", 2),           ipv4("eth1", 3),     ipv4("eth2", 4, false)};

TEST(Interfaces, LoopbackComesLastAndEveryInterfaceBeforeTheSecondOfAny) {
  EXPECT_EQ(chosen(kHost, "", 9), (Texts{"10.0.0.1:0", "10.0.0.3:0", "[fd00::2]:0", "127.0.0.1:0", "[::1]:0"}));
}

TEST(Interfaces, LoopbackKeepsItsPlaceWhenThereIsNotRoomForAll) {
  EXPECT_EQ(chosen(kHost, "", 2), (Texts{"10.0.0.1:0", "127.0.0.1:0"}));
  EXPECT_EQ(chosen(kHost, "", 4), (Texts{"10.0.0.1:0", "10.0.0.3:0", "[fd00::2]:0", "127.0.0.1:0"}));
}

TEST(Interfaces, ANameChoosesThatInterfaceAlone) {
  EXPECT_EQ(chosen(kHost, "eth0", 4), (Texts{"10.0.0.1:0", "[fd00::2]:0"}));
  EXPECT_EQ(chosen(kHost, "lo", 4), (Texts{"127.0.0.1:0", "[::1]:0"}));
}

TEST(Interfaces, AnUnknownOrIdleNameListsTheOthers) {
  for (const char* name : {"eth", "eth2", "eth00"}) {
    expectAll({outcomeOf([&] { chooseAddresses(kHost, name, 4); })}, moeInvalidArgument,
              cat("MOE_SOCKET_IFNAME=", name, " names no network interface"));
    expectAll({outcomeOf([&] { chooseAddresses(kHost, name, 4); })}, moeInvalidArgument, "there are: lo, eth0, eth1");
  }
}

TEST(Interfaces, NoInterfaceAtAllIsAnError) {
  expectAll({outcomeOf([&] { chooseAddresses({}, "", 4); })}, moeSystemError, "no network interface is up");
}

TEST(Interfaces, ThisMachineHasLoopback) {
  bool found = false;
  for (const InterfaceAddress& each : interfaceAddresses()) found = found || (each.loopback && each.name == "lo");
  EXPECT_TRUE(found);
}

TEST(Interfaces, TheNameReachesTheId) {
  for (const SocketAddress& each : decodeUniqueId(loopbackId(10ms)).addresses) EXPECT_TRUE(each.loopback());
  expectAll({outcomeOf([&] { makeUniqueIdOn("no-such-if", 1s); })}, moeInvalidArgument, "no-such-if");
}

}  // namespace
}  // namespace moe::test

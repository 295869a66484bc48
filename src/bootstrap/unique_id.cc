// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/unique_id.h"

#include <cstring>

#include "base/error.h"
#include "bootstrap/bytes.h"

namespace moe {
namespace {

constexpr std::string_view kMagic = "moecl";
constexpr uint8_t kVersion = 1;
constexpr size_t kIpBytes = 16;
constexpr uint8_t kIpv4 = 4;
constexpr uint8_t kIpv6 = 6;

}  // namespace

moeUniqueId_t encodeUniqueId(const UniqueId& id) {
  ByteWriter out;
  out.bytes(kMagic).number(kVersion).number(static_cast<uint8_t>(id.addresses.size()));
  for (size_t i = 0; i < UniqueId::kMaxAddresses; ++i) {
    SocketAddress address = i < id.addresses.size() ? id.addresses[i] : SocketAddress();
    std::string ip(address.ipBytes());
    ip.resize(kIpBytes);
    out.number(address.family() == AF_INET ? kIpv4 : kIpv6).number(address.port()).bytes(ip);
  }
  out.array(id.secret);
  std::string bytes = out.take();
  moeUniqueId_t result{};
  static_assert(5 + 1 + 1 + UniqueId::kMaxAddresses * (1 + 2 + kIpBytes) + sizeof(Digest) <= sizeof result.internal);
  std::memcpy(result.internal, bytes.data(), bytes.size());
  return result;
}

UniqueId decodeUniqueId(const moeUniqueId_t& id) {
  ByteReader in({id.internal, sizeof id.internal});
  if (in.bytes(kMagic.size()) != kMagic) {
    fail(moeInvalidArgument, "id was not made by moeGetUniqueId; copy all ", sizeof id.internal,
         " bytes of one process's id to every rank");
  }
  if (auto version = in.number<uint8_t>(); version != kVersion) {
    fail(moeInvalidArgument, "id has format ", int{version}, " and this moecl reads format ", int{kVersion},
         "; load the same moecl in every rank");
  }
  size_t count = in.number<uint8_t>();
  if (count < 1 || count > UniqueId::kMaxAddresses) {
    fail(moeInvalidArgument, "id is damaged: it claims ", count, " addresses and can hold 1 to ",
         UniqueId::kMaxAddresses);
  }
  UniqueId result;
  for (size_t i = 0; i < UniqueId::kMaxAddresses; ++i) {
    auto family = in.number<uint8_t>();
    auto port = in.number<uint16_t>();
    std::string_view ip = in.bytes(kIpBytes);
    if (i >= count) continue;
    if (port == 0 || (family != kIpv4 && family != kIpv6)) {
      fail(moeInvalidArgument, "id is damaged: its address ", i, " has family ", int{family}, " and port ", port);
    }
    bool ipv4 = family == kIpv4;
    result.addresses.push_back(ipAddress(ipv4 ? AF_INET : AF_INET6, ip.substr(0, ipv4 ? 4 : kIpBytes), port));
  }
  result.secret = in.array<Digest>();
  return result;
}

}  // namespace moe

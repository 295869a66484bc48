// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/rendezvous.h"

#include "base/error.h"
#include "base/log.h"
#include "base/settings.h"
#include "bootstrap/interfaces.h"
#include "bootstrap/socket_root.h"
#include "bootstrap/unique_id.h"

namespace moe {

moeUniqueId_t makeUniqueIdOn(const std::string& interfaceName, std::chrono::milliseconds patience) {
  UniqueId id;
  id.secret = randomDigest();
  RootOptions options;
  options.secret = id.secret;
  options.patience = patience;
  std::string refused;
  // One socket an address, so that nothing listens where the user did not want it.
  for (const SocketAddress& address : chooseAddresses(interfaceAddresses(), interfaceName, UniqueId::kMaxAddresses)) {
    int error = 0;
    FileDescriptor listener = listenAt(address, &error);
    if (!listener.valid()) {
      refused += cat(refused.empty() ? "" : ", ", address.text(), " (", std::strerror(error), ")");
      continue;
    }
    id.addresses.push_back(localAddress(listener.get()));
    options.listeners.push_back(std::move(listener));
  }
  if (id.addresses.empty()) fail(moeSystemError, "cannot listen for ranks on any address of this host: ", refused);
  if (!refused.empty()) log(LogLevel::kInfo, "the rendezvous cannot listen on ", refused);
  startRoot(std::move(options));
  return encodeUniqueId(id);
}

moeUniqueId_t makeUniqueId(std::chrono::milliseconds patience) {
  return makeUniqueIdOn(settings().socketInterface, patience);
}

}  // namespace moe

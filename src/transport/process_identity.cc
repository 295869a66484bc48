// SPDX-License-Identifier: Apache-2.0
#include "transport/process_identity.h"

#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

#include "base/error.h"

namespace moe {

ProcessIdentity processIdentity() {
  static std::mutex& mutex = *new std::mutex;
  static ProcessIdentity& identity = *new ProcessIdentity;
  std::lock_guard lock(mutex);
  // A child inherits its parent's memory, and with it the nonce.
  if (identity.pid != ::getpid()) {
    ProcessIdentity fresh{::getpid(), {}};
    if (::getrandom(fresh.nonce.data(), sizeof(fresh.nonce), 0) != static_cast<ssize_t>(sizeof(fresh.nonce))) {
      failErrno(errno, "cannot read random bytes that identify this process");
    }
    identity = fresh;
  }
  return identity;
}

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/hmac.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <shared_mutex>

#include "base/error.h"

namespace moe {
namespace {

Digest rawSha256(std::string_view data) {
  Digest result;
  unsigned int length = 0;
  if (EVP_Digest(data.data(), data.size(), result.data(), &length, EVP_sha256(), nullptr) != 1 ||
      length != result.size()) {
    fail(moeInternalError, "OpenSSL cannot compute SHA-256");
  }
  return result;
}

// Keeps calls into OpenSSL from running beside its exit handler.
struct ExitGate {
  std::shared_mutex mutex;
  // Looked at before the lock as well: the lock prefers readers, and busy ones could keep the handler waiting for ever.
  std::atomic<bool> closed{false};
};

ExitGate& exitGate() {
  static ExitGate& once = *[] {
    auto* gate = new ExitGate;
    // Exit handlers run last in, first out: ours must be registered after OpenSSL's own to run before it. Nothing less
    // than work makes OpenSSL register it.
    rawSha256("");
    std::atexit([] {
      exitGate().closed.store(true);
      // Those who are inside come out.
      std::unique_lock lock(exitGate().mutex);
    });
    return gate;
  }();
  return once;
}

thread_local bool outlivesExit = false;

// Around every call into OpenSSL.
class InsideGate {
 public:
  InsideGate() : lock_(exitGate().mutex, std::defer_lock) {
    if (!exitGate().closed.load()) lock_.lock();
    if (exitGate().closed.load()) fail(moeAborted, "the process is exiting");
  }
  ~InsideGate() {
    if (outlivesExit) OPENSSL_thread_stop();
  }
  InsideGate(const InsideGate&) = delete;
  InsideGate& operator=(const InsideGate&) = delete;

 private:
  std::shared_lock<std::shared_mutex> lock_;
};

}  // namespace

Digest hmacSha256(const Digest& key, std::string_view data) {
  InsideGate inside;
  Digest result;
  unsigned int length = 0;
  if (!HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), reinterpret_cast<const unsigned char*>(data.data()),
            data.size(), result.data(), &length) ||
      length != result.size()) {
    fail(moeInternalError, "OpenSSL cannot compute HMAC-SHA256");
  }
  return result;
}

Digest sha256(std::string_view data) {
  InsideGate inside;
  return rawSha256(data);
}

void hashInThreadThatOutlivesExit() { outlivesExit = true; }

bool equalSecrets(const Digest& a, const Digest& b) { return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

Digest randomDigest() {
  Digest result;
  size_t filled = 0;
  while (filled < result.size()) {
    ssize_t got = ::getrandom(result.data() + filled, result.size() - filled, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) failErrno(errno, "the kernel gives no random bytes (getrandom)");
    filled += static_cast<size_t>(got);
  }
  return result;
}

}  // namespace moe

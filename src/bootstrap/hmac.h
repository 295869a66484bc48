// SPDX-License-Identifier: Apache-2.0
// The cryptography of the rendezvous: HMAC-SHA256, SHA-256 and random bytes. The only user of OpenSSL.
#pragma once

#include <array>
#include <string_view>

namespace moe {

using Digest = std::array<unsigned char, 32>;

// These throw moeInternalError if the library refuses, and moeAborted once the process is exiting: OpenSSL takes its
// state apart in an exit handler, while background threads may still run.
Digest hmacSha256(const Digest& key, std::string_view data);
Digest sha256(std::string_view data);

// For threads that nobody joins: OpenSSL's memory for this thread is given back after every call, because its exit
// handler forgets that of threads which still run. Not for the application's threads: it clears their error queue.
void hashInThreadThatOutlivesExit();

// Takes as long for a match as for a mismatch.
bool equalSecrets(const Digest& a, const Digest& b);

// From the kernel. Throws moeSystemError.
Digest randomDigest();

}  // namespace moe

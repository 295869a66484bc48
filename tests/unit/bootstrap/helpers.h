// SPDX-License-Identifier: Apache-2.0
// Ranks as threads, bounded waits for conditions, and a look at what this process holds.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "bootstrap/make.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/unique_id.h"

namespace moe::test {

using namespace std::chrono_literals;

struct Outcome {
  moeResult_t code = moeSuccess;
  std::string text;
  std::chrono::milliseconds took{0};
};

inline Outcome outcomeOf(const std::function<void()>& body) {
  auto start = std::chrono::steady_clock::now();
  Outcome result;
  try {
    body();
  } catch (const Error& error) {
    result.code = error.code();
    result.text = error.text();
  }
  result.took = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
  return result;
}

// One thread for each of `ranks`.
inline std::vector<Outcome> runRanks(const std::vector<int>& ranks, const std::function<void(int)>& body) {
  std::vector<Outcome> outcomes(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] { outcomes[i] = outcomeOf([&] { body(ranks[i]); }); });
  }
  for (std::thread& each : threads) each.join();
  return outcomes;
}

inline std::vector<int> upTo(int nranks) {
  std::vector<int> ranks;
  for (int rank = 0; rank < nranks; ++rank) ranks.push_back(rank);
  return ranks;
}

inline WaitLimit within(std::chrono::milliseconds span, const std::atomic<bool>* aborted = nullptr) {
  return WaitLimit(Deadline::in(span), aborted);
}

inline bool eventually(std::chrono::milliseconds most, const std::function<bool()>& condition) {
  Deadline deadline = Deadline::in(most);
  while (!condition()) {
    if (deadline.passed()) return false;
    std::this_thread::yield();
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

inline size_t entriesOf(const char* directory) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory)) ++count;
  return count;
}
inline size_t openDescriptors() { return entriesOf("/proc/self/fd"); }
inline size_t runningThreads() { return entriesOf("/proc/self/task"); }

// What rank r gives in exchange k: lengths differ, and one is empty.
inline std::string partOf(int rank, int exchange) {
  return std::string(static_cast<size_t>(rank * 37 + exchange * 11), static_cast<char>('a' + (rank + exchange) % 26));
}

inline void exchangeAndCheck(Bootstrap& bootstrap, int exchanges, const WaitLimit& limit) {
  for (int k = 0; k < exchanges; ++k) {
    std::vector<std::string> parts = bootstrap.allGather(partOf(bootstrap.rank(), k), limit);
    ASSERT_EQ(parts.size(), static_cast<size_t>(bootstrap.nranks()));
    for (int rank = 0; rank < bootstrap.nranks(); ++rank) EXPECT_EQ(parts[static_cast<size_t>(rank)], partOf(rank, k));
  }
}

inline void expectAll(const std::vector<Outcome>& outcomes, moeResult_t code, const std::string& wanted) {
  for (const Outcome& each : outcomes) {
    EXPECT_EQ(each.code, code) << each.text;
    EXPECT_NE(each.text.find(wanted), std::string::npos) << each.text;
  }
}

inline void expectAllSucceed(const std::vector<Outcome>& outcomes) {
  for (const Outcome& each : outcomes) EXPECT_EQ(each.code, moeSuccess) << each.text;
}

// An id whose root listens on loopback.
inline moeUniqueId_t loopbackId(std::chrono::milliseconds patience = 20s) { return makeUniqueIdOn("lo", patience); }

// The same id with other places to look.
inline moeUniqueId_t withAddresses(const moeUniqueId_t& id, std::vector<SocketAddress> addresses) {
  UniqueId parts = decodeUniqueId(id);
  parts.addresses = std::move(addresses);
  return encodeUniqueId(parts);
}

// A loopback port on which nobody listens.
inline SocketAddress closedPort(int family = AF_INET) {
  int error = 0;
  FileDescriptor listener = listenAt(loopbackAddress(family, 0), &error);
  return localAddress(listener.get());
}

inline bool haveIpv6() {
  int error = 0;
  return listenAt(loopbackAddress(AF_INET6, 0), &error).valid();
}

}  // namespace moe::test

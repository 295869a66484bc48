// SPDX-License-Identifier: Apache-2.0
// A rank on the shm transport, and looks at what this process holds open.
#pragma once

#include <dirent.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <fstream>

#include "transport/shm/shm_transport.h"
#include "unit/transport/test_ranks.h"

namespace moe::test {

constexpr size_t kWindow = size_t{1} << 20;

// A rank with its window, connected.
struct ShmRank {
  explicit ShmRank(Bootstrap& bootstrap, size_t bytes = kWindow)
      : rank(bootstrap.rank()), nranks(bootstrap.nranks()), states(std::make_shared<PeerStates>(nranks)) {
    transport = makeShmTransport(rank, nranks, states);
    window = transport->allocate(bytes);
  }
  void connect(Bootstrap& bootstrap) { peers = transport->connect(window, bootstrap, patience()); }
  const Peer& peer(int r) const { return peers[static_cast<size_t>(r)]; }
  bool sees(int r, PeerState state) const {
    return eventually([&] { return states->get(r) == state; });
  }
  // Each rank leaves a word in every window; all of them arrive everywhere.
  void expectWordsCross() const {
    for (const Peer& to : peers)
      wordAt(to.window, rank).store(1000 + static_cast<uint64_t>(rank), std::memory_order_release);
    for (int from = 0; from < nranks; ++from) {
      uint64_t expected = 1000 + static_cast<uint64_t>(from);
      EXPECT_TRUE(eventually([&] { return wordAt(window.base, from).load(std::memory_order_acquire) == expected; }))
          << "from rank " << from << " at rank " << rank;
    }
  }
  static std::atomic_ref<uint64_t> wordAt(std::byte* base, int index) {
    return std::atomic_ref<uint64_t>(reinterpret_cast<uint64_t*>(base)[index]);
  }

  int rank, nranks;
  std::shared_ptr<PeerStates> states;
  std::unique_ptr<Transport> transport;
  Region window;
  std::vector<Peer> peers;
};

inline int64_t now() { return std::chrono::steady_clock::now().time_since_epoch() / milliseconds(1); }

inline size_t entriesOf(const char* directory) {
  size_t count = 0;
  DIR* listing = ::opendir(directory);
  while (listing && ::readdir(listing)) ++count;
  if (listing) ::closedir(listing);
  return count;
}

inline size_t linesOf(const char* path, const std::string& with = "") {
  size_t count = 0;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) count += contains(line, with);
  return count;
}

inline std::string linkTarget(const std::string& path) {
  char target[256];
  ssize_t length = ::readlink(path.c_str(), target, sizeof(target));
  return length < 0 ? "" : std::string(target, static_cast<size_t>(length));
}

inline int findDescriptor(const std::string& target) {
  for (int fd = 0; fd < 4096; ++fd) {
    if (contains(linkTarget(cat("/proc/self/fd/", fd)), target)) return fd;
  }
  return -1;
}

}  // namespace moe::test

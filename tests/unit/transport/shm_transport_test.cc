// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/shm_transport.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <fstream>
#include <set>
#include <sstream>

#include "unit/transport/shm_rank.h"

namespace moe {
namespace {

using namespace moe::test;

class ShmThreads : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, ShmThreads, ::testing::Values(1, 2, 4, 16));

TEST_P(ShmThreads, ShareOneMappingOfEachWindow) {
  std::vector<std::byte*> bases(static_cast<size_t>(GetParam()));
  runThreads(GetParam(), [&](Bootstrap& bootstrap) {
    ShmRank me(bootstrap);
    bases[static_cast<size_t>(me.rank)] = me.window.base;
    me.connect(bootstrap);
    for (int r = 0; r < me.nranks; ++r) {
      EXPECT_EQ(me.peer(r).window, bases[static_cast<size_t>(r)]);
      EXPECT_EQ(me.peer(r).reach, r == me.rank ? Reach::kSelf : Reach::kMapped);
      EXPECT_STREQ(me.peer(r).transport, r == me.rank ? "self" : "local");
    }
    me.expectWordsCross();
    me.transport->announce(PeerState::kLeft);
    for (int r = 0; r < me.nranks; ++r) {
      if (r != me.rank) {
        EXPECT_TRUE(me.sees(r, PeerState::kLeft));
      }
    }
    EXPECT_FALSE(me.states->anyLost());
  });
  EXPECT_EQ(linesOf("/proc/self/maps", "moecl"), 0u);
}

TEST(ShmThreads, DestructionWithoutAWordIsAnAbort) {
  runThreads(3, [](Bootstrap& bootstrap) {
    ShmRank me(bootstrap);
    me.connect(bootstrap);
    if (me.rank == 1) return;
    EXPECT_TRUE(me.sees(1, PeerState::kAborted));
    me.transport->announce(PeerState::kLeft);
    // Memory of a rank that is gone stays mapped as long as a peer holds it.
    ShmRank::wordAt(me.peer(1).window, 0).store(1);
  });
}

TEST(ShmThreads, AnnouncementsOnlyRise) {
  runThreads(2, [](Bootstrap& bootstrap) {
    ShmRank me(bootstrap);
    me.connect(bootstrap);
    if (me.rank == 1) {
      me.transport->announce(PeerState::kAborted);
      me.transport->announce(PeerState::kLeft);
    }
    bootstrap.allGather("", patience());
    if (me.rank == 0) {
      EXPECT_EQ(me.states->get(1), PeerState::kAborted);
    }
    me.transport->announce(PeerState::kLeft);
  });
}

class ShmProcesses : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, ShmProcesses, ::testing::Values(1, 2, 4));

TEST_P(ShmProcesses, MapEachOthersWindows) {
  ForkedRanks ranks(GetParam(), [](Bootstrap& bootstrap) {
    // Sizes may differ.
    ShmRank me(bootstrap, kWindow + static_cast<size_t>(bootstrap.rank()) * 5000);
    me.connect(bootstrap);
    for (int r = 0; r < me.nranks; ++r) {
      EXPECT_EQ(me.peer(r).reach, r == me.rank ? Reach::kSelf : Reach::kMapped) << me.peer(r).reason;
      EXPECT_STREQ(me.peer(r).transport, r == me.rank ? "self" : "shm");
    }
    me.expectWordsCross();
    EXPECT_EQ(findDescriptor("memfd:moecl"), -1) << "descriptors of windows are closed once all have mapped them";
    me.transport->announce(PeerState::kLeft);
    for (int r = 0; r < me.nranks; ++r) {
      if (r != me.rank) {
        EXPECT_TRUE(me.sees(r, PeerState::kLeft));
      }
    }
    // No peer closes before all have looked: so what is seen is the goodbye, and it stays when the socket goes.
    bootstrap.allGather("", patience());
    EXPECT_FALSE(me.states->anyLost());
  });
  ranks.expectSuccess();
}

TEST(ShmProcesses, WithTwoThreadRanksEach) {
  // Four ranks in two processes: the ranks of a process are 0 and 1, 2 and 3.
  MeetingRoom room(4);
  ForkedRanks processes(2, [&](Bootstrap& process) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&, rank = 2 * process.rank() + i] {
        runRankBody(
            [](Bootstrap& bootstrap) {
              ShmRank me(bootstrap);
              me.connect(bootstrap);
              EXPECT_STREQ(me.peer(me.rank ^ 1).transport, "local");
              EXPECT_STREQ(me.peer(me.rank ^ 2).transport, "shm");
              EXPECT_STREQ(me.peer(me.rank ^ 3).transport, "shm");
              me.expectWordsCross();
              me.transport->announce(PeerState::kLeft);
              for (int other : {1, 2, 3}) EXPECT_TRUE(me.sees(me.rank ^ other, PeerState::kLeft));
            },
            *room.enter(rank));
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  processes.expectSuccess();
}

TEST(ShmProcesses, AbortAndDestructionAreToldApartFromDeath) {
  ForkedRanks ranks(4, [](Bootstrap& bootstrap) {
    ShmRank me(bootstrap);
    me.connect(bootstrap);
    if (me.rank == 1) me.transport->announce(PeerState::kAborted);
    if (me.rank == 2) me.transport.reset();
    if (me.rank == 3) ::_exit(0);
    for (int r : {1, 2}) {
      if (r != me.rank && me.transport) {
        EXPECT_TRUE(me.sees(r, PeerState::kAborted));
      }
    }
    if (me.transport) {
      EXPECT_TRUE(me.sees(3, PeerState::kDead));
    }
    if (me.rank == 0) {
      EXPECT_EQ(me.states->get(1), PeerState::kAborted);
      // The windows of the departed stay usable.
      for (const Peer& peer : me.peers) ShmRank::wordAt(peer.window, 0).store(7);
    }
    me.peers.clear();
    if (me.transport) me.transport->announce(PeerState::kAborted);
  });
  ranks.expectSuccess();
}

TEST(ShmProcesses, KilledRankIsDeadWithinASecond) {
  Shared<std::atomic<int64_t>> killedAt;
  ForkedRanks ranks(4, [&](Bootstrap& bootstrap) {
    ShmRank me(bootstrap);
    me.connect(bootstrap);
    bootstrap.allGather("", patience());
    if (me.rank == 2) {
      killedAt->store(now());
      ::raise(SIGKILL);
    }
    EXPECT_TRUE(me.sees(2, PeerState::kDead));
    EXPECT_LT(now() - killedAt->load(), 1000);
    EXPECT_TRUE(me.states->anyLost());
    ShmRank::wordAt(me.peer(2).window, 0).store(7);
    me.transport->announce(PeerState::kLeft);
  });
  ranks.expectSuccess(2);
}

TEST(ShmProcesses, DeathIsSeenThoughAForkedChildHoldsTheSockets) {
  struct Facts {
    std::atomic<int64_t> killedAt{0};
    std::atomic<pid_t> orphan{0};
  };
  Shared<Facts> facts;
  ForkedRanks ranks(2, [&](Bootstrap& bootstrap) {
    ShmRank me(bootstrap);
    me.connect(bootstrap);
    if (me.rank == 1) {
      pid_t child = ::fork();
      if (child == 0) {
        ::alarm(60);  // should the test fail to end it
        for (;;) ::pause();
      }
      facts->orphan.store(child);
      facts->killedAt.store(now());
      ::raise(SIGKILL);
    }
    EXPECT_TRUE(me.sees(1, PeerState::kDead));
    EXPECT_LT(now() - facts->killedAt.load(), 1000);
    EXPECT_EQ(::kill(facts->orphan.load(), 0), 0) << "the child outlived the rank";
  });
  ranks.expectSuccess(1);
  if (facts->orphan.load() > 0) ::kill(facts->orphan.load(), SIGKILL);
}

TEST(ShmProcesses, StoppedRankIsNotDead) {
  ForkedRanks ranks(2, [&](Bootstrap& bootstrap) {
    ShmRank me(bootstrap);
    me.connect(bootstrap);
    if (me.rank == 1) {
      ::raise(SIGSTOP);
      me.expectWordsCross();
      bootstrap.allGather("", patience());
    } else {
      // Ends once the other rank has been continued.
      me.expectWordsCross();
      EXPECT_EQ(me.states->get(1), PeerState::kAlive);
      bootstrap.allGather("", patience());
    }
    me.transport->announce(PeerState::kLeft);
  });
  int status = 0;
  ASSERT_EQ(::waitpid(ranks.pid(1), &status, WUNTRACED), ranks.pid(1));
  ASSERT_TRUE(WIFSTOPPED(status));
  // Long enough for a watch that mistakes silence for death.
  std::this_thread::sleep_for(milliseconds(300));
  ASSERT_EQ(::kill(ranks.pid(1), SIGCONT), 0);
  ranks.expectSuccess();
}

// How many of these inodes the kernel lists as Unix sockets.
size_t listedSockets(const std::array<uint64_t, 64>& inodes) {
  std::set<std::string> listed;
  std::ifstream file("/proc/net/unix");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    for (int column = 0; column < 7; ++column) words >> word;
    listed.insert(word);
  }
  size_t count = 0;
  for (uint64_t inode : inodes) count += inode != 0 && listed.count(cat(inode)) != 0;
  return count;
}

TEST(ShmTidiness, NothingIsLeftAfterSigkillOfAll) {
  struct Facts {
    std::atomic<int> ready{0};
    std::array<uint64_t, 64> sockets{};  // inodes of rank 0's sockets
  };
  Shared<Facts> facts;
  size_t filesBefore = entriesOf("/dev/shm");
  {
    ForkedRanks ranks(4, [&](Bootstrap& bootstrap) {
      ShmRank me(bootstrap);
      me.connect(bootstrap);
      EXPECT_GT(linesOf("/proc/self/maps", "memfd:moecl"), 0u);
      size_t found = 0;
      for (int fd = 0; me.rank == 0 && fd < 4096; ++fd) {
        std::string target = linkTarget(cat("/proc/self/fd/", fd));
        if (target.rfind("socket:[", 0) != 0 || found == facts->sockets.size()) continue;
        facts->sockets[found++] = std::stoull(target.substr(8));
      }
      facts->ready.fetch_add(1);
      for (;;) ::pause();
    });
    ASSERT_TRUE(eventually([&] { return facts->ready.load() == 4; }));
    EXPECT_GE(listedSockets(facts->sockets), 3u) << "rank 0's links";
    EXPECT_LE(entriesOf("/dev/shm"), filesBefore) << "windows have no names, also while they are in use";
  }
  EXPECT_LE(entriesOf("/dev/shm"), filesBefore);
  EXPECT_EQ(listedSockets(facts->sockets), 0u);
}

// Makes and ends many communicators, and counts what stays.
void expectNoLeaks(Bootstrap& bootstrap, int rounds) {
  size_t descriptors = 0;
  size_t mappings = 0;
  size_t threads = 0;
  constexpr int kWarmUp = 20;  // caches of the C library fill up
  for (int round = 0; round < rounds; ++round) {
    bootstrap.allGather("", patience());
    if (round == kWarmUp && bootstrap.rank() == 0) {
      descriptors = entriesOf("/proc/self/fd");
      mappings = linesOf("/proc/self/maps");
      threads = entriesOf("/proc/self/task");
    }
    bootstrap.allGather("", patience());
    ShmRank me(bootstrap, 8192);
    me.connect(bootstrap);
    me.transport->announce(PeerState::kLeft);
  }
  bootstrap.allGather("", patience());
  if (bootstrap.rank() != 0) return;
  EXPECT_EQ(entriesOf("/proc/self/fd"), descriptors);
  EXPECT_EQ(linesOf("/proc/self/maps", "moecl"), 0u);
  EXPECT_LT(linesOf("/proc/self/maps"), mappings + static_cast<size_t>(rounds - kWarmUp) / 2);
  // A joined thread may stay listed for a moment.
  EXPECT_TRUE(eventually([&] { return entriesOf("/proc/self/task") <= threads; }));
}

TEST(ShmTidiness, ManyRoundsOfThreadsLeakNothing) {
  runThreads(2, [](Bootstrap& bootstrap) {
    expectNoLeaks(bootstrap, 200);
    bootstrap.allGather("", patience());
  });
}

TEST(ShmTidiness, ManyRoundsOfProcessesLeakNothing) {
  ForkedRanks ranks(2, [](Bootstrap& bootstrap) { expectNoLeaks(bootstrap, 200); });
  ranks.expectSuccess();
}

}  // namespace
}  // namespace moe

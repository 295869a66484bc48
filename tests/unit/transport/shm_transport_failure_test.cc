// SPDX-License-Identifier: Apache-2.0
// What connect() of the shm transport does with peers that cheat, fail, or cannot be reached.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <atomic>

#include "base/file_descriptor.h"
#include "transport/shm/shm_transport.h"
#include "unit/transport/shm_rank.h"

namespace moe {
namespace {

using namespace moe::test;

// Rank 1 shows another descriptor than that of its window. What rank 0 makes of it is returned.
void withForgedMemory(const std::function<FileDescriptor()>& forge,
                      const std::function<void(ShmRank&, Bootstrap&)>& check) {
  ForkedRanks ranks(2, [&](Bootstrap& bootstrap) {
    ShmRank me(bootstrap);
    if (me.rank == 1) {
      int own = findDescriptor("memfd:moecl");
      ASSERT_GE(own, 0);
      FileDescriptor forged = forge();
      ASSERT_EQ(::dup3(forged.get(), own, O_CLOEXEC), own);
    }
    check(me, bootstrap);
    bootstrap.allGather("", patience());
  });
  ranks.expectSuccess();
}

FileDescriptor forgedMemfd(size_t bytes, int seals) {
  FileDescriptor memory(::memfd_create("forged", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(memory.get(), static_cast<off_t>(bytes)), 0);
  EXPECT_EQ(::fcntl(memory.get(), F_ADD_SEALS, seals), 0);
  return memory;
}

TEST(ShmTrust, UnsafeMemoryOfAPeerIsNotMapped) {
  struct Case {
    std::function<FileDescriptor()> forge;
    std::string expected;
  };
  const std::vector<Case> cases = {
      {[] { return forgedMemfd(kWindow, 0); }, "not sealed against shrinking"},
      {[] { return forgedMemfd(kWindow - 4096, F_SEAL_SHRINK); }, "had announced"},
      {[] { return FileDescriptor(::open("/dev/zero", O_RDWR | O_CLOEXEC)); }, "not sealable memory"},
  };
  for (const Case& one : cases) {
    withForgedMemory(one.forge, [&](ShmRank& me, Bootstrap& bootstrap) {
      me.connect(bootstrap);
      const Peer& other = me.peer(1 - me.rank);
      if (me.rank == 0) {
        EXPECT_EQ(other.reach, Reach::kNone);
        EXPECT_EQ(other.window, nullptr);
        EXPECT_TRUE(contains(other.reason, one.expected)) << other.reason;
        EXPECT_EQ(other.reason.rfind("because ", 0), 0u) << other.reason;
      } else {
        EXPECT_EQ(other.reach, Reach::kMapped);
      }
    });
  }
}

TEST(ShmFailure, MappingThatFailsOnOneRankFailsAllAlike) {
  // Sealed against writing, so that rank 0's mmap fails.
  withForgedMemory([] { return forgedMemfd(kWindow, F_SEAL_SHRINK | F_SEAL_WRITE); },
                   [](ShmRank& me, Bootstrap& bootstrap) {
                     Error error = errorOf([&] { me.connect(bootstrap); });
                     EXPECT_EQ(error.code(), moeSystemError);
                     EXPECT_TRUE(contains(error.text(), "rank 0 could not share its memory")) << error.text();
                     EXPECT_TRUE(contains(error.text(), "cannot map a window")) << error.text();
                   });
}

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#elif defined(__has_feature)
constexpr bool kSanitized = __has_feature(address_sanitizer) || __has_feature(undefined_behavior_sanitizer);
#else
constexpr bool kSanitized = false;
#endif

TEST(ShmFailure, DescriptorsThatRunOutOnOneRankFailAllAlike) {
  // It probes memory through pipes, and takes it for bad when there is no descriptor for one.
  if (kSanitized) GTEST_SKIP() << "the undefined behaviour sanitizer needs descriptors of its own";
  // The second limit lets rank 1 open its listener, but no socket to rank 0.
  for (rlim_t spare : {rlim_t{0}, rlim_t{1}}) {
    ForkedRanks ranks(3, [spare](Bootstrap& bootstrap) {
      ShmRank me(bootstrap);
      if (me.rank == 1) {
        int highest = ::dup(0);
        ::close(highest);
        rlimit few{};
        ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &few), 0);
        few.rlim_cur = static_cast<rlim_t>(highest) + spare;
        ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
      }
      Error error = errorOf([&] { me.connect(bootstrap); });
      EXPECT_EQ(error.code(), moeSystemError);
      EXPECT_TRUE(contains(error.text(), "rank 1 could not share its memory")) << error.text();
      EXPECT_TRUE(contains(error.text(), "Too many open files")) << error.text();
    });
    ranks.expectSuccess();
  }
}

TEST(ShmFailure, ForeignRegionFailsAllAlike) {
  runThreads(2, [](Bootstrap& bootstrap) {
    ShmRank me(bootstrap);
    if (me.rank == 1) me.window = Region();
    Error error = errorOf([&] { me.connect(bootstrap); });
    EXPECT_EQ(error.code(), moeInternalError);
    EXPECT_TRUE(contains(error.text(), "rank 1")) << error.text();
  });
}

TEST(ShmFailure, AnnouncedSizesAreRangeChecked) {
  for (size_t bytes : {size_t{0}, size_t{1000}, ~size_t{4095}}) {
    runThreads(2, [bytes](Bootstrap& bootstrap) {
      ShmRank me(bootstrap);
      if (me.rank == 1) me.window.bytes = bytes;
      Error error = errorOf([&] { me.connect(bootstrap); });
      EXPECT_EQ(error.code(), moeMismatch);
      EXPECT_TRUE(contains(error.text(), cat("rank 1 announces a window of ", bytes, " bytes"))) << error.text();
    });
  }
}

TEST(ShmFailure, UnreadableReportsAreRefused) {
  for (const std::string& report : {std::string(), std::string("xx"), std::string(4, '\0'), std::string(64, '\0'),
                                    std::string("\xff\xff\xff\xff", 4), std::string(4, '\x7f')}) {
    runThreads(2, [&](Bootstrap& bootstrap) {
      if (bootstrap.rank() == 1) {
        bootstrap.allGather(report, patience());
        return;
      }
      ShmRank me(bootstrap);
      Error error = errorOf([&] { me.connect(bootstrap); });
      EXPECT_EQ(error.code(), moeMismatch);
      EXPECT_TRUE(contains(error.text(), "rank 1")) << error.text();
    });
  }
}

TEST(ShmFailure, LostBootstrapKeepsTheFirstError) {
  runThreads(2, [&](Bootstrap& bootstrap) {
    if (bootstrap.rank() == 1) return;
    ShmRank me(bootstrap);
    auto soon = WaitLimit(Deadline::in(milliseconds(50)));
    EXPECT_EQ(errorOf([&] { me.transport->connect(me.window, bootstrap, soon); }).code(), moeTimeout);
  });
}

TEST(ShmNamespaces, AnotherNetworkIsAReason) {
  Shared<std::atomic<bool>> notPermitted;
  ForkedRanks ranks(3, [&](Bootstrap& bootstrap) {
    if (bootstrap.rank() == 1 && ::unshare(CLONE_NEWNET) != 0) notPermitted->store(true);
    bootstrap.allGather("", patience());
    if (notPermitted->load()) return;
    ShmRank me(bootstrap);
    me.connect(bootstrap);
    for (int r = 0; r < me.nranks; ++r) {
      bool apart = r != me.rank && (r == 1 || me.rank == 1);
      EXPECT_EQ(me.peer(r).reach == Reach::kNone, apart) << me.peer(r).reason;
      EXPECT_EQ(contains(me.peer(r).reason, "because it runs in another network namespace"), apart);
    }
    me.transport->announce(PeerState::kLeft);
  });
  ranks.expectSuccess();
  if (notPermitted->load()) GTEST_SKIP() << "this user may not make a network namespace";
}

TEST(ShmNamespaces, OtherProcessIdsDoNotMatter) {
  Shared<std::atomic<bool>> notPermitted;
  ForkedRanks ranks(2, [&](Bootstrap& bootstrap) {
    auto body = [](Bootstrap& inside) {
      ShmRank me(inside);
      me.connect(inside);
      EXPECT_STREQ(me.peer(1 - me.rank).transport, "shm") << me.peer(1 - me.rank).reason;
      me.expectWordsCross();
      inside.allGather("", patience());
      // The first process of a namespace cannot be killed from inside it.
      if (me.rank == 1) ::_exit(0);
      EXPECT_TRUE(me.sees(1, PeerState::kDead));
    };
    // Both are process 1 of a namespace of their own.
    if (::unshare(CLONE_NEWPID) != 0) {
      notPermitted->store(true);
      return;
    }
    pid_t pid = ::fork();
    if (pid == 0) {
      runRankBody(body, bootstrap);
      ::_exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  });
  ranks.expectSuccess();
  if (notPermitted->load()) GTEST_SKIP() << "this user may not make a namespace of process ids";
}

}  // namespace
}  // namespace moe

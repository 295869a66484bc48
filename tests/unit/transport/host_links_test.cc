// SPDX-License-Identifier: Apache-2.0
#include "transport/host_links.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <atomic>

#include "transport/wire.h"
#include "unit/transport/test_ranks.h"

namespace moe {
namespace {

using namespace moe::test;

std::vector<bool> everybody(const Bootstrap& bootstrap) {
  return std::vector<bool>(static_cast<size_t>(bootstrap.nranks()), true);
}

std::vector<std::string> linkAll(HostLinks& links, Bootstrap& bootstrap) {
  std::vector<std::string> addresses = bootstrap.allGather(links.address(), patience());
  return links.connect(addresses, everybody(bootstrap), bootstrap, patience());
}

FileDescriptor memoryWith(const std::string& text) {
  FileDescriptor memory(::memfd_create("test", MFD_CLOEXEC));
  EXPECT_EQ(::write(memory.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  return memory;
}

std::string textIn(const FileDescriptor& memory) {
  std::string text(64, '\0');
  ssize_t got = ::pread(memory.get(), text.data(), text.size(), 0);
  text.resize(got < 0 ? 0 : static_cast<size_t>(got));
  return text;
}

// What the library's wire format says in hand-made packets, for peers that misbehave.
struct Forged {
  std::string name, token;

  explicit Forged(std::string_view address) {
    std::string bootId, network;
    for (std::string* part : {&bootId, &network, &name, &token}) EXPECT_TRUE(takeText(&address, part));
  }
  std::string hello(int from, int to) const {
    std::string packet;
    putValue(&packet, uint32_t{0x6d6f6568});
    putValue(&packet, int32_t{from});
    putValue(&packet, int32_t{to});
    return packet + token;
  }
  static std::string willing(int nranks) {
    std::string verdict;
    for (int rank = 0; rank < nranks; ++rank) putText(&verdict, "+");
    return verdict;
  }
};

// Rank 1 of two, which takes part in HostLinks::connect of rank 0 by hand and returns its socket.
FileDescriptor forgedLink(Bootstrap& bootstrap, const std::string& ownAddress, bool knowsToken) {
  Forged target(bootstrap.allGather(ownAddress, patience())[0]);
  if (!knowsToken) target.token[0] = static_cast<char>(target.token[0] ^ 1);
  FileDescriptor socket;
  EXPECT_EQ(connectToName(target.name, &socket), 0);
  EXPECT_EQ(sendPacket(socket, target.hello(1, 0)), 0);
  bootstrap.allGather(Forged::willing(2), patience());
  return socket;
}

class HostLinksRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, HostLinksRanks, ::testing::Values(1, 2, 5, 16));

TEST_P(HostLinksRanks, EveryPairPassesADescriptor) {
  runThreads(GetParam(), [](Bootstrap& bootstrap) {
    HostLinks links(bootstrap.rank(), bootstrap.nranks());
    std::vector<std::string> reasons = linkAll(links, bootstrap);
    FileDescriptor mine = memoryWith(cat("window of ", bootstrap.rank()));
    auto received = links.exchangeDescriptors(mine.get(), cat("payload of ", bootstrap.rank()), patience());
    for (int peer = 0; peer < bootstrap.nranks(); ++peer) {
      HostLinks::Received& got = received[static_cast<size_t>(peer)];
      EXPECT_EQ(links.linked(peer), peer != bootstrap.rank());
      if (peer == bootstrap.rank()) continue;
      EXPECT_EQ(reasons[static_cast<size_t>(peer)], "");
      EXPECT_EQ(got.failure, "");
      EXPECT_EQ(textIn(got.descriptor), cat("window of ", peer));
      EXPECT_EQ(got.payload, cat("payload of ", peer));
      EXPECT_EQ(::fcntl(got.descriptor.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    }
  });
}

TEST(HostLinks, SixtyFourProcessesLinkUp) {
  ForkedRanks ranks(64, [](Bootstrap& bootstrap) {
    HostLinks links(bootstrap.rank(), bootstrap.nranks());
    linkAll(links, bootstrap);
    EXPECT_EQ(links.linkedPeers().size(), 63u);
    auto received = links.exchangeDescriptors(memoryWith(cat(bootstrap.rank())).get(), "", patience());
    for (int peer : links.linkedPeers()) {
      EXPECT_EQ(textIn(received[static_cast<size_t>(peer)].descriptor), cat(peer));
    }
    bootstrap.allGather("", patience());
  });
  ranks.expectSuccess();
}

TEST(HostLinks, SingleSendAndReceive) {
  runThreads(2, [](Bootstrap& bootstrap) {
    HostLinks links(bootstrap.rank(), 2);
    linkAll(links, bootstrap);
    if (bootstrap.rank() == 0) {
      links.sendDescriptor(1, memoryWith("hello").get(), std::string(HostLinks::kMaxPayload, 'x'), patience());
      Error none = errorOf([&] { links.receiveDescriptor(1, WaitLimit(Deadline::in(milliseconds(30)))); });
      EXPECT_EQ(none.code(), moeTimeout);
      EXPECT_TRUE(contains(none.text(), "waiting for rank 1")) << none.text();
    } else {
      HostLinks::Received got = links.receiveDescriptor(0, patience());
      EXPECT_EQ(textIn(got.descriptor), "hello");
      EXPECT_EQ(got.payload.size(), HostLinks::kMaxPayload);
    }
    bootstrap.allGather("", patience());
  });
}

TEST(HostLinks, OnlyPairsThatBothWantAreLinked) {
  runThreads(3, [](Bootstrap& bootstrap) {
    HostLinks links(bootstrap.rank(), 3);
    std::vector<std::string> addresses = bootstrap.allGather(links.address(), patience());
    std::vector<bool> wanted(3, true);
    if (bootstrap.rank() == 0) wanted[2] = false;
    std::vector<std::string> reasons = links.connect(addresses, wanted, bootstrap, patience());
    if (bootstrap.rank() == 0) {
      EXPECT_EQ(links.linkedPeers(), std::vector<int>{1});
    }
    if (bootstrap.rank() == 2) {
      EXPECT_EQ(links.linkedPeers(), std::vector<int>{1});
      EXPECT_TRUE(contains(reasons[0], "does not want")) << reasons[0];
    }
  });
}

TEST(HostLinks, WrongTokenIsRefusedByEitherSide) {
  for (int wrongFor : {0, 1}) {
    runThreads(2, [wrongFor](Bootstrap& bootstrap) {
      HostLinks links(bootstrap.rank(), 2);
      std::vector<std::string> addresses = bootstrap.allGather(links.address(), patience());
      // The token comes last in an address. The rank that is not `wrongFor` has a wrong idea of its token.
      if (bootstrap.rank() != wrongFor) addresses[static_cast<size_t>(wrongFor)].back() ^= 1;
      std::vector<std::string> reasons = links.connect(addresses, everybody(bootstrap), bootstrap, patience());
      if (bootstrap.rank() == wrongFor) {
        const std::string& reason = reasons[static_cast<size_t>(1 - wrongFor)];
        EXPECT_FALSE(links.linked(1 - wrongFor));
        EXPECT_TRUE(contains(reason, "did not know this rank's token")) << reason;
      }
      bootstrap.allGather("", patience());
    });
  }
}

TEST(HostLinks, UnreachableSocketsAreReasonsOnBothSides) {
  runThreads(2, [](Bootstrap& bootstrap) {
    std::string gone = HostLinks(bootstrap.rank(), 2).address();
    HostLinks links(bootstrap.rank(), 2);
    std::vector<std::string> addresses =
        bootstrap.allGather(bootstrap.rank() == 0 ? gone : links.address(), patience());
    std::vector<std::string> reasons = links.connect(addresses, everybody(bootstrap), bootstrap, patience());
    EXPECT_TRUE(contains(reasons[static_cast<size_t>(1 - bootstrap.rank())], "Connection refused"));
  });
}

TEST(HostLinks, UnreadableAddressesAndOtherHostsAreReasons) {
  runThreads(3, [](Bootstrap& bootstrap) {
    HostLinks links(bootstrap.rank(), 3);
    std::string address = links.address();
    if (bootstrap.rank() == 1) address.resize(address.size() - 5);
    if (bootstrap.rank() == 2) address[sizeof(uint32_t)] = '#';  // the first letter of the boot id
    std::vector<std::string> addresses = bootstrap.allGather(address, patience());
    std::vector<std::string> reasons = links.connect(addresses, everybody(bootstrap), bootstrap, patience());
    EXPECT_TRUE(links.linkedPeers().empty());
    if (bootstrap.rank() != 0) return;
    EXPECT_TRUE(contains(reasons[1], "cannot be read")) << reasons[1];
    EXPECT_EQ(reasons[2], "it runs on another host");
  });
}

TEST(HostLinks, AnotherUserIsRefusedByName) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  ForkedRanks ranks(2, [](Bootstrap& bootstrap) {
    if (bootstrap.rank() == 1) {
      ASSERT_EQ(::setresuid(65534, 65534, 65534), 0);
    }
    HostLinks links(bootstrap.rank(), 2);
    std::vector<std::string> reasons = linkAll(links, bootstrap);
    const std::string& reason = reasons[static_cast<size_t>(1 - bootstrap.rank())];
    EXPECT_TRUE(contains(reason, "user 0") && contains(reason, "user 65534")) << reason;
  });
  ranks.expectSuccess();
}

TEST(HostLinks, AnotherNetworkNamespaceIsAReason) {
  Shared<std::atomic<bool>> notPermitted;
  ForkedRanks ranks(2, [&](Bootstrap& bootstrap) {
    if (bootstrap.rank() == 1 && ::unshare(CLONE_NEWNET) != 0) notPermitted->store(true);
    bootstrap.allGather("", patience());
    if (notPermitted->load()) return;
    HostLinks links(bootstrap.rank(), 2);
    std::vector<std::string> reasons = linkAll(links, bootstrap);
    const std::string& reason = reasons[static_cast<size_t>(1 - bootstrap.rank())];
    EXPECT_TRUE(contains(reason, "network namespace")) << reason;
  });
  ranks.expectSuccess();
  if (notPermitted->load()) GTEST_SKIP() << "this user may not make a network namespace";
}

TEST(HostLinks, SilentPeerIsATimeoutThatNamesIt) {
  runThreads(2, [](Bootstrap& bootstrap) {
    HostLinks links(bootstrap.rank(), 2);
    std::vector<std::string> addresses = bootstrap.allGather(links.address(), patience());
    if (bootstrap.rank() == 0) {
      Error error = errorOf([&] {
        links.connect(addresses, everybody(bootstrap), bootstrap, WaitLimit(Deadline::in(milliseconds(500))));
      });
      EXPECT_EQ(error.code(), moeTimeout);
      EXPECT_TRUE(contains(error.text(), "waiting for rank 1")) << error.text();
    } else {
      bootstrap.allGather(Forged::willing(2), patience());
    }
    bootstrap.allGather("", patience());
  });
}

TEST(HostLinks, AbortEndsTheWait) {
  std::atomic<bool> aborted{false};
  runThreads(2, [&](Bootstrap& bootstrap) {
    HostLinks links(bootstrap.rank(), 2);
    std::vector<std::string> addresses = bootstrap.allGather(links.address(), patience());
    if (bootstrap.rank() == 0) {
      Error error = errorOf([&] {
        links.connect(addresses, everybody(bootstrap), bootstrap, WaitLimit(Deadline::in(kPatience), &aborted));
      });
      EXPECT_EQ(error.code(), moeAborted);
    } else {
      bootstrap.allGather(Forged::willing(2), patience());
      aborted.store(true);
    }
    bootstrap.allGather("", patience());
  });
}

TEST(HostLinks, ForgedHelloWithoutTheTokenIsRefused) {
  runThreads(2, [](Bootstrap& bootstrap) {
    HostLinks links(bootstrap.rank(), 2);
    if (bootstrap.rank() == 0) {
      std::vector<std::string> reasons = linkAll(links, bootstrap);
      EXPECT_TRUE(contains(reasons[1], "did not know this rank's token")) << reasons[1];
    } else {
      FileDescriptor socket = forgedLink(bootstrap, links.address(), false);
      Packet answer;
      EXPECT_TRUE(eventually([&] { return (answer = receivePacket(socket, 256)).status != Packet::kNothingYet; }));
      EXPECT_EQ(answer.status, Packet::kClosed);
    }
  });
}

TEST(HostLinks, StrangersDoNotDisturb) {
  runThreads(3, [](Bootstrap& bootstrap) {
    HostLinks links(bootstrap.rank(), 3);
    Forged target(bootstrap.allGather(links.address(), patience())[0]);
    std::vector<FileDescriptor> strangers(4);
    if (bootstrap.rank() == 2) {
      for (FileDescriptor& stranger : strangers) EXPECT_EQ(connectToName(target.name, &stranger), 0);
      EXPECT_EQ(sendPacket(strangers[0], "garbage"), 0);
      EXPECT_EQ(sendPacket(strangers[1], target.hello(77, 0)), 0);
      EXPECT_EQ(sendPacket(strangers[2], target.hello(1, 2)), 0);
    }
    linkAll(links, bootstrap);
    EXPECT_EQ(links.linkedPeers().size(), 2u);
  });
}

// Sends what no rank sends in place of a descriptor.
void expectRefusedDescriptor(const std::function<void(const FileDescriptor&)>& misbehave, const std::string& expected) {
  runThreads(2, [&](Bootstrap& bootstrap) {
    HostLinks links(bootstrap.rank(), 2);
    if (bootstrap.rank() == 0) {
      linkAll(links, bootstrap);
      Error error = errorOf([&] { links.receiveDescriptor(1, patience()); });
      EXPECT_TRUE(contains(error.text(), expected)) << error.text();
      EXPECT_TRUE(contains(error.text(), "rank 1")) << error.text();
      bootstrap.allGather("", patience());
    } else {
      FileDescriptor socket = forgedLink(bootstrap, links.address(), true);
      misbehave(socket);
      bootstrap.allGather("", patience());
    }
  });
}

std::string descriptorPacket(size_t payload) {
  std::string packet;
  putValue(&packet, uint32_t{0x6d6f6566});
  return packet + std::string(payload, 'x');
}

void sendTwoDescriptors(const FileDescriptor& socket) {
  int fds[2] = {0, 1};
  std::string bytes = descriptorPacket(1);
  iovec data{bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(fds))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* part = CMSG_FIRSTHDR(&message);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(sizeof(fds));
  std::memcpy(CMSG_DATA(part), fds, sizeof(fds));
  EXPECT_GT(::sendmsg(socket.get(), &message, 0), 0);
}

TEST(HostLinks, AnythingButOneDescriptorIsRefused) {
  expectRefusedDescriptor([](const FileDescriptor& s) { sendPacket(s, "garbage", 0); }, "not a descriptor's");
  expectRefusedDescriptor([](const FileDescriptor& s) { sendPacket(s, descriptorPacket(1)); }, "0 descriptors");
  expectRefusedDescriptor(sendTwoDescriptors, "2 descriptors");
  expectRefusedDescriptor(
      [](const FileDescriptor& s) { sendPacket(s, descriptorPacket(HostLinks::kMaxPayload + 1), 0); }, "at most 4096");
  expectRefusedDescriptor([](const FileDescriptor& s) { sendPacket(s, departurePacket(PeerState::kAborted)); },
                          "gave up");
  expectRefusedDescriptor([](const FileDescriptor& s) { ::shutdown(s.get(), SHUT_RDWR); }, "closed its connection");
}

size_t openDescriptors() {
  size_t count = 0;
  for (int fd = 0; fd < 4096; ++fd) count += ::fcntl(fd, F_GETFD) >= 0;
  return count;
}

TEST(HostLinks, SurplusDescriptorsAreClosed) {
  size_t before = openDescriptors();
  expectRefusedDescriptor(sendTwoDescriptors, "2 descriptors");
  EXPECT_EQ(openDescriptors(), before);
}

TEST(HostLinks, DeparturesReachThePeers) {
  runThreads(4, [](Bootstrap& bootstrap) {
    auto states = std::make_shared<PeerStates>(4);
    auto own = std::make_unique<HostLinks>(bootstrap.rank(), 4);
    HostLinks& links = *own;
    linkAll(links, bootstrap);
    links.watch(states);
    if (bootstrap.rank() == 1) links.announce(PeerState::kLeft);
    if (bootstrap.rank() == 2) links.announce(PeerState::kAborted);
    if (bootstrap.rank() == 3) {  // goes without a word
      own.reset();
      bootstrap.allGather("", patience());
      return;
    }
    auto is = [&](int rank, PeerState state) { return rank == bootstrap.rank() || states->get(rank) == state; };
    EXPECT_TRUE(eventually([&] { return is(1, PeerState::kLeft) && is(2, PeerState::kAborted); }));
    EXPECT_TRUE(eventually([&] { return is(3, PeerState::kDead); }));
    EXPECT_TRUE(states->anyLost());
    for (int rank : {0, 1, 2}) EXPECT_NE(states->get(rank), PeerState::kDead);
    bootstrap.allGather("", patience());
  });
}

TEST(HostLinks, AGoodbyeSurvivesACloseWithUnreadData) {
  // Both say goodbye and close; each may close before it has read the other's word, which resets the connection.
  for (int round = 0; round < 10; ++round) {
    runThreads(2, [](Bootstrap& bootstrap) {
      auto states = std::make_shared<PeerStates>(2);
      HostLinks links(bootstrap.rank(), 2);
      linkAll(links, bootstrap);
      if (bootstrap.rank() == 1) {
        links.announce(PeerState::kLeft);
        bootstrap.allGather("", patience());
        bootstrap.allGather("", patience());
        return;  // closes with rank 0's word unread
      }
      bootstrap.allGather("", patience());
      links.announce(PeerState::kLeft);
      bootstrap.allGather("", patience());
      links.watch(states);
      EXPECT_TRUE(eventually([&] { return states->get(1) != PeerState::kAlive; }));
      EXPECT_EQ(states->get(1), PeerState::kLeft);
    });
  }
}

TEST(HostLinks, NonsenseOnAWatchedLinkCountsAsDeath) {
  runThreads(2, [](Bootstrap& bootstrap) {
    auto states = std::make_shared<PeerStates>(2);
    HostLinks links(bootstrap.rank(), 2);
    if (bootstrap.rank() == 0) {
      linkAll(links, bootstrap);
      links.watch(states);
      EXPECT_TRUE(eventually([&] { return states->get(1) == PeerState::kDead; }));
      bootstrap.allGather("", patience());
    } else {
      FileDescriptor socket = forgedLink(bootstrap, links.address(), true);
      sendPacket(socket, departurePacket(PeerState::kDead));
      bootstrap.allGather("", patience());
    }
  });
}

TEST(HostLinks, TooManyDescriptorsUnderWayAreWaitedFor) {
  Shared<std::atomic<bool>> unlimited;
  ForkedRanks ranks(2, [&](Bootstrap& bootstrap) {
    if (::geteuid() == 0) {
      ASSERT_EQ(::setresuid(65533, 65533, 65533), 0);
    }
    HostLinks links(bootstrap.rank(), 2);
    linkAll(links, bootstrap);
    if (bootstrap.rank() == 0) {
      rlimit few{};
      ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &few), 0);
      few.rlim_cur = 64;
      ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
      int pair[2];
      ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
      FileDescriptor from(pair[0]);
      FileDescriptor to(pair[1]);
      int error = 0;
      for (int sent = 0; sent < 200 && error == 0; ++sent) error = sendPacket(from, "x", to.get());
      unlimited->store(error != ETOOMANYREFS);
      if (!unlimited->load()) {
        auto soon = WaitLimit(Deadline::in(milliseconds(50)));
        EXPECT_EQ(errorOf([&] { links.sendDescriptor(1, from.get(), "", soon); }).code(), moeTimeout);
        while (receivePacket(to, 1).status == Packet::kReceived) {
        }
      }
      links.sendDescriptor(1, from.get(), "", patience());
    } else {
      EXPECT_TRUE(links.receiveDescriptor(0, patience()).descriptor.valid());
    }
    bootstrap.allGather("", patience());
  });
  ranks.expectSuccess();
  if (unlimited->load()) GTEST_SKIP() << "this user has no limit of descriptors under way";
}

}  // namespace
}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/launcher.h"

#include <map>

#include "unit/bootstrap/helpers.h"

namespace moe::test {
namespace {

constexpr auto kPlenty = 20s;

using Variables = std::map<std::string, std::string>;

Launch parse(const Variables& variables) {
  return parseLaunch([&](const char* name) -> const char* {
    auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

const Variables kTorchrun = {{"RANK", "1"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "node7"},
                             {"MASTER_PORT", "29500"},
                             {"TORCHELASTIC_RUN_ID", "none"}};
const Variables kMpirun = {{"OMPI_COMM_WORLD_RANK", "2"},
                           {"OMPI_COMM_WORLD_SIZE", "3"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                           {"PMIX_NAMESPACE", "prterun-node-42@1"}};
const Variables kSrun = {{"SLURM_PROCID", "0"},
                         {"SLURM_NTASKS", "8"},
                         {"SLURM_NNODES", "1"},
                         {"SLURM_JOB_ID", "77"},
                         {"SLURM_STEP_ID", "3"}};

Variables with(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}

void expectLaunch(const Variables& variables, const std::string& launcher, int rank, int nranks, bool oneHost) {
  Launch launch = parse(variables);
  EXPECT_EQ(launch.launcher, launcher);
  EXPECT_EQ(launch.rank.rank, rank);
  EXPECT_EQ(launch.rank.nranks, nranks);
  EXPECT_EQ(launch.oneHost, oneHost);
}

TEST(Launcher, ReadsTorchrun) {
  expectLaunch(kTorchrun, "torchrun", 1, 4, true);
  expectLaunch(with(kTorchrun, "LOCAL_WORLD_SIZE", "2"), "torchrun", 1, 4, false);
  EXPECT_NE(parse(kTorchrun).job, parse(with(kTorchrun, "MASTER_PORT", "29501")).job);
  EXPECT_NE(parse(kTorchrun).job, parse(with(kTorchrun, "TORCHELASTIC_RESTART_COUNT", "1")).job);
}

TEST(Launcher, RanksStartedByHandAreOnOneHostIfTheirMasterIs) {
  Variables byHand = {{"RANK", "0"}, {"WORLD_SIZE", "2"}};
  expectLaunch(byHand, "torchrun", 0, 2, true);
  expectLaunch(with(byHand, "MASTER_ADDR", "127.0.0.1"), "torchrun", 0, 2, true);
  expectLaunch(with(byHand, "MASTER_ADDR", "node7"), "torchrun", 0, 2, false);
}

TEST(Launcher, ReadsOpenMpi) {
  expectLaunch(kMpirun, "mpirun", 2, 3, true);
  expectLaunch(with(kMpirun, "OMPI_COMM_WORLD_LOCAL_SIZE", "1"), "mpirun", 2, 3, false);
  Variables older = kMpirun;
  older.erase("PMIX_NAMESPACE");
  expectLaunch(older, "mpirun", 2, 3, false);
  expectLaunch(with(older, "OMPI_MCA_ess_base_jobid", "123"), "mpirun", 2, 3, true);
  EXPECT_NE(parse(kMpirun).job, parse(with(kMpirun, "PMIX_NAMESPACE", "prterun-node-42@2")).job);
}

TEST(Launcher, ReadsSrun) {
  expectLaunch(kSrun, "srun", 0, 8, true);
  expectLaunch(with(kSrun, "SLURM_NNODES", "2"), "srun", 0, 8, false);
  EXPECT_NE(parse(kSrun).job, parse(with(kSrun, "SLURM_STEP_ID", "4")).job);
  // A batch script is no step.
  Variables batch = kSrun;
  batch.erase("SLURM_STEP_ID");
  expectAll({outcomeOf([&] { parse(batch); })}, moeInvalidUsage, "no launcher's variables");
}

TEST(Launcher, TheInnerLauncherCounts) {
  Variables both = kSrun;
  both.insert(kMpirun.begin(), kMpirun.end());
  expectLaunch(both, "mpirun", 2, 3, true);
  both.insert(kTorchrun.begin(), kTorchrun.end());
  expectLaunch(both, "torchrun", 1, 4, true);
}

TEST(Launcher, SaysWhatItLookedForAndWhatMakesNoSense) {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}) {
    expectAll({outcomeOf([] { parse({}); })}, moeInvalidUsage, name);
  }
  expectAll({outcomeOf([] { parse(with(kTorchrun, "RANK", "one")); })}, moeInvalidUsage, "RANK=one");
  expectAll({outcomeOf([] { parse(with(kTorchrun, "RANK", "4")); })}, moeInvalidUsage, "RANK=4 and WORLD_SIZE=4");
  expectAll({outcomeOf([] { parse(with(kTorchrun, "RANK", "-1")); })}, moeInvalidUsage, "RANK=-1");
}

// A name that no other run of this test has.
std::string freshJob() { return cat("test ", ::getpid(), " ", Deadline::Clock::now().time_since_epoch().count()); }

TEST(Launcher, RanksOfOneHostMeetAgainAndAgain) {
  std::string job = freshJob();
  expectAllSucceed(runRanks(upTo(4), [&](int rank) {
    for (MeetingNumber number = 0; number < 5; ++number) {
      auto bootstrap = joinOnOneHost(job, number, {rank, 4}, within(kPlenty));
      exchangeAndCheck(*bootstrap, 2, within(kPlenty));
    }
  }));
}

TEST(Launcher, TwoJobsOnOneHostDoNotMix) {
  std::string jobs[2] = {freshJob() + "a", freshJob() + "b"};
  expectAllSucceed(runRanks(upTo(4), [&](int each) {
    auto bootstrap = joinOnOneHost(jobs[each / 2], 0, {each % 2, 2}, within(kPlenty));
    for (const auto& part : bootstrap->allGather(jobs[each / 2], within(kPlenty))) EXPECT_EQ(part, jobs[each / 2]);
  }));
}

TEST(Launcher, AMissingRankIsNamed) {
  std::string job = freshJob();
  expectAll(runRanks({0, 1},
                     [&](int rank) {
                       joinOnOneHost(job, 0, {rank, 3}, within(300ms));
                     }),
            moeTimeout, "waiting for rank 2, which has not joined");
  expectAll({outcomeOf([&] {
              joinOnOneHost(freshJob(), 0, {1, 2}, within(100ms));
            })},
            moeTimeout, "has rank 0 called moeCommInitEnv");
}

TEST(Launcher, RanksMeetAtACommIdAgainAndAgain) {
  std::string commId = closedPort().text();
  expectAllSucceed(runRanks(upTo(3), [&](int rank) {
    for (MeetingNumber number = 0; number < 5; ++number) {
      auto bootstrap = joinAtCommId(commId, "a secret", number, {rank, 3}, within(kPlenty));
      exchangeAndCheck(*bootstrap, 2, within(kPlenty));
    }
  }));
}

TEST(Launcher, ACommIdMayBeANameOrAnIpv6Address) {
  std::vector<std::string> places = {cat("localhost:", closedPort().port())};
  if (haveIpv6()) places.push_back(closedPort(AF_INET6).text());
  for (const std::string& commId : places) {
    expectAllSucceed(runRanks(upTo(2), [&](int rank) {
      joinAtCommId(commId, "a secret", 0, {rank, 2}, within(kPlenty));
    }));
  }
}

TEST(Launcher, RanksWithAnotherCommSecretStayOutside) {
  std::string commId = closedPort().text();
  auto outcomes = runRanks({0, 1}, [&](int rank) {
    joinAtCommId(commId, rank == 0 ? "right" : "wrong", 0, {rank, 2}, within(rank == 0 ? 600ms : 400ms));
  });
  EXPECT_EQ(outcomes[0].code, moeTimeout);
  EXPECT_NE(outcomes[0].text.find("waiting for rank 1"), std::string::npos) << outcomes[0].text;
  EXPECT_EQ(outcomes[1].code, moeTimeout);
  EXPECT_NE(outcomes[1].text.find("has another secret"), std::string::npos) << outcomes[1].text;
}

TEST(Launcher, ACommIdNeedsASecretAndAPort) {
  expectAll({outcomeOf([] {
              joinAtCommId("127.0.0.1:4000", "", 0, {0, 1}, within(1s));
            })},
            moeInvalidUsage, "MOE_COMM_SECRET is not");
  for (const char* commId : {"", "host", "host:", ":80", "host:0", "host:65536", "host:8o", "[::1]"}) {
    expectAll({outcomeOf([&] {
                joinAtCommId(commId, "s", 0, {0, 1}, within(1s));
              })},
              moeInvalidArgument, "is not host:port");
  }
}

TEST(Launcher, APortThatIsTakenIsNamed) {
  int error = 0;
  FileDescriptor taken = listenAt(loopbackAddress(AF_INET, 0), &error);
  std::string commId = localAddress(taken.get()).text();
  expectAll({outcomeOf([&] {
              joinAtCommId(commId, "s", 0, {0, 2}, within(100ms));
            })},
            moeSystemError, cat("rank 0 cannot listen at ", commId));
}

}  // namespace
}  // namespace moe::test

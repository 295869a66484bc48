// SPDX-License-Identifier: Apache-2.0
// Ranks as processes that die, stop, sleep, leave or abort: the others learn who it was, in time, and can go on.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>

#include "conformance/rank_process.h"
#include "conformance/simple_call.h"

namespace moetest {
namespace {

constexpr int kVictim = 2;
constexpr int kVictimRound = 5;

std::string oneLine(std::string text) {
  for (char& c : text) c = c == '\n' ? ' ' : c;
  return text;
}

// What the victim does before its round.
void act(const std::string& action, RankContext& context, moeComm_t comm) {
  if (action == "exit") std::exit(7);
  if (action == "leave") _exit(7);
  if (action == "abort") moeCommAbort(comm);
  if (action == "stop") {
    context.parent.tell("stopping");
    raise(SIGSTOP);
  }
  if (action == "sleep") {
    context.parent.tell("stopping");
    context.parent.hear(milliseconds(20000));
  }
}

// Says what is known after a failed call: the call's code and text, the state, the lost ranks.
void tellFailure(RankContext& context, moeComm_t comm, const std::string& call, moeResult_t result) {
  std::string text = moeGetLastError();
  moeResult_t state = moeSuccess;
  moeCommGetAsyncError(comm, &state);
  std::vector<int32_t> lost(static_cast<size_t>(context.nranks), -1);
  moeCommGetDead(comm, lost.data());
  std::ostringstream line;
  line << "failed " << result << " " << state << " ";
  for (int32_t one : lost) line << one;
  line << " " << call << ": " << oneLine(text);
  context.parent.tell(line.str());
}

std::string runRounds(SimpleCall& call, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    if (std::string wrong = call.runBoth(round); !wrong.empty()) return wrong;
  }
  return "";
}

// loop TIMEOUT ROUNDS ACTION: rounds of dispatch and combine, in the middle of which the victim acts. Ends with "done",
// or with "failed ..." and "destroyed". Then, told "again RANK NRANKS", meets once more and runs a few rounds.
int loop(RankContext& context) {
  moeConfig_t config = simpleConfig(64, 256, 8, 3);
  config.timeoutMs = std::atoi(context.arguments.at(0).c_str());
  int rounds = std::atoi(context.arguments.at(1).c_str());
  moeUniqueId_t id = context.meet();
  moeComm_t comm = nullptr;
  if (moeCommInit(&comm, context.nranks, &id, context.rank, &config) != moeSuccess) {
    context.parent.tell("init: " + oneLine(moeGetLastError()));
    return 1;
  }
  bool failed = false;
  {
    SimpleCall call(comm, config, context.rank, context.nranks);
    for (int round = 0; round < rounds && !failed; ++round) {
      if (round == kVictimRound) context.parent.tell("running");
      if (context.rank == kVictim && round == kVictimRound) act(context.arguments.at(2), context, comm);
      call.reset(round);
      moeResult_t result = call.runDispatch();
      const char* what = "dispatch";
      if (result == moeSuccess) {
        what = "combine";
        result = call.runCombine();
      }
      failed = result != moeSuccess;
      if (failed) {
        tellFailure(context, comm, what, result);
      } else if (std::string wrong = call.wrongOutput(); !wrong.empty()) {
        context.parent.tell("wrong " + wrong);
        return 1;
      }
    }
  }
  if (moeCommDestroy(comm) != moeSuccess) context.parent.tell("destroy: " + oneLine(moeGetLastError()));
  if (!failed) {
    context.parent.tell("done");
    return 0;
  }
  context.parent.tell("destroyed");
  std::istringstream again(context.parent.hear(milliseconds(20000)).value_or(""));
  std::string word;
  if (!(again >> word >> context.rank >> context.nranks) || word != "again") return 0;
  id = context.meet();
  if (moeCommInit(&comm, context.nranks, &id, context.rank, &config) != moeSuccess) {
    context.parent.tell("second init: " + oneLine(moeGetLastError()));
    return 1;
  }
  {
    SimpleCall call(comm, config, context.rank, context.nranks);
    std::string wrong = runRounds(call, 10);
    context.parent.tell(wrong.empty() ? "fine" : wrong);
  }
  return moeCommDestroy(comm) == moeSuccess ? 0 : 1;
}

const RankProgramEntry kLoop("loop", loop);

struct Failed {
  int code = -1, state = -1;
  std::string lost, text;
};

// Reads lines until "failed ...".
Failed hearFailure(RankGroup& ranks, int rank, milliseconds patience) {
  Failed result;
  for (;;) {
    std::string line = ranks.hear(rank, patience);
    std::istringstream words(line);
    std::string word;
    if (words >> word && word == "running") continue;
    if (word != "failed") {
      result.text = "instead of a failure: " + line;
      return result;
    }
    words >> result.code >> result.state >> result.lost;
    std::getline(words, result.text);
    return result;
  }
}

bool names(const std::string& text, int rank) { return text.find("rank " + std::to_string(rank)) != std::string::npos; }

void killOneOfFour(milliseconds later) {
  RankGroup ranks("loop", 4, {"20000", "1000000", "none"});
  ASSERT_TRUE(ranks.introduce());
  for (int rank = 0; rank < 4; ++rank) ASSERT_EQ(ranks.hear(rank), "running");
  // A moment in the middle of whatever the ranks do then.
  EXPECT_EQ(ranks.hear(0, later), "");
  Clock::time_point killed = Clock::now();
  ranks[kVictim].signal(SIGKILL);
  for (int rank : {0, 1, 3}) {
    Failed failed = hearFailure(ranks, rank, milliseconds(10000));
    EXPECT_EQ(failed.code, moeRankLost) << failed.text;
    EXPECT_TRUE(names(failed.text, kVictim)) << failed.text;
    EXPECT_EQ(failed.state, moeRankLost);
    EXPECT_EQ(failed.lost.substr(2, 1), "1") << failed.lost;
    EXPECT_LT(since(killed), milliseconds(1000)) << "rank " << rank;
  }
  for (int rank : {0, 1, 3}) EXPECT_EQ(ranks.hear(rank), "destroyed");
  int next = 0;
  for (int rank : {0, 1, 3}) ranks[rank].lines().tell("again " + std::to_string(next++) + " 3");
  ASSERT_TRUE(ranks.introduce({1, 3}));
  for (int rank : {0, 1, 3}) {
    EXPECT_EQ(ranks.hear(rank), "fine");
    EXPECT_EQ(ranks[rank].exitCode(milliseconds(5000)), 0);
  }
}

TEST(ProcessRanksFailure, KilledRankIsNamedAndSurvivorsGoOn) {
  for (int run = 0; run < 3; ++run) killOneOfFour(milliseconds(1 + 7 * run));
}

TEST(ProcessRanksFailure, KilledAtManyMoments_long) {
  for (int run = 0; run < 20; ++run) killOneOfFour(milliseconds(1 + 13 * run % 40));
}

void expectVictimLeft(const std::string& action) {
  RankGroup ranks("loop", 4, {"20000", "1000000", action});
  ASSERT_TRUE(ranks.introduce());
  EXPECT_EQ(ranks[kVictim].exitCode(milliseconds(10000)), 7) << action;
  Clock::time_point left = Clock::now();
  for (int rank : {0, 1, 3}) {
    Failed failed = hearFailure(ranks, rank, milliseconds(10000));
    EXPECT_EQ(failed.code, moeRankLost) << failed.text;
    EXPECT_TRUE(names(failed.text, kVictim)) << failed.text;
    EXPECT_LT(since(left), milliseconds(1000));
    EXPECT_EQ(ranks.hear(rank), "destroyed");
    ranks[rank].lines().tell("stop");
    EXPECT_EQ(ranks[rank].exitCode(milliseconds(5000)), 0) << "nothing waits at exit";
  }
}

TEST(ProcessRanksFailure, ExitWithoutDestroyIsSeen) { expectVictimLeft("exit"); }

TEST(ProcessRanksFailure, EndWithoutExitHandlersIsSeen) { expectVictimLeft("leave"); }

TEST(ProcessRanksFailure, AbortIsToldToThePeers) {
  RankGroup ranks("loop", 4, {"20000", "1000000", "abort"});
  ASSERT_TRUE(ranks.introduce());
  Failed own = hearFailure(ranks, kVictim, milliseconds(10000));
  EXPECT_EQ(own.code, moeAborted) << own.text;
  EXPECT_EQ(own.state, moeAborted);
  for (int rank : {0, 1, 3}) {
    Failed failed = hearFailure(ranks, rank, milliseconds(2000));
    EXPECT_EQ(failed.code, moeRankLost) << failed.text;
    EXPECT_TRUE(names(failed.text, kVictim)) << failed.text;
    EXPECT_EQ(failed.lost.substr(2, 1), "1") << failed.lost;
  }
}

// Stopped or asleep for less than the timeout: late, and exact.
void expectPatience(const std::string& action) {
  RankGroup ranks("loop", 4, {"20000", "40", action});
  ASSERT_TRUE(ranks.introduce());
  for (int rank = 0; rank < 4; ++rank) ASSERT_EQ(ranks.hear(rank), "running");
  ASSERT_EQ(ranks.hear(kVictim), "stopping");
  for (int rank : {0, 1, 3})
    EXPECT_EQ(ranks.hear(rank, milliseconds(250)), "") << "nobody can go on without the victim";
  ranks[kVictim].signal(SIGCONT);
  ranks[kVictim].lines().tell("go on");
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(ranks.hear(rank), "done");
    EXPECT_EQ(ranks[rank].exitCode(milliseconds(5000)), 0);
  }
}

TEST(ProcessRanksFailure, StoppedForLessThanTheTimeoutIsExact) { expectPatience("stop"); }

TEST(ProcessRanksFailure, SleepingForLessThanTheTimeoutIsExact) { expectPatience("sleep"); }

// Longer than the timeout: every other rank says whom it waited for.
void expectTimeout(const std::string& action) {
  RankGroup ranks("loop", 4, {"300", "1000000", action});
  ASSERT_TRUE(ranks.introduce());
  for (int rank = 0; rank < 4; ++rank) ASSERT_EQ(ranks.hear(rank), "running");
  ASSERT_EQ(ranks.hear(kVictim), "stopping");
  Clock::time_point stopped = Clock::now();
  for (int rank : {0, 1, 3}) {
    Failed failed = hearFailure(ranks, rank, milliseconds(10000));
    EXPECT_EQ(failed.code, moeTimeout) << failed.text;
    EXPECT_TRUE(names(failed.text, kVictim)) << failed.text;
    EXPECT_EQ(failed.state, failed.code);
    EXPECT_LT(since(stopped), milliseconds(2000));
  }
  EXPECT_GE(since(stopped), milliseconds(250));
  for (int rank : {0, 1, 3}) EXPECT_EQ(ranks.hear(rank), "destroyed");
  ranks[kVictim].signal(SIGCONT);
  ranks[kVictim].lines().tell("go on");
  Failed late = hearFailure(ranks, kVictim, milliseconds(5000));
  EXPECT_TRUE(late.code == moeRankLost || late.code == moeTimeout) << late.text;
}

TEST(ProcessRanksFailure, StoppedForLongerIsATimeout) { expectTimeout("stop"); }

TEST(ProcessRanksFailure, SleepingForLongerIsATimeout) { expectTimeout("sleep"); }

// Two rounds and out, in fresh processes, again and again: nothing is in flight when they end.
void expectCleanEnds(int runs) {
  for (int run = 0; run < runs; ++run) {
    RankGroup ranks("loop", 4, {"20000", "2", "none"});
    ASSERT_TRUE(ranks.introduce());
    for (int rank = 0; rank < 4; ++rank) {
      ASSERT_EQ(ranks.hear(rank), "done") << "run " << run;
      ASSERT_EQ(ranks[rank].exitCode(milliseconds(5000)), 0) << "run " << run;
    }
  }
}

TEST(ProcessRanksFailure, FreshProcessesEndCleanly) { expectCleanEnds(10); }

TEST(ProcessRanksFailure, FreshProcessesEndCleanly_long) { expectCleanEnds(50); }

}  // namespace
}  // namespace moetest

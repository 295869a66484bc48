// SPDX-License-Identifier: Apache-2.0
// Ranks as processes that die, stop, sleep, leave or abort: the others learn who it was, in time, and can go on.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "conformance/on_backend.h"
#include "conformance/rank_process.h"
#include "conformance/simple_call.h"

namespace moetest {
namespace {

constexpr int kVictimRound = 5;

// Which of so many ranks dies, stops or leaves.
int victimOf(int nranks) { return std::min(2, nranks - 1); }

// Where the ranks run, and how many: processes cannot share a GPU.
struct Place {
  const Backend* backend;
  int nranks;

  int victim() const { return victimOf(nranks); }
  std::vector<int> survivors() const {
    std::vector<int> all;
    for (int rank = 0; rank < nranks; ++rank) {
      if (rank != victim()) all.push_back(rank);
    }
    return all;
  }
};

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

// loop BACKEND TIMEOUT ROUNDS ACTION: rounds of dispatch and combine, in the middle of which the victim acts. Ends with
// "done", or with "failed ..." and "destroyed". Then, told "again RANK NRANKS", meets once more and runs a few rounds.
int loop(RankContext& context) {
  moeConfig_t config = simpleConfig(64, 256, 8, 3);
  const Backend& backend = *findBackend(context.arguments.at(0));
  config.timeoutMs = std::atoi(context.arguments.at(1).c_str());
  int rounds = std::atoi(context.arguments.at(2).c_str());
  const int place = context.rank;  // on its GPU it stays
  backend.configure(&config, place, context.nranks);
  moeUniqueId_t id = context.meet();
  moeComm_t comm = nullptr;
  if (moeCommInit(&comm, context.nranks, &id, context.rank, &config) != moeSuccess) {
    context.parent.tell("init: " + oneLine(moeGetLastError()));
    return 1;
  }
  bool failed = false;
  const std::string& action = context.arguments.at(3);
  {
    SimpleCall call(comm, config, context.rank, context.nranks, backend);
    for (int round = 0; round < rounds && !failed; ++round) {
      if (round == kVictimRound) context.parent.tell("running");
      if (context.rank == victimOf(context.nranks) && round == kVictimRound) act(action, context, comm);
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
    SimpleCall call(comm, config, context.rank, context.nranks, backend, place);
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

RankGroup loopIn(const Place& place, const std::string& timeout, const char* rounds, const std::string& action) {
  return RankGroup("loop", place.nranks, {place.backend->name(), timeout, rounds, action});
}

std::vector<Place> gpuPlaces() {
  if (cudaBackends().empty()) return {};
  return {{cudaBackends().back(), 2}};
}

void PrintTo(const Place& place, std::ostream* out) { *out << place.nranks << " ranks on " << place.backend->name(); }

std::string placeName(const testing::TestParamInfo<Place>& info) { return info.param.backend->name(); }

class ProcessRanksFailure : public OnBackend<Place> {};

INSTANTIATE_TEST_SUITE_P(ProcessRanks, ProcessRanksFailure, testing::Values(Place{&hostBackend(), 4}), placeName);
INSTANTIATE_TEST_SUITE_P(GpuProcesses, ProcessRanksFailure, testing::ValuesIn(gpuPlaces()), placeName);

void killOne(const Place& place, milliseconds later) {
  RankGroup ranks = loopIn(place, "20000", "1000000", "none");
  ASSERT_TRUE(ranks.introduce());
  for (int rank = 0; rank < place.nranks; ++rank) ASSERT_EQ(ranks.hear(rank), "running");
  // A moment in the middle of whatever the ranks do then.
  EXPECT_EQ(ranks.hear(0, later), "");
  Clock::time_point killed = Clock::now();
  ranks[place.victim()].signal(SIGKILL);
  for (int rank : place.survivors()) {
    Failed failed = hearFailure(ranks, rank, milliseconds(10000));
    EXPECT_EQ(failed.code, moeRankLost) << failed.text;
    EXPECT_TRUE(names(failed.text, place.victim())) << failed.text;
    EXPECT_EQ(failed.state, moeRankLost);
    EXPECT_EQ(failed.lost.substr(static_cast<size_t>(place.victim()), 1), "1") << failed.lost;
    EXPECT_LT(since(killed), milliseconds(1000)) << "rank " << rank;
  }
  for (int rank : place.survivors()) EXPECT_EQ(ranks.hear(rank), "destroyed");
  int next = 0;
  for (int rank : place.survivors())
    ranks[rank].lines().tell("again " + std::to_string(next++) + " " + std::to_string(place.nranks - 1));
  std::vector<int> guests = place.survivors();
  guests.erase(guests.begin());
  ASSERT_TRUE(ranks.introduce(guests));
  for (int rank : place.survivors()) {
    EXPECT_EQ(ranks.hear(rank), "fine");
    EXPECT_EQ(ranks[rank].exitCode(milliseconds(5000)), 0);
  }
}

TEST_P(ProcessRanksFailure, KilledRankIsNamedAndSurvivorsGoOn) {
  for (int run = 0; run < 3; ++run) killOne(GetParam(), milliseconds(1 + 7 * run));
}

TEST_P(ProcessRanksFailure, KilledAtManyMoments_long) {
  for (int run = 0; run < 20; ++run) killOne(GetParam(), milliseconds(1 + 13 * run % 40));
}

void expectVictimLeft(const Place& place, const std::string& action) {
  RankGroup ranks = loopIn(place, "20000", "1000000", action);
  ASSERT_TRUE(ranks.introduce());
  EXPECT_EQ(ranks[place.victim()].exitCode(milliseconds(10000)), 7) << action;
  Clock::time_point left = Clock::now();
  for (int rank : place.survivors()) {
    Failed failed = hearFailure(ranks, rank, milliseconds(10000));
    EXPECT_EQ(failed.code, moeRankLost) << failed.text;
    EXPECT_TRUE(names(failed.text, place.victim())) << failed.text;
    EXPECT_LT(since(left), milliseconds(1000));
    EXPECT_EQ(ranks.hear(rank), "destroyed");
    ranks[rank].lines().tell("stop");
    EXPECT_EQ(ranks[rank].exitCode(milliseconds(5000)), 0) << "nothing waits at exit";
  }
}

TEST_P(ProcessRanksFailure, ExitWithoutDestroyIsSeen) { expectVictimLeft(GetParam(), "exit"); }

TEST_P(ProcessRanksFailure, EndWithoutExitHandlersIsSeen) { expectVictimLeft(GetParam(), "leave"); }

TEST_P(ProcessRanksFailure, AbortIsToldToThePeers) {
  const Place& place = GetParam();
  RankGroup ranks = loopIn(place, "20000", "1000000", "abort");
  ASSERT_TRUE(ranks.introduce());
  Failed own = hearFailure(ranks, place.victim(), milliseconds(10000));
  EXPECT_EQ(own.code, moeAborted) << own.text;
  EXPECT_EQ(own.state, moeAborted);
  for (int rank : place.survivors()) {
    Failed failed = hearFailure(ranks, rank, milliseconds(2000));
    EXPECT_EQ(failed.code, moeRankLost) << failed.text;
    EXPECT_TRUE(names(failed.text, place.victim())) << failed.text;
    EXPECT_EQ(failed.lost.substr(static_cast<size_t>(place.victim()), 1), "1") << failed.lost;
  }
}

// Stopped or asleep for less than the timeout: late, and exact.
void expectPatience(const Place& place, const std::string& action) {
  RankGroup ranks = loopIn(place, "20000", "40", action);
  ASSERT_TRUE(ranks.introduce());
  for (int rank = 0; rank < place.nranks; ++rank) ASSERT_EQ(ranks.hear(rank), "running");
  ASSERT_EQ(ranks.hear(place.victim()), "stopping");
  for (int rank : place.survivors())
    EXPECT_EQ(ranks.hear(rank, milliseconds(250)), "") << "nobody can go on without the victim";
  ranks[place.victim()].signal(SIGCONT);
  ranks[place.victim()].lines().tell("go on");
  for (int rank = 0; rank < place.nranks; ++rank) {
    EXPECT_EQ(ranks.hear(rank), "done");
    EXPECT_EQ(ranks[rank].exitCode(milliseconds(5000)), 0);
  }
}

TEST_P(ProcessRanksFailure, StoppedForLessThanTheTimeoutIsExact) { expectPatience(GetParam(), "stop"); }

TEST_P(ProcessRanksFailure, SleepingForLessThanTheTimeoutIsExact) { expectPatience(GetParam(), "sleep"); }

// Longer than the timeout: every other rank says whom it waited for.
void expectTimeout(const Place& place, const std::string& action) {
  // Ranks begin apart: it takes one GPU longer than another to be ready.
  milliseconds timeout(place.backend->asynchronous() ? 5000 : 300);
  RankGroup ranks = loopIn(place, std::to_string(timeout.count()), "1000000", action);
  ASSERT_TRUE(ranks.introduce());
  for (int rank = 0; rank < place.nranks; ++rank) ASSERT_EQ(ranks.hear(rank), "running");
  ASSERT_EQ(ranks.hear(place.victim()), "stopping");
  Clock::time_point stopped = Clock::now();
  for (int rank : place.survivors()) {
    Failed failed = hearFailure(ranks, rank, milliseconds(10000));
    EXPECT_EQ(failed.code, moeTimeout) << failed.text;
    EXPECT_TRUE(names(failed.text, place.victim())) << failed.text;
    EXPECT_EQ(failed.state, failed.code);
    EXPECT_LT(since(stopped), timeout + milliseconds(1700));
  }
  EXPECT_GE(since(stopped), timeout - milliseconds(50));
  for (int rank : place.survivors()) EXPECT_EQ(ranks.hear(rank), "destroyed");
  ranks[place.victim()].signal(SIGCONT);
  ranks[place.victim()].lines().tell("go on");
  Failed late = hearFailure(ranks, place.victim(), milliseconds(5000));
  EXPECT_TRUE(late.code == moeRankLost || late.code == moeTimeout) << late.text;
}

TEST_P(ProcessRanksFailure, StoppedForLongerIsATimeout) { expectTimeout(GetParam(), "stop"); }

TEST_P(ProcessRanksFailure, SleepingForLongerIsATimeout) { expectTimeout(GetParam(), "sleep"); }

// Two rounds and out, in fresh processes, again and again: nothing is in flight when they end.
void expectCleanEnds(const Place& place, int runs) {
  for (int run = 0; run < runs; ++run) {
    RankGroup ranks = loopIn(place, "20000", "2", "none");
    ASSERT_TRUE(ranks.introduce());
    for (int rank = 0; rank < place.nranks; ++rank) {
      ASSERT_EQ(ranks.hear(rank), "done") << "run " << run;
      ASSERT_EQ(ranks[rank].exitCode(milliseconds(5000)), 0) << "run " << run;
    }
  }
}

TEST_P(ProcessRanksFailure, FreshProcessesEndCleanly) { expectCleanEnds(GetParam(), 10); }

TEST_P(ProcessRanksFailure, FreshProcessesEndCleanly_long) { expectCleanEnds(GetParam(), 50); }

}  // namespace
}  // namespace moetest

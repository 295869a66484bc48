// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/roll_call.h"

#include "unit/bootstrap/helpers.h"

namespace moe::test {
namespace {

RollCall joined(int nranks) {
  RollCall roll;
  for (int rank = 0; rank < nranks; ++rank) EXPECT_TRUE(roll.join(rank, nranks));
  return roll;
}

TEST(RollCall, ListsRanksAsRuns) {
  EXPECT_EQ(rankList({3}), "rank 3");
  EXPECT_EQ(rankList({3, 4}), "ranks 3, 4");
  EXPECT_EQ(rankList({0, 2, 5, 6, 7}), "ranks 0, 2, 5-7");
  std::vector<int> odd;
  for (int rank = 1; rank < 400; rank += 2) odd.push_back(rank);
  std::string text = rankList(odd);
  EXPECT_NE(text.find("127 and 136 more"), std::string::npos) << text;
}

TEST(RollCall, GathersRoundAfterRound) {
  RollCall roll = joined(2);
  EXPECT_TRUE(roll.complete());
  for (int round = 0; round < 3; ++round) {
    EXPECT_TRUE(roll.addPart(1, cat("b", round)));
    EXPECT_FALSE(roll.gathered());
    EXPECT_EQ(roll.missing(), "rank 0, which has joined but not come to this exchange");
    EXPECT_TRUE(roll.addPart(0, ""));
    EXPECT_TRUE(roll.gathered());
    EXPECT_EQ(roll.takeParts(), (std::vector<std::string>{"", cat("b", round)}));
  }
  EXPECT_TRUE(roll.leave(0));
  EXPECT_FALSE(roll.allLeft());
  EXPECT_TRUE(roll.leave(1));
  EXPECT_TRUE(roll.allLeft());
  EXPECT_FALSE(roll.verdict());
}

TEST(RollCall, TellsAbsentRanksFromSilentOnes) {
  RollCall roll;
  roll.join(1, 4);
  roll.join(2, 4);
  roll.addPart(1, "x");
  EXPECT_EQ(roll.missing(),
            "ranks 0, 3, which have not joined, and for rank 2, which has joined but not come to this exchange");
}

TEST(RollCall, ARankThatLeavesWhileOthersWaitEndsTheJob) {
  RollCall before = joined(3);
  before.addPart(0, "x");
  EXPECT_FALSE(before.leave(2));
  EXPECT_EQ(before.verdict()->code(), moeRankLost);
  EXPECT_EQ(before.verdict()->text(), "rank 2 left while others wait for it");

  RollCall after = joined(3);
  EXPECT_TRUE(after.leave(2));
  EXPECT_FALSE(after.addPart(0, "x"));
  EXPECT_EQ(after.verdict()->text(), "rank 2 left before the exchange that rank 0 waits in");
}

TEST(RollCall, ThePartOfAnEndedJobGoesNowhere) {
  RollCall roll = joined(1);
  roll.end(moeTimeout, "first");
  roll.end(moeRankLost, "second");
  EXPECT_EQ(roll.verdict()->text(), "first");
  EXPECT_FALSE(roll.addPart(0, "x"));
  EXPECT_FALSE(roll.gathered());
}

TEST(RollCall, TwoPartsOfOneRankEndTheJob) {
  RollCall roll = joined(2);
  roll.addPart(0, "x");
  EXPECT_FALSE(roll.addPart(0, "y"));
  EXPECT_EQ(roll.verdict()->code(), moeInternalError);
}

}  // namespace
}  // namespace moe::test

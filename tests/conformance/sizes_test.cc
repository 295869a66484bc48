// SPDX-License-Identifier: Apache-2.0
// Sizes are 64-bit and known before anything is allocated; what is counted is what was done.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <chrono>

#include "conformance/cases.h"
#include "conformance/simple_call.h"
#include "conformance/world.h"

namespace moetest {
namespace {

moeInfo_t predict(int nranks, const moeConfig_t& config, int rank = 0) {
  moeInfo_t info = MOE_INFO_INIT;
  EXPECT_EQ(moePredictInfo(nranks, rank, &config, &info), moeSuccess) << moeGetLastError();
  return info;
}

TEST(Sizes, PredictionEqualsTheCommunicator) {
  for (int layout : {moeLayoutRank, moeLayoutExpert, moeLayoutExpertPadded}) {
    moeConfig_t config = simpleConfig(9, 33, 7, 3);
    config.layout = layout;
    config.numSideRows = 1;
    config.sideRowBytes[0] = 13;
    LocalComms comms(3, config);
    ASSERT_TRUE(comms.ok()) << comms.error();
    for (int rank = 0; rank < 3; ++rank) {
      moeInfo_t real = MOE_INFO_INIT, said = predict(3, config, rank);
      ASSERT_EQ(moeGetInfo(comms[rank], &real), moeSuccess);
      EXPECT_EQ(real.rowCapacity, said.rowCapacity);
      EXPECT_EQ(real.recordBytes, said.recordBytes);
      EXPECT_EQ(real.combineBytes, said.combineBytes);
      EXPECT_EQ(real.windowBytes, said.windowBytes);
      EXPECT_EQ(real.workspaceBytes, said.workspaceBytes);
      EXPECT_EQ(real.handleBytes, said.handleBytes);
      EXPECT_EQ(real.localExperts, said.localExperts);
      EXPECT_EQ(real.firstExpert, said.firstExpert);
      size_t bytes = 0;
      ASSERT_EQ(moeHandleBytes(comms[rank], &bytes), moeSuccess);
      EXPECT_EQ(bytes, real.handleBytes);
    }
  }
}

TEST(Sizes, LargeShapesAreNotRefusedAndNotCut) {
  // Elements of all received rows pass 2^31, bytes 2^32 and 2^35.
  moeInfo_t info = predict(32, simpleConfig(10240, 7168, 256, 8));
  EXPECT_EQ(info.rowCapacity, 32 * 10240);
  EXPECT_GE(info.windowBytes, uint64_t{32} * 10240 * 7168 * 2);
  for (int64_t tokens : {1840, 1856, 2048}) {
    info = predict(16, simpleConfig(tokens, 5120, 448, 8));
    EXPECT_GE(info.windowBytes, static_cast<uint64_t>(16 * tokens * 5120 * 2));
  }
  moeConfig_t config = simpleConfig(160000, 7168, 8, 1);
  EXPECT_GE(predict(2, config).windowBytes, uint64_t{320000} * 14336);
}

TEST(Sizes, AnyNumberOfRanksAddsUp) {
  for (int nranks : {2, 8, 24, 64, 129, 160, 161, 256}) {
    moeConfig_t config = simpleConfig(64, 128, 1000, 8);
    config.layout = moeLayoutExpert;
    int64_t experts = 0;
    for (int rank = 0; rank < nranks; ++rank) {
      moeInfo_t info = predict(nranks, config, rank);
      EXPECT_EQ(info.firstExpert, experts);
      experts += info.localExperts;
      EXPECT_GE(info.rowCapacity, 64 * nranks);
    }
    EXPECT_EQ(experts, 1000);
  }
}

TEST(Sizes, TooMuchIsRefusedWithANumberNotCutToFit) {
  moeConfig_t config = simpleConfig(INT64_MAX / 4, 1 << 20, 8, 2);
  moeInfo_t info = MOE_INFO_INIT;
  EXPECT_EQ(moePredictInfo(8, 0, &config, &info), moeInvalidArgument);
  EXPECT_NE(std::string(moeGetLastError()).find("maxTokensPerRank"), std::string::npos) << moeGetLastError();
  config = simpleConfig(8, INT64_MAX / 2, 8, 2);
  EXPECT_EQ(moePredictInfo(8, 0, &config, &info), moeInvalidArgument);
  EXPECT_NE(std::string(moeGetLastError()).find("hidden"), std::string::npos) << moeGetLastError();
}

// A large bound, hardly used: what a call moves follows its valid rows.
TEST(Sizes, StatsCountValidRowsOnly) {
  moeConfig_t config = simpleConfig(4096, 64, 8, 4);
  LocalComms comms(4, config);
  ASSERT_TRUE(comms.ok()) << comms.error();
  moeInfo_t info = MOE_INFO_INIT;
  ASSERT_EQ(moeGetInfo(comms[0], &info), moeSuccess);
  runThreads(4, [&](int rank) {
    SimpleCall call(comms[rank], config, rank, 4);
    // Token 0 to experts 0 and 1 of rank 0 and 4 of rank 2; token 1 to nobody; token 2 to itself.
    int64_t ids[12] = {0, 1, 4, -1, -1, -1, -1, -1, 2 * rank, -1, -1, 99};
    call.dispatch.numTokens = 3;
    call.dispatch.ids = ids;
    ASSERT_EQ(call.runDispatch(), moeSuccess) << moeGetLastError();
    ASSERT_EQ(call.runCombine(), moeSuccess) << moeGetLastError();
    moeStats_t stats = MOE_STATS_INIT;
    ASSERT_EQ(moeGetStats(comms[rank], &stats), moeSuccess);
    uint64_t self = rank == 0 || rank == 2 ? 2 : 1, mapped = 3 - self;
    EXPECT_EQ(stats.dispatches, 1u);
    EXPECT_EQ(stats.combines, 1u);
    EXPECT_EQ(stats.tokens, 3u);
    EXPECT_EQ(stats.selfRows, self);
    EXPECT_EQ(stats.mappedRows, mapped);
    EXPECT_EQ(stats.copiesPerToken, 1.0);
    uint64_t back = rank == 0 ? 5 : rank == 2 ? 5 : 1;
    EXPECT_EQ(stats.combineRows, back);
    uint64_t bytes = 3 * static_cast<uint64_t>(info.recordBytes) + back * static_cast<uint64_t>(info.combineBytes);
    EXPECT_EQ(stats.selfBytes + stats.mappedBytes, bytes);
  });
}

TEST(Sizes, HandleMemoryOfASmallerGroupIsRefused) {
  LocalComms small(2, simpleConfig(64)), large(4, simpleConfig(64));
  ASSERT_TRUE(small.ok() && large.ok());
  size_t enough = 0, needed = 0;
  ASSERT_EQ(moeHandleBytes(small[0], &enough), moeSuccess);
  ASSERT_EQ(moeHandleBytes(large[0], &needed), moeSuccess);
  ASSERT_LT(enough, needed);
  Buffer memory(*hostBackend().device(0), needed);
  moeHandle_t handle = nullptr;
  EXPECT_EQ(moeHandleInit(large[0], memory.data(), enough, &handle), moeInvalidArgument);
  std::string text = moeGetLastError();
  EXPECT_NE(text.find(std::to_string(enough)), std::string::npos) << text;
  EXPECT_NE(text.find(std::to_string(needed)), std::string::npos) << text;
}

// Four tokens in buffers for 4096 must not take as long as 4096 tokens do. The shortest of several runs, since other
// work on the machine only ever adds time.
TEST(Sizes, TimeFollowsTheRowsNotTheBound) {
  moeConfig_t config = simpleConfig(4096, 512, 8, 2);
  LocalComms comms(2, config);
  ASSERT_TRUE(comms.ok()) << comms.error();
  std::chrono::nanoseconds shortest[2][2];
  runThreads(2, [&](int rank) {
    SimpleCall call(comms[rank], config, rank, 2);
    for (int few : {0, 1}) {
      auto& best = shortest[rank][few];
      best = std::chrono::nanoseconds::max();
      call.dispatch.numTokens = few ? 4 : 4096;
      for (int run = 0; run < 8; ++run) {
        auto start = std::chrono::steady_clock::now();
        ASSERT_EQ(call.runDispatch(), moeSuccess) << moeGetLastError();
        ASSERT_EQ(call.runCombine(), moeSuccess) << moeGetLastError();
        best = std::min<std::chrono::nanoseconds>(best, std::chrono::steady_clock::now() - start);
      }
    }
  });
  for (auto& rank : shortest) EXPECT_LT(4 * rank[1].count(), rank[0].count());
}

// Address space of which only the touched pages cost memory.
class Sparse {
 public:
  explicit Sparse(int64_t bytes)
      : bytes_(static_cast<size_t>(bytes)),
        data_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Sparse() {
    if (ok()) munmap(data_, bytes_);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  std::byte* at(int64_t offset) const { return static_cast<std::byte*>(data_) + offset; }

 private:
  size_t bytes_;
  void* data_;
};

void setRow(std::byte* row, int64_t hidden, float base) {
  for (int64_t h = 0; h < hidden; ++h) storeElement(moeBfloat16, row, h, base + static_cast<float>(h % 8));
}

bool isRow(const std::byte* row, int64_t hidden, float base) {
  for (int64_t h = 0; h < hidden; ++h) {
    if (loadElement(moeBfloat16, row, h) != base + static_cast<float>(h % 8)) return false;
  }
  return true;
}

// Output rows at 2^31 elements and 4 GiB, one less and one more, and beyond.
TEST(Sizes, OutputRowsPastFourGigabytes) {
  for (int64_t capacity : {(int64_t{1} << 25) - 1, int64_t{1} << 25, (int64_t{1} << 25) + 1}) {
    moeConfig_t config = simpleConfig(4, 64, 4, 1);
    config.layout = moeLayoutExpertPadded;
    config.capacity = capacity;
    LocalComms comms(1, config);
    ASSERT_TRUE(comms.ok()) << comms.error();
    Handle handle(comms[0], *hostBackend().device(0));
    int64_t rowBytes = 128;
    Sparse rows(4 * capacity * rowBytes);
    ASSERT_TRUE(rows.ok());
    std::vector<std::byte> tokens(4 * 128), output(4 * 128);
    for (int t = 0; t < 4; ++t) setRow(&tokens[static_cast<size_t>(t) * 128], 64, static_cast<float>(8 * t));
    int64_t ids[4] = {3, 1, 2, 1};
    moeRows_t input = {tokens.data(), rowBytes, 0, moeRoleTokens, 0}, received = {rows.at(0), rowBytes, 0, 0, 0};
    moeReceive_t receive = MOE_RECEIVE_INIT;
    receive.rows = &received;
    moeDispatchArgs_t args = MOE_DISPATCH_ARGS_INIT;
    args.numTokens = 4;
    args.topk = 1;
    args.ids = ids;
    args.inputs = &input;
    args.numInputs = 1;
    args.receive = &receive;
    ASSERT_EQ(moeDispatch(comms[0], &args, handle.get(), nullptr), moeSuccess) << moeGetLastError();
    EXPECT_TRUE(isRow(rows.at(3 * capacity * rowBytes), 64, 0));
    EXPECT_TRUE(isRow(rows.at(1 * capacity * rowBytes), 64, 8));
    EXPECT_TRUE(isRow(rows.at(2 * capacity * rowBytes), 64, 16));
    EXPECT_TRUE(isRow(rows.at((1 * capacity + 1) * rowBytes), 64, 24));
    moeCombineArgs_t combine = MOE_COMBINE_ARGS_INIT;
    combine.rows = rows.at(0);
    combine.output = output.data();
    ASSERT_EQ(moeCombine(comms[0], &combine, handle.get(), nullptr), moeSuccess) << moeGetLastError();
    EXPECT_EQ(output, tokens);
  }
}

// One dispatch and combine of `tokens` tokens, of which only the last goes to somebody: from every rank to one expert.
void sendTheLast(moeComm_t comm, const moeConfig_t& config, int rank, int64_t expert, float base) {
  Handle handle(comm, *hostBackend().device(0));
  int64_t tokens = config.maxTokensPerRank, rowBytes = 2 * config.hidden, sideBytes = config.sideRowBytes[0];
  Sparse rows(tokens * rowBytes), output(tokens * rowBytes), sides(tokens * sideBytes + 1), gotSides(3 * sideBytes + 1);
  ASSERT_TRUE(rows.ok() && output.ok() && sides.ok() && gotSides.ok());
  std::vector<std::byte> got(static_cast<size_t>(3 * rowBytes));
  std::vector<int64_t> ids(static_cast<size_t>(tokens), -1);
  ids.back() = expert;
  setRow(rows.at((tokens - 1) * rowBytes), config.hidden, base);
  if (sideBytes) setRow(sides.at(tokens * sideBytes - 16), 8, base);
  moeRows_t inputs[2] = {{rows.at(0), rowBytes, 0, moeRoleTokens, 0}, {sides.at(0), sideBytes, 0, moeRoleOpaque, 0}};
  moeRows_t outputs[2] = {{got.data(), rowBytes, 0, moeRoleTokens, 0},
                          {gotSides.at(0), sideBytes, 0, moeRoleOpaque, 0}};
  moeReceive_t receive = MOE_RECEIVE_INIT;
  receive.rows = outputs;
  receive.capacity = 3;
  moeDispatchArgs_t args = MOE_DISPATCH_ARGS_INIT;
  args.numTokens = tokens;
  args.topk = 1;
  args.ids = ids.data();
  args.inputs = inputs;
  args.numInputs = 1 + config.numSideRows;
  args.receive = &receive;
  ASSERT_EQ(moeDispatch(comm, &args, handle.get(), nullptr), moeSuccess) << moeGetLastError();
  for (int source = 0; rank == expert && source < 3; ++source) {
    float want = base + static_cast<float>(8 * (source - rank));
    EXPECT_TRUE(isRow(&got[static_cast<size_t>(source * rowBytes)], config.hidden, want)) << "from " << source;
    EXPECT_TRUE(sideBytes == 0 || isRow(gotSides.at((source + 1) * sideBytes - 16), 8, want)) << "from " << source;
  }
  moeCombineArgs_t combine = MOE_COMBINE_ARGS_INIT;
  combine.rows = got.data();
  combine.output = output.at(0);
  ASSERT_EQ(moeCombine(comm, &combine, handle.get(), nullptr), moeSuccess) << moeGetLastError();
  EXPECT_TRUE(isRow(output.at((tokens - 1) * rowBytes), config.hidden, base));
}

// Windows of many gigabytes, hardly touched: the records of source 2 lie past 2 GiB in their buffer, and past 4 GiB in
// the window.
TEST(Sizes, WindowOffsetsPastFourGigabytes) {
  moeConfig_t config = simpleConfig(150, 16, 3, 1);
  config.numSideRows = 1;
  config.sideRowBytes[0] = 8 << 20;
  LocalComms comms(3, config);
  ASSERT_TRUE(comms.ok()) << comms.error();
  runThreads(3, [&](int rank) {
    for (int expert = 0; expert < 3; ++expert) {
      sendTheLast(comms[rank], config, rank, expert, static_cast<float>(8 * rank + expert));
    }
  });
}

// The last token's partial row lies past 2 GiB in its segment. Writes gigabytes of zeros for tokens without experts.
TEST(Sizes, CombineOffsetsPastTwoGigabytes_long) {
  moeConfig_t config = simpleConfig(160000, 7168, 3, 1);
  LocalComms comms(3, config);
  ASSERT_TRUE(comms.ok()) << comms.error();
  runThreads(3, [&](int rank) { sendTheLast(comms[rank], config, rank, 1, static_cast<float>(8 * rank)); });
}

}  // namespace
}  // namespace moetest

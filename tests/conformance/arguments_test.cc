// SPDX-License-Identifier: Apache-2.0
// Bad arguments: refused with the right code and a text that names what is wrong, and nothing breaks.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <cstring>

#include "conformance/world.h"

namespace moetest {
namespace {

moeConfig_t smallConfig() {
  moeConfig_t config = MOE_CONFIG_INIT;
  config.maxTokensPerRank = 8;
  config.hidden = 16;
  config.numExperts = 4;
  config.maxTopk = 2;
  config.backend = moeBackendHost;
  return config;
}

bool says(const std::string& word) { return std::string(moeGetLastError()).find(word) != std::string::npos; }

struct BadConfig {
  const char* name;
  void (*spoil)(moeConfig_t&);
  moeResult_t code;
  const char* word;  // that the text has
};

void PrintTo(const BadConfig& bad, std::ostream* out) { *out << bad.name; }

class Config : public testing::TestWithParam<BadConfig> {};

TEST_P(Config, IsRefused) {
  moeConfig_t config = smallConfig();
  GetParam().spoil(config);
  moeInfo_t info = MOE_INFO_INIT;
  EXPECT_EQ(moePredictInfo(2, 0, &config, &info), GetParam().code) << moeGetLastError();
  EXPECT_TRUE(says(GetParam().word)) << moeGetLastError();
  moeComm_t comms[2] = {nullptr, nullptr};
  EXPECT_EQ(moeCommInitAll(comms, 2, &config), GetParam().code) << moeGetLastError();
  EXPECT_TRUE(says(GetParam().word)) << moeGetLastError();
  EXPECT_EQ(comms[0], nullptr);
}

const BadConfig kBadConfigs[] = {
    {"SizeZero", [](moeConfig_t& c) { c.size = 0; }, moeInvalidArgument, "size"},
    {"SizeTooSmall", [](moeConfig_t& c) { c.size = sizeof c.size + 4; }, moeInvalidArgument, "size"},
    {"NoTokens", [](moeConfig_t& c) { c.maxTokensPerRank = 0; }, moeInvalidArgument, "maxTokensPerRank"},
    {"NegativeTokens", [](moeConfig_t& c) { c.maxTokensPerRank = -1; }, moeInvalidArgument, "maxTokensPerRank"},
    {"NoHidden", [](moeConfig_t& c) { c.hidden = 0; }, moeInvalidArgument, "hidden"},
    {"NegativeHidden", [](moeConfig_t& c) { c.hidden = -16; }, moeInvalidArgument, "hidden"},
    {"NoExperts", [](moeConfig_t& c) { c.numExperts = 0; }, moeInvalidArgument, "numExperts"},
    {"NoTopk", [](moeConfig_t& c) { c.maxTopk = 0; }, moeInvalidArgument, "maxTopk"},
    {"TopkAboveCap", [](moeConfig_t& c) { c.maxTopk = MOE_MAX_TOPK + 1; }, moeInvalidArgument, "65"},
    {"DtypeUnknown", [](moeConfig_t& c) { c.dtype = moeNumDataTypes; }, moeInvalidArgument, "dtype"},
    {"DtypeNegative", [](moeConfig_t& c) { c.dtype = -1; }, moeInvalidArgument, "dtype"},
    {"CombineFp8", [](moeConfig_t& c) { c.combineDtype = moeFloat8e4m3; }, moeInvalidArgument, "combineDtype"},
    {"QuantizeUnknown", [](moeConfig_t& c) { c.quantize = moeNumQuantizes; }, moeInvalidArgument, "quantize"},
    {"QuantizeNegative", [](moeConfig_t& c) { c.quantize = -1; }, moeInvalidArgument, "quantize"},
    {"QuantizeHalves", [](moeConfig_t& c) { c.quantize = moeQuantizeUe8m0, c.dtype = moeFloat16; }, moeInvalidArgument,
     "fp16"},
    {"ScaleOrderUnknown", [](moeConfig_t& c) { c.scaleOrder = moeNumScaleOrders; }, moeInvalidArgument, "scaleOrder"},
    {"SlotsUnknown", [](moeConfig_t& c) { c.slots = moeNumSlots; }, moeInvalidArgument, "slots"},
    {"ExpertSlotsInRankLayout", [](moeConfig_t& c) { c.slots = moeSlotsExpert; }, moeInvalidArgument, "moeLayoutRank"},
    {"SlotsOnTheDirectPath", [](moeConfig_t& c) { c.path = moePathDirect, c.slots = moeSlotsRank; }, moeInvalidArgument,
     "low-latency"},
    {"FormatUnknown", [](moeConfig_t& c) { c.format = -1; }, moeInvalidArgument, "format"},
    {"FormatOnTheDirectPath", [](moeConfig_t& c) { c.path = moePathDirect, c.format = moeFormatTagged; },
     moeInvalidArgument, "low-latency"},
    {"CombineUnknown", [](moeConfig_t& c) { c.combineDtype = 77; }, moeInvalidArgument, "combineDtype"},
    {"LayoutUnknown", [](moeConfig_t& c) { c.layout = moeNumLayouts; }, moeInvalidArgument, "layout"},
    {"AlignNegative", [](moeConfig_t& c) { c.layout = moeLayoutExpert, c.expertAlign = -128; }, moeInvalidArgument,
     "expertAlign"},
    {"CapacityNegative", [](moeConfig_t& c) { c.layout = moeLayoutExpertPadded, c.capacity = -1; }, moeInvalidArgument,
     "capacity"},
    {"SideRowsTooMany", [](moeConfig_t& c) { c.numSideRows = MOE_MAX_SIDE_ROWS + 1; }, moeInvalidArgument,
     "numSideRows"},
    {"SideRowsNegative", [](moeConfig_t& c) { c.numSideRows = -1; }, moeInvalidArgument, "numSideRows"},
    {"SideRowBytesMissing", [](moeConfig_t& c) { c.numSideRows = 1; }, moeInvalidArgument, "sideRowBytes"},
    {"BuffersOne", [](moeConfig_t& c) { c.buffers = 1; }, moeInvalidArgument, "buffers"},
    {"BuffersNine", [](moeConfig_t& c) { c.buffers = 9; }, moeInvalidArgument, "buffers"},
    {"PathUnknown", [](moeConfig_t& c) { c.path = moeNumPaths; }, moeInvalidArgument, "path"},
    {"BackendUnknown", [](moeConfig_t& c) { c.backend = moeNumBackends; }, moeInvalidArgument, "backend"},
    {"TimeoutNegative", [](moeConfig_t& c) { c.timeoutMs = -5; }, moeInvalidArgument, "timeoutMs"},
};

INSTANTIATE_TEST_SUITE_P(Init, Config, testing::ValuesIn(kBadConfigs),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Arguments, UnknownTailMustBeZero) {
  struct {
    moeConfig_t config;
    char tail[64];
  } newer{smallConfig(), {}};
  newer.config.size = sizeof newer;
  moeInfo_t info = MOE_INFO_INIT;
  EXPECT_EQ(moePredictInfo(2, 0, &newer.config, &info), moeSuccess) << moeGetLastError();
  newer.tail[63] = 1;
  EXPECT_EQ(moePredictInfo(2, 0, &newer.config, &info), moeInvalidArgument) << "the caller is newer";
  EXPECT_TRUE(says("size")) << moeGetLastError();
}

// Callers that were built against the structs as they were at first.
TEST(Arguments, OlderStructsAreTaken) {
  moeConfig_t config = smallConfig();
  config.size = offsetof(moeConfig_t, quantize);
  config.quantize = 77;  // not theirs
  moeInfo_t info = MOE_INFO_INIT;
  info.size = offsetof(moeInfo_t, scaleBytes);
  info.scaleBytes = -5;
  EXPECT_EQ(moePredictInfo(2, 1, &config, &info), moeSuccess) << moeGetLastError();
  EXPECT_EQ(info.rank, 1);
  EXPECT_EQ(info.size, offsetof(moeInfo_t, scaleBytes));
  EXPECT_EQ(info.scaleBytes, -5);
}

TEST(Arguments, InfoKnowsTheBytesOfScales) {
  moeConfig_t config = smallConfig();
  config.hidden = 700;  // six groups
  config.maxTokensPerRank = 5;
  config.layout = moeLayoutExpertPadded;
  config.capacity = 7;
  auto bytes = [&](int quantize, int order) {
    config.quantize = quantize;
    config.scaleOrder = order;
    moeInfo_t info = MOE_INFO_INIT;
    EXPECT_EQ(moePredictInfo(2, 0, &config, &info), moeSuccess) << moeGetLastError();
    return info.scaleBytes / info.localExperts;
  };
  EXPECT_EQ(bytes(moeQuantizeNone, moeScalesByColumn), 0);
  EXPECT_EQ(bytes(moeQuantizeFloat32, moeScalesByRow), 7 * 6 * 4);
  EXPECT_EQ(bytes(moeQuantizeFloat32, moeScalesByColumn), 6 * 32);
  EXPECT_EQ(bytes(moeQuantizeUe8m0, moeScalesByRow), 7 * 2 * 4);
  EXPECT_EQ(bytes(moeQuantizeUe8m0, moeScalesByColumn), 2 * 32);
}

TEST(Arguments, SlotsAndFormatAreChosenOrAsked) {
  if (getenv("MOE_SLOTS") || getenv("MOE_FORMAT")) GTEST_SKIP() << "settings choose";
  moeConfig_t config = smallConfig();
  config.layout = moeLayoutExpertPadded;
  auto chosen = [&](int path, int slots, int format) {
    config.path = path, config.slots = slots, config.format = format;
    moeInfo_t info = MOE_INFO_INIT;
    EXPECT_EQ(moePredictInfo(2, 0, &config, &info), moeSuccess) << moeGetLastError();
    return std::array{info.path, info.slots, info.format};
  };
  EXPECT_EQ(chosen(moePathDirect, moeSlotsAuto, moeFormatAuto), (std::array{1, 0, 0}));
  EXPECT_EQ(chosen(moePathLowLatency, moeSlotsAuto, moeFormatAuto), (std::array{2, 1, 1}));
  EXPECT_EQ(chosen(moePathLowLatency, moeSlotsExpert, moeFormatSignalled), (std::array{2, 2, 2}));
  config.maxTokensPerRank = 1 << 20;
  EXPECT_EQ(chosen(moePathLowLatency, moeSlotsAuto, moeFormatAuto), (std::array{2, 1, 2}));
}

TEST(Arguments, InfoKeepsAnUnknownTail) {
  struct {
    moeInfo_t info;
    char tail[32];
  } newer{MOE_INFO_INIT, {}};
  newer.info.size = sizeof newer;
  moeConfig_t config = smallConfig();
  EXPECT_EQ(moePredictInfo(2, 1, &config, &newer.info), moeSuccess) << moeGetLastError();
  EXPECT_EQ(newer.info.rank, 1);
  EXPECT_EQ(newer.info.nranks, 2);
  for (char c : newer.tail) EXPECT_EQ(c, 0);
  newer.info.size = 3;
  EXPECT_EQ(moePredictInfo(2, 1, &config, &newer.info), moeInvalidArgument);
}

// With a GPU the workspace depends on it; without one the sizes say that they are the host's.
TEST(Arguments, PredictedInfoIsWhatTheCommunicatorSays) {
  for (moeBackend_t backend : {moeBackendHost, moeBackendCuda}) {
    moeConfig_t config = smallConfig();
    config.backend = backend;
    moeInfo_t predicted = MOE_INFO_INIT, real = MOE_INFO_INIT;
    ASSERT_EQ(moePredictInfo(1, 0, &config, &predicted), moeSuccess) << moeGetLastError();
    moeComm_t comm = nullptr;
    if (backend == moeBackendCuda && moeCommInitAll(&comm, 1, &config) == moeUnsupported) {
      EXPECT_EQ(predicted.backend, moeBackendHost);
      continue;
    }
    if (!comm) {
      ASSERT_EQ(moeCommInitAll(&comm, 1, &config), moeSuccess) << moeGetLastError();
    }
    EXPECT_EQ(moeGetInfo(comm, &real), moeSuccess) << moeGetLastError();
    EXPECT_EQ(predicted.backend, backend);
    EXPECT_EQ(predicted.workspaceBytes, real.workspaceBytes);
    EXPECT_EQ(predicted.windowBytes, real.windowBytes);
    EXPECT_EQ(predicted.handleBytes, real.handleBytes);
    EXPECT_EQ(predicted.rowCapacity, real.rowCapacity);
    EXPECT_EQ(moeCommDestroy(comm), moeSuccess) << moeGetLastError();
  }
}

TEST(Arguments, NullsAreRefused) {
  moeConfig_t config = smallConfig();
  moeInfo_t info = MOE_INFO_INIT;
  moeStats_t stats = MOE_STATS_INIT;
  moeComm_t comm = nullptr;
  moeHandle_t handle = nullptr;
  moeUniqueId_t id{};
  moeBootstrap_t bootstrap = MOE_BOOTSTRAP_INIT;
  moeDispatchArgs_t dispatch = MOE_DISPATCH_ARGS_INIT;
  moeCombineArgs_t combine = MOE_COMBINE_ARGS_INIT;
  moeReceive_t receive = MOE_RECEIVE_INIT;
  moeSizes_t sizes;
  moeRows_t views[1];
  moeResult_t state;
  size_t bytes;
  int32_t lost[2];
  int rank;
  EXPECT_EQ(moeGetVersion(nullptr), moeInvalidArgument);
  EXPECT_EQ(moeGetUniqueId(nullptr), moeInvalidArgument);
  EXPECT_EQ(moePredictInfo(2, 0, nullptr, &info), moeInvalidArgument);
  EXPECT_EQ(moePredictInfo(2, 0, &config, nullptr), moeInvalidArgument);
  EXPECT_EQ(moePredictInfo(0, 0, &config, &info), moeInvalidArgument);
  EXPECT_EQ(moePredictInfo(2, 2, &config, &info), moeInvalidArgument);
  EXPECT_EQ(moePredictInfo(2, -1, &config, &info), moeInvalidArgument);
  EXPECT_EQ(moeCommInit(nullptr, 1, &id, 0, &config), moeInvalidArgument);
  EXPECT_EQ(moeCommInit(&comm, 1, nullptr, 0, &config), moeInvalidArgument);
  EXPECT_EQ(moeCommInit(&comm, 1, &id, 0, nullptr), moeInvalidArgument);
  EXPECT_EQ(moeCommInit(&comm, 1, &id, 1, &config), moeInvalidArgument);
  EXPECT_EQ(moeCommInit(&comm, 0, &id, 0, &config), moeInvalidArgument);
  EXPECT_EQ(moeCommInit(&comm, -3, &id, 0, &config), moeInvalidArgument);
  EXPECT_EQ(moeCommInitAll(nullptr, 1, &config), moeInvalidArgument);
  EXPECT_EQ(moeCommInitAll(&comm, 1, nullptr), moeInvalidArgument);
  EXPECT_EQ(moeCommInitAll(&comm, 0, &config), moeInvalidArgument);
  EXPECT_EQ(moeCommInitCallbacks(&comm, 1, 0, nullptr, &config), moeInvalidArgument);
  EXPECT_EQ(moeCommInitCallbacks(&comm, 1, 0, &bootstrap, &config), moeInvalidArgument) << "allGather is NULL";
  EXPECT_EQ(moeCommInitEnv(nullptr, &config), moeInvalidArgument);
  EXPECT_EQ(moeCommInitNccl(nullptr, nullptr, &config), moeInvalidArgument);
  EXPECT_EQ(comm, nullptr);
  EXPECT_EQ(moeCommGetAsyncError(nullptr, &state), moeInvalidArgument);
  EXPECT_EQ(moeCommAbort(nullptr), moeInvalidArgument);
  EXPECT_EQ(moeCommFinalize(nullptr), moeInvalidArgument);
  EXPECT_EQ(moeCommDestroy(nullptr), moeSuccess);
  EXPECT_EQ(moeHandleDestroy(nullptr), moeSuccess);
  EXPECT_EQ(moeGetInfo(nullptr, &info), moeInvalidArgument);
  EXPECT_EQ(moeGetStats(nullptr, &stats), moeInvalidArgument);
  EXPECT_EQ(moeGetExpertOwner(nullptr, 0, &rank, nullptr), moeInvalidArgument);
  EXPECT_EQ(moeCommGetDead(nullptr, lost), moeInvalidArgument);
  EXPECT_EQ(moeHandleBytes(nullptr, &bytes), moeInvalidArgument);
  EXPECT_EQ(moeHandleInit(nullptr, &bytes, 8, &handle), moeInvalidArgument);
  EXPECT_EQ(moeDispatch(nullptr, &dispatch, nullptr, nullptr), moeInvalidArgument);
  EXPECT_EQ(moeCombine(nullptr, &combine, nullptr, nullptr), moeInvalidArgument);
  EXPECT_EQ(moeWait(nullptr, nullptr, &receive, nullptr), moeInvalidArgument);
  EXPECT_EQ(moeGetSizes(nullptr, nullptr, &sizes), moeInvalidArgument);
  EXPECT_EQ(moeGetViews(nullptr, nullptr, views, 1), moeInvalidArgument);
  EXPECT_EQ(moeGetSettings(nullptr, 8, nullptr), moeInvalidArgument);
}

TEST(Arguments, NullsAreRefusedOnALiveCommunicator) {
  LocalComms comms(1, smallConfig());
  ASSERT_TRUE(comms.ok()) << comms.error();
  Handle handle(comms[0], *hostBackend().device(0));
  ASSERT_NE(handle.get(), nullptr);
  moeDispatchArgs_t dispatch = MOE_DISPATCH_ARGS_INIT;
  moeReceive_t receive = MOE_RECEIVE_INIT;
  moeSizes_t sizes;
  moeHandle_t other = nullptr;
  alignas(256) char memory[512];
  size_t bytes = 0;
  EXPECT_EQ(moeGetInfo(comms[0], nullptr), moeInvalidArgument);
  EXPECT_EQ(moeGetStats(comms[0], nullptr), moeInvalidArgument);
  EXPECT_EQ(moeCommGetDead(comms[0], nullptr), moeInvalidArgument);
  EXPECT_EQ(moeCommGetAsyncError(comms[0], nullptr), moeInvalidArgument);
  EXPECT_EQ(moeHandleBytes(comms[0], nullptr), moeInvalidArgument);
  ASSERT_EQ(moeHandleBytes(comms[0], &bytes), moeSuccess);
  EXPECT_EQ(moeHandleInit(comms[0], nullptr, bytes, &other), moeInvalidArgument);
  EXPECT_EQ(moeHandleInit(comms[0], memory, bytes, nullptr), moeInvalidArgument);
  EXPECT_EQ(moeHandleInit(comms[0], memory, bytes - 1, &other), moeInvalidArgument);
  EXPECT_TRUE(says(std::to_string(bytes))) << moeGetLastError();
  EXPECT_EQ(moeHandleInit(comms[0], memory + 8, bytes, &other), moeInvalidArgument) << "not aligned to 256";
  EXPECT_EQ(other, nullptr);
  EXPECT_EQ(moeDispatch(comms[0], nullptr, handle.get(), nullptr), moeInvalidArgument);
  EXPECT_EQ(moeDispatch(comms[0], &dispatch, nullptr, nullptr), moeInvalidArgument);
  EXPECT_NE(moeCombine(comms[0], nullptr, handle.get(), nullptr), moeSuccess) << "no arguments, no dispatch";
  EXPECT_EQ(moeWait(comms[0], handle.get(), nullptr, nullptr), moeInvalidArgument);
  EXPECT_EQ(moeGetSizes(comms[0], handle.get(), nullptr), moeInvalidArgument);
  EXPECT_NE(moeWait(comms[0], handle.get(), &receive, nullptr), moeSuccess) << "no send half is under way";
  EXPECT_NE(moeGetSizes(comms[0], handle.get(), &sizes), moeSuccess) << "the handle has no dispatch";
}

TEST(Arguments, ResultNamesAreConstant) {
  for (int result = 0; result < moeNumResults; ++result) {
    const char* name = moeGetErrorString(static_cast<moeResult_t>(result));
    ASSERT_NE(name, nullptr);
    EXPECT_GT(std::strlen(name), 0u);
    EXPECT_EQ(name, moeGetErrorString(static_cast<moeResult_t>(result)));
  }
  ASSERT_NE(moeGetErrorString(static_cast<moeResult_t>(999)), nullptr);
  ASSERT_NE(moeGetErrorString(static_cast<moeResult_t>(-1)), nullptr);
  int version = 0;
  EXPECT_EQ(moeGetVersion(&version), moeSuccess);
  EXPECT_EQ(version, MOE_VERSION);
}

TEST(Arguments, SettingsTextIsCutToTheCapacity) {
  size_t needed = 0;
  char tiny[10];
  std::memset(tiny, 'x', sizeof tiny);
  ASSERT_EQ(moeGetSettings(tiny, 8, &needed), moeSuccess);
  EXPECT_EQ(tiny[7], '\0');
  EXPECT_EQ(tiny[8], 'x');
  ASSERT_GT(needed, 8u);
  std::vector<char> whole(needed);
  ASSERT_EQ(moeGetSettings(whole.data(), whole.size(), nullptr), moeSuccess);
  EXPECT_EQ(std::strlen(whole.data()) + 1, needed);
  EXPECT_NE(std::string(whole.data()).find("MOE_SOCKET_IFNAME = lo"), std::string::npos);
}

TEST(Arguments, ExpertsHaveOwners) {
  moeConfig_t config = smallConfig();
  config.numExperts = 256;
  LocalComms comms(3, config);
  ASSERT_TRUE(comms.ok()) << comms.error();
  reference::Shape shape(3, config);
  for (int64_t expert = 0; expert < 256; ++expert) {
    int rank = -1, local = -1;
    ASSERT_EQ(moeGetExpertOwner(comms[1], expert, &rank, &local), moeSuccess);
    ASSERT_EQ(rank, shape.ownerOf(expert));
    ASSERT_EQ(local, expert - shape.firstExpertOf(rank));
  }
  int rank = -1;
  EXPECT_EQ(moeGetExpertOwner(comms[1], 256, &rank, nullptr), moeInvalidArgument);
  EXPECT_EQ(moeGetExpertOwner(comms[1], -1, &rank, nullptr), moeInvalidArgument);
  EXPECT_EQ(moeGetExpertOwner(comms[1], 3, nullptr, nullptr), moeSuccess);
  for (int r = 0; r < 3; ++r) {
    moeInfo_t info = MOE_INFO_INIT;
    ASSERT_EQ(moeGetInfo(comms[r], &info), moeSuccess);
    EXPECT_EQ(info.rank, r);
    EXPECT_EQ(info.nranks, 3);
    EXPECT_EQ(info.localExperts, shape.expertsOf(r));
    EXPECT_EQ(info.firstExpert, shape.firstExpertOf(r));
    EXPECT_EQ(info.rowCapacity, 24);
  }
}

}  // namespace
}  // namespace moetest

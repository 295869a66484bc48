// SPDX-License-Identifier: Apache-2.0
// Quantizing in dispatch: how far what arrives is from what was sent, in float64, and what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "conformance/on_backend.h"
#include "conformance/scenario.h"
#include "conformance/world.h"
#include "numbers.h"

namespace moetest {
namespace {

constexpr int64_t kTokens = 24, kHidden = 1000, kGroups = (kHidden + MOE_QUANTIZE_GROUP - 1) / MOE_QUANTIZE_GROUP;

struct Setup {
  int path, quantize;
  const Backend* backend;
};

void PrintTo(const Setup& setup, std::ostream* out) { *out << setup.path << setup.quantize; }

moeConfig_t configOf(const Setup& setup) {
  moeConfig_t config = MOE_CONFIG_INIT;
  config.maxTokensPerRank = kTokens;
  config.hidden = kHidden;
  config.numExperts = 1;
  config.maxTopk = 1;
  config.path = setup.path;
  config.quantize = setup.quantize;
  return config;
}

// One rank, all of whose tokens go to its one expert.
class Quantizer {
 public:
  Quantizer(const moeConfig_t& config, const Backend& backend)
      : device_(backend.device(0)), comms_(1, config, backend), config_(config) {
    if (!comms_.ok()) return;
    handle_ = Handle(comms_[0], *device_);
    tokens = Buffer(*device_, kTokens * kHidden * 2);
    elements = Buffer(*device_, kTokens * kHidden);
    scales = Buffer(*device_, kTokens * kGroups * 4);
    ids_ = Buffer(*device_, kTokens * 8);
    std::vector<int64_t> ids(kTokens, 0);
    ids_.write(0, ids.data(), ids.size() * 8);
    input = {tokens.data(), kHidden * 2, 0, moeRoleTokens, 0};
    outputs[0] = {elements.data(), kHidden, 0, moeRoleTokens, 0};
    outputs[1] = {scales.data(), scaleBytes(), 0, moeRoleScales, 0};
    receive.rows = outputs;
    args.numTokens = kTokens;
    args.topk = 1;
    args.ids = ids_.data();
    args.inputs = &input;
    args.numInputs = 1;
    args.receive = &receive;
  }

  bool ok() const { return comms_.ok(); }
  const std::string& error() const { return comms_.error(); }
  int64_t scaleBytes() const { return config_.quantize == moeQuantizeUe8m0 ? (kGroups + 3) / 4 * 4 : kGroups * 4; }
  moeResult_t run() {
    return outcomeOf(moeDispatch(comms_[0], &args, handle_.get(), device_->stream()), comms_[0], *device_);
  }
  double scaleOf(const std::vector<std::byte>& all, int64_t token, int64_t group) const {
    const std::byte* row = all.data() + token * scaleBytes();
    if (config_.quantize == moeQuantizeUe8m0) return std::ldexp(1.0, static_cast<int>(row[group]) - 127);
    return loadElement(moeFloat32, row, group);
  }

 private:
  std::shared_ptr<Device> device_;
  LocalComms comms_;
  moeConfig_t config_;
  Handle handle_;
  Buffer ids_;

 public:
  Buffer tokens, elements, scales;
  moeRows_t input{}, outputs[2] = {};
  moeReceive_t receive = MOE_RECEIVE_INIT;
  moeDispatchArgs_t args = MOE_DISPATCH_ARGS_INIT;
};

class Quantize : public OnBackend<Setup> {};

TEST_P(Quantize, ErrorStaysWithinItsBound) {
  Quantizer call(configOf(GetParam()), *GetParam().backend);
  ASSERT_TRUE(call.ok()) << call.error();
  Random random(3);
  std::vector<std::byte> sent(kTokens * kHidden * 2);
  for (int64_t i = 0; i < kTokens * kHidden; ++i) {
    float magnitude = std::ldexp(1.0f, static_cast<int>(random.between(-12, 4)));
    storeElement(moeBfloat16, sent.data(), i, (random.unit() * 2 - 1) * magnitude);
  }
  call.tokens.write(0, sent.data(), sent.size());
  ASSERT_EQ(call.run(), moeSuccess) << moeGetLastError();
  std::vector<std::byte> elements = call.elements.read(), scales = call.scales.read();
  double worst = 0;  // as a share of the bound
  for (int64_t token = 0; token < kTokens; ++token) {
    for (int64_t h = 0; h < kHidden; ++h) {
      double scale = call.scaleOf(scales, token, h / MOE_QUANTIZE_GROUP);
      double was = loadElement(moeBfloat16, sent.data(), token * kHidden + h);
      double is = scale * loadElement(moeFloat8e4m3, elements.data(), token * kHidden + h);
      double bound = std::max(std::fabs(was) / 16, scale / 1024);
      ASSERT_LE(std::fabs(is - was), bound * (1 + 0x1p-20)) << "token " << token << " element " << h << ": " << was;
      worst = std::max(worst, std::fabs(is - was) / bound);
    }
  }
  // The bound is no looser than it must be.
  EXPECT_GT(worst, 0.9);
}

TEST_P(Quantize, RefusesWhatDoesNotFit) {
  Quantizer call(configOf(GetParam()), *GetParam().backend);
  ASSERT_TRUE(call.ok()) << call.error();
  const moeRows_t input = call.input, tokens = call.outputs[0], scales = call.outputs[1];
  auto refused = [&](const char* word, const auto& spoil) {
    spoil();
    EXPECT_EQ(call.run(), moeInvalidArgument);
    std::string text = moeGetLastError();
    EXPECT_NE(text.find(word), std::string::npos) << text;
    call.input = input;
    call.outputs[0] = tokens;
    call.outputs[1] = scales;
    call.args.numInputs = 1;
  };
  refused("numInputs", [&] { call.args.numInputs = 2; });
  refused("args.inputs[0].rowBytes", [&] { call.input.rowBytes = kHidden; });
  refused("args.inputs[0].strideBytes", [&] { call.input.strideBytes = 2 * kHidden + 1; });
  refused("args.inputs[0].data", [&] { call.input.data = static_cast<std::byte*>(input.data) + 1; });
  refused("receive.rows[0].rowBytes", [&] { call.outputs[0].rowBytes = 2 * kHidden; });
  refused("receive.rows[1].rowBytes", [&] { call.outputs[1].rowBytes = scales.rowBytes + 4; });
  refused("receive.rows[1].role", [&] { call.outputs[1].role = moeRoleTokens; });
  refused("receive.rows[1].data", [&] { call.outputs[1].data = static_cast<std::byte*>(scales.data) + 2; });
  refused("receive.rows[1].strideBytes", [&] { call.outputs[1].strideBytes = scales.rowBytes + 2; });
  ASSERT_EQ(call.run(), moeSuccess) << moeGetLastError();
}

TEST_P(Quantize, ColumnsLieWhereTmaWantsThem) {
  moeConfig_t config = configOf(GetParam());
  config.scaleOrder = moeScalesByColumn;
  Quantizer call(config, *GetParam().backend);
  ASSERT_TRUE(call.ok()) << call.error();
  auto refused = [&](const char* word) {
    EXPECT_EQ(call.run(), moeInvalidArgument);
    std::string text = moeGetLastError();
    EXPECT_NE(text.find(word), std::string::npos) << text;
  };
  for (int64_t stride : {4 * kTokens - 16, 4 * kTokens + 4}) {
    call.outputs[1].strideBytes = stride;
    refused("receive.rows[1].strideBytes");
  }
  call.outputs[1].strideBytes = 0;
  call.receive.rows = nullptr;
  refused("scaleOrder");
}

std::vector<Setup> setups() {
  std::vector<Setup> all;
  std::vector<const Backend*> backends = cudaBackends();
  backends.insert(backends.begin(), &hostBackend());
  for (const Backend* backend : backends) {
    for (int path : {moePathDirect, moePathLowLatency}) {
      for (int quantize : {moeQuantizeFloat32, moeQuantizeUe8m0}) all.push_back({path, quantize, backend});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Dispatch, Quantize, testing::ValuesIn(setups()), [](const auto& info) {
  return std::string(info.param.backend->name()) + (info.param.path == moePathDirect ? "_direct" : "_low_latency") +
         (info.param.quantize == moeQuantizeUe8m0 ? "_ue8m0" : "_float");
});

}  // namespace
}  // namespace moetest

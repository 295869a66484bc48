// SPDX-License-Identifier: Apache-2.0
// One rank's dispatch and combine with plain valid arguments, to be spoiled or interrupted by a test, and a check of
// what came back that needs no oracle.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "conformance/driver.h"
#include "numbers.h"

namespace moetest {

inline moeConfig_t simpleConfig(int64_t tokens = 8, int64_t hidden = 16, int64_t experts = 8, int32_t topk = 2) {
  moeConfig_t config = MOE_CONFIG_INIT;
  config.maxTokensPerRank = tokens;
  config.hidden = hidden;
  config.numExperts = experts;
  config.maxTopk = topk;
  config.backend = moeBackendHost;
  return config;
}

// Every token of rank r names experts r, r + 1, ... Experts return their tokens, so that a token comes back once per
// distinct rank among its experts.
class SimpleCall {
 public:
  // `place`: the rank whose device it uses, if that is another.
  SimpleCall(moeComm_t comm, const moeConfig_t& config, int rank, int nranks, const Backend& backend = hostBackend(),
             int place = -1)
      : device_(backend.device(place < 0 ? rank : place)),
        comm(comm),
        config_(config),
        shape_(nranks, config),
        rank_(rank) {
    moeInfo_t info = MOE_INFO_INIT;
    moeGetInfo(comm, &info);
    int64_t tokens = config.maxTokensPerRank, rowBytes = shape_.tokenBytes();
    handle = Handle(comm, *device_);
    tokens_ = Buffer(*device_, static_cast<size_t>((tokens + 1) * rowBytes));
    ids_ = Buffer(*device_, static_cast<size_t>((tokens + 1) * config.maxTopk * 8));
    received_ = Buffer(*device_, static_cast<size_t>(info.rowCapacity * rowBytes));
    output_ = Buffer(*device_, static_cast<size_t>((tokens + 1) * shape_.combineRowBytes()));
    reset();
  }

  // Valid arguments again, with data that depend on `round`.
  void reset(int round = 0) {
    int64_t tokens = config_.maxTokensPerRank;
    std::vector<int64_t> ids;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int k = 0; k < config_.maxTopk; ++k) ids.push_back((rank_ + t + k) % config_.numExperts);
    }
    ids_.write(0, ids.data(), ids.size() * 8);
    std::vector<std::byte> row(static_cast<size_t>(shape_.tokenBytes()));
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < config_.hidden; ++h) storeElement(config_.dtype, row.data(), h, valueOf(t, h, round));
      tokens_.write(static_cast<size_t>(t) * row.size(), row.data(), row.size());
    }
    output_.poison();
    round_ = round;
    input = {tokens_.data(), shape_.tokenBytes(), 0, moeRoleTokens, 0};
    receivedRows = {received_.data(), shape_.tokenBytes(), 0, moeRoleTokens, 0};
    receive = MOE_RECEIVE_INIT;
    receive.rows = &receivedRows;
    dispatch = MOE_DISPATCH_ARGS_INIT;
    dispatch.numTokens = tokens;
    dispatch.topk = config_.maxTopk;
    dispatch.ids = ids_.data();
    dispatch.inputs = &input;
    dispatch.numInputs = 1;
    dispatch.receive = &receive;
    resetCombine();
  }
  void resetCombine() {
    combine = MOE_COMBINE_ARGS_INIT;
    combine.rows = received_.data();
    combine.output = output_.data();
  }

  moeResult_t runDispatch() { return runDispatch(&dispatch, handle.get()); }
  moeResult_t runCombine() { return runCombine(handle.get()); }
  // With other arguments or another handle. All return when the operation is over.
  moeResult_t runDispatch(const moeDispatchArgs_t* args, moeHandle_t with) {
    return outcomeOf(moeDispatch(comm, args, with, device_->stream()), comm, *device_);
  }
  moeResult_t runWait(const moeReceive_t* receiving, moeHandle_t with) {
    return outcomeOf(moeWait(comm, with, receiving, device_->stream()), comm, *device_);
  }
  moeResult_t runCombine(moeHandle_t with) {
    return outcomeOf(moeCombine(comm, &combine, with, device_->stream()), comm, *device_);
  }
  Handle anotherHandle() const { return Handle(comm, *device_); }
  // "" or what went wrong, from a dispatch and a combine with valid arguments.
  std::string runBoth(int round = 0) {
    reset(round);
    if (moeResult_t result = runDispatch(); result != moeSuccess) return describe("dispatch", result);
    if (moeResult_t result = runCombine(); result != moeSuccess) return describe("combine", result);
    return wrongOutput();
  }
  // "" if the combine's output is what it must be, of the first `tokens` (all, if negative).
  std::string wrongOutput(int64_t tokens = -1) const {
    std::vector<std::byte> got = output_.read();
    for (int64_t t = 0; t < (tokens < 0 ? config_.maxTokensPerRank : tokens); ++t) {
      std::vector<int> ranks;
      for (int k = 0; k < config_.maxTopk; ++k) {
        int owner = shape_.ownerOf((rank_ + t + k) % config_.numExperts);
        if (std::find(ranks.begin(), ranks.end(), owner) == ranks.end()) ranks.push_back(owner);
      }
      for (int64_t h = 0; h < config_.hidden; ++h) {
        float want = static_cast<float>(ranks.size()) * valueOf(t, h, round_);
        float is = loadElement(config_.combineDtype, got.data(), t * config_.hidden + h);
        if (is == want) continue;
        return "rank " + std::to_string(rank_) + " round " + std::to_string(round_) + ": token " + std::to_string(t) +
               " element " + std::to_string(h) + " is " + std::to_string(is) + ", want " + std::to_string(want);
      }
    }
    return "";
  }

  static std::string describe(const char* what, moeResult_t result) {
    return std::string(what) + ": " + moeGetErrorString(result) + ": " + moeGetLastError();
  }

 private:
  std::shared_ptr<Device> device_;  // before all that lies in its memory

 public:
  moeComm_t comm;
  Handle handle;
  moeRows_t input{}, receivedRows{};
  moeReceive_t receive = MOE_RECEIVE_INIT;
  moeDispatchArgs_t dispatch = MOE_DISPATCH_ARGS_INIT;
  moeCombineArgs_t combine = MOE_COMBINE_ARGS_INIT;

 private:
  float valueOf(int64_t t, int64_t h, int round) const {
    return static_cast<float>((131 * rank_ + 7 * t + h + 13 * static_cast<int64_t>(round)) % 16 - 8);
  }

  moeConfig_t config_;
  reference::Shape shape_;
  int rank_;
  Buffer tokens_, ids_, received_, output_;
  int round_ = 0;
};

}  // namespace moetest

// SPDX-License-Identifier: Apache-2.0
// One rank of a scenario: makes its calls through moe.h and compares all that comes out, bit for bit.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "conformance/device.h"
#include "conformance/scenario.h"

namespace moetest {

// What went wrong, from all ranks. Thread-safe.
class Report {
 public:
  template <class... Parts>
  void add(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    std::lock_guard<std::mutex> lock(mutex_);
    if (++count_ <= kShown) text_ += text.str() + "\n";
  }
  bool empty() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return count_ == 0;
  }
  std::string text() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return text_ + (count_ > kShown ? "(and " + std::to_string(count_ - kShown) + " more)\n" : "");
  }

 private:
  static constexpr int kShown = 12;
  mutable std::mutex mutex_;
  std::string text_;
  int count_ = 0;
};

// A handle and the memory that it lives in.
class Handle {
 public:
  Handle() = default;
  Handle(moeComm_t comm, Device& device);
  Handle(Handle&& other) noexcept : buffer_(std::move(other.buffer_)), handle_(other.handle_) {
    other.handle_ = nullptr;
  }
  Handle& operator=(Handle&& other) noexcept {
    std::swap(buffer_, other.buffer_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Handle() { moeHandleDestroy(handle_); }
  moeHandle_t get() const { return handle_; }
  bool guardsIntact() const { return buffer_.guardsIntact(); }

 private:
  Buffer buffer_;
  moeHandle_t handle_ = nullptr;
};

class Driver {
 public:
  Driver(const Scenario& scenario, Expectations& expectations, int rank, const Backend& backend, Report& report);

  moeComm_t* comm() { return &comm_; }
  const moeConfig_t& config() const { return config_; }
  int rank() const { return rank_; }

  // After the communicator exists.
  bool begin();
  // The three parts of a step. Between prepare and check, several ranks' issue may be collected into a group.
  bool prepare(const Step& step);
  moeResult_t issue(const Step& step);
  bool check(const Step& step);
  // All three.
  bool run(const Step& step);
  // Frees handles and communicator.
  void end();

 private:
  // What one dispatch gives and gets, kept by its handle.
  struct Exchange {
    int call = -1;
    std::shared_ptr<Expected> expected;
    std::vector<Buffer> inputs, outputs;
    Buffer ids, weights;
    Buffer gotIds, gotWeights, sources, rowExperts, rankCounts, rankOffsets, expertCounts, expertOffsets, sizes;
    std::array<moeRows_t, 2 + MOE_MAX_SIDE_ROWS> inputRows{}, outputRows{}, views{};
    moeDispatchArgs_t args = MOE_DISPATCH_ARGS_INIT;
    moeReceive_t receive = MOE_RECEIVE_INIT;
    Buffer expertRows, combined;
    moeCombineArgs_t combine = MOE_COMBINE_ARGS_INIT;
  };

  int inputUnit(int input) const { return input == 0 ? static_cast<int>(elementBytes(config_.dtype)) : 1; }
  int outputUnit(int payload) const {
    if (!shape_.quantizes()) return inputUnit(payload);
    return shape_.makesScales(payload) ? 4 : 1;
  }
  static int32_t roleOf(int entry) { return entry == 0 ? moeRoleTokens : entry == 1 ? moeRoleScales : moeRoleOpaque; }
  // Scales by column: how far apart, and how many rows in one.
  bool byColumn(int payload) const { return shape_.makesScales(payload) && config_.scaleOrder == moeScalesByColumn; }
  int64_t columnRows(const Exchange& x) const;
  int64_t columnStride(const Exchange& x) const;
  const RankCall& options(const Exchange& x) const { return x.expected->call().ranks[static_cast<size_t>(rank_)]; }
  void prepareInputs(Exchange& x, const Step& step);
  bool prepareOutputs(Exchange& x, const Step& step);
  bool prepareCombine(Exchange& x, const Step& step);
  void writeViews(Exchange& x, const reference::Bytes& rows);
  void checkReceived(Exchange& x, const Step& step);
  void checkRows(Exchange& x, const Step& step, int payload);
  void checkColumns(Exchange& x, const Step& step, int payload);
  void checkIds(Exchange& x, const Step& step);
  void checkSlots(Exchange& x, const Step& step);
  void checkCounts(Exchange& x, const Step& step);
  void checkCombined(Exchange& x, const Step& step);
  moeResult_t call(const Step& step);
  bool wantsReplays() const;
  bool failed(const Step& step, const char* what, moeResult_t result);
  std::string where(const Step& step) const;
  template <class T>
  void checkArray(const Step& step, const char* what, const Buffer& buffer, const std::vector<int64_t>& want);

  const Scenario& scenario_;
  Expectations& expectations_;
  const reference::Shape& shape_;
  int rank_;
  std::shared_ptr<Device> device_;
  Report& report_;
  moeConfig_t config_;
  const bool replays_;  // each operation becomes a graph
  moeComm_t comm_ = nullptr;
  moeInfo_t info_ = MOE_INFO_INIT;
  std::vector<Handle> handles_;
  std::vector<Exchange> exchanges_;
};

}  // namespace moetest

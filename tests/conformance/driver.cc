// SPDX-License-Identifier: Apache-2.0
#include "conformance/driver.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

namespace moetest {
namespace {

using reference::Bytes;
using reference::Delivery;

size_t size(int64_t value) { return static_cast<size_t>(value); }

}  // namespace

Handle::Handle(moeComm_t comm, Device& device) {
  size_t bytes = 0;
  if (moeHandleBytes(comm, &bytes) != moeSuccess) return;
  buffer_ = Buffer(device, bytes);
  if (moeHandleInit(comm, buffer_.data(), bytes, &handle_) != moeSuccess) handle_ = nullptr;
}

Driver::Driver(const Scenario& scenario, Expectations& expectations, int rank, const Backend& backend, Report& report)
    : scenario_(scenario),
      expectations_(expectations),
      shape_(expectations.shape()),
      rank_(rank),
      device_(backend.device(rank)),
      report_(report),
      config_(scenario.config),
      replays_(wantsReplays()) {
  backend.configure(&config_, rank, scenario.nranks);
}

std::string Driver::where(const Step& step) const {
  static constexpr const char* kNames[] = {"dispatch", "send half", "wait", "combine", "look"};
  std::ostringstream text;
  text << scenario_.name << ": rank " << rank_ << ", call " << step.call << ", " << kNames[step.kind] << ": ";
  return text.str();
}

bool Driver::failed(const Step& step, const char* what, moeResult_t result) {
  if (result == moeSuccess) return false;
  std::string text = moeGetLastError();
  report_.add(where(step), what, " returned ", moeGetErrorString(result), ": ", text);
  return true;
}

bool Driver::begin() {
  moeResult_t result = moeGetInfo(comm_, &info_);
  if (result != moeSuccess) {
    report_.add(scenario_.name, ": rank ", rank_, ": moeGetInfo: ", moeGetLastError());
    return false;
  }
  exchanges_.resize(size(scenario_.handles));
  for (int i = 0; i < scenario_.handles; ++i) {
    handles_.emplace_back(comm_, *device_);
    if (handles_.back().get() == nullptr) {
      report_.add(scenario_.name, ": rank ", rank_, ": no handle: ", moeGetLastError());
      return false;
    }
  }
  return true;
}

void Driver::end() {
  for (const Handle& handle : handles_) {
    if (!handle.guardsIntact()) report_.add(scenario_.name, ": rank ", rank_, ": a handle wrote outside its memory");
  }
  handles_.clear();
  if (moeCommDestroy(comm_) != moeSuccess) {
    report_.add(scenario_.name, ": rank ", rank_, ": moeCommDestroy: ", moeGetLastError());
  }
  comm_ = nullptr;
}

void Driver::prepareInputs(Exchange& x, const Step& step) {
  x = Exchange{};
  x.call = step.call;
  x.expected = expectations_.of(step.call);
  const RankCall& call = options(x);
  const reference::Sent& sent = call.sent;
  x.args.numTokens = sent.numTokens;
  x.args.topk = sent.topk;
  x.args.idType = call.idType;
  x.args.flags =
      (step.kind == Step::kSend ? MOE_SEND_HALF : 0) | (x.expected->call().reuseRouting ? MOE_REUSE_ROUTING : 0);
  if (call.nullPointers && sent.numTokens == 0) return;
  auto entries = sent.ids.size();
  size_t idBytes = call.idType == moeInt32 ? 4 : 8;
  if (!x.expected->call().reuseRouting) {
    x.ids = Buffer(*device_, entries * idBytes, idBytes * size(call.misalign));
    Bytes packed(entries * idBytes);
    for (size_t i = 0; i < entries; ++i) std::memcpy(&packed[i * idBytes], &sent.ids[i], idBytes);
    x.ids.write(0, packed.data(), packed.size());
    x.args.ids = x.ids.data();
    if (!sent.weights.empty()) {
      x.weights = Buffer(*device_, entries * 4, 4 * size(call.misalign));
      x.weights.write(0, sent.weights.data(), entries * 4);
      x.args.weights = reinterpret_cast<const float*>(x.weights.data());
    }
  }
  x.args.numInputs = shape_.inputs();
  x.args.inputs = x.inputRows.data();
  for (int input = 0; input < shape_.inputs(); ++input) {
    int64_t rowBytes = shape_.inputBytes(input);
    int64_t stride = rowBytes + call.inputGap * inputUnit(input);
    Buffer buffer(*device_, size(sent.numTokens * stride), size(call.misalign * inputUnit(input)));
    Bytes image(size(sent.numTokens * stride), std::byte{kPoison});
    for (int64_t token = 0; token < sent.numTokens; ++token) {
      std::memcpy(image.data() + token * stride, sent.rows[size(input)].data() + token * rowBytes, size(rowBytes));
    }
    buffer.write(0, image.data(), image.size());
    x.inputRows[size(input)] = {buffer.data(), rowBytes, call.inputGap ? stride : 0, roleOf(input), 0};
    x.inputs.push_back(std::move(buffer));
  }
}

int64_t Driver::columnRows(const Exchange& x) const {
  bool padded = config_.layout == moeLayoutExpertPadded;
  auto rows = static_cast<int64_t>(x.expected->delivery(rank_).slots.size());
  return std::max<int64_t>(1, padded ? shape_.config.capacity : rows);
}

int64_t Driver::columnStride(const Exchange& x) const {
  return (4 * columnRows(x) + 15) / 16 * 16 + 16 * options(x).outputGap;
}

bool Driver::prepareOutputs(Exchange& x, const Step& step) {
  const RankCall& call = options(x);
  const Delivery& want = x.expected->delivery(rank_);
  x.receive.idType = call.receivedIdType;
  x.receive.capacity = call.capacity;
  if (call.exactSizes) {
    moeSizes_t sizes{-1, -1, -1, -1};
    if (failed(step, "moeGetSizes", moeGetSizes(comm_, handles_[size(step.handle)].get(), &sizes))) return false;
    if (sizes.rows != want.arrived || sizes.requiredRows != want.sizes.requiredRows || sizes.overflow != 0 ||
        sizes.copies != want.sizes.copies) {
      report_.add(where(step), "moeGetSizes gave rows ", sizes.rows, " required ", sizes.requiredRows, " overflow ",
                  sizes.overflow, " copies ", sizes.copies, ", want ", want.arrived, " ", want.sizes.requiredRows,
                  " 0 ", want.sizes.copies);
      return false;
    }
    // 0 would ask for the worst case.
    if (config_.layout != moeLayoutExpertPadded) x.receive.capacity = std::max<int64_t>(1, sizes.requiredRows);
  }
  auto rows = static_cast<int64_t>(want.slots.size());
  if (!call.views) {
    for (int payload = 0; payload < shape_.payloads(); ++payload) {
      int64_t rowBytes = shape_.payloadBytes(payload);
      int64_t stride = rowBytes + call.outputGap * outputUnit(payload), bytes = rows * stride;
      if (byColumn(payload)) {
        stride = columnStride(x);
        bytes = rows / columnRows(x) * shape_.scaleWords() * stride;
      }
      x.outputs.emplace_back(*device_, size(bytes), size(call.misalign * outputUnit(payload)));
      x.outputRows[size(payload)] = {x.outputs.back().data(), rowBytes, call.outputGap ? stride : 0, roleOf(payload),
                                     0};
    }
    x.receive.rows = x.outputRows.data();
  }
  if (call.onlyRows) return true;
  bool byRank = config_.layout == moeLayoutRank;
  size_t width = byRank ? size(config_.maxTopk) : 1;
  auto make = [&](Buffer& buffer, size_t count, size_t bytes) {
    buffer = Buffer(*device_, count * bytes, bytes * size(call.misalign));
    return buffer.data();
  };
  x.receive.weights = reinterpret_cast<float*>(make(x.gotWeights, size(rows) * width, 4));
  x.receive.sources = reinterpret_cast<int32_t*>(make(x.sources, size(rows) * 2, 4));
  x.receive.rankCounts = reinterpret_cast<int32_t*>(make(x.rankCounts, size(shape_.nranks), 4));
  x.receive.sizes = reinterpret_cast<moeSizes_t*>(make(x.sizes, 1, sizeof(moeSizes_t)));
  if (byRank) {
    x.receive.ids = make(x.gotIds, size(rows) * width, call.receivedIdType == moeInt32 ? 4 : 8);
    x.receive.rankOffsets = reinterpret_cast<int64_t*>(make(x.rankOffsets, size(shape_.nranks), 8));
  } else {
    x.receive.expertCounts = reinterpret_cast<int32_t*>(make(x.expertCounts, size(shape_.expertsOf(rank_)), 4));
    x.receive.rowExperts = reinterpret_cast<int32_t*>(make(x.rowExperts, size(rows), 4));
    x.receive.expertOffsets = reinterpret_cast<int64_t*>(make(x.expertOffsets, size(shape_.expertsOf(rank_) + 1), 8));
  }
  return true;
}

void Driver::writeViews(Exchange& x, const Bytes& rows) {
  const Delivery& want = x.expected->delivery(rank_);
  int64_t rowBytes = shape_.combineRowBytes();
  auto* base = static_cast<std::byte*>(x.views[0].data);
  for (size_t row = 0; row < want.slots.size(); ++row) {
    if (want.slots[row].source < 0) continue;
    device_->copyIn(base + row * size(x.views[0].strideBytes), rows.data() + row * size(rowBytes), size(rowBytes));
  }
}

bool Driver::prepareCombine(Exchange& x, const Step& step) {
  const RankCall& call = options(x);
  const Bytes& rows = x.expected->expertRows(rank_, step.variant);
  int64_t rowBytes = shape_.combineRowBytes();
  int64_t unit = elementBytes(config_.combineDtype);
  x.combine = MOE_COMBINE_ARGS_INIT;
  if (call.views) {
    writeViews(x, rows);
  } else {
    int64_t stride = rowBytes + call.inputGap * unit;
    auto count = static_cast<int64_t>(rows.size()) / rowBytes;
    x.expertRows = Buffer(*device_, size(count * stride), size(call.misalign * unit));
    Bytes image(size(count * stride), std::byte{0xff});
    for (int64_t row = 0; row < count; ++row) {
      std::memcpy(image.data() + row * stride, rows.data() + row * rowBytes, size(rowBytes));
    }
    x.expertRows.write(0, image.data(), image.size());
    x.combine.rows = x.expertRows.data();
    x.combine.rowStride = call.inputGap ? stride : 0;
  }
  int64_t stride = rowBytes + call.outputGap * unit;
  x.combined = Buffer(*device_, size(call.sent.numTokens * stride), size(call.misalign * unit));
  x.combine.output = call.sent.numTokens == 0 && call.nullPointers ? nullptr : x.combined.data();
  x.combine.outputStride = call.outputGap ? stride : 0;
  bool weighted = x.expected->call().applyWeights && config_.layout != moeLayoutRank;
  x.combine.flags = weighted ? MOE_APPLY_WEIGHTS : 0;
  return true;
}

bool Driver::prepare(const Step& step) {
  if (scenario_.pause) std::this_thread::sleep_for(scenario_.pause(rank_, step));
  Exchange& x = exchanges_[size(step.handle)];
  switch (step.kind) {
    case Step::kDispatch:
      prepareInputs(x, step);
      if (!prepareOutputs(x, step)) return false;
      x.args.receive = &x.receive;
      return true;
    case Step::kSend: prepareInputs(x, step); return true;
    case Step::kWait: return prepareOutputs(x, step);
    case Step::kLook: return true;
    default: return prepareCombine(x, step);
  }
}

// If CONFORMANCE_GRAPHS=1 says so, and no call asks for views, which graphs cannot have. Not where ranks share a GPU:
// making a graph may wait for all that runs there.
bool Driver::wantsReplays() const {
  const char* wanted = std::getenv("CONFORMANCE_GRAPHS");
  if (!wanted || std::string(wanted) != "1" || shape_.nranks > 2) return false;
  return std::ranges::none_of(scenario_.steps,
                              [&](const Step& step) { return scenario_.call(step.call).ranks[size(rank_)].views; });
}

moeResult_t Driver::issue(const Step& step) {
  moeResult_t result = moeSuccess;
  if (replays_ && device_->replay([&] { return call(step); }, &result)) return result;
  return call(step);
}

moeResult_t Driver::call(const Step& step) {
  Exchange& x = exchanges_[size(step.handle)];
  moeHandle_t handle = handles_[size(step.handle)].get();
  switch (step.kind) {
    case Step::kLook: return moeSuccess;
    case Step::kWait: return moeWait(comm_, handle, &x.receive, device_->stream());
    case Step::kCombine: return moeCombine(comm_, &x.combine, handle, device_->stream());
    default: return moeDispatch(comm_, &x.args, handle, device_->stream());
  }
}

bool Driver::check(const Step& step) {
  Exchange& x = exchanges_[size(step.handle)];
  if (failed(step, "the operation", outcomeOf(moeSuccess, comm_, *device_))) return false;
  if (step.kind == Step::kCombine) {
    checkCombined(x, step);
  } else if (step.kind == Step::kLook) {
    for (int payload = 0; payload < shape_.payloads(); ++payload) checkRows(x, step, payload);
  } else {
    // What a dispatch or a send half has read belongs to the caller again, and nobody may read it any more.
    for (Buffer& input : x.inputs) input.poison();
    x.ids.poison();
    x.weights.poison();
    if (step.kind == Step::kSend) return report_.empty();
    if (options(x).views) {
      if (failed(step, "moeGetViews",
                 moeGetViews(comm_, handles_[size(step.handle)].get(), x.views.data(), shape_.payloads()))) {
        return false;
      }
    }
    checkReceived(x, step);
  }
  return report_.empty();
}

bool Driver::run(const Step& step) {
  if (!prepare(step)) return false;
  if (failed(step, "the call", issue(step))) return false;
  return check(step);
}

}  // namespace moetest

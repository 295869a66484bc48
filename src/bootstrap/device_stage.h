// SPDX-License-Identifier: Apache-2.0
// A way through device memory for libraries that take no other. What it stands on is not this folder's affair.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace moe {

// One exchange at a time. May be destroyed by any thread, also with an exchange under way.
class DeviceStage {
 public:
  virtual ~DeviceStage() = default;

  // A cudaStream_t of its own, which neither waits for the application's streams nor makes them wait.
  virtual void* stream() const = 0;
  // Runs `body` with the device as the thread's current one.
  virtual void onDevice(const std::function<void()>& body) = 0;

  struct Room {
    void* send;
    void* receive;
  };
  // Starts to copy `piece` to the device and makes room for an answer of `receiveBytes`. The last exchange is over.
  virtual Room begin(std::string_view piece, size_t receiveBytes) = 0;
  // Starts to copy the answer to the host.
  virtual void fetch() = 0;
  // False while anything in the stream is under way. Throws moeDeviceError.
  virtual bool idle() = 0;
  // The answer, once fetched and idle.
  virtual std::string answer() const = 0;
};

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
// The communicator: bootstrap -> config -> reach -> window -> operations.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "bootstrap/bootstrap.h"
#include "device/backend.h"
#include "device/exec_host.h"
#include "layout.h"
#include "transport/transport.h"

namespace moe {

// How a communicator's ranks will meet. Called by the thread that runs the init.
using Join = std::function<std::unique_ptr<Bootstrap>(const WaitLimit&)>;

class Comm : private WaitGuard {
 public:
  // Nothing happens before start(). `given` may be a config that this rank refuses: its peers must hear of it.
  // `device`: the only CUDA device that it may name, if not -1.
  Comm(int nranks, int rank, Join join, const moeConfig_t* given, int device = -1);
  ~Comm() override;

  // Runs the init, here or in a thread of its own; see moeConfig_t.nonBlocking. Here, it throws what went wrong.
  void start();
  bool nonBlocking() const { return nonBlocking_; }

  int rank() const { return rank_; }
  int nranks() const { return nranks_; }
  const moeConfig_t& config() const { return config_; }
  const Layout& layout() const { return layout_; }
  Backend& backend() { return *backend_; }

  // Throws unless operations may run now.
  void requireReady();
  // The state and its text, for moeCommGetAsyncError.
  moeResult_t state(std::string* text);
  void abort();
  void finalize();

  moeInfo_t info() const;
  moeStats_t stats();
  std::vector<int32_t> lostRanks() const;

  // This rank's own window, in device memory.
  std::byte* window() const { return window_.base; }
  // The part of an operation's arguments that is the same for all.
  CommonArgs commonArgs(std::byte* handle) const;
  // Turns an operation's outcome into an error: a failure breaks the communicator, a refusal does not. `operation` is
  // what the text calls it, such as "dispatch".
  void settle(const Outcome& outcome, const char* operation);

  // For dispatch.cc: dispatches sent or captured so far, and the epochs of send halves that no moeWait has completed.
  uint64_t dispatchesSent = 0;
  std::vector<uint64_t> pendingHalves;

 private:
  int32_t check(int peer) override;
  int blame(int peer) override;
  Failure trouble();
  std::chrono::milliseconds patience() const override { return std::chrono::milliseconds(config_.timeoutMs); }

  void initialize();
  void makeBackend();
  void allocateMemory();
  moeResult_t lookForTrouble(std::string* text);
  void agreeOnConfig(Bootstrap& bootstrap, const WaitLimit& limit);
  void reachPeers(Bootstrap& bootstrap, const WaitLimit& limit);
  [[noreturn]] void breakWith(moeResult_t code, const std::string& text);
  std::string describe(const Failure& failure, const char* operation) const;

  const int nranks_, rank_;
  Join join_;
  moeConfig_t config_;
  std::unique_ptr<Error> refused_;  // why this rank refuses its config
  bool nonBlocking_ = false;

  Layout layout_{};
  std::unique_ptr<Backend> backend_;  // first: windows and their watchers end before it
  std::shared_ptr<PeerStates> states_;
  std::unique_ptr<Transport> transport_;
  Region window_;
  std::vector<Peer> peers_;
  std::byte* workspace_ = nullptr;
  WindowTable windows_{};

  std::atomic<bool> aborted_{false};
  std::atomic<bool> finalized_{false};
  std::atomic<moeResult_t> state_{moeInProgress};
  mutable std::mutex textMutex_;
  std::string text_;  // of a state that is an error
  std::thread initThread_;
};

// What moeGetInfo says that follows from config and layout alone.
moeInfo_t predictInfo(const moeConfig_t& config, const Layout& layout);

}  // namespace moe

// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/background_thread.h"

#include <csignal>
#include <system_error>
#include <thread>

#include "base/error.h"
#include "base/log.h"

namespace moe {
namespace {

// A new thread inherits the mask of its creator.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~AllSignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

void runLogged(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    // An end that somebody wanted is not worth a warning.
    if (error.code() != moeAborted) log(LogLevel::kWarn, "a background thread ended: ", error.text());
  } catch (const std::exception& error) {
    log(LogLevel::kWarn, "a background thread ended: ", error.what());
  }
}

}  // namespace

void startBackgroundThread(std::function<void()> body) {
  AllSignalsBlocked quiet;
  try {
    std::thread([body = std::move(body)] { runLogged(body); }).detach();
  } catch (const std::system_error& error) {
    failErrno(error.code().value(), "cannot start a thread");
  }
}

}  // namespace moe

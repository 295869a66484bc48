// SPDX-License-Identifier: Apache-2.0
// A network at its worst: forwards one TCP port to an address, cutting the stream into single bytes and merging what
// arrives close together.
#pragma once

#include <poll.h>

#include <atomic>
#include <list>
#include <mutex>
#include <thread>

#include "unit/bootstrap/helpers.h"

namespace moe::test {

class Proxy {
 public:
  enum class Mode {
    kByteAtATime,  // every byte is a packet of its own
    kMerge,        // holds bytes back until nothing more comes, so that messages arrive glued together
  };

  Proxy(const SocketAddress& to, Mode mode) : to_(to), mode_(mode) {
    int error = 0;
    listener_ = listenAt(loopbackAddress(AF_INET, 0), &error);
    EXPECT_EQ(error, 0);
    address_ = localAddress(listener_.get());
    thread_ = std::thread([this] { run(); });
  }
  ~Proxy() {
    stop_.store(true);
    thread_.join();
  }
  const SocketAddress& address() const { return address_; }

 private:
  struct Way {
    int from, to;
    std::string held;
    bool ended = false;
  };
  struct Pair {
    FileDescriptor a, b;
    Way there, back;
  };

  void run() {
    while (!stop_.load()) {
      std::vector<pollfd> entries{{listener_.get(), POLLIN, 0}};
      for (const Pair& each : pairs_) {
        if (!each.there.ended) entries.push_back({each.a.get(), POLLIN, 0});
        if (!each.back.ended) entries.push_back({each.b.get(), POLLIN, 0});
      }
      bool quiet = ::poll(entries.data(), entries.size(), 2) == 0;
      acceptOne();
      for (Pair& each : pairs_) {
        forward(each.there, quiet);
        forward(each.back, quiet);
      }
    }
  }

  void acceptOne() {
    FileDescriptor a(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!a.valid()) return;
    int error = 0;
    FileDescriptor b = connectTo(to_, within(2s), &error);
    if (!b.valid()) return;
    tuneConnection(a.get(), AF_INET);
    int from = a.get(), to = b.get();
    pairs_.push_back({std::move(a), std::move(b), Way{from, to, "", false}, Way{to, from, "", false}});
  }

  void forward(Way& way, bool quiet) {
    char chunk[4096];
    ssize_t got = way.ended ? -1 : ::recv(way.from, chunk, sizeof chunk, 0);
    if (got > 0) way.held.append(chunk, static_cast<size_t>(got));
    const bool atEnd = got == 0;
    if (mode_ == Mode::kMerge && !quiet && !atEnd) return;
    const size_t step = mode_ == Mode::kByteAtATime ? 1 : std::max<size_t>(way.held.size(), 1);
    for (size_t at = 0; at < way.held.size(); at += step) ::send(way.to, way.held.data() + at, step, MSG_NOSIGNAL);
    way.held.clear();
    if (atEnd) {
      ::shutdown(way.to, SHUT_WR);
      way.ended = true;
    }
  }

  SocketAddress to_;
  Mode mode_;
  FileDescriptor listener_;
  SocketAddress address_;
  std::atomic<bool> stop_{false};
  std::list<Pair> pairs_;
  std::thread thread_;
};

}  // namespace moe::test

// SPDX-License-Identifier: Apache-2.0
// Ranks for tests: threads of this process or forked children, which meet in anonymous shared memory.
#pragma once

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "transport/transport.h"

namespace moe::test {

using std::chrono::milliseconds;

constexpr milliseconds kPatience{20000};

inline WaitLimit patience() { return WaitLimit(Deadline::in(kPatience)); }

// Waits until `condition` holds, for at most kPatience.
template <class Condition>
bool eventually(Condition&& condition) {
  Deadline deadline = Deadline::in(kPatience);
  while (!condition()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

inline Error errorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return Error(moeSuccess, "");
}

// A T in memory that forked children share.
template <class T>
class Shared {
 public:
  Shared() {
    void* memory = ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    value_ = new (memory) T();
  }
  ~Shared() { ::munmap(static_cast<void*>(value_), sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T* operator->() const { return value_; }
  T& operator*() const { return *value_; }

 private:
  T* value_;
};

// Where the ranks of one test meet. Works between threads and between processes.
class MeetingRoom {
 public:
  static constexpr int kMaxRanks = 64;

  explicit MeetingRoom(int nranks) : nranks_(nranks) {
    pthread_mutexattr_t mutexKind;
    pthread_mutexattr_init(&mutexKind);
    pthread_mutexattr_setpshared(&mutexKind, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&board_->mutex, &mutexKind);
    pthread_condattr_t conditionKind;
    pthread_condattr_init(&conditionKind);
    pthread_condattr_setpshared(&conditionKind, PTHREAD_PROCESS_SHARED);
    pthread_condattr_setclock(&conditionKind, CLOCK_MONOTONIC);
    pthread_cond_init(&board_->allHere, &conditionKind);
  }

  int nranks() const { return nranks_; }
  std::unique_ptr<Bootstrap> enter(int rank) { return std::make_unique<Visitor>(rank, this); }

 private:
  struct Note {
    size_t length;
    char text[32768];
  };
  struct Board {
    pthread_mutex_t mutex;
    pthread_cond_t allHere;
    int arrived = 0;
    uint64_t round = 0;
    Note notes[2][kMaxRanks];  // alternately, so that a round can be read while the next one is written
  };

  class Visitor final : public Bootstrap {
   public:
    Visitor(int rank, MeetingRoom* room) : Bootstrap(rank, room->nranks()), room_(room) {}
    std::vector<std::string> allGather(const std::string& mine, const WaitLimit& limit) override {
      return room_->gather(rank(), mine, limit);
    }

   private:
    MeetingRoom* room_;
  };

  std::vector<std::string> gather(int rank, const std::string& mine, const WaitLimit& limit) {
    if (mine.size() > sizeof(Note::text)) fail(moeInternalError, "a note of ", mine.size(), " bytes is too long");
    Board& board = *board_;
    pthread_mutex_lock(&board.mutex);
    const uint64_t round = board.round;
    Note* notes = board.notes[round % 2];
    notes[rank].length = mine.size();
    std::memcpy(notes[rank].text, mine.data(), mine.size());
    if (++board.arrived == nranks_) {
      board.arrived = 0;
      ++board.round;
      pthread_cond_broadcast(&board.allHere);
    }
    while (board.round == round && !limit.passed()) {
      timespec until{};
      clock_gettime(CLOCK_MONOTONIC, &until);
      until.tv_nsec += 20'000'000;
      if (until.tv_nsec >= 1'000'000'000) {
        until.tv_nsec -= 1'000'000'000;
        ++until.tv_sec;
      }
      pthread_cond_timedwait(&board.allHere, &board.mutex, &until);
    }
    std::vector<std::string> result;
    bool complete = board.round != round;
    for (int r = 0; complete && r < nranks_; ++r) result.emplace_back(notes[r].text, notes[r].length);
    pthread_mutex_unlock(&board.mutex);
    if (!complete) fail(moeTimeout, "not all ranks came to the meeting room");
    return result;
  }

  int nranks_;
  Shared<Board> board_;
};

using RankBody = std::function<void(Bootstrap&)>;

inline void runRankBody(const RankBody& body, Bootstrap& bootstrap) {
  try {
    body(bootstrap);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << bootstrap.rank() << ": " << error.what();
  }
}

// Runs `body` for every rank in a thread of its own.
inline void runThreads(int nranks, const RankBody& body) {
  MeetingRoom room(nranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < nranks; ++rank) {
    threads.emplace_back([&, rank] { runRankBody(body, *room.enter(rank)); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Every rank in a process of its own. Must be started while this process has one thread.
class ForkedRanks {
 public:
  ForkedRanks(int nranks, const RankBody& body) : room_(nranks) {
    for (int rank = 0; rank < nranks; ++rank) {
      pid_t pid = ::fork();
      if (pid == 0) {
        runRankBody(body, *room_.enter(rank));
        ::_exit(::testing::Test::HasFailure() ? 1 : 0);
      }
      pids_.push_back(pid);
    }
  }
  ~ForkedRanks() {
    for (pid_t pid : pids_) {
      if (pid > 0) ::kill(pid, SIGKILL);
    }
    for (pid_t& pid : pids_) waitFor(&pid);
  }
  ForkedRanks(const ForkedRanks&) = delete;
  ForkedRanks& operator=(const ForkedRanks&) = delete;

  pid_t pid(int rank) const { return pids_[static_cast<size_t>(rank)]; }
  // What waitpid(2) says about the end of a rank.
  int status(int rank) { return waitFor(&pids_[static_cast<size_t>(rank)]); }
  // All ranks but `except` came to a good end.
  void expectSuccess(int except = -1) {
    for (int rank = 0; rank < static_cast<int>(pids_.size()); ++rank) {
      int ended = status(rank);
      if (rank == except) continue;
      EXPECT_TRUE(WIFEXITED(ended) && WEXITSTATUS(ended) == 0) << "rank " << rank << " ended with status " << ended;
    }
  }

 private:
  static int waitFor(pid_t* pid) {
    int status = 0;
    if (*pid > 0) ::waitpid(*pid, &status, 0);
    *pid = -1;
    return status;
  }

  MeetingRoom room_;
  std::vector<pid_t> pids_;
};

}  // namespace moe::test

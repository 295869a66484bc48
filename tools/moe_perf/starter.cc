// SPDX-License-Identifier: Apache-2.0
// The process that starts the ranks of moe_perf -p. It is no rank, and has no other children.
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "frames.h"
#include "launch.h"
#include "text.h"
#include "worker.h"

extern char** environ;

namespace moe::perf {
namespace {

using Clock = std::chrono::steady_clock;

// Time for the other ranks to tell what they saw once one has failed.
constexpr auto kGrace = std::chrono::seconds(3);
// Descriptors start here, so that none is in the way of those that a rank expects.
constexpr int kFirstFd = 16;

// `fd` moved out of the way, closed on exec.
Fd moveUp(int fd, const char* what) {
  if (fd < 0) fail(what, ": ", std::strerror(errno));
  Fd low(fd);
  int high = fcntl(fd, F_DUPFD_CLOEXEC, kFirstFd);
  if (high < 0) fail(what, ": ", std::strerror(errno));
  return Fd(high);
}

struct Pipe {
  Fd readEnd, writeEnd;
};

Pipe makePipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail("pipe: ", std::strerror(errno));
  return {moveUp(ends[0], "pipe"), moveUp(ends[1], "pipe")};
}

sigset_t watchedSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&signals, signal);
  return signals;
}

// With -g it is several ranks.
struct Rank {
  pid_t pid = -1;
  bool running = false;
  int done = 0;            // ranks that have come to their end
  bool explained = false;  // has said why it will not
  Fd ids, results;
  FrameReader reader;
};

class Starter {
 public:
  Starter(const Options& options, const std::vector<std::string>& arguments, Report& report);
  ~Starter();
  int run();

 private:
  void spawn(int rank);
  void turn();
  void takeSignals();
  void takeFrames(size_t rank);
  void takeFrame(size_t rank, const Json& frame);
  void reap();
  void settle(size_t rank, int status);
  void sendId();
  void giveUp();
  void signalAll(int signal);
  bool anyRunning() const;

  const Options& options_;
  std::vector<std::string> arguments_;
  Report& report_;
  Fd blockFd_, signalFd_;
  SharedBlock* block_ = nullptr;
  sigset_t oldSignals_;
  std::vector<Rank> ranks_;
  bool failed_ = false;
  bool killed_ = false;
  int interruptedBy_ = 0;
  Clock::time_point killAt_;
};

Starter::Starter(const Options& options, const std::vector<std::string>& arguments, Report& report)
    : options_(options), arguments_(arguments), report_(report), ranks_(static_cast<size_t>(options.processes)) {
  sigset_t signals = watchedSignals();
  sigprocmask(SIG_BLOCK, &signals, &oldSignals_);
  std::signal(SIGPIPE, SIG_IGN);  // a rank may die before its id is written
  signalFd_ = moveUp(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK), "signalfd");
  blockFd_ = moveUp(memfd_create("moe_perf", MFD_CLOEXEC), "memfd_create");
  auto bytes = SharedBlock::bytes(options.ranks());
  if (ftruncate(blockFd_.get(), bytes) != 0) fail("ftruncate: ", std::strerror(errno));
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, blockFd_.get(), 0);
  if (memory == MAP_FAILED) fail("cannot map what the ranks share: ", std::strerror(errno));
  block_ = static_cast<SharedBlock*>(memory);
}

Starter::~Starter() {
  signalAll(SIGKILL);
  for (Rank& rank : ranks_) {
    if (rank.running) waitpid(rank.pid, nullptr, 0);
  }
  if (block_) munmap(block_, static_cast<size_t>(SharedBlock::bytes(options_.ranks())));
  sigprocmask(SIG_SETMASK, &oldSignals_, nullptr);
}

void Starter::spawn(int number) {
  Rank& rank = ranks_[static_cast<size_t>(number)];
  Pipe ids = makePipe();
  Pipe results = makePipe();
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ids.readEnd.get(), kIdFd);
  posix_spawn_file_actions_adddup2(&actions, results.writeEnd.get(), kResultFd);
  posix_spawn_file_actions_adddup2(&actions, blockFd_.get(), kBlockFd);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t defaults = watchedSignals();
  sigaddset(&defaults, SIGPIPE);
  posix_spawnattr_setsigdefault(&attributes, &defaults);
  posix_spawnattr_setsigmask(&attributes, &oldSignals_);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);

  std::string name = "moe_perf";
  std::vector<char*> argv{name.data()};
  for (std::string& argument : arguments_) argv.push_back(argument.data());
  argv.push_back(nullptr);
  std::string worker = cat(kWorkerVariable, "=", number, ":", getpid());
  std::vector<char*> environment{worker.data()};
  for (char** entry = environ; *entry; ++entry) environment.push_back(*entry);
  environment.push_back(nullptr);

  int error = posix_spawn(&rank.pid, "/proc/self/exe", &actions, &attributes, argv.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) fail("cannot start rank ", number, ": ", std::strerror(error));
  rank.running = true;
  rank.ids = std::move(ids.writeEnd);
  rank.results = std::move(results.readEnd);
}

int Starter::run() {
  for (int rank = 0; rank < options_.processes; ++rank) spawn(rank);
  while (anyRunning()) turn();
  bool complete = !failed_;
  for (const Rank& rank : ranks_) complete = complete && rank.done == options_.perProcess;
  int status = report_.finish(complete);
  return interruptedBy_ ? 128 + interruptedBy_ : status;
}

bool Starter::anyRunning() const {
  for (const Rank& rank : ranks_) {
    if (rank.running) return true;
  }
  return false;
}

void Starter::turn() {
  std::vector<pollfd> waits{{signalFd_.get(), POLLIN, 0}};
  std::vector<size_t> owners{0};
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].running || ranks_[rank].reader.ended()) continue;
    waits.push_back({ranks_[rank].results.get(), POLLIN, 0});
    owners.push_back(rank);
  }
  int wait = failed_ ? 50 : 1000;
  if (poll(waits.data(), waits.size(), wait) < 0 && errno != EINTR) fail("poll: ", std::strerror(errno));
  if (waits[0].revents) takeSignals();
  // A death is told before what the others say about it.
  reap();
  for (size_t i = 1; i < waits.size(); ++i) {
    if (waits[i].revents && !ranks_[owners[i]].reader.ended()) takeFrames(owners[i]);
  }
  if (failed_ && !killed_ && Clock::now() >= killAt_) {
    signalAll(SIGKILL);
    killed_ = true;
  }
}

void Starter::takeSignals() {
  signalfd_siginfo info;
  while (read(signalFd_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    auto signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGCHLD) continue;
    if (!interruptedBy_) report_.error(cat("interrupted by signal ", signal, " (", strsignal(signal), ")"));
    interruptedBy_ = signal;
    giveUp();
    signalAll(signal);
  }
}

void Starter::takeFrames(size_t rank) {
  for (const Json& frame : ranks_[rank].reader.read(ranks_[rank].results.get())) takeFrame(rank, frame);
}

void Starter::takeFrame(size_t number, const Json& frame) {
  Rank& rank = ranks_[number];
  std::string kind = frame.value("kind", "");
  if (kind == "need_id") return sendId();
  if (kind == "done") ++rank.done;
  if (kind == "followed" || kind == "error") {
    rank.explained = true;
    giveUp();
  }
  report_.take(frame.value("rank", 0), rank.pid, frame);
}

void Starter::sendId() {
  moeUniqueId_t id;
  require(moeGetUniqueId(&id), "moeGetUniqueId");
  for (Rank& rank : ranks_) {
    // A rank that has died is settled by reap().
    if (rank.running) (void)!write(rank.ids.get(), &id, sizeof id);
  }
}

void Starter::reap() {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    int status = 0;
    if (!ranks_[rank].running || waitpid(ranks_[rank].pid, &status, WNOHANG) != ranks_[rank].pid) continue;
    ranks_[rank].running = false;
    settle(rank, status);
  }
}

// A rank's process has ended: reads what it left in its pipe, and tells an end that it did not explain.
void Starter::settle(size_t number, int status) {
  Rank& rank = ranks_[number];
  while (!rank.reader.ended()) takeFrames(number);
  if (rank.done == options_.perProcess || rank.explained || interruptedBy_ || killed_) return;
  std::string text = cat("exited with status ", WEXITSTATUS(status), " and did not say why");
  if (WIFSIGNALED(status)) {
    text = cat("was killed by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")");
  }
  int first = static_cast<int>(number) * options_.perProcess;
  if (options_.perProcess > 1) text += cat("; it drove ranks ", first, " to ", first + options_.perProcess - 1);
  report_.rankError(first, rank.pid, text);
  giveUp();
}

void Starter::giveUp() {
  if (failed_) return;
  failed_ = true;
  killAt_ = Clock::now() + kGrace;
  block_->aborted.store(1, std::memory_order_release);
}

void Starter::signalAll(int signal) {
  for (const Rank& rank : ranks_) {
    if (rank.running) kill(rank.pid, signal);
  }
}

}  // namespace

int runProcesses(const Options& options, const std::vector<std::string>& arguments, Report& report) {
  // All ranks are on this host, so nothing outside it needs to reach them. Before the first moecl call, which reads it.
  setenv("MOE_SOCKET_IFNAME", "lo", 0);
  return Starter(options, arguments, report).run();
}

}  // namespace moe::perf

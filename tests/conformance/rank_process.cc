// SPDX-License-Identifier: Apache-2.0
#include "conformance/rank_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>

extern char** environ;

namespace moetest {
namespace {

constexpr const char* kMarker = "--rank-program";
constexpr int kChildDescriptor = 3;

std::map<std::string, RankProgram>& programs() {
  static auto& all = *new std::map<std::string, RankProgram>;
  return all;
}

int millisecondsUntil(Clock::time_point end) {
  auto left = std::chrono::ceil<milliseconds>(end - Clock::now()).count();
  return static_cast<int>(left < 0 ? 0 : left);
}

std::string toHex(const moeUniqueId_t& id) {
  std::string text;
  for (char c : id.internal) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(c));
    text += digits;
  }
  return text;
}

moeUniqueId_t fromHex(const std::string& text) {
  moeUniqueId_t id{};
  for (size_t i = 0; i < sizeof id.internal && 2 * i + 1 < text.size(); ++i) {
    id.internal[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
  return id;
}

}  // namespace

Lines::~Lines() { close(descriptor_); }

void Lines::tell(const std::string& line) {
  std::string text = line + "\n";
  for (size_t sent = 0; sent < text.size();) {
    ssize_t n = send(descriptor_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) return;  // the other end is gone, which its exit code tells
    sent += static_cast<size_t>(n);
  }
}

std::optional<std::string> Lines::hear(milliseconds patience) {
  Clock::time_point end = Clock::now() + patience;
  for (;;) {
    size_t newline = buffered_.find('\n');
    if (newline != std::string::npos) {
      std::string line = buffered_.substr(0, newline);
      buffered_.erase(0, newline + 1);
      return line;
    }
    pollfd waiting{descriptor_, POLLIN, 0};
    if (poll(&waiting, 1, millisecondsUntil(end)) <= 0) return std::nullopt;
    char chunk[4096];
    ssize_t n = recv(descriptor_, chunk, sizeof chunk, 0);
    if (n <= 0) return std::nullopt;
    buffered_.append(chunk, static_cast<size_t>(n));
  }
}

moeUniqueId_t RankContext::meet() {
  if (rank == 0) {
    moeUniqueId_t id{};
    if (moeGetUniqueId(&id) != moeSuccess) parent.tell(std::string("no id: ") + moeGetLastError());
    parent.tell("id " + toHex(id));
    return id;
  }
  std::string line = parent.hear(milliseconds(20000)).value_or("");
  return fromHex(line.size() > 3 ? line.substr(3) : "");
}

RankProgramEntry::RankProgramEntry(const std::string& name, RankProgram program) {
  programs()[name] = std::move(program);
}

std::optional<int> runAsRank(int argc, char** argv) {
  if (argc < 5 || std::strcmp(argv[1], kMarker) != 0) return std::nullopt;
  auto found = programs().find(argv[2]);
  if (found == programs().end()) {
    std::fprintf(stderr, "no rank program %s\n", argv[2]);
    return 2;
  }
  Lines parent(kChildDescriptor);
  RankContext context{std::atoi(argv[3]), std::atoi(argv[4]), {argv + 5, argv + argc}, parent};
  return found->second(context);
}

RankProcess::RankProcess(const std::string& program, int rank, int nranks, const std::vector<std::string>& arguments) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("socketpair failed");
  std::vector<std::string> words = {"moe_conformance", kMarker, program, std::to_string(rank), std::to_string(nranks)};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  // A copy made by dup2 is not closed by exec, unless source and target are the same number.
  int source = fcntl(ends[1], F_DUPFD_CLOEXEC, kChildDescriptor + 1);
  posix_spawn_file_actions_adddup2(&actions, source, kChildDescriptor);
  int error = posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, pointers.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(source);
  close(ends[1]);
  lines_ = std::make_unique<Lines>(ends[0]);
  if (error != 0) throw std::runtime_error("posix_spawn failed");
}

RankProcess::~RankProcess() {
  if (code_) return;
  signal(SIGCONT);
  signal(SIGKILL);
  exitCode(milliseconds(10000));
}

void RankProcess::signal(int number) {
  if (!code_) kill(pid_, number);
}

std::optional<int> RankProcess::exitCode(milliseconds patience) {
  if (code_) return code_;
  // A descriptor of the process becomes readable when it ends.
  int descriptor = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
  if (descriptor < 0) return std::nullopt;
  pollfd waiting{descriptor, POLLIN, 0};
  int ready = poll(&waiting, 1, static_cast<int>(patience.count()));
  close(descriptor);
  int status = 0;
  if (ready <= 0 || waitpid(pid_, &status, 0) != pid_) return std::nullopt;
  code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return code_;
}

RankGroup::RankGroup(const std::string& program, int nranks, const std::vector<std::string>& arguments) {
  for (int rank = 0; rank < nranks; ++rank) {
    ranks_.push_back(std::make_unique<RankProcess>(program, rank, nranks, arguments));
  }
}

bool RankGroup::introduce(const std::vector<int>& guests) {
  std::string id = hear(0);
  if (!id.starts_with("id ")) return false;
  if (guests.empty()) {
    for (int rank = 1; rank < size(); ++rank) (*this)[rank].lines().tell(id);
  }
  for (int rank : guests) (*this)[rank].lines().tell(id);
  return true;
}

std::string RankGroup::hear(int rank, milliseconds patience) {
  return (*this)[rank].lines().hear(patience).value_or("");
}

void RankGroup::tellAll(const std::string& line) {
  for (auto& rank : ranks_) rank->lines().tell(line);
}

}  // namespace moetest

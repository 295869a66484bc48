// SPDX-License-Identifier: Apache-2.0
#include "nccl.h"

#include <dlfcn.h>

#include <exception>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "machine.h"
#include "text.h"

namespace moe::perf {

struct NcclCalls {
  int (*getVersion)(int*);
  int (*getUniqueId)(NcclId*);
  int (*commInitRank)(void**, int, NcclId, int);
  int (*commDestroy)(void*);
  int (*commAbort)(void*);
  const char* (*getErrorString)(int);
  const char* (*getLastError)(void*);
  int (*groupStart)();
  int (*groupEnd)();
  int (*send)(const void*, size_t, int, int, void*, void*);
  int (*receive)(void*, size_t, int, int, void*, void*);
};

namespace {

constexpr char kLibrary[] = "libnccl.so.2";

// "" on success.
std::string open(NcclCalls* calls, const char* option) {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    return cat(option, ": ", dlerror(), "; install NCCL 2, or name its folder in LD_LIBRARY_PATH");
  }
  const char* missing = nullptr;
  auto find = [&](const char* name, auto* call) {
    *call = reinterpret_cast<std::remove_pointer_t<decltype(call)>>(dlsym(library, name));
    if (!*call) missing = name;
  };
  find("ncclGetVersion", &calls->getVersion);
  find("ncclGetUniqueId", &calls->getUniqueId);
  find("ncclCommInitRank", &calls->commInitRank);
  find("ncclCommDestroy", &calls->commDestroy);
  find("ncclCommAbort", &calls->commAbort);
  find("ncclGetErrorString", &calls->getErrorString);
  find("ncclGetLastError", &calls->getLastError);
  find("ncclGroupStart", &calls->groupStart);
  find("ncclGroupEnd", &calls->groupEnd);
  find("ncclSend", &calls->send);
  find("ncclRecv", &calls->receive);
  return missing ? cat(option, ": ", kLibrary, " has no ", missing, "; NCCL 2.13 or newer is needed") : "";
}

// Throws on every rank if any has trouble: its own on that rank.
void agree(Team& team, const std::string& trouble) {
  bool all = true;
  for (const auto& rank : team.gather({trouble.empty() ? 0.0 : 1.0})) all = all && rank[0] == 0;
  if (!trouble.empty()) throw Failure(trouble);
  if (!all) throw Follower("another rank cannot use NCCL");
}

}  // namespace

Nccl::Nccl(Team& team, int64_t location, const char* option) : calls_(std::make_unique<NcclCalls>()) {
  agree(team, open(calls_.get(), option));
  std::string trouble;
  std::vector<double> mine{hostNumber(), static_cast<double>(location)};
  auto locations = team.gather(mine);
  for (int rank = 0; rank < team.rank(); ++rank) {
    if (locations[static_cast<size_t>(rank)] != mine || !trouble.empty()) continue;
    trouble = cat(option, ": ranks ", rank, " and ", team.rank(),
                  " have the same GPU, which NCCL does not allow; use no more ranks than GPUs");
  }
  agree(team, trouble);
  check(calls_->getVersion(&version_), "ncclGetVersion");
  NcclId id{};
  if (team.rank() == 0) check(calls_->getUniqueId(&id), "ncclGetUniqueId");
  std::vector<double> words;
  for (char byte : id.internal) words.push_back(static_cast<unsigned char>(byte));
  std::vector<double> first = team.gather(words)[0];
  for (size_t i = 0; i < sizeof id.internal; ++i) id.internal[i] = static_cast<char>(static_cast<int>(first[i]));
  check(calls_->commInitRank(&comm_, team.size(), id, team.rank()), "ncclCommInitRank");
}

Nccl::~Nccl() {
  if (std::uncaught_exceptions() > 0) abort();
  if (comm_) calls_->commDestroy(comm_);
}

void Nccl::abort() {
  if (comm_) calls_->commAbort(std::exchange(comm_, nullptr));
}

void Nccl::check(int result, const char* call) const {
  if (result == 0) return;
  const char* detail = calls_->getLastError(comm_);
  fail(call, ": ", calls_->getErrorString(result), detail ? ": " : "", detail ? detail : "");
}

void Nccl::groupStart() { check(calls_->groupStart(), "ncclGroupStart"); }
void Nccl::groupEnd() { check(calls_->groupEnd(), "ncclGroupEnd"); }

void Nccl::send(const void* data, size_t count, NcclType type, int peer, void* stream) {
  check(calls_->send(data, count, static_cast<int>(type), peer, comm_, stream), "ncclSend");
}

void Nccl::receive(void* data, size_t count, NcclType type, int peer, void* stream) {
  check(calls_->receive(data, count, static_cast<int>(type), peer, comm_, stream), "ncclRecv");
}

}  // namespace moe::perf

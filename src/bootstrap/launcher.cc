// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/launcher.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <optional>

#include "base/error.h"
#include "base/settings.h"
#include "bootstrap/bytes.h"
#include "bootstrap/roll_call.h"
#include "bootstrap/socket_bootstrap.h"
#include "bootstrap/socket_root.h"

namespace moe {
namespace {

using std::chrono::milliseconds;

class Environment {
 public:
  explicit Environment(const EnvironmentLookup& lookup) : lookup_(lookup) {}

  bool has(const char* name) const { return !text(name).empty(); }
  // "" when unset: launchers and shells do not tell the two apart.
  std::string text(const char* name) const {
    const char* value = lookup_(name);
    return value ? value : "";
  }
  int number(const char* name) const {
    std::string value = text(name);
    int result = 0;
    auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error != std::errc() || end != value.data() + value.size()) {
      fail(moeInvalidUsage, name, "=", value, " in the environment is not a number; the launcher should have set it");
    }
    return result;
  }
  // The first of them that is set.
  const char* either(const char* first, const char* second) const { return has(first) ? first : second; }

 private:
  const EnvironmentLookup& lookup_;
};

LaunchedRank checkedRank(const Environment& environment, const char* rankName, const char* sizeName) {
  LaunchedRank me{environment.number(rankName), environment.number(sizeName)};
  if (me.nranks < 1 || me.nranks > RollCall::kMaxRanks || me.rank < 0 || me.rank >= me.nranks) {
    fail(moeInvalidUsage, rankName, "=", me.rank, " and ", sizeName, "=", me.nranks,
         " in the environment make no sense: the rank must be from 0 to size - 1, the size from 1 to ",
         RollCall::kMaxRanks);
  }
  return me;
}

std::optional<Launch> fromTorchrun(const Environment& environment) {
  if (!environment.has("RANK") || !environment.has("WORLD_SIZE")) return std::nullopt;
  Launch result;
  result.launcher = "torchrun";
  result.rank = checkedRank(environment, "RANK", "WORLD_SIZE");
  std::string address = environment.text("MASTER_ADDR");
  // Ranks started by hand often lack LOCAL_WORLD_SIZE. A master on loopback then says that they are on one host.
  bool loopback = address.empty() || address == "localhost" || address == "::1" || address.starts_with("127.");
  result.oneHost =
      environment.has("LOCAL_WORLD_SIZE") ? environment.number("LOCAL_WORLD_SIZE") == result.rank.nranks : loopback;
  result.job = cat("torchrun ", environment.text("TORCHELASTIC_RUN_ID"), " ",
                   environment.text("TORCHELASTIC_RESTART_COUNT"), " ", address, " ", environment.text("MASTER_PORT"));
  return result;
}

std::optional<Launch> fromOpenMpi(const Environment& environment) {
  if (!environment.has("OMPI_COMM_WORLD_RANK") || !environment.has("OMPI_COMM_WORLD_SIZE")) return std::nullopt;
  Launch result;
  result.launcher = "mpirun";
  result.rank = checkedRank(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  const char* job = environment.either("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid");
  result.oneHost = environment.has(job) && environment.has("OMPI_COMM_WORLD_LOCAL_SIZE") &&
                   environment.number("OMPI_COMM_WORLD_LOCAL_SIZE") == result.rank.nranks;
  result.job = cat("mpirun ", environment.text(job));
  return result;
}

std::optional<Launch> fromSrun(const Environment& environment) {
  // A batch script has a SLURM_PROCID too, but no step unless srun starts one.
  const char* step = environment.either("SLURM_STEP_ID", "SLURM_STEPID");
  const char* size = environment.either("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");
  if (!environment.has("SLURM_PROCID") || !environment.has(size) || !environment.has(step)) return std::nullopt;
  Launch result;
  result.launcher = "srun";
  result.rank = checkedRank(environment, "SLURM_PROCID", size);
  const char* nodes = environment.either("SLURM_STEP_NUM_NODES", "SLURM_NNODES");
  result.oneHost = environment.has(nodes) && environment.number(nodes) == 1;
  result.job = cat("srun ", environment.text("SLURM_JOB_ID"), " ", environment.text(step), " ",
                   environment.text("SLURM_RESTART_COUNT"));
  return result;
}

Digest meetingKey(std::string_view kind, MeetingNumber number, const std::string& secret) {
  return sha256(ByteWriter().bytes("moecl ").bytes(kind).number(number).bytes(secret).take());
}

std::string hexText(const Digest& digest, size_t bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < bytes; ++i) text += {kDigits[digest[i] >> 4], kDigits[digest[i] & 15]};
  return text;
}

// Listens, and waits while an earlier communicator of this job still holds the address.
FileDescriptor listenPatiently(const SocketAddress& address, const std::string& what, const WaitLimit& limit,
                               int* error) {
  for (;;) {
    FileDescriptor listener = listenAt(address, error);
    if (*error != EADDRINUSE) return listener;
    if (limit.passed()) {
      fail(moeSystemError, "rank 0 cannot listen at ", address.text(), " (", what,
           "): another process, or a communicator whose ranks have not all come, holds it");
    }
    waitFor(-1, 0, limit);
  }
}

void startRootOfRankZero(std::vector<FileDescriptor> listeners, const Meeting& meeting, const WaitLimit& limit) {
  RootOptions options;
  options.listeners = std::move(listeners);
  options.secret = meeting.secret;
  options.patience = milliseconds(limit.millisecondsLeft());
  options.stopListeningWhenComplete = true;
  options.sameUserOnly = meeting.sameUserOnly;
  startRoot(std::move(options));
}

// Many hosts map their own name to a loopback address, while other hosts know the name by a real one.
bool knownElsewhereByAnotherAddress(const std::string& commId, const std::vector<SocketAddress>& addresses) {
  if (commId.starts_with("localhost:") || addresses.front().text() == commId) return false;
  return std::all_of(addresses.begin(), addresses.end(), [](const SocketAddress& each) { return each.loopback(); });
}

// Opens rank 0's sockets. Returns where rank 0 itself finds them.
std::vector<SocketAddress> listenAtCommId(const std::string& commId, const Meeting& meeting, const WaitLimit& limit) {
  std::vector<FileDescriptor> listeners;
  std::vector<SocketAddress> here;
  std::string refused;
  auto tryOne = [&](const SocketAddress& address, const SocketAddress& reach) {
    int error = 0;
    FileDescriptor listener = listenPatiently(address, cat("MOE_COMM_ID=", commId), limit, &error);
    if (!listener.valid()) {
      refused += cat(refused.empty() ? "" : ", ", address.text(), " (", std::strerror(error), ")");
      return;
    }
    listeners.push_back(std::move(listener));
    here.push_back(reach);
  };
  if (!knownElsewhereByAnotherAddress(commId, meeting.addresses)) {
    for (const SocketAddress& address : meeting.addresses) tryOne(address, address);
  }
  if (listeners.empty()) {
    // The others' address for this host need not be one that this host knows: it may be behind a translator.
    const uint16_t port = meeting.addresses.front().port();
    for (int family : {AF_INET, AF_INET6}) tryOne(anyAddress(family, port), loopbackAddress(family, port));
  }
  if (listeners.empty()) fail(moeSystemError, "rank 0 cannot listen at MOE_COMM_ID=", commId, ": ", refused);
  startRootOfRankZero(std::move(listeners), meeting, limit);
  return here;
}

}  // namespace

Launch parseLaunch(const EnvironmentLookup& lookup) {
  Environment environment(lookup);
  if (auto launch = fromTorchrun(environment)) return *launch;
  if (auto launch = fromOpenMpi(environment)) return *launch;
  if (auto launch = fromSrun(environment)) return *launch;
  fail(moeInvalidUsage,
       "no launcher's variables are in the environment. Looked for torchrun's RANK and WORLD_SIZE, Open MPI's "
       "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE, and srun's SLURM_PROCID, SLURM_NTASKS and SLURM_STEP_ID; start "
       "the program with one of these, or use moeCommInit with an id");
}

std::unique_ptr<Bootstrap> joinOnOneHost(const std::string& job, MeetingNumber number, const LaunchedRank& me,
                                         const WaitLimit& limit) {
  // Not a secret: the kernel tells both sides each other's user. The key keeps jobs apart.
  Digest name = meetingKey("job", number, cat(::geteuid(), " ", job));
  Meeting meeting;
  meeting.addresses = {abstractAddress("moecl-" + hexText(name, 16))};
  meeting.secret = meetingKey("job key", number, job);
  meeting.rootMayComeLater = true;
  meeting.sameUserOnly = true;
  meeting.place = "rank 0 of this launch";
  meeting.hint =
      "has rank 0 called moeCommInitEnv, as the same user, on the same host and in the same network namespace, and as "
      "often as this rank? Otherwise set MOE_COMM_ID and MOE_COMM_SECRET";
  if (me.rank == 0) {
    int error = 0;
    std::vector<FileDescriptor> listeners;
    listeners.push_back(listenPatiently(meeting.addresses.front(), "the meeting place of this launch", limit, &error));
    if (error != 0) failErrno(error, "rank 0 cannot listen at ", meeting.addresses.front().text());
    startRootOfRankZero(std::move(listeners), meeting, limit);
  }
  return joinMeeting(meeting, me.rank, me.nranks, limit);
}

std::unique_ptr<Bootstrap> joinAtCommId(const std::string& commId, const std::string& secret, MeetingNumber number,
                                        const LaunchedRank& me, const WaitLimit& limit) {
  if (secret.empty()) {
    fail(moeInvalidUsage, "MOE_COMM_ID=", commId, " is set and MOE_COMM_SECRET is not; set it to one value, ",
         "hard to guess, for all ranks of this job");
  }
  Meeting meeting;
  meeting.addresses = resolve(commId, "MOE_COMM_ID", limit);
  meeting.secret = meetingKey("comm secret", number, secret);
  meeting.rootMayComeLater = true;
  meeting.place = cat("MOE_COMM_ID=", commId);
  meeting.hint =
      "has rank 0 called moeCommInitEnv there, as often as this rank and with the same MOE_COMM_SECRET, and can its "
      "host and port be reached from here?";
  if (me.rank == 0) meeting.addresses = listenAtCommId(commId, meeting, limit);
  return joinMeeting(meeting, me.rank, me.nranks, limit);
}

LaunchedRank launchedRank() { return parseLaunch(::getenv).rank; }

std::unique_ptr<Bootstrap> joinLaunched(const LaunchedRank& me, const WaitLimit& limit) {
  static std::atomic<MeetingNumber> count{0};
  const MeetingNumber number = count++;
  if (!settings().commId.empty()) {
    return joinAtCommId(settings().commId, settings().commSecret, number, me, limit);
  }
  Launch launch = parseLaunch(::getenv);
  if (!launch.oneHost && me.nranks > 1) {
    fail(moeInvalidUsage, "the ", me.nranks, " ranks of this ", launch.launcher,
         " launch are not known to be on one host. Set MOE_COMM_ID=host:port to a free port on rank 0's host, and ",
         "MOE_COMM_SECRET to a value that is hard to guess, both alike on all ranks");
  }
  return joinOnOneHost(launch.job, number, me, limit);
}

}  // namespace moe

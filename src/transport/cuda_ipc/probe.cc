// SPDX-License-Identifier: Apache-2.0
#include "transport/cuda_ipc/probe.h"

#include <functional>
#include <memory>

#include "base/error.h"
#include "base/log.h"
#include "transport/cuda_ipc/copy_queue.h"
#include "transport/reached.h"
#include "transport/reports.h"

namespace moe {
namespace {

// Never 0, and another one for each pair.
uint64_t patternOf(int from, int to) {
  uint64_t pair = (static_cast<uint64_t>(from) << 32) | static_cast<uint64_t>(to);
  return (pair + 1) * 0x9e3779b97f4a7c15;  // odd, so that different pairs stay different
}

std::byte* slotIn(std::byte* window, int rank) { return window + static_cast<size_t>(rank) * sizeof(uint64_t); }

class Probe {
 public:
  Probe(const std::shared_ptr<const Gpu>& gpu, const Region& window, const std::vector<std::string>& gpuNames, int rank,
        const WaitLimit& limit, std::vector<Peer>* peers)
      : queue_(gpu, kWords), window_(window), gpuNames_(gpuNames), rank_(rank), limit_(limit), peers_(*peers) {
    queue_.keep(window.owner);
    for (const Peer& peer : peers_) queue_.keep(peer.owner);
  }

  // Result: a '+' for each rank to which this one wrote.
  std::string writeAll();
  // reports[r] is what writeAll gave on rank r.
  void checkAll(const std::vector<std::string>& reports);
  void zeroOwn();

 private:
  static constexpr size_t kWords = 4;

  int nranks() const { return static_cast<int>(peers_.size()); }
  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }
  // Does something about a mapped peer. What the driver says against it becomes the peer's reason.
  void attempt(int rank, const char* what, const std::function<void()>& action);
  void giveUp(int rank, const std::string& clause);
  void expectWord(int rank, const char* where, uint64_t expected, uint64_t seen);
  void checkMapped(int rank);
  void checkArrival(int rank);

  CopyQueue queue_;
  const Region& window_;
  const std::vector<std::string>& gpuNames_;
  const int rank_;
  const WaitLimit& limit_;
  std::vector<Peer>& peers_;
};

void Probe::giveUp(int rank, const std::string& clause) {
  std::string text =
      cat(gpuNames_[static_cast<size_t>(rank_)], " and ", gpuNames_[static_cast<size_t>(rank)], " ", clause);
  log(LogLevel::kWarn, "rank ", rank_, " cannot use the GPU memory of rank ", rank, ": ", text);
  peer(rank) = unreachable(text);
}

void Probe::attempt(int rank, const char* what, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    // These are about this rank.
    if (error.code() == moeTimeout || error.code() == moeAborted) throw;
    giveUp(rank, cat("have no working path: ", what, ": ", error.text()));
    queue_.discard(limit_);
  }
}

std::string Probe::writeAll() {
  // What peers are to find in this window when they read it.
  queue_.write(slotIn(window_.base, rank_), patternOf(rank_, rank_));
  queue_.finish(limit_);
  std::string written;
  for (int rank = 0; rank < nranks(); ++rank) {
    if (peer(rank).reach == Reach::kMapped) {
      attempt(rank, "writing to the peer's window", [&] {
        queue_.write(slotIn(peer(rank).window, rank_), patternOf(rank_, rank));
        queue_.finish(limit_);
      });
    }
    written += peer(rank).reach == Reach::kMapped ? '+' : '-';
  }
  return written;
}

void Probe::expectWord(int rank, const char* where, uint64_t expected, uint64_t seen) {
  if (seen == expected || peer(rank).reach != Reach::kMapped) return;
  giveUp(rank, cat("are mapped to each other, but data does not get through: ", where, " is ", seen, " and should be ",
                   expected, "; see whether an IOMMU or PCIe ACS redirects traffic between GPUs"));
}

void Probe::checkMapped(int rank) {
  attempt(rank, "reading the peer's window", [&] {
    queue_.read(slotIn(peer(rank).window, rank_));
    queue_.read(slotIn(peer(rank).window, rank));
    std::vector<uint64_t> seen = queue_.finish(limit_);
    expectWord(rank, "what this rank wrote to the peer", patternOf(rank_, rank), seen[0]);
    expectWord(rank, "what the peer wrote to itself", patternOf(rank, rank), seen[1]);
  });
}

void Probe::checkArrival(int rank) {
  queue_.read(slotIn(window_.base, rank));
  uint64_t seen = queue_.finish(limit_)[0];
  expectWord(rank, "what the peer wrote to this rank", patternOf(rank, rank_), seen);
}

void Probe::checkAll(const std::vector<std::string>& reports) {
  for (int rank = 0; rank < nranks(); ++rank) {
    const std::string& wrote = reports[static_cast<size_t>(rank)];
    if (wrote.size() != peers_.size()) {
      fail(moeMismatch, "rank ", rank, " says of ", wrote.size(), " ranks whether it could write to them, and not of ",
           peers_.size(), "; do all ranks run the same version of moecl?");
    }
    if (peer(rank).reach != Reach::kMapped) continue;
    checkMapped(rank);
    if (wrote[static_cast<size_t>(rank_)] == '+') checkArrival(rank);
  }
}

void Probe::zeroOwn() {
  queue_.zero(window_.base, probeBytes(nranks()));
  queue_.finish(limit_);
}

}  // namespace

size_t probeBytes(int nranks) { return static_cast<size_t>(nranks) * sizeof(uint64_t); }

void probePeers(const std::shared_ptr<const Gpu>& gpu, const Region& window, const std::vector<std::string>& gpuNames,
                Bootstrap& bootstrap, const WaitLimit& limit, std::vector<Peer>* peers) {
  constexpr char kWhat[] = "probe its GPU's memory";
  std::unique_ptr<Probe> probe;
  auto write = [&] {
    probe = std::make_unique<Probe>(gpu, window, gpuNames, bootstrap.rank(), limit, peers);
    return probe->writeAll();
  };
  std::vector<std::string> reports = exchangeReports(write, kWhat, bootstrap, limit);
  auto check = [&] {
    probe->checkAll(reports);
    return std::string();
  };
  exchangeReports(check, kWhat, bootstrap, limit);
  // Not before all have read.
  auto zero = [&] {
    probe->zeroOwn();
    return std::string();
  };
  exchangeReports(zero, kWhat, bootstrap, limit);
}

}  // namespace moe

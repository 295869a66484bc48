// SPDX-License-Identifier: Apache-2.0
// A rank on the cuda_ipc transport. With the stand-in of tests/simcuda/ in place of the real driver it needs no GPU.
#pragma once

#include <gtest/gtest.h>

#include "simcuda/simcuda.h"
#include "transport/cuda_ipc/copy_queue.h"
#include "transport/cuda_ipc/cuda_ipc_transport.h"
#include "transport/cuda_ipc/device_select.h"
#include "unit/transport/test_ranks.h"

namespace moe::test {

// Asked in a child: once this process has used CUDA, its children cannot.
inline int countGpus() {
  pid_t child = ::fork();
  if (child == 0) ::_exit(std::min(cudaDeviceCount(), 64));
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

inline bool simulated() { return simCuda<SimCudaLive>("simCudaLive") != nullptr; }
// In this process.
inline void makeFail(const char* call, int result) { simCuda<SimCudaFail>("simCudaFail")(call, result); }
inline void makeTrouble(int kind) { simCuda<SimCudaTrouble>("simCudaTrouble")(kind); }
inline int liveThings() { return simulated() ? simCuda<SimCudaLive>("simCudaLive")() : 0; }

// Rank r's window on GPU `device`, connected on demand.
struct CudaRank {
  explicit CudaRank(Bootstrap& bootstrap, int device, size_t bytes = 5000)
      : rank(bootstrap.rank()), nranks(bootstrap.nranks()), states(std::make_shared<PeerStates>(nranks)) {
    transport = makeCudaIpcTransport(rank, nranks, device, states);
    window = transport->allocate(bytes);
    gpu = Gpu::open(device);
    queue = std::make_unique<CopyQueue>(gpu, 128);
  }
  explicit CudaRank(Bootstrap& bootstrap) : CudaRank(bootstrap, bootstrap.rank()) {}

  void connect(Bootstrap& bootstrap) { peers = transport->connect(window, bootstrap, patience()); }
  const Peer& peer(int r) const { return peers[static_cast<size_t>(r)]; }
  bool sees(int r, PeerState state) const {
    return eventually([&] { return states->get(r) == state; });
  }
  void write(std::byte* base, int index, uint64_t word) {
    queue->write(base + 8 * index, word);
    queue->finish(patience());
  }
  uint64_t read(std::byte* base, int index) {
    queue->read(base + 8 * index);
    return queue->finish(patience())[0];
  }
  void expectAllReached(const char* transportName) {
    for (int r = 0; r < nranks; ++r) {
      EXPECT_EQ(peer(r).reach, r == rank ? Reach::kSelf : Reach::kMapped) << peer(r).reason;
      EXPECT_STREQ(peer(r).transport, r == rank ? "self" : transportName);
    }
  }
  // The windows come zeroed; then each rank leaves a word in every one, and all of them arrive.
  void expectWordsCross(Bootstrap& bootstrap) {
    for (int r = 0; r < nranks; ++r) EXPECT_EQ(read(window.base, r), 0u);
    EXPECT_EQ(read(window.base, static_cast<int>(window.bytes / 8) - 1), 0u);
    bootstrap.allGather("", patience());
    for (int r = 0; r < nranks; ++r) write(peer(r).window, rank, 1000 + static_cast<uint64_t>(rank));
    bootstrap.allGather("", patience());
    for (int r = 0; r < nranks; ++r) {
      EXPECT_EQ(read(window.base, r), 1000 + static_cast<uint64_t>(r)) << "from rank " << r << " at rank " << rank;
      EXPECT_EQ(read(peer(r).window, rank), 1000 + static_cast<uint64_t>(rank));
    }
    bootstrap.allGather("", patience());
  }

  int rank, nranks;
  std::shared_ptr<PeerStates> states;
  std::unique_ptr<Transport> transport;
  Region window;
  std::shared_ptr<const Gpu> gpu;
  std::unique_ptr<CopyQueue> queue;
  std::vector<Peer> peers;
};

}  // namespace moe::test

// SPDX-License-Identifier: Apache-2.0
#include "transport/cuda_ipc/cuda_ipc_transport.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string_view>

#include "base/settings.h"
#include "transport/cuda_ipc/device_memory.h"
#include "transport/cuda_ipc/probe.h"
#include "transport/host_peers.h"
#include "transport/reached.h"
#include "transport/reports.h"
#include "transport/wire.h"

namespace moe {
namespace {

// The first of a card, so that another transport's is not taken for one.
constexpr uint64_t kCardMagic = 0x6d6f6563'75646131;

// What the ranks tell each other first.
struct Card {
  GpuUuid uuid{};
  uint32_t slice = 0;
  HostCard host;

  std::string gpuName() const { return gpuUuidText(uuid, slice != 0); }
};

std::string packCard(const Card& card) {
  std::string out;
  putValue(&out, kCardMagic);
  putValue(&out, card.uuid);
  putValue(&out, card.slice);
  putHostCard(&out, card.host);
  return out;
}

bool unpackCard(std::string_view bytes, Card* card) {
  uint64_t magic = 0;
  return takeValue(&bytes, &magic) && magic == kCardMagic && takeValue(&bytes, &card->uuid) &&
         takeValue(&bytes, &card->slice) && takeHostCard(&bytes, &card->host) && bytes.empty();
}

std::vector<Card> parseCards(const std::vector<std::string>& contents) {
  size_t needed = probeBytes(static_cast<int>(contents.size()));
  std::vector<Card> cards(contents.size());
  for (size_t rank = 0; rank < contents.size(); ++rank) {
    Card& card = cards[rank];
    if (!unpackCard(contents[rank], &card)) failUnreadableCard(rank, contents[rank].size());
    const uint64_t bytes = card.host.windowBytes;
    if (bytes < needed || bytes > static_cast<uint64_t>(PTRDIFF_MAX)) {
      fail(moeMismatch, "rank ", rank, " announces a window of ", bytes, " bytes; it must have at least ", needed,
           " and less than 2^63");
    }
  }
  return cards;
}

class CudaIpcTransport final : public Transport {
 public:
  CudaIpcTransport(int rank, int nranks, int device, std::shared_ptr<PeerStates> states)
      : nranks_(nranks), ordinal_(device), host_(rank, nranks, std::move(states)) {}

  Region allocate(size_t bytes) override;
  std::vector<Peer> connect(const Region& window, Bootstrap& bootstrap, const WaitLimit& limit) override;
  void announce(PeerState state) override { host_.announce(state); }

 private:
  std::string describe(const Region& window);
  std::vector<Peer> reachAll(const Region& window, const std::vector<Card>& cards, Bootstrap& bootstrap,
                             const WaitLimit& limit);
  // Why the two GPUs cannot work together, as a clause; empty if nothing is known against it.
  std::string refuse(const Card& card, bool local) const;
  // What `find` gives, or the peer as unreachable because of what it threw or of what is known before.
  Peer reachOr(const Card& card, bool local, const std::function<Peer()>& find) const;

  const int nranks_;
  const int ordinal_;
  std::shared_ptr<const Gpu> gpu_;
  std::shared_ptr<DeviceMemory> memory_;  // of the own window, until it is shown to the others
  FileDescriptor exported_;               // likewise
  HostPeers host_;
};

Region regionOf(const std::shared_ptr<DeviceMemory>& memory) { return {memory->base(), memory->bytes(), memory}; }

Region CudaIpcTransport::allocate(size_t bytes) {
  if (!gpu_) gpu_ = Gpu::open(ordinal_);
  memory_ = DeviceMemory::create(gpu_, std::max(bytes, probeBytes(nranks_)));
  return regionOf(memory_);
}

std::vector<Peer> CudaIpcTransport::connect(const Region& window, Bootstrap& bootstrap, const WaitLimit& limit) {
  constexpr char kWhat[] = "share its GPU's memory";
  std::vector<Card> cards = parseCards(exchangeReports([&] { return describe(window); }, kWhat, bootstrap, limit));
  std::vector<Peer> peers;
  auto reach = [&] {
    peers = reachAll(window, cards, bootstrap, limit);
    return std::string();
  };
  exchangeReports(reach, kWhat, bootstrap, limit);
  std::vector<std::string> gpuNames;
  for (const Card& card : cards) gpuNames.push_back(card.gpuName());
  probePeers(gpu_, window, gpuNames, bootstrap, limit, &peers);
  exported_.reset();
  memory_.reset();
  return peers;
}

std::string CudaIpcTransport::describe(const Region& window) {
  if (!memory_ || window.owner != memory_) {
    fail(moeInternalError, "connect() needs the region that the last allocate() gave, and works once");
  }
  exported_ = memory_->exportDescriptor();
  Card card;
  card.uuid = gpu_->uuid();
  card.slice = gpu_->slice() ? 1 : 0;
  card.host = host_.describe(window);
  return packCard(card);
}

std::vector<Peer> CudaIpcTransport::reachAll(const Region& window, const std::vector<Card>& cards, Bootstrap& bootstrap,
                                             const WaitLimit& limit) {
  std::vector<HostCard> hostCards;
  for (const Card& card : cards) hostCards.push_back(card.host);
  HostPeers::Ways ways;
  ways.local = [&](int peer, const Region& region) {
    const Card& card = cards[static_cast<size_t>(peer)];
    return reachOr(card, true, [&] {
      // The card said so: only this transport's windows are announced with its magic.
      auto memory = std::static_pointer_cast<DeviceMemory>(region.owner);
      if (card.uuid != gpu_->uuid()) memory->grant(*gpu_);
      return mapped(region, "local");
    });
  };
  ways.linked = [&](int peer, const FileDescriptor& descriptor) {
    const Card& card = cards[static_cast<size_t>(peer)];
    return reachOr(card, false, [&] {
      auto bytes = static_cast<size_t>(card.host.windowBytes);
      return mapped(regionOf(DeviceMemory::import(gpu_, descriptor, bytes)), "cuda_ipc");
    });
  };
  return host_.reachAll(window, hostCards, exported_.get(), ways, bootstrap, limit);
}

std::string CudaIpcTransport::refuse(const Card& card, bool local) const {
  if (card.uuid == gpu_->uuid()) {
    if (local && settings().allowSharedGpu != 0) return "";
    return cat("both run on ", gpu_->name(),
               "; give each rank its own GPU, or set MOE_ALLOW_SHARED_GPU=1 for ranks that are threads of one process "
               "(tests)");
  }
  // A GPU that this process does not see cannot be asked about: trying will tell.
  int theirs = findGpu(card.uuid);
  if (theirs < 0) return "";
  CUdevice device = -1;
  gpu_->check(driver().deviceGet(&device, theirs), "cuDeviceGet");
  int possible = 0;
  gpu_->check(driver().deviceCanAccessPeer(&possible, gpu_->device(), device), "cuDeviceCanAccessPeer");
  if (possible != 0) return "";
  return cat(gpu_->name(), " cannot access the memory of ", card.gpuName(),
             ": cuDeviceCanAccessPeer says no; see nvidia-smi topo -p2p r");
}

Peer CudaIpcTransport::reachOr(const Card& card, bool local, const std::function<Peer()>& find) const {
  try {
    std::string refusal = refuse(card, local);
    return refusal.empty() ? find() : unreachable(refusal);
  } catch (const Error& error) {
    return unreachable(cat(gpu_->name(), " cannot map the window on ", card.gpuName(), ": ", error.text()));
  }
}

}  // namespace

std::unique_ptr<Transport> makeCudaIpcTransport(int rank, int nranks, int device, std::shared_ptr<PeerStates> states) {
  return std::make_unique<CudaIpcTransport>(rank, nranks, device, std::move(states));
}

}  // namespace moe

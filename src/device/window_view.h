// SPDX-License-Identifier: Apache-2.0
// Typed addresses in windows, workspaces and handles. Offsets come from layout.h; nothing is added up anywhere else.
#pragma once

#include <cstddef>

#include "device/args.h"

namespace moe {

// The number of a dispatch or a combine, and which of the window's buffers it uses.
struct Epoch {
  uint64_t number = 0;
  int64_t buffer = 0;

  Epoch() = default;
  MOE_HD Epoch(uint64_t number, const Shape& shape) : number(number), buffer(shape.byBuffers.wideRemainder(number)) {}
  MOE_HD operator uint64_t() const { return number; }
};

// One buffer of the dispatch half of a rank's window.
class DispatchWindow {
 public:
  MOE_HD DispatchWindow(const Layout& layout, std::byte* window, const Epoch& epoch)
      : layout_(layout), base_(window + layout.window.dispatchBuffers + epoch.buffer * layout.window.dispatchBytes) {}

  MOE_HD std::byte* record(int source, int64_t slot) const {
    return base_ + layout_.window.records + (source * layout_.shape.maxTokens + slot) * layout_.record.stride;
  }
  MOE_HD CountBlock* counts(int source) const { return reinterpret_cast<CountBlock*>(countBlock(source)); }
  MOE_HD ChunkRange* chunkRange(int source, int64_t chunk) const {
    return reinterpret_cast<ChunkRange*>(countBlock(source) + layout_.window.chunkRanges) + chunk;
  }
  MOE_HD int32_t* expertCounts(int source) const {
    return reinterpret_cast<int32_t*>(countBlock(source) + layout_.window.expertCounts);
  }
  MOE_HD uint64_t* countSignal(int source) const {
    return reinterpret_cast<uint64_t*>(base_ + layout_.window.countSignals + source * kSignalStride);
  }
  MOE_HD uint64_t* chunkSignal(int source, int64_t chunk) const {
    return reinterpret_cast<uint64_t*>(base_ + layout_.window.chunkSignals + source * layout_.window.chunkStride) +
           chunk;
  }

 private:
  MOE_HD std::byte* countBlock(int source) const {
    return base_ + layout_.window.counts + source * layout_.window.countStride;
  }
  const Layout& layout_;
  std::byte* base_;
};

// One buffer of the combine half.
class CombineWindow {
 public:
  MOE_HD CombineWindow(const Layout& layout, std::byte* window, const Epoch& epoch)
      : layout_(layout), base_(window + layout.window.combineBuffers + epoch.buffer * layout.window.combineBytes) {}

  MOE_HD std::byte* row(int64_t token, int64_t ordinal) const {
    return base_ + layout_.window.rows + (token * layout_.shape.distinct + ordinal) * layout_.window.rowStride;
  }
  MOE_HD CombineHead* head(int sender) const {
    return reinterpret_cast<CombineHead*>(base_ + layout_.window.heads + sender * kSignalStride);
  }
  MOE_HD uint64_t* headSignal(int sender) const {
    return reinterpret_cast<uint64_t*>(base_ + layout_.window.headSignals + sender * kSignalStride);
  }
  MOE_HD uint64_t* chunkSignal(int sender, int64_t chunk) const {
    return reinterpret_cast<uint64_t*>(base_ + layout_.window.combineSignals + sender * layout_.window.chunkStride) +
           chunk;
  }

 private:
  const Layout& layout_;
  std::byte* base_;
};

MOE_HD inline uint64_t* consumedDispatch(const Layout& layout, std::byte* window, int reader) {
  return reinterpret_cast<uint64_t*>(window + layout.window.consumedDispatch + reader * kSignalStride);
}
MOE_HD inline uint64_t* consumedCombine(const Layout& layout, std::byte* window, int reader) {
  return reinterpret_cast<uint64_t*>(window + layout.window.consumedCombine + reader * kSignalStride);
}

// The arrays of a workspace.
class Workspace {
 public:
  MOE_HD explicit Workspace(const CommonArgs& args) : layout_(args.layout), base_(args.workspace) {}

  MOE_HD int32_t* histogram(int64_t block) const {
    return at<int32_t>(layout_.workspace.histograms) + block * layout_.shape.bins();
  }
  MOE_HD uint64_t* spanCounted(int64_t block) const { return at<uint64_t>(layout_.workspace.spanCounted) + block; }
  MOE_HD uint64_t* spanRouted(int64_t block) const { return at<uint64_t>(layout_.workspace.spanRouted) + block; }
  MOE_HD uint64_t* sentTokens(int64_t chunk) const { return at<uint64_t>(layout_.workspace.sentTokens) + chunk; }
  MOE_HD uint64_t* sentPartials(int source, int64_t chunk) const {
    return at<uint64_t>(layout_.workspace.sentPartials) + source * layout_.shape.chunks + chunk;
  }
  MOE_HD int64_t* sentRows(int peer) const { return at<int64_t>(layout_.workspace.sentRows) + peer; }
  MOE_HD const std::byte* zeroRow() const { return at<const std::byte>(layout_.workspace.zeroRow); }
  MOE_HD std::byte** recordBases(int64_t block) const {
    return at<std::byte*>(layout_.workspace.recordBases) + block * layout_.shape.nranks;
  }
  MOE_HD int32_t* owners(int64_t token) const {
    return at<int32_t>(layout_.workspace.owners) + token * layout_.shape.topk;
  }
  MOE_HD uint8_t* flags(int64_t token) const {
    return at<uint8_t>(layout_.workspace.flags) + token * layout_.shape.topk;
  }
  MOE_HD int32_t* bins(int64_t block) const {
    return at<int32_t>(layout_.workspace.bins) + block * kMaxParts * layout_.shape.bins();
  }
  MOE_HD std::byte** targets(int64_t token) const {
    return at<std::byte*>(layout_.workspace.targets) + token * layout_.shape.topk;
  }
  MOE_HD int32_t* indexes(int64_t token) const {
    return at<int32_t>(layout_.workspace.indexes) + token * layout_.shape.topk;
  }
  MOE_HD uint32_t* skipped(int64_t block) const { return at<uint32_t>(layout_.workspace.skipped) + block; }
  MOE_HD std::byte* heads(int64_t block) const {
    return at<std::byte>(layout_.workspace.heads) + block * kMaxBlockWarps * layout_.slot.headBytes;
  }
  MOE_HD std::byte* places(int block) const {
    return at<std::byte>(layout_.workspace.places + block * layout_.workspace.placeStride);
  }

 private:
  template <class T>
  MOE_HD T* at(int64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  const Layout& layout_;
  std::byte* base_;
};

// The arrays of a handle.
class HandleView {
 public:
  MOE_HD explicit HandleView(const CommonArgs& args) : layout_(args.layout), base_(args.handle) {}

  MOE_HD int32_t* ids(int64_t token) const { return at<int32_t>(layout_.handle.ids) + token * layout_.shape.topk; }
  MOE_HD float* weights(int64_t token) const { return at<float>(layout_.handle.weights) + token * layout_.shape.topk; }
  MOE_HD TokenRanks* ranks(int64_t token) const { return at<TokenRanks>(layout_.handle.ranks) + token; }
  MOE_HD int32_t* goals(int64_t token) const {
    return at<int32_t>(layout_.handle.goals) + token * layout_.shape.distinct;
  }
  MOE_HD int64_t* sourceRows(int source) const { return at<int64_t>(layout_.handle.sourceRows) + source; }
  MOE_HD int32_t* sourceChunks(int source) const { return at<int32_t>(layout_.handle.sourceChunks) + source; }
  MOE_HD int64_t* sourceFirst(int source) const { return at<int64_t>(layout_.handle.sourceFirst) + source; }
  MOE_HD ChunkRange* chunkRange(int source, int64_t chunk) const {
    return at<ChunkRange>(layout_.handle.chunkRanges) + source * layout_.shape.chunks + chunk;
  }
  MOE_HD int32_t* token(int source, int64_t slot) const {
    return at<int32_t>(layout_.handle.tokens) + record(source, slot);
  }
  MOE_HD int32_t* ordinal(int source, int64_t slot) const {
    return at<int32_t>(layout_.handle.ordinals) + record(source, slot);
  }
  MOE_HD int32_t* rows(int source, int64_t slot) const {
    return at<int32_t>(layout_.handle.rows) + record(source, slot) * layout_.shape.topk;
  }
  MOE_HD float* rowWeights(int source, int64_t slot) const {
    return at<float>(layout_.handle.rowWeights) + record(source, slot) * layout_.shape.topk;
  }

 private:
  MOE_HD int64_t record(int source, int64_t slot) const { return source * layout_.shape.maxTokens + slot; }
  template <class T>
  MOE_HD T* at(int64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  const Layout& layout_;
  std::byte* base_;
};

}  // namespace moe

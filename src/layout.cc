// SPDX-License-Identifier: Apache-2.0
#include "layout.h"

namespace moe {
namespace {

// Hands out consecutive offsets.
class Offsets {
 public:
  int64_t take(int64_t bytes, int64_t align = 256) {
    int64_t at = roundUp(next_, align);
    next_ = at + bytes;
    return at;
  }
  int64_t end(int64_t align = 256) const { return roundUp(next_, align); }

 private:
  int64_t next_ = 0;
};

void takePayloads(const moeConfig_t& config, Shape* shape) {
  auto add = [shape](int64_t bytes) { shape->payloadBytes[shape->payloads++] = bytes; };
  add(config.hidden * dataTypeBytes(shape->quantizes() ? moeFloat8e4m3 : config.dtype));
  if (shape->quantizes()) {
    int64_t perWord = shape->quantize == moeQuantizeUe8m0 ? kScaleWord : 1;
    add(kScaleWord * ceilDiv(shape->groups(), perWord));
  }
  for (int side = 0; side < config.numSideRows; ++side) add(config.sideRowBytes[side]);
}

Shape makeShape(const moeConfig_t& config, int nranks, int rank) {
  Shape shape{};
  shape.nranks = nranks;
  shape.rank = rank;
  shape.topk = config.maxTopk;
  shape.distinct = static_cast<int32_t>(smaller(config.maxTopk, nranks));
  shape.layout = config.layout;
  shape.path = config.path;
  shape.buffers = config.buffers;
  shape.combineType = config.combineDtype;
  shape.maxTokens = config.maxTokensPerRank;
  shape.hidden = config.hidden;
  shape.chunks = ceilDiv(config.maxTokensPerRank, kChunkTokens);
  shape.quantize = config.quantize;
  shape.scaleOrder = config.scaleOrder;
  shape.slots = config.slots;
  shape.format = config.format;
  takePayloads(config, &shape);
  shape.combineRowBytes = config.hidden * dataTypeBytes(config.combineDtype);
  shape.expertAlign = config.expertAlign;
  shape.capacity = config.capacity;
  auto experts = static_cast<int32_t>(config.numExperts);
  shape.experts = {experts, nranks};
  shape.byRanks = Divisor(nranks);
  shape.byTopk = Divisor(shape.topk);
  shape.byBuffers = Divisor(shape.buffers);
  shape.byColumnRows = Divisor(config.layout == moeLayoutExpertPadded ? config.capacity : INT32_MAX);
  int64_t arriving = int64_t{nranks} * config.maxTokensPerRank;
  int64_t local = shape.localExperts();
  switch (config.layout) {
    case moeLayoutRank: shape.rowCapacity = arriving; break;
    case moeLayoutExpert:
      shape.rowCapacity = arriving * smaller(config.maxTopk, local) + local * (config.expertAlign - 1);
      shape.rowCapacity = roundUp(shape.rowCapacity, config.expertAlign);
      break;
    default: shape.rowCapacity = local * config.capacity; break;
  }
  return shape;
}

RecordLayout makeRecord(const Shape& shape) {
  RecordLayout record{};
  Offsets at;
  for (int payload = 0; payload < shape.payloads; ++payload) {
    record.payload[payload] = at.take(shape.payloadBytes[payload], 16);
  }
  record.head = at.take(sizeof(RecordHead), 16);
  record.ids = at.take(4 * int64_t{shape.topk}, 4);
  record.weights = at.take(4 * int64_t{shape.topk}, 4);
  record.indexes = at.take(shape.expertLayout() ? 4 * int64_t{shape.topk} : 0, 4);
  record.end = at.end(16);
  record.stride = at.end(kRecordAlign);
  return record;
}

// Quantized tokens come in whole blocks, and the scales of each of them, as floats, in words of three.
int64_t payloadUnits(const Shape& shape, int payload) {
  int64_t blocks = ceilDiv(shape.groups(), kBlockGroups);
  if (shape.makesScales(payload)) return blocks * kBlockGroups / 3;
  if (shape.quantizes() && payload == 0) return blocks * kUnitsPerBlock;
  return rowUnits(shape.payloadBytes[payload]);
}

SlotLayout makeSlot(const Shape& shape) {
  SlotLayout slot{};
  Offsets at;
  int64_t head = at.take((1 + int64_t{shape.topk}) * kTaggedWord);
  for (int payload = 0; payload < shape.payloads; ++payload) {
    slot.units[payload] = payloadUnits(shape, payload);
    slot.slices[payload] = ceilDiv(slot.units[payload], kUnitsPerBlock);
    int64_t bytes = slot.slices[payload] * kUnitsPerBlock * kTaggedWord;
    if (!shape.makesScales(payload)) {
      bytes = shape.signals() ? wholeVectors(shape.payloadBytes[payload]) : bytes * kUnitWords;
    }
    slot.payload[payload] = at.take(bytes, kRecordAlign);
    slot.allSlices += slot.slices[payload];
    if (payload == 0) head = slot.payload[0];
  }
  slot.copies = shape.expertSlots() ? shape.topk : 1;
  slot.copyStride = at.end(kRecordAlign) - head;
  slot.stride = head + slot.copies * slot.copyStride;
  slot.bySlices = Divisor(slot.allSlices);
  slot.bySlicesAndNotes = Divisor(slot.allSlices + 1);
  // The largest share, so that all ranks are told in as many words.
  slot.byCountWords = Divisor(1 + (shape.expertLayout() ? ceilDiv(shape.experts.count(0), 3) : 0));
  return slot;
}

WindowLayout makeWindow(const Shape& shape, const RecordLayout& record, const SlotLayout& slot) {
  WindowLayout window{};
  int64_t ranks = shape.nranks;
  // The largest share, so that every rank's window has the same offsets.
  int64_t mostLocal = shape.experts.count(0);
  window.chunkStride = roundUp(8 * shape.chunks, kSignalStride);
  {
    Offsets block;
    block.take(sizeof(CountBlock));
    window.chunkRanges = block.take(static_cast<int64_t>(sizeof(ChunkRange)) * shape.chunks, 8);
    window.expertCounts = block.take(shape.expertLayout() ? 4 * mostLocal : 0, 8);
    window.countStride = block.end();
  }
  {
    Offsets at;
    // The low-latency path puts rows here itself, for views.
    bool records = shape.path != moePathLowLatency || !shape.expertLayout();
    window.records = at.take(records ? ranks * shape.maxTokens * record.stride : 0);
    window.counts = at.take(ranks * window.countStride);
    window.countSignals = at.take(ranks * kSignalStride);
    window.chunkSignals = at.take(ranks * window.chunkStride);
    if (shape.path == moePathLowLatency) {
      window.slotSignals = at.take(shape.signals() ? 8 * ranks * shape.maxTokens : 0);
      window.slots = at.take(ranks * shape.maxTokens * slot.stride);
      window.taggedCountStride = roundUp(slot.byCountWords.value() * kTaggedWord, kRecordAlign);
      window.taggedCounts = at.take(ranks * window.taggedCountStride);
    }
    window.dispatchBytes = at.end();
  }
  {
    Offsets at;
    window.rowStride = roundUp(shape.combineRowBytes, kRecordAlign);
    bool lowLatency = shape.path == moePathLowLatency;
    window.rows = at.take(lowLatency ? 0 : shape.maxTokens * shape.distinct * window.rowStride);
    window.heads = at.take(ranks * kSignalStride);
    window.headSignals = at.take(ranks * kSignalStride);
    window.combineSignals = at.take(ranks * window.chunkStride);
    if (shape.path == moePathLowLatency) {
      window.rowSignals = at.take(shape.signals() ? 8 * shape.maxTokens * shape.distinct : 0);
      window.taggedRowStride =
          shape.signals() ? roundUp(shape.combineRowBytes, kRecordAlign) : taggedBytes(shape.combineRowBytes);
      window.byRowSlices = Divisor(ceilDiv(rowUnits(shape.combineRowBytes), kUnitsPerBlock));
      window.taggedRows = at.take(shape.maxTokens * shape.distinct * window.taggedRowStride);
      window.taggedHeads = at.take(ranks * kSignalStride);
    }
    window.combineBytes = at.end();
  }
  Offsets at;
  window.consumedDispatch = at.take(ranks * kSignalStride);
  window.consumedCombine = at.take(ranks * kSignalStride);
  window.dispatchBuffers = at.take(shape.buffers * window.dispatchBytes);
  window.combineBuffers = at.take(shape.buffers * window.combineBytes);
  window.bytes = at.end(4096);
  return window;
}

HandleLayout makeHandle(const Shape& shape) {
  HandleLayout handle{};
  int64_t ranks = shape.nranks;
  int64_t arriving = ranks * shape.maxTokens;
  int64_t perEntry = shape.expertLayout() ? 4 * int64_t{shape.topk} : 0;
  Offsets at;
  handle.head = at.take(sizeof(HandleHead));
  handle.ids = at.take(4 * shape.maxTokens * shape.topk);
  handle.weights = at.take(4 * shape.maxTokens * shape.topk);
  handle.ranks = at.take(static_cast<int64_t>(sizeof(TokenRanks)) * shape.maxTokens);
  handle.goals = at.take(shape.path == moePathLowLatency ? 4 * shape.maxTokens * shape.distinct : 0);
  handle.sourceRows = at.take(8 * ranks);
  handle.sourceChunks = at.take(4 * ranks);
  handle.sourceFirst = at.take(8 * ranks);
  handle.chunkRanges = at.take(static_cast<int64_t>(sizeof(ChunkRange)) * ranks * shape.chunks);
  handle.tokens = at.take(4 * arriving);
  handle.ordinals = at.take(4 * arriving);
  handle.rows = at.take(perEntry * arriving);
  handle.rowWeights = at.take(perEntry * arriving);
  handle.bytes = at.end();
  return handle;
}

WorkspaceLayout makeWorkspace(const Shape& shape, const RecordLayout& record, int blocks) {
  WorkspaceLayout work{};
  int64_t ranks = shape.nranks;
  int64_t local = shape.localExperts();
  bool expert = shape.expertLayout();
  Offsets at;
  work.control = at.take(sizeof(Control));
  work.histograms = at.take(4 * blocks * shape.bins());
  work.spanCounted = at.take(int64_t{8} * blocks);
  work.spanRouted = at.take(int64_t{8} * blocks);
  work.sentTokens = at.take(8 * shape.chunks);
  work.sentPartials = at.take(8 * ranks * shape.chunks);
  work.sentRows = at.take(8 * ranks);
  work.zeroRow = at.take(shape.combineRowBytes);
  work.recordBases = at.take(8 * blocks * ranks);
  work.owners = at.take(4 * shape.maxTokens * shape.topk);
  work.flags = at.take(shape.maxTokens * shape.topk);
  work.bins = at.take(4 * blocks * kMaxParts * shape.bins());
  work.targets = at.take(8 * shape.maxTokens * shape.topk);
  work.indexes = at.take(expert ? 4 * shape.maxTokens * shape.topk : 0);
  {
    Offsets place;
    work.bases = place.take(8 * (expert ? ranks * local : ranks), 16);
    work.offsets = place.take(expert ? 8 * (local + 1) : 0, 16);
    work.sources = place.take(static_cast<int64_t>(sizeof(SourceInfo)) * ranks, 16);
    bool counts = expert && shape.path == moePathLowLatency;
    work.counts = place.take(counts ? 4 * ranks * local : 0, 16);
    work.placeStride = place.end();
  }
  work.places = at.take(blocks * work.placeStride);
  if (shape.path == moePathLowLatency) {
    work.skipped = at.take(int64_t{4} * blocks);
    work.heads = at.take(blocks * kMaxBlockWarps * headBytes(record, shape));
  }
  work.bytes = at.end();
  return work;
}

}  // namespace

int64_t inputBytes(const Shape& shape) {
  return shape.quantizes() ? shape.hidden * dataTypeBytes(moeBfloat16) : shape.payloadBytes[0];
}

int64_t scaleColumnBytes(int64_t rows) { return roundUp(kScaleWord * rows, 16); }

int64_t scaleBytes(const Shape& shape) {
  if (!shape.quantizes()) return 0;
  if (shape.scaleOrder == moeScalesByRow) return shape.rowCapacity * shape.payloadBytes[Shape::kScales];
  bool padded = shape.layout == moeLayoutExpertPadded;
  int64_t matrices = padded ? shape.localExperts() : 1;
  return matrices * shape.scaleWords() * scaleColumnBytes(padded ? shape.capacity : shape.rowCapacity);
}

int64_t recordBytes(const Layout& layout) {
  if (layout.shape.path != moePathLowLatency) return layout.record.stride;
  return layout.slot.stride - (layout.slot.copies - 1) * layout.slot.copyStride;
}

int64_t partialBytes(const Layout& layout) {
  return layout.shape.path == moePathLowLatency ? layout.window.taggedRowStride : layout.window.rowStride;
}

int64_t dataTypeBytes(int32_t type) {
  switch (type) {
    case moeFloat32: return 4;
    case moeFloat8e4m3: return 1;
    default: return 2;
  }
}

Layout makeLayout(const moeConfig_t& config, int nranks, int rank, int blocks) {
  Layout layout{};
  layout.shape = makeShape(config, nranks, rank);
  layout.record = makeRecord(layout.shape);
  layout.slot = makeSlot(layout.shape);
  layout.slot.headBytes = headBytes(layout.record, layout.shape);
  layout.window = makeWindow(layout.shape, layout.record, layout.slot);
  layout.handle = makeHandle(layout.shape);
  layout.workspace = makeWorkspace(layout.shape, layout.record, blocks);
  return layout;
}

}  // namespace moe

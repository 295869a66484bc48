// SPDX-License-Identifier: Apache-2.0
// Every offset in a window, a workspace and a handle, computed once at init and used by host and device alike.
//
// Three kinds of memory belong to a rank:
//   window     registered; peers write into it. Each segment has exactly one writer.
//   workspace  private to the rank's own operations.
//   handle     private, one per moeHandle_t, owned by the caller: the routing of one dispatch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/divisor.h"
#include "base/host_device.h"
#include "moe.h"

namespace moe {

// Tokens whose completion is signalled together. Small enough that a receiver starts early, large enough that signals
// do not matter.
constexpr int64_t kChunkTokens = 32;
// Contiguous rows that one warp handles as a unit; a divisor of kChunkTokens.
constexpr int64_t kRunRows = 4;
// Rows may be cut into so many slices at most; where slices are counted, a row counts for as many.
constexpr int32_t kRowParts = 4;
// Signals of different writers stay on lines of their own.
constexpr int64_t kSignalStride = 64;
// Record strides are a multiple of this: NVLink loses 7 % otherwise.
constexpr int64_t kRecordAlign = 128;
// Tokens, the scales that dispatch makes of them, side rows.
constexpr int kMaxPayloads = 2 + MOE_MAX_SIDE_ROWS;
// Tagged words: 12 bytes of data and a tag. Rows travel in units of 48 bytes, which take four of them; see tagged.h.
constexpr int64_t kTaggedWord = 16, kUnitBytes = 48, kUnitsPerBlock = 32;
constexpr int kUnitWords = 4;
// Quantized groups, and how many of them fill a block of units.
constexpr int64_t kGroup = MOE_QUANTIZE_GROUP, kBlockGroups = kUnitsPerBlock * kUnitBytes / kGroup;
constexpr int64_t kScaleWord = 4;

MOE_HD constexpr int64_t roundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }
MOE_HD constexpr int64_t ceilDiv(int64_t value, int64_t by) { return (value + by - 1) / by; }
MOE_HD constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
MOE_HD constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Contiguous shares of the experts: the first `extra` ranks own one more than the others.
struct ExpertMap {
  int32_t experts = 0;
  int32_t share = 0;  // of a rank without an extra one
  int32_t extra = 0;  // ranks that own share + 1
  Divisor byShare, byLarger;

  ExpertMap() = default;
  MOE_HD ExpertMap(int32_t all, int32_t nranks)
      : experts(all), share(all / nranks), extra(all % nranks), byShare(share > 0 ? share : 1), byLarger(share + 1) {}

  MOE_HD bool valid(int64_t expert) const { return expert >= 0 && expert < experts; }
  // The owner of a valid expert.
  MOE_HD int32_t owner(int32_t expert) const {
    int32_t inLarger = extra * (share + 1);
    bool larger = expert < inLarger;
    const Divisor& by = larger ? byLarger : byShare;
    auto rank = static_cast<int32_t>(by.divide(static_cast<uint32_t>(larger ? expert : expert - inLarger)));
    return larger ? rank : extra + rank;
  }
  MOE_HD int32_t first(int32_t rank) const { return rank * share + (rank < extra ? rank : extra); }
  MOE_HD int32_t count(int32_t rank) const { return share + (rank < extra ? 1 : 0); }
};

// What the config fixes.
struct Shape {
  int32_t nranks, rank;
  int32_t topk;      // maxTopk
  int32_t distinct;  // most ranks that one token can go to
  int32_t layout;    // moeLayout_t
  int32_t path;      // moePath_t
  int32_t buffers;
  int32_t payloads;  // tokens, scales and side rows
  int32_t combineType;
  int64_t maxTokens, hidden;
  int64_t chunks;                      // most chunks of one dispatch
  int64_t payloadBytes[kMaxPayloads];  // bytes of one row of each payload on the wire, tokens first
  int32_t quantize;                    // moeQuantize_t; if any, scales are payload kScales
  int32_t scaleOrder;                  // moeScaleOrder_t
  int32_t slots, format;               // low latency: moeSlots_t, moeFormat_t
  int64_t combineRowBytes;             // hidden in the combine type
  int64_t expertAlign, capacity;       // capacity: rows per expert in moeLayoutExpertPadded
  int64_t rowCapacity;                 // output rows in the worst case
  ExpertMap experts;
  Divisor byRanks, byTopk, byBuffers;
  Divisor byColumnRows;  // rows in a column of scales: one expert's, or more than there are

  static constexpr int kScales = 1;

  MOE_HD bool quantizes() const { return quantize != moeQuantizeNone; }
  MOE_HD bool makesScales(int payload) const { return quantizes() && payload == kScales; }
  // The payload that the caller's input number `input` is: it has none for scales that dispatch makes.
  MOE_HD int payloadOfInput(int input) const { return quantizes() && input > 0 ? input + 1 : input; }
  // Groups of a quantized row, and words of their scales.
  MOE_HD int64_t groups() const { return (hidden + kGroup - 1) / kGroup; }
  MOE_HD int64_t scaleWords() const { return payloadBytes[kScales] / kScaleWord; }
  // Low latency: whether each of a token's experts gets a copy, and whether signals tell that rows have come.
  MOE_HD bool expertSlots() const { return slots == moeSlotsExpert; }
  MOE_HD bool signals() const { return format == moeFormatSignalled; }
  MOE_HD bool expertLayout() const { return layout != moeLayoutRank; }
  MOE_HD int32_t localExperts() const { return experts.count(rank); }
  // Bins that a dispatch counts: one per rank, and in expert layouts one per expert.
  MOE_HD int64_t bins() const { return nranks + (expertLayout() ? experts.experts : 0); }
};

// Parts into which a routing block divides its span at most; a part is the work of one warp.
constexpr int64_t kMaxParts = 16;
// Warps of a block at most.
constexpr int64_t kMaxBlockWarps = 64;

// What a routing block keeps while it routes `tokens` tokens: this rank's first record at each rank (byte*[nranks]),
// ids and owners (int32[tokens][topk]), the next slot or index of each bin (int32[kMaxParts][bins]), and flags
// (uint8[tokens][topk]).
MOE_HD inline int64_t routingBytes(const Shape& shape, int64_t tokens) {
  return 8 * int64_t{shape.nranks} + 9 * tokens * shape.topk + 4 * kMaxParts * shape.bins();
}

// A record: one token's data on the wire for one rank. The payload rows, each on a 16-byte boundary, then the head.
struct RecordHead {
  int32_t token;        // index at the source
  int32_t repeats;      // expert layouts: 1 if the token names an expert twice
  uint64_t rankFirsts;  // bit k: entry k is the token's first of its rank
};

struct RecordLayout {
  int64_t payload[kMaxPayloads];
  int64_t head;     // RecordHead
  int64_t ids;      // int32[topk], -1 for nobody
  int64_t weights;  // float[topk]
  int64_t indexes;  // expert layouts: int32[topk], the row's index among this source's rows for that expert; -1 for an
                    // entry that repeats an expert or is nobody's
  int64_t end;      // bytes in use, a multiple of 16
  int64_t stride;
};

// A row between its rank and another in the low-latency path where signals follow rows: whole vectors.
MOE_HD constexpr int64_t wholeVectors(int64_t rowBytes) { return roundUp(rowBytes, 16); }

// Units that carry something of a row, and bytes of its words.
MOE_HD constexpr int64_t rowUnits(int64_t rowBytes) {
  constexpr int64_t kBlockBytes = kUnitsPerBlock * kUnitBytes;
  return rowBytes / kBlockBytes * kUnitsPerBlock + smaller(kUnitsPerBlock, ceilDiv(rowBytes % kBlockBytes, 16));
}
MOE_HD constexpr int64_t taggedBytes(int64_t rowBytes) {
  return ceilDiv(rowUnits(rowBytes), kUnitsPerBlock) * kUnitsPerBlock * kUnitWords * kTaggedWord;
}

// What a warp of the low-latency path keeps of a record: the head with its arrays, and the output row of each entry.
MOE_HD inline int64_t headBytes(const RecordLayout& record, const Shape& shape) {
  return roundUp(record.end - record.head + 4 * int64_t{shape.topk}, 16);
}

// The same in the low-latency path. Tagged words: one with the record's slot at its rank, -1 if it does not go there,
// and rankFirsts; one for each of topk entries with id, index and weight. Then a copy of the payloads for the rank, or
// for each entry: units in tagged words, or rows that a signal follows.
struct SlotLayout {
  int64_t payload[kMaxPayloads];  // bytes from the slot's start to the first copy
  int32_t copies;                 // 1, or topk
  int64_t copyStride;             // bytes from one to the next
  int64_t units[kMaxPayloads];    // of each payload; of scales: tagged words
  int64_t slices[kMaxPayloads];   // blocks of units of each payload
  int64_t allSlices;
  Divisor bySlices, bySlicesAndNotes;  // allSlices, and one more
  Divisor byCountWords;                // words in which a source tells a rank its counts
  int64_t stride;                      // bytes
  int64_t headBytes;                   // see headBytes()
};

// The counts of one source, in the receiver's window. The chunk ranges and the expert counts follow.
struct CountBlock {
  int64_t tokens;   // the source dispatches
  int64_t rows;     // of them come here
  int32_t chunks;   // at least 1
  int32_t refusal;  // moeResult_t of a refused call, else 0
  int32_t span;     // chunks that one block of the source sends, one after the other
  int32_t reserved;
};

// What a receiving block keeps of a source's CountBlock.
struct SourceInfo {
  int32_t tokens, rows, chunks, span, refusal;
};

// The records that a chunk brings: slots begin .. end-1 of its source. Known once the chunk's signal is.
struct ChunkRange {
  int32_t begin, end;
};

// Where a dispatched token went.
struct TokenRanks {
  int32_t ownSlot;     // slot of its record at this rank itself, or -1
  int16_t count;       // ranks it went to
  int16_t ownOrdinal;  // which of them this rank is
};

// What a combine's sender says first to each source.
struct CombineHead {
  int64_t dispatchEpoch;  // of the handle it combines
  int32_t chunks;         // that it will signal
  int32_t refusal;
};

struct WindowLayout {
  // Within one buffer of dispatch:
  int64_t records;       // [nranks][maxTokens] records
  int64_t counts;        // [nranks] CountBlock with its arrays
  int64_t countStride;   // bytes from one source's block to the next
  int64_t chunkRanges;   // ChunkRange[chunks] within a count block
  int64_t expertCounts;  // int32[local experts] within a count block
  int64_t countSignals;  // [nranks] epoch, kSignalStride apart
  int64_t chunkSignals;  // [nranks][chunks] epoch
  int64_t chunkStride;   // bytes from one rank's chunk signals to the next's, dispatch and combine
  // Low latency:
  int64_t slotSignals;        // [nranks][maxTokens] epoch: a token's payloads have come; if signals tell so
  int64_t slots;              // [nranks][maxTokens] see SlotLayout
  int64_t taggedCounts;       // [nranks] words: tokens, records and refusal; then the rows of three experts each
  int64_t taggedCountStride;  // bytes from one source's to the next's
  int64_t dispatchBytes;      // of one buffer
  // Within one buffer of combine:
  int64_t rows;            // [maxTokens][distinct] partial rows
  int64_t rowStride;       // bytes of one partial row
  int64_t heads;           // [nranks] CombineHead, kSignalStride apart
  int64_t headSignals;     // [nranks] epoch
  int64_t combineSignals;  // [nranks][chunks] epoch
  // Low latency:
  int64_t rowSignals;       // [maxTokens][distinct] epoch: a partial row has come; if signals tell so
  int64_t taggedRows;       // [maxTokens][distinct] partial rows, in units or with signals
  int64_t taggedRowStride;  // bytes of one partial row
  Divisor byRowSlices;      // slices of one partial row
  int64_t taggedHeads;      // [nranks] words, kSignalStride apart: the low half of dispatchEpoch, and refusal
  int64_t combineBytes;
  // In the window:
  int64_t consumedDispatch;  // [nranks] epoch up to which that rank has read what this rank sent
  int64_t consumedCombine;   // [nranks]
  int64_t dispatchBuffers;   // [buffers]
  int64_t combineBuffers;    // [buffers]
  int64_t bytes;
};

// Counters of one rank's operations, at the start of its workspace. Written by the last block of an operation.
struct Control {
  uint64_t dispatchEpoch;     // dispatches sent
  uint64_t combineEpoch;      // combines completed
  uint64_t releasedDispatch;  // dispatches up to this one have been read; the next operation tells the peers
  uint64_t readDispatch[8];   // per buffer: the last epoch that was read completely
  uint32_t finishedBlocks;
  uint32_t ticket;
  uint32_t sentClaims, receivedClaims;  // runs of rows to send, and of rows that come, that warps have claimed
  uint64_t started, startedBefore;      // low latency: see RollCall
  // Totals for moeGetStats.
  uint64_t tokens, selfRows, mappedRows, selfCombineRows, mappedCombineRows;
};

// Words that an Exec loads together: those of Control that an operation begins with.
constexpr int kSharedWords = 16;

struct WorkspaceLayout {
  int64_t control;       // Control
  int64_t histograms;    // int32[blocks][bins] entries of each routing block's span
  int64_t spanCounted;   // uint64[blocks] epoch for which the histogram is complete
  int64_t spanRouted;    // uint64[blocks] epoch for which every record of the span has its slot
  int64_t sentTokens;    // uint64[chunks] tokens whose records are stored; zero between operations, as the next
  int64_t sentPartials;  // uint64[nranks][chunks] partial rows that are stored
  int64_t sentRows;      // int64[nranks] records of the last dispatch
  int64_t zeroRow;       // combineRowBytes, never written
  // What routing keeps where an Exec has no faster memory for it:
  int64_t recordBases;  // byte*[blocks][nranks]
  int64_t owners;       // int32[maxTokens][topk]
  int64_t flags;        // uint8[maxTokens][topk]
  int64_t bins;         // int32[blocks][kMaxParts][bins]
  int64_t targets;      // byte*[maxTokens][topk] the record of each entry that is the first of its rank in its token,
                        // else null
  int64_t indexes;      // expert layouts: int32[maxTokens][topk], see RecordLayout
  int64_t places;       // [blocks] what a receiving block knows, where an Exec has no faster memory for it. Within one:
  int64_t placeStride;
  int64_t bases;    // rank layout: int64[nranks] first rows; expert layouts: int64[nranks][local experts]
  int64_t offsets;  // expert layouts: int64[local experts + 1]
  int64_t sources;  // SourceInfo[nranks]
  int64_t counts;   // low latency: int32[nranks][local experts]
  // Low latency:
  int64_t skipped;  // uint32[blocks] 1: the block has left its share of what arrives to the last one
  int64_t heads;    // [blocks][kMaxBlockWarps] heads of records, where an Exec has no faster memory for them
  int64_t bytes;
};

struct HandleHead {
  uint64_t dispatchEpoch;
  int64_t numTokens;
  int64_t refusal;    // moeResult_t with which the dispatch was refused by a rank, else 0
  int64_t refusedBy;  // that rank
  int64_t views;      // 1: the rows are still in the window
  int64_t capacity;   // rows of the output (expert-padded: per expert)
  moeSizes_t sizes;
};

struct HandleLayout {
  int64_t head;
  // What this rank sent.
  int64_t ids;      // int32[maxTokens][topk]
  int64_t weights;  // float[maxTokens][topk]
  int64_t ranks;    // TokenRanks[maxTokens]
  int64_t goals;    // low latency: int32[maxTokens][distinct] the ranks of each token, in the order of its ids
  // What this rank received.
  int64_t sourceRows;    // int64[nranks]
  int64_t sourceChunks;  // int32[nranks]
  int64_t sourceFirst;   // int64[nranks] rank layout: first row of each source
  int64_t chunkRanges;   // ChunkRange[nranks][chunks]
  int64_t tokens;        // int32[nranks][maxTokens] source token of each record
  int64_t ordinals;      // int32[nranks][maxTokens]
  int64_t rows;          // expert layouts: int32[nranks][maxTokens][topk] output row, -1: not here or left out
  int64_t rowWeights;    // expert layouts: float[nranks][maxTokens][topk]
  int64_t bytes;
};

struct Layout {
  Shape shape;
  RecordLayout record;
  SlotLayout slot;
  WindowLayout window;
  WorkspaceLayout workspace;
  HandleLayout handle;
};

// Bytes of a row of tokens as the caller has it.
int64_t inputBytes(const Shape& shape);
// Bytes from one column of scales to the next, for outputs of `rows` rows.
int64_t scaleColumnBytes(int64_t rows);
// Bytes of an output of scales without a stride, for rowCapacity rows; 0 if dispatch makes none.
int64_t scaleBytes(const Shape& shape);

// Bytes that one record, and one partial row, take in a window.
int64_t recordBytes(const Layout& layout);
int64_t partialBytes(const Layout& layout);

int64_t dataTypeBytes(int32_t type);

// `config` must have passed checkConfig. `blocks`: most blocks that one operation runs.
Layout makeLayout(const moeConfig_t& config, int nranks, int rank, int blocks);

}  // namespace moe

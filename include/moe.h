/* SPDX-License-Identifier: Apache-2.0
 *
 * moe.h - the C interface of moecl, the MoE Collective Library.
 *
 * A mixture-of-experts layer sends each token to the few experts that its gate chose (dispatch), runs them, and brings
 * the weighted results back to the token's rank (combine). moecl moves those rows between ranks.
 *
 * Conventions, which hold for every symbol here unless its comment says otherwise:
 *
 *  1. Result codes. Every function that can fail returns moeResult_t. Outputs are written only on moeSuccess.
 *     moeGetLastError() gives the text of this thread's last failure: argument, rank, value, rule and what to do.
 *     Nothing here throws, exits, aborts the process or prints.
 *  2. Structs. A struct that starts with `size` must be set by its initializer (MOE_CONFIG_INIT, ...), which also
 *     versions it: newer fields are appended. A caller built against a newer header works as long as the fields that
 *     the library does not know are zero.
 *  3. Sizes and counts are 64-bit. Strides are in bytes. Ranks are 0 .. nranks-1, experts 0 .. numExperts-1.
 *  4. Memory. "Device memory" is memory of the communicator's backend: ordinary memory for the host backend, memory of
 *     the rank's GPU for the CUDA backend. Pointers to device memory may have any alignment that their element type
 *     allows; rows aligned to 16 bytes travel faster. Outputs may not overlap each other or any input.
 *  5. Ownership. Buffers passed to a call belong to the operation until it completes in stream order. No call after
 *     moeCommInit* and moeHandleInit allocates memory.
 *  6. Collectives. moeDispatch and moeCombine must be called by all ranks of a communicator in the same order. A rank
 *     without tokens takes part with numTokens = 0, and its pointers may then be NULL.
 *  7. Threads. One thread at a time may use a communicator and its handles; moeCommAbort and moeCommGetAsyncError may
 *     be called from any thread at any time. Different communicators are independent.
 *  8. Waits. No call waits longer than moeConfig_t.timeoutMs for another rank. A failed wait, a lost rank or an abort
 *     breaks the communicator: later calls fail at once, and moeCommDestroy is all that is left to do. A refused call
 *     (bad argument, too many tokens) breaks nothing: it fails on every rank, and the next call works.
 *  9. Streams. `stream` is a cudaStream_t passed as void* (NULL: CUDA's legacy stream). The host backend ignores it and
 *     completes before it returns.
 * 10. Expert ids. -1, or any value outside 0 .. numExperts-1, means "nobody" and sends nothing; its weight is never
 *     read. The same expert named twice by one token is one row whose weight is the sum.
 */
#ifndef MOE_H_
#define MOE_H_

#include <stddef.h>
#include <stdint.h>

#define MOE_VERSION_MAJOR 0
#define MOE_VERSION_MINOR 1
#define MOE_VERSION_PATCH 0
/* As returned by moeGetVersion(): major * 10000 + minor * 100 + patch. */
#define MOE_VERSION (MOE_VERSION_MAJOR * 10000 + MOE_VERSION_MINOR * 100 + MOE_VERSION_PATCH)

#if defined(__GNUC__)
#define MOE_API __attribute__((visibility("default")))
#else
#define MOE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- results */

typedef enum moeResult {
  moeSuccess = 0,
  moeInvalidArgument = 1, /* an argument breaks a rule; the text names it */
  moeInvalidUsage = 2,    /* a call that is not legal now: destroyed communicator, unfinished group, ... */
  moeMismatch = 3,        /* ranks disagree: configs at init, handles in combine */
  moeSystemError = 4,     /* the operating system refused something; the text has errno */
  moeOutOfMemory = 5,
  moeUnsupported = 6,      /* legal, but not by this build or on this machine */
  moeInternalError = 7,    /* a fault of moecl */
  moeTimeout = 8,          /* a rank did not do its part in time; the text says which, and what was awaited */
  moeAborted = 9,          /* moeCommAbort was called here */
  moeRankLost = 10,        /* a rank died, aborted or left; see moeCommGetDead */
  moePeerRefused = 11,     /* another rank refused its part of this call; the text names it */
  moeTooManyInFlight = 12, /* more unfinished send halves than moeConfig_t.buffers */
  moeOverflow = 13,        /* more rows arrived than the output holds, and overflowIsError was set */
  moeInProgress = 14,      /* a non-blocking init has not finished */
  moeDeviceError = 15,     /* the CUDA driver or runtime reported an error */
  moeNumResults = 16
} moeResult_t;

/* A short constant name for a result code, such as "rank lost". Never NULL. */
MOE_API const char* moeGetErrorString(moeResult_t result);
/* The text of the last failure in this thread; "" if there was none. Valid until the thread's next moecl call. */
MOE_API const char* moeGetLastError(void);
/* The version of the library that is loaded, encoded as MOE_VERSION. */
MOE_API moeResult_t moeGetVersion(int* version);

/* ---------------------------------------------------------------- enumerations */

typedef enum moeDataType {
  moeBfloat16 = 0,
  moeFloat16 = 1,
  moeFloat32 = 2,
  moeFloat8e4m3 = 3, /* dispatch only; scales travel as a side row; combine in another type */
  moeNumDataTypes = 4
} moeDataType_t;

typedef enum moeIdType { moeInt32 = 0, moeInt64 = 1, moeNumIdTypes = 2 } moeIdType_t;

/* The order in which a rank gets the rows that were sent to it. Rows of every layout come in a fixed order: by source
 * rank, then by token index. */
typedef enum moeLayout {
  moeLayoutRank = 0,         /* one row per (token, rank), by source rank; ids and weights beside it */
  moeLayoutExpert = 1,       /* one row per (token, expert), contiguous per expert; each expert's start is a multiple of
                                expertAlign */
  moeLayoutExpertPadded = 2, /* [local experts, capacity] rows; expert e's rows start at e * capacity */
  moeNumLayouts = 3
} moeLayout_t;

/* How rows travel. */
typedef enum moePath {
  moePathAuto = 0,       /* the library chooses */
  moePathDirect = 1,     /* rows, and signals that tell of them: for batches of any size */
  moePathLowLatency = 2, /* every token has a slot of its own at each rank, so that it leaves before anything is
                            counted: for decoding, a few hundred tokens per rank */
  moeNumPaths = 3
} moePath_t;

/* moePathLowLatency: how many copies of a token are sent to a rank that owns several of its experts. */
typedef enum moeSlots {
  moeSlotsAuto = 0,   /* the library chooses */
  moeSlotsRank = 1,   /* one, which the rank puts in all rows that it belongs in */
  moeSlotsExpert = 2, /* one for each expert; not in moeLayoutRank */
  moeNumSlots = 3
} moeSlots_t;

/* moePathLowLatency: how a rank knows that a row has come. */
typedef enum moeFormat {
  moeFormatAuto = 0,      /* the library chooses */
  moeFormatTagged = 1,    /* every word of 16 bytes says so itself: the soonest, with a third more bytes on the wire */
  moeFormatSignalled = 2, /* a signal follows: the fewest bytes */
  moeNumFormats = 3
} moeFormat_t;

typedef enum moeBackend { moeBackendAuto = 0, moeBackendHost = 1, moeBackendCuda = 2, moeNumBackends = 3 } moeBackend_t;

/* What dispatch makes of the tokens that it is given. With anything but moeQuantizeNone the caller passes rows of bf16
 * and rows of e4m3 arrive, with a scale for each group of MOE_QUANTIZE_GROUP elements, the last of which may be short.
 *
 * A group's scale is the largest magnitude in it divided by 448, in fp32, and at least 2^-126; moeQuantizeUe8m0 rounds
 * it up to a power of two. An element becomes the e4m3 value nearest to itself times the reciprocal of the scale, ties
 * to even, at most 448 in magnitude. So an element that arrives differs from the one that was sent by no more than the
 * larger of 1/16 of its magnitude and scale / 1024, but for a few roundings of fp32. A group that holds a NaN or an
 * infinity arrives as NaN throughout, its scale too. The same inputs give the same bits on every path and backend. */
typedef enum moeQuantize {
  moeQuantizeNone = 0,
  moeQuantizeFloat32 = 1, /* a scale is a float */
  moeQuantizeUe8m0 = 2,   /* a scale is a byte b for 2^(b - 127), 255 for NaN; four of them, the first lowest, make a
                             32-bit word, and bytes past the last group are 0 */
  moeNumQuantizes = 3
} moeQuantize_t;
#define MOE_QUANTIZE_GROUP 128

/* How the scales that dispatch makes lie in memory. They come in 32-bit words: a float, or four exponents. */
typedef enum moeScaleOrder {
  moeScalesByRow = 0,    /* [rows][words] */
  moeScalesByColumn = 1, /* [words][rows], each column on a multiple of 16 bytes, as TMA wants it; for
                            moeLayoutExpertPadded [local experts][words][capacity] */
  moeNumScaleOrders = 2
} moeScaleOrder_t;

/* What a payload is. There is exactly one moeRoleTokens per dispatch; the others are carried beside it unchanged. */
typedef enum moeRole { moeRoleTokens = 0, moeRoleScales = 1, moeRoleOpaque = 2, moeNumRoles = 3 } moeRole_t;

/* ---------------------------------------------------------------- settings and logging */

/* Receives one line of log text without a newline. May be called from threads of the library. */
typedef void (*moeLogFunction_t)(void* context, int level, const char* line);
/* Sends log lines to `function` in place of stderr or MOE_DEBUG_FILE; NULL restores those. Levels as in MOE_DEBUG:
 * 1 warn, 2 info, 3 trace. Thread-safe. */
MOE_API moeResult_t moeSetLogFunction(moeLogFunction_t function, void* context);
/* Writes the table of all MOE_* settings with value, origin and meaning as text, one a line, NUL-terminated and cut to
 * `capacity` bytes. `needed` (may be NULL) gets the bytes for the whole text with its NUL. Settings are read once per
 * process, at the first moecl call. */
MOE_API moeResult_t moeGetSettings(char* text, size_t capacity, size_t* needed);

/* ---------------------------------------------------------------- communicators */

typedef struct moeComm* moeComm_t;
typedef struct moeHandle* moeHandle_t;

/* Where and with what secret the ranks of one communicator meet. Copy it to all ranks as plain bytes, by a private
 * channel: who has it can join. */
typedef struct moeUniqueId {
  char internal[128];
} moeUniqueId_t;

#define MOE_MAX_TOPK 64
#define MOE_MAX_SIDE_ROWS 4

/* What a communicator is made for. Must be equal on all ranks, except for the fields marked (local). A 0 in a field
 * with a default means that default. */
typedef struct moeConfig {
  size_t size;              /* sizeof(moeConfig_t), set by the initializer */
  int64_t maxTokensPerRank; /* bound on numTokens of any rank and call; at least 1; required */
  int64_t hidden;           /* elements in a token's row; at least 1; required */
  int64_t numExperts;       /* experts of all ranks together; required. Need not divide by nranks: the first
                               numExperts % nranks ranks own one more; ranks may own none */
  int32_t maxTopk;          /* bound on topk of any call, 1 .. MOE_MAX_TOPK; required */
  int32_t dtype;            /* moeDataType_t of tokens in dispatch; default moeBfloat16 */
  int32_t combineDtype;     /* moeDataType_t of rows and result in combine; default moeBfloat16; not fp8 */
  int32_t layout;           /* moeLayout_t; default moeLayoutRank */
  int64_t expertAlign;      /* moeLayoutExpert: rows to which each expert's start is rounded up; default 1 */
  int64_t capacity;         /* moeLayoutExpertPadded: rows per expert; default nranks * maxTokensPerRank */
  int32_t numSideRows;      /* payloads beside the tokens, 0 .. MOE_MAX_SIDE_ROWS */
  int32_t buffers;          /* dispatches that may be under way at once, 2 .. 8; default 2 */
  /* Bytes of one row of each side payload. */
  int64_t sideRowBytes[MOE_MAX_SIDE_ROWS];
  int32_t path;            /* moePath_t; default moePathAuto: low latency for at most 512 tokens per rank, or with slots
                              or format, else direct, unless the setting MOE_PATH names one */
  int32_t backend;         /* moeBackend_t; default moeBackendAuto */
  int32_t numSms;          /* (local) CUDA: most SMs an operation may use; default chosen by the path */
  int32_t timeoutMs;       /* (local) longest wait for another rank; default 10000 */
  int32_t nonBlocking;     /* (local) 1: moeCommInit* return at once; poll moeCommGetAsyncError for moeInProgress */
  int32_t overflowIsError; /* (local) 1: a call with more rows than fit returns moeOverflow (see moeSizes_t) */
  int32_t localIds;        /* (local) 1: received ids count from 0 at this rank's first expert; 0: global ids */
  int32_t device;          /* (local) CUDA device; -1: the current one, in moeCommInitAll rank modulo the GPUs, in
                              moeCommInitNccl the NCCL communicator's */
  /* Since the struct's second size. */
  int32_t quantize;   /* moeQuantize_t; default moeQuantizeNone. Else dtype must be moeBfloat16, and every array of
                         received rows has an entry of role moeRoleScales after the tokens: see moeReceive_t */
  int32_t scaleOrder; /* moeScaleOrder_t; default moeScalesByRow */
  int32_t slots;      /* moeSlots_t; default moeSlotsAuto: rank slots, unless the setting MOE_SLOTS names others */
  int32_t format;     /* moeFormat_t; default moeFormatAuto: by size, unless the setting MOE_FORMAT names one */
} moeConfig_t;

#define MOE_CONFIG_INIT                                                                                              \
  {                                                                                                                  \
    sizeof(moeConfig_t), 0, 0, 0, 0, moeBfloat16, moeBfloat16, moeLayoutRank, 1, 0, 0, 0, {0, 0, 0, 0}, moePathAuto, \
        moeBackendAuto, 0, 0, 0, 0, 0, -1, moeQuantizeNone, moeScalesByRow, moeSlotsAuto, moeFormatAuto              \
  }

/* What a communicator is, or would be. Sizes in bytes unless named otherwise. */
typedef struct moeInfo {
  size_t size; /* sizeof(moeInfo_t) */
  int32_t rank;
  int32_t nranks;
  int32_t nodes;           /* groups of ranks that can map each other's windows */
  int32_t path;            /* the moePath_t chosen */
  int32_t backend;         /* the moeBackend_t chosen */
  int32_t localExperts;    /* experts this rank owns */
  int64_t firstExpert;     /* the lowest of them */
  int64_t rowCapacity;     /* rows of an output that holds the worst case in the configured layout; for
                              moeLayoutExpertPadded localExperts * capacity */
  int64_t recordBytes;     /* one token on the wire in dispatch: rows, routing, padding */
  int64_t combineBytes;    /* one row on the wire in combine */
  uint64_t windowBytes;    /* the registered window of this rank */
  uint64_t workspaceBytes; /* private device memory of this rank */
  uint64_t handleBytes;    /* device memory for one handle */
  char transport[32];      /* what carries rows to other ranks: "shm", "local" (one process), ... */
  /* Since the struct's second size. */
  int64_t scaleBytes; /* with moeConfig_t.quantize: an output of scales for rowCapacity rows, without a stride */
  int32_t slots;      /* moePathLowLatency: the moeSlots_t chosen, else 0 */
  int32_t format;     /* moePathLowLatency: the moeFormat_t chosen, else 0 */
} moeInfo_t;

#define MOE_INFO_INIT \
  { sizeof(moeInfo_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {0}, 0, 0, 0 }

/* Totals of one rank since init. "Bytes" are bytes written into windows, padding included. */
typedef struct moeStats {
  size_t size; /* sizeof(moeStats_t) */
  uint64_t dispatches;
  uint64_t combines;
  uint64_t tokens;       /* tokens this rank has dispatched */
  uint64_t selfRows;     /* dispatch rows to this rank itself */
  uint64_t mappedRows;   /* dispatch rows to other ranks through a mapping */
  uint64_t selfBytes;    /* dispatch and combine */
  uint64_t mappedBytes;  /* dispatch and combine */
  uint64_t combineRows;  /* partial rows this rank has sent back */
  double copiesPerToken; /* (selfRows + mappedRows) / tokens; 0 without tokens */
} moeStats_t;

#define MOE_STATS_INIT \
  { sizeof(moeStats_t), 0, 0, 0, 0, 0, 0, 0, 0, 0.0 }

/* Makes an id for a new communicator and starts to listen for its ranks in this process, which must live until all
 * ranks have joined. Ranks that do not come within the timeout of their init are reported by those that did. */
MOE_API moeResult_t moeGetUniqueId(moeUniqueId_t* id);

/* Joins a communicator of `nranks` ranks as `rank`. Collective: returns when all ranks have joined and agree on
 * `config`, or with the same verdict on all of them. */
MOE_API moeResult_t moeCommInit(moeComm_t* comm, int nranks, const moeUniqueId_t* id, int rank,
                                const moeConfig_t* config);

/* As moeCommInit with rank, size and meeting place from the launcher's environment: torchrun (RANK, WORLD_SIZE), Open
 * MPI's mpirun, or srun. Ranks on one host find each other by themselves; on several hosts set MOE_COMM_ID=host:port
 * (a port free on rank 0's host) and MOE_COMM_SECRET to one value for all ranks. */
MOE_API moeResult_t moeCommInitEnv(moeComm_t* comm, const moeConfig_t* config);

/* A caller's own all-gather, in place of sockets. */
typedef struct moeBootstrap {
  size_t size;   /* sizeof(moeBootstrap_t) */
  void* context; /* passed to allGather */
  /* Gathers `bytes` bytes at `send` of every rank into `receive` [nranks * bytes] in rank order. Returns 0 on success;
   * anything else fails the init. Called only during init, by the thread that runs it. */
  int (*allGather)(void* context, const void* send, void* receive, size_t bytes);
} moeBootstrap_t;

#define MOE_BOOTSTRAP_INIT \
  { sizeof(moeBootstrap_t), NULL, NULL }

/* As moeCommInit, meeting through the caller's all-gather. `bootstrap` is copied; its context must live until the init
 * has finished. */
MOE_API moeResult_t moeCommInitCallbacks(moeComm_t* comm, int nranks, int rank, const moeBootstrap_t* bootstrap,
                                         const moeConfig_t* config);

struct ncclComm;
/* As moeCommInit, with the ranks and GPUs of an NCCL communicator (an ncclComm_t of NCCL 2.20 or newer), and meeting
 * through its all-gather: needs no id, and no socket between hosts. config.device must be the NCCL communicator's, or
 * -1, which means that one.
 *
 * Like any collective of `nccl` it must come in the same order on all its ranks, and it waits for what was enqueued
 * there before. It uses a stream of its own. `nccl` must have finished its own init; it must live until this init has
 * finished, and may be destroyed then. After a failure, moeTimeout above all, an all-gather may still be under way in
 * `nccl`: end it with ncclCommAbort. A rank that fails before it can use `nccl` cannot tell the others, which then time
 * out.
 *
 * moecl neither links nor loads NCCL. It looks for NCCL's functions in what the process has loaded: as the program sees
 * it, then in libnccl.so.2. Where they are missing or too old, and in builds without CUDA, it returns moeUnsupported.
 */
MOE_API moeResult_t moeCommInitNccl(moeComm_t* comm, struct ncclComm* nccl, const moeConfig_t* config);

/* Makes all `nranks` ranks of a communicator in this process: comms[r] is rank r. `configs` is one config for all. */
MOE_API moeResult_t moeCommInitAll(moeComm_t* comms, int nranks, const moeConfig_t* config);

/* Between moeGroupStart and moeGroupEnd, moeCommInit*, moeDispatch, moeWait and moeCombine only note their arguments
 * and return moeSuccess; moeGroupEnd runs them, concurrently across communicators and in order within one, and returns
 * the first failure. So one thread can drive several ranks. Argument structs are copied, what they point to is not.
 * Groups nest; they are per thread. */
MOE_API moeResult_t moeGroupStart(void);
MOE_API moeResult_t moeGroupEnd(void);

/* The state of a communicator: moeSuccess, moeInProgress while a non-blocking init runs, or the failure that broke it,
 * whose text moeGetLastError then gives. On GPUs operations end after their call has returned, so this is also where a
 * refusal by a peer (moePeerRefused) or a mismatch of handles is reported, once. Thread-safe. */
MOE_API moeResult_t moeCommGetAsyncError(moeComm_t comm, moeResult_t* state);
/* Ends all waits of this rank with moeAborted, and those of its peers with moeRankLost. Frees nothing: call
 * moeCommDestroy afterwards. Thread-safe. */
MOE_API moeResult_t moeCommAbort(moeComm_t comm);
/* Waits until this rank's operations are complete and tells the peers that it leaves in good order. */
MOE_API moeResult_t moeCommFinalize(moeComm_t comm);
/* Frees the communicator, finalizing it first if that was not done. Not collective. The pointer is invalid afterwards;
 * a second destroy returns moeInvalidUsage. NULL is legal and does nothing. */
MOE_API moeResult_t moeCommDestroy(moeComm_t comm);

/* Sizes and choices of a live communicator. Set info->size with MOE_INFO_INIT. */
MOE_API moeResult_t moeGetInfo(moeComm_t comm, moeInfo_t* info);
/* What moeGetInfo would say for this config, before anything is allocated. Needs no communicator. With config.backend =
 * moeBackendCuda the GPU is asked, since workspaceBytes follows its number of multiprocessors. For moeBackendAuto, and
 * where no GPU can be used, the sizes are the host's, whose workspace is smaller: info->backend says which they are. */
MOE_API moeResult_t moePredictInfo(int nranks, int rank, const moeConfig_t* config, moeInfo_t* info);
MOE_API moeResult_t moeGetStats(moeComm_t comm, moeStats_t* stats);
/* The rank that owns a global expert id, and its index among that rank's experts. Either pointer may be NULL. */
MOE_API moeResult_t moeGetExpertOwner(moeComm_t comm, int64_t expert, int* rank, int* localIndex);
/* The ranks known to be lost: writes 1 into lost[r] for each such rank and 0 for the others, nranks entries. */
MOE_API moeResult_t moeCommGetDead(moeComm_t comm, int32_t* lost);

/* ---------------------------------------------------------------- handles */

/* A handle holds the routing of one dispatch: for its combine, for a repeated dispatch and for the backward pass. Its
 * state lies in device memory that the caller owns, of moeInfo_t.handleBytes bytes aligned to 256, which must stay
 * valid while operations of the handle are queued or run, which may be after moeHandleDestroy. A new dispatch with the
 * same handle overwrites it. */
MOE_API moeResult_t moeHandleBytes(moeComm_t comm, size_t* bytes);
MOE_API moeResult_t moeHandleInit(moeComm_t comm, void* memory, size_t bytes, moeHandle_t* handle);
/* NULL is legal and does nothing. Destroy a communicator's handles before the communicator. */
MOE_API moeResult_t moeHandleDestroy(moeHandle_t handle);

/* ---------------------------------------------------------------- CUDA graphs */

/* moeDispatch, its halves, moeWait and moeCombine may be captured from a stream, also as the first calls of a
 * communicator. They allocate nothing and wait for nothing on the host. Graphs of one communicator may differ in
 * anything that a call may differ in, such as numTokens. A replay counts as the calls that it holds: replays and other
 * calls of one communicator must not overlap, and every rank must make as many dispatches and combines as the others,
 * replayed or not.
 *
 * A refused call of a capture becomes part of nothing, and no peer hears of it. Once a call has been captured, this
 * rank's dispatches may not ask for views: views move from replay to replay. moeGetSizes and the making of a
 * communicator cannot be captured (moeInvalidUsage). moeGetStats and moeGetSizes wait for what the host has launched,
 * not for replays; moeCommFinalize and moeCommDestroy wait for those, too, and so for everything on the GPU. A handle's
 * memory must outlive the graphs that name it. */

/* ---------------------------------------------------------------- dispatch */

/* An array of rows in device memory. */
typedef struct moeRows {
  void* data;
  int64_t rowBytes;    /* must equal the config's: hidden * element size for tokens, sideRowBytes[i] for side row i, the
                          bytes of a row's words for scales that dispatch makes */
  int64_t strideBytes; /* from one row to the next; 0 means rowBytes. For scales by column: from one column to the next,
                          a multiple of 16; 0 means 4 * rows rounded up to that, where rows is the output's capacity */
  int32_t role;        /* moeRole_t */
  int32_t reserved;    /* 0 */
} moeRows_t;

/* How many rows came. */
typedef struct moeSizes {
  int64_t rows;         /* rows delivered into the output, alignment gaps not counted */
  int64_t requiredRows; /* row capacity that would have held everything, alignment gaps included (expert-padded: rows
                           per expert) */
  int64_t overflow;     /* 1 if rows were left out because requiredRows > capacity. They are lost for this call and
                           count as zero in its combine */
  int64_t copies;       /* records received: one per (token, rank) */
} moeSizes_t;

/* Where a dispatch puts what it receives. Everything is device memory; every pointer but `rows` may be NULL.
 * R = nranks, L = local experts, K = maxTopk, C = rows in the output: capacity, or L * capacity for
 * moeLayoutExpertPadded. */
typedef struct moeReceive {
  size_t size;            /* sizeof(moeReceive_t) */
  const moeRows_t* rows;  /* [1 + numSideRows] outputs, tokens first, then side rows in the order of the config; with
                             moeConfig_t.quantize one more: tokens of e4m3, their scales on a multiple of 4 bytes, side
                             rows. NULL asks for views: the rows stay in the window, see moeGetViews; moeLayoutRank, and
                             scales by row, only */
  int64_t capacity;       /* rows that each output holds (moeLayoutExpertPadded: rows per expert, the config's);
                             0: the worst case, moeInfo_t.rowCapacity. With views it must be 0 */
  int32_t idType;         /* moeIdType_t of `ids` */
  int32_t reserved;       /* 0 */
  void* ids;              /* moeLayoutRank: [C][K] expert ids of each row; -1 where the id is not of this rank and in
                             rows past the count */
  float* weights;         /* moeLayoutRank: [C][K] beside ids. Expert layouts: [C], the row's weight; 0 in gaps */
  int32_t* sources;       /* [C][2] source rank and token index of each row; -1, -1 in gaps */
  int32_t* rowExperts;    /* expert layouts: [C] local expert of each row; -1 in gaps */
  int32_t* rankCounts;    /* [R] records received from each rank; moeLayoutRank: that the output holds */
  int64_t* rankOffsets;   /* [R] moeLayoutRank: first row of each source rank */
  int32_t* expertCounts;  /* expert layouts: [L] rows of each local expert that the output holds */
  int64_t* expertOffsets; /* expert layouts: [L + 1] first row of each local expert; the last is the end */
  moeSizes_t* sizes;      /* one struct */
} moeReceive_t;

#define MOE_RECEIVE_INIT \
  { sizeof(moeReceive_t), NULL, 0, moeInt64, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }

/* moeDispatchArgs_t.flags */
#define MOE_SEND_HALF 1     /* only send: moeWait receives. `receive` is ignored */
#define MOE_REUSE_ROUTING 2 /* route as the handle's last dispatch did; ids and weights are ignored */

typedef struct moeDispatchArgs {
  size_t size;             /* sizeof(moeDispatchArgs_t) */
  int64_t numTokens;       /* 0 .. maxTokensPerRank; may differ between ranks and calls */
  int32_t topk;            /* 0 .. maxTopk; may differ between ranks and calls */
  int32_t idType;          /* moeIdType_t of `ids` */
  const void* ids;         /* [numTokens][topk] global expert ids */
  const float* weights;    /* [numTokens][topk]; NULL: all 1 */
  const moeRows_t* inputs; /* [1 + numSideRows] in the order of the config, tokens first */
  int32_t numInputs;       /* 1 + numSideRows, or 0 when numTokens is 0 */
  int32_t flags;
  const moeReceive_t* receive;
} moeDispatchArgs_t;

#define MOE_DISPATCH_ARGS_INIT \
  { sizeof(moeDispatchArgs_t), 0, 0, moeInt64, NULL, NULL, NULL, 0, 0, NULL }

/* Sends each token once to every rank that owns one of its experts, and receives the tokens sent here. Collective. */
MOE_API moeResult_t moeDispatch(moeComm_t comm, const moeDispatchArgs_t* args, moeHandle_t handle, void* stream);

/* Completes a dispatch that was started with MOE_SEND_HALF. Halves may be completed in any order; a dispatch returns
 * moeTooManyInFlight if the one `buffers` before it is still a half. */
MOE_API moeResult_t moeWait(moeComm_t comm, moeHandle_t handle, const moeReceive_t* receive, void* stream);

/* Waits on the host until the counts of the handle's dispatch are known, and gives them. After a send half this is how
 * to allocate outputs of the exact size: requiredRows rows hold everything. rows and overflow are then those of an
 * unbounded output. */
MOE_API moeResult_t moeGetSizes(moeComm_t comm, moeHandle_t handle, moeSizes_t* sizes);

/* The received rows in the window after a dispatch that asked for views. views[i] (as many as moeReceive_t.rows would
 * have) is an [nranks][maxTokensPerRank] array of rows: those of source rank s start at row s * maxTokensPerRank, and
 * rankCounts[s] of them are valid. They may be overwritten in place. They stay valid until the handle's combine has
 * completed, or until the `buffers`-th later dispatch of this communicator, whichever comes first. */
MOE_API moeResult_t moeGetViews(moeComm_t comm, moeHandle_t handle, moeRows_t* views, int numViews);

/* ---------------------------------------------------------------- combine */

/* moeCombineArgs_t.flags */
#define MOE_APPLY_WEIGHTS 1 /* expert layouts: multiply each row by its routing weight; else a plain sum */

typedef struct moeCombineArgs {
  size_t size;          /* sizeof(moeCombineArgs_t) */
  const void* rows;     /* expert outputs in combineDtype, [C][hidden], in the row order that the dispatch gave. NULL
                           after views: they lie in the view of the tokens */
  int64_t rowStride;    /* bytes; 0: hidden * element size */
  void* output;         /* [numTokens of the dispatch][hidden] in combineDtype; may be NULL when that is 0 */
  int64_t outputStride; /* bytes; 0: hidden * element size */
  int32_t flags;
  int32_t reserved; /* 0 */
} moeCombineArgs_t;

#define MOE_COMBINE_ARGS_INIT \
  { sizeof(moeCombineArgs_t), NULL, 0, NULL, 0, 0, 0 }

/* Sends expert outputs back to the tokens' ranks and adds them: output[t] = sum over t's experts of weight * row. The
 * rows of one rank are summed there in fp32 in the order of the token's ids and rounded once to combineDtype; these
 * partial rows are summed in fp32 in the order in which their ranks first appear in the token's ids and rounded once.
 * The same inputs give the same bits. In moeLayoutRank a row must already be its token's sum over the rank's experts.
 * A token without valid ids gets zeros. May be called again with the same handle. Collective. */
MOE_API moeResult_t moeCombine(moeComm_t comm, const moeCombineArgs_t* args, moeHandle_t handle, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* MOE_H_ */

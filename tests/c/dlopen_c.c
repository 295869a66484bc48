/* SPDX-License-Identifier: Apache-2.0
 *
 * As a framework's loader does it: opens the library at run time, finds every function of the header by name, and
 * exchanges tokens between one and between two ranks of this process.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "moe.h"

enum { kHidden = 8, kTokens = 4, kExperts = 4, kTopk = 2, kMaxRanks = 2 };

static const char* const kFunctions[] = {
    "moeGetErrorString", "moeGetLastError", "moeGetVersion",  "moeSetLogFunction",    "moeGetSettings",
    "moeGetUniqueId",    "moeCommInit",     "moeCommInitEnv", "moeCommInitCallbacks", "moeCommInitNccl",
    "moeCommInitAll",    "moeGroupStart",   "moeGroupEnd",    "moeCommGetAsyncError", "moeCommAbort",
    "moeCommFinalize",   "moeCommDestroy",  "moeGetInfo",     "moePredictInfo",       "moeGetStats",
    "moeGetExpertOwner", "moeCommGetDead",  "moeHandleBytes", "moeHandleInit",        "moeHandleDestroy",
    "moeDispatch",       "moeWait",         "moeGetSizes",    "moeGetViews",          "moeCombine"};

static const char* (*getLastError)(void);
static moeResult_t (*commInitAll)(moeComm_t*, int, const moeConfig_t*);
static moeResult_t (*commDestroy)(moeComm_t);
static moeResult_t (*groupStart)(void);
static moeResult_t (*groupEnd)(void);
static moeResult_t (*handleBytes)(moeComm_t, size_t*);
static moeResult_t (*handleInit)(moeComm_t, void*, size_t, moeHandle_t*);
static moeResult_t (*handleDestroy)(moeHandle_t);
static moeResult_t (*dispatch)(moeComm_t, const moeDispatchArgs_t*, moeHandle_t, void*);
static moeResult_t (*combine)(moeComm_t, const moeCombineArgs_t*, moeHandle_t, void*);

static void require(int right, const char* what) {
  if (right) return;
  fprintf(stderr, "dlopen_c: %s%s%s\n", what, getLastError ? ": " : "", getLastError ? getLastError() : "");
  exit(1);
}

/* Copies the address: ISO C has no cast from an object pointer to a function pointer. */
static void find(void* library, const char* name, void* function) {
  void* address = dlsym(library, name);
  require(address != NULL, name);
  memcpy(function, &address, sizeof address);
}

static void* openLibrary(void) {
  char path[PATH_MAX];
  ssize_t length = readlink("/proc/self/exe", path, sizeof path - 32);
  char* slash;
  void* library;
  require(length > 0, "cannot tell where this program lies");
  path[length] = '\0';
  slash = strrchr(path, '/');
  strcpy(slash, "/../lib/libmoecl.so");
  library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) fprintf(stderr, "dlopen_c: %s\n", dlerror());
  require(library != NULL, path);
  return library;
}

/* What one rank owns during an exchange. Tokens and results are fp32. */
typedef struct Rank {
  float tokens[kTokens][kHidden];
  int64_t ids[kTokens][kTopk];
  float weights[kTokens][kTopk];
  float received[kMaxRanks * kTokens * kTopk][kHidden];
  float result[kTokens][kHidden];
  moeRows_t input, output;
  moeReceive_t receive;
  moeSizes_t sizes;
  void* memory;
  moeHandle_t handle;
} Rank;

static void prepare(Rank* rank, int number, moeComm_t comm) {
  static const moeReceive_t receive = MOE_RECEIVE_INIT;
  size_t bytes = 0;
  int t, k, h;
  memset(rank, 0, sizeof *rank);
  for (t = 0; t < kTokens; ++t) {
    for (h = 0; h < kHidden; ++h) rank->tokens[t][h] = (float)(100 * number + 10 * t + h);
    for (k = 0; k < kTopk; ++k) {
      rank->ids[t][k] = (number + t + k) % kExperts;
      rank->weights[t][k] = k == 0 ? 0.5f : 0.25f;
    }
  }
  rank->ids[kTokens - 1][1] = -1;
  rank->receive = receive;
  rank->receive.rows = &rank->output;
  rank->receive.sizes = &rank->sizes;
  rank->input.data = rank->tokens;
  rank->output.data = rank->received;
  rank->input.rowBytes = rank->output.rowBytes = (int64_t)sizeof rank->tokens[0];
  require(handleBytes(comm, &bytes) == moeSuccess, "moeHandleBytes");
  require(posix_memalign(&rank->memory, 256, bytes) == 0, "no memory");
  require(handleInit(comm, rank->memory, bytes, &rank->handle) == moeSuccess, "moeHandleInit");
}

static void exchange(int nranks) {
  static Rank ranks[kMaxRanks];
  moeComm_t comms[kMaxRanks];
  moeConfig_t config = MOE_CONFIG_INIT;
  int64_t rows = 0;
  int r, t, h;
  config.maxTokensPerRank = kTokens;
  config.hidden = kHidden;
  config.numExperts = kExperts;
  config.maxTopk = kTopk;
  config.dtype = config.combineDtype = moeFloat32;
  config.layout = moeLayoutExpert;
  config.backend = moeBackendHost;
  require(commInitAll(comms, nranks, &config) == moeSuccess, "moeCommInitAll");
  for (r = 0; r < nranks; ++r) prepare(&ranks[r], r, comms[r]);
  require(groupStart() == moeSuccess, "moeGroupStart");
  for (r = 0; r < nranks; ++r) {
    moeDispatchArgs_t args = MOE_DISPATCH_ARGS_INIT;
    args.numTokens = kTokens;
    args.topk = kTopk;
    args.ids = ranks[r].ids;
    args.weights = &ranks[r].weights[0][0];
    args.inputs = &ranks[r].input;
    args.numInputs = 1;
    args.receive = &ranks[r].receive;
    require(dispatch(comms[r], &args, ranks[r].handle, NULL) == moeSuccess, "moeDispatch");
  }
  require(groupEnd() == moeSuccess, "moeGroupEnd after dispatch");
  for (r = 0; r < nranks; ++r) rows += ranks[r].sizes.rows;
  require(rows == nranks * (kTokens * kTopk - 1), "the ranks received one row per token and expert");
  require(groupStart() == moeSuccess, "moeGroupStart");
  for (r = 0; r < nranks; ++r) {
    moeCombineArgs_t args = MOE_COMBINE_ARGS_INIT;
    args.rows = ranks[r].received;
    args.output = ranks[r].result;
    args.flags = MOE_APPLY_WEIGHTS;
    require(combine(comms[r], &args, ranks[r].handle, NULL) == moeSuccess, "moeCombine");
  }
  require(groupEnd() == moeSuccess, "moeGroupEnd after combine");
  for (r = 0; r < nranks; ++r) {
    for (t = 0; t < kTokens; ++t) {
      float weight = t == kTokens - 1 ? 0.5f : 0.75f;
      for (h = 0; h < kHidden; ++h) require(ranks[r].result[t][h] == weight * ranks[r].tokens[t][h], "the sums");
    }
  }
  for (r = 0; r < nranks; ++r) {
    require(handleDestroy(ranks[r].handle) == moeSuccess, "moeHandleDestroy");
    free(ranks[r].memory);
    require(commDestroy(comms[r]) == moeSuccess, "moeCommDestroy");
  }
}

int main(void) {
  void* library = openLibrary();
  size_t i;
  for (i = 0; i < sizeof kFunctions / sizeof kFunctions[0]; ++i) {
    void* function = NULL;
    find(library, kFunctions[i], &function);
  }
  find(library, "moeGetLastError", &getLastError);
  find(library, "moeCommInitAll", &commInitAll);
  find(library, "moeCommDestroy", &commDestroy);
  find(library, "moeGroupStart", &groupStart);
  find(library, "moeGroupEnd", &groupEnd);
  find(library, "moeHandleBytes", &handleBytes);
  find(library, "moeHandleInit", &handleInit);
  find(library, "moeHandleDestroy", &handleDestroy);
  find(library, "moeDispatch", &dispatch);
  find(library, "moeCombine", &combine);
  exchange(1);
  exchange(2);
  puts("dlopen_c: one rank and two ranks exchanged their tokens");
  return 0;
}

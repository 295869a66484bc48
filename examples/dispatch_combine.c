/* SPDX-License-Identifier: Apache-2.0 */
/* One thread drives two ranks. Each has two tokens, each token goes to two of four experts; every expert doubles. */
#include <moe.h>
#include <stdio.h>
#include <stdlib.h>

enum { kRanks = 2, kTokens = 2, kHidden = 16, kTopk = 2, kRows = kRanks * kTokens * kTopk };

static void check(moeResult_t result) {
  if (result == moeSuccess) return;
  fprintf(stderr, "%s: %s\n", moeGetErrorString(result), moeGetLastError());
  exit(1);
}

int main(void) {
  moeConfig_t config = MOE_CONFIG_INIT;
  config.maxTokensPerRank = kTokens;
  config.hidden = kHidden;
  config.numExperts = 4;
  config.maxTopk = kTopk;
  config.dtype = config.combineDtype = moeFloat32;
  config.layout = moeLayoutExpert;
  config.backend = moeBackendHost;
  moeComm_t comms[kRanks];
  check(moeCommInitAll(comms, kRanks, &config));

  static float tokens[kRanks][kTokens * kHidden], rows[kRanks][kRows * kHidden], results[kRanks][kTokens * kHidden];
  const int64_t ids[kTokens][kTopk] = {{0, 2}, {3, 1}}; /* what the gate chose, here the same on both ranks */
  const float weights[kTokens][kTopk] = {{0.5f, 0.5f}, {0.75f, 0.25f}};
  moeRows_t inputs[kRanks], outputs[kRanks];
  moeReceive_t receives[kRanks];
  moeSizes_t sizes[kRanks];
  moeHandle_t handles[kRanks];
  void* memory[kRanks];

  check(moeGroupStart()); /* the ranks' parts run together, at moeGroupEnd */
  for (int rank = 0; rank < kRanks; ++rank) {
    size_t bytes;
    check(moeHandleBytes(comms[rank], &bytes));
    memory[rank] = malloc(bytes + 256); /* a handle's address must be a multiple of 256 */
    char* aligned = (char*)memory[rank] + 256 - (uintptr_t)memory[rank] % 256;
    check(moeHandleInit(comms[rank], aligned, bytes, &handles[rank]));

    for (int i = 0; i < kTokens * kHidden; ++i) tokens[rank][i] = (float)(10 * rank + 1 + i / kHidden);
    inputs[rank] = (moeRows_t){tokens[rank], kHidden * sizeof(float), 0, moeRoleTokens, 0};
    outputs[rank] = (moeRows_t){rows[rank], kHidden * sizeof(float), 0, moeRoleTokens, 0};
    receives[rank] = (moeReceive_t)MOE_RECEIVE_INIT;
    receives[rank].rows = &outputs[rank];
    receives[rank].sizes = &sizes[rank];
    moeDispatchArgs_t args = MOE_DISPATCH_ARGS_INIT;
    args.numTokens = kTokens;
    args.topk = kTopk;
    args.ids = ids;
    args.weights = &weights[0][0];
    args.inputs = &inputs[rank];
    args.numInputs = 1;
    args.receive = &receives[rank];
    check(moeDispatch(comms[rank], &args, handles[rank], NULL));
  }
  check(moeGroupEnd());

  check(moeGroupStart());
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int i = 0; i < (int)sizes[rank].rows * kHidden; ++i) rows[rank][i] *= 2; /* the experts */
    moeCombineArgs_t args = MOE_COMBINE_ARGS_INIT;
    args.rows = rows[rank];
    args.output = results[rank];
    args.flags = MOE_APPLY_WEIGHTS;
    check(moeCombine(comms[rank], &args, handles[rank], NULL));
  }
  check(moeGroupEnd());

  for (int rank = 0; rank < kRanks; ++rank) {
    printf("rank %d received %d rows; tokens %g, %g became %g, %g\n", rank, (int)sizes[rank].rows, tokens[rank][0],
           tokens[rank][kHidden], results[rank][0], results[rank][kHidden]);
    check(moeHandleDestroy(handles[rank]));
    check(moeCommDestroy(comms[rank]));
    free(memory[rank]);
  }
  return 0;
}

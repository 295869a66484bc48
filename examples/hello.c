/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200112L
#include <moe.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) { /* one rank; started by torchrun, mpirun or srun */
  moeConfig_t config = MOE_CONFIG_INIT;
  config.maxTokensPerRank = 4, config.hidden = 2, config.numExperts = 8, config.maxTopk = 2;
  config.dtype = config.combineDtype = moeFloat32, config.layout = moeLayoutExpert, config.backend = moeBackendHost;
  moeComm_t comm;
  moeHandle_t handle;
  size_t bytes;
  if (moeCommInitEnv(&comm, &config)) return puts(moeGetLastError()), 1;
  moeHandleBytes(comm, &bytes);
  void* memory;
  if (posix_memalign(&memory, 256, bytes)) return 1;
  moeHandleInit(comm, memory, bytes, &handle);

  float token[2] = {1, 2}, rows[64][2], result[2];
  int64_t ids[2] = {3, 5}; /* the two experts that the gate chose for this rank's one token */
  float weights[2] = {0.25f, 0.75f};
  moeRows_t in = {token, sizeof token, 0, moeRoleTokens, 0}, out = {rows, sizeof rows[0], 0, moeRoleTokens, 0};
  moeReceive_t receive = MOE_RECEIVE_INIT;
  receive.rows = &out;
  moeDispatchArgs_t send = MOE_DISPATCH_ARGS_INIT;
  send.numTokens = 1, send.topk = 2, send.ids = ids, send.weights = weights;
  send.inputs = &in, send.numInputs = 1, send.receive = &receive;
  if (moeDispatch(comm, &send, handle, NULL)) return puts(moeGetLastError()), 1;
  /* here the experts turn rows into their results, in place */
  moeCombineArgs_t back = MOE_COMBINE_ARGS_INIT;
  back.rows = rows, back.output = result, back.flags = MOE_APPLY_WEIGHTS;
  if (moeCombine(comm, &back, handle, NULL)) return puts(moeGetLastError()), 1;
  printf("%g %g came back as %g %g\n", token[0], token[1], result[0], result[1]);
  return moeCommDestroy(comm);
}

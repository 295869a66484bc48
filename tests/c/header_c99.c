/* SPDX-License-Identifier: Apache-2.0
 *
 * The header in strict C99: every initializer, every enumeration, every function as a value of its own type.
 */
#include <stdio.h>
#include <string.h>

#include "moe.h"

static int failures = 0;

static void check(int right, const char* what) {
  if (right) return;
  ++failures;
  fprintf(stderr, "header_c99: %s\n", what);
}

static void checkInitializers(void) {
  moeConfig_t config = MOE_CONFIG_INIT;
  moeInfo_t info = MOE_INFO_INIT;
  moeStats_t stats = MOE_STATS_INIT;
  moeBootstrap_t bootstrap = MOE_BOOTSTRAP_INIT;
  moeReceive_t receive = MOE_RECEIVE_INIT;
  moeDispatchArgs_t dispatch = MOE_DISPATCH_ARGS_INIT;
  moeCombineArgs_t combine = MOE_COMBINE_ARGS_INIT;
  moeRows_t rows = {NULL, 0, 0, moeRoleTokens, 0};
  moeSizes_t sizes = {0, 0, 0, 0};
  moeUniqueId_t id;
  memset(&id, 0, sizeof id);
  check(config.size == sizeof config && config.device == -1 && config.expertAlign == 1, "MOE_CONFIG_INIT");
  check(config.dtype == moeBfloat16 && config.combineDtype == moeBfloat16, "MOE_CONFIG_INIT's types");
  check(config.backend == moeBackendAuto && config.path == moePathAuto && config.nonBlocking == 0,
        "MOE_CONFIG_INIT's choices");
  check(info.size == sizeof info && info.transport[0] == '\0', "MOE_INFO_INIT");
  check(stats.size == sizeof stats && stats.copiesPerToken == 0.0, "MOE_STATS_INIT");
  check(bootstrap.size == sizeof bootstrap && bootstrap.allGather == NULL, "MOE_BOOTSTRAP_INIT");
  check(receive.size == sizeof receive && receive.idType == moeInt64 && receive.sizes == NULL, "MOE_RECEIVE_INIT");
  check(dispatch.size == sizeof dispatch && dispatch.idType == moeInt64 && dispatch.receive == NULL,
        "MOE_DISPATCH_ARGS_INIT");
  check(combine.size == sizeof combine && combine.rows == NULL, "MOE_COMBINE_ARGS_INIT");
  check(rows.reserved == 0 && sizes.overflow == 0, "plain structs");
  check(sizeof id == 128, "moeUniqueId_t is 128 bytes");
}

static void checkEnumerations(void) {
  static const moeResult_t results[] = {moeSuccess,         moeInvalidArgument, moeInvalidUsage, moeMismatch,
                                        moeSystemError,     moeOutOfMemory,     moeUnsupported,  moeInternalError,
                                        moeTimeout,         moeAborted,         moeRankLost,     moePeerRefused,
                                        moeTooManyInFlight, moeOverflow,        moeInProgress,   moeDeviceError};
  size_t i;
  check(sizeof results / sizeof results[0] == moeNumResults, "every result is known here");
  for (i = 0; i < moeNumResults; ++i) check((size_t)results[i] == i, "results are numbered without gaps");
  check(moeBfloat16 == 0 && moeFloat16 == 1 && moeFloat32 == 2 && moeFloat8e4m3 == 3 && moeNumDataTypes == 4,
        "moeDataType_t");
  check(moeInt32 == 0 && moeInt64 == 1 && moeNumIdTypes == 2, "moeIdType_t");
  check(moeLayoutRank == 0 && moeLayoutExpert == 1 && moeLayoutExpertPadded == 2 && moeNumLayouts == 3, "moeLayout_t");
  check(moePathAuto == 0 && moePathDirect == 1 && moeNumPaths > moePathDirect, "moePath_t");
  check(moeBackendAuto == 0 && moeBackendHost == 1 && moeBackendCuda == 2 && moeNumBackends == 3, "moeBackend_t");
  check(moeRoleTokens == 0 && moeRoleScales == 1 && moeRoleOpaque == 2 && moeNumRoles == 3, "moeRole_t");
  check((MOE_SEND_HALF & MOE_REUSE_ROUTING) == 0 && MOE_APPLY_WEIGHTS != 0, "flags");
  check(MOE_MAX_TOPK == 64 && MOE_MAX_SIDE_ROWS == 4, "bounds");
  check(MOE_VERSION == MOE_VERSION_MAJOR * 10000 + MOE_VERSION_MINOR * 100 + MOE_VERSION_PATCH, "MOE_VERSION");
}

static void ignoreLine(void* context, int level, const char* line) {
  (void)level;
  (void)line;
  ++*(int*)context;
}

static void checkCalls(void) {
  int lines = 0, version = 0;
  size_t needed = 0;
  check(moeSetLogFunction(ignoreLine, &lines) == moeSuccess, "moeSetLogFunction");
  check(moeSetLogFunction(NULL, NULL) == moeSuccess, "moeSetLogFunction with NULL");
  check(moeGetVersion(&version) == moeSuccess && version == MOE_VERSION, "moeGetVersion");
  check(moeGetSettings(NULL, 0, &needed) == moeSuccess && needed > 1, "moeGetSettings asks for the size alone");
  check(moeCommInitNccl(NULL, (struct ncclComm*)NULL, NULL) == moeInvalidArgument, "moeCommInitNccl");
  check(strcmp(moeGetErrorString(moeSuccess), "") != 0, "moeGetErrorString");
  check(moeGetVersion(NULL) == moeInvalidArgument && moeGetLastError()[0] != '\0', "moeGetLastError");
}

int main(void) {
  checkInitializers();
  checkEnumerations();
  checkCalls();
  return failures == 0 ? 0 : 1;
}

// SPDX-License-Identifier: Apache-2.0
// moe_perf: times moecl's dispatch and combine, and checks every row.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "launch.h"
#include "moe.h"
#include "options.h"
#include "report.h"
#include "routing.h"
#include "text.h"

namespace moe::perf {

std::chrono::milliseconds teamPatience(const Options& options) {
  constexpr int kWorkMs = 120000;
  return std::chrono::milliseconds(kWorkMs + options.timeoutMs + options.stallMs);
}

namespace {

void printVersion() {
  int library = 0;
  require(moeGetVersion(&library), "moeGetVersion");
  std::printf("moe_perf %d.%d.%d, moecl %d.%d.%d\n", MOE_VERSION_MAJOR, MOE_VERSION_MINOR, MOE_VERSION_PATCH,
              library / 10000, library / 100 % 100, library % 100);
}

int run(const std::vector<std::string>& arguments) {
  Options options = parseOptions(arguments);
  if (options.help) {
    std::printf("%s", options.helpText.c_str());
    return 0;
  }
  if (options.version) {
    printVersion();
    return 0;
  }
  // Before the first call of CUDA. Each stream needs a queue of its own on the GPU: ranks that share one would wait for
  // each other's kernels.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  Routing routing(options);
  if (isWorker()) return runWorker(options, routing);
  if (options.processes == 0 && options.threads == 0) return runLaunched(options, routing);
  // Refuses before anything starts what no number of nodes could make possible.
  routing.setShape(options.ranks(), 1);
  Report report(options);
  if (options.threads > 0) return runThreads(options, routing, report);
  return runProcesses(options, arguments, report);
}

}  // namespace
}  // namespace moe::perf

int main(int argc, char** argv) {
  try {
    return moe::perf::run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const moe::perf::UsageError& error) {
    std::fprintf(stderr, "moe_perf: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "moe_perf: %s\n", error.what());
    return 1;
  }
}

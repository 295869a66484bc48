// SPDX-License-Identifier: Apache-2.0
#include "base/trace_range.h"

#ifdef MOE_HAVE_CUDA
// Headers alone: a profiler brings the functions.
#include <nvtx3/nvToolsExt.h>

namespace moe {
namespace {

nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t once = nvtxDomainCreateA("moecl");
  return once;
}

}  // namespace

TraceRange::TraceRange(const char* name) noexcept {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &attributes);
}

TraceRange::~TraceRange() { nvtxDomainRangePop(domain()); }

}  // namespace moe
#endif

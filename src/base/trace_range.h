// SPDX-License-Identifier: Apache-2.0
// Ranges on a profiler's time line (NVTX, domain "moecl"): what the host does inside a call. Without a profiler it is a
// look at a pointer; in builds without CUDA it is nothing.
#pragma once

namespace moe {

// From here to the end of the scope, in this thread. `name` is a literal.
class TraceRange {
 public:
#ifdef MOE_HAVE_CUDA
  explicit TraceRange(const char* name) noexcept;
  ~TraceRange();
#else
  explicit TraceRange(const char*) noexcept {}
  ~TraceRange() {}
#endif
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;
};

}  // namespace moe

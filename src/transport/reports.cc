// SPDX-License-Identifier: Apache-2.0
#include "transport/reports.h"

#include <memory>
#include <string_view>

#include "transport/wire.h"

namespace moe {
namespace {

constexpr size_t kMaxFailureBytes = 2000;

std::string pack(moeResult_t code, std::string_view content) {
  std::string report;
  putValue(&report, static_cast<int32_t>(code));
  return report.append(content);
}

std::string contentOf(const std::string& report, int rank, int self, const char* what) {
  std::string_view rest = report;
  int32_t code = 0;
  if (!takeValue(&rest, &code) || code < 0 || code >= moeNumResults) {
    fail(moeMismatch, "the report of rank ", rank, " on its memory cannot be read (", report.size(),
         " bytes); do all ranks run the same version of moecl?");
  }
  if (code == moeAborted && rank != self) code = moeRankLost;
  if (code != moeSuccess) fail(static_cast<moeResult_t>(code), "rank ", rank, " could not ", what, ": ", rest);
  return std::string(rest);
}

}  // namespace

std::vector<std::string> exchangeReports(const std::function<std::string()>& step, const char* what,
                                         Bootstrap& bootstrap, const WaitLimit& limit) {
  std::string report;
  std::unique_ptr<Error> failure;
  try {
    report = pack(moeSuccess, step());
  } catch (const Error& error) {
    failure = std::make_unique<Error>(error);
    report = pack(error.code(), error.text().substr(0, kMaxFailureBytes));
  }
  std::vector<std::string> reports;
  try {
    reports = bootstrap.allGather(report, limit);
  } catch (const Error&) {
    // What went wrong first says more than that the others could not be told.
    if (failure) throw Error(*failure);
    throw;
  }
  for (int rank = 0; rank < bootstrap.nranks(); ++rank) {
    std::string& one = reports[static_cast<size_t>(rank)];
    one = contentOf(one, rank, bootstrap.rank(), what);
  }
  return reports;
}

}  // namespace moe

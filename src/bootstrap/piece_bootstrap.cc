// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/piece_bootstrap.h"

#include <algorithm>

#include "base/error.h"
#include "bootstrap/bytes.h"

namespace moe {

std::vector<std::string> PieceBootstrap::allGather(const std::string& mine, const WaitLimit& limit) {
  if (mine.size() > kMaxBytes) {
    fail(moeInternalError, "rank ", rank(), " wants to exchange ", mine.size(), " bytes; the limit is ", kMaxBytes);
  }
  // The rank and the round travel along, because an all-gather with another order would do harm far from here.
  const uint64_t round = round_++;
  std::string heads =
      call(ByteWriter().number(int64_t{rank()}).number(round).number(uint64_t{mine.size()}).take(), "lengths", limit);
  ByteReader in(heads);
  std::vector<uint64_t> lengths;
  for (int each = 0; each < nranks(); ++each) {
    auto from = in.number<int64_t>();
    auto theirRound = in.number<uint64_t>();
    auto length = in.number<uint64_t>();
    if (from != each || theirRound != round || length > kMaxBytes) {
      fail(moeInvalidUsage, name(), " gave rank ", rank(), " wrong bytes at place ", each, ": rank ", from, ", call ",
           theirRound, ", ", length, " bytes, where rank ", each, ", call ", round, ", at most ", kMaxBytes,
           " bytes were due; pieces must arrive unchanged, in rank order");
    }
    lengths.push_back(length);
  }
  const size_t longest = static_cast<size_t>(*std::max_element(lengths.begin(), lengths.end()));
  if (longest == 0) return std::vector<std::string>(lengths.size());

  std::string padded = mine;
  padded.resize(longest);
  std::string all = call(padded, "contents", limit);
  std::vector<std::string> result;
  for (size_t each = 0; each < lengths.size(); ++each) {
    result.push_back(all.substr(each * longest, static_cast<size_t>(lengths[each])));
  }
  return result;
}

}  // namespace moe

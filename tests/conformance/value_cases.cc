// SPDX-License-Identifier: Apache-2.0
// Types, ids, weights, strides and alignment.
#include <cmath>
#include <limits>

#include "conformance/cases.h"

namespace moetest {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kLow = std::numeric_limits<int64_t>::min();
constexpr int64_t kHigh = std::numeric_limits<int64_t>::max();

const char* typeName(int dtype) {
  static constexpr const char* kNames[] = {"bf16", "fp16", "fp32", "fp8"};
  return kNames[dtype];
}

// Every dtype with every combine dtype, in every layout, with and without side rows. Pairs of ranks are for GPUs, where
// two of them make a machine.
void addTypes(Cases& cases, int nranks) {
  for (int dtype : {moeBfloat16, moeFloat16, moeFloat32, moeFloat8e4m3}) {
    for (int combine : {moeBfloat16, moeFloat16, moeFloat32}) {
      for (int layout : {moeLayoutRank, moeLayoutExpert, moeLayoutExpertPadded}) {
        for (int sides : {0, 2}) {
          std::string name = std::string("types_") + typeName(dtype) + "_" + typeName(combine) + "_layout_" +
                             std::to_string(layout) + "_sides_" + std::to_string(sides) + (nranks == 2 ? "_pair" : "");
          Plan plan(name, nranks, 6, 130, 7, 3);
          plan.with([&](moeConfig_t& c) {
            c.dtype = dtype;
            c.combineDtype = combine;
            c.layout = layout;
            c.numSideRows = sides;
            c.sideRowBytes[0] = sides ? 8 : 0;   // two fp32 scales
            c.sideRowBytes[1] = sides ? 17 : 0;  // nothing aligns
          });
          add(cases, plan);
          cases.back().onlyGpus = nranks == 2;
        }
      }
    }
  }
}

void addSideRows(Cases& cases) {
  Plan sides("side_rows_four_sizes", 2, 9, 64, 6, 2);
  sides.with([](moeConfig_t& c) {
    c.dtype = moeFloat8e4m3;
    c.numSideRows = 4;
    c.sideRowBytes[0] = 1;
    c.sideRowBytes[1] = 224;
    c.sideRowBytes[2] = 3;
    c.sideRowBytes[3] = 4096;
  });
  add(cases, sides, Cost::kSmall, true);
  for (int64_t hidden : {640, 896, 2880, 7168}) {
    Plan plan("fp8_scales_hidden_" + std::to_string(hidden), 2, 5, hidden, 4, 2);
    plan.with([hidden](moeConfig_t& c) {
      c.dtype = moeFloat8e4m3;
      c.numSideRows = 1;
      c.sideRowBytes[0] = (hidden + 127) / 128 * 4;
    });
    add(cases, plan, Cost::kBig);
  }
}

void addIds(Cases& cases) {
  for (int given : {moeInt32, moeInt64}) {
    for (int received : {moeInt32, moeInt64}) {
      for (int local : {0, 1}) {
        std::string name = "ids_" + std::to_string(given) + std::to_string(received) + (local ? "_local" : "_global");
        Plan plan(name, 3, 10, 16, 20, 4);
        plan.adjust = [given, received](Call& call, int) {
          for (RankCall& rank : call.ranks) {
            rank.idType = given;
            rank.receivedIdType = received;
          }
        };
        add(cases, plan.with([local](moeConfig_t& c) { c.localIds = local; }));
      }
    }
  }
  for (int layout : {moeLayoutRank, moeLayoutExpert}) {
    std::string suffix = layout ? "_by_expert" : "";
    auto with = [layout](moeConfig_t& c) { c.layout = layout; };
    Plan wild("ids_out_of_range" + suffix, 2, 24, 16, 8, 4);
    wild.router = [](Random& random, int, int64_t, int) {
      return random.pick<int64_t>({kLow, kHigh, -1, -2, 8, 9, 0x100000000, 0x100000003, 0, 3, 7});
    };
    wild.adjust = [](Call& call, int) {
      for (RankCall& rank : call.ranks) {
        for (size_t i = 0; i < rank.sent.ids.size(); ++i) {
          // A weight is not even looked at where the id is nobody's.
          if (rank.sent.ids[i] < 0 || rank.sent.ids[i] >= 8) rank.sent.weights[i] = kNan;
        }
      }
    };
    add(cases, wild.with(with));
    Plan narrow("ids_out_of_range_int32" + suffix, 2, 24, 16, 8, 4);
    narrow.router = [](Random& random, int, int64_t, int) {
      return random.pick<int64_t>({-2147483647 - 1, 2147483647, -1, 8, 0, 3, 7});
    };
    narrow.adjust = [](Call& call, int) {
      for (RankCall& rank : call.ranks) rank.idType = moeInt32;
    };
    add(cases, narrow.with(with));
    Plan twice("ids_duplicate" + suffix, 2, 40, 16, 6, 6);
    twice.router = [](Random& random, int, int64_t, int) { return random.between(-1, 5); };
    add(cases, twice.with(with));
    Plan quarter("ids_duplicate_weights" + suffix, 2, 2, 16, 8, 4);
    quarter.router = [](Random&, int, int64_t, int k) -> int64_t { return k < 2 ? 3 : 5; };
    quarter.adjust = [](Call& call, int) {
      for (RankCall& rank : call.ranks) rank.sent.weights.assign(rank.sent.weights.size(), 0.25f);
    };
    add(cases, quarter.with(with));
    Plan none("no_weights" + suffix, 3, 10, 16, 9, 3);
    none.weights = false;
    add(cases, none.with(with));
    Plan plain("plain_sum" + suffix, 3, 10, 16, 9, 3);
    plain.adjust = [](Call& call, int) { call.applyWeights = false; };
    add(cases, plain.with(with));
  }
}

void addStrides(Cases& cases) {
  for (int layout : {moeLayoutRank, moeLayoutExpert, moeLayoutExpertPadded}) {
    for (int dtype : {moeBfloat16, moeFloat8e4m3, moeFloat32}) {
      for (int misalign : {0, 1}) {
        std::string name = std::string("strides_") + typeName(dtype) + "_layout_" + std::to_string(layout) +
                           (misalign ? "_odd" : "_even");
        Plan plan(name, 2, 7, 33, 6, 3);
        plan.with([&](moeConfig_t& c) {
          c.layout = layout;
          c.dtype = dtype;
          c.numSideRows = 1;
          c.sideRowBytes[0] = 5;
        });
        plan.adjust = [misalign](Call& call, int number) {
          for (size_t rank = 0; rank < call.ranks.size(); ++rank) {
            call.ranks[rank].inputGap = rank % 2 ? 3 : 8 + number;
            call.ranks[rank].outputGap = rank % 2 ? 16 : 1;
            call.ranks[rank].misalign = misalign;
          }
        };
        add(cases, plan);
      }
    }
  }
  Plan misaligned("misaligned_without_strides", 2, 9, 136, 6, 2);
  misaligned.adjust = [](Call& call, int number) {
    for (RankCall& rank : call.ranks) rank.misalign = 1 + number;
  };
  add(cases, misaligned);
}

}  // namespace

void addValueCases(Cases& cases) {
  addTypes(cases, 3);
  addTypes(cases, 2);
  addSideRows(cases);
  addIds(cases);
  addStrides(cases);
}

}  // namespace moetest

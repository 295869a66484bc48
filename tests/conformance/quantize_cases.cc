// SPDX-License-Identifier: Apache-2.0
// Tokens that dispatch quantizes.
#include "conformance/cases.h"

namespace moetest {
namespace {

const char* name(int quantize, int order) {
  if (quantize == moeQuantizeFloat32) return order == moeScalesByRow ? "float_row" : "float_column";
  return order == moeScalesByRow ? "ue8m0_row" : "ue8m0_column";
}

Plan quantizing(const std::string& name, int nranks, int64_t tokens, int64_t hidden, int quantize, int order,
                int layout) {
  Plan plan("quantize_" + name, nranks, tokens, hidden, 7, 3);
  plan.with([=](moeConfig_t& c) {
    c.quantize = quantize;
    c.scaleOrder = order;
    c.layout = layout;
  });
  return plan;
}

// Every form of scales in every layout; short groups, words with bytes to spare, and rows of several blocks.
void addForms(Cases& cases) {
  for (int quantize : {moeQuantizeFloat32, moeQuantizeUe8m0}) {
    for (int order : {moeScalesByRow, moeScalesByColumn}) {
      for (int layout : {moeLayoutRank, moeLayoutExpert, moeLayoutExpertPadded}) {
        for (int64_t hidden : {1, 130, 640, 1552, 7168}) {
          std::string form = std::string(name(quantize, order)) + "_layout_" + std::to_string(layout) + "_hidden_" +
                             std::to_string(hidden);
          add(cases, quantizing(form, 2, 7, hidden, quantize, order, layout), hidden > 640 ? Cost::kBig : Cost::kSmall);
        }
      }
    }
  }
}

// Side rows, gaps between rows, addresses that align with nothing, outputs that are too small, several ranks.
void addSurroundings(Cases& cases) {
  for (int quantize : {moeQuantizeFloat32, moeQuantizeUe8m0}) {
    for (int order : {moeScalesByRow, moeScalesByColumn}) {
      for (int layout : {moeLayoutRank, moeLayoutExpert, moeLayoutExpertPadded}) {
        std::string form = std::string(name(quantize, order)) + "_layout_" + std::to_string(layout);
        Plan sides = quantizing("sides_" + form, 3, 9, 300, quantize, order, layout);
        sides.with([](moeConfig_t& c) {
          c.numSideRows = MOE_MAX_SIDE_ROWS;
          for (int i = 0; i < c.numSideRows; ++i) c.sideRowBytes[i] = 5 + 16 * i;
          c.combineDtype = moeFloat32;
        });
        add(cases, sides);
        Plan gaps = quantizing("gaps_" + form, 2, 9, 272, quantize, order, layout);
        gaps.adjust = [layout](Call& call, int number) {
          for (RankCall& rank : call.ranks) {
            rank.inputGap = 3;
            rank.outputGap = 1;
            rank.misalign = 1;
            if (number % 2 == 1 && layout != moeLayoutExpertPadded) rank.capacity = 6;
          }
        };
        add(cases, gaps);
      }
    }
  }
}

void addFlows(Cases& cases) {
  for (int quantize : {moeQuantizeFloat32, moeQuantizeUe8m0}) {
    Plan views = quantizing(std::string("views_") + name(quantize, moeScalesByRow), 2, 40, 400, quantize,
                            moeScalesByRow, moeLayoutRank);
    // Rows of e4m3 have no room for those of combine, so these are only looked at.
    views.steps = {{Step::kDispatch, 0}, {Step::kLook, 0}, {Step::kDispatch, 1}, {Step::kLook, 1}};
    views.adjust = [](Call& call, int) {
      for (RankCall& rank : call.ranks) rank.views = true;
    };
    add(cases, views);
    Plan halves = quantizing(std::string("halves_") + name(quantize, moeScalesByColumn), 2, 40, 400, quantize,
                             moeScalesByColumn, moeLayoutExpertPadded);
    halves.handles = 2;
    halves.steps = {{Step::kSend, 0, 0}, {Step::kSend, 1, 1},    {Step::kWait, 0, 0}, {Step::kSend, 2, 0},
                    {Step::kWait, 1, 1}, {Step::kCombine, 1, 1}, {Step::kWait, 2, 0}, {Step::kCombine, 2, 0}};
    add(cases, halves);
    Plan again = quantizing(std::string("again_") + name(quantize, moeScalesByRow), 2, 30, 256, quantize,
                            moeScalesByRow, moeLayoutExpert);
    again.calls = 3;
    again.tokens = [](int rank, int) { return 30 - rank; };
    again.adjust = [](Call& call, int number) { call.reuseRouting = number > 0; };
    again.router = [](Random&, int rank, int64_t token, int k) { return (rank + 3 * token + 2 * k) % 7; };
    again.weights = false;
    add(cases, again);
  }
}

}  // namespace

void addQuantizeCases(Cases& cases) {
  addForms(cases);
  addSurroundings(cases);
  addFlows(cases);
}

}  // namespace moetest

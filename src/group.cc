// SPDX-License-Identifier: Apache-2.0
#include "group.h"

#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace moe {
namespace {

struct Call {
  const void* key;
  std::function<moeResult_t(std::string*)> run;
  moeResult_t result = moeSuccess;
  std::string text;
};

struct Group {
  int depth = 0;
  std::vector<Call> calls;
};

Group& group() {
  thread_local Group mine;
  return mine;
}

// The calls of one key, in order. After a failure the rest still run: their peers wait for them.
void runCalls(std::vector<Call>& calls, const void* key) {
  for (Call& call : calls) {
    if (call.key == key) call.result = call.run(&call.text);
  }
}

}  // namespace

bool inGroup() { return group().depth > 0; }

void groupStart() { ++group().depth; }

void groupNote(const void* key, std::function<moeResult_t(std::string*)> call) {
  group().calls.push_back({key, std::move(call), moeSuccess, {}});
}

void groupEnd() {
  Group& mine = group();
  if (mine.depth == 0) fail(moeInvalidUsage, "moeGroupEnd without moeGroupStart in this thread");
  if (--mine.depth > 0) return;
  std::vector<Call> calls = std::exchange(mine.calls, {});
  std::vector<const void*> keys;
  for (const Call& call : calls) {
    bool known = false;
    for (const void* key : keys) known = known || key == call.key;
    if (!known) keys.push_back(call.key);
  }
  std::vector<std::thread> threads;
  for (size_t i = 1; i < keys.size(); ++i) {
    threads.emplace_back([&calls, key = keys[i]] { runCalls(calls, key); });
  }
  if (!keys.empty()) runCalls(calls, keys[0]);
  for (std::thread& thread : threads) thread.join();
  for (Call& call : calls) {
    if (call.result != moeSuccess && call.result != moeInProgress) throw Error(call.result, call.text);
  }
}

}  // namespace moe

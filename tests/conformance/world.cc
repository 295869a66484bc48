// SPDX-License-Identifier: Apache-2.0
#include "conformance/world.h"

#include <barrier>
#include <cstdio>
#include <cstring>
#include <map>
#include <thread>

#include "conformance/rank_process.h"

namespace moetest {
namespace {

using Drivers = std::vector<std::unique_ptr<Driver>>;

void runSteps(const Scenario& scenario, Driver& driver) {
  for (const Step& step : scenario.steps) {
    if (!driver.run(step)) return;
  }
}

using InitRank = std::function<moeResult_t(int rank, moeComm_t* comm, const moeConfig_t* config)>;

// On a GPU what is made or freed may wait for all that runs there, also for ranks that wait for the one that frees. So
// all begin together and end together.
void runInThreads(const Scenario& scenario, Drivers& drivers, const InitRank& init, bool together, Report& report) {
  std::barrier<> all(scenario.nranks);
  runThreads(scenario.nranks, [&](int rank) {
    Driver& driver = *drivers[static_cast<size_t>(rank)];
    bool fine = init(rank, driver.comm(), &driver.config()) == moeSuccess;
    if (!fine) report.add(scenario.name, ": rank ", rank, ": init: ", moeGetLastError());
    fine = fine && driver.begin();
    if (together) all.arrive_and_wait();
    if (fine) runSteps(scenario, driver);
    if (together) all.arrive_and_wait();
    driver.end();
  });
}

bool runGrouped(const Step& step, const Scenario& scenario, Drivers& drivers, Report& report) {
  for (auto& driver : drivers) {
    if (!driver->prepare(step)) return false;
  }
  moeGroupStart();
  for (auto& driver : drivers) {
    if (driver->issue(step) != moeSuccess) report.add(scenario.name, ": in a group: ", moeGetLastError());
  }
  if (moeGroupEnd() != moeSuccess) {
    report.add(scenario.name, ": call ", step.call, ": moeGroupEnd: ", moeGetLastError());
    return false;
  }
  for (auto& driver : drivers) {
    if (!driver->check(step)) return false;
  }
  return report.empty();
}

void runInGroup(const Scenario& scenario, Drivers& drivers, Report& report) {
  std::vector<moeComm_t> comms(drivers.size());
  if (moeCommInitAll(comms.data(), scenario.nranks, &drivers.front()->config()) != moeSuccess) {
    report.add(scenario.name, ": moeCommInitAll: ", moeGetLastError());
    return;
  }
  bool fine = true;
  for (size_t rank = 0; rank < drivers.size(); ++rank) *drivers[rank]->comm() = comms[rank];
  for (auto& driver : drivers) fine = fine && driver->begin();
  for (const Step& step : scenario.steps) {
    if (!fine) break;
    fine = runGrouped(step, scenario, drivers, report);
  }
  for (auto& driver : drivers) driver->end();
}

void runInProcesses(const Scenario& scenario, const Backend& backend, Report& report) {
  RankGroup ranks("scenario", scenario.nranks, {backend.name(), scenario.name});
  if (scenario.nranks > 1 && !ranks.introduce()) report.add(scenario.name, ": rank 0 made no id");
  for (int rank = 0; rank < scenario.nranks; ++rank) {
    std::optional<int> code = ranks[rank].exitCode(milliseconds(60000));
    if (code == 0) continue;
    std::string said = code ? ranks.hear(rank, milliseconds(0)) : "still runs";
    if (said.starts_with("id ")) said = ranks.hear(rank, milliseconds(0));
    report.add(scenario.name, ": process of rank ", rank, " ended with ", code.value_or(-1), ": ", said);
  }
}

// Processes that run one scenario after another: to begin to use a GPU takes a process seconds.
class ScenarioProcesses {
 public:
  ScenarioProcesses(int nranks, const Backend& backend) : ranks_("scenarios", nranks, {backend.name()}) {}
  int size() const { return ranks_.size(); }
  // After a failure they may be anywhere.
  bool usable() const { return usable_; }

  void run(const Scenario& scenario, Report& report) {
    ranks_.tellAll(scenario.name);
    if (!ranks_.introduce()) report.add(scenario.name, ": rank 0 made no id");
    for (int rank = 0; rank < size(); ++rank) {
      std::string said = ranks_.hear(rank, milliseconds(60000));
      if (said != "fine") report.add("process of rank ", rank, ": ", said.empty() ? "no answer" : said);
    }
    usable_ = report.empty();
  }

 private:
  RankGroup ranks_;
  bool usable_ = true;
};

void runInKeptProcesses(const Scenario& scenario, const Backend& backend, Report& report) {
  static std::map<std::string, std::unique_ptr<ScenarioProcesses>> kept;
  std::unique_ptr<ScenarioProcesses>& processes = kept[backend.name()];
  if (!processes || !processes->usable() || processes->size() != scenario.nranks) {
    processes.reset();
    processes = std::make_unique<ScenarioProcesses>(scenario.nranks, backend);
  }
  processes->run(scenario, report);
}

}  // namespace

const char* wayName(Way way) {
  static constexpr const char* kNames[] = {"threads", "callbacks", "group", "processes"};
  return kNames[static_cast<int>(way)];
}

ThreadGather::ThreadGather(int nranks) {
  for (int rank = 0; rank < nranks; ++rank) seats_.push_back({this, rank});
}

moeBootstrap_t ThreadGather::bootstrap(int rank) {
  moeBootstrap_t result = MOE_BOOTSTRAP_INIT;
  result.context = &seats_[static_cast<size_t>(rank)];
  result.allGather = &ThreadGather::call;
  return result;
}

void ThreadGather::fail() {
  std::lock_guard<std::mutex> lock(mutex_);
  failing_ = true;
  changed_.notify_all();
}

int ThreadGather::call(void* seat, const void* send, void* receive, size_t bytes) {
  auto* mine = static_cast<Seat*>(seat);
  return mine->gather->gather(mine->rank, send, receive, bytes);
}

int ThreadGather::gather(int rank, const void* send, void* receive, size_t bytes) {
  std::unique_lock<std::mutex> lock(mutex_);
  gathered_.resize(seats_.size() * bytes);
  if (bytes > 0) std::memcpy(gathered_.data() + static_cast<size_t>(rank) * bytes, send, bytes);
  uint64_t round = round_;
  if (++arrived_ == static_cast<int>(seats_.size())) {
    arrived_ = 0;
    ++round_;
    result_ = gathered_;
    changed_.notify_all();
  }
  bool done = changed_.wait_for(lock, milliseconds(20000), [&] { return failing_ || round_ != round; });
  if (!done || failing_ || result_.size() != seats_.size() * bytes) return 1;
  if (bytes > 0) std::memcpy(receive, result_.data(), result_.size());
  return 0;
}

void runThreads(int nranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < nranks; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

std::string runScenario(const Scenario& scenario, Way way, const Backend& backend) {
  Report report;
  if (way == Way::kProcesses) {
    if (backend.asynchronous()) {
      runInKeptProcesses(scenario, backend, report);
    } else {
      runInProcesses(scenario, backend, report);
    }
    return report.text();
  }
  Expectations expectations(scenario);
  Drivers drivers;
  for (int rank = 0; rank < scenario.nranks; ++rank) {
    drivers.push_back(std::make_unique<Driver>(scenario, expectations, rank, backend, report));
  }
  if (way == Way::kGroup) {
    runInGroup(scenario, drivers, report);
  } else if (way == Way::kCallbacks) {
    ThreadGather gather(scenario.nranks);
    auto init = [&](int rank, moeComm_t* comm, const moeConfig_t* config) {
      moeBootstrap_t bootstrap = gather.bootstrap(rank);
      return moeCommInitCallbacks(comm, scenario.nranks, rank, &bootstrap, config);
    };
    runInThreads(scenario, drivers, init, backend.asynchronous(), report);
  } else {
    moeUniqueId_t id;
    if (moeGetUniqueId(&id) != moeSuccess) return std::string("moeGetUniqueId: ") + moeGetLastError();
    auto init = [&](int rank, moeComm_t* comm, const moeConfig_t* config) {
      return moeCommInit(comm, scenario.nranks, &id, rank, config);
    };
    runInThreads(scenario, drivers, init, backend.asynchronous(), report);
  }
  return report.text();
}

std::string runScenarioRank(const Scenario& scenario, RankContext& context, const Backend& backend) {
  Report report;
  Expectations expectations(scenario);
  Driver driver(scenario, expectations, context.rank, backend, report);
  moeUniqueId_t id = context.meet();
  if (moeCommInit(driver.comm(), scenario.nranks, &id, context.rank, &driver.config()) != moeSuccess) {
    report.add(scenario.name, ": rank ", context.rank, ": init: ", moeGetLastError());
  } else {
    if (driver.begin()) runSteps(scenario, driver);
    driver.end();
  }
  return report.text();
}

LocalComms::LocalComms(int nranks, const moeConfig_t& config, const Backend& backend)
    : comms_(static_cast<size_t>(nranks)) {
  if (backend.asynchronous()) {
    join(nranks, config, backend);
  } else if (moeCommInitAll(comms_.data(), nranks, &config) != moeSuccess) {
    error_ = moeGetLastError();
  }
  if (!error_.empty()) comms_.clear();
}

// With a config of each rank's own, which says on which GPU it is.
void LocalComms::join(int nranks, const moeConfig_t& config, const Backend& backend) {
  moeUniqueId_t id;
  if (moeGetUniqueId(&id) != moeSuccess) {
    error_ = moeGetLastError();
    return;
  }
  std::mutex mutex;
  runThreads(nranks, [&](int rank) {
    moeConfig_t mine = config;
    backend.configure(&mine, rank, nranks);
    if (moeCommInit(&comms_[static_cast<size_t>(rank)], nranks, &id, rank, &mine) == moeSuccess) return;
    std::lock_guard<std::mutex> lock(mutex);
    error_ = moeGetLastError();
  });
}

LocalComms::~LocalComms() {
  for (moeComm_t comm : comms_) moeCommDestroy(comm);
}

}  // namespace moetest

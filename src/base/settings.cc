// SPDX-License-Identifier: Apache-2.0
#include "base/settings.h"

#include <unistd.h>

#include <charconv>
#include <variant>

#include "base/text.h"

extern char** environ;

namespace moe {
namespace {

struct Setting {
  const char* name;
  std::variant<int Settings::*, std::string Settings::*> field;
  int low, high;  // for integers
  const char* meaning;
};

constexpr int kMaxHostThreads = 64;

const std::vector<Setting>& table() {
  static const std::vector<Setting> rows = {
      {"MOE_DEBUG", &Settings::debug, 0, 3, "log level: 0 nothing, 1 warnings, 2 info, 3 trace (or WARN, INFO, TRACE)"},
      {"MOE_DEBUG_FILE", &Settings::debugFile, 0, 0, "log file instead of stderr; %p in it becomes the process id"},
      {"MOE_SOCKET_IFNAME", &Settings::socketInterface, 0, 0,
       "network interface for the rendezvous, by its exact name; unset: every one that is up, loopback last"},
      {"MOE_COMM_ID", &Settings::commId, 0, 0, "host:port on rank 0's host where moeCommInitEnv meets"},
      {"MOE_COMM_SECRET", &Settings::commSecret, 0, 0, "secret shared by the ranks that meet at MOE_COMM_ID"},
      {"MOE_HOST_BLOCKS", &Settings::hostBlocks, 1, kMaxHostThreads,
       "host backend: blocks of one operation, each run by MOE_HOST_WARPS threads"},
      {"MOE_HOST_WARPS", &Settings::hostWarps, 1, kMaxHostThreads, "host backend: threads of one block"},
      {"MOE_ALLOW_SHARED_GPU", &Settings::allowSharedGpu, 0, 1,
       "1: ranks that are threads of one process may share a GPU (for tests); 0: every rank needs its own"},
      {"MOE_PATH", &Settings::path, 0, 2,
       "moePath_t where config.path is moePathAuto: 0 the library's choice, 1 direct, 2 low latency; the same "
       "everywhere"},
      {"MOE_SLOTS", &Settings::slots, 0, 2,
       "moeSlots_t where config.slots is moeSlotsAuto and the layout allows it: 0 the library's choice, 1 a copy per "
       "rank, 2 a copy per expert; the same everywhere"},
      {"MOE_FORMAT", &Settings::format, 0, 2,
       "moeFormat_t where config.format is moeFormatAuto: 0 the library's choice, 1 tagged words, 2 signals; the same "
       "everywhere"},
  };
  return rows;
}

std::string valueText(const Settings& settings, const Setting& row) {
  if (const auto* number = std::get_if<int Settings::*>(&row.field)) return cat(settings.*(*number));
  const std::string& value = settings.*(std::get<std::string Settings::*>(row.field));
  if (std::string(row.name) == "MOE_COMM_SECRET" && !value.empty()) return "(set)";
  return value.empty() ? "(unset)" : value;
}

bool parseNumber(const std::string& text, const Setting& row, int* value) {
  if (std::string(row.name) == "MOE_DEBUG") {
    if (text == "WARN") return *value = 1, true;
    if (text == "INFO") return *value = 2, true;
    if (text == "TRACE") return *value = 3, true;
  }
  int parsed = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
  if (error != std::errc() || end != text.data() + text.size() || parsed < row.low || parsed > row.high) return false;
  *value = parsed;
  return true;
}

void applyOne(const std::string& name, const std::string& value, Settings* settings,
              std::vector<std::string>* warnings) {
  for (const Setting& row : table()) {
    if (name != row.name) continue;
    if (const auto* text = std::get_if<std::string Settings::*>(&row.field)) {
      settings->*(*text) = value;
    } else if (!parseNumber(value, row, &(settings->*std::get<int Settings::*>(row.field)))) {
      warnings->push_back(cat(name, "=", value, " is not a number from ", row.low, " to ", row.high,
                              "; using the default ", valueText(*settings, row)));
    }
    return;
  }
  std::string known;
  for (const Setting& row : table()) known += cat(known.empty() ? "" : ", ", row.name);
  warnings->push_back(cat(name, " is not a setting of moecl and is ignored; known: ", known));
}

struct Loaded {
  Settings settings;
  std::vector<std::string> warnings;
  std::vector<std::string> names;
};

const Loaded& loaded() {
  static const Loaded& once = *[] {
    auto* result = new Loaded;
    std::vector<std::string> environment;
    for (char** entry = environ; entry && *entry; ++entry) environment.emplace_back(*entry);
    result->settings = parseSettings(environment, &result->warnings);
    for (const std::string& entry : environment) {
      if (entry.starts_with("MOE_")) result->names.push_back(entry.substr(0, entry.find('=')));
    }
    return result;
  }();
  return once;
}

}  // namespace

Settings parseSettings(const std::vector<std::string>& environment, std::vector<std::string>* warnings) {
  Settings result;
  for (const std::string& entry : environment) {
    size_t equals = entry.find('=');
    if (!entry.starts_with("MOE_") || equals == std::string::npos) continue;
    // moe_perf hands private values to the ranks it starts under this prefix; they are not settings of the library.
    if (entry.starts_with("MOE_PERF_")) continue;
    applyOne(entry.substr(0, equals), entry.substr(equals + 1), &result, warnings);
  }
  return result;
}

const Settings& settings() { return loaded().settings; }

const std::vector<std::string>& settingsWarnings() { return loaded().warnings; }

std::string settingsTable() {
  std::string out;
  for (const Setting& row : table()) {
    bool given = false;
    for (const std::string& name : loaded().names) given = given || name == row.name;
    out += cat(row.name, " = ", valueText(settings(), row), given ? " (environment)" : " (default)", ": ", row.meaning,
               "\n");
  }
  return out;
}

}  // namespace moe

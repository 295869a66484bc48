// SPDX-License-Identifier: Apache-2.0
// Every MOE_* setting: one table, read from the environment once per process.
#pragma once

#include <string>
#include <vector>

namespace moe {

// The values, typed. Defaults here are what an empty environment gives.
struct Settings {
  int debug = 1;                // MOE_DEBUG
  std::string debugFile;        // MOE_DEBUG_FILE
  std::string socketInterface;  // MOE_SOCKET_IFNAME
  std::string commId;           // MOE_COMM_ID
  std::string commSecret;       // MOE_COMM_SECRET
  int hostBlocks = 1;           // MOE_HOST_BLOCKS
  int hostWarps = 1;            // MOE_HOST_WARPS
  int allowSharedGpu = 0;       // MOE_ALLOW_SHARED_GPU
  int path = 0;                 // MOE_PATH
  int slots = 0;                // MOE_SLOTS
  int format = 0;               // MOE_FORMAT
};

// The settings of this process. The first call reads the environment, and notes the names it does not know.
const Settings& settings();

// MOE_* names in the environment that no setting has, and values that could not be understood: one sentence each.
const std::vector<std::string>& settingsWarnings();

// The table as text: name, value, origin (default or environment), meaning; one setting a line.
std::string settingsTable();

// Parses an environment given as NAME=VALUE strings. What settings() does with the real one; apart for tests.
Settings parseSettings(const std::vector<std::string>& environment, std::vector<std::string>* warnings);

}  // namespace moe

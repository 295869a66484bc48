#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Finds which packages of Debian 12 or Ubuntu 24.04 are missing here. Root: installs them. Others: prints how.
#   scripts/setup.sh          what building and testing needs
#   scripts/setup.sh --lint   also the formatter and clang-tidy (--ci is the same)
set -euo pipefail

want_lint=0
for argument in "$@"; do
  case "$argument" in
    --lint | --ci) want_lint=1 ;;
    *) echo "setup.sh: unknown option $argument; known: --lint, --ci" >&2; exit 2 ;;
  esac
done

missing=()
need_command() {  # COMMAND PACKAGE
  command -v "$1" >/dev/null || missing+=("$2")
}

# Headers and libraries are asked of the compiler, which knows where it looks. One run for all.
need_libraries() {
  local probe="" header package
  while read -r header package; do
    probe+=$'#if !__has_include(<'"$header"$'>)\nmissing '"$package"$'\n#endif\n'
  done <<'LIST'
openssl/hmac.h libssl-dev
gtest/gtest.h libgtest-dev
CLI/CLI.hpp libcli11-dev
nlohmann/json.hpp nlohmann-json3-dev
LIST
  while read -r _ package; do
    missing+=("$package")
  done < <(g++ -std=c++20 -E -P -x c++ - <<<"$probe" | grep '^missing ')
}

need_command g++ build-essential
need_command make build-essential
need_command cmake cmake
need_command ninja ninja-build
need_command python3 python3
need_command pkg-config pkg-config
if command -v g++ >/dev/null; then
  need_libraries
else
  missing+=(libssl-dev libgtest-dev libcli11-dev nlohmann-json3-dev)
fi
if ((want_lint)); then
  # One version everywhere: others format and warn differently.
  need_command clang-format-14 clang-format-14
  need_command clang-tidy-14 clang-tidy-14
  need_command git git
fi

if ((${#missing[@]} == 0)); then exit 0; fi
mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)

if ! command -v apt-get >/dev/null; then
  echo "setup.sh: missing (by their Debian names): ${missing[*]}; install them with this system's package manager" >&2
  exit 1
fi
if ((EUID != 0)); then
  echo "setup.sh: missing packages. Run this as root, then try again:" >&2
  echo "  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
echo "setup.sh: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install -y -qq --no-install-recommends "${missing[@]}")
# The lists may be absent or stale: fetch them only when the first try fails.
"${install[@]}" >/dev/null 2>&1 || { apt-get update -qq && "${install[@]}"; }

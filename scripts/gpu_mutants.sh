#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Do the tests on GPUs notice faults in the kernels? Runs what tests/gpu/mutants.txt says against libraries with one
# deliberate fault each, on a machine with GPUs. They are built anywhere by `cmake --build BUILD --target gpu_mutants`.
#   scripts/gpu_mutants.sh [BUILD_DIR [MUTANT_DIR...]]
#     BUILD_DIR: has bin/ with the tests; default build. MUTANT_DIR: has libmoecl.so.*, and is named as its mutant;
#     default BUILD_DIR/mutants/*
# Exit codes: 0 every mutant that must be caught was, 1 one survived, 2 nothing to run, 77 too few GPUs.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
build=${1:-$root/build}
shift || true
folders=("$@")
if ((!$#)); then folders=("$build"/mutants/*/); fi
nvidia-smi -L >/dev/null 2>&1 || { echo "gpu_mutants.sh: skipped, nvidia-smi lists no GPU on this machine"; exit 77; }

log=$(mktemp)
trap 'rm -f "$log"' EXIT
survived=0 ran=0
# Whether a program found the GPUs that it needs.
able=0

# A test that is not run, or that never ends, has noticed nothing.
noticed() {
  local folder=$1 path=$2 status=0
  shift 2
  local libraries=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  # 2s: the low-latency path with signals.
  local settings=(MOE_PATH="${path%s}")
  if [[ $path == *s ]]; then settings+=(MOE_FORMAT=2); fi
  env "${settings[@]}" LD_LIBRARY_PATH="$libraries" timeout -k 10 180 "$@" >"$log" 2>&1 || status=$?
  case $status in
    0) able=1; echo "    exit 0:  $*" ;;
    77) echo "    skipped: $*" ;;
    124 | 137) able=1; echo "    no end:  $*" ;;
    *)
      echo "    exit $status: $*: $(grep -m 1 -E 'differs|is .*want|wrong|FAILED|failed|error' "$log" | cut -c 1-160)"
      return 0
      ;;
  esac
  return 1
}

# try FOLDER NAME PATH: the lines of one mutant for one path.
try() {
  local folder=$1 name=$2 path=$3 verdict="" caught=0 mutant wanted on program arguments words
  able=0
  echo "mutant $name, path $path"
  while read -r mutant wanted on program arguments; do
    [[ $mutant == "$name" && $on == "$path" ]] || continue
    verdict=$wanted
    read -ra words <<<"$arguments"
    if noticed "$folder" "$path" "$build/bin/$program" "${words[@]}"; then
      caught=1
      break
    fi
  done < <(grep -E '^[A-Z]' "$root/tests/gpu/mutants.txt")
  if ((!caught && !able)); then
    echo "  not tried: too few GPUs"
    return
  fi
  ran=$((ran + 1))
  if ((caught)); then
    echo "  caught"
  elif [[ $verdict == must ]]; then
    echo "  SURVIVED"
    survived=$((survived + 1))
  else
    echo "  not noticed, which it may"
  fi
}

for folder in "${folders[@]}"; do
  folder=${folder%/}
  name=$(basename "$folder")
  if ! compgen -G "$folder/libmoecl.so.*" >/dev/null; then
    echo "gpu_mutants.sh: $folder has no libmoecl.so.*" >&2
    exit 2
  fi
  folder=$(cd "$folder" && pwd)
  paths=$(awk -v name="$name" '$1 == name && !seen[$3]++ {print $3}' "$root/tests/gpu/mutants.txt")
  if [[ -z $paths ]]; then
    echo "gpu_mutants.sh: tests/gpu/mutants.txt has no line for $name" >&2
    exit 2
  fi
  # What one path's tests notice may escape another's.
  for path in $paths; do try "$folder" "$name" "$path"; done
done
echo "gpu_mutants.sh: ${#folders[@]} mutants, $ran tries on a path each, $survived survived that must not"
if ((survived)); then exit 1; fi
if ((ran == 0)); then exit 77; fi

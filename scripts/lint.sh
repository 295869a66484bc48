#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Formatting, house style and clang-tidy over the whole tree. Tells everything it finds, then fails.
#   scripts/lint.sh            check
#   scripts/lint.sh --format   reformat the sources in place instead
#   scripts/lint.sh --check-format FILE...   only the formatting of these files
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

sources() {
  git -C "$root" -c safe.directory='*' ls-files -co --exclude-standard -- \
    '*.h' '*.c' '*.cc' '*.cu' '*.cuh' | while read -r name; do
    if [[ -f "$root/$name" ]]; then echo "$root/$name"; fi
  done
}

check_format() { clang-format-14 --style=file:"$root/.clang-format" --dry-run -Werror "$@"; }

# What clang-tidy needs to know is how each file is compiled: configuring tells, nothing is built. The files that wrap
# CUDA's driver need its header, which not every machine has.
run_clang_tidy() {
  local build=$root/build-lint
  cmake -S "$root" -B "$build" -DMOE_CUDA=OFF -DMOE_TESTS=OFF -DMOE_TOOLS=OFF >"$build.log" 2>&1 || {
    cat "$build.log"
    return 1
  }
  find "$root/src" -name '*.cc' -not -path '*/cuda_ipc/*' -print0 | sort -z |
    xargs -0 -r -n 1 -P "$(nproc)" clang-tidy-14 --quiet -p "$build" --extra-arg=-Wno-unknown-warning-option \
      2>"$build.log" || {
    # Counts of suppressed warnings go there too; only a failure makes them worth reading.
    cat "$build.log" >&2
    return 1
  }
}

case "${1:-}" in
  --format) sources | xargs -r clang-format-14 --style=file:"$root/.clang-format" -i; exit ;;
  --check-format) shift; check_format "$@"; exit ;;
  "") ;;
  *) echo "lint.sh: unknown option $1; known: --format, --check-format FILE..." >&2; exit 2 ;;
esac

failed=()
mapfile -t files < <(sources)
check_format "${files[@]}" || failed+=("formatting (make format mends it)")
"$root/scripts/tidy.py" || failed+=("house style")
if [[ -e $root/build/lib/libmoecl.so ]]; then
  "$root/scripts/tidy.py" --library "$root/build/lib/libmoecl.so" || failed+=("exported symbols")
fi
run_clang_tidy || failed+=("clang-tidy")

if ((${#failed[@]})); then
  printf 'lint.sh: failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
echo "lint.sh: ${#files[@]} sources clean"

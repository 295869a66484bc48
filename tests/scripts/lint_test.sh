#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The linters find the faults that they are there for.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
  echo "lint_test: $1"
  exit 1
}

python3 "$MOE_SOURCE/tests/scripts/lint_cases.py" "$MOE_SOURCE/scripts"

# Exports: what is declared must be there, and nothing else.
mkdir -p "$work/include"
printf '%s\n' 'MOE_API int moeOne(void);' 'MOE_API const char* moeTwo(int a,' '  int b);' >"$work/include/moe.h"
exports() {  # C-CODE: what tidy.py says of a library made of it
  printf '%s\n' "$1" >"$work/lib.c"
  "${CC:-cc}" -shared -fPIC -o "$work/lib.so" "$work/lib.c"
  python3 "$MOE_SOURCE/scripts/tidy.py" --root "$work" --library "$work/lib.so" 2>/dev/null || true
}
[[ -z $(exports 'int moeOne, moeTwo;') ]] || fail 'complete exports were refused'
[[ $(exports 'int moeOne;') == *'moeTwo is declared'* ]] || fail 'a lacking export passed'
[[ $(exports 'int moeOne, moeTwo, moeX;') == *'exports moeX'* ]] || fail 'a stray export passed'

# Formatting and clang-tidy, where lint has installed them.
printf 'int f() { return 1; }\n' >"$work/good.cc"
printf 'int  f( ){ return 1;}\n' >"$work/bad.cc"
printf 'unsigned f(unsigned* p) { return sizeof(p) / sizeof(p[0]); }\n' >"$work/wrong.cc"
if command -v clang-format-14 >/dev/null; then
  "$MOE_SOURCE/scripts/lint.sh" --check-format "$work/good.cc" || fail 'good formatting was refused'
  ! "$MOE_SOURCE/scripts/lint.sh" --check-format "$work/bad.cc" 2>/dev/null || fail 'bad formatting passed'
fi
if command -v clang-tidy-14 >/dev/null; then
  tidy=(clang-tidy-14 --quiet --config-file="$MOE_SOURCE/.clang-tidy")
  "${tidy[@]}" "$work/good.cc" -- 2>/dev/null || fail 'clang-tidy refused good code'
  ! "${tidy[@]}" "$work/wrong.cc" -- >/dev/null 2>&1 || fail 'clang-tidy passed sizeof of a pointer'
fi

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Each rule of the linters must find its fault in a snippet that has it, and nothing in one that has none.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tidy=$MOE_SOURCE/scripts/tidy.py
spdx='// SPDX-License-Identifier: Apache-2.0'
failures=0

complain() {
  echo "lint_test: $1"
  failures=$((failures + 1))
}

# expect RULE PATH LINE...: the file at PATH, made of these lines below the licence, must break RULE ("" for none).
expect() {
  local rule=$1 path=$2 found
  shift 2
  mkdir -p "$work/$(dirname "$path")"
  printf '%s\n' "$spdx" "$@" >"$work/$path"
  found=$(python3 "$tidy" --root "$work" "$path" 2>/dev/null) || true
  if [[ -z $rule && -z $found ]] || [[ -n $rule && $found == "$path:"*": $rule: "* ]]; then return; fi
  complain "$path should give '$rule', gave: $found"
}

repeat() { for ((i = 0; i < $1; ++i)); do echo "$2"; done; }
mapfile -t lines68 < <(repeat 68 '  work();')
mapfile -t lines69 < <(repeat 69 '  work();')
mapfile -t lines499 < <(repeat 499 'int x;')
mapfile -t lines500 < <(repeat 500 'int x;')
wide=$(printf 'x%.0s' {1..117})

mkdir -p "$work/src/base" "$work/src/device"
printf '%s\n' "$spdx" >"$work/src/base/error.h"
printf '%s\n' "$spdx" >"$work/src/device/own.h"

# Sizes, each side of its limit.
expect '' src/a.cc 'void f() {' "${lines68[@]}" '}'
expect 'function size' src/a.cc 'void f() {' "${lines69[@]}" '}'
expect 'function size' src/a.cc 'class A {' ' public:' '  A() : a_{1}, b_(2), c_{3} {' "${lines69[@]}" '  }' '};'
expect 'function size' src/a.cc 'template <class T>' 'void f(T x) const noexcept {' "${lines69[@]}" '}'
expect '' src/a.cc 'namespace a {' 'struct B {' "${lines69[@]}" '};' '}'
expect '' src/a.cc 'const int kTable[size(2)] = {' "${lines69[@]}" '};'
expect '' src/a.cc 'void f() {' '  g("}{");  // {' "${lines68[@]:1}" '}'
expect '' src/a.cc "${lines499[@]}"
expect 'file size' src/a.cc "${lines500[@]}"
expect '' src/a.cc "// $wide"
expect 'columns' src/a.cc "// x$wide"

# White space and licence.
expect 'white space' src/a.cc 'int x; '
expect 'white space' src/a.cc $'\tint x;'
printf '%s\nint x;' "$spdx" >"$work/src/end.cc"
printf 'int x;\n' >"$work/src/bare.cc"
for name in 'end.cc:2: white space' 'bare.cc:1: licence'; do
  found=$(python3 "$tidy" --root "$work" "src/${name%%:*}" 2>/dev/null) || true
  [[ $found == "src/$name"* ]] || complain "wanted $name, got $found"
done

# Words.
expect 'banned' src/a.cc '// TODO: later'
expect 'banned' src/a.cc '// FIXME'
expect 'banned' src/a.cc 'int XXX;'
expect 'banned' src/a.cc 'void f() { goto end; }'
expect '' src/a.cc '// Whoever wants to goto here cannot.'
expect 'banned' src/a.cc 'void f() { std::cout << std::endl; }'
expect 'banned' src/a.cc 'void f() { try { g(); } catch (...) {} }'
expect '' src/a.cc 'void f() { try { g(); } catch (...) { h(); } }'
expect 'getenv' src/comm.cc 'auto v = std::getenv("MOE_DEBUG");'
expect 'getenv' src/comm.cc 'extern char** environ;'
expect '' src/base/settings.cc 'auto v = std::getenv("MOE_DEBUG");'
expect '' src/bootstrap/launcher.cc 'auto v = std::getenv("RANK");'
expect 'machine path' src/a.cc '// see /home/someone/notes'
expect '' src/a.cc '// see /usr/lib and https://example.org/home/page'

# Includes point one way.
expect '' src/base/log.cc '#include "base/error.h"' '#include "moe.h"' '#include <vector>'
expect 'include' src/base/log.cc '#include "device/own.h"'
expect 'include' src/base/log.cc '#include "error.h"'
expect '' src/device/a.cc '#include "layout.h"' '#include "device/own.h"'
expect 'include' src/device/a.cc '#include "transport/transport.h"'
expect 'include' src/layout.h '#include "comm.h"'
expect '' src/transport/tcp/a.cc '#include "transport/transport.h"' '#include "transport/tcp/b.h"'
expect 'include' src/transport/tcp/a.cc '#include "transport/shm/shm_transport.h"'
expect 'include' src/transport/proxy.cc '#include "transport/shm/shm_transport.h"'
expect '' src/transport/verbs/a.cc '#include <infiniband/verbs.h>'
for header in infiniband/verbs.h cuda.h cuda_runtime.h nccl.h nvml.h hwloc.h; do
  expect 'include' src/comm.cc "#include <$header>"
done
expect '' tools/moe_perf/a.cc '#include "moe.h"' '#include "options.h"'
expect 'include' tools/moe_perf/a.cc '#include "base/error.h"'
expect 'include' tests/conformance/a_test.cc '#include "base/error.h"'
expect 'include' tests/conformance/a_test.cc '#include "../../src/comm.h"'

# Exports: what is declared must be there, and nothing else.
mkdir -p "$work/include"
printf '%s\n' "$spdx" 'MOE_API int moeOne(void);' 'MOE_API const char* moeTwo(int a,' '  int b);' >"$work/include/moe.h"
exports() {  # C-CODE: what tidy.py says of a library made of it
  printf '%s\n' "$1" >"$work/lib.c"
  "${CC:-cc}" -shared -fPIC -o "$work/lib.so" "$work/lib.c"
  python3 "$tidy" --root "$work" --library "$work/lib.so" 2>/dev/null || true
}
[[ -z $(exports 'int moeOne, moeTwo;') ]] || complain 'complete exports were refused'
[[ $(exports 'int moeOne;') == *'moeTwo is declared'* ]] || complain 'a lacking export passed'
[[ $(exports 'int moeOne, moeTwo, moeX;') == *'exports moeX'* ]] || complain 'a stray export passed'

# Formatting, where the formatter is installed.
if command -v clang-format-14 >/dev/null; then
  printf 'int f() { return 1; }\n' >"$work/good.cc"
  printf 'int  f( ){ return 1;}\n' >"$work/bad.cc"
  "$MOE_SOURCE/scripts/lint.sh" --check-format "$work/good.cc"
  if "$MOE_SOURCE/scripts/lint.sh" --check-format "$work/bad.cc" 2>/dev/null; then
    complain 'bad formatting passed'
  fi
fi

((failures == 0)) || exit 1

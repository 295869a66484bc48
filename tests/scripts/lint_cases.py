# SPDX-License-Identifier: Apache-2.0
"""Each rule of scripts/tidy.py must find its fault in a snippet that has it, and nothing in one that has none.

Run by lint_test.sh with the folder of tidy.py as its argument.
"""
import os
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
import tidy  # noqa: E402

SPDX = "// SPDX-License-Identifier: Apache-2.0"
WORK = ["  work();"]
EXISTING = ("src/base/error.h", "src/comm.h", "src/device/own.h")

# Rule that must be broken ("" for none), path, lines below the licence.
CASES = [
    # Sizes, each side of its limit.
    ("", "src/a.cc", ["void f() {"] + WORK * 68 + ["}"]),
    ("function size", "src/a.cc", ["void f() {"] + WORK * 69 + ["}"]),
    ("function size", "src/a.cc", ["class A {", "  A() : a_{1}, b_(2), c_{3} {"] + WORK * 69 + ["  }", "};"]),
    ("function size", "src/a.cc", ["template <class T>", "void f(T x) const noexcept {"] + WORK * 69 + ["}"]),
    ("function size", "src/a.cc", ["struct S* f(int x) {"] + WORK * 69 + ["}"]),
    ("", "src/a.cc", ["namespace a {", "struct alignas(64) B {"] + ["  int x;"] * 69 + ["};", "}"]),
    ("", "src/a.cc", ["const int kTable[size(2)] = {"] + ["  1,"] * 69 + ["};"]),
    ("", "src/a.cc", ["void f() {", '  g("}{", \'{\');  // {'] + WORK * 67 + ["}"]),
    ("", "src/a.cc", ["int x;"] * 499),
    ("file size", "src/a.cc", ["int x;"] * 500),
    ("", "src/a.cc", ["// " + "x" * 117]),
    ("columns", "src/a.cc", ["// " + "x" * 118]),
    # White space.
    ("white space", "src/a.cc", ["int x; "]),
    ("white space", "src/a.cc", ["\tint x;"]),
    # Words.
    ("banned", "src/a.cc", ["// TODO: later"]),
    ("banned", "src/a.cc", ["// FIXME"]),
    ("banned", "src/a.cc", ["int XXX;"]),
    ("banned", "src/a.cc", ["void f() { goto end; }"]),
    ("", "src/a.cc", ["// Whoever wants to goto here cannot."]),
    ("banned", "src/a.cc", ["void f() { std::cout << std::endl; }"]),
    ("banned", "src/a.cc", ["void f() { try { g(); } catch (...) {} }"]),
    ("banned", "src/a.cc", ["void f() {", "  try {", "    g();", "  } catch (...) {", "  }", "}"]),
    ("", "src/a.cc", ["void f() { try { g(); } catch (...) { h(); } }"]),
    ("", "src/a.cc", ["void f() { try { g(); } catch (...) { /* g failed: nothing to undo */ } }"]),
    ("getenv", "src/comm.cc", ['auto v = std::getenv("MOE_DEBUG");']),
    ("getenv", "src/comm.cc", ["extern char** environ;"]),
    ("", "src/base/settings.cc", ['auto v = std::getenv("MOE_DEBUG");']),
    ("", "src/bootstrap/launcher.cc", ['auto v = std::getenv("RANK");']),
    ("machine path", "src/a.cc", ["// see /home/someone/notes"]),
    ("", "src/a.cc", ["// see /usr/lib and https://example.org/home/page"]),
    # Includes point one way.
    ("", "src/base/log.cc", ['#include "base/error.h"', '#include "moe.h"', "#include <vector>"]),
    ("include", "src/base/log.cc", ['#include "device/own.h"']),
    ("include", "src/base/log.cc", ['#include "error.h"']),
    ("", "src/device/a.cc", ['#include "layout.h"', '#include "device/own.h"']),
    ("include", "src/device/a.cc", ['#include "transport/transport.h"']),
    ("include", "src/layout.h", ['#include "comm.h"']),
    ("", "src/transport/tcp/a.cc", ['#include "transport/transport.h"', '#include "transport/tcp/b.h"']),
    ("include", "src/transport/tcp/a.cc", ['#include "transport/shm/shm_transport.h"']),
    ("include", "src/transport/proxy.cc", ['#include "transport/shm/shm_transport.h"']),
    ("", "src/transport/verbs/a.cc", ["#include <infiniband/verbs.h>"]),
    ("include", "src/comm.cc", ["#include <infiniband/verbs.h>"]),
    ("include", "src/comm.cc", ["#include <cuda.h>"]),
    ("include", "src/comm.cc", ["#include <cuda_runtime.h>"]),
    ("include", "src/comm.cc", ["#include <nccl.h>"]),
    ("include", "src/comm.cc", ["#include <nvml.h>"]),
    ("include", "src/comm.cc", ["#include <hwloc.h>"]),
    ("", "tools/moe_perf/a.cc", ['#include "moe.h"', '#include "options.h"']),
    ("include", "tools/moe_perf/a.cc", ['#include "base/error.h"']),
    ("include", "tests/conformance/a_test.cc", ['#include "base/error.h"']),
    ("include", "tests/conformance/a_test.cc", ['#include "../../src/comm.h"']),
]

# The same for whole files, licence and last newline included.
FILES = [
    ("licence", "src/a.cc", "int x;\n"),
    ("licence", "scripts/a.sh", "#!/bin/sh\necho\n"),
    ("", "scripts/a.sh", "#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\necho\n"),
    ("white space", "src/a.cc", SPDX + "\nint x;"),
]


def write(root, path, text):
    full = os.path.join(root, path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    with open(full, "w", encoding="utf-8") as file:
        file.write(text)


def main():
    wrong = 0
    cases = FILES + [(rule, path, "\n".join([SPDX] + lines) + "\n") for rule, path, lines in CASES]
    for rule, path, text in cases:
        with tempfile.TemporaryDirectory() as root:
            for name in EXISTING:
                write(root, name, SPDX + "\n")
            write(root, path, text)
            found = {broken for _, broken, _ in tidy.check_file(root, path)}
        if found != ({rule} if rule else set()):
            wrong += 1
            print(f"{path} should give '{rule}', gave {sorted(found)}:\n{text[:200]}")
    print(f"{len(cases)} snippets, {wrong} wrong")
    return 1 if wrong else 0


sys.exit(main())

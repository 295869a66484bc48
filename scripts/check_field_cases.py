#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks tests/field_cases.md: faults that users of such libraries met, and the test that holds each one off.

The file has a line of all case numbers, gaps and all, and a table with one row a case:

    Cases: 1-4, 6

    | case | title | status |
    |---|---|---|
    | 1 | hidden sizes off the beaten track | test: Dispatch.AnyHidden |
    | 2 | ... | test: any_script.sh, Other.Test |
    | 6 | ... | later: verbs transport |

A test is a GoogleTest name (of a parametrized test without its prefix and number), a file of tests/scripts, or a file
of tests/c. Every number must have exactly one row, and every test named must exist. Tests on GPUs have "cuda" in their
names; a build without CUDA has none of them, and cannot say whether one that is named exists.

  check_field_cases.py --bin BUILD/bin [--root DIR]
"""
import argparse
import os
import re
import subprocess
import sys


def gtest_names(binary):
    """The test names of a GoogleTest binary: as it lists them, and bare of instantiation and parameter."""
    listing = subprocess.run([binary, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout
    names = set()
    suite = ""
    for line in listing.splitlines():
        word = line.split("#")[0].strip()
        if not line.startswith(" "):
            suite = word
        elif word:
            parts = [part for part in suite.rstrip(".").split("/") if not part.isdigit()]
            names |= {suite + word, parts[-1] + "." + word.split("/")[0]}
    return names


def is_gpu_test(name):
    """Of the conformance suite: the library's unit tests with CUDA in them need no GPU."""
    return "cuda_" in name


def known_tests(root, binaries):
    names = set()
    for binary in ("moe_unit_tests", "moe_conformance"):
        names |= gtest_names(os.path.join(binaries, binary))
    for folder in ("tests/scripts", "tests/c"):
        path = os.path.join(root, folder)
        names |= set(os.listdir(path)) if os.path.isdir(path) else set()
    return names


def expand(numbers):
    """The numbers of a list such as "1-4, 6"."""
    result = []
    for part in numbers.split(","):
        first, _, last = part.strip().partition("-")
        result += range(int(first), int(last or first) + 1)
    return result


def check(text, tests):
    """Yields a sentence for each fault of the file's text."""
    listed = re.search(r"^Cases: ([-\d, ]+)$", text, re.M)
    if not listed:
        yield "has no line 'Cases: 1-4, 6, ...' of all case numbers"
        return
    cases = expand(listed.group(1))
    has_gpus = any(is_gpu_test(test) for test in tests)
    rows = re.findall(r"^\| *(\d+) *\|([^|\n]*)\|([^|\n]*)\|$", text, re.M)
    seen = [int(number) for number, _, _ in rows]
    for number in sorted({number for number in seen if seen.count(number) > 1}):
        yield f"case {number} has {seen.count(number)} rows; one is wanted"
    for number in sorted(set(cases) - set(seen)):
        yield f"case {number} is listed under 'Cases:' but has no row"
    for number in sorted(set(seen) - set(cases)):
        yield f"case {number} has a row but is not listed under 'Cases:'"
    for number, title, status in rows:
        if not title.strip():
            yield f"case {number} has no title"
        kind, _, rest = status.strip().partition(": ")
        words = [word.strip().strip("`") for word in rest.split(",")]
        if kind not in ("test", "later") or not all(words):
            yield f"case {number}: status '{status.strip()}' is neither 'test: NAME' nor 'later: FEATURE'"
        elif kind == "test":
            for word in words:
                if word not in tests and (has_gpus or not is_gpu_test(word)):
                    yield f"case {number}: there is no test {word}"


def main():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=root)
    parser.add_argument("--bin", default=os.path.join(root, "build/bin"))
    options = parser.parse_args()
    try:
        with open(os.path.join(options.root, "tests/field_cases.md"), encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        sys.exit("tests/field_cases.md: there is no such file")
    faults = list(check(text, known_tests(options.root, options.bin)))
    for fault in faults:
        print(f"tests/field_cases.md: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The house style as a test: sizes, words, and which file may include which.

  tidy.py                    every file of the tree
  tidy.py --root DIR FILES   these files of the tree at DIR, named relative to it
  tidy.py --library FILE     that shared library must export what include/moe.h declares, and nothing else

Prints one line a finding, file:line: rule: text, and exits 1 if there is any.
"""
import argparse
import os
import re
import subprocess
import sys

MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 500
MAX_COLUMNS = 120

SOURCE = (".h", ".c", ".cc", ".cu", ".cuh")
SCRIPT = (".py", ".sh", ".cmake", ".map")
# Files whose text is not ours to lay out.
FOREIGN = re.compile(r"^(LICENSE$|tests/fixtures/|docs/.*\.svg$)")
# Files that name what they forbid.
SELF = re.compile(r"^(scripts/tidy\.py|tests/scripts/lint_cases\.py)$")

# What each part of src/ may include, by the longest matching prefix. "" stands for the files right in src/.
LAYERS = {
    "src/base/": ["base/"],
    "src/layout.h": ["base/"],
    "src/device/": ["base/", "device/", "layout.h"],
    "src/bootstrap/": ["base/", "bootstrap/"],
    "src/topology/": ["base/", "topology/"],
    "src/planner/": ["base/", "planner/", "topology/", "layout.h"],
    "src/transport/": ["base/", "bootstrap/", "topology/", "transport/"],
    "src/": None,  # the rest of src/ stands on all of it
}

# Vendor header -> folders that wrap it.
VENDORS = [
    (re.compile(r"^infiniband/"), ["src/transport/verbs/", "tests/simnic/", "tests/unit/transport/verbs/"]),
    (re.compile(r"^cuda(_runtime(_api)?)?\.h$"),
     ["src/transport/cuda_ipc/", "src/device/", "tests/simcuda/", "tests/gpu/", "tests/unit/device/",
      "tests/unit/transport/cuda_ipc/", "tests/conformance/", "tools/moe_perf/"]),
    (re.compile(r"^nccl\.h$"), ["src/bootstrap/", "tools/moe_perf/"]),
    (re.compile(r"^nvtx3/"), ["src/base/trace_range."]),
    (re.compile(r"^nvml\.h$"), ["src/topology/"]),
    (re.compile(r"^hwloc(\.h$|/)"), ["src/topology/"]),
    (re.compile(r"^mpi\.h$"), ["tools/moe_perf/"]),
]

BANNED = [
    (re.compile(r"\b(TODO|FIXME|XXX)\b"), "unfinished mark: finish it, or write an issue"),
    (re.compile(r"\bstd::endl\b"), "std::endl flushes; write '\\n'"),
]
# May span lines. A comment in the block, which says why nothing is to be done, makes it a different thing.
EMPTY_CATCH = re.compile(r"\bcatch\s*\(\s*\.\.\.\s*\)\s*\{\s*\}")
# Looked for in code without its comments and literals.
BANNED_IN_CODE = [
    (re.compile(r"\bgoto\b"), "goto: use a destructor or a function"),
]
MACHINE_PATH = re.compile(r"(?<![\w./$}])/(work|home|root|farm|Users)/\w")
GETENV = re.compile(r"\bgetenv\s*\(|\benviron\b")
GETENV_FILES = ("src/base/settings.cc", "src/bootstrap/launcher.cc")
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')


def list_files(root):
    """Tracked files and new ones that are not ignored; without git, everything outside build folders."""
    git = subprocess.run(["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard"], cwd=root,
                         capture_output=True, text=True)
    if git.returncode == 0:
        names = sorted(set(git.stdout.splitlines()))
        return [name for name in names if os.path.isfile(os.path.join(root, name))]
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not re.match(r"^(build.*|\.git|\.cache)$", name)]
        found += [os.path.relpath(os.path.join(folder, name), root) for name in names]
    return sorted(found)


def strip_code(text):
    """Blanks comments and literals and keeps every line end, so that braces and words left over are code."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match.group(0))
    token = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"'
        r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'",
        re.S)
    return token.sub(blank, text)


def is_function_head(head):
    """True when a brace block with this text before it is a function's body, by the words of our own style."""
    if "(" not in head or head.count("(") != head.count(")") or head.rstrip().endswith("="):
        return False
    is_type = re.match(r"\s*(?:typedef\s+|template\s*<.*>\s*)*(?:class|struct|union|enum)\b", head, re.S)
    return not is_type or re.search(r"\)\s*(?:const|noexcept|override|\s)*$", head) is not None


def function_lengths(code):
    """Yields (first line, head, lines) of each function in stripped code. What is nested counts for the outermost."""
    # Preprocessor lines may hold unbalanced braces.
    code = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda m: re.sub(r"[^\n]", " ", m.group(0)), code, flags=re.M)
    open_blocks = []
    inside = 0
    head_start = 0
    for match in re.finditer(r"[{};]", code):
        at, char = match.start(), match.group(0)
        if char == "{":
            head = code[head_start:at]
            is_function = not inside and is_function_head(head)
            inside += is_function
            open_blocks.append((is_function, head_start + len(head) - len(head.lstrip()), " ".join(head.split())))
        elif char == "}" and open_blocks:
            is_function, began, head = open_blocks.pop()
            if is_function:
                inside -= 1
                yield code.count("\n", 0, began) + 1, head, code.count("\n", began, at) + 1
            # Members initialized with braces belong to the constructor's head.
            if is_function and re.match(r"\s*[,{]", code[at + 1:at + 200]):
                head_start = began
                continue
        head_start = at + 1


def check_text(name, lines):
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS and not name.endswith((".md", ".json")):
            yield number, "columns", f"{len(line)} columns; at most {MAX_COLUMNS}"
        if line != line.rstrip():
            yield number, "white space", "white space at the end of the line"
        if "\t" in line and os.path.basename(name) != "Makefile":
            yield number, "white space", "a tab; indent with spaces"
        if SELF.match(name):
            continue
        if MACHINE_PATH.search(line):
            yield number, "machine path", "names a folder of one machine"
        for pattern, why in BANNED:
            if pattern.search(line):
                yield number, "banned", why


def check_head(name, lines):
    wants = name.endswith(SOURCE + SCRIPT) or os.path.basename(name) in ("CMakeLists.txt", "Makefile")
    if wants and not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:2]):
        yield 1, "licence", "the first line, the second after #!, must say SPDX-License-Identifier: Apache-2.0"
    if name.endswith(SOURCE + (".py", ".sh")) and len(lines) > MAX_FILE_LINES:
        yield len(lines), "file size", f"{len(lines)} lines; at most {MAX_FILE_LINES}: split by concept"


def layer_of(name):
    return max((prefix for prefix in LAYERS if name.startswith(prefix)), key=len)


def backend_of(path):
    """The backend's folder of a path below src/, such as transport/shm/."""
    match = re.match(r"(transport/\w+/)", path)
    return match.group(1) if match else None


def include_fault(name, target, quoted, exists):
    """Why `name` must not include `target`, or None."""
    for pattern, folders in VENDORS:
        if pattern.match(target) and not name.startswith(tuple(folders)):
            return f"only {', '.join(folders)} may include <{target}>"
    if not quoted or target == "moe.h":
        return None
    if name.startswith("src/"):
        allowed = LAYERS[layer_of(name)]
        if allowed is not None and not target.startswith(tuple(allowed)):
            return f"{layer_of(name)} may include only {', '.join(allowed)} and moe.h"
        mine, theirs = backend_of(name[len("src/"):]), backend_of(target)
        if mine and theirs and mine != theirs:
            return "backends do not include each other"
        if name.startswith("src/transport/") and not mine and theirs:
            return "what backends share does not include a backend"
    elif name.startswith(("tools/", "tests/conformance/", "examples/")):
        if exists("src/" + target) and not exists(os.path.join(os.path.dirname(name), target)):
            return "tools, examples and conformance tests see moe.h and their own headers only"
        if ".." in target.split("/"):
            return "include by name, not through .."
    return None


def check_source(name, text, exists):
    code = strip_code(text)
    for match in EMPTY_CATCH.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, "banned", "an empty catch (...) hides failures"
    for number, line in enumerate(code.splitlines(), 1):
        for pattern, why in BANNED_IN_CODE:
            if pattern.search(line):
                yield number, "banned", why
        if name.startswith("src/") and GETENV.search(line) and name not in GETENV_FILES:
            yield number, "getenv", f"the environment is read in {' and '.join(GETENV_FILES)} only"
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            fault = include_fault(name, match.group(1) or match.group(2), match.group(1) is not None, exists)
            if fault:
                yield number, "include", fault
    for first, function, lines in function_lengths(code):
        if lines > MAX_FUNCTION_LINES:
            yield first, "function size", f"{lines} lines; at most {MAX_FUNCTION_LINES}: {function[:60]}"


def check_file(root, name):
    with open(os.path.join(root, name), "rb") as file:
        data = file.read()
    if b"\0" in data or FOREIGN.match(name):
        return
    text = data.decode("utf-8")
    lines = text.split("\n")
    if text and not text.endswith("\n"):
        yield len(lines), "white space", "no newline at the end of the file"
    lines = lines[:-1] if lines and not lines[-1] else lines
    yield from check_text(name, lines)
    yield from check_head(name, lines)
    if name.endswith(SOURCE):
        yield from check_source(name, text, lambda path: os.path.exists(os.path.join(root, path)))


def check_exports(root, library):
    """Compares the functions of moe.h with the dynamic symbols that the library defines."""
    with open(os.path.join(root, "include/moe.h"), encoding="utf-8") as file:
        declared = set(re.findall(r"^MOE_API\s[^;(]*?\b(moe\w+)\s*\(", strip_code(file.read()), re.M))
    listing = subprocess.run(["nm", "-D", "--defined-only", "--format=posix", library], capture_output=True, text=True,
                             check=True).stdout
    exported = set()
    for line in listing.splitlines():
        symbol, kind = line.split()[:2]
        if kind != "A":  # the version node itself
            exported.add(symbol.split("@")[0])
    if not declared:
        yield "include/moe.h:1: exports: declares no function"
    for symbol in sorted(declared - exported):
        yield f"include/moe.h:1: exports: {symbol} is declared, but {library} does not export it"
    for symbol in sorted(exported - declared):
        yield f"src/moecl.map:1: exports: {library} exports {symbol}, which moe.h does not declare"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    parser.add_argument("--library")
    parser.add_argument("files", nargs="*")
    options = parser.parse_args()
    findings = []
    if options.library:
        findings += check_exports(options.root, options.library)
    else:
        for name in options.files or list_files(options.root):
            findings += [f"{name}:{number}: {rule}: {text}" for number, rule, text in check_file(options.root, name)]
    for finding in findings:
        print(finding)
    if findings:
        print(f"tidy.py: {len(findings)} findings", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

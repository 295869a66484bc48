#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# An installed moecl serves pkg-config, find_package (shared and static) and its own tools, also after being moved.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
example=$MOE_SOURCE/examples/dispatch_combine.c

cmake --install "$MOE_BIN/.." --prefix "$work/first" >/dev/null
mv "$work/first" "$work/moved"
prefix=$work/moved

# pkg-config, as a C user would.
PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name moecl.pc)")
export PKG_CONFIG_PATH
read -ra flags <<<"$(pkg-config --cflags --libs moecl)"
flags+=("-Wl,-rpath,$(pkg-config --variable=libdir moecl)")
"${CC:-cc}" -std=c99 -o "$work/by_pkg_config" "$example" "${flags[@]}"
"$work/by_pkg_config" >/dev/null
declared=$(sed -n 's/#define MOE_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' "$MOE_SOURCE/include/moe.h" | paste -sd.)
[[ $(pkg-config --modversion moecl) == "$declared" ]]

# find_package, both libraries.
mkdir "$work/user"
cat >"$work/user/CMakeLists.txt" <<LISTS
cmake_minimum_required(VERSION 3.25)
project(user C CXX)
find_package(moecl $declared REQUIRED)
add_executable(with_shared $example)
target_link_libraries(with_shared PRIVATE moecl::moecl)
add_executable(with_static $example)
target_link_libraries(with_static PRIVATE moecl::static)
set_target_properties(with_static PROPERTIES LINKER_LANGUAGE CXX)
LISTS
cmake -S "$work/user" -B "$work/user/build" -DCMAKE_PREFIX_PATH="$prefix" >"$work/log" 2>&1 &&
  cmake --build "$work/user/build" >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$work/user/build/with_shared" >/dev/null
"$work/user/build/with_static" >/dev/null

# Tools find the moved library by themselves.
for tool in "$prefix"/bin/moe_*; do
  [[ ! -e $tool ]] || "$tool" --version >/dev/null
done

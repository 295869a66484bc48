#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Gathers what scripts/test_gpu.sh and scripts/gpu_mutants.sh run, for a machine that has GPUs and nothing to build
# with: plain files without debug information. Build moe_conformance, gpu_hash_check and gpu_mutants first; what is
# missing is left out.
#   scripts/gpu_bundle.sh BUILD_DIR OUT_DIR
set -euo pipefail
build=${1:?BUILD_DIR} out=${2:?OUT_DIR}

# take FILE TO: FILE may be a link.
take() {
  mkdir -p "$(dirname "$2")"
  strip --strip-debug -o "$2" "$(realpath "$1")"
  chmod 755 "$2"
}

rm -rf "$out"
for program in moe_conformance gpu_hash_check moe_unit_tests moe_perf; do
  if [[ -x $build/bin/$program ]]; then take "$build/bin/$program" "$out/bin/$program"; fi
done
take "$build/lib/libmoecl.so.0" "$out/lib/libmoecl.so.0"
# moe_unit_tests is linked with it.
if [[ -e $build/lib/libsimnccl.so ]]; then take "$build/lib/libsimnccl.so" "$out/lib/libsimnccl.so"; fi
for library in "$build"/mutants/*/libmoecl.so.0; do
  if [[ -e $library ]]; then take "$library" "$out/mutants/$(basename "$(dirname "$library")")/libmoecl.so.0"; fi
done
du -sh "$out"

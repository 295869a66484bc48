#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# libmoecl.so exports exactly what moe.h declares.
set -euo pipefail
exec python3 "$MOE_SOURCE/scripts/tidy.py" --library "$MOE_BIN/../lib/libmoecl.so"

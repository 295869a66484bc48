#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tree keeps the house style.
set -euo pipefail
exec python3 "$MOE_SOURCE/scripts/tidy.py"

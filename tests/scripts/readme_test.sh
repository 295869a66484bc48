#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The README's program is examples/hello.c byte for byte, and prints what the README says.
set -euo pipefail

# block LANGUAGE: the text of the README's only code block in it.
block() { sed -n "/^\`\`\`$1\$/,/^\`\`\`\$/p" "$MOE_SOURCE/README.md" | sed '1d;$d'; }

diff <(block c) "$MOE_SOURCE/examples/hello.c"
diff <(block text) <(RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 "$MOE_BIN/hello")

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# moe_perf's command line: what it refuses, and with which words; which sizes it runs.
set -euo pipefail
source "$(dirname "$0")/moe_perf_common.bash"

# refuses PATTERN ARGUMENT...
refuses() {
  local pattern=$1
  shift
  run 2 -t 2 "$@"
  says err "^moe_perf: .*$pattern"
  if [[ -s $work/out ]]; then complain "moe_perf $*: refused, but wrote to stdout"; fi
}

run 0 --help
for option in -b -e -f -n -w -c -p -t -g --hidden --experts --topk --dtype --layout --align --exact --budget \
  --ids --backend --transport --path --op --routing --sms --max-tokens --timeout-ms --stall --seed --json \
  --corrupt --deterministic --nodes --quant --graph --flush --halves --slots --format --baseline --init \
  --window --block-m --tune --help --version; do
  says out "(^|[ ,])$option([ ,]|$)"
done
run 0 --version
says out '^moe_perf [0-9]+\.[0-9]+\.[0-9]+, moecl [0-9]+\.[0-9]+\.[0-9]+$'

# What does not exist: the known ones are listed.
refuses '--frobnicate: unknown option; known: .*--hidden' --frobnicate
refuses 'stray: unknown option' stray
refuses '--dtype fp4: unknown value; known: bf16, fp16, fp32, fp8' --dtype fp4
refuses '--quant fp4: unknown value; known: none, fp8, fp8-ue8m0' --quant fp4
refuses '--quant fp8: dispatch quantizes bf16' --quant fp8 --dtype fp16
refuses '--quant and --baseline nccl exclude each other' --quant fp8_ue8m0 --baseline nccl
refuses '--layout row: unknown value; known: rank, expert, expert-padded' --layout row
refuses '--ids int8: unknown value; known: int32, int64' --ids int8
refuses '--backend tpu: unknown value; known: auto, host, cuda' --backend tpu
refuses '--op reduce: unknown value; known: roundtrip, dispatch, combine' --op reduce
refuses '--path scenic: unknown value; known: auto, direct, hybrid, low-latency, bounded, pull' --path scenic
refuses '--slots token: unknown value; known: auto, expert, rank' --slots token
refuses '--format json: unknown value; known: auto, tagged, signalled' --format json
refuses '--transport pigeon: unknown value; known: auto, tcp, verbs' --transport pigeon
refuses '--routing random: unknown value; known: uniform, zipf:A, node-limited:M, same, masked:P, last, file:PATH' \
  --routing random
refuses 'Could not convert: -b = many' -b many

# What only other versions have.
for line in '--baseline mpi' '--nodes 2' \
  '--transport tcp' '--path hybrid' '--path pull' '--window 4096' '--block-m 64' '--tune file'; do
  read -ra words <<<"$line"
  refuses "${words[0]}.*: this version does not have it" "${words[@]}"
done

# Values outside their range.
refuses '-e 4: must not be smaller than -b 8' -b 8 -e 4
refuses '-f 1: must be more than 1' -f 1
refuses '-f 0.5: must be more than 1' -f 0.5
refuses '-n 0: must be from 1' -n 0
refuses '-c 2: must be from 0 to 1' -c 2
refuses '--topk 9: must not be more than --experts 8' --experts 8 --topk 9
refuses '--topk 65: must be from 1 to 64' --topk 65
refuses '--align 4: needs --layout expert' --align 4
refuses '--exact and --budget exclude each other' --exact --budget 4
refuses '--max-tokens 64: must not be smaller than -e 128' --max-tokens 64
refuses '--graph: graphs need GPUs' --graph --backend host
refuses '--graph and --exact exclude each other' --graph --exact
refuses '--graph and --stall exclude each other' --graph --stall 0:1
refuses '--flush: only a GPU' --flush --backend host
refuses '--flush and --graph exclude each other' --flush --graph
refuses '--flush and --exact exclude each other' --flush --exact
refuses '--flush and --stall exclude each other' --flush --stall 0:1
refuses '--corrupt needs the check' --corrupt -c 0
refuses '--stall: there is no rank 2 among 2' --stall 2:5
refuses '--stall 1: must be RANK:MS' --stall 1
refuses '--stall 1:x: must be RANK:MS' --stall 1:x
refuses '-p and -t exclude each other' -p 2
refuses '--baseline nccl: has only --layout rank' --baseline nccl --layout expert
refuses '--baseline nccl: NCCL needs GPUs' --baseline nccl --backend host
refuses '--init nccl: NCCL needs GPUs' --init nccl --backend host
refuses '--init smoke: unknown value; known: auto, nccl' --init smoke
refuses '-g and -t exclude each other' -g 2
refuses '--routing zipf: the part after the colon must be a skew' --routing zipf
refuses '--routing masked:2: the part after the colon must be a probability' --routing masked:2
refuses '--routing node-limited:1.5: .* a whole number of groups' --routing node-limited:1.5
refuses '--routing node-limited:9: there are 8 groups' --routing node-limited:9 --topk 16
refuses '--routing node-limited:5: must not be more than --topk 4' --routing node-limited:5 --topk 4
refuses '--routing node-limited:1: .* may have only 2 experts, --topk is 4' --routing node-limited:1 "${layer[@]}"
refuses '--routing same:1: same takes nothing after a colon' --routing same:1

# Neither -p nor -t, and no launcher.
env -u RANK -u WORLD_SIZE -u OMPI_COMM_WORLD_RANK -u SLURM_PROCID timeout 50 "$perf" >"$work/out" 2>"$work/err" &&
  complain 'a run without ranks succeeded'
says err '^moe_perf: moeCommInitEnv: .*RANK.*WORLD_SIZE'

# sizes WANTED ARGUMENT...
sizes() {
  local wanted=$1
  shift
  run 0 -t 2 "${layer[@]}" -n 1 -w 0 "$@"
  local got
  got=$(awk '!/^#/ { printf "%s%s", sep, $1; sep = " " }' "$work/out")
  if [[ $got != "$wanted" ]]; then complain "$*: sizes $got, expected $wanted"; fi
}
sizes '0 1 2 4 5' -b 0 -e 5 -f 2
sizes '3' -b 3 -e 3
sizes '1 3 9 10' -b 1 -e 10 -f 3
sizes '2 3 4 6' -b 2 -e 6 -f 1.5
sizes '0 1' -b 0 -e 1
sizes '130' -b 130

# Underscores, and the later of two.
run 0 -t 2 "${layer[@]}" -b 2 -e 2 --max_tokens 8 --layout expert_padded --routing node_limited:2 --timeout_ms 5000 \
  --dtype fp16 --dtype bf16 --deterministic --quant none --nodes 1 --slots auto --baseline none
says out 'layout expert-padded'
says out 'bf16 dispatch'
says out '^# routing: node-limited:2 of 8 groups'
finish

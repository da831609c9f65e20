#!/usr/bin/env bash
# Do two runs of the same job have the same bits, and does a graphed one? Six steps of examples/launch_gpt.sh on two GPUs,
# with NVTE_ALLOW_NONDETERMINISTIC_ALGO=1 (TransformerEngine's default) and 0; prints step, loss, gradient norm and
# milliseconds of every step.
#
#     benchmarks/repeated_runs.sh
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
OUT=${OUT:-$(mktemp -d)}
i=0
for v in "1 eager" "1 eager" "1 graphed" "0 eager" "0 graphed"; do
    set -- $v
    i=$((i + 1))
    NVTE_ALLOW_NONDETERMINISTIC_ALGO=$1 GPUS=2 STEP_METRICS_PATH=$OUT/d$i.jsonl \
        bash "$HERE/../examples/launch_gpt.sh" "$2" --train-iters 6 >"$OUT/d$i.log" 2>&1 || tail -5 "$OUT/d$i.log"
    python3 -c "
import json
for line in open('$OUT/d$i.jsonl'):
    d = json.loads(line)
    print('$v', d['step'], d['loss'], d['grad_norm'], d['ms'])"
done

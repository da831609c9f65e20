#!/usr/bin/env bash
# Trains a GPT under DistributedDataParallel on the GPUs of one host, with local CUDA graphs: captured at the end of the
# first step, replayed in every later one.
#
#     examples/launch_ddp.sh local                    # one graph per layer
#     examples/launch_ddp.sh eager                    # the same without graphs, for comparison
#
# GPUS: number of GPUs (default 2). DATA: prefix of a dataset from examples/prepare_text.py (default: mock data).
# Further arguments are flags of megatron.training. TransformerEngine is required.
# STEP_METRICS_PATH=FILE writes the exact loss, gradient norm and time of each step (examples/step_metrics.py).
# To compare runs bit for bit, set NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 (see launch_gpt.sh).
set -euo pipefail

MODE=${1:-local}
shift || true
GPUS=${GPUS:-2}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

MODEL=(
    --transformer-impl transformer_engine
    --num-layers 8
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
    --position-embedding-type rope
    --attention-dropout 0.1
    --hidden-dropout 0.1
    --no-create-attention-mask-in-dataloader   # TransformerEngine's causal attention needs no mask tensor
)

DDP=(
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --no-gradient-accumulation-fusion          # the fused kernel needs Apex
)

TRAINING=(
    --bf16
    --micro-batch-size 1
    --global-batch-size "$((2 * GPUS * ${NNODES:-1}))"
    --train-iters 100
    --lr 3e-4
    --lr-decay-style cosine
    --eval-iters 2                             # evaluation runs eagerly
    --eval-interval 50
    --log-interval 1
    --te-rng-tracker   # required by graphs; set in both modes for bit-identical results
)

case $MODE in
eager) GRAPHS=(--cuda-graph-impl none) ;;
local) GRAPHS=(--cuda-graph-impl local) ;;
*)
    echo "launch_ddp.sh: the first argument is '$MODE'; give 'eager' or 'local'" >&2
    exit 2
    ;;
esac

if [ -n "${DATA:-}" ]; then
    TEXT=(--data-path "$DATA" --split 99,1,0 --tokenizer-type NullTokenizer --vocab-size 257)
else
    TEXT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 32000)
fi

read -ra LAUNCHER <<<"${LAUNCHER:---standalone}"   # set by launch_nodes.sh
exec torchrun "${LAUNCHER[@]}" --nproc-per-node "$GPUS" "$HERE/pretrain_gpt.py" \
    "${MODEL[@]}" "${DDP[@]}" "${TRAINING[@]}" "${GRAPHS[@]}" "${TEXT[@]}" "$@"

#!/usr/bin/env bash
# Trains a mixture-of-experts GPT under Megatron-FSDP on the GPUs of one host.
#
#     examples/launch_moe.sh graphed                  # graphs of attention and the router; eager experts
#     examples/launch_moe.sh whole                    # graphs of the whole model; token counts stay on the GPU
#     examples/launch_moe.sh eager                    # without graphs, for comparison with the first
#     examples/launch_moe.sh eager --moe-use-grouped-tensor   # for comparison with the second
#     GPUS=4 EXPERT_PARALLEL=4 DATA=data/stdlib examples/launch_moe.sh graphed --train-iters 500
#
# GPUS: number of GPUs (default 2). EXPERT_PARALLEL: expert-parallel size (default 2).
# DATA, further arguments and STEP_METRICS_PATH: see launch_gpt.sh, which also explains the common flags.
set -euo pipefail

MODE=${1:-graphed}
shift || true
GPUS=${GPUS:-2}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
unset CUDA_DEVICE_MAX_CONNECTIONS

MODEL=(
    --transformer-impl transformer_engine
    --num-layers 8
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --position-embedding-type rope
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --disable-bias-linear
    --no-create-attention-mask-in-dataloader
)

EXPERTS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-ffn-hidden-size 1024
    --moe-shared-expert-intermediate-size 1024
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --expert-model-parallel-size "${EXPERT_PARALLEL:-2}"
)

FSDP=(
    --use-megatron-fsdp
    --data-parallel-sharding-strategy optim_grads_params
    --use-distributed-optimizer
    --ckpt-format fsdp_dtensor
    --no-gradient-accumulation-fusion
    --fsdp-double-buffer
    --fsdp-db-use-persist-buf-on-alloc-fail
)

TRAINING=(
    --bf16
    --micro-batch-size 1
    --global-batch-size "$((GPUS * ${NNODES:-1}))"
    --train-iters 100
    --lr 3e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --clip-grad 1.0
    --eval-iters 0
    --eval-interval 1000
    --log-interval 1
    --te-rng-tracker
)

case $MODE in
eager) GRAPHS=(--cuda-graph-impl none) ;;
graphed)
    GRAPHS=(
        --cuda-graph-impl transformer_engine
        --cuda-graph-warmup-steps 3
        --cuda-graph-modules attn moe_router moe_preprocess   # all of a layer before the token dispatch
    )
    ;;
whole)  # Hopper or newer (docs/results.md)
    GRAPHS=(
        --cuda-graph-impl transformer_engine
        --cuda-graph-warmup-steps 3
        --moe-use-grouped-tensor
    )
    ;;
*)
    echo "launch_moe.sh: the first argument is '$MODE'; give 'eager', 'graphed' or 'whole'" >&2
    exit 2
    ;;
esac

if [ -n "${DATA:-}" ]; then
    TEXT=(--data-path "$DATA" --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 257)
else
    TEXT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 32000)
fi

read -ra LAUNCHER <<<"${LAUNCHER:---standalone}"   # set by launch_nodes.sh
exec torchrun "${LAUNCHER[@]}" --nproc-per-node "$GPUS" "$HERE/pretrain_gpt.py" \
    "${MODEL[@]}" "${EXPERTS[@]}" "${FSDP[@]}" "${TRAINING[@]}" "${GRAPHS[@]}" "${TEXT[@]}" "$@"

#!/usr/bin/env bash
# Trains a GPT with 0.9 billion parameters under Megatron-FSDP on the GPUs of one host, with CUDA graphs.
#
#     examples/launch_gpt.sh graphed                  # a forward and a backward graph of the whole model
#     examples/launch_gpt.sh eager                    # the same without graphs, for comparison
#     GPUS=8 DATA=data/stdlib examples/launch_gpt.sh graphed --train-iters 500
#
# GPUS: number of GPUs (default 2). DATA: prefix of a dataset from examples/prepare_text.py (default: mock data).
# Further arguments are flags of megatron.training. TransformerEngine is required.
# STEP_METRICS_PATH=FILE writes the exact loss, gradient norm and time of each step (examples/step_metrics.py).
set -euo pipefail

MODE=${1:-graphed}
shift || true
GPUS=${GPUS:-2}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# To compare runs bit for bit, set NVTE_ALLOW_NONDETERMINISTIC_ALGO=0, which makes cuDNN's attention backward
# deterministic. Without it, even two eager runs differ.

# FSDP rejects a single hardware queue, which would serialize its collectives and the kernels of layers.
unset CUDA_DEVICE_MAX_CONNECTIONS

MODEL=(
    --transformer-impl transformer_engine
    --num-layers 16
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --position-embedding-type rope
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --no-create-attention-mask-in-dataloader   # TransformerEngine's causal attention needs no mask tensor
)

FSDP=(
    --use-megatron-fsdp
    --data-parallel-sharding-strategy optim_grads_params   # ZeRO-3: optimizer state, gradients and parameters
    --use-distributed-optimizer
    --ckpt-format fsdp_dtensor                             # the only checkpoint format of Megatron-FSDP
    --no-gradient-accumulation-fusion                      # the fused kernel needs Apex
    # Graphs read parameters at fixed addresses. The double buffer unshards layers into two fixed buffers in turn; a
    # layer that does not fit gets a persistent buffer. Both flags are required with --cuda-graph-impl
    # transformer_engine, and set in both modes for comparison.
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
    --te-rng-tracker   # required by graphs; set in both modes for bit-identical results
)

case $MODE in
eager) GRAPHS=(--cuda-graph-impl none) ;;
graphed)
    GRAPHS=(
        --cuda-graph-impl transformer_engine   # a forward and a backward graph of the whole model
        --cuda-graph-warmup-steps 3            # eager steps before the capture
        # --cuda-graph-modules attn            # captures only this part of each layer
    )
    ;;
*)
    echo "launch_gpt.sh: the first argument is '$MODE'; give 'eager' or 'graphed'" >&2
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
    "${MODEL[@]}" "${FSDP[@]}" "${TRAINING[@]}" "${GRAPHS[@]}" "${TEXT[@]}" "$@"

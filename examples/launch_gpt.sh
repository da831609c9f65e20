#!/usr/bin/env bash
# Trains a GPT of 0.9 billion parameters under Megatron-FSDP on the GPUs of one host, in CUDA graphs.
#
#     examples/launch_gpt.sh graphed                  # a forward and a backward graph of the whole model
#     examples/launch_gpt.sh eager                    # the same without graphs, to compare
#     GPUS=8 DATA=data/stdlib examples/launch_gpt.sh graphed --train-iters 500
#
# GPUS: how many (default 2). DATA: prefix of a dataset made by examples/prepare_text.py (default: mock data).
# Further arguments are passed on; any of megatron.training's flags works. TransformerEngine is required.
# STEP_METRICS_PATH=FILE writes the exact loss, gradient norm and time of each step (examples/step_metrics.py).
set -euo pipefail

MODE=${1:-graphed}
shift || true
GPUS=${GPUS:-2}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# To compare runs bit for bit, set NVTE_ALLOW_NONDETERMINISTIC_ALGO=0: TransformerEngine otherwise lets cuDNN's attention
# backward differ from run to run, and two eager runs differ as well.

# FSDP refuses to run with a single hardware queue, in which its collectives would wait for the layers' kernels.
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
    --no-create-attention-mask-in-dataloader   # TransformerEngine masks causally by itself; saves a sequence^2 copy
)

FSDP=(
    --use-megatron-fsdp
    --data-parallel-sharding-strategy optim_grads_params   # ZeRO-3: optimizer state, gradients and parameters
    --use-distributed-optimizer
    --ckpt-format fsdp_dtensor                             # the only checkpoint format of Megatron-FSDP
    --no-gradient-accumulation-fusion                      # the fused kernel needs Apex
    # A graph reads each parameter at the address it had at capture. The double buffer unshards the layers into two
    # fixed buffers in turn, and a layer that does not fit gets a buffer for itself that stays. Both are required
    # with --cuda-graph-impl transformer_engine, and set in both modes here so that the two can be compared.
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
    --te-rng-tracker   # graphs need TransformerEngine's random number tracker; in both modes, for equal numbers
)

case $MODE in
eager) GRAPHS=(--cuda-graph-impl none) ;;
graphed)
    GRAPHS=(
        --cuda-graph-impl transformer_engine   # a forward and a backward graph of the whole model
        --cuda-graph-warmup-steps 3            # eager steps before the capture
        # --cuda-graph-modules attn            # to capture parts of a layer; without it, whole layers
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

read -ra LAUNCHER <<<"${LAUNCHER:---standalone}"   # launch_nodes.sh gives another
exec torchrun "${LAUNCHER[@]}" --nproc-per-node "$GPUS" "$HERE/pretrain_gpt.py" \
    "${MODEL[@]}" "${FSDP[@]}" "${TRAINING[@]}" "${GRAPHS[@]}" "${TEXT[@]}" "$@"

#!/usr/bin/env bash
# Runs a launch script of this folder on several hosts, as one job. Start it on each of them:
#
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 GPUS=8 examples/launch_nodes.sh launch_gpt.sh graphed
#     NNODES=2 NODE_RANK=1 MASTER_ADDR=host0 GPUS=8 examples/launch_nodes.sh launch_gpt.sh graphed
#
# NNODES: how many hosts. NODE_RANK: which this is, from 0. MASTER_ADDR: the one with NODE_RANK 0, which the others can
# reach at MASTER_PORT (default 29500). JOB: a name that no other job there has (default: train). MAX_RESTARTS: how often
# all ranks are started again after one has failed (default 0); give the script --save and --load for that.
# launch.sbatch does this under Slurm. docs/scale.md has the flags that several hosts want.
set -euo pipefail

: "${NNODES:?set it to the number of hosts}" "${NODE_RANK:?set it to the rank of this host}"
: "${MASTER_ADDR:?set it to the host with NODE_RANK 0}"
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
SCRIPT=${1:?name a launch script first: launch_gpt.sh, say}
shift
IS_HOST=$([ "$NODE_RANK" = 0 ] && echo true || echo false)   # of the store that all hosts meet at

# Ranks that are started again would otherwise find in the store what the ranks before them left, and wait for those.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

export NNODES
export LAUNCHER="--nnodes $NNODES --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:${MASTER_PORT:-29500} \
--rdzv-id ${JOB:-train} --rdzv-conf is_host=$IS_HOST --max-restarts ${MAX_RESTARTS:-0}"
case $SCRIPT in
*/*) exec "$SCRIPT" "$@" ;;
*) exec "$HERE/$SCRIPT" "$@" ;;
esac

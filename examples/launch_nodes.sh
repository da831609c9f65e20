#!/usr/bin/env bash
# Runs a launch script of this folder as one job on several hosts. Start it on each host:
#
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 GPUS=8 examples/launch_nodes.sh launch_gpt.sh graphed
#     NNODES=2 NODE_RANK=1 MASTER_ADDR=host0 GPUS=8 examples/launch_nodes.sh launch_gpt.sh graphed
#
# NNODES: number of hosts. NODE_RANK: index of this host, from 0. MASTER_ADDR: host with NODE_RANK 0, reachable from the
# others at MASTER_PORT (default 29500). JOB: unique name of the job on that host (default: train). MAX_RESTARTS: number
# of restarts of all ranks after a failure (default 0); pass --save and --load to resume from checkpoints.
# Under Slurm, use launch.sbatch. See docs/scale.md for flags for several hosts.
set -euo pipefail

: "${NNODES:?set it to the number of hosts}" "${NODE_RANK:?set it to the rank of this host}"
: "${MASTER_ADDR:?set it to the host with NODE_RANK 0}"
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
SCRIPT=${1:?name a launch script, for example launch_gpt.sh}
shift
IS_HOST=$([ "$NODE_RANK" = 0 ] && echo true || echo false)   # whether this host runs the rendezvous store

# Otherwise restarted ranks read entries of the failed ranks from the store, and wait for them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

export NNODES
export LAUNCHER="--nnodes $NNODES --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:${MASTER_PORT:-29500} \
--rdzv-id ${JOB:-train} --rdzv-conf is_host=$IS_HOST --max-restarts ${MAX_RESTARTS:-0}"
case $SCRIPT in
*/*) exec "$SCRIPT" "$@" ;;
*) exec "$HERE/$SCRIPT" "$@" ;;
esac

#!/usr/bin/env bash
# Start train_ep.py with torchrun on one or several nodes. Run the same line on every node:
#
#   NNODES=2 HEAD=first-node configs/launch/torchrun.sh CONFIG.yaml --dataset data.jsonl --output-dir /shared/run
#
# The output directory must be one that all nodes share. A rank that dies takes its attempt down, and the next attempt
# (up to MAX_RESTARTS) goes on from the newest whole checkpoint. The same line started again does so too.
set -euo pipefail

nodes=${NNODES:-1}           # nodes in all
gpus=${GPUS_PER_NODE:-8}     # processes a node
head=${HEAD:-localhost}      # any one of the nodes, the same for all
port=${PORT:-29500}          # free on it
run=${RUN_ID:-expertmesh}    # tells this run from others that meet at the same place
restarts=${MAX_RESTARTS:-3}

config=${1:?usage: torchrun.sh CONFIG.yaml [flags of train_ep.py]}
shift
root=$(cd "$(dirname "$0")/../.." && pwd)

exec torchrun --nnodes "$nodes" --nproc-per-node "$gpus" --max-restarts "$restarts" \
    --rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "$run" \
    "$root/train_ep.py" --config "$config" --resume auto "$@"

#!/usr/bin/env bash
# Start train_ep.py with torchrun on one or several nodes. Run the same line on every node:
#
#   NNODES=2 HEAD=first-node configs/launch/torchrun.sh CONFIG.yaml --dataset data.jsonl --output-dir /shared/run
#
# The output directory must be on storage shared by all nodes. If a rank dies, its attempt ends, and the next attempt (up
# to MAX_RESTARTS) resumes from the newest complete checkpoint. So does the same line started again.
#
# After SIGTERM, torchrun gives ranks 30 seconds to finish their step and save, then kills them. Where that is too short,
# set TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600 (torch 2.11 ignores it).
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
case " $* " in *" --resume"*) ;; *) set -- --resume auto "$@" ;; esac

exec torchrun --nnodes "$nodes" --nproc-per-node "$gpus" --max-restarts "$restarts" \
    --rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "$run" \
    "$root/train_ep.py" --config "$config" "$@"

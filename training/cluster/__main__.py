"""Plan a run and check a cluster: `python -m expertmesh.training.cluster`, or `-m expertmesh.sharding`."""

from expertmesh.moe.util.command import run_command
from expertmesh.training.cluster.commands import main

if __name__ == "__main__":
    run_command(main)

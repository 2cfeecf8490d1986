"""Plan a run and check a cluster, `python -m expertmesh.sharding ...`: handed over to `training.planning`."""

from expertmesh.moe.util.command import run_command
from expertmesh.training.planning.cluster_commands import main

if __name__ == "__main__":
    run_command(main)

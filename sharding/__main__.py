"""Plan a run and check a cluster, `python -m expertmesh.sharding ...`: handed over to `training.foresight`."""

from expertmesh.moe.base.command import run_command
from expertmesh.training.foresight.cluster_commands import main

if __name__ == "__main__":
    run_command(main)

"""Write a run's report.html again, or a page that compares runs: `python -m expertmesh.report OUTPUT_DIR...`."""

from expertmesh.moe.util.command import run_command
from expertmesh.training.report.__main__ import main

if __name__ == "__main__":
    run_command(main)

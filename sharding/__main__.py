"""Plan a run and check a cluster: another name of `python -m expertmesh.training.planning`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("expertmesh.training.planning", run_name="__main__")

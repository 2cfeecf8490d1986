"""Plan a run and check a cluster: another name of `python -m expertmesh.training.cluster`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("expertmesh.training.cluster", run_name="__main__")

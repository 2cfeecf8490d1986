"""Which families of models can be trained here: `python -m expertmesh.moe families [FAMILY ...]`.

The command is `training/cluster/families_command.py`: only training knows how it builds a model.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("expertmesh.training.cluster.families_command", run_name="__main__")

"""What benchmarks whose variants take turns have in common: ranks that torchrun starts, and a random model."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from expertmesh.moe.util.atomic_write import whole


def measured_by_workers(
    module: str, arguments: argparse.Namespace, save_model: Callable[[Path, argparse.Namespace], object]
) -> dict[str, Any]:
    """What `module`, run on `arguments.ranks` ranks with this command's flags and --worker DIRECTORY, left in the
    directory's figures.json; written to `arguments.json` too, if that is given.

    Args:
        save_model: puts the model into the directory before, as `model`.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(arguments.ranks), "-m", module, "--worker", directory, *sys.argv[1:]]
        save_model(Path(directory) / "model", arguments)
        subprocess.run(command, check=True, timeout=3000, env={"OMP_NUM_THREADS": "1", **os.environ})
        figures: dict[str, Any] = json.loads((Path(directory) / "figures.json").read_text())
    if arguments.json is not None:
        with whole(arguments.json) as partial:
            partial.write_text(json.dumps(figures, indent=2))
    return figures


def random_mixtral(arguments: argparse.Namespace, seed: int = 0, **sizes: Any) -> Any:
    """A Mixtral in fp32 of the flags' sizes, and of others that no flag says."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        **sizes,
    )
    torch.manual_seed(seed)
    return MixtralForCausalLM(config)

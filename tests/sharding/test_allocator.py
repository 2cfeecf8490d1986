"""Memory of GPUs, as `let_segments_grow` leaves it to torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from expertmesh.sharding.runtime.allocator import VARIABLES, let_segments_grow
from tests.distributed.whole_runs import ROOT

PROGRAM = """
import os, sys

class AtTorch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("PYTORCH_ALLOC_CONF"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, AtTorch())
from expertmesh import train_ep
train_ep.main(sys.argv[1:])
"""


def test_segments_grow_unless_the_user_has_chosen() -> None:
    environment = {"HOME": "/"}
    let_segments_grow(environment)
    assert environment == {"HOME": "/", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in VARIABLES:
        chosen = {name: "max_split_size_mb:512"}
        let_segments_grow(chosen)
        assert chosen == {name: "max_split_size_mb:512"}


@pytest.mark.parametrize(
    ("chosen", "expected"), [({}, "expandable_segments:True"), ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "None")]
)
def test_it_is_settled_when_torch_is_loaded(tiny_model: Path, chosen: dict[str, str], expected: str) -> None:
    command = [sys.executable, "-c", PROGRAM, "--model", str(tiny_model), "--max-steps", "0"]
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | chosen
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == [expected]

"""environment.json, and the digest of our code."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from expertmesh.moe.util.sources import sources_digest
from expertmesh.sharding.runtime.process import Ranks
from expertmesh.training.environment import CHECKOUT, commit_of, environment, write_environment
from tests.distributed.pool import RankPool

ROOT = Path(__file__).parents[2]
PACKAGES = {"python", "torch", "transformers", "accelerate", "datasets", "safetensors"}
ALWAYS = {*PACKAGES, "global_batch_size", "ranks", "devices"}
SOMETIMES = {"expertmesh", "megablocks", "quack-kernels", "commit", "cuda", "nccl", "cpu", "cpu_cores", "os"}


def facts_of_a_rank(output_dir: Path) -> dict[str, str | int]:
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), dist.HashStore())
    facts = environment(ranks, 16, "flash attention 3 is not used: why")
    if ranks.rank == 0:
        write_environment(output_dir, facts)
    return facts


@pytest.mark.slow
def test_facts_of_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(facts_of_a_rank, 2, tmp_path)
    assert first == second == json.loads((tmp_path / "environment.json").read_text())
    assert set(first) >= ALWAYS
    # names of hosts and users, and environment variables, have no place here
    assert set(first) <= ALWAYS | SOMETIMES | {"flash_attention"}
    assert (first["ranks"], first["devices"]) == (2, "2 x CPU")
    assert first["torch"] == torch.__version__
    assert first["python"] == ".".join(map(str, sys.version_info[:3]))


def test_commit_and_digest_are_of_our_checkout(tmp_path: Path) -> None:
    assert ROOT == CHECKOUT
    assert commit_of(tmp_path) is None
    (tmp_path / ".git").mkdir()
    assert commit_of(tmp_path) is None
    for folder in ("moe", "sharding", "checkpoints", "training"):
        content = b"".join(file.read_bytes() for file in sorted((ROOT / folder).rglob("*.py")))
        assert sources_digest([folder]) == hashlib.sha256(content).hexdigest()

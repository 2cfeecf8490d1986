"""Rows that ranks share: the first law holds of them too."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from expertmesh.moe.experts.forward import Forward
from expertmesh.sharding.collectives.context_parallel import CPGroup
from expertmesh.sharding.parallelize.choices import Checkpointing
from expertmesh.sharding.topology import Topology
from expertmesh.training.attention.context_parallel_attention import cp_attention
from expertmesh.training.data.batch import SplitSequences
from expertmesh.training.micro_batch import token_loss_sum
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, my_batches, random_samples, sharded_model
from tests.distributed.whole_runs import assert_equal_weights, lines, read, start
from tests.tiny import save_model, tiny_mixtral

# of one to four runs' length, and some that leave a rank with padding alone
SAMPLES = random_samples([2 + (7 * i) % 12 for i in range(16)])

CASES = {
    "aux": Case(SAMPLES, balance=0.05, z=0.01, kernel="torch-grouped"),
    "accumulate": Case(SAMPLES, z=0.01, accumulation=2, gradient_checkpointing="full"),
    "selective": Case(SAMPLES, balance=0.05, z=0.01, gradient_checkpointing="selective", kernel="torch-grouped"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared")
    save_model(path)
    return path


@pytest.mark.release
def test_a_run_of_shared_rows(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Packed, evaluated, asked, saved; and resumed by ranks that share no rows, or share them among more."""
    common = (
        *("--model", tiny_model, "--dataset", tiny_data, "--eval-ratio", 0.2, "--eval-steps", 2, "--generate-steps", 3),
        *("--packing", "--max-seq-length", 90, "--global-batch-size", 8, "--per-device-train-batch-size", 1),
        *("--learning-rate", "1e-3", "--lr-scheduler-type", "constant", "--router-z-loss-coef", 0.01),
        *("--save-steps", 1),
        *("--gradient-checkpointing", "selective", "--per-device-eval-batch-size", 3, "--generate-max-new-tokens", 8),
    )

    def run(out: Path, world_size: int, *flags: object, steps: int = 4) -> None:
        argv = (*common, "--output-dir", out, "--max-steps", steps, *flags)
        assert start(ranks, world_size, *argv) == [(0, "")] * world_size

    run(tmp_path / "whole", 2, "--ep-size", 2, "--save-steps", 0)
    run(tmp_path / "shared", 4, "--ep-size", 2, "--cp-size", 2, steps=2)
    run(tmp_path / "shared", 4, "--ep-size", 4, "--cp-size", 4, "--resume", "auto", steps=3)
    run(tmp_path / "shared", 2, "--ep-size", 1, "--resume", "auto", "--save-steps", 0)
    for key in ("loss", "eval_loss", "grad_norm", "z_loss", "tokens"):
        found, expected = (
            {line["step"]: line[key] for line in lines(tmp_path / out, key)} for out in ("shared", "whole")
        )
        assert {step: found[step] for step in expected} == pytest.approx(expected, rel=1e-5), key
    answers, expected = (lines(tmp_path / out, "generations")[-1] for out in ("shared", "whole"))
    assert answers["generations"] == expected["generations"]
    assert_equal_weights(read(tmp_path / "shared" / "hf"), read(tmp_path / "whole" / "hf"))


@pytest.mark.release
def test_elastic(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Two ranks in place of four share a row by twos, as before; three do not, and are refused."""
    common = (
        *("--model", tiny_model, "--dataset", tiny_data, "--output-dir", tmp_path, "--per-device-train-batch-size", 2),
        *("--lr-scheduler-type", "constant", "--ep-size", 4, "--cp-size", 2, "--save-steps", 1),
    )
    assert start(ranks, 4, *common, "--max-steps", 1) == [(0, "")] * 4
    elastic = (*common, "--max-steps", 2, "--resume", "auto", "--elastic")
    code, errors = start(ranks, 3, *elastic)[0]
    assert code == 2
    assert "--cp-size 2 does not divide the 3 ranks; use 1 or 3" in errors
    assert start(ranks, 2, *elastic) == [(0, "")] * 2
    first, second = lines(tmp_path, "loss")
    assert first["tokens"] > 0
    settings = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (settings["ep_size"], settings["cp_size"], settings["global_batch_size"], second["step"]) == (2, 2, 4, 2)


def test_ranks_and_heads_that_do_not_come_out_even(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    argv = ("--model", tiny_model, "--dataset", tiny_data, "--output-dir", tmp_path / "out")
    for world_size, cp_size, said in (
        (2, 4, "--cp-size 4 does not divide the 2 ranks; use 1 or 2"),
        (3, 3, "--cp-size 3 does not divide the 4 attention heads of this model's layers, which a CP group"),
    ):
        code, errors = start(ranks, world_size, *argv, "--cp-size", cp_size)[0]
        assert code == 2
        assert said in errors
    assert not (tmp_path / "out").exists()


HEADS, GROUPS, WIDTH, VALUE_WIDTH = 8, 2, 24, 16


@pytest.mark.parametrize("cp_size", [2, 4])
def test_bytes_are_those_of_the_formula(ranks: RankPool, cp_size: int) -> None:
    """Queries, keys, values and output are each sent in forward and in backward, but for what stays on its rank. KV
    heads are replicated if there are fewer than ranks."""
    for sent in ranks.run(_bytes_sent, cp_size):
        groups = max(GROUPS, cp_size)
        numbers = HEADS * WIDTH + groups * (WIDTH + VALUE_WIDTH) + HEADS * VALUE_WIDTH
        assert sent == 2 * [numbers * 2 * 3 * 4 * (cp_size - 1) // cp_size]


def _bytes_sent() -> list[int]:
    """By this rank in a forward and in a backward of attention, of 2 rows and 3 positions a rank, to others."""
    group = CPGroup(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    positions_BS = torch.arange(3 * group.size).expand(2, -1)
    rows = SplitSequences(group, positions_BS, is_packed=False, num_targets=(0,) * group.size)
    module: Any = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, is_causal=True, config=None)
    query, key, value = (
        torch.randn(2, heads, 3, width, requires_grad=True)
        for heads, width in ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUE_WIDTH))
    )
    with counted_bytes() as forward, Forward(split=rows):
        out, _ = cp_attention("sdpa", module, query, key, value, None)
    assert out.shape == (2, 3, HEADS, VALUE_WIDTH)
    with counted_bytes() as backward:
        out.sum().backward()
    return [sum(forward), sum(backward)]


@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("full", 4), ("selective", 4)])
def test_all_to_alls_of_a_layer(ranks: RankPool, model: Path, mode: Checkpointing, again: int) -> None:
    """Four in forward, four in backward; and those of forward once more where a layer is recomputed."""
    layers = tiny_mixtral().config.num_hidden_layers
    for forward, backward in ranks.run(_all_to_alls, 2, model, replace(CASES["aux"], gradient_checkpointing=mode)):
        assert (forward, backward) == (4 * layers, (4 + again) * layers)


def _all_to_alls(path: Path, case: Case) -> tuple[int, int]:
    """This rank's all-to-alls in a forward and its backward, where no token is sent to experts."""
    topology = Topology(2, 1, "full", 2)
    model, mesh, _ = sharded_model(path, topology, case)
    (batch,) = my_batches(case, topology, dist.get_rank(), mesh.cp_group)
    with counted_bytes() as forward:
        loss = token_loss_sum(model.train(), batch)
    with counted_bytes() as backward:
        loss.backward()
    return len(forward), len(backward)


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """What this rank sends to others by each all-to-all."""
    sent: list[int] = []
    send = dist.all_to_all_single

    def counted(output: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        size = dist.get_world_size(kwargs["group"])
        sent.append(rows.nbytes * (size - 1) // size)
        return send(output, rows, *args, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counted):
        yield sent

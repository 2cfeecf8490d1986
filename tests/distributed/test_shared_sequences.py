"""Sequences that ranks share, by positions (cp) and by heads (tp): whole runs, refusals, and what is exchanged. That
figures are those of one process is in tests/parity."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from expertmesh.sharding.collectives.tensor_parallel import TPGroup
from expertmesh.sharding.topology import Topology
from expertmesh.training.attention.context_parallel_attention import cp_attention
from expertmesh.training.data.batch import SplitSequences
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.steps.micro_batch import token_loss_sum
from expertmesh.training.steps.step import compute_gradients
from expertmesh.training.tensor_parallel import regions
from tests.distributed.pool import RankPool
from tests.distributed.reference import in_full, my_batches, sharded_model
from tests.distributed.whole_runs import Runs, assert_equal_weights
from tests.families.configs import TEXT_IDS
from tests.parity.case import SAMPLES, Case, hf_model, random_samples
from tests.parity.compare import with_other_bits
from tests.rounding import near
from tests.tiny import tiny_mixtral

COMMON = (
    "--eval-ratio 0.2 --eval-steps 2 --generate-steps 3 --packing --max-seq-length 90 --global-batch-size 8 "
    "--per-device-train-batch-size 1 --learning-rate 1e-3 --lr-scheduler-type constant --router-z-loss-coef 0.01 "
    "--gradient-checkpointing selective --per-device-eval-batch-size 3 --generate-max-new-tokens 8 --check-replicas 2"
)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("--adapter lora --base-dtype nf4", marks=pytest.mark.release),
        pytest.param("--optim adamw_torch_8bit", marks=pytest.mark.release),
    ],
)
def test_a_run(runs: Runs, flags: str) -> None:
    """Packed, evaluated, asked, saved; and resumed by ranks that divide among more, positions too, or nothing."""
    runs = runs.of(num_key_value_heads=4)
    expected = runs(2, f"{COMMON} {flags} --ep-size 2 --max-steps 6", "whole")
    for steps, world_size, layout in (
        (2, 4, "--ep-size 2 --tp-size 2"),
        (3, 4, "--ep-size 4 --tp-size 4 --resume auto"),
        (4, 4, "--ep-size 2 --tp-size 2 --cp-size 2 --resume auto"),
        (5, 4, "--ep-size 4 --cp-size 4 --resume auto"),
        (6, 2, "--ep-size 1 --resume auto"),
    ):
        found = runs(world_size, f"{COMMON} {flags} {layout} --max-steps {steps} --save-steps 1", "divided")
    for key in ("loss", "eval_loss", "grad_norm", "z_loss", "tokens"):
        of_steps, wanted = ({line["step"]: line[key] for line in run.lines(key)} for run in (found, expected))
        assert {step: of_steps[step] for step in wanted} == near(wanted), key
    assert found.values("generations")[-1] == expected.values("generations")[-1]
    # an adapter's B begins at zero: some of its first gradients are noise, of which Adam's step takes the sign
    assert_equal_weights(found.weights, expected.weights, 1e-3 if "lora" in flags else 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_elastic(runs: Runs, axis: str) -> None:
    """Two ranks in place of four share a sequence by twos, as before; three do not, and are refused."""
    flags = f"--ep-size 2 --{axis}-size 2 --lr-scheduler-type constant --per-device-train-batch-size 2 --save-steps 1"
    runs(4, f"{flags} --ranks-per-node 2 --max-steps 1")
    elastic = f"{flags} --ranks-per-node 2 --max-steps 2 --resume auto --elastic"
    runs.refuses(3, elastic, f"--{axis}-size 2 does not divide the 3 ranks; use 1 or 3")
    found = runs(2, elastic)
    settings = yaml.safe_load((found.out / "config.yaml").read_text())
    assert (settings[f"{axis}_size"], settings["ep_size"], settings["global_batch_size"]) == (2, 2, 4)
    assert [line["step"] for line in found.lines("loss")] == [1, 2]
    assert found.values("tokens")[0] > 0


@pytest.mark.slow
def test_sizes_that_do_not_come_out_even(runs: Runs) -> None:
    more_heads = runs.of(num_key_value_heads=4)
    for model, world_size, flags, said in (
        (runs, 2, "--cp-size 4", "--cp-size 4 does not divide the 2 ranks; use 1 or 2"),
        (runs, 2, f"--cp-size {10**12}", f"--cp-size {10**12} does not divide the 2 ranks; use 1 or 2"),  # at once
        (
            runs,
            3,
            "--cp-size 3",
            "--cp-size 3 does not divide the 4 attention heads of this model's layers; use 1, 2 or 4",
        ),
        (more_heads, 2, "--tp-size 4", "--tp-size 4 does not divide the 2 ranks; use 1 or 2"),
        (more_heads, 2, "--tp-size 2 --cp-size 2", "make groups of 4 ranks, which do not divide the 2 ranks"),
        (more_heads, 2, "--tp-size 2 --dense-shard hybrid", "--tp-size 2 does not divide --ep-size 1"),
        (runs, 4, "--tp-size 4", "the 2 key and value heads of this model (num_key_value_heads); use 1 or 2"),
        (more_heads, 4, "--tp-size 4 --cp-size 2", "of this model's layers that a rank has at --tp-size 4"),
    ):
        assert not model.refuses(world_size, flags, said).out.exists()


QUERIES, GROUPS, WIDTH, VALUE_WIDTH = 8, 2, 24, 16


@pytest.mark.parametrize("cp_size", [2, 4])
def test_bytes_are_those_of_the_formula(ranks: RankPool, cp_size: int) -> None:
    """Queries, keys, values and output are each sent in forward and in backward, but for what stays on its rank. KV
    heads are replicated if there are fewer than ranks."""
    for sent in ranks.run(_bytes_sent, cp_size):
        groups = max(GROUPS, cp_size)
        numbers = QUERIES * WIDTH + groups * (WIDTH + VALUE_WIDTH) + QUERIES * VALUE_WIDTH
        assert sent == 2 * [numbers * 2 * 3 * 4 * (cp_size - 1) // cp_size]


def _bytes_sent() -> list[int]:
    """By this rank in a forward and in a backward of attention, of 2 rows and 3 positions a rank, to others."""
    group = CPGroup(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    positions_BS = torch.arange(3 * group.size).expand(2, -1)
    rows = SplitSequences(group, positions_BS, is_packed=False, num_targets=(0,) * group.size)
    module: Any = SimpleNamespace(num_key_value_groups=QUERIES // GROUPS, is_causal=True, config=None)
    query, key, value = (
        torch.randn(2, heads, 3, width, requires_grad=True)
        for heads, width in ((QUERIES, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUE_WIDTH))
    )
    with counted_bytes() as forward, Forward(split=rows):
        out, _ = cp_attention("sdpa", module, query, key, value, None)
    assert out.shape == (2, 3, QUERIES, VALUE_WIDTH)
    with counted_bytes() as backward:
        out.sum().backward()
    return [sum(forward), sum(backward)]


@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("full", 4), ("selective", 4)])
def test_all_to_alls_of_a_layer(ranks: RankPool, tiny_model: Path, mode: Any, again: int) -> None:
    """Four in forward, four in backward; and those of forward once more where a layer is recomputed."""
    layers = tiny_mixtral().config.num_hidden_layers
    case = Case(SAMPLES[:16], kernel="torch-grouped", gradient_checkpointing=mode)
    for forward, backward in ranks.run(_all_to_alls, 2, tiny_model, case):
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


TP_2 = Topology(2, 2, tp_size=2)
LORA = {"adapter": "lora"}
OF_TEXT = random_samples([9 + (5 * i) % 12 for i in range(8)], vocabulary=TEXT_IDS)


@pytest.mark.parametrize(
    ("family", "settings", "checkpointing", "more"),
    [
        ("mixtral", {}, "none", 1),
        # recomputation gathers it
        ("mixtral", {}, "full", 0),
        ("mixtral", {}, "selective", 0),
        # no weight needs it
        ("mixtral", {"freeze": ["attention"]}, "none", 0),
        ("mixtral", LORA | {"base_dtype": "nf4"}, "none", 1),
        # once for layers that are divided and projections that every rank computes alike; MLPs are regions too
        ("deepseek_v2", {}, "none", 1),
    ],
    ids=str,
)
def test_gathered_once_more(
    ranks: RankPool, tmp_path: Path, family: str, settings: dict[str, Any], checkpointing: Any, more: int
) -> None:
    """What a region has gathered is not kept for backward, but gathered where it is needed: no bit changes."""
    case = Case(OF_TEXT, family=family, settings=settings, gradient_checkpointing=checkpointing)
    hf_model(case).save_pretrained(tmp_path)
    for kept, ours in ranks.run(_figures, 2, tmp_path, case):
        (loss, grads, gathers, _), (our_loss, our_grads, our_gathers, regions) = kept, ours
        assert our_loss == loss
        assert with_other_bits(our_grads, grads) == []
        assert our_gathers - gathers == more * regions


def _figures(path: Path, case: Case) -> list[tuple[float, dict[str, Tensor], int, int]]:
    """With all positions kept, and without: loss, gradients, all-gathers, and how many regions have run."""
    figures = []
    for is_kept in (True, False):
        model, mesh, _ = sharded_model(path, TP_2, case)
        model.train()
        all_gather, sizes = TPGroup.all_gather, list[int]()

        def counting(group: TPGroup, x: Tensor, dim: int, plain: Any = all_gather, sizes: Any = sizes) -> Tensor:
            sizes.append(x.numel())
            gathered: Tensor = plain(group, x, dim)
            return gathered

        batches = my_batches(case, TP_2, dist.get_rank(), mesh.cp_group)
        with mock.patch.object(TPGroup, "all_gather", counting), ExitStack() as stack:
            if is_kept:
                stack.enter_context(mock.patch.object(regions, "is_kept_otherwise", return_value=True))
            result = compute_gradients(model, batches, LossWeights(0.0, 0.0))
        grads = in_full({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        number = len(model.tensor_parallel.regions) * len(batches)
        figures.append((result.loss, grads, len(sizes), number))
    return figures

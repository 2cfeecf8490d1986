"""GEMMs in fp8 for every parallel layout: the same but for what bf16 rounds, as without."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.kernels.fp8_casts import Scaled
from expertmesh.moe.linear import fp8 as fp8_linear
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.collectives.tensor_parallel import TPGroup
from expertmesh.sharding.topology import DenseShard, Topology
from expertmesh.training import engine, tensor_parallel
from expertmesh.training.model_setup.dense_precision import multiply_in_fp8
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, Figures, of_packed, ours, random_samples, reference
from tests.families.configs import TEXT_IDS, tiny_model
from tests.tiny import relative_error, save_model, tiny_config, tiny_mixtral

SAMPLES = random_samples([2 + (7 * i) % 12 for i in range(32)])
FP8 = Case(SAMPLES, z=0.01, kernel="fp8", compute_dtype=torch.bfloat16)
ACCUMULATED = Case(SAMPLES, z=0.01, kernel="fp8", compute_dtype=torch.bfloat16, accumulation=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8")
    save_model(path)
    return path


@pytest.fixture(scope="module")
def alone(ranks: RankPool, model: Path) -> Figures:
    figures: Figures = ranks.run(ours, 1, model, Topology(1, 1), FP8)[0]
    return figures


def test_near_fp32(alone: Figures) -> None:
    """And no nearer than fp8 is."""
    exact = reference(FP8)
    assert alone.losses == pytest.approx(exact.losses, rel=5e-3)
    assert 0.02 < _error(alone, exact) < 0.12
    assert all(grad.dtype == torch.float32 for grad in alone.grads.values())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("world_size", "ep_size", "dense_shard", "case"),
    [(2, 1, "full", FP8), (2, 2, "full", FP8), (4, 2, "full", FP8), (4, 2, "hybrid", ACCUMULATED)],
)
def test_arrangements(
    ranks: RankPool, model: Path, alone: Figures, world_size: int, ep_size: int, dense_shard: DenseShard, case: Case
) -> None:
    """Rows and weights are rounded by themselves, and of what is summed over rows, each number as it would be among
    other rows: scales are powers of two. What differs is where partial sums are rounded to bf16: a part in 2^8 of a
    gradient, 2.3e-3 of them all here, of bf16's own experts as well; steps that follow see rounded weights."""
    topology = Topology(world_size, ep_size, dense_shard)
    found = ranks.run(ours, world_size, model, topology, case)[0]
    assert found.losses[0] == pytest.approx(alone.losses[0], rel=2e-5)
    assert found.losses == pytest.approx(alone.losses, rel=3e-3)
    assert found.grad_norms[0] == pytest.approx(alone.grad_norms[0], rel=2e-3)
    assert _error(found, alone) < 5e-3


DENSE = Case(SAMPLES, z=0.01, compute_dtype=torch.bfloat16, settings={"dense_precision": "fp8"})


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("world_size", "ep_size", "dense_shard", "checkpointing"), [(2, 2, "full", "selective"), (4, 2, "hybrid", "full")]
)
def test_dense_gemms(
    ranks: RankPool, model: Path, world_size: int, ep_size: int, dense_shard: DenseShard, checkpointing: Any
) -> None:
    """Near fp32, but that rounded hidden states choose other experts for a few tokens; and the same for every layout,
    as above."""
    (alone,) = ranks.run(ours, 1, model, Topology(1, 1), DENSE)
    exact = reference(replace(DENSE, settings={}))
    assert alone.losses == pytest.approx(exact.losses, rel=5e-3)
    assert 0.05 < _error(alone, exact) < 0.3
    case = replace(DENSE, gradient_checkpointing=checkpointing)
    found = ranks.run(ours, world_size, model, Topology(world_size, ep_size, dense_shard), case)[0]
    assert found.losses[0] == pytest.approx(alone.losses[0], rel=2e-5)
    assert found.losses == pytest.approx(alone.losses, rel=3e-3)
    assert _error(found, alone) < 5e-3


@pytest.mark.slow
def test_dense_gemms_beside_adapters(ranks: RankPool, model: Path) -> None:
    case = replace(DENSE, settings={"dense_precision": "fp8", "adapter": "lora", "lora_rank": 4})
    (alone,) = ranks.run(ours, 1, model, Topology(1, 1), case)
    (in_bf16,) = ranks.run(
        ours, 1, model, Topology(1, 1), replace(case, settings=case.settings | {"dense_precision": "same"})
    )
    assert alone.losses == pytest.approx(in_bf16.losses, rel=5e-3)
    assert 0.02 < _error(alone, in_bf16) < 0.3
    found = ranks.run(ours, 4, model, Topology(4, 2, "hybrid"), case)[0]
    assert found.losses[0] == pytest.approx(alone.losses[0], rel=2e-5)
    assert _error(found, alone) < 5e-3


HEADS: dict[str, Any] = {"num_key_value_heads": 4}
# so few tokens that hardly a value is so near the middle of two of fp8's that the order of sums decides
DIVIDED = replace(DENSE, samples=SAMPLES[:4], accumulation=2, changes=HEADS, steps=1)


@pytest.fixture(scope="module")
def unlike_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose latter heads' values are so small, and the weights they are multiplied by so large, that fp8 rounds
    them by the scales of the former heads: as by themselves they would not be."""
    path = tmp_path_factory.mktemp("unlike")
    model = tiny_mixtral(**HEADS)
    for layer in model.model.layers:
        attention: Any = layer.self_attn
        attention.v_proj.weight.data[16:] *= 2.0**-16
        attention.o_proj.weight.data[:, 16:] *= 2.0**16
    model.save_pretrained(path)
    return path


def exactly(path: Path, topology: Topology, case: Case, without: str = "") -> Figures | None:
    """The figures of a model in fp32 whose dense matmuls round operands to fp8, and nothing else.

    Args:
        without: "scales apart": ranks do not agree on scales. "sums": what they compute alike rounds each one's summand
            of a gradient.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(engine, "compute_dtype", return_value=torch.float32))
        stack.enter_context(mock.patch.object(fp8_linear, "_is_rounded", lambda x: x.numel() > 0))
        stack.enter_context(mock.patch.object(fp8_linear, "_multiply", _multiply_in_fp32))
        if without == "scales apart":
            stack.enter_context(mock.patch.object(TPGroup, "all_reduce_max", lambda group, x: x))
        if without == "sums":
            stack.enter_context(mock.patch.object(tensor_parallel._Alike, "enter", return_value=None))
        return ours(path, topology, case)


def _multiply_in_fp32(a: Scaled, b: Scaled) -> torch.Tensor:
    a_wide, b_wide = (each.codes.float() * each.scales.unsqueeze(1) for each in (a, b))
    return a_wide @ b_wide.t()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp 2", "tp 2 x cp 2", "tp 2, lora"])
def test_divided_dense_gemms(ranks: RankPool, unlike_heads: Path, name: str) -> None:
    """Ranks round what one process rounds; what differs is the order of sums. By scales of a rank's own the figures
    would be others."""
    layout = Topology(4, 4, cp_size=2, tp_size=2) if "cp" in name else Topology(2, 1, tp_size=2)
    case = replace(DIVIDED, settings=DIVIDED.settings | ({"adapter": "lora"} if "lora" in name else {}))
    (alone,) = ranks.run(exactly, 1, unlike_heads, Topology(1, 1), case)
    found = ranks.run(exactly, layout.world_size, unlike_heads, layout, case)[0]
    assert_equal(found, alone)
    apart = ranks.run(exactly, layout.world_size, unlike_heads, layout, case, "scales apart")[0]
    assert _error(apart, alone) > 0.1


@pytest.mark.slow
def test_dense_gemms_that_ranks_compute_alike(ranks: RankPool, tmp_path: Path) -> None:
    """Attention by way of low ranks, whose first projections are not divided. To round each rank's summand of a
    gradient would be another result."""
    widths = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
    changes = dict.fromkeys(widths, 16) | {"intermediate_size": 64, "moe_intermediate_size": 32}
    samples = random_samples([2 + (7 * i) % 12 for i in range(4)], TEXT_IDS)
    case = replace(DIVIDED, samples=samples, z=0.0, family="deepseek_v2", changes=changes)
    tiny_model(case.family, seed=1, **changes).save_pretrained(tmp_path)
    (alone,) = ranks.run(exactly, 1, tmp_path, Topology(1, 1), case)
    found, other = (
        ranks.run(exactly, 2, tmp_path, Topology(2, 1, tp_size=2), case, without)[0] for without in ("", "sums")
    )
    assert found.losses == pytest.approx(alone.losses, rel=1e-6)
    # where no value rounded the other way has been multiplied on from yet
    last = {name: grad for name, grad in alone.grads.items() if name.startswith("model.layers.2.")}
    assert max(relative_error(found.grads[name], grad) for name, grad in last.items()) < 1e-5
    assert max(relative_error(other.grads[name], grad) for name, grad in last.items()) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("cp_size", [1, 2])
def test_dense_gemms_of_samples_one_by_one(ranks: RankPool, tmp_path: Path, cp_size: int) -> None:
    """Of numbers of rows that the ranks do not divide."""
    widths = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "index_head_dim")
    changes = dict.fromkeys(widths, 16) | {"intermediate_size": 64, "moe_intermediate_size": 32}
    settings = {"packing": True, "dense_precision": "fp8"}
    samples = random_samples([13, 4, 5, 16, 11], TEXT_IDS)
    case = Case(samples, family="deepseek_v32", compute_dtype=torch.bfloat16, settings=settings, changes=changes)
    tiny_model(case.family, seed=1, **changes).save_pretrained(tmp_path)
    ((loss, norms),) = ranks.run(_norms_of_packed, 1, tmp_path, Topology(1, 1), case)
    topology = Topology(2 * cp_size, cp_size, tp_size=2, cp_size=cp_size)
    found, found_norms = ranks.run(_norms_of_packed, topology.world_size, tmp_path, topology, case)[0]
    assert found == pytest.approx(loss, rel=5e-3)
    assert found_norms.keys() == norms.keys()
    floor = 0.02 * max(norms.values())
    assert found_norms == pytest.approx(norms, rel=0.2, abs=floor)


def _norms_of_packed(path: Path, topology: Topology, case: Case) -> tuple[float, dict[str, float]]:
    """The loss of packed samples, and the norm of each gradient."""
    loss, grads = of_packed(path, topology, case)
    return loss, {name: float(grad.norm()) for name, grad in grads.items()}


def test_parts_that_fp8_does_not_take() -> None:
    model = build_model(tiny_config(**HEADS), "eager")
    multiply_in_fp8(model, "cpu")
    with pytest.raises(ExpertMeshError, match=r"--tp-size 4 leaves each rank 8 of the 32 rows of \S+; use a smaller"):
        tensor_parallel.apply_tensor_parallel(model, 4)


def assert_equal(found: Figures, expected: Figures) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    assert found.grads.keys() == expected.grads.keys()
    floor = 1e-6 * max(float(grad.norm()) for grad in expected.grads.values())
    assert max(relative_error(found.grads[name], grad, floor) for name, grad in expected.grads.items()) < 1e-5


def _error(found: Figures, expected: Figures) -> float:
    """Relative error of the first step's gradients as one vector."""
    assert found.grads.keys() == expected.grads.keys()
    mine, theirs = (torch.cat([of.grads[name].flatten() for name in expected.grads]) for of in (found, expected))
    return relative_error(mine, theirs)

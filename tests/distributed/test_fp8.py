"""GEMMs in fp8: near what is computed without; and of dense layers that ranks divide, rounded as in one process."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.kernels import fp8_casts
from expertmesh.moe.kernels.fp8_casts import Scaled
from expertmesh.moe.linear import fp8 as fp8_linear
from expertmesh.moe.linear import linear
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.collectives.tensor_parallel import TPGroup
from expertmesh.sharding.topology import Topology
from expertmesh.training.engine import assembly
from expertmesh.training.model_setup.dense_precision import multiply_in_fp8
from expertmesh.training.tensor_parallel.divide import apply_tensor_parallel
from tests.distributed import reference as figures_of
from tests.distributed.pool import RankPool
from tests.distributed.reference import ours
from tests.families.configs import TEXT_IDS, tiny_model
from tests.in_double import InDouble
from tests.parity.case import SAMPLES, Case, Figures, random_samples
from tests.parity.compare import Tolerance, assert_same, first_difference
from tests.parity.kept import expected
from tests.parity.rows import Row, topology_of
from tests.parity.runner import Runner
from tests.tiny import relative_error, tiny_config, tiny_mixtral

EXPERTS = Case(SAMPLES, z=0.01, kernel="fp8", compute_dtype=torch.bfloat16)
DENSE = Case(SAMPLES, z=0.01, compute_dtype=torch.bfloat16, settings={"dense_precision": "fp8"})
ADAPTERS: dict[str, Any] = {"adapter": "lora", "lora_rank": 4}


@pytest.mark.parametrize(
    ("case", "exact", "least", "most"),
    [
        (EXPERTS, {}, 0.02, 0.12),
        # rounded hidden states choose other experts for a few tokens
        (DENSE, {}, 0.05, 0.3),
        pytest.param(replace(DENSE, settings=DENSE.settings | ADAPTERS), ADAPTERS, 0.02, 0.3, marks=pytest.mark.slow),
    ],
    ids=["experts", "dense", "dense beside adapters"],
)
def test_near_what_is_exact(runner: Runner, case: Case, exact: dict[str, Any], least: float, most: float) -> None:
    """And no nearer than fp8 is. tests/parity compares layouts."""
    found = runner.run(Row("", case, Topology(1, 1)))
    other = replace(case, settings=exact)
    wanted = runner.run(Row("", other, Topology(1, 1))) if exact else expected(other)
    assert found.losses == pytest.approx(wanted.losses, rel=5e-3)
    assert least < _error(found, wanted) < most
    assert all(grad.dtype == torch.float32 for grad in found.grads.values())


HEADS: dict[str, Any] = {"num_key_value_heads": 4}
DIVIDED = replace(DENSE, samples=SAMPLES[:4], accumulation=2, changes=HEADS, steps=1)
IN_ORDER_OF_SUMS = Tolerance(weights=torch.inf)


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
    """The figures of a model in fp64 whose dense matmuls round operands to fp8, and nothing else. Sums in another order
    then differ by some 2^-50, so that none of them lies on the other side of the middle of two of fp8's values.

    Args:
        without: "scales apart": ranks do not agree on scales. "sums": what they compute alike rounds each one's summand
            of a gradient.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(assembly, "compute_dtype", return_value=torch.float64))
        stack.enter_context(mock.patch.object(figures_of, "train_step", in_double(figures_of.train_step)))
        for module, name in AS_THEY_ARE:
            stack.enter_context(mock.patch.object(module, name, as_it_is(getattr(module, name))))
        stack.enter_context(mock.patch("expertmesh.moe.linear.linear.suits_rows", lambda x: x.numel() > 0))
        stack.enter_context(mock.patch.object(fp8_linear, "_multiply", _multiply_in_double))
        if without == "scales apart":
            stack.enter_context(mock.patch.object(TPGroup, "all_reduce_max", lambda group, x: x))
        if without == "sums":
            stack.enter_context(mock.patch.object(linear, "fp8_product", _each_summand))
        return ours(path, topology, case)


def in_double(train_step: Any) -> Any:
    def call(*args: Any, at: Any, **kwargs: Any) -> Any:
        with InDouble():
            return train_step(*args, at=as_it_is(at), **kwargs)

    return call


def as_it_is(function: Any) -> Any:
    """In the dtypes that it is written in."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


AS_THEY_ARE: list[tuple[Any, str]] = [
    # scales are the bits of fp32; what FSDP gathers has the dtypes of parameters
    *((fp8_casts, name) for name in ("plain_rows", "plain_runs", "largest_of_rows")),
    (fp8_linear, "largest_of_rows"),
    *((_fsdp_param_group, f"foreach_{name}") for name in ("all_gather", "all_gather_copy_out", "reduce")),
]


def _each_summand(x: torch.Tensor, weight: torch.Tensor, is_transposed: bool, division: Any) -> torch.Tensor:
    is_alike = division is not None and division.of == "nothing"
    return fp8_linear.fp8_product(x, weight, is_transposed, None if is_alike else division)


def _multiply_in_double(a: Scaled, b: Scaled) -> torch.Tensor:
    a_wide, b_wide = (each.codes.double() * each.scales.double().unsqueeze(1) for each in (a, b))
    return a_wide @ b_wide.t()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "adapters"),
    [(Topology(2, 1, tp_size=2), ADAPTERS), (Topology(4, 4, cp_size=2, tp_size=2), {})],
    ids=["tp 2, adapters", "tp 2 x cp 2"],
)
def test_divided(ranks: RankPool, unlike_heads: Path, layout: Topology, adapters: dict[str, Any]) -> None:
    """Ranks round what one process rounds; what differs is the order of sums. By scales of a rank's own the figures
    would be others."""
    case = replace(DIVIDED, settings=DIVIDED.settings | adapters)
    (alone,) = ranks.run(exactly, 1, unlike_heads, Topology(1, 1), case)
    assert_same(ranks.run(exactly, layout.world_size, unlike_heads, layout, case)[0], alone, IN_ORDER_OF_SUMS)
    assert _error(ranks.run(exactly, layout.world_size, unlike_heads, layout, case, "scales apart")[0], alone) > 0.1


LATENT: dict[str, Any] = dict.fromkeys(
    ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), 16
) | {"intermediate_size": 64, "moe_intermediate_size": 32}
"""Attention by way of low ranks, whose first projections are not divided, in widths that fp8 takes."""


@pytest.mark.slow
def test_what_ranks_compute_alike(ranks: RankPool, tmp_path: Path) -> None:
    """To round each rank's summand of a gradient would be another result."""
    samples = random_samples([2 + (7 * i) % 12 for i in range(4)], TEXT_IDS)
    case = replace(DIVIDED, samples=samples, z=0.0, family="deepseek_v2", changes=LATENT)
    tiny_model(case.family, seed=1, **LATENT).save_pretrained(tmp_path)
    (alone,) = ranks.run(exactly, 1, tmp_path, Topology(1, 1), case)
    found, other = (
        ranks.run(exactly, 2, tmp_path, Topology(2, 1, tp_size=2), case, without)[0] for without in ("", "sums")
    )
    assert_same(found, alone, IN_ORDER_OF_SUMS)
    assert first_difference(other, alone, replace(IN_ORDER_OF_SUMS, norms=torch.inf, grads=1e-2)) is not None


@pytest.mark.slow
def test_samples_one_by_one(runner: Runner) -> None:
    """Of numbers of rows that the ranks do not divide."""
    changes, settings = LATENT | {"index_head_dim": 16}, {"packing": True, "dense_precision": "fp8"}
    samples = random_samples([13, 4, 5, 16, 11], TEXT_IDS)
    case = Case(
        samples, family="deepseek_v32", compute_dtype=torch.bfloat16, settings=settings, changes=changes, steps=1
    )
    alone, *others = (runner.run(Row("", case, topology_of(layout))) for layout in ("1", "2 tp 2", "4 ep 2 cp 2 tp 2"))
    norms = {name: float(grad.norm()) for name, grad in alone.grads.items()}
    for found in others:
        assert found.losses == pytest.approx(alone.losses, rel=5e-3)
        found_norms = {name: float(grad.norm()) for name, grad in found.grads.items()}
        assert found_norms == pytest.approx(norms, rel=0.2, abs=0.02 * max(norms.values()))


def test_parts_that_fp8_does_not_take() -> None:
    model = build_model(tiny_config(**HEADS), "eager")
    multiply_in_fp8(model, "cpu")
    with pytest.raises(ExpertMeshError, match=r"--tp-size 4 leaves each rank 8 of the 32 rows of \S+; use a smaller"):
        apply_tensor_parallel(model, 4)


def _error(found: Figures, wanted: Figures) -> float:
    """Relative error of the first step's gradients as one vector."""
    assert found.grads.keys() == wanted.grads.keys()
    mine, theirs = (torch.cat([of.grads[name].flatten() for name in wanted.grads]) for of in (found, wanted))
    return relative_error(mine, theirs)

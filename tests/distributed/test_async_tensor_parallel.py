"""--async-tp by torch's operators with a stand-in for NVLink: the same figures, and which matmuls run beside which
exchange."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symm_mem

from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.torch_private import _resolve_process_group
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.collectives.tensor_parallel import TPGroup
from expertmesh.sharding.topology import Topology
from expertmesh.training.engine import assembly
from expertmesh.training.engine.assembly import assemble
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.steps.step import compute_gradients
from expertmesh.training.tensor_parallel import overlap
from expertmesh.training.tensor_parallel.overlap import SymmetricMemory, check_async, symmetric_memory
from tests.distributed.pool import RankPool
from tests.distributed.reference import config_of, in_full, my_batches, sharded_model
from tests.families.configs import TEXT_IDS, tiny_model
from tests.parity.case import Case, random_samples
from tests.rounding import OTHER_ORDER, gradient_errors, near

SAMPLES = random_samples([9 + (5 * i) % 12 for i in range(8)], vocabulary=TEXT_IDS)
TP_2 = Topology(2, 2, tp_size=2)
FORWARD, BACKWARD = ["gather x3", "scatter"], ["gather x1", "scatter"]
"""Mixtral's attention: three projections of what is gathered, one whose results are scattered. In backward the gradient
of the latter is gathered, and one matmul for the three gives what is scattered."""


class OnGloo(SymmetricMemory):
    """torch's own operators, but for how they move bytes: blocking here, over gloo."""

    def __init__(self, group: TPGroup):
        assert group.ranks is not None
        super().__init__(group.ranks)
        self.calls = list[str]()
        _operators_on_cpus()

    def gather_multiply(self, x: Tensor, weights_KN: Sequence[Tensor], dim: int) -> tuple[Tensor, list[Tensor]]:
        self.calls.append(f"gather x{len(weights_KN)}")
        return super().gather_multiply(x, weights_KN, dim)

    def multiply_scatter(self, x: Tensor, weight_KN: Tensor, dim: int) -> Tensor:
        self.calls.append("scatter")
        return super().multiply_scatter(x, weight_KN, dim)


@cache
def _operators_on_cpus() -> torch.library.Library:
    """Those that torch declares for CUDA, for CPUs too, as long as what is returned lives."""
    module: Any = symm_mem
    module._pipelined_all_gather_and_consume = _all_gather_and_consume
    module._pipelined_produce_and_all2all = _produce_and_all_to_all
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", module._fused_all_gather_matmul, "CPU")
    library.impl("fused_matmul_reduce_scatter", module._fused_matmul_reduce_scatter, "CPU")
    return library


def _all_gather_and_consume(
    shard: Tensor, consume: Callable[[Tensor, int], None], gathered: Tensor, group_name: Any, needed: bool = True
) -> None:
    """What the docstring of torch's function of this name says it does."""
    group = _resolve_process_group(group_name)
    dist.all_gather_into_tensor(gathered, shard.contiguous(), group=group)
    for rank, part in enumerate(gathered.chunk(group.size())):
        consume(part, rank)


def _produce_and_all_to_all(
    produce: Callable[[int, Tensor], None], output: Tensor, group_name: Any, out_chunk_dim: int = 0
) -> None:
    """What the docstring of torch's function of this name says it does."""
    assert out_chunk_dim == 0
    group = _resolve_process_group(group_name)
    sent = torch.empty_like(output)
    for rank, part in enumerate(sent.chunk(group.size())):
        produce(rank, part)
    dist.all_to_all_single(output, sent, group=group)


def adapted(*targets: str, base_dtype: str = "fp32") -> dict[str, Any]:
    return {"adapter": "lora", "lora_targets": [*targets], "base_dtype": base_dtype}


@pytest.mark.parametrize(
    ("family", "settings", "checkpointing", "calls"),
    [
        ("mixtral", {}, "none", 3 * FORWARD + 3 * BACKWARD),
        pytest.param("mixtral", {}, "full", 3 * FORWARD + 3 * (FORWARD + BACKWARD), marks=pytest.mark.slow),
        # projections by way of low ranks, which every rank computes alike; MLPs that are divided too
        pytest.param("deepseek_v2", {}, "none", None, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", {}, "full", None, marks=pytest.mark.slow),
        # two projections that only multiply, beside one that has an adapter
        ("mixtral", adapted("q_proj"), "none", 3 * ["gather x2", "scatter"]),
        # adapters where no rank divides anything
        pytest.param("mixtral", adapted("experts"), "none", 3 * FORWARD, marks=pytest.mark.slow),
        pytest.param("mixtral", adapted("q_proj", "k_proj", "v_proj"), "none", 3 * ["scatter"], marks=pytest.mark.slow),
        # codes of a quantized weight are no matrix
        ("mixtral", adapted("q_proj", base_dtype="nf4"), "none", []),
    ],
    ids=["mixtral", "recomputed", "low ranks", "MLPs", "some adapted", "none adapted", "first adapted", "quantized"],
)
def test_the_same_in_parts(
    ranks: RankPool, tmp_path: Path, family: str, settings: dict[str, Any], checkpointing: Any, calls: list[str] | None
) -> None:
    """What only multiplies is overlapped, and nothing else."""
    tiny_model(family, seed=1).save_pretrained(tmp_path)
    case = Case(SAMPLES, family=family, settings=settings, gradient_checkpointing=checkpointing)
    (loss, grads, none), (our_loss, our_grads, found) = ranks.run(_figures, 2, tmp_path, case)[0]
    assert our_loss == near(loss)
    errors = gradient_errors(our_grads, grads)
    assert max(errors.values()) <= OTHER_ORDER, errors
    assert not none
    if calls is None:
        assert found, "never silently inactive"
    else:
        assert found[: len(calls)] == calls
        assert settings or found == calls
        assert bool(found) == bool(calls)


def _figures(path: Path, case: Case) -> list[tuple[float, dict[str, Tensor], list[str]]]:
    figures = []
    for is_async in (False, True):
        model, mesh, _ = sharded_model(path, TP_2, case)
        model.train()
        operators = OnGloo(mesh.cp_group.tp)
        if is_async:
            model.tensor_parallel.operators = operators
        batches = my_batches(case, TP_2, dist.get_rank(), mesh.cp_group)
        result = compute_gradients(model, batches, LossWeights(0.0, 0.0))
        grads = in_full({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        figures.append((result.loss, grads, operators.calls))
    return figures


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("mixtral", {}, "exchanges overlap with GEMMs (async): at the beginning of 3 of 3 regions, at the end of 3"),
        ("mixtral", adapted("experts"), "(async): at the beginning of 3 of 3 regions, at the end of 3"),
        (
            "mixtral",
            adapted("q_proj", "k_proj", "v_proj"),
            "(async): at the beginning of 0 of 3 regions, at the end of 3",
        ),
        ("mixtral", adapted("o_proj"), "(async): at the beginning of 3 of 3 regions, at the end of 0"),
        ("mixtral", adapted("attention"), None),
        ("mixtral", adapted("q_proj", base_dtype="nf4"), None),
        # its first layer has a dense MLP
        ("qwen2_moe", adapted("attention"), "at the beginning of 1 of 4 regions, at the end of 1"),
        ("deepseek_v2", {}, "of 3 of 6 regions, at the end of 6; 3 begin with layers that are not sharded"),
    ],
    ids=str,
)
def test_the_first_lines_say_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, settings: dict[str, Any], said: str | None
) -> None:
    monkeypatch.setattr(assembly, "check_async", lambda device_type: None)
    tiny_model(family, seed=1).save_pretrained(tmp_path)
    config = replace(config_of(Case(SAMPLES, family=family, settings=settings), TP_2), async_tp=True)
    if said is None:
        with pytest.raises(ExpertMeshError, match="--async-tp: none of the 3 regions that --tp-size 2 divides begins"):
            assemble(config, open_source(tmp_path), "cpu")
        return
    lines = assemble(config, open_source(tmp_path), "cpu").trained
    (line,) = [line for line in lines if "(async)" in line]
    assert said in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_refused_without_a_gpu() -> None:
    with pytest.raises(ExpertMeshError, match="--async-tp: needs GPUs connected by NVLink"):
        check_async("cpu")


def _links(visible: list[list[str]], used: list[int], linked: bool) -> str:
    """What is said of the GPUs of this rank's tensor-parallel group.

    Args:
        visible: the GPUs that each rank sees.
        used: by each rank, among these.
        linked: whether NVLink connects all of them.
    """
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    sees = visible[rank]
    matrix = [[int(linked and a != b) for b in sees] for a in sees]
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=len(sees)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=sees[index])),
        mock.patch.object(
            overlap._distributed_c10d,
            "_detect_dma_connectivity",
            return_value=SimpleNamespace(matrix=matrix),
            create=True,
        ),
        mock.patch.object(overlap, "enable_symm_mem_for_group"),
    ):
        try:
            symmetric_memory(TPGroup(2, rank, world), torch.device("cuda", used[rank]))
        except ExpertMeshError as error:
            return str(error)
    return "connected"


@pytest.mark.parametrize(
    ("visible", "used", "linked", "said"),
    [
        ([["a", "b"], ["a", "b"]], [0, 1], True, "connected"),
        ([["a", "b"], ["b", "a"]], [0, 0], True, "connected"),
        ([["a", "b"], ["a", "b"]], [0, 1], False, "NVLink does not connect GPUs"),
        # a launcher that shows each process its own GPU
        ([["a"], ["b"]], [0, 0], True, "does not see GPU"),
        ([["a", "b"], ["c", "d"]], [0, 1], True, "does not see GPU"),
        ([["a", "b"], ["a", "b"]], [1, 1], True, "share a GPU"),
    ],
)
def test_gpus_are_told_apart_whatever_a_process_sees(
    ranks: RankPool, visible: list[list[str]], used: list[int], linked: bool, said: str
) -> None:
    for found in ranks.run(_links, 2, visible, used, linked):
        assert said in found

"""What is claimed to run side by side does: all-to-alls in chunks beside expert GEMMs, shared experts beside both, and
gathers of the next layer's parameters beside this one. That the bits of a step stay is in tests/parity."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh.moe.dispatch.alltoall import _places, part_sizes
from expertmesh.moe.dispatch.exchange import Exchange
from expertmesh.moe.experts.expert_mlp import ExpertMLP
from expertmesh.moe.experts.model_layers import decoder_layers, moe_layers
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.parallelize.parallelize import prefetch_layers
from expertmesh.sharding.topology import Topology
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.steps.micro_batch import token_loss_sum
from expertmesh.training.steps.step import compute_gradients
from tests.distributed.pool import RankPool
from tests.distributed.reference import local_grads, my_batches, sharded_model
from tests.parity.case import Case, hf_model, random_samples
from tests.parity.compare import with_other_bits

SAMPLES = random_samples([25, 19, 27, 33, 28, 24, 26, 31])
CASE = Case(SAMPLES, kernel="torch-grouped", changes={"num_local_experts": 6})
EP_2 = Topology(2, 2)


def test_what_runs_side_by_side(ranks: RankPool, tmp_path: Path) -> None:
    """While a part's experts compute, the next part's rows travel, and the results of the one before: in forward and in
    backward, in the same order on all ranks."""
    hf_model(CASE, num_hidden_layers=1).save_pretrained(tmp_path)
    first, second = ranks.run(_order, 2, tmp_path, replace(CASE, settings={"overlap_chunks": 3}))
    assert first == second
    forward, backward = first
    assert forward == [
        *("send 0", "send 1", "send 2"),
        *("wait for 0", "experts", "return 0", "wait for 1", "experts", "return 1"),
        *("wait for 2", "experts", "return 2", "wait for all"),
    ]
    assert backward == [
        *("send 2", "send 1", "send 0"),
        *("wait for 2", "return 2", "wait for 1", "return 1", "wait for 0", "return 0", "wait for all"),
    ]


def _order(path: Path, case: Case) -> tuple[list[str], list[str]]:
    model, _, _ = sharded_model(path, EP_2, case)
    (batch,) = my_batches(case, EP_2, dist.get_rank())
    with _watching() as forward:
        loss = token_loss_sum(model.train(), batch)
    with _watching() as backward:
        loss.backward()
    return forward, backward


@contextmanager
def _watching() -> Iterator[list[str]]:
    seen: list[str] = []

    def told(owner: Any, method: str, name: str) -> Any:
        original = getattr(owner, method)

        def tell(self: Any, *args: Any) -> Any:
            seen.append(name.format(*args))
            return original(self, *args)

        return mock.patch.object(owner, method, tell)

    with (
        told(Exchange, "begin_sending", "send {0}"),
        told(Exchange, "wait_for_sent", "wait for {0}"),
        told(Exchange, "begin_returning", "return {0}"),
        told(Exchange, "wait_for_returned", "wait for all"),
        told(ExpertMLP, "_compute", "experts"),
    ):
        yield seen


@pytest.mark.parametrize(
    ("num_experts", "parts", "sizes"), [(4, 1, [4]), (4, 2, [2, 2]), (5, 2, [3, 2]), (3, 3, [1] * 3)]
)
def test_parts(num_experts: int, parts: int, sizes: list[int]) -> None:
    assert part_sizes(num_experts, parts) == sizes
    places = _places(2 * num_experts, 2, sizes)
    # each expert's part, rank and number, by their places
    order = sorted(range(2 * num_experts), key=lambda expert: int(places[expert]))
    keys = []
    for expert in order:
        rank, local = divmod(expert, num_experts)
        part = next(i for i in range(parts) if local < sum(sizes[: i + 1]))
        keys.append((part, rank, local))
    assert keys == sorted(keys)
    assert int(places[-1]) == 2 * num_experts


def test_more_parts_than_experts(ranks: RankPool, tmp_path: Path) -> None:
    hf_model(CASE).save_pretrained(tmp_path)
    for errors in ranks.run(_refused, 2, tmp_path):
        assert errors == [
            "--overlap-chunks 4: at --ep-size 2 a rank has 3 of 6 experts, and a chunk needs one expert or "
            "more; use at most 3",
            "--keep-expert-products 9: this model has 2 MoE layers; use at most 2",
        ]


def _refused(path: Path) -> list[str]:
    errors = []
    for settings in ({"overlap_chunks": 4}, {"keep_expert_products": 9}):
        with pytest.raises(ExpertMeshError) as refused:
            sharded_model(path, EP_2, replace(CASE, settings=settings, gradient_checkpointing="selective"))
        errors.append(str(refused.value))
    return errors


def test_shared_experts_are_computed_while_rows_travel(ranks: RankPool, tmp_path: Path) -> None:
    """Where a block calls them after the others; once, and with the bits that they have after these."""
    case = Case(SAMPLES, family="deepseek_v3", gradient_checkpointing="selective")
    hf_model(case).save_pretrained(tmp_path)
    for (order, beside, is_held), (plain_order, after, _) in ranks.run(_shared, 2, tmp_path, case):
        assert order == ["send 0", "shared", "wait for 0", "experts", "return 0", "wait for all"] * 2
        assert plain_order == ["send 0", "wait for 0", "experts", "return 0", "wait for all", "shared"] * 2
        assert with_other_bits(beside, after) == []
        assert is_held
        assert not any(is_held)


def _shared(path: Path, case: Case) -> list[tuple[list[str], dict[str, Tensor], list[bool]]]:
    """The order of a forward, loss and gradients, and of each computation of shared experts, again in backward too,
    whether its result is there after it."""
    found = []
    for is_beside in (True, False):
        model, _, _ = sharded_model(path, EP_2, case)
        shared = []
        results: list[weakref.ref[Tensor]] = []
        for layer in moe_layers(model):
            assert layer.beside is not None
            layer.beside.module.register_forward_hook(lambda module, args, out, to=results: to.append(weakref.ref(out)))
            shared.append(next(part for part in layer.beside.module.modules() if isinstance(part, torch.nn.Linear)))
            layer.beside = layer.beside if is_beside else None
        (batch,) = my_batches(case, EP_2, dist.get_rank())
        with _watching() as seen:
            for linear in shared:
                linear.register_forward_pre_hook(lambda module, args, seen=seen: seen.append("shared"))
            loss = token_loss_sum(model.train(), batch)
            order = list(seen)
        loss.backward()
        found.append(
            (order, {"loss": loss.detach(), **local_grads(model)}, [result() is not None for result in results])
        )
    return found


LETTERS = {"expertmesh::all_gather": "G", "aten::topk": "R", "expertmesh::reduce_scatter": "S"}


class Order(TorchDispatchMode):
    """In the order of their calls: gathers of parameters (G), routings (R), reductions of gradients (S)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = ""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += LETTERS.get(operator.name(), "")
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("topology", "checkpointing"),
    [pytest.param(Topology(4, 1), "none", marks=pytest.mark.slow), (Topology(4, 2, "hybrid"), "full")],
    ids=str,
)
def test_prefetching(ranks: RankPool, tmp_path: Path, topology: Topology, checkpointing: Any) -> None:
    """The next layer's parameters are gathered before this one computes, and no bit of a gradient changes."""
    layers = 4
    case = Case(SAMPLES, z=0.01, gradient_checkpointing=checkpointing)
    hf_model(case, num_hidden_layers=layers).save_pretrained(tmp_path)
    for (calls, grads), (calls_ahead, grads_ahead) in ranks.run(_prefetched, 4, tmp_path, topology, case):
        (forward, backward), (forward_ahead, backward_ahead) = (
            (each[: 3 * layers + 1], each[3 * layers + 1 :]) for each in (calls, calls_ahead)
        )
        # the root, then each layer, and its experts once it has routed; ahead, two layers before the first has routed
        assert forward == "G" + "GRG" * layers
        assert forward_ahead == "GGGGGR" + "GGR" * (layers - 2) + "R"
        # the last two layers before anything is computed
        assert backward_ahead.startswith("GGGG")
        assert not backward.startswith("GGGG")
        assert Counter(backward_ahead) == Counter(backward)
        assert with_other_bits(grads_ahead, grads) == []


def _prefetched(path: Path, topology: Topology, case: Case) -> list[tuple[str, dict[str, Tensor]]]:
    """Without and with."""
    found = []
    for is_ahead in (False, True):
        model, _, _ = sharded_model(path, topology, case)
        if is_ahead:
            prefetch_layers(model, decoder_layers(model))
        with Order() as order:
            compute_gradients(model.train(), my_batches(case, topology, dist.get_rank()), LossWeights(0.0, case.z))
        found.append((order.calls, local_grads(model)))
    return found

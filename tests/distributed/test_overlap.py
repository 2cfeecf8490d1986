"""Chunked all-to-all overlap with expert GEMMs, and GEMM outputs that selective checkpointing keeps: the bits of
a step stay, and what is claimed to run side by side does."""

import weakref
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

from expertmesh.moe.dispatch.alltoall import _places, part_sizes
from expertmesh.moe.dispatch.exchange import Exchange
from expertmesh.moe.experts.expert_mlp import ExpertMLP
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from expertmesh.training.micro_batch import forward_of, token_loss_sum
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, hf_model, my_batches, random_samples, sharded_model
from tests.distributed.test_checkpointing import Watch

SAMPLES = random_samples([25, 19, 27, 33, 28, 24, 26, 31])
EXPERTS = 6
KINDS: dict[str, dict[str, Any]] = {
    "plain": dict(),
    "grouped": dict(kernel="torch-grouped"),
    "biases": dict(family="gpt_oss", kernel="torch-grouped"),
    "adapters beside fp8": dict(kernel="torch-grouped", settings={"adapter": "lora", "base_dtype": "fp8"}),
    "frozen": dict(settings={"freeze": ["experts"]}),
    "bf16, copies kept": dict(compute_dtype=torch.bfloat16, settings={"reshard_after_forward": False}),
}


def case_of(kind: str, **settings: Any) -> Case:
    case = Case(SAMPLES, **KINDS[kind])
    mode = settings.get("gradient_checkpointing", "none")
    return replace(case, gradient_checkpointing=mode, settings={"ep_size": 2, **case.settings, **settings})


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_stay(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """Losses, gradients and routing keep their bits, with two and three of a rank's experts per chunk, with an FSDP
    unit of experts and without, whatever is recomputed."""
    # a CPU rounds the last few numbers of a tensor otherwise where their number is no multiple of its registers'
    changes = {"num_local_experts": EXPERTS, "intermediate_size": 64}
    hf_model(replace(case_of(kind), changes=changes), seed=1).save_pretrained(tmp_path)
    for topology in (Topology(2, 2), Topology(4, 2, "hybrid")):
        variants = [
            case_of(kind),
            case_of(kind, overlap_chunks=3, gradient_checkpointing="selective", keep_expert_products=1),
        ]
        if topology.world_size == 2:
            # more replicas change nothing of what a rank computes again
            variants += [
                case_of(kind, overlap_chunks=3, gradient_checkpointing="full"),
                case_of(kind, overlap_chunks=2, gradient_checkpointing="selective"),
            ]
        for plain, *others in ranks.run(_figures, topology.world_size, tmp_path, topology, variants):
            assert plain["loss"].isfinite()
            for other in others:
                assert plain.keys() == other.keys()
                assert [name for name, figure in plain.items() if not torch.equal(figure, other[name])] == []


def _figures(path: Path, topology: Topology, variants: list[Case]) -> list[dict[str, Tensor]]:
    found = []
    for case in variants:
        model, _, _ = sharded_model(path, topology, case)
        (batch,) = my_batches(case, topology, dist.get_rank())
        torch.manual_seed(0)
        forward = forward_of(batch)
        loss = token_loss_sum(model.train(), batch, forward)
        stats = forward.take_stats(moe_layers(model))
        counts = torch.stack([layer.counts_E for layer in stats])
        rows = torch.tensor([layer.rows_computed for layer in stats])
        loss.backward()
        grads = {name: local_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), "counts": counts, "rows": rows, **grads})
    return found


def test_what_runs_side_by_side(ranks: RankPool, tmp_path: Path) -> None:
    """While a part's experts compute, the next part's rows travel, and the results of the one before: in forward and in
    backward, in the same order on all ranks."""
    case = case_of("grouped", overlap_chunks=3)
    changes = {"num_local_experts": EXPERTS, "num_hidden_layers": 1}
    hf_model(replace(case, changes=changes), seed=1).save_pretrained(tmp_path)
    first, second = ranks.run(_order, 2, tmp_path, case)
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
    topology = Topology(2, 2)
    model, _, _ = sharded_model(path, topology, case)
    (batch,) = my_batches(case, topology, dist.get_rank())
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_what_is_kept_is_not_computed_again(ranks: RankPool, tmp_path: Path, family: str) -> None:
    """Two products a layer that keeps them, of those that are fused and those that are not."""
    case = Case(SAMPLES, kernel="torch-grouped", family=family)
    hf_model(case, seed=1).save_pretrained(tmp_path)
    for layers, computed in ranks.run(_products_in_backward, 2, tmp_path, case):
        assert layers >= 2
        assert computed[1] == computed[0] - 2
        assert computed[2] == computed[0] - 4


def _products_in_backward(path: Path, case: Case) -> tuple[int, list[int]]:
    computed = []
    for kept in range(3):
        settings = {"gradient_checkpointing": "selective", "keep_expert_products": kept}
        case = replace(case, settings=settings, gradient_checkpointing="selective")
        model, _, _ = sharded_model(path, Topology(2, 2), case)
        (batch,) = my_batches(case, Topology(2, 2), dist.get_rank())
        loss = token_loss_sum(model.train(), batch)
        with Watch() as backward:
            loss.backward()
        computed.append(backward.calls["products"])
    return len(list(moe_layers(model))), computed


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
    case = case_of("plain")
    hf_model(replace(case, changes={"num_local_experts": EXPERTS}), seed=1).save_pretrained(tmp_path)
    for errors in ranks.run(_refused, 2, tmp_path):
        assert errors == [
            "--overlap-chunks 4: at --ep-size 2 a rank has 3 of 6 experts, and a chunk has the tokens of one "
            "expert at least; use at most 3",
            "--keep-expert-products 9: this model has 2 MoE layers; use at most 2",
        ]


def _refused(path: Path) -> list[str]:
    errors = []
    for settings in ({"overlap_chunks": 4}, {"keep_expert_products": 9, "gradient_checkpointing": "selective"}):
        with pytest.raises(ExpertMeshError) as refused:
            sharded_model(path, Topology(2, 2), case_of("plain", **settings))
        errors.append(str(refused.value))
    return errors


def test_shared_experts_are_computed_while_rows_travel(ranks: RankPool, tmp_path: Path) -> None:
    """Where a block calls them after the others; once, and with the bits that they have after these."""
    case = Case(SAMPLES, family="deepseek_v3", gradient_checkpointing="selective")
    hf_model(case, seed=1).save_pretrained(tmp_path)
    for (order, beside, is_held), (plain_order, after, _) in ranks.run(_shared, 2, tmp_path, case):
        assert order == ["send 0", "shared", "wait for 0", "experts", "return 0", "wait for all"] * 2
        assert plain_order == ["send 0", "wait for 0", "experts", "return 0", "wait for all", "shared"] * 2
        assert [name for name, figure in after.items() if not torch.equal(figure, beside[name])] == []
        assert is_held
        assert not any(is_held)


def _shared(path: Path, case: Case) -> list[tuple[list[str], dict[str, Tensor], list[bool]]]:
    """The order of a forward, loss and gradients, and of each computation of shared experts, again in backward too,
    whether its result is there after it."""
    topology, found = Topology(2, 2), []
    for is_beside in (True, False):
        model, _, _ = sharded_model(path, topology, case)
        shared = []
        results: list[weakref.ref[Tensor]] = []
        for layer in moe_layers(model):
            assert layer.beside is not None
            layer.beside.module.register_forward_hook(lambda module, args, out, to=results: to.append(weakref.ref(out)))
            shared.append(next(part for part in layer.beside.module.modules() if isinstance(part, torch.nn.Linear)))
            layer.beside = layer.beside if is_beside else None
        (batch,) = my_batches(case, topology, dist.get_rank())
        with _watching() as seen:
            for linear in shared:
                linear.register_forward_pre_hook(lambda module, args, seen=seen: seen.append("shared"))
            loss = token_loss_sum(model.train(), batch)
            order = list(seen)
        loss.backward()
        grads = {name: local_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((order, {"loss": loss.detach(), **grads}, [result() is not None for result in results]))
    return found

"""Tokens that are sent once to each rank, or once to each node: losses, gradients and weights are those with a row for
each choice, no more rows are sent than the routing implies, and bits do not depend on what is recomputed."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from expertmesh.moe.dispatch import exchange
from expertmesh.moe.dispatch.alltoall import AllToAllDispatcher
from expertmesh.moe.dispatch.dedup import OnceDispatcher, Tables
from expertmesh.moe.dispatch.dedup_routes import first_choices
from expertmesh.moe.dispatch.dispatcher_entries import resolve_dispatch
from expertmesh.moe.dispatch.dispatcher_registry import NodeGroups
from expertmesh.moe.experts import expert_mlp
from expertmesh.moe.experts.expert_mlp import ExpertMLP
from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.kernels.expert_rows import ExpertRows
from expertmesh.moe.kernels.kernel_entries import QUACK_ENTRY
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.recompute_cache import Keeper
from expertmesh.sharding.collectives.node_groups import make_node_groups
from expertmesh.sharding.parallelize import recompute
from expertmesh.sharding.parallelize.choices import ranks_of_equal_nodes, ranks_of_nodes
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from expertmesh.training.steps.micro_batch import token_loss_sum
from tests.distributed.pool import RankPool
from tests.distributed.reference import my_batches, ours, reference, sharded_model
from tests.families.configs import TEXT_IDS
from tests.families.test_families import compare
from tests.moe import quack_stand_in
from tests.parity.case import Case, hf_model, random_samples
from tests.rounding import OTHER_ORDER, assert_near, near
from tests.streams import watching_counts
from tests.tiers import tiered
from tests.tiny import relative_error, tiny_block

TOLERANCE = OTHER_ORDER
SAMPLES = random_samples([9 + (5 * i) % 12 for i in range(16)], vocabulary=TEXT_IDS)
RANK: dict[str, Any] = {"dispatch": "rank"}


def node(ranks: int) -> dict[str, Any]:
    return {"dispatch": "node", "ranks_per_node": ranks}


ON_4 = Topology(4, 4)
KINDS = tiered(
    slow=[
        (ON_4, Case(SAMPLES, kernel="torch-grouped"), node(2)),
        (ON_4, Case(SAMPLES[:3], balance=0.05), RANK),
        (ON_4, Case(SAMPLES, compute_dtype=torch.bfloat16), node(2)),
    ],
    release=[
        (ON_4, Case(SAMPLES, family="gpt_oss", kernel="torch-grouped"), node(2)),
        (ON_4, Case(SAMPLES, changes={"num_experts_per_tok": 8}), RANK),
        (ON_4, Case(SAMPLES, changes={"num_experts_per_tok": 1}), node(2)),
        (ON_4, Case(SAMPLES, family="deepseek_v3"), RANK),
        (ON_4, Case(SAMPLES, settings={"adapter": "lora", "base_dtype": "nf4"}), node(2)),
        (Topology(8, 8), Case(SAMPLES, changes={"num_local_experts": 16}), node(4)),
    ],
)
MODES: list[dict[str, Any]] = [{"gradient_checkpointing": mode} for mode in ("none", "full", "selective")]


@pytest.mark.parametrize(
    ("topology", "case", "once"),
    KINDS,
    ids=["grouped", "few", "bf16", "biases", "all experts", "one expert", "shared experts", "nf4", "8 ranks"],
)
def test_equals_a_row_for_each_choice(
    ranks: RankPool, tmp_path: Path, topology: Topology, case: Case, once: dict[str, Any]
) -> None:
    """Losses and gradients; their bits are the same on every run, and whatever is recomputed."""
    hf_model(replace(case, changes={"num_local_experts": 8, **case.changes}), seed=1).save_pretrained(tmp_path)
    variants = [
        {"dispatch": "plain"},
        *({**once, **mode} for mode in (MODES[0], *MODES)),
        {**once, "overlap_chunks": 2, **MODES[2]},
    ]
    if case.family == "mixtral" and case.kernel == "torch-grouped":
        variants[4] |= {"keep_expert_products": 1}
    found = ranks.run(_figures, topology.world_size, tmp_path, topology, case, variants)
    exact: list[Any] = [None] * len(found)
    if case.compute_dtype == torch.bfloat16:
        in_fp32 = replace(case, compute_dtype=torch.float32)
        exact = ranks.run(_figures, topology.world_size, tmp_path, topology, in_fp32, variants[:1])
    for (plain, first, *same, chunked), truth in zip(found, exact, strict=True):
        for figures in (first, chunked):
            if truth is None:
                compare(figures, plain, str(topology))
            else:
                # roundings are others; they are no larger
                assert _distance(figures, truth[0]) < 1.5 * _distance(plain, truth[0])
        for other in same:
            assert [name for name, figure in first.items() if not torch.equal(figure, other[name])] == []


def _norm(figures: dict[str, Tensor]) -> float:
    return float(torch.stack([value.float().norm() for value in figures.values()]).norm())


def _distance(figures: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return _norm({name: value.float() - other[name].float() for name, value in figures.items()})


def _figures(path: Path, topology: Topology, case: Case, variants: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Loss and this rank's gradients by each variant."""
    found = []
    for settings in variants:
        mode = settings.get("gradient_checkpointing", "none")
        variant = replace(case, settings={**case.settings, **settings}, gradient_checkpointing=mode)
        model, mesh, _ = sharded_model(path, topology, variant)
        (batch,) = my_batches(variant, topology, dist.get_rank(), mesh.cp_group)
        torch.manual_seed(0)
        loss = token_loss_sum(model.train(), batch)
        loss.backward()
        grads = {name: local_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), **grads})
    return found


@pytest.mark.parametrize("once", tiered([node(2)], slow=[{"dispatch": "plain"}, RANK]), ids=["node", "plain", "rank"])
def test_few_experts_are_multiplied_one_after_the_other(ranks: RankPool, tmp_path: Path, once: dict[str, Any]) -> None:
    """By counts that the host has been told for the exchange, chunk by chunk, and without another wait for them."""
    case = Case(SAMPLES, kernel="torch-grouped", settings={**once, "overlap_chunks": 2})
    hf_model(replace(case, changes={"num_local_experts": 12}), seed=1).save_pretrained(tmp_path)
    for grouped, apart in ranks.run(_apart, 4, tmp_path, case):
        assert (grouped.pop("grouped"), apart.pop("grouped")) == (2 * 9, 0), "of two layers, but for chunks of one"
        compare(apart, grouped, str(once))


def _apart(path: Path, case: Case) -> list[dict[str, Any]]:
    """Loss and this rank's gradients, with the number of grouped GEMMs: three experts in two chunks are one of two and
    one of one, of which only the former has a choice."""
    found = []
    for most in (1, 2):
        model, mesh, _ = sharded_model(path, ON_4, case)
        for layer in moe_layers(model):
            layer.mlp.most_apart = most
        (batch,) = my_batches(case, ON_4, dist.get_rank(), mesh.cp_group)

        with (
            mock.patch.object(F, "grouped_mm", wraps=F.grouped_mm) as grouped_mm,
            mock.patch.object(expert_mlp.ExpertMLP, "_compute", _checking_counts(expert_mlp.ExpertMLP._compute)),
        ):
            loss = token_loss_sum(model.train(), batch)
            loss.backward()
        grads = {name: local_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), **grads, "grouped": grouped_mm.call_count})
    return found


def _checking_counts(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def checked(mlp: Any, rows_RD: Tensor, experts: ExpertRows, *rest: Any) -> Tensor:
        assert experts.on_host == experts.counts_e.tolist()
        assert experts.num_rows == len(rows_RD)
        return compute(mlp, rows_RD, experts, *rest)

    return checked


@pytest.mark.slow
@pytest.mark.parametrize("once", [{"dispatch": "plain"}, RANK, node(2)], ids=["plain", "rank", "node"])
def test_all_that_begins_is_waited_for(ranks: RankPool, tmp_path: Path, once: dict[str, Any]) -> None:
    """Also where recomputation ends before the layer does; and what was kept for it has been taken."""
    hf_model(Case(SAMPLES, changes={"num_local_experts": 8}), seed=1).save_pretrained(tmp_path)
    variants = [*(once | mode for mode in MODES), once | MODES[2] | {"overlap_chunks": 2}]
    for figures in ranks.run(_begun_and_waited, 4, tmp_path, variants):
        for begun, waited, left in figures:
            assert begun == waited > 0
            assert left == 0


def _begun_and_waited(path: Path, variants: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Exchanges begun and waited for in forward and backward, and results that keepers still hold."""
    found = []
    for settings in variants:
        begun: list[int] = []
        waited: list[int] = []
        keepers: list[Keeper] = []

        class Counted(exchange.UnderWay):
            def __init__(self, *args: Any, begun: list[int] = begun) -> None:
                super().__init__(*args)
                begun.append(1)

            def wait(self, waited: list[int] = waited) -> Tensor:
                waited.append(1)
                return super().wait()

        def keeper(*args: Any, keepers: list[Keeper] = keepers, **kwargs: Any) -> Keeper:
            keepers.append(Keeper(*args, **kwargs))
            return keepers[-1]

        with mock.patch.object(exchange, "UnderWay", Counted), mock.patch.object(recompute, "Keeper", keeper):
            _figures(path, Topology(4, 4), Case(SAMPLES), [settings])
        found.append((len(begun), len(waited), sum(len(each.results) for each in keepers)))
    return found


# Routing by hand, on one layer


@dataclass(frozen=True)
class Moved:
    """An exchange: rows to each rank of a group, numbers a row, and bytes that this rank gave and got."""

    rows: list[int]
    group: list[int]
    width: int
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class Routed:
    """A layer of 8 experts on 4 ranks, and each rank's tokens: out, gradients of tokens and weights, and all exchanges
    of forward and of backward, in order."""

    out_TD: Tensor
    grad_x_TD: Tensor
    grad_weights_TK: Tensor
    moved: dict[str, list[Moved]]


def _dispatcher(kind: str, nodes: NodeGroups, sum_dtype: torch.dtype | None = None, num_parts: int = 1) -> Any:
    world: Any = dist.group.WORLD
    if kind == "plain":
        return AllToAllDispatcher(8, world, num_parts)
    return OnceDispatcher(8, world, num_parts, nodes if kind == "node" else None, sum_dtype)


def _layer(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    layer = tiny_block(num_local_experts=8).experts.to(dtype)
    for name, weight in list(layer.mlp.named_parameters()):
        mine = (0.1 * torch.randn(weight.shape)).chunk(dist.get_world_size())[dist.get_rank()]
        setattr(layer.mlp, name, torch.nn.Parameter(mine.to(dtype)))
    return layer


WAYS = ("plain", "rank", "node", "rank, weighed", "node, weighed")


def _route(experts: list[Tensor]) -> dict[str, Routed]:
    nodes = make_node_groups(Topology(4, 4), 2, None)
    experts_TK = experts[dist.get_rank()]
    layer, found = _layer(torch.float64), {}
    for name in WAYS:
        kind, _, weighed = name.partition(", ")
        layer.dispatcher = _dispatcher(kind, nodes)
        generator = torch.Generator().manual_seed(dist.get_rank())
        size = layer.shape.model_width
        x_TD = torch.randn(len(experts_TK), size, generator=generator, dtype=torch.float64).requires_grad_()
        weights_TK = torch.rand(experts_TK.shape, generator=generator, dtype=torch.float64)
        # those of padding may be anything
        weights_TK = weights_TK.masked_fill(experts_TK == 8, torch.nan).requires_grad_()
        is_token_BS = (experts_TK[:, :1] < 8).t()
        how = _weighing() if weighed else nullcontext()
        with _moved() as forward, Forward(is_token_BS=is_token_BS), how:
            out_TD = layer(x_TD, experts_TK, weights_TK)
        with _moved() as backward:
            out_TD.backward(torch.ones_like(out_TD) * torch.arange(1, size + 1))
        assert x_TD.grad is not None
        assert weights_TK.grad is not None
        moved = {"forward": forward, "backward": backward}
        found[name] = Routed(out_TD.detach(), x_TD.grad, weights_TK.grad, moved)
    return found


def _gather(experts: list[Tensor], gathers: bool) -> dict[str, tuple[tuple[Tensor, ...], int]]:
    """By kind: the output and gradients of a layer whose kernel gathers rows, or gets them; and how often it did."""
    nodes = make_node_groups(Topology(4, 4), 2, None)
    experts_TK = experts[dist.get_rank()]
    # joined where tokens have another dtype than weights
    layer, found = _layer(torch.float64), {}
    layer.mlp.kernel = replace(QUACK_ENTRY, implementation=replace(QUACK_ENTRY.code, gathers=gathers))
    for kind in ("rank", "node"):
        for num_parts in (1, 2):
            layer.dispatcher = _dispatcher(kind, nodes, num_parts=num_parts)
            generator = torch.Generator().manual_seed(dist.get_rank())
            x_TD = torch.randn(len(experts_TK), layer.shape.model_width, generator=generator).requires_grad_()
            weights_TK = torch.rand(experts_TK.shape, generator=generator).requires_grad_()
            as_on_gpu = mock.patch.object(expert_mlp, "computes_on_cpu", return_value=False)
            with quack_stand_in.installed(), as_on_gpu, Forward(is_token_BS=(experts_TK[:, :1] < 8).t()):
                out_TD = layer(x_TD, experts_TK, weights_TK)
                out_TD.backward(torch.ones_like(out_TD) * torch.arange(1, x_TD.shape[1] + 1))
                number = len(quack_stand_in.gathers)
            inputs = (x_TD, weights_TK, *layer.mlp.parameters())
            gradients = [each.grad for each in inputs if each.grad is not None]
            layer.zero_grad()
            found[f"{kind}, {num_parts}"] = (out_TD.detach(), *gradients), number
    return found


@contextmanager
def _weighing() -> Iterator[None]:
    """As on a GPU; around products, as the kernel that has fp64 does not weigh a complete expert."""
    with (
        mock.patch.object(ExpertMLP, "_weighs", return_value=True),
        mock.patch.object(ExpertMLP, "_is_fused", False),
    ):
        yield


@contextmanager
def _moved() -> Iterator[list[Moved]]:
    moved: list[Moved] = []
    original = exchange.UnderWay

    def begin(out: Tensor, rows: Tensor, received: Any, sent: Any, group: Any) -> Any:
        ranks = dist.get_process_group_ranks(group)
        moved.append(Moved(list(sent), ranks, rows.shape[1], rows.nbytes, out.nbytes))
        return original(out, rows, received, sent, group)

    with mock.patch.object(exchange, "UnderWay", begin):
        yield moved


def _given_up(experts: list[Tensor]) -> dict[str, tuple[list[str], list[int]]]:
    nodes, found = make_node_groups(Topology(4, 4), 2, None), {}
    experts_TK = experts[dist.get_rank()]
    for kind in ("plain", "rank", "node"):
        layer = _layer(torch.float32)
        layer.dispatcher = _dispatcher(kind, nodes)
        x_TD = torch.ones(len(experts_TK), layer.shape.model_width)
        with watching_counts() as found[kind], Forward(is_token_BS=None):
            layer(x_TD, experts_TK, torch.ones(experts_TK.shape))
    return found


def test_memory_is_kept_until_counts_are_there(ranks: RankPool) -> None:
    """What the counts' stream reads, the stream that computes must not write over."""
    experts = experts_of("spread")
    for found in ranks.run(_given_up, 4, experts):
        for kind, (gone, waits) in found.items():
            assert gone == [], kind
            assert len(waits) == 1
            assert waits[0] > 0


ROUTINGS: dict[str, list[list[list[int]]]] = {
    "spread": [[[0, 1, 2], [3, 5, 7], [6, 4, 0]], [[7, 6, 5]], [[2, 0, 4], [1, 3, 5]], [[4, 6, 2], [0, 7, 3]]],
    "one node alone": [[[0, 1, 3], [2, 3, 1]], [[3, 0, 2]], [[1, 2, 0]], [[0, 3, 1], [2, 1, 0]]],
    "one rank alone": [[[6, 7, 6]], [[7, 6, 7], [6, 7, 6]], [[6, 7, 6]], [[7, 6, 7]]],
    "ranks without a token": [[], [[1, 4, 7]], [], [[0, 2, 6], [5, 4, 3], [1, 0, 7]]],
    "padding": [[[0, 1, 2], [8, 8, 8]], [[8, 8, 8]], [[4, 5, 6], [7, 0, 1], [8, 8, 8]], [[3, 2, 7]]],
}


def experts_of(routing: str) -> list[Tensor]:
    return [torch.tensor(rows, dtype=torch.int64).view(-1, 3) for rows in ROUTINGS[routing]]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_kernel_that_gathers_tokens_computes_the_same(ranks: RankPool, routing: str) -> None:
    """But for the order in which a matmul sums up, as gradients of weights are computed transposed."""
    experts = experts_of(routing)
    gathered, given = (ranks.run(_gather, 4, experts, gathers) for gathers in (True, False))
    for mine, other in zip(gathered, given, strict=True):
        for name, (tensors, number) in mine.items():
            expected, none = other[name]
            assert none == 0
            # parts without rows have nothing to gather
            assert number % 4 == 0
            assert len(tensors) == len(expected) == 3 + 3
            assert_near(tensors, expected)
    assert max(number for found in gathered for _, number in found.values()) == 8


@pytest.mark.parametrize("routing", ROUTINGS)
def test_results_and_rows_follow_the_routing(ranks: RankPool, routing: str) -> None:
    """Forward and backward, in fp64; the rows that cross, there and back, are those the routing implies, one for each
    token and rank, or token and node, and so are their bytes. Choices and weights go there with the tokens, and their
    gradients come back with the tokens'."""
    experts = experts_of(routing)
    to_ranks = [[{int(e) // 2 for e in row if e < 8} for row in rows] for rows in experts]

    def tokens(sources: list[int], destinations: list[int]) -> int:
        """How many tokens of some ranks have an expert on some ranks."""
        return sum(bool(each & {*destinations}) for source in sources for each in to_ranks[source])

    for rank, found in enumerate(ranks.run(_route, 4, experts)):
        for kind in WAYS[1:]:
            for name in ("out_TD", "grad_x_TD", "grad_weights_TK"):
                ours_, theirs = getattr(found[kind], name), getattr(found["plain"], name)
                torch.testing.assert_close(ours_, theirs, rtol=1e-12, atol=1e-12, msg=f"{kind}, {name}")
        everyone = [0, 1, 2, 3]
        _assert_moved(
            found["rank"],
            [(everyone, [tokens([rank], [peer]) for peer in everyone], [tokens([peer], [rank]) for peer in everyone])],
        )
        across, inside = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        to_nodes = [tokens([rank], [0, 1]), tokens([rank], [2, 3])]
        from_nodes = [tokens([peer], inside) for peer in across]
        # of all ranks of a place, the tokens with experts on one rank of this node
        onward = [tokens(across, [peer]) for peer in inside]
        arriving = [tokens([peer % 2, peer % 2 + 2], [rank]) for peer in inside]
        _assert_moved(found["node"], [(across, to_nodes, from_nodes), (inside, onward, arriving)])
        for kind in ("rank", "node"):
            assert found[f"{kind}, weighed"].moved == found[kind].moved


def _assert_moved(found: Routed, hops: list[tuple[list[int], list[int], list[int]]]) -> None:
    """hops: each a group, the rows that go to its ranks, and those that come from them."""
    there = [(rows, group, sum(come)) for group, rows, come in hops]
    back = [(come, group, sum(rows)) for group, rows, come in reversed(hops)]
    size, num_choices = found.out_TD.shape[1], found.grad_weights_TK.shape[1]
    width = {"tokens": size, "choices": 2 * num_choices, "weights": num_choices}
    # in backward there go the gradients of results, and back those of tokens
    want = {
        ("forward", "tokens"): there + back,
        ("forward", "choices"): there,
        ("backward", "tokens"): there + back,
        ("backward", "weights"): back,
    }
    for (direction, what), expected in want.items():
        assert [moved for moved in found.moved[direction] if moved.width == width[what]] == [
            Moved(rows, group, width[what], sum(rows) * width[what] * 8, come * width[what] * 8)
            for rows, group, come in expected
        ], (direction, what)
    for direction, moved in found.moved.items():
        assert len(moved) == sum(len(expected) for key, expected in want.items() if key[0] == direction)


def test_sums_in_fp32(ranks: RankPool) -> None:
    """They travel so in both directions, and spare a rounding."""
    for num_bytes, errors in ranks.run(_sums, 4):
        assert num_bytes["same"] == {2}
        assert num_bytes["float32"] == {2, 4}
        assert errors["float32"] < 0.8 * errors["same"]


def _sums() -> tuple[dict[str, set[int]], dict[str, float]]:
    """By the dtype of sums: bytes of a number that is sent, and distance from a sum of all a token's experts in fp32,
    as the plain dispatch makes it."""
    nodes = make_node_groups(Topology(4, 4), 2, None)
    layer = _layer(torch.bfloat16)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TD = torch.randn(64, layer.shape.model_width, generator=generator).to(torch.bfloat16)
    experts_TK = torch.stack([torch.randperm(8, generator=generator)[:6] for _ in range(64)])
    weights_TK = torch.rand(experts_TK.shape, generator=generator)
    num_bytes: dict[str, set[int]] = {}
    outs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, sum_dtype in (("plain", None), ("same", None), ("float32", torch.float32)):
        layer.dispatcher = _dispatcher("plain" if name == "plain" else "node", nodes, sum_dtype)
        x = x_TD.clone().requires_grad_()
        with _moved() as moved, Forward():
            out_TD = layer(x, experts_TK, weights_TK)
            out_TD.backward(torch.ones_like(out_TD))
        assert x.grad is not None
        num_bytes[name] = {m.sent_bytes // (sum(m.rows) * m.width) for m in moved if m.width > 16}
        outs[name] = (out_TD.detach().float(), x.grad.float())
    error = {
        name: sum(relative_error(mine, want) for mine, want in zip(outs[name], outs["plain"], strict=True))
        for name in ("same", "float32")
    }
    return num_bytes, error


@pytest.mark.parametrize("ranks_on_node", [1, 2])
@pytest.mark.parametrize(
    ("nodes", "top_k", "ratio"), [(2, 8, 4.02), (4, 8, 2.22), (8, 8, 1.52), (2, 4, 2.13), (2, 2, 1.33)]
)
def test_rows_sent_under_uniform_routing(nodes: int, top_k: int, ratio: float, ranks_on_node: int) -> None:
    """Each of N nodes, or of N ranks, gets 1 - ((N-1)/N)^K rows a token, where it gets K/N if each choice has its own:
    to 2 %, each token's experts drawn alike often, no two the same. By node, its ranks get of them what they get by
    rank."""
    num_ranks = nodes * ranks_on_node
    experts_TK = torch.rand(20_000, 256, generator=torch.Generator().manual_seed(0)).topk(top_k, sorted=False).indices
    tables = Tables.of(256, nodes, ranks_on_node, [256 // num_ranks])

    def rows(place_E: Tensor, number: int) -> Tensor:
        """A token's, to each of so many destinations."""
        destination_TK = first_choices(place_E[experts_TK], number).destination_TK
        return destination_TK.view(-1).bincount(minlength=number + 1)[:number] / len(experts_TK)

    sent_N = rows(tables.node_E, nodes)
    assert float(sent_N.mean()) == pytest.approx(1 - ((nodes - 1) / nodes) ** top_k, rel=0.02)
    by_choice = (experts_TK // (256 // nodes)).view(-1).bincount(minlength=nodes) / len(experts_TK)
    assert float(by_choice[1:].sum() / sent_N[1:].sum()) == pytest.approx(ratio, rel=0.02)
    by_rank = Tables.of(256, num_ranks, 1, [256 // num_ranks])
    assert torch.equal(rows(tables.rank_E, num_ranks), rows(by_rank.node_E, num_ranks))


# Which way is taken


@pytest.mark.parametrize(
    ("asked", "ep_size", "ranks_on_node", "top_k", "taken"),
    [
        ("auto", 8, 8, 2, "plain"),
        # 5.3 ranks for 8 choices, 3.3 for 4
        ("auto", 8, 8, 8, "rank"),
        ("auto", 8, 8, 4, "plain"),
        ("auto", 2, 2, 4, "rank"),
        ("auto", 16, 8, 2, "node"),
        ("auto", 16, 8, 1, "plain"),
        ("auto", 4, 1, 2, "rank"),
        ("auto", 12, None, 2, "rank"),
        ("node", 8, 8, 2, "rank"),
        ("node", 12, None, 2, "rank"),
        ("rank", 16, 8, 2, "rank"),
        ("plain", 16, 8, 2, "plain"),
    ],
)
def test_auto_goes_by_which_ranks_share_a_node(
    asked: str, ep_size: int, ranks_on_node: int | None, top_k: int, taken: str
) -> None:
    assert resolve_dispatch(asked, ep_size, ranks_on_node, top_k).name == taken


@pytest.mark.parametrize(
    ("nodes", "ep_size", "expected"),
    [
        ("aaaaaaaa", 8, 8), ("aaaabbbb", 8, 4), ("aaaabbbb", 4, 4), ("aaaabbbb", 2, 2), ("aaaaaabb", 8, None),
        ("aaaaaabb", 4, None), ("abababab", 8, None), ("abcd", 4, 1),
    ],
)  # fmt: skip
def test_ranks_of_a_node(nodes: str, ep_size: int, expected: int | None) -> None:
    assert ranks_of_nodes(list(nodes), ep_size) == expected


def test_ranks_of_equal_nodes() -> None:
    assert ranks_of_equal_nodes(16, 8, 16) == 8
    assert ranks_of_equal_nodes(12, 8, 12) is None
    assert ranks_of_equal_nodes(12, 6, 4) is None, "some groups are on one node, some on two"


@pytest.mark.slow
def test_in_a_pipeline(ranks: RankPool, tmp_path: Path) -> None:
    """Of stages that span two nodes each, the first without experts: losses and gradients are those of one process."""
    changes = {"num_hidden_layers": 3, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    case = Case(SAMPLES, family="deepseek_v3", accumulation=2, steps=1, changes=changes, kernel="torch-grouped")
    case = replace(case, gradient_checkpointing="selective")
    hf_model(case, seed=1).save_pretrained(tmp_path)
    settings = node(2) | {"pipeline_schedule": "zero-bubble", "pipeline_layers": "1,2"}
    found = ranks.run(ours, 8, tmp_path, Topology(8, 4, pp_size=2), replace(case, settings=settings))[0]
    want = reference(case, seed=1)
    assert found.losses == near(want.losses)
    compare(found.grads, want.grads, "stages")


def test_nodes_are_found_or_refused(ranks: RankPool, tmp_path: Path) -> None:
    """By torchrun's number of a rank's node, and its host."""
    hf_model(Case(SAMPLES), seed=1).save_pretrained(tmp_path)
    for on_one, on_two, refused in ranks.run(_taken, 4, tmp_path):
        assert on_one is None
        assert on_two == (2, 2)
        assert refused.startswith("--ranks-per-node 3: the 4 ranks of an EP group are spread unevenly")


def _taken(path: Path) -> list[tuple[int, int] | str | None]:
    """(nodes, ranks on each) that the model's tokens go to once, with ranks on one node and on two; what is said of
    nodes of three ranks."""
    found: list[tuple[int, int] | str | None] = []
    for number in (0, dist.get_rank() // 2):
        with mock.patch.dict(os.environ, GROUP_RANK=str(number)):
            model, _, _ = sharded_model(path, Topology(4, 4), Case(SAMPLES))
        dispatcher: Any = moe_layers(model)[0].dispatcher
        is_once = isinstance(dispatcher, OnceDispatcher)
        found.append((dispatcher.num_nodes, dispatcher.ranks_per_node) if is_once else None)
    with pytest.raises(ExpertMeshError) as refused:
        sharded_model(path, Topology(4, 4), Case(SAMPLES, settings=node(3)))
    return [*found, str(refused.value)]

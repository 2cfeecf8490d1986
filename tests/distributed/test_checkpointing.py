"""What activation checkpointing repeats in backward, and what it holds until then. That gradients keep every bit is in
tests/parity."""

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from expertmesh.moe.dispatch.alltoall import AllToAllDispatcher
from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.sharding.parallelize.recompute import _ROUTING, _selective_contexts, watch_choices
from expertmesh.sharding.topology import Topology
from expertmesh.training.steps.micro_batch import forward_of, token_loss_sum
from tests.distributed.pool import RankPool
from tests.distributed.reference import my_batches, sharded_model
from tests.parity.case import Case, hf_model, random_samples
from tests.parity.compare import with_other_bits
from tests.tiny import tiny_block

LAYERS, WIDTH = 12, 32
COUNTED = {
    "aten::topk": "routing",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::_grouped_mm": "products",
    "aten::index_select": "gathers",
}
FULL: dict[str, Any] = {"gradient_checkpointing": "full"}
SELECTIVE: dict[str, Any] = {"gradient_checkpointing": "selective"}


class Watch(TorchDispatchMode):
    """Counts calls of operators, and knows which of the memory they have made is still held."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.made: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = operator(*args, **(kwargs or {}))
        if operator.name() in COUNTED:
            self.calls[COUNTED[operator.name()]] += 1
        if operator.name() == "c10d::alltoall_base_":
            self.calls["rows" if args[0].is_floating_point() else "counts"] += 1
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                self.made[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return results

    def held(self) -> int:
        return sum(size for storage, size in self.made.values() if storage() is not None)


@dataclass(frozen=True)
class Measured:
    """Calls by kind; bytes held from forward to backward; rows that this rank's experts computed in all layers."""

    forward: Counter[str]
    backward: Counter[str]
    held: int
    rows: int
    tokens: int


def measure(path: Path, ep_size: int, case: Case, *modes: Mapping[str, Any]) -> list[Measured]:
    """A forward and its backward on the ranks of the current process group, each way."""
    topology, found = Topology(torch.distributed.get_world_size(), ep_size), []
    for mode in modes:
        model, _, _ = sharded_model(path, topology, replace(case, **mode))
        (batch,) = my_batches(case, topology, torch.distributed.get_rank())
        of_batch = forward_of(batch)
        with Watch() as forward:
            loss = token_loss_sum(model.train(), batch, of_batch)
        rows = sum(stats.rows_computed for stats in of_batch.take_stats(moe_layers(model)))
        held = forward.held()
        with Watch() as backward:
            loss.backward()
        found.append(Measured(forward.calls, backward.calls, held, rows, batch.num_tokens))
    return found


@pytest.mark.slow
def test_what_is_repeated_and_held(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(random_samples([40 + i for i in range(8)]))
    hf_model(case, num_hidden_layers=LAYERS, router_jitter_noise=0.2).save_pretrained(tmp_path)
    for none, full, selective in ranks.run(measure, 2, tmp_path, 2, case, {}, FULL, SELECTIVE):
        once = dict.fromkeys(("rows", "counts", "routing", "attention"), LAYERS)
        forwards = [_without_products(measured.forward) for measured in (none, full, selective)]
        assert forwards == [{**once, "rows": 2 * LAYERS}] * 3
        assert _without_products(none.backward) == {"rows": 2 * LAYERS}
        assert _without_products(full.backward) == {**once, "rows": 4 * LAYERS}
        assert _without_products(selective.backward) == {"rows": 2 * LAYERS}
        assert selective.held < none.held
        # rows received, rows that came back, attention's output; with its logsumexp and the choice of experts on top
        numbers = selective.rows + (2 + 1) * selective.tokens * LAYERS
        assert selective.held - full.held == pytest.approx(4 * WIDTH * numbers, rel=0.15)


def _without_products(calls: Counter[str]) -> dict[str, int]:
    return {kind: count for kind, count in calls.items() if kind not in ("products", "gathers")}


@pytest.mark.parametrize("ep_size", [1, 2])
def test_what_would_be_sent_is_not_computed_again(ranks: RankPool, tmp_path: Path, ep_size: int) -> None:
    """The last of an expert's three GEMMs is not recomputed, as only its all-to-all reads the result; nor are tokens as
    rows, which another reads, and those results in the order of their sources. On one ep rank the results are weighted
    and summed."""
    case = Case(random_samples([5, 9, 7, 3]), kernel="torch-grouped")
    hf_model(case).save_pretrained(tmp_path)
    for none, full, selective in ranks.run(measure, 2, tmp_path, ep_size, case, {}, FULL, SELECTIVE):
        layers = none.forward["products"] // 3
        assert layers > 0
        in_full, in_part = (
            {kind: (mode.backward[kind] - none.backward[kind]) / layers for kind in ("products", "gathers")}
            for mode in (full, selective)
        )
        if ep_size == 1:
            # tokens as rows, and two rows of each token
            assert in_full == in_part == {"products": 3, "gathers": 1 + 2}
        else:
            # also rows by expert and back, and two for the indices of these
            assert in_full == {"products": 3, "gathers": 1 + 2 + 2 + 2}
            assert in_part == {"products": 2, "gathers": 2 + 1 + 2}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_what_is_kept_is_not_computed_again(ranks: RankPool, tmp_path: Path, family: str) -> None:
    """Two products a layer that keeps them, of those that are fused and those that are not."""
    case = Case(random_samples([25, 19, 27, 33]), kernel="torch-grouped", family=family)
    hf_model(case).save_pretrained(tmp_path)
    modes = [SELECTIVE | {"settings": {"keep_expert_products": kept}} for kept in range(3)]
    for none, one, two in ranks.run(measure, 2, tmp_path, 2, case, *modes):
        assert one.backward["products"] == none.backward["products"] - 2
        assert two.backward["products"] == none.backward["products"] - 4


def test_a_norm_behind_each_expert_has_its_input(ranks: RankPool) -> None:
    for plain, repeated in ranks.run(_norm_behind_each_expert, 2):
        assert plain["x"].any()
        assert with_other_bits(plain, repeated) == []


def _norm_behind_each_expert() -> list[dict[str, Tensor]]:
    world: Any = group.WORLD
    contexts = partial(_selective_contexts, _ROUTING)
    found = []
    for run in (lambda layer, x: layer(x), partial(checkpoint, use_reentrant=False, context_fn=contexts)):
        layer = tiny_block()
        watch_choices(layer)
        for name, weight in list(layer.experts.mlp.named_parameters()):
            mine = weight.detach().chunk(world.size())[world.rank()].clone()
            setattr(layer.experts.mlp, name, torch.nn.Parameter(mine))
        layer.experts.dispatcher = AllToAllDispatcher(layer.experts.shape.num_experts, world)
        layer.experts.post_expert_norm = torch.nn.RMSNorm(layer.experts.shape.model_width)
        torch.manual_seed(world.rank())
        x_BSD = torch.randn(1, 7, layer.experts.shape.model_width, requires_grad=True)
        with Forward():
            out_BSD = run(layer, x_BSD)
        out_BSD.square().sum().backward()
        found.append({name: p.grad for name, p in (*layer.named_parameters(), ("x", x_BSD))})
    return found

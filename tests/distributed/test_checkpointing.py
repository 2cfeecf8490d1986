"""What activation checkpointing repeats in backward, what it holds until then, and that gradients keep every bit."""

import weakref
from collections import Counter
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
from expertmesh.sharding.parallelize.choices import Checkpointing
from expertmesh.sharding.parallelize.recompute import _ROUTING, _selective_contexts, watch_choices
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from expertmesh.training.micro_batch import forward_of, token_loss_sum
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, hf_model, my_batches, random_samples, sharded_model
from tests.interpreter import interpreted, prepare_megablocks
from tests.tiny import save_model, tiny_block

LAYERS, WIDTH = 12, 32
MODES: tuple[Checkpointing, ...] = ("none", "full", "selective")
COUNTED = {
    "aten::topk": "routing",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::_grouped_mm": "products",
    "aten::index_select": "gathers",
}
SAMPLES = random_samples([5, 9, 7, 3])
MEGABLOCKS: dict[str, Any] = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_local_experts=4)
KINDS: dict[str, dict[str, Any]] = {
    "loop": dict(kernel="loop"),
    "torch-grouped": dict(kernel="torch-grouped"),
    "an expert a rank": dict(kernel="torch-grouped", changes={"num_local_experts": 2}),
    "biases": dict(family="gpt_oss"),
    "biases, grouped": dict(family="gpt_oss", kernel="torch-grouped"),
    "fp8": dict(kernel="fp8", compute_dtype=torch.bfloat16),
    "adapters": dict(family="gpt_oss", settings={"adapter": "lora", "lora_rank": 4, "lora_dropout": 0.2}),
    "adapters beside fp8": dict(settings={"adapter": "lora", "lora_rank": 4, "base_dtype": "fp8"}),
}


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

    forward: dict[str, int]
    backward: dict[str, int]
    held: int
    rows: int
    tokens: int
    grads: dict[str, Tensor]


@pytest.mark.release
@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_what_is_repeated_and_held(ranks: RankPool, tmp_path: Path, jitter: float) -> None:
    save_model(tmp_path, num_hidden_layers=LAYERS, router_jitter_noise=jitter)
    for none, full, selective in ranks.run(_measure, 2, tmp_path):
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

        for other in (full, selective):
            assert not _differing(none.grads, other.grads)


def _without_products(calls: dict[str, int]) -> dict[str, int]:
    return {kind: count for kind, count in calls.items() if kind not in ("products", "gathers")}


def _measure(path: Path) -> list[Measured]:
    case = Case(random_samples([40 + i for i in range(8)]))
    return [_measure_mode(path, Topology(2, 2), replace(case, gradient_checkpointing=mode)) for mode in MODES]


@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [1, 2])
def test_what_would_be_sent_is_not_computed_again(ranks: RankPool, tmp_path: Path, ep_size: int) -> None:
    """The last of an expert's three GEMMs is not recomputed, as only its all-to-all reads the result; nor are tokens as
    rows, which another reads, and those results in the order of their sources. On one ep rank the results are weighted
    and summed."""
    save_model(tmp_path)
    for none, full, selective in ranks.run(_measure_products, 2, tmp_path, ep_size):
        layers = none.forward["products"] // 3
        assert layers > 0
        again = {
            mode: {kind: (modes.backward[kind] - none.backward[kind]) / layers for kind in ("products", "gathers")}
            for mode, modes in (("full", full), ("selective", selective))
        }
        if ep_size == 1:
            # tokens as rows, and two rows of each token
            assert again["full"] == again["selective"] == {"products": 3, "gathers": 1 + 2}
        else:
            # also rows by expert and back, and two for the indices of these
            assert again["full"] == {"products": 3, "gathers": 1 + 2 + 2 + 2}
            assert again["selective"] == {"products": 2, "gathers": 2 + 1 + 2}
        assert not _differing(none.grads, selective.grads)


def _measure_products(path: Path, ep_size: int) -> list[Measured]:
    case = Case(SAMPLES, kernel="torch-grouped")
    return [_measure_mode(path, Topology(2, ep_size), replace(case, gradient_checkpointing=mode)) for mode in MODES]


@pytest.mark.sample(11)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_experts_of_all_kinds(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    case = Case(SAMPLES, **KINDS[kind])
    hf_model(case, seed=1).save_pretrained(tmp_path)
    for none, selective in ranks.run(_gradients, 2, tmp_path, case):
        assert none
        assert not _differing(none, selective)


@pytest.mark.slow
@interpreted
def test_gradients_by_megablocks(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path, **MEGABLOCKS)
    for none, selective in ranks.run(_gradients, 2, tmp_path, Case(SAMPLES, kernel="megablocks-sparse")):
        assert not _differing(none, selective)


def _gradients(path: Path, case: Case) -> list[dict[str, Tensor]]:
    if case.kernel == "megablocks-sparse":
        prepare_megablocks()
    modes: tuple[Checkpointing, ...] = ("none", "selective")
    return [_measure_mode(path, Topology(2, 2), replace(case, gradient_checkpointing=mode)).grads for mode in modes]


def test_a_norm_behind_each_expert_has_its_input(ranks: RankPool) -> None:
    for plain, repeated in ranks.run(_norm_behind_each_expert, 2):
        assert plain["x"].any()
        assert not _differing(plain, repeated)


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


def _differing(grads: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    assert grads.keys() == others.keys()
    return [name for name, grad in grads.items() if not torch.equal(grad, others[name])]


def _measure_mode(path: Path, topology: Topology, case: Case) -> Measured:
    rank = torch.distributed.get_rank()
    model, _, _ = sharded_model(path, topology, case)
    (batch,) = my_batches(case, topology, rank)
    torch.manual_seed(rank)
    of_batch = forward_of(batch)
    with Watch() as forward:
        loss = token_loss_sum(model.train(), batch, of_batch)
    rows = sum(stats.rows_computed for stats in of_batch.take_stats(moe_layers(model)))
    held = forward.held()
    with Watch() as backward:
        loss.backward()
    grads = {name: local_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return Measured(dict(forward.calls), dict(backward.calls), held, rows, batch.num_tokens, grads)

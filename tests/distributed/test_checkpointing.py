"""What activation checkpointing repeats in backward, what it holds until then, and that gradients keep every bit."""

import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe import take_stats
from sharding import Checkpointing, Topology, local_tensor
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, my_batches, random_samples, sharded_model
from tests.tiny import save_model
from training.step import token_loss_sum

LAYERS, WIDTH = 12, 32
MODES: tuple[Checkpointing, ...] = ("none", "full", "selective")
COUNTED = {
    "expertmesh::all_to_all": "rows",
    "expertmesh::exchange_counts": "counts",
    "aten::topk": "routing",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
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


@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_what_is_repeated_and_held(ranks: RankPool, tmp_path: Path, jitter: float) -> None:
    save_model(tmp_path, num_hidden_layers=LAYERS, router_jitter_noise=jitter)
    for none, full, selective in ranks.run(_measure, 2, tmp_path):
        once = dict.fromkeys(COUNTED.values(), LAYERS)
        assert none.forward == full.forward == selective.forward == {**once, "rows": 2 * LAYERS}
        assert none.backward == {"rows": 2 * LAYERS}
        assert full.backward == {**once, "rows": 4 * LAYERS}
        assert selective.backward == {"rows": 2 * LAYERS}

        assert selective.held < none.held
        # rows received, rows that came back, attention's output; with its logsumexp and the choice of experts on top
        numbers = selective.rows + (2 + 1) * selective.tokens * LAYERS
        assert selective.held - full.held == pytest.approx(4 * WIDTH * numbers, rel=0.15)

        for other in (full, selective):
            differing = [name for name, grad in none.grads.items() if not torch.equal(grad, other.grads[name])]
            assert not differing


def _measure(path: Path) -> list[Measured]:
    samples = random_samples([40 + i for i in range(8)])
    return [_measure_mode(path, Case(samples, gradient_checkpointing=mode)) for mode in MODES]


def _measure_mode(path: Path, case: Case) -> Measured:
    topology, rank = Topology(2, 2), torch.distributed.get_rank()
    model, _, _ = sharded_model(path, topology, case)
    (batch,) = my_batches(case, topology, rank)
    torch.manual_seed(rank)
    with Watch() as forward:
        loss = token_loss_sum(model.train(), batch)
    rows = sum(stats.rows_computed for stats in take_stats(model))
    held = forward.held()
    with Watch() as backward:
        loss.backward()
    grads = {name: local_tensor(p.grad).clone() for name, p in model.named_parameters()}
    return Measured(dict(forward.calls), dict(backward.calls), held, rows, batch.num_tokens, grads)

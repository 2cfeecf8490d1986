"""Packed rows are the samples they hold: the same token losses, router statistics, gradients and weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.experts.router_stats import RouterStats
from expertmesh.sharding.topology import Topology
from expertmesh.training.attention.packed_attention import OWN
from expertmesh.training.attention.run_model import run_model
from expertmesh.training.data.batch import IGNORED, Batch, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.data.sequences import pack
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.step import train_step
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, in_full, random_samples, sharded_model, train_config
from tests.tiny import relative_error, save_model, tiny_mixtral

CAPACITY = 48
SAMPLES = random_samples([31, 17, 16, 12, 11, 9, 8, 5, 3, 2, 2, 1, 40])


def packed_rows() -> list[list[Sample]]:
    lengths = torch.tensor([len(sample.tokens) for sample in SAMPLES])
    rows = [[SAMPLES[i] for i in row] for row in pack(lengths, CAPACITY, seed=0)]
    assert max(len(row) for row in rows) > 3, "the case is to have full rows"
    return rows


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("attention", "changes"),
    [
        ("sdpa", {}),
        ("eager", {}),
        ("sdpa", {"sliding_window": 6}),
        (OWN, {}),
        (OWN, {"num_key_value_heads": 4}),
        (OWN, {"sliding_window": 6}),
    ],
    ids=["sdpa", "eager", "sliding window", "own", "own, all heads", "own, sliding window"],
)
@pytest.mark.parametrize(("world_size", "ep_size"), [(1, 1), (2, 2)])
def test_same_token_losses_and_router_statistics(
    ranks: RankPool, tmp_path: Path, world_size: int, ep_size: int, attention: str, changes: dict[str, Any]
) -> None:
    """Against one sample at a time, here and in transformers' own model."""
    save_model(tmp_path, **changes)
    topology = Topology(world_size, ep_size)
    for alone, packed, counts_equal, sums in ranks.run(_both_ways, world_size, tmp_path, topology, attention):
        torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(packed, _losses_of_transformers(**changes), rtol=1e-5, atol=1e-6)
        assert counts_equal
        for found, expected in sums:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def _both_ways(path: Path, topology: Topology, attention: str) -> Any:
    model, _, _ = sharded_model(path, topology, Case([]))
    model.set_attn_implementation(attention)
    model.eval()
    alone = [_losses_and_stats(model, collate([[sample]])) for sample in SAMPLES]
    rows = packed_rows()
    packed, packed_stats = _losses_and_stats(model, collate(rows))
    order = [SAMPLES.index(sample) for row in rows for sample in row]
    alone_stats = [alone[i][1] for i in order]
    sums = [
        (getattr(layer, name), sum(stats[at] for stats in [[getattr(s, name) for s in one] for one in alone_stats]))
        for at, layer in enumerate(packed_stats)
        for name in ("prob_sum_E", "z_sum", "entropy_sum")
    ]
    counts_equal = all(
        torch.equal(layer.counts_E, torch.stack([one[at].counts_E for one in alone_stats]).sum(dim=0))
        for at, layer in enumerate(packed_stats)
    )
    return torch.cat([alone[i][0] for i in order]), packed, counts_equal, sums


@torch.no_grad()
def _losses_and_stats(model: Any, batch: Batch) -> tuple[Tensor, list[RouterStats]]:
    """The loss of every target token, in the order of the batch."""
    forward = Forward(batch.is_token_BS)
    out = run_model(model, batch, forward)
    losses = F.cross_entropy(
        out.logits.flatten(0, 1), batch.targets_BS.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses[batch.target_index_N], forward.take_stats(moe_layers(model))


@torch.no_grad()
def _losses_of_transformers(**changes: Any) -> Tensor:
    model = tiny_mixtral(**changes).eval()
    losses = []
    for sample in (sample for row in packed_rows() for sample in row):
        tokens = torch.tensor([sample.tokens])
        logits = model(input_ids=tokens).logits[0, :-1]
        trained = torch.tensor(sample.is_trained[1:], dtype=torch.bool)
        losses.append(F.cross_entropy(logits, tokens[0, 1:], reduction="none")[trained])
    return torch.cat(losses)


@pytest.mark.sample(3)
@pytest.mark.parametrize("attention", ["sdpa", OWN])
@pytest.mark.parametrize(("world_size", "ep_size"), [(1, 1), (4, 2), (4, 4)])
def test_same_weights(ranks: RankPool, tmp_path: Path, world_size: int, ep_size: int, attention: str) -> None:
    """Two steps over the same samples, a row each in one process or packed on several ranks, with a z-loss."""
    save_model(tmp_path)
    (expected,) = ranks.run(_train, 1, tmp_path, Topology(1, 1), [[sample] for sample in SAMPLES], "sdpa")
    found = ranks.run(_train, world_size, tmp_path, Topology(world_size, ep_size), packed_rows(), attention)[0]
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    errors = {name: relative_error(found[1][name], weight) for name, weight in expected[1].items()}
    assert max(errors.values()) <= 2e-5, errors


def _train(
    path: Path, topology: Topology, rows: list[list[Sample]], attention: str
) -> tuple[list[float], dict[str, Tensor]]:
    model, mesh, _ = sharded_model(
        path, topology, Case([], gradient_checkpointing="selective" if attention == OWN else "none")
    )
    model.set_attn_implementation(attention)
    optimizer = build_optimizer(model.train(), train_config(), mesh)
    batches = [collate(rows[torch.distributed.get_rank() :: topology.world_size])]
    results = [train_step(model, optimizer, batches, mesh, LossWeights(0.0, 0.01), 0.5) for _ in range(2)]
    return [r.loss for r in results], in_full(dict(model.named_parameters()))

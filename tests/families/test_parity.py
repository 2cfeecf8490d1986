"""The whole of training, for families that between them have all that is particular to one: shared experts and their
gates, dense layers, groups and correction biases, biases, interleaved and clamped experts, layers that carry a state.

tests/distributed holds Mixtral to the same; tests/families/test_families.py every other family to its gradients.
"""

from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.sharding.topology import Topology
from expertmesh.training.attention.packed_attention import choose_attention
from expertmesh.training.data.batch import collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.data.sequences import pack
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.step import compute_gradients, train_step
from tests.distributed.pool import RankPool
from tests.distributed.reference import (
    CAPACITY,
    Case,
    Figures,
    config_of,
    hf_model,
    in_full,
    ours,
    random_samples,
    reference,
    sharded_model,
)
from tests.families.configs import TEXT_IDS, tiny_config, tiny_model
from tests.tiers import REPRESENTATIVES, two_diagonals
from tests.tiny import relative_error

FAMILIES = REPRESENTATIVES[1:]
TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 5e-5
"""AdamW's first steps follow the signs of gradients, also of single numbers that cancel but for noise."""
CANCELLED = 1e-3
"""Gradients below this share of the norm of all are held to the tolerance at that share."""
SAMPLES = random_samples([9 + (5 * i) % 12 for i in range(16)], vocabulary=TEXT_IDS)
ODD: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 1}

CASES: dict[str, tuple[Topology, dict[str, Any]]] = {
    "full": (Topology(4, 2, "hybrid"), dict(accumulation=2, gradient_checkpointing="full")),
    "selective": (
        Topology(4, 4),
        dict(balance=0.05, z=0.01, gradient_checkpointing="selective", kernel="torch-grouped"),
    ),
    "6 experts, top 3": (Topology(4, 2), dict(changes=ODD, kernel="torch-grouped")),
    "a rank without a row": (Topology(4, 4), dict(samples=SAMPLES[:3])),
    "shared rows": (Topology(4, 4, "full", 2), dict(accumulation=2, gradient_checkpointing="selective")),
}
"""Several things a case, where none hides another: each alone is in tests/distributed, for Mixtral."""


def has_auxiliary_loss(family: str) -> bool:
    return hasattr(tiny_config(family), "router_aux_loss_coef")


def case_of(family: str, name: str) -> Case:
    settings = dict(CASES[name][1])
    if not has_auxiliary_loss(family):
        settings |= {"balance": 0.0, "z": 0.0}
    changes = dict(settings.get("changes", {}))
    if changes and hasattr(tiny_config(family), "kv_lora_rank"):
        changes.pop("num_key_value_heads")  # its heads share a compressed key
    return Case(**{"samples": SAMPLES, "family": family, "steps": 2, **settings, "changes": changes})


@cache
def expected(family: str, name: str) -> Figures:
    return reference(case_of(family, name), seed=1)


@pytest.mark.sample(16)
@pytest.mark.parametrize(("family", "name"), two_diagonals(FAMILIES, list(CASES)))
def test_equals_one_process(ranks: RankPool, tmp_path: Path, family: str, name: str) -> None:
    """Losses, gradients and, after two clipped updates by AdamW, weights. Each family's layers are tested on several
    ranks by test_families.py; here each is in two cases, and each case has two families at least."""
    topology, case = CASES[name][0], case_of(family, name)
    hf_model(case, seed=1).save_pretrained(tmp_path)
    found = ranks.run(ours, topology.world_size, tmp_path, topology, case)[0]
    want = expected(family, name)
    assert found.losses == pytest.approx(want.losses, rel=TOLERANCE)
    assert found.grad_norms == pytest.approx(want.grad_norms, rel=TOLERANCE)
    assert found.balance_loss == pytest.approx(want.balance_loss, rel=TOLERANCE)
    assert found.z_loss == pytest.approx(want.z_loss, rel=TOLERANCE)
    compare(found.grads, want.grads, CANCELLED * want.grad_norms[0])
    compare(found.weights, want.weights, 0.0, WEIGHT_TOLERANCE)


def compare(found: dict[str, Tensor], want: dict[str, Tensor], floor: float, tolerance: float = TOLERANCE) -> None:
    # what no token reaches has no gradient in HF's class, and zeros in ours
    for name in found.keys() ^ want.keys():
        assert not found.get(name, want.get(name)).any(), name  # type: ignore[union-attr]
    errors = {name: relative_error(found[name], tensor, floor) for name, tensor in want.items() if name in found}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, wrong


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows(ranks: RankPool, tmp_path: Path, family: str) -> None:
    """The same loss and gradients, whether samples have a row each or share one."""
    tiny_model(family, seed=1).save_pretrained(tmp_path)
    lengths = torch.tensor([len(sample.tokens) for sample in SAMPLES])
    packed = [[SAMPLES[i] for i in row] for row in pack(lengths, CAPACITY, seed=0)]
    (alone,) = ranks.run(_gradients, 1, tmp_path, Topology(1, 1), family, [[sample] for sample in SAMPLES], False)
    norm = float(torch.stack([grad.norm() for grad in alone[1].values()]).norm())
    for topology in [Topology(2, 2), Topology(4, 4, "full", 2)]:
        together = ranks.run(_gradients, topology.world_size, tmp_path, topology, family, packed, True)[0]
        assert together[0] == pytest.approx(alone[0], rel=TOLERANCE)
        compare(together[1], alone[1], CANCELLED * norm)


PACKED: dict[str, tuple[Topology, dict[str, Any]]] = {
    "full": (Topology(4, 2, "hybrid"), dict(gradient_checkpointing="full")),
    "selective": (Topology(4, 4), dict(gradient_checkpointing="selective")),
    "pipeline": (Topology(4, 2, pp_size=2), dict(gradient_checkpointing="selective")),
    "adapters": (Topology(2, 2), dict(settings={"adapter": "lora", "lora_rank": 4, "base_dtype": "nf4"})),
}
"""Layers that run sample by sample, with what else has to do with a layer's forward."""
SPLIT_PACKED: dict[str, tuple[Topology, dict[str, Any]]] = {
    "ep 4, cp 2": (Topology(4, 4, "full", 2), dict(gradient_checkpointing="selective")),
    "pp 2, dp 2, ep 2, cp 2": (Topology(8, 2, "hybrid", 2, 2), dict(gradient_checkpointing="full")),
}
"""The same layers, of sequences that are split over context-parallel ranks."""
STATEFUL = ["qwen3_next", "qwen3_5_moe"]


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "name"), [*zip(cycle(STATEFUL), PACKED, strict=False), *product(STATEFUL, SPLIT_PACKED)]
)
def test_packed_training(ranks: RankPool, tmp_path: Path, family: str, name: str) -> None:
    """Losses and gradient norms of three updates by AdamW, and weights after them: packed on several ranks, or a row
    each in one process. The layers of both families are run sample by sample alike: each case on complete sequences
    has one of them. A pipeline of context-parallel ranks has two ranks of each kind, 8 in all, which is as many as the
    pool starts: ep 4 beside it, on 16, would split the same rows to more ranks."""
    topology, settings = (PACKED | SPLIT_PACKED)[name]
    tiny_model(family, seed=1).save_pretrained(tmp_path)
    lengths = torch.tensor([len(sample.tokens) for sample in SAMPLES])
    packed = [[SAMPLES[i] for i in row] for row in pack(lengths, CAPACITY, seed=0)]
    alone = [[sample] for sample in SAMPLES]
    unpacked = {**settings, "gradient_checkpointing": "none"}
    (expected,) = ranks.run(_trained, 1, tmp_path, Topology(1, 1), family, alone, False, unpacked)
    found = ranks.run(_trained, topology.world_size, tmp_path, topology, family, packed, True, settings)[0]
    losses, grad_norms, weights = found
    assert losses == pytest.approx(expected[0], rel=TOLERANCE)
    assert losses[-1] < losses[0]
    assert grad_norms[0] == pytest.approx(expected[1][0], rel=TOLERANCE)
    # after an update they are of weights that agree to so much
    assert grad_norms == pytest.approx(expected[1], rel=WEIGHT_TOLERANCE)
    compare(weights, expected[2], 0.0, WEIGHT_TOLERANCE)


def _trained(
    path: Path, topology: Topology, family: str, rows: list[list[Sample]], packing: bool, settings: dict[str, Any]
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms, and weights after the last update."""
    flags = {**settings.get("settings", {}), "packing": packing}
    case = Case([], family=family, attention="auto", **{**settings, "settings": flags})
    model, mesh, _ = sharded_model(path, topology, case)
    optimizer = build_optimizer(model.train(), config_of(case, topology), mesh)
    mine = rows[topology.data_index(torch.distributed.get_rank()) :: topology.data_size]
    batches = [collate(some, mesh.cp_group) for some in (mine[:2], mine[2:])]
    results = [train_step(model, optimizer, batches, mesh, LossWeights(0.0, 0.0), 0.5) for _ in range(3)]
    losses, grad_norms = [result.loss for result in results], [result.grad_norm for result in results]
    return losses, grad_norms, in_full(dict(model.named_parameters()))


def _gradients(
    path: Path, topology: Topology, family: str, rows: list[list[Sample]], packing: bool
) -> tuple[float, dict[str, Tensor]]:
    attention = choose_attention("auto", packing, tiny_config(family))
    case = Case([], family=family, attention=attention, settings={"packing": packing})
    model, mesh, _ = sharded_model(path, topology, case)
    mine = rows[topology.data_index(torch.distributed.get_rank()) :: topology.data_size]
    batch = collate(mine, mesh.cp_group)
    result = compute_gradients(model.train(), [batch], LossWeights(0.0, 0.0))
    return result.loss, in_full({n: p.grad for n, p in model.named_parameters() if p.grad is not None})

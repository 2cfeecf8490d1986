"""Micro-batches whose backwards wait while others run: the bits of one after the other, whatever holds what they are
told and leave."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from expertmesh.moe.experts.forward import Forward
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.micro_batch import Denominators, losses_of
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, hf_model, random_samples, sharded_model
from tests.families.configs import TEXT_IDS
from tests.tiers import REPRESENTATIVES, two_diagonals

WEIGHTS = LossWeights(0.05, 0.01)
LENGTHS = {"A": [11, 6, 9, 5], "B": [11, 11, 11, 11], "C": [7, 12, 10, 8]}
"""Of the rows of each micro-batch: of A and B in tensors of one shape, with padding in the first alone."""
ORDERS = {"ABab": "AaBb", "ABba": "BbAa", "ABaCbc": "AaBbCc"}
"""Forwards (A) and backwards (a), and the same backwards each right after its forward."""

WAYS: dict[str, tuple[Topology, dict[str, Any]]] = {
    "none": (Topology(2, 2), dict()),
    "full": (
        Topology(4, 2, "hybrid"),
        dict(gradient_checkpointing="full", settings={"offload_activations": True}),
    ),
    "selective, overlap": (
        Topology(2, 2),
        dict(
            gradient_checkpointing="selective",
            kernel="torch-grouped",
            settings={"overlap_chunks": 2, "keep_expert_products": 1},
        ),
    ),
    "shared rows": (Topology(2, 2, "full", 2), dict(gradient_checkpointing="selective")),
    "shared rows, full": (Topology(4, 2, "full", 2), dict(gradient_checkpointing="full")),
    "adapters": (
        Topology(2, 2),
        dict(gradient_checkpointing="full", settings={"adapter": "lora", "lora_rank": 4, "lora_dropout": 0.2}),
    ),
    "no reshard": (Topology(4, 2), dict(compute_dtype=torch.bfloat16, settings={"reshard_after_forward": False})),
    "fp8": (
        Topology(2, 1),
        dict(kernel="fp8", compute_dtype=torch.bfloat16, gradient_checkpointing="selective"),
    ),
}
"""How a forward is run and repeated: all that holds something of it does so in one of these."""
STATEFUL = "qwen3_next"


@dataclass(frozen=True)
class Found:
    """Losses and routing of each micro-batch by name, and the gradients of all by their parameters' names."""

    left: dict[str, dict[str, Tensor]]
    grads: dict[str, Tensor]


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("family", "way"),
    list(dict.fromkeys([*two_diagonals(REPRESENTATIVES, list(WAYS)), *((STATEFUL, way) for way in WAYS)])),
)
def test_bits_are_those_of_one_after_the_other(ranks: RankPool, tmp_path: Path, family: str, way: str) -> None:
    """Layers that carry a state are tested in every way; those of other families leave nothing for a backward but what
    autograd holds, whatever the way."""
    topology, settings = WAYS[way]
    case = Case([], **{"family": family, **settings})
    # widths that fp8 takes
    changes = {"hidden_size": 32, "moe_intermediate_size": 32, "intermediate_size": 32} if way == "fp8" else {}
    hf_model(replace(case, changes=changes), seed=1).save_pretrained(tmp_path)
    for found in ranks.run(_in_all_orders, topology.world_size, tmp_path, topology, case):
        for order, plain in ORDERS.items():
            assert _differing(found[order], found[plain]) == [], order
        # what is compared is not nothing, and what one micro-batch leaves is not what another does
        alone = found["Aa"]
        assert all(grad.isfinite().all() for grad in alone.grads.values())
        assert _differing(alone, found["AaBb"])
        left = found["AaBb"].left
        assert not torch.equal(left["A"]["losses"], left["B"]["losses"])
        assert not torch.equal(left["A"]["counts"], left["B"]["counts"])


def _in_all_orders(path: Path, topology: Topology, case: Case) -> dict[str, Found]:
    model, batches = _model_and_batches(path, topology, case)
    return {order: _run(model, batches, order) for order in ("Aa", *ORDERS, *ORDERS.values())}


def _model_and_batches(path: Path, topology: Topology, case: Case) -> tuple[Any, dict[str, Batch]]:
    model, mesh, _ = sharded_model(path, topology, case)
    index = topology.data_index(dist.get_rank())
    batches = {}
    for number, (name, lengths) in enumerate(LENGTHS.items()):
        # each reader of data has rows of its own
        samples = random_samples(lengths, vocabulary=TEXT_IDS, seed=10 * index + number)
        batches[name] = collate([[sample] for sample in samples], mesh.cp_group)
    padded = [batch.is_token_BS is not None for batch in (batches["A"], batches["B"])]
    assert padded == [True, False] or topology.cp_size > 1, "a rank that has the beginnings of rows may have none"
    return model.train(), batches


def _run(model: Any, batches: dict[str, Batch], order: str) -> Found:
    waiting: dict[str, Tensor] = {}
    left: dict[str, dict[str, Tensor]] = {}
    model.zero_grad()
    for letter in order:
        if letter.islower():
            waiting.pop(letter.upper()).backward()
            continue
        batch = batches[letter]
        # dropout's numbers are the same for a micro-batch, whatever ran before
        torch.manual_seed(1 + sum(map(ord, letter)))
        over = Denominators(batch.num_targets + 1, torch.tensor(batch.num_tokens + 1), batch.num_tokens + 1, 2)
        losses = losses_of(model, batch, WEIGHTS, over)
        waiting[letter] = losses.total(WEIGHTS)
        routing = losses.routing
        left[letter] = {
            "losses": losses.values(),
            "counts": routing.counts_LE,
            "entropies": routing.entropy_L,
            "rows": routing.rows_computed_L,
        }
    assert not waiting
    grads = {name: local_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return Found(left, grads)


def _differing(found: Found, other: Found) -> list[str]:
    """Names of what has other bits."""
    names = [name for name in found.grads.keys() & other.grads if not torch.equal(found.grads[name], other.grads[name])]
    for micro in found.left.keys() & other.left:
        theirs = other.left[micro]
        names += [f"{micro} {name}" for name, figure in found.left[micro].items() if not _same(figure, theirs[name])]
    return names + sorted(found.grads.keys() ^ other.grads.keys())


def _same(figure: Tensor, other: Tensor) -> bool:
    # NaN where a router's logits are not to be had
    return torch.equal(figure.nan_to_num(-1.0), other.nan_to_num(-1.0))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_by_whatever_thread(ranks: RankPool, tmp_path: Path, mode: str) -> None:
    """On a GPU a thread of autograd's runs layers again, for which nothing is current that the forward's thread set."""
    case = Case([], gradient_checkpointing=mode)  # type: ignore[arg-type]
    hf_model(case, seed=1).save_pretrained(tmp_path)
    ((here, elsewhere),) = ranks.run(_here_and_elsewhere, 1, tmp_path, case)
    assert _differing(elsewhere, here) == []


def _here_and_elsewhere(path: Path, case: Case) -> tuple[Found, Found]:
    model, batches = _model_and_batches(path, Topology(1, 1), case)
    backward = Tensor.backward
    with (
        ThreadPoolExecutor(1) as other,
        mock.patch.object(Tensor, "backward", lambda x: other.submit(backward, x).result()),
    ):
        elsewhere = _run(model, batches, "ABba")
    return _run(model, batches, "ABba"), elsewhere


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_is_told_of_another_forward_would_show(ranks: RankPool, tmp_path: Path, mode: str) -> None:
    """The comparison of orders fails where a layer is run again by what the latest forward was told."""
    case = Case([], gradient_checkpointing=mode)  # type: ignore[arg-type]
    hf_model(case, seed=1).save_pretrained(tmp_path)
    assert ranks.run(_by_the_latest, 1, tmp_path, case) == [True]


def _by_the_latest(path: Path, case: Case) -> bool:
    model, batches = _model_and_batches(path, Topology(1, 1), case)
    latest: list[Forward] = []
    enter = Forward.__enter__

    def enter_told_otherwise(self: Forward) -> Forward:
        if self.is_again:
            self.is_token_BS = latest[-1].is_token_BS
        else:
            latest.append(self)
        return enter(self)

    with mock.patch.object(Forward, "__enter__", enter_told_otherwise):
        plain = _run(model, batches, "AaBb")
        try:
            found = _run(model, batches, "ABab")
        except CheckpointError:
            return True  # other numbers of tensors, or of other shapes
    return bool(_differing(found, plain))

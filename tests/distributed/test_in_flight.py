"""Micro-batches whose backwards wait while others run, and gradients of experts' weights that backward leaves for
later: the bits of one after the other, whatever holds what they are told and leave."""

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.sharding.parallelize.weight_gradients import weight_gradients
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.steps.micro_batch import (
    Denominators,
    LossSums,
    PooledCounts,
    forward_of,
    routing_of,
    token_loss_sum,
    weigh_losses,
)
from tests.distributed.pool import RankPool
from tests.distributed.reference import sharded_model
from tests.families.configs import TEXT_IDS
from tests.parity import within
from tests.parity.case import Case, hf_model, random_samples
from tests.parity.rows import case_of, topology_of

WEIGHTS = LossWeights(0.05, 0.01)
LENGTHS = {"A": [11, 6, 9, 5], "B": [11, 11, 11, 11], "C": [7, 12, 10, 8]}
"""Of the rows of each micro-batch: of A and B in tensors of one shape, with padding in the first alone."""
ORDERS = {"ABab": "AaBb", "ABba": "BbAa", "ABaCbc": "AaBbCc"}
"""Forwards (A) and backwards (a), and the same backwards each right after its forward."""
LATER = {
    "ABa'b'12": "AaBb",
    "Aa'B1b'2": "AaBb",
    "Aa'1Bb'2": "AaBb",
    "ABCa'b'1c'23": "AaBbCc",
    # nothing waits of what is not asked to
    "AaBb": "AaBb",
}
"""With backwards that leave weights' gradients for later (a'), and those (1)."""

GROUPED: dict[str, Any] = {"kernel": "torch-grouped"}
BF16: dict[str, Any] = {"compute_dtype": torch.bfloat16}
FULL: dict[str, Any] = {"gradient_checkpointing": "full"}
SELECTIVE: dict[str, Any] = {"gradient_checkpointing": "selective"}
KEPT = SELECTIVE | {"overlap_chunks": 2, "keep_expert_products": 1}
# widths that fp8 takes
SMALL: dict[str, Any] = {"hidden_size": 32, "moe_intermediate_size": 32, "intermediate_size": 32}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("1", {}),
    "ep, full": ("2 ep 2", GROUPED | BF16 | FULL | {"overlap_chunks": 2}),
    "ep, kept": ("2 ep 2", GROUPED | KEPT),
    "dp": ("2", SELECTIVE),
    "dp and ep": ("4 ep 2 hybrid", GROUPED | BF16 | FULL | {"offload_activations": True}),
    "copies": ("3", BF16 | {"reshard_after_forward": False}),
    "copies, ep": ("4 ep 2", BF16 | SELECTIVE | {"overlap_chunks": 2, "reshard_after_forward": False}),
    "offload": ("2", GROUPED | FULL | {"offload": True}),
    "cp": ("2 ep 2 cp 2", SELECTIVE),
    "cp, full": ("4 ep 2 cp 2", FULL),
    "adapters": ("2 ep 2", FULL | {"adapter": "lora", "lora_rank": 4, "lora_dropout": 0.2}),
    "fp8": ("2", BF16 | SELECTIVE | {"kernel": "fp8", "changes": SMALL}),
    "joined, kept": ("2 ep 2", GROUPED | BF16 | KEPT | {"within": within.joined}),
    "joined, copies": ("2 ep 2", GROUPED | BF16 | FULL | {"reshard_after_forward": False, "within": within.joined}),
}
"""How a forward is run and repeated: all that holds something of it does so in one of these."""
STATEFUL = "qwen3_next"
IN_QUICK = [("mixtral", "joined, kept")]
OTHERS = [
    (STATEFUL, "cp"),
    *(("mixtral", way) for way in WAYS),
    *((STATEFUL, way) for way in ("plain", "dp and ep", "adapters", "cp, full")),
    *(("gpt_oss", way) for way in ("ep, kept", "dp", "dp and ep")),
    ("deepseek_v3", "cp"),
]


@dataclass(frozen=True)
class Found:
    """Losses and routing of each micro-batch by name, and the gradients of all by their parameters' names."""

    left: dict[str, dict[str, Tensor]]
    grads: dict[str, Tensor]


@pytest.mark.parametrize(
    ("family", "way"),
    [*IN_QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS if pair not in IN_QUICK)],
)
def test_bits_are_those_of_one_after_the_other(ranks: RankPool, tmp_path: Path, family: str, way: str) -> None:
    """Layers that carry a state are tested in most ways; those of other families leave nothing for a backward but what
    autograd holds, whatever the way."""
    settings = {"family": family, "samples": [], **WAYS[way][1]}
    inside = settings.pop("within", nullcontext)
    case, topology = case_of(settings), topology_of(WAYS[way][0])
    hf_model(case).save_pretrained(tmp_path)
    for found, later in ranks.run(_in_all_orders, topology.world_size, tmp_path, topology, case, inside):
        for order, plain in ORDERS.items():
            assert _differing(found[order], found[plain]) == [], order
        for order, figures in later.items():
            assert _differing(figures, found[LATER[order]]) == [], order
        # what is compared is not nothing, and what one micro-batch leaves is not what another does
        alone, left = found["Aa"], found["AaBb"].left
        assert all(grad.isfinite().all() for grad in alone.grads.values())
        assert way == "adapters" or any(grad.any() for name, grad in alone.grads.items() if name.endswith(".w1"))
        assert _differing(alone, found["AaBb"])
        assert not torch.equal(left["A"]["losses"], left["B"]["losses"])
        assert not torch.equal(left["A"]["counts"], left["B"]["counts"])


def _in_all_orders(
    path: Path, topology: Topology, case: Case, inside: Callable[[], AbstractContextManager[object]]
) -> tuple[dict[str, Found], dict[str, Found]]:
    with inside():
        model, mesh, batches = _model_and_batches(path, topology, case)
        orders = ("Aa", *ORDERS, *ORDERS.values())
        later = {} if "adapter" in case.settings else LATER
        return (
            {order: _run(model, batches, order) for order in orders},
            {order: _run(model, batches, order, weight_gradients(model, mesh)) for order in later},
        )


def _model_and_batches(path: Path, topology: Topology, case: Case) -> tuple[Any, Any, dict[str, Batch]]:
    model, mesh, _ = sharded_model(path, topology, case)
    index = topology.data_index(dist.get_rank())
    batches = {}
    for number, (name, lengths) in enumerate(LENGTHS.items()):
        # each reader of data has rows of its own
        samples = random_samples(lengths, vocabulary=TEXT_IDS, seed=10 * index + number)
        batches[name] = collate([[sample] for sample in samples], mesh.cp_group)
    padded = [batch.is_token_BS is not None for batch in (batches["A"], batches["B"])]
    assert padded == [True, False] or topology.cp_size > 1, "a rank that has the beginnings of rows may have none"
    return model.train(), mesh, batches


def _run(model: Any, batches: dict[str, Batch], order: str, queue: Any = None) -> Found:
    """
    Args:
        queue: where backwards may leave gradients of weights.
    """
    waiting: dict[str, Tensor] = {}
    left: dict[str, dict[str, Tensor]] = {}
    model.zero_grad()
    # as they are sharded, before any forward
    matrices = {
        f"{number} {name}": parameter
        for number, layer in enumerate(moe_layers(model))
        for name, parameter in layer.mlp.named_parameters()
        if not name.endswith("_bias")
    }
    for action in re.findall("[a-z]'?|.", order):
        if action.isdigit():
            queue.compute(int(action))
        elif action.endswith("'"):
            earlier, held = _gradients(matrices.items()), (len(queue), queue.bytes)
            with queue.collecting(ord(action[0]) - ord("a") + 1):
                waiting.pop(action[0].upper()).backward()
            assert len(queue) == held[0] + 1
            assert queue.bytes > held[1]
            now = _gradients(matrices.items())
            assert now.keys() == earlier.keys()
            assert all(torch.equal(grad, now[name]) for name, grad in earlier.items())
        elif action.islower():
            waiting.pop(action.upper()).backward()
        else:
            waiting[action], left[action] = _forward(model, batches[action], action, queue)
    assert not waiting
    assert queue is None or (len(queue), queue.bytes) == (0, 0)
    return Found(left, _gradients(model.named_parameters()))


def _forward(model: Any, batch: Batch, name: str, queue: Any) -> tuple[Tensor, dict[str, Tensor]]:
    # dropout's numbers are the same for a micro-batch, whatever ran before
    torch.manual_seed(ord(name))
    over = Denominators(batch.num_targets + 1, batch.num_tokens + 1, batch.num_tokens + 1, 2)
    forward = forward_of(batch)
    forward.weight_gradients = queue
    loss_sum = token_loss_sum(model, batch, forward)
    stats = forward.take_stats(moe_layers(model))
    counts = PooledCounts(stats, WEIGHTS, None)
    losses = weigh_losses(LossSums(loss_sum), stats, routing_of(stats), WEIGHTS, over, counts)
    routing = losses.routing
    figures = (losses.values(), routing.counts_LE, routing.entropy_L, routing.rows_computed_L)
    return losses.total(WEIGHTS), dict(zip(("losses", "counts", "entropies", "rows"), figures, strict=True))


def _gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {name: local_tensor(p.grad).clone() for name, p in parameters if p.grad is not None}


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
def test_by_whatever_thread_and_told_of_another(ranks: RankPool, tmp_path: Path, mode: Any) -> None:
    """On a GPU a thread of autograd's runs layers again, for which nothing is current that the forward's thread set.
    And were a layer run again by what the latest forward was told, the comparison of orders would fail."""
    case = Case([], gradient_checkpointing=mode)
    hf_model(case).save_pretrained(tmp_path)
    ((here, elsewhere, is_seen),) = ranks.run(_elsewhere_and_by_the_latest, 1, tmp_path, case)
    assert _differing(elsewhere, here) == []
    assert is_seen


def _elsewhere_and_by_the_latest(path: Path, case: Case) -> tuple[Found, Found, bool]:
    model, _, batches = _model_and_batches(path, Topology(1, 1), case)
    backward, enter = Tensor.backward, Forward.__enter__
    with (
        ThreadPoolExecutor(1) as other,
        mock.patch.object(Tensor, "backward", lambda x: other.submit(backward, x).result()),
    ):
        elsewhere = _run(model, batches, "ABba")
    here = _run(model, batches, "ABba")
    latest: list[Forward] = []

    def enter_told_otherwise(self: Forward) -> Forward:
        if self.is_again:
            self.is_token_BS = latest[-1].is_token_BS
        else:
            latest.append(self)
        return enter(self)

    with mock.patch.object(Forward, "__enter__", enter_told_otherwise):
        plain = _run(model, batches, "AaBb")
        try:
            return here, elsewhere, bool(_differing(_run(model, batches, "ABab"), plain))
        except CheckpointError:
            return here, elsewhere, True  # other numbers of tensors, or of other shapes

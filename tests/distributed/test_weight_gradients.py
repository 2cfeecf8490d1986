"""Gradients of experts' weights that backward leaves for later: the bits of those that it computes itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.sharding.parallelize.weight_gradients import weight_gradients
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.micro_batch import forward_of, token_loss_sum
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, hf_model, random_samples, sharded_model
from tests.families.configs import TEXT_IDS

LENGTHS = {"A": [11, 6, 9, 5], "B": [7, 12, 10, 8], "C": [6, 6, 11, 9]}
"""Of the sequences of each micro-batch."""
PLAIN = {"AB": "Aa Bb", "ABC": "Aa Bb Cc"}
ORDERS = {
    "AB a b 1 2": "AB",
    "A a B 1 b 2": "AB",
    "A a 1 B b 2": "AB",
    "ABC a b 1 c 2 3": "ABC",
    # nothing waits of what is not asked to
    "Aa Bb": "AB",
}
"""Forwards (A), backwards that leave weights' gradients for later (a, after a space), those (1), and backwards that do
not (a, right after its forward); and the micro-batches, each of which must have the gradients that it has in PLAIN."""

GROUPED: dict[str, Any] = dict(kernel="torch-grouped")
BF16: dict[str, Any] = dict(compute_dtype=torch.bfloat16)
SMALL: dict[str, Any] = {"hidden_size": 32, "moe_intermediate_size": 32, "intermediate_size": 32}

WAYS: dict[str, tuple[Topology, dict[str, Any]]] = {
    "one rank": (Topology(1, 1), dict()),
    "ep": (Topology(2, 2), GROUPED | BF16 | dict(gradient_checkpointing="full", settings={"overlap_chunks": 2})),
    "ep, fp32": (
        Topology(2, 2),
        dict(gradient_checkpointing="selective", settings={"overlap_chunks": 2, "keep_expert_products": 1}),
    ),
    "dp": (Topology(2, 1), dict(gradient_checkpointing="selective")),
    "dp and ep": (Topology(4, 2, "hybrid"), GROUPED | BF16 | dict(gradient_checkpointing="full")),
    "dp and ep, overlap": (
        Topology(4, 2),
        dict(gradient_checkpointing="selective", settings={"overlap_chunks": 2, "reshard_after_forward": False}),
    ),
    "uneven": (Topology(3, 1), BF16 | dict(settings={"reshard_after_forward": False})),
    "offload": (Topology(1, 1), dict(settings={"offload": True})),
    "offload, dp": (Topology(2, 1), GROUPED | dict(gradient_checkpointing="full", settings={"offload": True})),
    "no reshard": (Topology(2, 2), BF16 | dict(settings={"reshard_after_forward": False})),
    "fp8": (Topology(2, 1), BF16 | dict(kernel="fp8", gradient_checkpointing="selective", changes=SMALL)),
}


CASES = [("mixtral", way) for way in WAYS] + [("gpt_oss", way) for way in ("ep", "dp", "dp and ep")]


@pytest.mark.sample(12)
@pytest.mark.parametrize(("family", "way"), CASES)
def test_bits_are_those_of_an_ordinary_backward(ranks: RankPool, tmp_path: Path, family: str, way: str) -> None:
    topology, settings = WAYS[way]
    case = Case([], **{"family": family, **settings})
    hf_model(case, seed=1).save_pretrained(tmp_path)
    for plain, found in ranks.run(_in_all_orders, topology.world_size, tmp_path, topology, case):
        for order, micro_batches in ORDERS.items():
            expected = plain[micro_batches]
            assert expected.keys() == found[order].keys()
            assert [name for name, grad in expected.items() if not torch.equal(grad, found[order][name])] == [], order
            assert all(grad.isfinite().all() for grad in expected.values())
            assert any(grad.any() for name, grad in expected.items() if name.endswith(".w1"))


Gradients = dict[str, Tensor]


def _in_all_orders(path: Path, topology: Topology, case: Case) -> tuple[dict[str, Gradients], dict[str, Gradients]]:
    model, mesh, _ = sharded_model(path, topology, case)
    model.train()
    index = topology.data_index(dist.get_rank())
    batches = {
        # each reader of data has sequences of its own
        name: collate([[sample] for sample in random_samples(lengths, vocabulary=TEXT_IDS, seed=10 * index + number)])
        for number, (name, lengths) in enumerate(LENGTHS.items())
    }
    plain = {micro_batches: _run(model, mesh, batches, order, False) for micro_batches, order in PLAIN.items()}
    return plain, {order: _run(model, mesh, batches, order, True) for order in ORDERS}


def _run(model: Any, mesh: Any, batches: Mapping[str, Batch], order: str, is_deferrable: bool) -> Gradients:
    queue, matrices = weight_gradients(model, mesh), _matrices(model)
    losses: dict[str, Tensor] = {}
    model.zero_grad()
    for before, action in zip(" " + order, order, strict=False):
        if action.isupper():
            forward = forward_of(batches[action])
            forward.weight_gradients = queue if is_deferrable else None
            losses[action] = token_loss_sum(model, batches[action], forward) / 50
        elif action.isdigit():
            queue.compute(int(action))
        elif action.islower() and before == " ":
            earlier = _gradients_of(matrices)
            waiting, held = len(queue), queue.bytes
            with queue.collecting(ord(action) - ord("a") + 1):
                losses.pop(action.upper()).backward()
            assert (len(queue), queue.bytes > held) == (waiting + 1, True)
            # no matrix's gradient has changed
            assert all(torch.equal(grad, _gradients_of(matrices)[name]) for name, grad in earlier.items())
            assert _gradients_of(matrices).keys() == earlier.keys()
        elif action.islower():
            losses.pop(action.upper()).backward()
            assert len(queue) == 0
    assert (len(queue), queue.bytes, losses) == (0, 0, {})
    return {name: local_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def _matrices(model: Any) -> dict[str, nn.Parameter]:
    """Experts' matrices as they are sharded."""
    return {
        f"{number} {name}": parameter
        for number, layer in enumerate(moe_layers(model))
        for name, parameter in layer.mlp.named_parameters()
        if not name.endswith("_bias")
    }


def _gradients_of(parameters: Mapping[str, nn.Parameter]) -> Gradients:
    return {name: local_tensor(p.grad).clone() for name, p in parameters.items() if p.grad is not None}

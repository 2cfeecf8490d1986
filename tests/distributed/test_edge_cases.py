"""Batches that starve a rank or an expert, more replicas than experts, and bits that must not change."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.experts.router_stats import over_ranks
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from expertmesh.training.data.batch import collate
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.step import compute_gradients
from tests.distributed.pool import RankPool
from tests.distributed.reference import (
    Case,
    attention_mask,
    in_full,
    in_our_layout,
    my_batches,
    ours,
    random_samples,
    reference,
    sharded_model,
    unshifted_labels,
)
from tests.distributed.test_parity import SAMPLES, assert_same
from tests.tiny import save_model, tiny_mixtral

TOP_1 = {"num_experts_per_tok": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that saves the model with the given changes, once."""
    saved: dict[str, Path] = {}

    def save(**changes: Any) -> Path:
        key = str(sorted(changes.items()))
        if key not in saved:
            saved[key] = tmp_path_factory.mktemp("edge")
            save_model(saved[key], **changes)
        return saved[key]

    return save


@pytest.mark.sample(3)
@pytest.mark.parametrize("kernel", ["loop", "torch-grouped"])
@pytest.mark.parametrize(("world_size", "ep_size"), [(1, 1), (4, 4), (4, 2)])
def test_all_tokens_to_one_expert(ranks: RankPool, tmp_path: Path, world_size: int, ep_size: int, kernel: str) -> None:
    """A router of zeros ties all experts, and top-1 then takes the same one for every token: the ranks without it
    receive no row, and its peers are never chosen."""
    model = tiny_mixtral(**TOP_1)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            torch.nn.init.zeros_(parameter)
    model.save_pretrained(tmp_path)
    topology = Topology(world_size, ep_size)
    case = Case(SAMPLES[:8], balance=0.05, kernel=kernel, steps=1)
    figures = ranks.run(_with_counts, world_size, tmp_path, topology, case)
    counts_LE, grads = figures[0]
    assert (counts_LE > 0).sum(dim=1).tolist() == [1, 1]

    expected_grads = _reference_grads(model.train(), case)
    assert grads.keys() == expected_grads.keys()
    for name, expected in expected_grads.items():
        torch.testing.assert_close(grads[name], expected, rtol=1e-4, atol=1e-7, msg=name)


def _with_counts(path: Path, topology: Topology, case: Case) -> Any:
    model, _, _ = sharded_model(path, topology, case)
    batches = my_batches(case, topology, torch.distributed.get_rank())
    result = compute_gradients(model.train(), batches, LossWeights(case.balance, case.z))
    return over_ranks(result.routing).counts_LE, in_full({n: p.grad for n, p in model.named_parameters()})


def _reference_grads(model: Any, case: Case) -> dict[str, torch.Tensor]:
    batch = collate([[sample] for sample in case.samples])
    labels = unshifted_labels(case.samples, batch)
    out = model(
        input_ids=batch.tokens_BS, attention_mask=attention_mask(batch), labels=labels, output_router_logits=True
    )
    (out.loss + (case.balance - model.router_aux_loss_coef) * out.aux_loss).backward()
    return in_our_layout(model, "grad")


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    "lengths", [[9], [2], [1], [2, 11], [1, 1, 30]], ids=["one row", "one target", "no target", "two rows", "uneven"]
)
@pytest.mark.parametrize(("world_size", "ep_size"), [(2, 2), (4, 2), (4, 4)])
def test_fewer_rows_than_ranks(ranks: RankPool, models: Any, world_size: int, ep_size: int, lengths: list[int]) -> None:
    """Ranks without a row, and so without a token, take part with a position of padding."""
    case = Case(random_samples(lengths), balance=0.05, z=0.01, steps=1)
    found = ranks.run(ours, world_size, models(), Topology(world_size, ep_size), case)[0]
    # Of two tokens, query and key gradients all but cancel, to 1e-4 to 6e-4 of the global norm: of what is left, HF's
    # fp32 and ours are each 0.3e-5 to 2e-5 off HF's fp64. So they are held to 1e-5 of 2e-3 of the global norm.
    assert_same(found, reference(case), case, cancelled=2e-3)


TIED = {"num_key_value_heads": 1, "tie_word_embeddings": True}


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("topology", "changes"),
    [
        (Topology(4, 2), {"num_local_experts": 2}),
        # each expert's rows on four ranks
        (Topology(8, 2, "hybrid"), {"num_local_experts": 2}),
        (Topology(4, 4), {"num_local_experts": 4, "intermediate_size": 20}),
        (Topology(4, 2, "hybrid"), {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 16}),
        # of the dense part, the one that hybrid shards otherwise
        (Topology(4, 4), TIED),
        (Topology(4, 2, "hybrid"), TIED),
        (Topology(8, 4), {"sliding_window": 4, "num_hidden_layers": 3}),
    ],
    ids=[
        *("2 experts on 4", "2 experts on 8", "4 experts on 4", "6 experts top-3, F < D"),
        *("tied", "tied, hybrid", "sliding window"),
    ],
)
def test_other_shapes(ranks: RankPool, models: Any, topology: Topology, changes: dict[str, Any]) -> None:
    case = Case(SAMPLES, balance=0.05, changes=changes)
    found = ranks.run(ours, topology.world_size, models(**changes), topology, case)[0]
    assert_same(found, reference(case), case)


NOISY = {"router_jitter_noise": 0.2, "attention_dropout": 0.1}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("world_size", "ep_size", "changes", "dtype"),
    [
        (1, 1, {}, torch.float32),
        (1, 1, NOISY, torch.bfloat16),
        (4, 2, NOISY, torch.float32),
        (4, 2, NOISY, torch.bfloat16),
        (4, 4, NOISY, torch.float32),
        (4, 4, {}, torch.bfloat16),
    ],
)
def test_same_bits_with_checkpointing_and_again(
    ranks: RankPool, models: Any, world_size: int, ep_size: int, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    """Recomputation, of all or of some, changes no bit, not even with random noise in the router's input; nor does a
    second run."""
    case = Case(SAMPLES[:16], balance=0.05, z=0.01, compute_dtype=dtype)
    topology = Topology(world_size, ep_size)
    first, *others = (
        ranks.run(_local_bits, world_size, models(**changes), topology, replace(case, gradient_checkpointing=mode))
        for mode in ("none", "none", "full", "selective")
    )
    for rank in range(world_size):
        for other in (results[rank] for results in others):
            assert other[0] == first[rank][0]
            differing = [name for name, grad in first[rank][1].items() if not torch.equal(grad, other[1][name])]
            assert not differing


def _local_bits(path: Path, topology: Topology, case: Case) -> Any:
    model, _, _ = sharded_model(path, topology, case)
    rank = torch.distributed.get_rank()
    torch.manual_seed(100 + rank)
    result = compute_gradients(model.train(), my_batches(case, topology, rank), LossWeights(case.balance, case.z))
    # a forward that outlived its backward would keep alive what was computed in it
    assert not [each for each in gc.get_objects() if isinstance(each, Forward)]
    return result.loss, {n: local_tensor(p.grad).clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("world_size", "ep_size"), [(1, 1), (4, 2)])
def test_bf16_is_near_fp32(ranks: RankPool, models: Any, world_size: int, ep_size: int) -> None:
    """bf16 by FSDP's policy: near HF's fp32, with gradients reduced and held in fp32."""
    case = Case(SAMPLES[:16], compute_dtype=torch.bfloat16, steps=1)
    found = ranks.run(ours, world_size, models(), Topology(world_size, ep_size), case)[0]
    exact = reference(case)
    assert found.losses == pytest.approx(exact.losses, rel=5e-3)
    assert all(grad.dtype == torch.float32 for grad in found.grads.values())
    assert found.grad_norms == pytest.approx(exact.grad_norms, rel=5e-2)

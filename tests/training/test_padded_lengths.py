"""Sequences that are padded to lengths which a GPU's attention has met before give what they give alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from expertmesh.moe.hf_model.build import build_model
from expertmesh.training.attention.packed_attention import choose_attention
from expertmesh.training.attention.padded_lengths import batch_maker_of
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import Batch, BatchMaker, collate
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.loss.head import attach_loss_head
from expertmesh.training.steps.step import compute_gradients
from tests.parity.case import random_samples
from tests.rounding import OTHER_ORDER, gradient_errors, near
from tests.tiny import loaded, tiny_config, tiny_mixtral

ROWS = [[sample] for sample in random_samples([9, 30, 17])]


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(model="model", dataset=["data"], **settings)


@pytest.mark.parametrize(
    ("longest", "multiple", "limit", "expected"),
    [(1, 128, None, 128), (128, 128, None, 128), (129, 128, None, 256), (129, 128, 200, 200), (300, 128, 200, 300)],
)
def test_lengths(longest: int, multiple: int, limit: int | None, expected: int) -> None:
    assert BatchMaker(multiple, limit).length(longest) == expected
    assert BatchMaker(multiple).within(limit or 10**6).length(longest) == expected
    assert BatchMaker(multiple, limit).within(longest).length(longest) == longest


def test_only_padding_is_added() -> None:
    short, long = collate(ROWS), collate(ROWS, maker=BatchMaker(128))
    assert (short.tokens_BS.shape, long.tokens_BS.shape) == ((3, 30), (3, 128))
    assert (long.num_tokens, long.num_targets, long.spans) == (short.num_tokens, short.num_targets, short.spans)
    assert long.is_token_BS is not None
    assert short.is_token_BS is not None
    assert torch.equal(long.is_token_BS[:, :30], short.is_token_BS)
    assert not long.is_token_BS[:, 30:].any()
    assert torch.equal(long.tokens_BS[:, :30], short.tokens_BS)
    assert torch.equal(long.targets_BS[:, :30], short.targets_BS)
    assert (long.targets_BS[:, 30:] == -100).all()


def test_losses_gradients_and_routing_are_the_same(ranks: Any) -> None:
    ranks.run(_compare, 1)


def _compare() -> None:
    theirs = tiny_mixtral()
    found = []
    for maker in (BatchMaker(), BatchMaker(128)):
        model: Any = loaded(build_model(theirs.config), theirs)
        attach_loss_head(model, "chunked")
        batches: list[Batch] = [collate(rows, maker=maker) for rows in (ROWS, ROWS[:1])]
        result = compute_gradients(model, batches, LossWeights(0.02, 0.001))
        found.append((result, {name: weight.grad for name, weight in model.named_parameters()}))
    (alone, grads), (padded, other_grads) = found
    assert (alone.tokens, alone.targets, alone.pairs) == (padded.tokens, padded.targets, padded.pairs)
    for name in ("loss", "balance_loss", "z_loss"):
        assert getattr(alone, name) == near(getattr(padded, name))
    errors = gradient_errors(other_grads, grads)
    assert max(errors.values()) <= OTHER_ORDER, errors


def test_on_a_gpu_lengths_are_rounded_up_where_sdpa_attends() -> None:
    def of(device: str, changes: dict[str, Any] | None = None, **settings: Any) -> BatchMaker:
        flags, model_config = config(**settings), tiny_config(**(changes or {}))
        model = build_model(
            model_config, choose_attention(flags.attn_implementation, bool(flags.packing), model_config)
        )
        return replace(batch_maker_of(model, flags, device), routes=None)

    assert of("cuda") == BatchMaker(128, 512)
    assert of("cpu") == of("cuda", packing=True) == of("cuda", attn_implementation="eager") == BatchMaker()
    by_length = {"head_dim": 8, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    assert of("cuda", by_length) == BatchMaker(), "with the length its positions would change"

"""A forward is current while its model runs, and no longer; and what runs a layer again must know of which it is."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from expertmesh.moe.experts.forward import Forward, current_forward, give_forwards
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from tests.tiny import loaded, tiny_block, tiny_config, tiny_mixtral

TOKENS_BS = torch.arange(8).view(2, 4)


def model() -> Any:
    return loaded(build_model(tiny_config()), tiny_mixtral())


def forwards() -> list[Forward]:
    """All that there are in this process: an error's traceback, in a cycle, may still hold one of another test's."""
    return [each for each in gc.get_objects() if isinstance(each, Forward)]


class Told(torch.nn.Module):
    """A model that keeps what was current when it was called."""

    def __init__(self, error: Exception | None = None):
        super().__init__()
        self.error = error
        self.seen: list[Forward | None] = []
        give_forwards(self)

    def forward(self, input_ids: Any, attention_mask: Any = None) -> None:
        self.seen.append(current_forward())
        if self.error is not None:
            raise self.error


def test_a_call_without_a_forward_has_one_of_its_own() -> None:
    told = Told()
    mask_BS = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])
    told(TOKENS_BS, attention_mask=mask_BS)
    # as with a key-value cache
    told(input_ids=TOKENS_BS[:, :1], attention_mask=mask_BS)
    told(TOKENS_BS)
    masks = [None if each is None or each.is_token_BS is None else each.is_token_BS.tolist() for each in told.seen]
    assert masks == [mask_BS.bool().tolist(), [[False], [True]], None]
    assert current_forward() is None


def test_it_is_over_when_the_call_is_whatever_ends_it() -> None:
    told = Told(KeyError("in the model"))
    with pytest.raises(KeyError):
        told(TOKENS_BS)
    assert told.seen != [None]
    assert current_forward() is None
    with pytest.raises(KeyError), Forward() as forward:
        told(TOKENS_BS)
    assert told.seen[1] is forward
    assert current_forward() is None


def test_a_forward_is_of_one_call() -> None:
    told = Told()
    with Forward() as forward:
        told(TOKENS_BS)
        assert current_forward() is forward
        with pytest.raises(AssertionError, match="one forward of a model"):
            told(TOKENS_BS)


def test_one_that_has_ended_does_not_hold_the_one_before() -> None:
    """Which may hold it, as what regions of tensor parallelism have in common does: neither is to wait for the garbage
    collector."""
    gc.disable()
    try:
        outer = Forward()
        with outer, outer.of_complete_sequences(None) as inner:
            outer.within_tp = inner
        gone = weakref.ref(outer)
        del outer, inner
        assert gone() is None
    finally:
        gc.enable()


def test_statistics_are_taken_once() -> None:
    swapped, forward = model(), Forward()
    with pytest.raises(AssertionError, match="before the forward, or twice"):
        forward.take_stats(moe_layers(swapped))
    with forward:
        swapped(TOKENS_BS)
    assert [int(stats.counts_E.sum()) for stats in forward.take_stats(moe_layers(swapped))] == [2 * 8] * 2
    with pytest.raises(AssertionError, match="before the forward, or twice"):
        forward.take_stats(moe_layers(swapped))


def test_nothing_of_a_call_is_left() -> None:
    """Not even by those who never ask for what it leaves: a loop of transformers' own."""
    swapped, earlier = model().train(), forwards()
    loss = swapped(TOKENS_BS).logits.sum()
    assert not [each for each in forwards() if not any(each is other for other in earlier)]
    loss.backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointing_that_does_not_say_of_which_forward(use_reentrant: bool) -> None:
    """It would run the experts again without knowing what is padding."""
    moe = tiny_block()
    x_BSD = torch.randn(1, 4, tiny_config().hidden_size, requires_grad=True)
    with Forward(torch.tensor([[True, True, True, False]])):
        out_BSD = checkpoint(moe, x_BSD, use_reentrant=use_reentrant)
    with pytest.raises(ExpertMeshError, match="for an unknown forward: their layers are checkpointed without"):
        out_BSD.sum().backward()

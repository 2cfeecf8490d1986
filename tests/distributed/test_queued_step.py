"""An update that is queued before the host knows the step's figures, as on a GPU, against one that waits for them."""

from typing import Any
from unittest import mock

import pytest
import torch

import expertmesh.training.step
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.rehearsal.world import rehearse
from expertmesh.training.step import _queue_step, squares_and_lacking
from tests.distributed.test_nonfinite import EXPERTS, Poison, tell_poisoned
from tests.distributed.whole_runs import SIX_STEPS, Runs, Told, assert_same_bits, batch_of_12, tell
from tests.families.configs import tiny_config

COMMON = f"{SIX_STEPS} {batch_of_12(2)} --ep-size 2 --on-nonfinite skip --save-steps 0 --router-aux-loss-coef 0.01"
POISON = Poison("gradient", EXPERTS, 1, frozenset({0, 3}))


def queueing(argv: list[str], poison: Poison | None = None, lacks: bool = False) -> Told:
    """A run that takes the path of GPUs. lacks: a rank says in each step that it lacks gradients."""
    queued: list[bool] = []

    def queue_step(*args: Any) -> bool:
        queued.append(_queue_step(*args))
        return queued[-1]

    def lacking(*args: Any) -> torch.Tensor:
        return squares_and_lacking(*args) - torch.tensor([0.0, 1.0 if lacks else 0.0])

    with (
        mock.patch.object(expertmesh.training.step, "computes_on_cpu", return_value=False),
        mock.patch.object(expertmesh.training.step, "_queue_step", queue_step),
        mock.patch.object(expertmesh.training.step, "squares_and_lacking", lacking),
    ):
        found = tell(argv) if poison is None else tell_poisoned(argv, poison)
    assert queued == [True] * 6
    return found


def test_a_step_that_is_skipped_on_the_device_leaves_no_trace(runs: Runs) -> None:
    """Gradients are divided by 1, so that all bits are alike."""
    flags = f"{COMMON} --max-grad-norm 0"
    expected = runs(2, flags, "waiting", call=tell_poisoned, given=[POISON])
    found = runs(2, flags, "queued", call=queueing, given=[POISON])
    assert [line.get("skipped_steps", 0) for line in found.lines()] == [1, 0, 0, 1, 0, 0]
    assert found.values("loss") == expected.values("loss")
    assert_same_bits(found.weights, expected.weights)


@pytest.mark.slow
def test_gradients_are_scaled_on_the_device(runs: Runs) -> None:
    expected, found = runs(2, COMMON, "waiting"), runs(2, COMMON, "queued", call=queueing)
    assert min(found.values("grad_norm")) > 1.0, "nothing was clipped"
    assert found.values("grad_norm") == pytest.approx(expected.values("grad_norm"), rel=1e-5)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_where_gradients_are_lacking_the_update_comes_after_they_are_agreed_on(runs: Runs) -> None:
    expected = runs(2, COMMON, "waiting")
    assert_same_bits(runs(2, COMMON, "lacking", call=queueing_lacking).weights, expected.weights)


def queueing_lacking(argv: list[str]) -> Told:
    return queueing(argv, lacks=True)


@pytest.mark.parametrize(
    ("family", "more", "micro_batches"),
    [
        ("mixtral", {}, 1),
        ("mixtral", {"router_aux_loss_coef": 0.02, "gradient_accumulation_steps": 2}, 2),
        ("mixtral", {"cp_size": 2, "optim": "adamw_torch_8bit"}, 1),
        ("mixtral", {"dispatch": "rank", "gradient_checkpointing": "selective"}, 1),
        ("olmoe", {"tp_size": 2, "adapter": "lora"}, 1),
    ],
)
def test_the_host_waits_once_a_step_and_once_a_moe_layer(family: str, more: dict[str, Any], micro_batches: int) -> None:
    layers = 3
    common: dict[str, Any] = {"bf16": True, "ep_size": 4, "per_device_train_batch_size": 1, "max_seq_length": 64}
    config = TrainConfig(model="-", dataset=["-"], **common, **more)
    found = rehearse(config, tiny_config(family, num_hidden_layers=layers), 8, 0)
    assert found.recorder.waits == 1 + layers * micro_batches

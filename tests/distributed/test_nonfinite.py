"""Losses and gradients that are not finite: stop or skip, on all ranks alike, with the first tensor named."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import expertmesh.training.run.loop
import expertmesh.training.steps.step
from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.sharding.state import local_tensor
from expertmesh.training.engine import engine
from expertmesh.training.monitoring.anomaly import AnomalyDetector
from expertmesh.training.steps.evaluate import Evaluation
from expertmesh.training.steps.step import Gradients
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import SIX_STEPS, Runs, Told, assert_same_bits, batch_of_12, tell
from tests.tiers import tiered

EXPERTS = "model.layers.1.mlp.experts"


@dataclass(frozen=True)
class Poison:
    """What becomes NaN, on one rank in some steps, counted from 0: a module's output, a parameter, or their
    gradients."""

    what: str
    name: str
    rank: int
    steps: frozenset[int]


@contextlib.contextmanager
def applied(poison: Poison, model: nn.Module) -> Iterator[None]:
    if poison.what == "parameter":
        local_tensor(model.get_parameter(poison.name).detach()).fill_(torch.nan)
        yield
        return
    if poison.what == "parameter's gradient":
        step_gradients = expertmesh.training.steps.step.step_gradients

        def spoil_gradient(*args: Any) -> Gradients:
            result = step_gradients(*args)
            grad = model.get_parameter(poison.name).grad
            assert grad is not None
            local_tensor(grad).fill_(torch.nan)
            return result

        with patch.object(expertmesh.training.steps.step, "step_gradients", spoil_gradient):
            yield
        return

    def spoil(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if poison.what == "output":
            return output * torch.nan
        if output.requires_grad:
            output.register_hook(lambda grad: grad * torch.nan)
        return None

    # before the hooks that look for it
    handle = model.get_submodule(poison.name).register_forward_hook(spoil, prepend=True)
    yield
    handle.remove()


def tell_poisoned(argv: list[str], poison: Poison, first_step: int = 0) -> Told:
    """A run from `first_step` on, with poison; all that it writes counts as errors."""
    train_step, step = engine.train_step, first_step

    def poisoned_train_step(model: Any, *args: Any, **more: Any) -> Any:
        nonlocal step
        step += 1
        with contextlib.ExitStack() as stack:
            if dist.get_rank() == poison.rank and step - 1 in poison.steps:
                stack.enter_context(applied(poison, model))
            return train_step(model, *args, **more)

    with patch.object(engine, "train_step", poisoned_train_step):
        code, printed, errors = tell(argv)
    return code, "", printed + errors


FOUND = {
    "output": f"output of {EXPERTS}, in forward",
    "gradient": f"gradient of the output of {EXPERTS}, in backward",
    "parameter": f"parameter {EXPERTS}.mlp.w1, before the step",
    "parameter's gradient": f"gradient of parameter {EXPERTS}.mlp.w1, after backward",
}


@pytest.mark.parametrize(
    ("what", "world_size", "rank", "more"),
    tiered(
        [("output", 2, 1, "--ep-size 2 --gradient-checkpointing selective")],
        slow=[
            # clipping by a norm that is no number would spoil all the others
            ("parameter's gradient", 2, 1, "--ep-size 2"),
            ("gradient", 4, 3, "--ep-size 2 --dense-shard hybrid --gradient-checkpointing full"),
        ],
        release=[
            ("gradient", 2, 0, "--gradient-checkpointing selective --bf16"),
            ("parameter", 4, 2, "--ep-size 2 --router-aux-loss-coef 0.01"),
        ],
    ),
)
def test_the_first_is_named_on_all_ranks(runs: Runs, what: str, world_size: int, rank: int, more: str) -> None:
    flags = f"{SIX_STEPS} {batch_of_12(world_size, accumulation=3)} {more} --detect-anomaly"
    name = EXPERTS + ".mlp.w1" if what.startswith("parameter") else EXPERTS
    given = [Poison(what, name, rank, frozenset({1}))]
    first = f"first non-finite tensor: {FOUND[what]}, on rank {rank};"
    ended = runs.refuses(world_size, flags, "step 2: the loss is", first, call=tell_poisoned, given=given)
    assert not (ended.out / "hf").exists()


@dataclass(frozen=True)
class Outputs:
    """As the router's: tensors of several dtypes in a dataclass."""

    values: list[torch.Tensor]
    index: torch.Tensor


class Layer(nn.Linear):
    """May spoil its output, or the gradient of it."""

    spoils = ""

    def forward(self, x: Any) -> Any:
        y = super().forward(x.values[0] if isinstance(x, Outputs) else x)
        if self.spoils == "output":
            y = y / 0
        if self.spoils == "gradient":
            # as an addition of something whose derivative is infinite
            y = y + (y * 0).abs().sqrt()
        return Outputs([y], torch.tensor(1)) if self.out_features == 3 else y


def first_found(spoilt: list[tuple[int, int, str]]) -> tuple[str, int]:
    """The answer when these (rank, layer, how) are spoilt, after a step in which another one was; and how many tests
    there were in a forward without gradients."""
    model = nn.Sequential(Layer(2, 3), Layer(3, 2), Layer(2, 2))
    detector = AnomalyDetector(model)
    for step in ([(0, 0, "output")], spoilt):
        detector.forget()
        for number, layer in enumerate(model.children()):
            mine = [how for rank, where, how in step if (rank, where) == (dist.get_rank(), number)]
            layer.spoils = mine[0] if mine else ""  # type: ignore[assignment]
        model.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
    answer = detector.first_nonfinite()
    detector.forget()
    with torch.no_grad():
        model(torch.ones(4, 2))
    return answer, len(detector.tests)


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        # earliest in execution, whichever rank; of several ranks at one point, the lowest
        ([(0, 1, "output"), (1, 0, "output")], "output of 0, in forward, on rank 1"),
        ([(0, 2, "output"), (1, 2, "output")], "output of 2, in forward, on rank 0"),
        ([(0, 0, "gradient"), (1, 1, "gradient")], "gradient of the output of 0, in backward, on rank 1"),
        ([(1, 0, "gradient")], "gradient of parameter 0.weight, after backward, on rank 1"),
        ([(0, 0, "gradient"), (1, 2, "output")], "output of 2, in forward, on rank 1"),
    ],
)
def test_which_is_the_first(ranks: RankPool, spoilt: list[tuple[int, int, str]], said: str) -> None:
    assert ranks.run(first_found, 2, spoilt) == [(f"first non-finite tensor: {said}", 0)] * 2


@pytest.mark.slow
def test_a_norm_that_overflows_is_no_tensors_fault(runs: Runs) -> None:
    """Gradients are finite, their squares are not: the z-loss has an absurd weight."""
    flags = f"{SIX_STEPS} {batch_of_12(2)} --router-z-loss-coef 1e25 --detect-anomaly"
    runs.refuses(2, flags, "the gradient norm inf", "every gradient is finite")


@pytest.mark.slow
def test_detecting_changes_nothing(runs: Runs) -> None:
    flags = f"{SIX_STEPS} {batch_of_12(2, 2)} --ep-size 2 --gradient-checkpointing full --max-steps 2 --save-steps 0"
    found, expected = runs(2, f"{flags} --detect-anomaly", "with"), runs(2, flags, "without")
    assert found.values("loss") == expected.values("loss")
    assert_same_bits(found.weights, expected.weights)


@pytest.mark.slow
def test_skipped_steps_leave_no_trace_and_resume(runs: Runs) -> None:
    """The first and the fifth of six steps are skipped; resumed after either, the weights have the same bits."""
    flags = (
        f"{SIX_STEPS} {batch_of_12(4)} --ep-size 2 --dense-shard hybrid --on-nonfinite skip --save-steps 1 "
        "--router-aux-loss-coef 0.01"
    )
    poison = Poison("gradient", EXPERTS, 1, frozenset({0, 4}))
    whole = runs(4, flags, "whole", call=tell_poisoned, given=[poison])
    assert "warning: step 1 is skipped: the loss is" in whole.errors
    assert "lr_scheduler" not in whole.errors
    lines = whole.lines()
    assert [line.get("skipped_steps", 0) for line in lines] == [1, 0, 0, 0, 1, 0]
    for line in lines:
        assert (line["loss"] is None) == (line["grad_norm"] is None) == ("skipped_steps" in line)
        assert (line["balance_loss"] is None) == ("expert_tokens" not in line) == ("skipped_steps" in line)
        assert line["tokens"] > 0
    # the learning rate goes on with the steps
    assert lines[1]["learning_rate"] == pytest.approx(5e-4)
    for step in (1, 2):
        assert checkpoints_main(["verify", str(runs.model), str(whole.checkpoint(step))]) == (step == 2)
    for step in (1, 5):
        resume = f"{flags} --resume {whole.checkpoint(step)}"
        assert_same_bits(runs(4, resume, str(step), call=tell_poisoned, given=[poison, step]).weights, whole.weights)


def with_evaluations(argv: list[str], losses: list[float]) -> Told:
    """A run with these evaluation losses."""
    evaluate, left = expertmesh.training.run.loop.evaluate, iter(losses)

    def tell_next(*args: Any) -> Evaluation:
        return replace(evaluate(*args), loss=next(left))

    with patch.object(expertmesh.training.run.loop, "evaluate", tell_next):
        return tell(argv)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_an_evaluation_that_is_not_finite_is_never_the_best(runs: Runs, schedule: str) -> None:
    """Nor does a schedule that follows the evaluation loss take it in."""
    flags = (
        f"{SIX_STEPS} {batch_of_12(1)} --eval-ratio 0.2 --eval-steps 1 --lr-scheduler-type {schedule} --warmup-steps 0 "
        "--lr-scheduler-kwargs '{\"patience\": 0}' --load-best-model-at-end --save-steps 1"
    )
    nan, inf = float("nan"), float("inf")
    rates = []
    for name, losses in (("finite", [3.0, 2.0, 1.0]), ("nan", [3.0, nan, 2.0, inf, 1.0, nan])):
        ended = runs(1, f"{flags} --max-steps {len(losses)}", name, call=with_evaluations, given=[losses])
        rates.append([line["learning_rate"] for line in ended.lines("loss")])
    # the rate of a step is what the evaluations before it have made of it
    assert rates[1] == [rates[0][i] for i in (0, 1, 1, 2, 2)] + rates[1][-1:]
    assert (ended.printed + ended.errors).count("warning: step 4: the evaluation loss is inf") == 1
    assert ended.checkpoint("best").resolve().name == "step-00000005"
    assert ended.values("eval_loss") == [3, None, 2, None, 1, None]


@pytest.mark.slow
def test_only_evaluations_that_are_not_finite(runs: Runs) -> None:
    """Training stops for want of patience, and the last weights stay."""
    flags = "--eval-ratio 0.2 --eval-steps 1 --early-stopping-patience 2 --load-best-model-at-end --max-steps 6"
    ended = runs(1, flags, call=with_evaluations, given=[[float("nan")] * 2])
    said = ended.printed + ended.errors
    assert "stopped early: the last 2 evaluations not better by 0; none had a finite loss" in said
    assert "no evaluation had a finite loss; the run keeps the last weights" in said
    assert (ended.out / "hf").exists()

"""Losses and gradients that are not finite: stop or skip, on all ranks alike, with the first tensor named."""

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import expertmesh.training.engine
import expertmesh.training.loop
import expertmesh.training.step
from expertmesh import train_ep
from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.sharding.state import local_tensor
from expertmesh.training.evaluate import Evaluation
from expertmesh.training.monitoring.anomaly import AnomalyDetector
from expertmesh.training.step import StepResult
from tests.distributed.pool import RankPool
from tests.distributed.test_checkpoints import read
from tests.distributed.test_resume import flags, shares
from tests.distributed.test_train_ep import FIXED_PRODUCTS

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
def poisoned(poison: Poison | None, first_step: int) -> Iterator[None]:
    """Training from `first_step` on, with poison."""
    train_step, step = expertmesh.training.engine.train_step, first_step

    def poisoned_train_step(model: Any, *args: Any, **more: Any) -> Any:
        nonlocal step
        step += 1
        if poison is None or dist.get_rank() != poison.rank or step - 1 not in poison.steps:
            return train_step(model, *args, **more)
        with applied(poison, model):
            return train_step(model, *args, **more)

    with patch.object(expertmesh.training.engine, "train_step", poisoned_train_step):
        yield


@contextlib.contextmanager
def applied(poison: Poison, model: nn.Module) -> Iterator[None]:
    if poison.what == "parameter":
        local_tensor(model.get_parameter(poison.name).detach()).fill_(torch.nan)
        yield
        return
    if poison.what == "parameter's gradient":
        compute_gradients = expertmesh.training.step.compute_gradients

        def spoil_gradient(*args: Any) -> StepResult:
            result = compute_gradients(*args)
            grad = model.get_parameter(poison.name).grad
            assert grad is not None
            local_tensor(grad).fill_(torch.nan)
            return result

        with patch.object(expertmesh.training.step, "compute_gradients", spoil_gradient):
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


def run_poisoned(argv: list[str], poison: Poison | None, first_step: int = 0) -> tuple[int, str]:
    """(exit code, all that was written) of train_ep.py on this rank."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told), poisoned(poison, first_step):
        code = train_ep.main([*FIXED_PRODUCTS, *argv])
    return code, told.getvalue()


def metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, which must be JSON without its usual extensions."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(constant)

    return [json.loads(line, parse_constant=refuse) for line in (out / "metrics.jsonl").read_text().splitlines()]


FOUND = {
    "output": f"output of {EXPERTS}, in forward",
    "gradient": f"gradient of the output of {EXPERTS}, in backward",
    "parameter": f"parameter {EXPERTS}.mlp.w1, before the step",
    "parameter's gradient": f"gradient of parameter {EXPERTS}.mlp.w1, after backward",
}


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("what", "world_size", "rank", "more"),
    [
        ("output", 4, 2, ["--ep-size", "2"]),
        ("output", 2, 1, ["--ep-size", "2", "--gradient-checkpointing", "selective"]),
        ("gradient", 4, 3, ["--ep-size", "2", "--dense-shard", "hybrid", "--gradient-checkpointing", "full"]),
        ("gradient", 2, 0, ["--gradient-checkpointing", "selective", "--bf16"]),
        ("parameter", 4, 2, ["--ep-size", "2", "--router-aux-loss-coef", "0.01"]),
        # clipping by a norm that is no number would spoil all the others
        ("parameter's gradient", 2, 1, ["--ep-size", "2"]),
    ],
)
def test_the_first_is_named_on_all_ranks(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, what: str, world_size: int, rank: int, more: Any
) -> None:
    argv = [*flags(tiny_model, tiny_data, tmp_path, *shares(world_size, accumulation=3)), *more, "--detect-anomaly"]
    name = EXPERTS + ".mlp.w1" if what.startswith("parameter") else EXPERTS
    poison = Poison(what, name, rank, frozenset({1}))
    results = ranks.run(run_poisoned, world_size, argv, poison, join_group=False)
    assert [code for code, _ in results] == [2] * world_size
    assert "step 2: the loss is" in results[0][1]
    assert f"first non-finite tensor: {FOUND[what]}, on rank {rank};" in results[0][1]
    assert not (tmp_path / "hf").exists()


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
def test_a_norm_that_overflows_is_no_tensors_fault(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """Gradients are finite, their squares are not: the z-loss has an absurd weight."""
    argv = [*flags(tiny_model, tiny_data, tmp_path, *shares(2)), "--router-z-loss-coef", "1e25", "--detect-anomaly"]
    results = ranks.run(run_poisoned, 2, argv, None, join_group=False)
    assert [code for code, _ in results] == [2, 2]
    assert "the gradient norm inf" in results[0][1]
    assert "every tensor is finite" in results[0][1]


@pytest.mark.release
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_detecting_changes_nothing(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, mode: str
) -> None:
    common = [*shares(2, accumulation=2), "--ep-size", "2", "--gradient-checkpointing", mode, "--max-steps", "2"]
    for name, more in (("without", []), ("with", ["--detect-anomaly"])):
        argv = [*flags(tiny_model, tiny_data, tmp_path / name, *common), *more, "--save-steps", "0"]
        results = ranks.run(run_poisoned, 2, argv, None, join_group=False)
        assert [code for code, _ in results] == [0, 0], results
    found, expected = (metrics(tmp_path / name) for name in ("with", "without"))
    assert [line["loss"] for line in found] == [line["loss"] for line in expected]
    weights, before = read(tmp_path / "with" / "hf"), read(tmp_path / "without" / "hf")
    assert all(torch.equal(weights[name], before[name]) for name in before)


@pytest.mark.release
@pytest.mark.parametrize(("world_size", "dense_shard"), [(4, "hybrid")])
def test_skipped_steps_leave_no_trace_and_resume(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, world_size: int, dense_shard: str
) -> None:
    """The first and the fifth of six steps are skipped; resumed after either, the weights have the same bits."""
    common = [*shares(world_size), "--ep-size", "2", "--dense-shard", dense_shard, "--on-nonfinite", "skip"]
    common += ["--save-steps", "1", "--router-aux-loss-coef", "0.01"]
    whole = tmp_path / "whole"
    poison = Poison("gradient", EXPERTS, 1, frozenset({0, 4}))
    argv = flags(tiny_model, tiny_data, whole, *common)
    results = ranks.run(run_poisoned, world_size, argv, poison, join_group=False)
    assert [code for code, _ in results] == [0] * world_size, results
    assert "warning: step 1 is skipped: the loss is" in results[0][1]
    assert "lr_scheduler" not in results[0][1]

    lines = metrics(whole)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line.get("skipped_steps", 0) for line in lines] == [1, 0, 0, 0, 1, 0]
    for line in lines:
        assert (line["loss"] is None) == (line["grad_norm"] is None) == ("skipped_steps" in line)
        assert (line["balance_loss"] is None) == ("expert_tokens" not in line) == ("skipped_steps" in line)
        assert line["tokens"] > 0
    # the learning rate goes on with the steps
    assert lines[1]["learning_rate"] == pytest.approx(5e-4)
    assert checkpoints_main(["verify", str(tiny_model), str(whole / "checkpoints" / "step-00000001")]) == 0
    assert checkpoints_main(["verify", str(tiny_model), str(whole / "checkpoints" / "step-00000002")]) == 1

    expected = read(whole / "hf")
    for step in (1, 5):
        out = tmp_path / str(step)
        argv = flags(tiny_model, tiny_data, out, *common)
        argv += ["--resume", str(whole / "checkpoints" / f"step-{step:08d}")]
        results = ranks.run(run_poisoned, world_size, argv, poison, step, join_group=False)
        assert [code for code, _ in results] == [0] * world_size, results
        weights = read(out / "hf")
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_means_are_over_finite_steps(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """With a learning rate of 0 all runs have the same losses; an interval's is the mean of those not skipped."""
    common = [*shares(2), "--learning-rate", "0", "--save-steps", "0", "--no-export", "--max-steps", "3"]
    poison = Poison("output", EXPERTS, 0, frozenset({1}))
    apart, together = tmp_path / "apart", tmp_path / "together"
    for out, used, every in ((apart, None, "1"), (together, poison, "3")):
        argv = [*flags(tiny_model, tiny_data, out, *common), "--logging-steps", every, "--on-nonfinite", "skip"]
        assert ranks.run(run_poisoned, 2, argv, used, join_group=False)[0][0] == 0
    (line,) = metrics(together)
    first, second, third = metrics(apart)
    total = sum(each["loss"] * each["target_tokens"] for each in (first, third))
    assert line["loss"] == pytest.approx(total / (first["target_tokens"] + third["target_tokens"]), rel=1e-6)
    assert line["skipped_steps"] == 1
    assert line["grad_norm"] == pytest.approx(third["grad_norm"], rel=1e-6)
    assert line["tokens"] == sum(each["tokens"] for each in (first, second, third))
    assert [sum(layer) for layer in line["expert_tokens"]] == [2 * (first["tokens"] + third["tokens"])] * 2


@pytest.mark.slow
def test_a_run_does_not_skip_all_night(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Two steps are skipped, one is not, and then ten in a row."""
    argv = [*flags(tiny_model, tiny_data, tmp_path, *shares(2)), "--max-steps", "20", "--on-nonfinite", "skip"]
    poison = Poison("output", EXPERTS, 1, frozenset({0, 1, *range(3, 20)}))
    results = ranks.run(run_poisoned, 2, argv, poison, join_group=False)
    assert [code for code, _ in results] == [2, 2]
    assert "--on-nonfinite skip: steps 4 to 13 were all skipped" in results[0][1]
    assert results[0][1].count("is skipped: the loss is") == 12


def run_with_evaluations(argv: list[str], losses: list[float]) -> tuple[int, str]:
    """train_ep.py on this rank, with these evaluation losses."""
    evaluate, left = expertmesh.training.loop.evaluate, iter(losses)

    def tell(*args: Any) -> Evaluation:
        return replace(evaluate(*args), loss=next(left))

    with patch.object(expertmesh.training.loop, "evaluate", tell):
        return run_poisoned(argv, None)


@pytest.mark.release
@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_an_evaluation_that_is_not_finite_is_never_the_best(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, schedule: str
) -> None:
    """Nor does a schedule that follows the evaluation loss take it in."""
    common = ["--eval-ratio", "0.2", "--eval-steps", "1", "--lr-scheduler-type", schedule, "--warmup-steps", "0"]
    common += ["--lr-scheduler-kwargs", '{"patience": 0}', "--load-best-model-at-end", "--save-steps", "1"]
    nan, inf = float("nan"), float("inf")
    rates = []
    for name, losses in (("finite", [3.0, 2.0, 1.0]), ("nan", [3.0, nan, 2.0, inf, 1.0, nan])):
        argv = flags(tiny_model, tiny_data, tmp_path / name, *shares(1), *common, "--max-steps", str(len(losses)))
        ((code, told),) = ranks.run(run_with_evaluations, 1, argv, losses, join_group=False)
        assert code == 0, told
        rates.append([line["learning_rate"] for line in metrics(tmp_path / name) if "loss" in line])
    # the rate of a step is what the evaluations before it have made of it
    assert rates[1] == [rates[0][i] for i in (0, 1, 1, 2, 2)] + rates[1][-1:]
    assert told.count("warning: step 4: the evaluation loss is inf") == 1
    assert (tmp_path / "nan" / "checkpoints" / "best").resolve().name == "step-00000005"
    assert [line["eval_loss"] for line in metrics(tmp_path / "nan") if "eval_loss" in line] == [
        3,
        None,
        2,
        None,
        1,
        None,
    ]


@pytest.mark.slow
def test_only_evaluations_that_are_not_finite(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """Training stops for want of patience, and the last weights stay."""
    argv = flags(tiny_model, tiny_data, tmp_path, *shares(1), "--eval-ratio", "0.2", "--eval-steps", "1")
    argv += ["--early-stopping-patience", "2", "--load-best-model-at-end"]
    ((code, told),) = ranks.run(run_with_evaluations, 1, argv, [float("nan")] * 2, join_group=False)
    assert code == 0
    assert "stopped early: the last 2 evaluations not better by 0; none had a finite loss" in told
    assert "no evaluation had a finite loss, so none is the best; the last weights stay" in told
    assert (tmp_path / "hf").exists()

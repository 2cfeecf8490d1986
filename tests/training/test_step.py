"""What a step's losses are divided by, what follows an update, and which evaluation is the best."""

import math
import random
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.experts.router_stats import NO_ROUTING, RouterStats, routing_of
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.monitoring.nonfinite import MAX_SKIPPED_IN_A_ROW, NonFiniteGuard
from expertmesh.training.run.loop import _had_enough, _without_beginning
from expertmesh.training.steps.evaluate import Best
from expertmesh.training.steps.micro_batch import Denominators, LossSums, PooledCounts, weigh_losses
from expertmesh.training.steps.step import StepResult, after_update
from tests.tiny import in_memory, tiny_config


def test_losses_of_a_micro_batch_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two, which together have 3 targets and 8 tokens, 4 of them in this one."""
    monkeypatch.setattr(dist, "all_reduce", mock.Mock())
    stats = [RouterStats(torch.tensor([3, 1]), torch.tensor([2.5, 1.5]), torch.tensor(6.0), None, 4)]
    over, weights = Denominators(3, 4, 8, 2), LossWeights(0.5, 0.25)
    counts = PooledCounts(stats, weights, None)
    found = weigh_losses(LossSums(torch.tensor(6.0)), stats, routing_of(stats), weights, over, counts)
    balance = 2 * (3 / 4 * 2.5 / 4 + 1 / 4 * 1.5 / 4) / 2
    assert found.values().tolist() == pytest.approx([2.0, balance, 6 / 8])
    assert found.total(weights).item() == pytest.approx(2.0 + 0.5 * balance + 0.25 * 6 / 8)


def test_after_an_update_kept_copies_of_weights_are_rounded_anew() -> None:
    """torch's fused optimizers change a weight without changing its version."""
    model: Any = in_memory(build_model(tiny_config()))
    mlps: list[Any] = [layer.mlp for layer in moe_layers(model)]
    assert len(mlps) > 1
    for mlp in mlps:
        torch.nn.init.normal_(mlp.w1)
        mlp.working.are_kept = True

    def kept() -> list[torch.Tensor]:
        taken = [mlp.working.take("w1", [mlp.w1], torch.bfloat16, [mlp.layout.shape.num_experts])[0] for mlp in mlps]
        return [working.detach().flatten(0, 1).clone() for working in taken]

    before = kept()
    for mlp in mlps:
        mlp.w1.grad = torch.ones_like(mlp.w1)
    torch.optim.AdamW([mlp.w1 for mlp in mlps], lr=1.0, fused=True).step()
    after_update(model, NO_ROUTING, None)
    for was, now, mlp in zip(before, kept(), mlps, strict=True):
        assert not torch.equal(was, now)
        assert torch.equal(now, mlp.w1.detach().bfloat16())


def test_the_best_is_the_lowest_and_the_threshold_is_for_an_early_stop() -> None:
    best = Best()
    found = [
        (best.update(loss, step, threshold=0.1), best.since) for step, loss in enumerate([2.0, 1.95, 1.95, 1.5], 1)
    ]
    assert found == [(True, 0), (True, 1), (False, 2), (True, 0)]
    assert (best.loss, best.step) == (1.5, 4)
    assert (best.update(math.nan, 5, 0.1), best.since, best.step) == (False, 1, 4)
    state: dict[str, Any] = best.state()
    assert Best(**state) == best
    assert Best().state() == {}


@pytest.mark.parametrize("threshold", [0.0, 0.125, 0.1])
@pytest.mark.parametrize("greater_is_better", [False, True])
def test_the_best_and_an_early_stop_are_those_of_transformers(greater_is_better: bool, threshold: float) -> None:
    """Over random sequences with ties, also of the threshold: it may name the same losses, or their opposites."""
    args: Any = SimpleNamespace(
        metric_for_best_model="loss", greater_is_better=greater_is_better, save_strategy="steps"
    )
    config, generator = TrainConfig(model="m", dataset=["d"]), random.Random(0)
    stops, ties = 0, 0
    for _ in range(300):
        config.early_stopping_patience = generator.randint(1, 3)
        callback, control = EarlyStoppingCallback(config.early_stopping_patience, threshold), TrainerControl()
        trainer: Any = SimpleNamespace(args=args, state=TrainerState())
        best = Best()
        for step in range(1, 13):
            loss = 2 - generator.randint(0, 8) * (threshold or 1) - generator.choice([0, 0, 1e-3])
            ties += math.isclose(best.loss - loss, threshold, abs_tol=1e-9)
            metrics = {"eval_loss": -loss if greater_is_better else loss}
            trainer.state.global_step = step
            callback.on_evaluate(args, trainer.state, control, metrics)
            is_best = transformers.Trainer._determine_best_metric(trainer, metrics, None)
            assert best.update(loss, step, threshold) == is_best
            assert (best.step, best.since) == (trainer.state.best_global_step, callback.early_stopping_patience_counter)
            assert _had_enough(config, best) == control.should_training_stop
            if control.should_training_stop:
                stops += 1
                break
    assert stops > 100
    assert ties > 20


def test_a_run_stops_early_after_as_many_evaluations_as_asked_for() -> None:
    config = TrainConfig(model="m", dataset=["d"])
    config.early_stopping_patience = 2
    assert [_had_enough(config, Best(since=since)) for since in (0, 1, 2, 3)] == [False, False, True, True]
    config.early_stopping_patience = 0
    assert not _had_enough(config, Best(since=9))


@pytest.mark.parametrize("targets", [0, 5])
def test_steps_that_are_skipped_count_in_a_row_alone(targets: int) -> None:
    """Of loss or gradients that are not finite, and of steps without targets."""
    told: list[str] = []
    config: Any = SimpleNamespace(on_nonfinite="skip", detect_anomaly=False)
    guard = NonFiniteGuard(config, None, told.append)
    bad = StepResult(math.nan, 0.0, 0.0, 1.0, 9, targets, (), NO_ROUTING)
    good = replace(bad, loss=1.0, targets=5)
    for step, result in enumerate([*[bad] * (MAX_SKIPPED_IN_A_ROW - 1), good] * 2, start=1):
        guard.check(step, result)
    assert len(told) == 2 * (MAX_SKIPPED_IN_A_ROW - 1)
    for step in range(1, MAX_SKIPPED_IN_A_ROW):
        guard.check(step, bad)
    with pytest.raises(ExpertMeshError, match=f"steps 1 to {MAX_SKIPPED_IN_A_ROW} were all skipped"):
        guard.check(MAX_SKIPPED_IN_A_ROW, bad)


def test_a_step_is_finite_where_all_of_its_figures_are() -> None:
    result = StepResult(1.0, 0.5, 0.25, 2.0, 9, 5, (), NO_ROUTING)
    assert result.is_finite
    for figure, value in product(["loss", "balance_loss", "z_loss", "grad_norm"], [math.nan, math.inf, -math.inf]):
        assert not replace(result, **{figure: value}).is_finite  # type: ignore[arg-type]


def test_prompts_are_shown_without_what_a_template_begins_all_with() -> None:
    system = "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n"
    assert _without_beginning([system + "How far?", system + "How much?\nNow."]) == ["…How far?", "…How much?\nNow."]
    assert _without_beginning(["How far?", "How much?"]) == ["How far?", "How much?"]
    assert _without_beginning([system + "How far?"]) == [system + "How far?"]

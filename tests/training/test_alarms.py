"""Loss spikes and router collapse: what is warned of, how often, and what is not."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.loss.balance import Balance, LossWeights
from expertmesh.training.monitoring.alarms import (
    COLLAPSE_TOKENS,
    LOSS_NEEDED,
    LOSS_WINDOW,
    LossAlarm,
    RouterAlarm,
)


def noisy(length: int, level: float = 2.0) -> list[float]:
    return (level + 0.05 * np.random.default_rng(0).standard_normal(length)).tolist()


def test_a_spike_is_warned_of_with_what_to_do() -> None:
    alarm = LossAlarm(learning_rate=1e-3)
    assert all(alarm.check(step, loss) is None for step, loss in enumerate(noisy(40)))
    warning = alarm.check(41, 3.0)
    assert warning is not None
    assert warning.startswith("loss spike: 3.0000, after a mean of ")
    assert "--learning-rate (now 0.001)" in warning


@pytest.mark.parametrize(
    ("losses", "warned"),
    [
        (noisy(300), []),
        ([4.0 * 0.98**step for step in range(300)], []),
        # a loss that hardly moves, and then moves by a hundredth; and by more than a tenth
        ([1.0] * 50 + [1.01], []),
        ([1.0] * 50 + [1.2], [51]),
        # as much as six deviations, but not above them
        ([1.0, 2.0] * 10 + [4.4], []),
        ([1.0, 2.0] * 10 + [4.6], [21]),
        # too little is known yet
        (noisy(LOSS_NEEDED - 1) + [9.0], []),
        (noisy(LOSS_NEEDED) + [9.0], [LOSS_NEEDED + 1]),
        # of two spikes less than a window apart one, of those further apart both
        (noisy(40) + [9.0] + noisy(LOSS_WINDOW - 2) + [90.0], [41]),
        (noisy(40) + [9.0] + noisy(LOSS_WINDOW - 1) + [90.0], [41, 41 + LOSS_WINDOW]),
    ],
)
def test_which_losses_are_spikes(losses: list[float], warned: list[int]) -> None:
    alarm = LossAlarm(learning_rate=1e-3)
    assert [step for step, loss in enumerate(losses, start=1) if alarm.check(step, loss) is not None] == warned


def router_alarm(
    top_k: int = 2,
    balance: float = 0.02,
    per_layer: bool = False,
    bias_rate: float | None = None,
    groups: Sequence[int] = (1,),
    **settings: object,
) -> RouterAlarm:
    config = TrainConfig(model="m", dataset=["d"], **{"router_warn_steps": 10, **settings})  # type: ignore[arg-type]
    return RouterAlarm(config, Balance(LossWeights(balance, 0.0, per_layer), "", bias_rate), top_k, groups)


def test_dead_groups_are_named() -> None:
    """Dead groups are named in layers whose routers choose groups first; in others, runs of dead experts are no
    group."""
    tokens_LE = np.array([[0, 0, 9, 1], [0, 0, 9, 1], [5, 5, 5, 5]])
    group, experts = router_alarm(groups=(1, 2, 2), router_warn_load=100.0).check(10, tokens_LE)
    assert "1 of 4 groups of experts got no token in 10 steps (layer 1: 0)" in group
    assert "4 of 12 experts got no token in 10 steps (layer 0: 0, 1; layer 1: 0, 1)" in experts


def test_dead_experts_are_named_once() -> None:
    alarm = router_alarm(top_k=1, groups=(1, 1))
    tokens_LE = np.array([[10, 0, 10, 20], [10, 10, 20, 0]])
    assert alarm.check(9, tokens_LE) == []
    (warning,) = alarm.check(1, tokens_LE)
    assert "2 of 8 experts got no token in 10 steps (layer 0: 1; layer 1: 3)" in warning
    assert "raise --router-aux-loss-coef (now 0.02), or --router-z-loss-coef (now 0)" in warning
    assert all(alarm.check(10, tokens_LE) == [] for _ in range(5))
    (warning,) = router_alarm(top_k=1, groups=(1,) * 6).check(10, np.tile([0, 10, 10, 10], (6, 1)))
    assert "(layer 0: 0; layer 1: 0; layer 2: 0; layer 3: 0; and in 2 more layers)" in warning


def test_one_token_in_a_window_is_life() -> None:
    alarm = router_alarm(top_k=1)
    for first in (0, 1, 0, 1):
        assert alarm.check(5, np.array([[first, 10, 10, 10]])) == []
    # the window begins anew: what an expert got before it does not count
    assert alarm.check(10, np.array([[0, 10, 10, 10]])) != []


@pytest.mark.parametrize(
    ("top_k", "bound", "load", "warns"),
    [
        # halfway from 1 to E/K: 2.5 for one of four experts, 1.5 for two
        (1, None, 2.4, False),
        (1, None, 2.6, True),
        (2, None, 1.4, False),
        (2, None, 1.6, True),
        (2, 1.8, 1.6, False),
        (1, 1.1, 1.2, True),
        # every expert always: no more than even is possible
        (4, None, 1.0, False),
    ],
)
def test_load_bound(top_k: int, bound: float | None, load: float, warns: bool) -> None:
    others = (4 - load) / 3
    tokens_LE = np.rint(300 * np.array([[1, 1, 1, 1], [others, others, load, others]])).astype(int)
    warnings = router_alarm(top_k, groups=(1, 1), router_warn_load=bound).check(10, tokens_LE)
    assert len(warnings) == warns
    if warns:
        assert f"expert 2 of layer 1 got {load:.2f} times the mean in 10 steps, above --router-warn-load" in warnings[0]


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"balance": 0.0}, "; turn the balancing loss on, as with --router-aux-loss-coef 0.02 --router-aux-loss-per"),
        ({}, "; balance each layer separately with --router-aux-loss-per-layer, raise --router-aux-loss-coef"),
        ({"per_layer": True}, "; raise --router-aux-loss-coef"),
        ({"balance": 0.0, "bias_rate": 0.0}, "; update the router's bias with --router-bias-update-rate 0.001, or"),
        ({"balance": 0.0, "bias_rate": 1e-4}, "; raise --router-bias-update-rate (now 0.0001), or"),
    ],
)
def test_what_is_advised(settings: dict[str, Any], advice: str) -> None:
    (warning,) = router_alarm(top_k=1, **settings).check(10, np.array([[0, 1, 1, 1]]))
    assert advice in warning


def test_zero_steps_watches_nothing() -> None:
    assert router_alarm(router_warn_steps=0).check(1000, np.array([[0, 0, 0, 1]])) == []


@pytest.mark.parametrize("tokens", [2, 2000])
def test_what_is_no_collapse_is_told_when_a_window_is_full(tokens: int) -> None:
    """However many tokens there are: in the first steps of a random model, experts come and go."""
    alarm = router_alarm(router_warn_steps=100, top_k=1)
    uneven = np.array([[0, 0, tokens, tokens]])
    assert [step for step in range(1, 250) if alarm.check(1, uneven)] == [100], "of both kinds at once, and once"


@pytest.mark.parametrize(
    ("top_k", "healthy", "collapsed"),
    [
        # of 8 experts 2: at once all tokens at the same
        (2, [[40] * 8], [[0, 160, 0, 0, 0, 160, 0, 0]]),
        # a few stray tokens do not hide it; an uneven layer beside it is no collapse
        (2, [[9, 200, 3, 40, 8, 20, 30, 10]] * 2, [[9, 200, 3, 40, 8, 20, 30, 10], [1, 190, 0, 0, 0, 129, 0, 0]]),
        # one expert per token, of many
        (1, [list(range(64))], [[0] * 62 + [1, 2047]]),
    ],
)
def test_a_collapse_is_told_within_ten_steps(top_k: int, healthy: Any, collapsed: Any) -> None:
    """By the latest ten steps alone: what was even before them does not hide it."""
    alarm = router_alarm(router_warn_steps=100, top_k=top_k, groups=[1] * len(healthy))
    assert all(alarm.check(10, np.array(healthy)) == [] for _ in range(3))
    (warning,) = alarm.check(10, np.array(collapsed))
    assert warning.startswith("router collapse: in 10 steps, ")
    assert alarm.check(10, np.array(collapsed)) == []


def test_few_tokens_are_no_collapse() -> None:
    """One sequence's tokens may choose alike by chance; of ten times as many it is told."""
    alarm = router_alarm(router_warn_steps=1000, top_k=1)
    few = np.array([[0, 0, 0, 20]])
    assert [number for number in range(1, 20) if alarm.check(10, few)] == [7]


@pytest.mark.parametrize(("steps", "warns"), [(1, False), (4, False), (5, True)])
def test_the_first_steps_are_no_collapse(steps: int, warns: bool) -> None:
    """However many tokens they have, a run that ends with them is not judged; one that asks for windows of one step
    is."""
    collapsed = np.array([[0, 4000, 0, 0, 0, 4000, 0, 0]])
    alarm = router_alarm(router_warn_steps=100)
    assert bool([*alarm.check(steps, collapsed), *alarm.end()]) == warns
    assert router_alarm(router_warn_steps=1).check(1, collapsed)


@pytest.mark.parametrize(("tokens", "warns"), [(2000, True), (100, False)])
def test_a_run_shorter_than_a_window_is_judged_at_its_end(tokens: int, warns: bool) -> None:
    alarm = router_alarm(router_warn_steps=100, top_k=1)
    assert all(alarm.check(1, np.array([[0, tokens, tokens]])) == [] for _ in range(5))
    assert bool(alarm.end()) == warns
    assert alarm.end() == []
    assert router_alarm().end() == []


@pytest.mark.parametrize(
    ("steps", "load", "warns"),
    [
        # of 8 experts with 2 per token, 2.5 is too much in 100 steps, and 4 is all tokens
        (95, 3.1, True),
        (95, 2.4, False),
        (60, 3.1, True),
        (30, 3.6, True),
        # a random router's first steps
        (20, 3.1, False),
        (2, 3.9, False),
    ],
)
@pytest.mark.parametrize("mean", [2 * COLLAPSE_TOKENS, 40_000])
def test_overload_is_told_in_a_run_shorter_than_a_window(steps: int, load: float, warns: bool, mean: int) -> None:
    """The more of a window there was, the less it takes; nothing is dead, so that nothing else is told."""
    alarm = router_alarm(router_warn_steps=100, groups=(1, 1))
    others = mean * (8 - load) / 7
    tokens_LE = np.array([[mean] * 8, [others] * 6 + [mean * load, others]]) / steps
    assert all(alarm.check(1, tokens_LE) == [] for _ in range(steps))
    told = alarm.end()
    assert len(told) == warns
    if warns:
        assert f"expert 6 of layer 1 got {load:.2f} times the mean in {steps} steps, above --router-w" in told[0]


def test_a_load_that_is_asked_for_is_the_bound_of_a_full_window_alone() -> None:
    """In a shorter one it takes more, unless it is more than there can be."""
    for bound, steps, warns in ((1.2, 95, True), (1.2, 2, False), (5.0, 95, False)):
        alarm = router_alarm(router_warn_steps=100, router_warn_load=bound)
        alarm.check(steps, np.array([[1000] * 6 + [1500, 500]]))
        assert bool(alarm.end()) == warns, (bound, steps)


def test_a_load_that_has_become_even_is_not_told_at_the_end() -> None:
    """Of a short run: the router was balanced in it."""
    alarm = router_alarm(router_warn_steps=100)
    for tokens_E in ([100] * 6 + [390, 10], [100] * 8):
        assert alarm.check(45, np.array([tokens_E]) * [[45 if tokens_E[7] == 10 else 1]]) == []
    assert alarm.end() == []

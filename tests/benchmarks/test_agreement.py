"""Benchmarks abort when a variant has computed something else than the first: a value that is off, or that is none."""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import arms, experts
from benchmarks.arms import Arm, ArmFailed, Benchmark, Figures, Took, agree_to, take_turns

UNLIKE = {"off": [2.0, 1.1], "NaN": [2.0, math.nan], "NaN at first": [math.nan, 1.0], "infinite": [2.0, math.inf]}
AGREE = [2.0, 1.0]


def command(first: list[float], other: list[float]) -> int:
    """The exit code where arms have these losses, in one round."""
    losses = {"first": first, "other": other}

    def start(module: str, argv: Any, ranks: int, directory: Path, arm: str) -> Any:
        return asdict(Figures(losses[arm]))

    benchmark = Benchmark(
        "benchmarks.layouts",
        arms=lambda arguments: [Arm("first"), Arm("other")],
        save_model=lambda arguments, path: None,
        measure=lambda arguments, arm, model: Figures(),
        report=lambda arguments, rounds: print(f"shown: {', '.join(rounds)}"),
        fault=agree_to(1e-5),
        start=start,
    )
    return benchmark.main(argparse.Namespace(json=None, rounds=1), [])


def test_a_command_aborts_where_no_variant_finished(capsys: pytest.CaptureFixture[str]) -> None:
    def start(*arguments: Any) -> Any:
        raise ArmFailed("out of memory")

    nothing: Any = None
    benchmark = Benchmark(
        "m", lambda arguments: [Arm("first")], lambda arguments, path: None, nothing, nothing, start=start
    )
    assert benchmark.main(argparse.Namespace(json=None, rounds=1), []) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("first gave no figures: out of memory\n", "aborted: no variant finished\n")


@pytest.mark.parametrize("unlike", UNLIKE)
def test_other_losses_abort(unlike: str, capsys: pytest.CaptureFixture[str]) -> None:
    for pair in (AGREE, UNLIKE[unlike]), (UNLIKE[unlike], AGREE):
        assert command(*pair) == 1
        told = capsys.readouterr()
        assert "aborted: other, round 1, step" in told.err or "aborted: first, round 1, step" in told.err
        assert "shown" not in told.out


def test_losses_that_agree_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(AGREE, [2.0, 1.000001]) == 0
    assert "shown: first, other" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"shorter|longer"):
        command(AGREE, [2.0])


def test_arms_take_turns() -> None:
    """Round after round; what only warms up is not kept, and an arm that fails is left out, and no other."""
    turns: list[tuple[str, int]] = []

    def turn(name: str) -> Callable[[int], int]:
        def take(number: int) -> int:
            turns.append((name, number))
            if (name, number) == ("b", 0):
                raise ArmFailed("no memory")
            return number

        return take

    taken = take_turns({name: turn(name) for name in "abc"}, 2, warm_up=1, may_fail=ArmFailed)
    assert turns == [("a", -1), ("b", -1), ("c", -1), ("a", 0), ("b", 0), ("c", 0), ("a", 1), ("c", 1)]
    assert (taken.found, taken.failed) == ({"a": [0, 1], "c": [0, 1]}, {"b": "no memory"})
    with pytest.raises(ArmFailed):
        take_turns({"b": turn("b")}, 1)


def test_steps_are_timed_after_those_that_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each all ranks' use of the CPU; the first one may be counted, and is then not timed."""
    made = iter(range(9))

    def timed(step: Callable[[], float], device: torch.device) -> list[Took[float]]:
        number = step()
        return [Took(10 + number, 0.25, 0.125, 7.0, number)]

    monkeypatch.setattr(arms, "timed", timed)
    monkeypatch.setattr(arms, "gathered", lambda value: [value, value])
    figures = arms.steps_of(lambda: float(next(made)), 2, torch.device("cpu"), warm_up=2)
    assert figures.losses == [0, 1, 2, 3]
    assert (figures.seconds, figures.cpu, figures.cpu_seconds) == ([12, 13], [[0.25, 0.25]] * 2, [0.5, 0.5])
    within: list[str] = []

    @contextmanager
    def counting() -> Iterator[None]:
        within.append("begun")
        yield
        within.append(f"ended after loss {next(made) - 1}")

    assert arms.steps_of(lambda: float(next(made)), 1, torch.device("cpu"), first_within=[counting()]).losses == [4, 6]
    assert within == ["begun", "ended after loss 4"]


CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda out: out * 1.5,
    lambda out: torch.cat([out[:-1], out[-1:] + 100]),
    lambda out: torch.cat([out[:-1], out[-1:] * math.nan]),
    lambda out: out[:1],
    lambda out: out[None],
)


def test_other_results_of_experts_abort() -> None:
    """Whichever of a variant's results it is."""
    good = [torch.ones(4, 3) + number for number in range(5)]
    inputs: Any = SimpleNamespace(x_TD=torch.ones(4, 3))

    def variant(name: str, results: list[Tensor]) -> Any:
        return SimpleNamespace(part=experts.EXPERTS, name=name, backward=lambda inputs: results, as_ours=lambda of: of)

    reference = variant(experts.REFERENCE, good)
    same = experts.check([reference, variant("same", [*good])], inputs)
    assert (same.errors[experts.EXPERTS, "same"], same.failed, same.differing) == (0, [], [])
    for number, change in itertools.product(range(5), CHANGES):
        results = [change(one) if number == place else one for place, one in enumerate(good)]
        found = experts.check([reference, variant("other", results)], inputs)
        assert [part in found.differing[0] for part in ("other, ", " differs from")] == [True, True]
        assert list(found.errors) == [(experts.EXPERTS, experts.REFERENCE)]

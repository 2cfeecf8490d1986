"""Benchmarks abort when a variant has computed something else than the first: a value that is off, or that is none."""

import argparse
import contextlib
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import dispatch, experts, long_rows, pipeline, three_d

UNLIKE = {"off": [2.0, 1.1], "NaN": [2.0, math.nan], "NaN at first": [math.nan, 1.0], "infinite": [2.0, math.inf]}
NONE: Any = argparse.Namespace()
SPENT = {"cpu_seconds": [[1.0]], "activations": 1}

REPORTS: dict[str, Callable[[list[float], list[float]], None]] = {
    "dispatch": lambda first, other: dispatch.print_table(
        {name: {"loss": other if number else first} for number, name in enumerate(dispatch.VARIANTS)}, NONE
    ),
    "long rows": lambda first, other: long_rows.print_figures(
        {"setting": "", "lengths": {"8": {"1": {"losses": first, **SPENT}, "2": {"losses": other, **SPENT}}}}
    ),
    "three axes": lambda first, other: three_d.print_figures(
        {"1": [{"losses": first}], "2": [{"losses": other}]}, NONE
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_other_losses_abort(name: str) -> None:
    for other in UNLIKE.values():
        for pair in ([2.0, 1.0], other), (other, [2.0, 1.0]):
            with pytest.raises((SystemExit, RuntimeError), match=r"off by|differ"):
                REPORTS[name](*pair)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        REPORTS[name]([2.0, 1.0], [2.0])
    # these agree: figures are printed, or those that are not given here are asked for
    with contextlib.suppress(AttributeError):
        REPORTS[name]([2.0, 1.0], [2.0, 1.0])


@pytest.mark.parametrize("loss", [1.1, math.nan, math.inf])
def test_other_losses_of_pipelines_abort(
    loss: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def take_turn(pp_size: int, directory: Path) -> dict[str, Any]:
        return {"loss": 1.0 if pp_size == 1 else loss}

    saved = SimpleNamespace(save_pretrained=lambda path: None)
    monkeypatch.setattr(pipeline, "take_turn", take_turn)
    monkeypatch.setattr(pipeline, "random_mixtral", lambda *arguments, **more: saved)
    assert pipeline.main(["--rounds", "1"]) == 1
    assert f"the losses differ: [1.0, {loss}]" in capsys.readouterr().err


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

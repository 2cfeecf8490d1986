"""A short form of the chaos benchmark: a run whose ranks are killed ends with the weights of one that is left alone."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import chaos


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "num_ranks", "more"),
    [
        ("cp", 2, ""),
        pytest.param("pp", 4, "", marks=pytest.mark.release),
        pytest.param("ep", 2, "--task dpo --kills 20 --steps 60", marks=pytest.mark.release),
        pytest.param("ep", 2, "--task kto --kills 3", marks=pytest.mark.release),
    ],
)
def test_killed_ranks_lose_nothing(
    run_whole: Callable[[int, list[str]], chaos.Run],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    axis: str,
    num_ranks: int,
    more: str,
) -> None:
    flags = ["--kills", "2", "--ranks", str(num_ranks), f"--{axis}-size", "2", "--steps", "12", "--timeout", "400"]
    code = chaos.main([*flags, *more.split(), "--json", str(tmp_path / "figures.json")], run_whole)
    printed = capfd.readouterr()
    assert code == 0, printed.out + printed.err
    figures = json.loads((tmp_path / "figures.json").read_text())
    asked = re.findall(r"--kills (\d+)", more) or ["2"]
    assert figures["kills"] == int(asked[0])
    assert figures["largest_weight_difference"] == 0.0
    assert figures["metrics_complete"]
    assert figures["left_behind"] == []


@pytest.mark.slow
def test_what_counts_as_complete(tmp_path: Path) -> None:
    figures = {"epoch": 0.5, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 8, "target_tokens": 4}
    steps = [json.dumps({"step": step, **figures, "expert_tokens": [[8]], "seconds": step}) for step in range(1, 5)]
    later = [line.replace('"seconds": ', '"seconds": 9') for line in steps]
    other = steps[2].replace('"loss": 1.0', '"loss": 1.5')
    warning = json.dumps({"step": 2, "warning": "router collapse"})
    expected = tmp_path / "expected"
    expected.write_text("\n".join([*steps, warning]))
    for lines, is_complete in (
        (later, True),
        ([*later[:2], warning, *later[2:], warning], True),
        (steps[:3], False),
        ([steps[0], *steps[2:]], False),
        ([*steps[:2], *steps[1:]], False),
        ([*steps[:2], other, steps[3]], False),
        ([steps[1], steps[0], *steps[2:]], False),
    ):
        (tmp_path / "found").write_text("\n".join(lines))
        assert chaos.is_complete(tmp_path / "found", expected) == is_complete, lines


@pytest.mark.slow
def test_what_is_left_behind(tmp_path: Path) -> None:
    for name in ("checkpoints/step-00000005", "checkpoints/.step-00000006-x.part", "hf", ".hf-x.part"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("checkpoints/best.part", "metrics.jsonl", "metrics.jsonl.part"):
        (tmp_path / name).touch()
    found = chaos.left_behind(tmp_path)
    assert sorted(found) == [".hf-x.part", ".step-00000006-x.part", "best.part", "metrics.jsonl.part"]


@pytest.mark.slow
def test_a_run_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    chaos.wait_for_progress(tmp_path, steps=1, process=ended, deadline=0)

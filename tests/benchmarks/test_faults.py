"""benchmarks.faults in its short form: each fault ends as it should, and going on gives the undisturbed weights."""

from collections.abc import Callable

import pytest

from benchmarks import faults
from benchmarks.chaos import Run
from benchmarks.network import can_make_networks


@pytest.mark.complete
def test_short_form(run_whole: Callable[[int, list[str]], Run], capfd: pytest.CaptureFixture[str]) -> None:
    code = faults.main(["--short"], run_whole)
    printed = capfd.readouterr().out
    assert code == 0, printed
    # its rows: what was injected, how often, what happened, seconds, difference
    for name, fault in faults.FAULTS.items():
        assert (f"| {fault.what} | " in printed) == (fault.in_short and not fault.of_pipelines), name


@pytest.mark.exhaustive
@pytest.mark.skipif(not can_make_networks(), reason="needs root and network namespaces")
def test_two_nodes(run_whole: Callable[[int, list[str]], Run], capfd: pytest.CaptureFixture[str]) -> None:
    """In network namespaces: the link between them is cut, which ends the run within its time limit, or slowed."""
    flags = ["--faults", "link-cut", "link-slow", "--times", "1", "--ranks", "2", "--steps", "6"]
    code = faults.main(flags, run_whole)
    printed = capfd.readouterr().out
    assert code == 0, printed
    assert "every rank reports where it hangs" in printed
    assert "it continues, slower" in printed

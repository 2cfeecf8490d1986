"""benchmarks.faults in its short form: each fault ends as it should, and going on gives the undisturbed weights."""

import time
from collections.abc import Callable

import pytest

from benchmarks import faults
from benchmarks.network import can_make_networks
from tests.distributed.pool import RankPool
from tests.distributed.test_train_ep import run_main


@pytest.fixture
def run_whole(ranks: RankPool) -> Callable[[int, list[str]], faults.Run]:
    """Runs without a fault need no processes of their own, which cost more than all else here."""

    def run(world_size: int, argv: list[str]) -> faults.Run:
        results = ranks.run(run_main, world_size, argv, join_group=False)
        return faults.Run(max(code for code, _ in results), "".join(errors for _, errors in results), time.time())

    return run


def test_short_form(run_whole: Callable[[int, list[str]], faults.Run], capfd: pytest.CaptureFixture[str]) -> None:
    code = faults.main(["--short"], run_whole)
    printed = capfd.readouterr().out
    assert code == 0, printed
    # its rows: what was injected, how often, what happened, seconds, difference
    for name, fault in faults.FAULTS.items():
        assert (f"| {fault.what} | " in printed) == fault.in_short, name


@pytest.mark.skipif(not can_make_networks(), reason="needs root and network namespaces")
def test_two_nodes_of_two_ranks(
    run_whole: Callable[[int, list[str]], faults.Run], capfd: pytest.CaptureFixture[str]
) -> None:
    """In network namespaces: the link between them is cut, which ends the run within its time limit, or slowed."""
    flags = ["--faults", "link-cut", "link-slow", "--times", "1", "--ranks", "4", "--steps", "6"]
    code = faults.main(flags, run_whole)
    printed = capfd.readouterr().out
    assert code == 0, printed
    assert "every rank tells where it stands" in printed
    assert "it goes on, slower" in printed

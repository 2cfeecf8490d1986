"""benchmarks.faults in its short form: each fault ends as it should, and going on gives the undisturbed weights."""

import pytest

from benchmarks import faults


def test_short_form(capfd: pytest.CaptureFixture[str]) -> None:
    code = faults.main(["--short"])
    printed = capfd.readouterr().out
    assert code == 0, printed
    # its rows: what was injected, how often, what happened, seconds, difference
    for name, fault in faults.FAULTS.items():
        assert (f"| {fault.what} | " in printed) == fault.in_short, name

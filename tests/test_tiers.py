"""Which tests a tier holds goes by their own marks and ids, and not by what else is collected."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiers import REPRESENTATIVES, tier_of

ROOT = Path(__file__).parents[1]
FILE = "tests/families/test_families.py"


@pytest.mark.release
def test_a_file_alone_has_the_same_cases_as_among_others() -> None:
    among_others = collected("slow and not release", "tests/moe", FILE)
    cases = [case for case in among_others if case.startswith(FILE)]
    assert cases
    assert collected("slow and not release", FILE) == cases
    assert collected("slow and not release", cases[-1]) == cases[-1:]


def collected(marks: str, *paths: str) -> list[str]:
    """Ids of the tests that are selected."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", marks, *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_what_is_not_marked_is_in_the_first_tier() -> None:
    assert tiers_of([], cases=50) == {"": 50}
    assert tiers_of([pytest.mark.slow], cases=50) == {"slow": 50}
    assert tiers_of([pytest.mark.release, pytest.mark.sample(2)], cases=50) == {"release": 50}


def test_one_case_in_n_is_in_each_tier_but_the_last() -> None:
    tiers = tiers_of([pytest.mark.sample(4)], cases=4000)
    assert tiers[""] == pytest.approx(1000, rel=0.1)
    assert tiers["slow"] == pytest.approx(750, rel=0.1)
    tiers = tiers_of([pytest.mark.sample(4), pytest.mark.slow], cases=4000)
    assert "" not in tiers
    assert tiers["slow"] == pytest.approx(1000, rel=0.1)


def test_other_families_are_not_in_the_first_tier() -> None:
    assert tiers_of([], 100, family=REPRESENTATIVES[0]) == {"": 100}
    others = tiers_of([], 2400, family="another")
    assert "" not in others
    assert others["slow"] == pytest.approx(200, rel=0.3)


def tiers_of(marks: Sequence[pytest.MarkDecorator], cases: int, family: str | None = None) -> dict[str, int]:
    """Cases by tier, of a test with these marks."""
    by_name = {mark.name: mark for mark in marks}
    params = {} if family is None else {"family": family}
    found: dict[str, int] = {}
    for case in range(cases):
        item: Any = SimpleNamespace(
            nodeid=f"tests/families/test_file.py::test_name[{case}]",
            path=Path("tests/families/test_file.py"),
            callspec=SimpleNamespace(params=params),
            get_closest_marker=by_name.get,
        )
        tier = tier_of(item)
        found[tier] = found.get(tier, 0) + 1
    return found

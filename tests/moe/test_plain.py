"""Dataclasses out of JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import pytest

from expertmesh.moe.util.plain import from_plain
from expertmesh.training.planning.planner.account import Account
from expertmesh.training.planning.planner.facts import Cuts, ModelFacts
from expertmesh.training.planning.rehearsal.engine import account_of, cuts_of, rehearsed_facts
from tests.tiny import tiny_config
from tests.training.dry_runs import CLUSTER, flags_of


class Pair(NamedTuple):
    first: int
    second: str


@dataclass(frozen=True)
class Inner:
    kind: Literal["a", "b"]
    number: float | None = None


@dataclass(frozen=True)
class Outer:
    inner: Inner
    each: tuple[Inner, ...]
    two: tuple[int, Inner]
    by_name: Mapping[str, Inner]
    many: Sequence[int]
    pair: Pair


OUTER = Outer(
    Inner("a"), (Inner("b", 0.5),), (3, Inner("b")), {"x": Inner("a", 1.0), "y": Inner("b")}, (1, 2), Pair(1, "one")
)


def test_all_that_is_written_is_read_as_it_was() -> None:
    found = from_plain(Outer, json.loads(json.dumps(asdict(OUTER))))
    assert found == OUTER
    assert type(found.pair) is Pair


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        1,
        {},
        {"inner": {}},
        {"unknown": 1},
        {"two": [1]},
        {"two": None},
        {"each": 3},
        {"by_name": []},
        {"pair": [1, "one", 2]},
    ],
    ids=str,
)
def test_what_is_something_else_is_told_apart(wrong: Any) -> None:
    content = asdict(OUTER) | wrong if isinstance(wrong, dict) and wrong else wrong
    with pytest.raises((TypeError, ValueError, KeyError, AttributeError)):
        from_plain(Outer, content)


def test_what_is_kept_of_forecasts() -> None:
    from expertmesh.training.planning.planner.asked import Asked

    config, model_config = flags_of(max_seq_length=32, ep_size=2), tiny_config()
    facts = rehearsed_facts(config, model_config, "cuda")
    cuts = cuts_of(config, model_config, "cuda")
    account = account_of(Asked(config, 2, CLUSTER), model_config, facts)
    pairs: Any = ((ModelFacts, facts), (Cuts, cuts), (Account, account))
    for kind, value in pairs:
        assert from_plain(kind, json.loads(json.dumps(asdict(value)))) == value

"""How a row of the table is written: a comparison, on one parallel layout."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest

from expertmesh.sharding.topology import Topology
from tests.parity.case import Case
from tests.parity.compare import Bits, Tolerance

EXACT = Tolerance()
OF_FAMILIES = Tolerance(may_lack=True)
OF_CASES = [field.name for field in fields(Case)]


@dataclass(frozen=True)
class Row:
    """
    Attributes:
        case, topology: of the run that is compared. within: makes what it is built and trained in.
        against: the row whose run it is compared with; None: transformers' own class in one process.
        bits: what has the same bits, beside what `allowed` says of the rest.
        tier: the mark of that name, if any. marks: others.
    """

    name: str
    case: Case
    topology: Topology
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    against: "Row | None" = None
    allowed: Tolerance = EXACT
    bits: Bits = ""
    tier: str = ""
    marks: tuple[Any, ...] = ()

    @property
    def param(self) -> Any:
        """For `pytest.mark.parametrize`."""
        of_tier = [getattr(pytest.mark, self.tier)] if self.tier else []
        return pytest.param(self, id=self.name, marks=[*of_tier, *self.marks])


def rows(
    name: str, layouts: str, *, against: Mapping[str, Any] | None = None, allowed: Tolerance | None = None, **what: Any
) -> list[Row]:
    """One row for each of some layouts.

    Args:
        layouts: between bars, as `topology_of` reads them, each with a tier behind it if it is not for `make test`:
            "2 ep 2 | 4 ep 2 hybrid, slow".
        against: what the other run has otherwise, its layout among it; None for what it has not set. Without, that is
            transformers' class.
        allowed: by default what the family has, or EXACT for one run of ours and another.
        what: fields of the case, flags of the run, and fields of the row.
    """
    settings = dict(what)
    of_row = {key: settings.pop(key) for key in ("within", "bits", "tier", "marks") if key in settings}
    if allowed is None:
        is_ours = against is not None or what.get("family", "mixtral") == "mixtral"
        allowed = EXACT if is_ours else OF_FAMILIES
    found = []
    for layout in layouts.split("|"):
        where, _, tier = layout.strip().partition(", ")
        row = Row(f"{name}, on {where}", case_of(settings), topology_of(where), allowed=allowed, **of_row)
        if against is not None:
            other = {key: value for key, value in (settings | dict(against)).items() if value is not None}
            topology = topology_of(other.pop("layout", where))
            within = other.pop("within", row.within)
            row = replace(row, against=Row("", case_of(other), topology, within))
        found.append(replace(row, tier=tier or row.tier))
    return found


def case_of(settings: Mapping[str, Any]) -> Case:
    """Of fields of a case and flags of a run."""
    of_case = {name: value for name, value in settings.items() if name in OF_CASES}
    flags = {name: value for name, value in settings.items() if name not in OF_CASES}
    return Case(**of_case | {"settings": of_case.get("settings", {}) | flags})


@cache
def topology_of(layout: str) -> Topology:
    """ "8 ep 2 pp 2 hybrid": the number of ranks, sizes that are not 1, and how the dense part is sharded."""
    world_size, *words = layout.split()
    is_hybrid = "hybrid" in words
    words = [word for word in words if word != "hybrid"]
    sizes: dict[str, Any] = {f"{axis}_size": int(size) for axis, size in zip(words[::2], words[1::2], strict=True)}
    return Topology(int(world_size), **{"ep_size": 1, "dense_shard": "hybrid" if is_hybrid else "full"} | sizes)

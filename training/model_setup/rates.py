"""Attained rates: which share of a device's best each class of operators reaches, and what overlap and the host cost.

Planner, dry run and cost breakdown take all of it from here. What others published lies in `rates.json`, each figure
with its source, or as "assumed" with what was found in its stead; `python -m benchmarks.rates --write FILE` measures a
device's own.
"""

import json
import re
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import log, pi
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, get_args

Operator = Literal[
    "matmul",
    "matmul fp32",
    "eigendecomposition",
    "grouped matmul",
    "grouped matmul fp8",
    "attention",
    "attention backward",
    "efficient attention",
    "efficient attention backward",
    "packed attention",
    "packed attention backward",
    "memory",
    "update",
]
"""Classes of kernels. matmul: in the compute dtype. matmul fp32: an optimizer's, in fp32 or double whatever that is;
these and eigendecompositions, which are in double, are shares of the rate in fp32. Attention is by the kernel that
computes it: cuDNN's, torch's memory-efficient one, and flash attention's over packed samples. memory: no matmul in
it. update: the same, of an optimizer's step."""
Exchange = Literal["ring inside", "ring between", "all-to-all inside", "all-to-all between"]
"""Classes of collectives: inside a node, or between nodes. A ring: all-gather, reduce-scatter, all-reduce."""
NEWER_FLASH = {3: ", FA3", 4: ", FA4"}
"""By version: what ends the names of packed attention's rates under a newer flash attention than torch's own."""
CLASSES = frozenset((*get_args(Operator), *get_args(Exchange)))


class Work(NamedTuple):
    """Class and size of a kernel. size: FLOPs of a matmul, of a grouped one for each expert; tokens of a sequence that
    attention sees; 1 where it does not matter."""

    operator: Operator
    size: float


MEMORY = Work("memory", 1.0)

EIGEN_FLOPS = 9
"""FLOPs of the eigenvalues and eigenvectors of a symmetric matrix of n rows, over n³ (Golub and Van Loan, Matrix
Computations, section 8.3)."""


@dataclass(frozen=True)
class Attained:
    """A measurement. size: as of a `Work`; of a collective the ranks of a node, or between nodes the nodes. share: of
    the device's or link's best. source: who measured it."""

    operator: str
    size: float
    share: float
    source: str


@dataclass(frozen=True)
class RateConstant:
    """What is no rate. name: of a property of `Rates`. value: a share, or seconds. source: who measured it."""

    name: str
    value: float
    source: str


@dataclass(frozen=True)
class Rates:
    """All that a forecast takes from measurements. A class without any attains its best, and what else is not measured
    costs nothing but a launch and a call."""

    attained: tuple[Attained, ...] = ()
    constants: tuple[RateConstant, ...] = ()

    def share(self, operator: Operator | Exchange, size: float) -> float:
        """The share attained at a size: between two that were measured by the logarithm of the size, beyond all of
        them that of the nearest."""
        sizes, shares = self._by_class.get(operator, ((), ()))
        if not sizes:
            return 1.0
        place = bisect(sizes, size)
        if place in (0, len(sizes)):
            return shares[min(place, len(sizes) - 1)]
        low, high = place - 1, place
        way = log(size / sizes[low]) / log(sizes[high] / sizes[low])
        return shares[low] + way * (shares[high] - shares[low])

    @cached_property
    def _by_class(self) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for each in self.attained:
            found.setdefault(each.operator, []).append((each.size, each.share))
        return {
            name: (tuple(size for size, _ in sorted(points)), tuple(share for _, share in sorted(points)))
            for name, points in found.items()
        }

    @cached_property
    def compute_beside(self) -> float:
        """How fast kernels run while a collective runs beside them, as a share of how fast they run alone."""
        return self._constant("compute beside", 1.0)

    @cached_property
    def collective_beside(self) -> float:
        """The same of the collective."""
        return self._constant("collective beside", 1.0)

    @cached_property
    def launch(self) -> float:
        """Seconds between the end of one kernel and the start of the next, where the host is ahead."""
        return self._constant("launch", 2e-6)

    @cached_property
    def call(self) -> float:
        """Seconds that the host takes for an operator, views included."""
        return self._constant("call", 5e-6)

    @cached_property
    def wait(self) -> float:
        """Seconds from the end of a kernel until the host, having waited for it, has launched the next one."""
        return self._constant("wait", 0.0)

    @cached_property
    def experts_apart(self) -> int:
        """So many experts, or fewer, are multiplied faster one after the other than by a grouped matmul, where the host
        knows their rows."""
        return int(self._constant("experts apart", 1))

    def _constant(self, name: str, default: float) -> float:
        return next((each.value for each in self.constants if each.name == name), default)

    def told(self, classes: Sequence[str]) -> str:
        """The shares of these classes that were measured, from the smallest size to the largest; in words."""
        ends = {name: self._by_class[name][1] for name in classes if name in self._by_class}
        return ", ".join(
            f"{name} {shares[0]:.2g}" + (f" to {shares[-1]:.2g}" if shares[-1] != shares[0] else "")
            for name, shares in ends.items()
        )

    def with_flash_attention(self, version: int) -> "Rates":
        """The same where packed attention is that of a newer flash attention."""
        ending = NEWER_FLASH[version]
        replaced = {each.operator.removesuffix(ending) for each in self.attained if each.operator.endswith(ending)}
        kept = (each for each in self.attained if each.operator not in replaced)
        return replace(self, attained=tuple(replace(e, operator=e.operator.removesuffix(ending)) for e in kept))

    def with_classes_of(self, other: "Rates") -> "Rates":
        """The same, with the other's figures for each class and constant that this lacks."""
        classes, names = {each.operator for each in self.attained}, {each.name for each in self.constants}
        return Rates(
            (*self.attained, *(each for each in other.attained if each.operator not in classes)),
            (*self.constants, *(each for each in other.constants if each.name not in names)),
        )


AT_BEST = Rates()
"""Of which nothing was measured."""


@cache
def published(gpu: str) -> Rates:
    """What was published of a GPU; where nothing was, of the one that the file says it is like."""
    table = json.loads((Path(__file__).parent / "rates.json").read_text(encoding="utf-8"))[gpu]
    rates = rates_from({"attained": table["attained"], "constants": table["constants"]})
    return rates.with_classes_of(published(table["like"])) if "like" in table else rates


def experts_apart(device_name: str) -> int:
    """`Rates.experts_apart` of a GPU that calls itself so, such as "NVIDIA H100 80GB HBM3"; 1 of one of which nothing
    was published."""
    names = json.loads((Path(__file__).parent / "rates.json").read_text(encoding="utf-8"))
    known = [name for name in names if re.search(rf"\b{name}\b", device_name)]
    return published(known[0]).experts_apart if known else 1


def rates_from(table: Any) -> Rates:
    """What `dataclasses.asdict` made of `Rates`.

    Raises:
        ValueError: a class is unknown, or a figure is not a positive number. TypeError, KeyError: it is something else.
    """
    attained = tuple(Attained(**each) for each in table["attained"])
    constants = tuple(RateConstant(**each) for each in table["constants"])
    names = ("compute beside", "collective beside", "launch", "call", "wait", "experts apart")
    for each in attained:
        if _class_of(each.operator) not in CLASSES:
            raise ValueError(f"there is no class of operators {each.operator!r}")
        _check(each.operator, each.size, 1e-30)
        _check(each.operator, each.share, 1e-30)
    for constant in constants:
        if constant.name not in names:
            raise ValueError(f"there is no constant {constant.name!r}")
        _check(constant.name, constant.value, 0.0 if constant.name in ("launch", "call", "wait") else 1e-30)
    return Rates(attained, constants)


def _class_of(name: str) -> str:
    """The class that a rate's name is of, whichever flash attention it was measured with."""
    for ending in NEWER_FLASH.values():
        name = name.removesuffix(ending)
    return name


def _check(name: str, value: object, least: float) -> None:
    if not isinstance(value, int | float) or not least <= value < 1e30:
        raise ValueError(f"{name} is not a positive number")


FEW_EXPERTS, FEW_BUSIEST = 8, 1.083
"""Mean over 16 layers of the busiest of 8 experts over the mean, in a model that a balancing loss had trained
(shawntan/scattermoe#10)."""
MANY_EXPERTS, GINI = 128, 0.195
"""Gini coefficient of experts' loads on wikitext in one model of 128 experts, which is also the median of five models
(arXiv 2605.20982: 0.105, 0.150, two above 0.24, and Qwen3-30B between, of which this is the middle)."""


def natural_imbalance(num_experts: int) -> float:
    """The load of the busiest expert over the mean that natural routing has: between the two above by the logarithm of
    the number of experts.

    A Gini coefficient G is that of normally distributed loads with a standard deviation of √π·G times their mean.
    """
    many = 1 + busiest_of(MANY_EXPERTS) * pi**0.5 * GINI
    way = log(max(num_experts, FEW_EXPERTS) / FEW_EXPERTS) / log(MANY_EXPERTS / FEW_EXPERTS)
    return FEW_BUSIEST + way * (many - FEW_BUSIEST)


def rank_imbalance(busiest: float, num_experts: int, ep_size: int) -> float:
    """The load of the busiest of `ep_size` ranks over the mean, where the busiest expert's is `busiest`.

    As of independent quantities: a rank's e experts have 1/√e of the spread of one, and the largest of few ranks lies
    nearer to the mean than that of many experts.
    """
    if ep_size == 1:
        return 1.0
    spread = (busiest - 1) / busiest_of(num_experts)
    return 1 + spread * busiest_of(ep_size) / (num_experts / ep_size) ** 0.5


def busiest_of(number: int) -> float:
    """Expected maximum of so many standard normal quantities (Blom, 1958)."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))

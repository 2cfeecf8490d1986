"""Seconds of a kernel and of a collective, by a cluster's rates; and which share of a collective leaves a node.

Links: a ring's rank sends to the next one alone, and a node's k ranks of the group each begin a ring of their own (as
nccl has it, a ring a network card), so of what each sends 1/k leaves the node. An all-to-all goes straight from rank to
rank. What a stage sends goes to one rank, as a ring's of two.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import add, sub
from typing import Literal, Self

from ...model_setup.rates import Work
from .hardware import Device, Hardware

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]


class Sums:
    """A dataclass of numbers, which are added, subtracted and multiplied field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: Self) -> Self:
        return type(self)(*map(sub, vars(self).values(), vars(other).values()))

    def __mul__(self, often: float) -> Self:
        return type(self)(*(often * each for each in vars(self).values()))


@dataclass(frozen=True)
class Cluster:
    """hardware: of each rank. gpus_per_node: ranks per node. memory: bytes that a rank may hold."""

    hardware: Hardware
    gpus_per_node: int
    memory: float


def kernel_seconds(flops: float, moved: float, work: Work, hardware: Hardware) -> float:
    """Seconds of a kernel: of its matmuls or of its memory traffic, whichever is longer, and its launch."""
    device, rates = hardware.device, hardware.rates
    operator = work.operator if work.operator == "update" else "memory"
    memory = moved / (device.memory_bandwidth * rates.share(operator, max(moved, 1.0)))
    if flops == 0:
        return memory + rates.launch
    return max(flops / (best_rate(work.operator, device) * rates.share(*work)), memory) + rates.launch


def best_rate(operator: str, device: Device) -> float:
    """FLOPs per second of a class of kernels with matmuls, at best."""
    if operator == "grouped matmul fp8":
        return device.fp8
    return device.fp32 if operator in ("matmul fp32", "eigendecomposition") else device.matrix


def seconds_among(kind: str, sent: float, ranks: Sequence[int], hardware: Hardware, gpus_per_node: int) -> float:
    """Seconds of a collective in which each of `ranks` sends so many bytes: the slower of its links, and its messages'
    latencies: n - 1 in a ring inside a node; across nodes the number of nodes less one, beside those inside; an
    all-to-all sends all at once."""
    away = share_away(kind, ranks, gpus_per_node)
    inside, between, rates = hardware.inside, hardware.between, hardware.rates
    here = ranks_a_node(ranks, gpus_per_node)
    nodes = -(-len(ranks) // here)
    if kind == "all-to-all":
        share_inside, share_between = rates.share("all-to-all inside", here), rates.share("all-to-all between", nodes)
    else:
        is_pair = kind in ("send", "receive")
        share_inside = rates.share("ring inside", 2 if is_pair else here)
        share_between = rates.share("ring between", 2 if is_pair else nodes)
    transfer = max(
        sent * (1 - away) / (inside.bandwidth * share_inside), sent * away / (between.bandwidth * share_between)
    )
    if kind in ("all-to-all", "send"):
        return transfer + (between.latency if away > 0 else inside.latency)
    rounds = 2 if kind == "all-reduce" else 1
    return transfer + rounds * ((here - 1) * inside.latency + (nodes - 1) * between.latency)


@cache
def ranks_a_node(ranks: Sequence[int], gpus_per_node: int) -> int:
    """How many of a group's ranks share a node, where they are fewest."""
    return min(Counter(rank // gpus_per_node for rank in ranks).values())


def share_away(kind: str, ranks: Sequence[int], gpus_per_node: int) -> float:
    """The fraction of what a rank sends in a collective of `ranks` that leaves the node: to ranks on other nodes, or
    round a ring; of what a stage sends, where any has to leave it."""
    here = ranks_a_node(ranks, gpus_per_node)
    if here == len(ranks):
        return 0.0
    if kind == "send":
        return 1.0
    return (len(ranks) - here) / (len(ranks) - 1) if kind == "all-to-all" else 1 / here

"""Which rows of which parameter stand where in which tensor on disk: one table for reading and for writing.

A parameter's rows (dim 0) are the unit, since every parameter is sharded along dim 0 only. For experts, row
n·F + f of w1, v1 and w2 is row f of expert n.

Shape suffixes: D model width, F expert width, E experts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moe import Family, MoEShape
from moe.families import DiskNames, FusedNames


@dataclass(frozen=True)
class Region:
    """A rectangle of a tensor on disk that holds a run of rows of one parameter.

    Attributes:
        parameter: its name in the model.
        rows: the parameter's rows.
        index: leading index into the tensor on disk, (expert,) in a fused one, else ().
        first: where on disk the run begins, along the matrix's first dim, or its second if transposed.
        transposed: whether the parameter's rows are columns on disk.
    """

    parameter: str
    rows: range
    index: tuple[int, ...] = ()
    first: int = 0
    transposed: bool = False

    def start_on_disk(self, rows: range) -> int:
        """Where `rows`, a part of self.rows, begin on disk, counted as `first` is."""
        return self.first + rows.start - self.rows.start


@dataclass(frozen=True)
class DiskTensor:
    """A tensor on disk. Its regions, in order, cover it from its first element to its last, each a block of its own."""

    name: str
    shape: tuple[int, ...]
    regions: tuple[Region, ...]


def overlap(a: range, b: range) -> range:
    """The rows that two runs share; empty when none."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def disk_tensors(
    parameters: dict[str, tuple[int, ...]], family: Family, shape: MoEShape, names: DiskNames
) -> list[DiskTensor]:
    """Every tensor that a checkpoint of this model has, in the model's order.

    Args:
        parameters: global shape of every parameter, by its name in our model.
        family, shape: of the model.
        names: how the MoE tensors are called on disk.
    """
    return list(_disk_tensors(parameters, family, shape, names))


def _disk_tensors(
    parameters: dict[str, tuple[int, ...]], family: Family, shape: MoEShape, names: DiskNames
) -> Iterator[DiskTensor]:
    for name, size in parameters.items():
        layer, _, part = name.partition(f".{family.block}.")
        number = layer.rpartition(".")[2]
        if not part:
            yield DiskTensor(name, size, (Region(name, range(size[0])),))
        elif part == "router.weight":
            yield DiskTensor(names.router.format(layer=number), size, (Region(name, range(size[0])),))
        elif part == "experts.w1":
            yield from _expert_tensors(name.removesuffix("w1"), number, shape, names)
        else:
            assert part in ("experts.v1", "experts.w2"), name


def _expert_tensors(prefix: str, layer: str, shape: MoEShape, names: DiskNames) -> Iterator[DiskTensor]:
    width, model_width, num_experts = shape.expert_width, shape.model_width, shape.num_experts
    rows = [range(n * width, (n + 1) * width) for n in range(num_experts)]
    w1, v1, w2 = (f"{prefix}{name}" for name in ("w1", "v1", "w2"))
    if isinstance(names, FusedNames):
        gate_up = []
        for n in range(num_experts):
            gate_up += [Region(w1, rows[n], index=(n,)), Region(v1, rows[n], index=(n,), first=width)]
        down = tuple(Region(w2, rows[n], index=(n,), transposed=True) for n in range(num_experts))
        yield DiskTensor(names.gate_up.format(layer=layer), (num_experts, 2 * width, model_width), tuple(gate_up))
        yield DiskTensor(names.down.format(layer=layer), (num_experts, model_width, width), down)
        return
    for n in range(num_experts):
        gate, up, down_name = (t.format(layer=layer, expert=n) for t in (names.gate, names.up, names.down))
        yield DiskTensor(gate, (width, model_width), (Region(w1, rows[n]),))
        yield DiskTensor(down_name, (model_width, width), (Region(w2, rows[n], transposed=True),))
        yield DiskTensor(up, (width, model_width), (Region(v1, rows[n]),))


def names_on_disk(found: Iterable[str], family: Family) -> DiskNames:
    """The naming that a checkpoint uses, by the expert tensors it has; the family's first if it has none of any."""
    present = set(found)
    for names in family.disk_names:
        down = names.down.format(layer=0, expert=0)
        gate = names.gate_up.format(layer=0) if isinstance(names, FusedNames) else names.gate.format(layer=0, expert=0)
        if present & {down, gate}:
            return names
    return family.disk_names[0]

"""Short models: a model without most of the layers that repeat, and what their dry runs tell of the complete one.

Decoder layers follow one another in runs of equal blocks: a block is one layer, or the few of a hybrid's period. A
short model keeps a few repeats of each run, its first and its last ones, and all layers that belong to no run. What a
step computes and sends, and what it holds at each of its moments, is then a straight line in the number of repeats.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import nn

from ....moe.experts.model_layers import decoder_layers

LONGEST = 12
"""Layers of the longest block that is looked for."""
FEWEST, OF_SEVERAL = 3, 4
"""Layers of a run from which on figures are straight lines, where all are alike and where its block has several: the
first ones and the last have the neighbours that they have in the complete model."""


@dataclass(frozen=True)
class Repeats:
    """So many repeats of a block of as many layers, from the layer `start` on, and the first `rest` of one more."""

    start: int
    size: int
    repeats: int
    rest: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.layers(self.repeats)

    def layers(self, repeats: int) -> int:
        """How many there are with so many repeats."""
        return self.size * repeats + self.rest

    @property
    def fewest(self) -> int:
        """The repeats of the shortest model: all layers of the block are in it."""
        least = (FEWEST if self.size == 1 else OF_SEVERAL) - self.rest
        return min(self.repeats, max(1, -(-least // self.size)))

    @property
    def near(self) -> int:
        """Layers that count as near an end: all, or half of the shortest model's."""
        layers = self.layers(self.fewest)
        return layers if self.repeats == self.fewest else -(-layers // 2)


def runs_of(kinds: Sequence[Any], start: int = 0) -> list[Repeats]:
    """The runs that layers of these kinds make, of which the first is the model's layer `start`: at each layer the one
    that covers most, of equals that with the shortest block. A layer like none beside it is a run of one."""
    runs: list[Repeats] = []
    at = 0
    while at < len(kinds):
        sizes = range(1, min(LONGEST, len(kinds) - at) + 1)
        found = max(
            (Repeats(start + at, size, *divmod(_alike(kinds, at, size), size)) for size in sizes),
            key=lambda run: (run.repeats > 1, run.stop, -run.size),
        )
        if found.repeats == 1:
            found = Repeats(start + at, 1, 1)
        runs.append(found)
        at = found.stop - start
    return runs


def _alike(kinds: Sequence[Any], at: int, size: int) -> int:
    """How many layers there are from one on until the first that is not like the one a block before it."""
    stop = at + size
    while stop < len(kinds) and kinds[stop] == kinds[stop - size]:
        stop += 1
    return stop - at


@dataclass(frozen=True)
class Short:
    """A short model.

    Attributes:
        runs: of the complete one, stage after stage where there is a pipeline. repeats: that are kept of each.
        stages: how many of the runs each stage has; none: there is one.
        own: numbers of the runs of the rank's own stages.
    """

    runs: tuple[Repeats, ...]
    repeats: tuple[int, ...]
    stages: tuple[int, ...]
    own: tuple[int, ...]

    @staticmethod
    def complete(
        kinds: Sequence[Any], layers_of_stages: Sequence[int] | None = None, own_stages: Sequence[int] | None = None
    ) -> "Short":
        """All layers. own_stages: of a pipeline's rank."""
        runs: list[Repeats] = []
        stages: list[int] = []
        own: list[int] = []
        for stage, layers in enumerate([len(kinds)] if layers_of_stages is None else layers_of_stages):
            start = runs[-1].stop if runs else 0
            found = runs_of(kinds[start : start + layers], start)
            if layers_of_stages is None or own_stages is None or stage in own_stages:
                own += range(len(runs), len(runs) + len(found))
            runs += found
            stages.append(len(found))
        repeats = tuple(run.repeats for run in runs)
        return Short(tuple(runs), repeats, () if layers_of_stages is None else tuple(stages), tuple(own))

    @property
    def shortest(self) -> "Short":
        """The fewest repeats of each run that is not cheaper to keep than to have models of; of a pipeline, one of
        those of stages that are not the rank's own."""
        found = replace(self, repeats=tuple(run.fewest if n in self.own else 1 for n, run in enumerate(self.runs)))
        while len(found.longer) > 1:
            kept = (
                replace(found, repeats=(*found.repeats[:n], run.repeats, *found.repeats[n + 1 :]))
                for n, run in enumerate(self.runs)
                if n in self.own and found.repeats[n] < run.repeats
            )
            cheapest = min(kept, key=lambda short: short.run)
            if cheapest.run >= found.run:
                break
            found = cheapest
        return found

    @property
    def run(self) -> int:
        """Layers of all models by which the complete one is told."""
        return self.number + sum(each.number for each, _ in self.longer)

    @property
    def longer(self) -> "list[tuple[Short, int]]":
        """Models in each of which another run has a repeat more, and how many more the complete one has of it."""
        return [
            (replace(self, repeats=(*self.repeats[:n], kept + 1, *self.repeats[n + 1 :])), run.repeats - kept)
            for n, (run, kept) in enumerate(zip(self.runs, self.repeats, strict=True))
            if kept < run.repeats and n in self.own
        ]

    @property
    def number(self) -> int:
        """Of layers; of a pipeline, of the rank's own stages."""
        return sum(self.runs[n].layers(self.repeats[n]) for n in self.own)

    @property
    def is_complete(self) -> bool:
        return all(run.repeats == kept for run, kept in zip(self.runs, self.repeats, strict=True))

    @property
    def layers(self) -> list[int]:
        """Numbers of the complete model's layers that are kept."""
        found: list[int] = []
        for run, number in zip(self.runs, self.repeats, strict=True):
            layers = run.layers(number)
            first = -(-layers // 2)
            found += range(run.start, run.start + first)
            found += range(run.stop - (layers - first), run.stop)
        return found

    @property
    def layers_of_stages(self) -> list[int]:
        """How many layers each stage keeps."""
        ends = [sum(self.stages[:stage]) for stage in range(len(self.stages) + 1)]
        sizes = [run.layers(number) for run, number in zip(self.runs, self.repeats, strict=True)]
        return [sum(sizes[start:end]) for start, end in pairwise(ends)]

    @property
    def names(self) -> list[tuple[int, ...]]:
        """For each layer that is kept, those of the complete model whose moments its own stand for: near an end of its
        run the layer as far from that end. Models that differ by a repeat have these in common."""
        found: list[tuple[int, ...]] = []
        for run, number in zip(self.runs, self.repeats, strict=True):
            layers = run.layers(number)
            for place in range(layers):
                ends = [(place, run.start + place), (layers - 1 - place, run.stop - layers + place)]
                found.append(tuple(dict.fromkeys(layer for far, layer in ends if far < run.near)))
        return found


def keep_layers(model: Any, keep: Sequence[int], renumber: bool) -> None:
    """Take all other decoder layers out of a model that has just been built, in place: those that stay hold other
    numbers of their own, and entries of the config's lists of layers go with the others.

    Args:
        renumber: whether paths of those that stay have their new numbers, too; else a pattern of --freeze or
            --lora-targets finds what it finds in the complete model.
    """
    layers = decoder_layers(model)
    number = len(layers)
    everywhere = set.intersection(*(_names_of_number(layer, n) for n, layer in enumerate(layers)))
    chosen = {was: layers[was] for was in keep}
    for place, layer in enumerate(chosen.values()):
        for path, name in everywhere:
            setattr(layer.get_submodule(path), name, place)
    layers._modules = {str(place if renumber else was): layer for place, (was, layer) in enumerate(chosen.items())}
    if renumber:
        (prefix,) = (path for path, module in model.named_modules() if module is layers)
        for place, (was, layer) in enumerate(chosen.items()):
            for module in layer.modules():
                for name, value in vars(module).items():
                    if isinstance(value, str) and f"{value}.".startswith(f"{prefix}.{was}."):
                        vars(module)[name] = value.replace(f"{prefix}.{was}", f"{prefix}.{place}", 1)
    for config in _configs(model):
        for name, value in list(vars(config).items()):
            if isinstance(value, list | tuple) and len(value) == number:
                vars(config)[name] = type(value)(value[n] for n in keep)
            elif name == "num_hidden_layers" and value == number:
                vars(config)[name] = len(keep)


def _names_of_number(layer: nn.Module, number: int) -> set[tuple[str, str]]:
    """Where a layer's modules hold an integer that is the layer's number: (path, attribute)."""
    return {
        (path, name)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if type(value) is int and value == number
    }


def _configs(model: Any) -> Iterator[Any]:
    """The configs that a model's modules read, each once."""
    seen: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if hasattr(value, "get_text_config"):
                for config in (value, value.get_text_config()):
                    seen[id(config)] = config
    yield from seen.values()

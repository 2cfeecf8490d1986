"""What a model's tensors are called on disk, and how they are put together there, of any family.

transformers' own mapping says it (`transformers.conversion_mapping`); here alone it is read, name by name, without a
tensor: which rectangle of which tensor on disk holds which rows of which of our parameters. Its functions are called;
its patterns are never picked apart.

Shape suffixes: E experts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from expertmesh.checkpoints.hf.mapping import DiskTensor, Region
from expertmesh.moe import DroplessExperts, decoder_layers, moe_layers, moe_shape
from expertmesh.moe.experts.expert_mlp import ExpertParameter
from expertmesh.sharding import StateTensor, rows_of, saved_state, state_of

Shape = tuple[int, ...]
Parameters = dict[str, Shape]
"""Global shape of everything that a checkpoint of a model holds, by our name; what is tied appears once."""


@dataclass(frozen=True)
class _Target:
    """A tensor of transformers' model.

    parts: our parameters that stand in it, and what they are to experts. place: in the order of an export.
    """

    shape: Shape
    parts: tuple[tuple[str, ExpertParameter | None], ...]
    place: int


@dataclass(frozen=True)
class _Piece:
    """A tensor on disk that is a box of a target, beginning `at`. stacked: it lacks dim 0, where it is one expert."""

    name: str
    shape: Shape
    at: Shape
    stacked: bool


_Sources = dict[str | None, list[str]]
"""The tensors that make up a target, by the pattern of the converter that takes them; None where it is they."""


@dataclass(frozen=True)
class Matched:
    """Tensors on disk, matched with a model.

    Attributes:
        tensors: those that make it up, in the model's order.
        tied_copies: those that repeat one of these, as an output projection stored beside the tied embedding does.
        untrained: names that no trained module has: of layers for multi-token prediction, of parts that transformers
            leaves out of this class, or what is computed from the config.
        problems: what is wrong, by the name of the tensor.
    """

    tensors: list[DiskTensor] = field(default_factory=list)
    tied_copies: list[DiskTensor] = field(default_factory=list)
    untrained: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


class Names:
    """The names of a model from `moe.build_model`, sharded or not.

    Attributes:
        parameters: everything that a checkpoint of it holds.
        experts: rows per expert, of each parameter that is experts'.
        buffers: which are no parameters, and are never rounded.
        shape: of its MoE layers. num_moe_layers: how many there are.
        aliases: further names of tied parameters, and the name that each has in `parameters`.
        experts_transposed: whether their experts' matrices lie transposed in transformers' tensors.
    """

    def __init__(self, model: Any):
        self.model = model
        state = saved_state(model)
        self.parameters: Parameters = {name: part.shape for name, part in state.items()}
        self.experts = {name: part.expert.rows_an_expert for name, part in state.items() if part.expert is not None}
        self.buffers = {name for name, part in state.items() if not part.is_parameter}
        self.shape = moe_shape(model)
        self.num_moe_layers = len(moe_layers(model))
        self.experts_transposed = moe_layers(model)[0].mlp.layout.is_transposed
        self._targets = self._all_targets(state)
        self.aliases = {
            alias: names[0] for names in _shared(model).values() for alias in names[1:] if names[0] in self._targets
        }
        self._computed = {name for name, part in state_of(model).items() if not part.persistent}
        self._ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        self._beyond = _layers_beyond(model)

    def _all_targets(self, state: Mapping[str, StateTensor]) -> dict[str, _Target]:
        targets: dict[str, _Target] = {}
        layers = {path: module for path, module in self.model.named_modules() if isinstance(module, DroplessExperts)}
        for name, part in state.items():
            if part.expert is None:
                targets[name] = _Target(part.shape, ((name, None),), len(targets))
                continue
            path = name.removesuffix(f".mlp.{part.expert.name}")
            layout = layers[path].mlp.layout
            target = f"{path}.{part.expert.place.tensor}"
            first = targets.get(f"{path}.{layout.parameters[0].place.tensor}")
            parts = (*(targets[target].parts if target in targets else ()), (name, part.expert))
            # in one place with the first: on disk the experts of a layer follow one another, not their matrices
            place = len(targets) if first is None else first.place
            targets[target] = _Target(layout.tensors[part.expert.place.tensor], parts, place)
        return targets

    def match(self, found: Mapping[str, Shape]) -> Matched:
        """Which of the model's rows stand where in tensors on disk of these names and shapes."""
        from transformers.core_model_loading import dot_natural_key

        matched = Matched()
        sources, copies, by_pattern = self._sorted_out(found, matched)
        natural = {name: dot_natural_key(name) for name in found}
        tensors: list[tuple[Any, DiskTensor]] = []
        covered: dict[str, list[range]] = {name: [] for name in self.parameters}
        for target, by_source in sources.items():
            wanted = self._targets[target]
            for piece in self._pieces(target, wanted, by_source, by_pattern, found, matched.problems):
                regions = tuple(_regions(piece, wanted, matched.problems))
                if regions:
                    tensors.append(((wanted.place, natural[piece.name]), DiskTensor(piece.name, piece.shape, regions)))
                for region in regions:
                    covered[region.parameter].append(region.rows)
        matched.tensors.extend(tensor for _, tensor in sorted(tensors, key=lambda pair: pair[0]))
        for name, target in copies.items():
            matched.tied_copies.extend(self._copy(name, found[name], target, matched.problems))
        self._check_coverage(covered, sources, matched.problems)
        return matched

    def _sorted_out(
        self, found: Mapping[str, Shape], matched: Matched
    ) -> tuple[dict[str, _Sources], dict[str, str], dict[str, Any]]:
        """By target, the tensors that make it up; of copies of a tied one, their target; converters by their patterns.
        What belongs to no target goes into `matched`."""
        known = {**dict.fromkeys(self._targets, True), **dict.fromkeys(self.aliases, True)}
        sources: dict[str, _Sources] = {}
        copies: dict[str, str] = {}
        for name, target, pattern in renamed(self.model, found, known):
            if target in self.aliases:
                copies[name] = self.aliases[target]
            elif target in self._targets:
                sources.setdefault(target, {}).setdefault(pattern, []).append(name)
            elif self._is_untrained(name, target):
                matched.untrained.append(name)
            else:
                matched.problems[name] = _no_place(name)
        for name, target in list(copies.items()):
            if target not in sources:  # the only one there is
                sources[target] = {None: [name]}
                del copies[name]
        by_pattern = {pattern: entry for entry in _converters(self.model) for pattern in entry.source_patterns}
        return sources, copies, by_pattern

    def _is_untrained(self, name: str, target: str) -> bool:
        is_beyond = self._beyond is not None and bool(self._beyond.match(target))
        is_ignored = any(pattern.search(name) or pattern.search(target) for pattern in self._ignored)
        return is_ignored or is_beyond or self.is_computed(target)

    def is_computed(self, name: str) -> bool:
        """Whether a tensor's values follow from the config."""
        return name in self._computed or name.endswith(".rotary_emb.inv_freq")

    def _copy(self, name: str, shape: Shape, target: str, problems: dict[str, str]) -> Iterator[DiskTensor]:
        wanted = self._targets[target]
        if shape != wanted.shape:
            problems[name] = _misshapen(name, shape, wanted.shape)
            return
        yield DiskTensor(name, shape, (Region(target, range(shape[0])),))

    def _pieces(
        self,
        target: str,
        wanted: _Target,
        by_source: _Sources,
        by_pattern: dict[str, Any],
        found: Mapping[str, Shape],
        problems: dict[str, str],
    ) -> Iterator[_Piece]:
        """The boxes that tensors on disk are of a target, each of the right shape."""
        for name in by_source.get(None, []):
            if found[name] == wanted.shape:
                yield _Piece(name, found[name], (0,) * len(wanted.shape), stacked=False)
            else:
                problems[name] = _misshapen(name, found[name], wanted.shape)
        converted = {pattern: names for pattern, names in by_source.items() if pattern is not None}
        if converted:
            converter = by_pattern[next(iter(converted))]
            yield from _interpret(converter, target, wanted, converted, found, problems)

    def _check_coverage(
        self,
        covered: dict[str, list[range]],
        sources: dict[str, _Sources],
        problems: dict[str, str],
    ) -> None:
        """Every row of every parameter is somewhere, once."""
        said = set(problems)
        for target, wanted in self._targets.items():
            names = [name for listed in sources.get(target, {}).values() for name in listed]
            if said & set(names):
                continue
            for parameter, _ in wanted.parts:
                missing, repeated = _gaps(covered[parameter], self.parameters[parameter])
                if repeated:
                    problems[names[-1]] = (
                        f"tensor {names[-1]} repeats dim-0 slices of {parameter} that are also in another tensor"
                    )
                elif missing:
                    name = self._missing_name(
                        target,
                        wanted,
                        sources.get(target, {}),
                        any_converted=any(
                            pattern is not None for by_source in sources.values() for pattern in by_source
                        ),
                    )
                    if name in names:  # what is not there goes by another name that only transformers could say
                        problems[name] = f"tensor {name}: others that make up {target} with it are missing"
                    else:
                        problems[name] = f"tensor {name} is missing"
                    break

    def _missing_name(self, target: str, wanted: _Target, by_source: _Sources, any_converted: bool) -> str:
        """What a tensor that is not there would be called."""
        for pattern, names in by_source.items():
            if pattern is not None and len(names) < wanted.shape[0]:
                numbered = _absent(names, wanted.shape[0])
                if numbered is not None:
                    return numbered
        if wanted.parts[0][1] is not None and not any_converted:
            return target
        return self._name_by_transformers(target)

    def _name_by_transformers(self, target: str) -> str:
        """What `save_pretrained` would call it; of several, the first."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(self.model, add_legacy=False)[::-1]
        reverse = [entry.reverse_transform() for entry in mapping if not isinstance(entry, PrefixChange)]
        name = target
        for kind in (WeightConverter, WeightRenaming):
            for entry in reverse:
                if isinstance(entry, kind):
                    name, pattern = entry.rename_source_key(name)
                    if kind is WeightConverter and pattern is not None:
                        break
        return str(name).replace("*", "0")


def renamed(model: Any, found: Iterable[str], known: dict[str, bool]) -> Iterator[tuple[str, str, str | None]]:
    """(name, what it is or becomes a part of, the pattern of the converter that takes it) of tensors on disk, in
    transformers' order, on which some of its renamings rely.

    Args:
        known: the tensors of transformers' model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    converters = _converters(model)
    for name in sorted(found, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        yield (name, name, None) if target not in known and name in known else (name, target, pattern)


def _converters(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    return [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightConverter)]


def _shared(model: Any) -> dict[int, list[str]]:
    """All names of each parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _layers_beyond(model: Any) -> re.Pattern[str] | None:
    """Names in the layers for multi-token prediction, which checkpoints number on from the last decoder layer."""
    layers = decoder_layers(model)
    path = next(path for path, module in model.named_modules() if module is layers)
    extra = getattr(model.config.get_text_config(), "num_nextn_predict_layers", None)
    if not isinstance(extra, int) or extra < 1:
        return None
    numbers = "|".join(str(len(layers) + n) for n in range(extra))
    return re.compile(rf"{re.escape(path)}\.({numbers})\.")


def _interpret(
    converter: Any,
    target: str,
    wanted: _Target,
    sources: dict[str, list[str]],
    found: Mapping[str, Shape],
    problems: dict[str, str],
) -> Iterator[_Piece]:
    """What transformers' operations make of tensors on disk, without doing it."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first = next(iter(sources.values()))[0]
    merges, joined = False, None
    for operation in converter.operations:
        if isinstance(operation, MergeModulelist) and operation.dim == 0 and joined is None:
            merges = True
        elif isinstance(operation, Concatenate) and joined is None:
            joined = operation.dim
        else:
            problems[first] = (
                f"tensor {first}: transformers makes {target} of it by {operation!r}, which this version cannot read"
            )
            return
    by_place = [sources.get(pattern, []) for pattern in converter.source_patterns]
    if merges:
        yield from _stacked(by_place, joined, wanted, found, problems)
    else:
        assert joined is not None, "a converter has an operation"
        yield from _one_behind_the_other(chain(*by_place), joined, wanted, found, problems)


def _stacked(
    by_place: Sequence[list[str]],
    joined: int | None,
    wanted: _Target,
    found: Mapping[str, Shape],
    problems: dict[str, str],
) -> Iterator[_Piece]:
    """One tensor per expert; those of several places, gate and up, are of one size, and joined along a dim."""
    box = list(wanted.shape[1:])
    if joined is not None:
        box[joined - 1] //= len(by_place)
    for place, names in enumerate(by_place):
        for number, name in zip(_numbers(names) or range(len(names)), names, strict=True):
            if found[name] != tuple(box):
                problems[name] = _misshapen(name, found[name], tuple(box))
            elif number >= wanted.shape[0]:
                problems[name] = _no_place(name)
            else:
                at = [number] + [0] * len(box)
                if joined is not None:
                    at[joined] = place * box[joined - 1]
                yield _Piece(name, found[name], tuple(at), stacked=True)


def _one_behind_the_other(
    names: Iterable[str], joined: int, wanted: _Target, found: Mapping[str, Shape], problems: dict[str, str]
) -> Iterator[_Piece]:
    """Tensors of any length, joined along a dim."""
    start = 0
    for name in names:
        shape, at = list(wanted.shape), [0] * len(wanted.shape)
        if len(found[name]) == len(shape):
            shape[joined], at[joined] = found[name][joined], start
        if found[name] != tuple(shape):
            problems[name] = _misshapen(name, found[name], tuple(shape))
            return
        start += shape[joined]
        yield _Piece(name, found[name], tuple(at), stacked=False)


def _regions(piece: _Piece, wanted: _Target, problems: dict[str, str]) -> Iterator[Region]:
    """Our parameters' rows in a tensor on disk, block by block."""
    sizes = (1, *piece.shape) if piece.stacked else piece.shape
    box = [range(at, at + size) for at, size in zip(piece.at, sizes, strict=True)]
    if any(run.stop > size for run, size in zip(box, wanted.shape, strict=True)):
        problems[piece.name] = f"tensor {piece.name} has shape {list(piece.shape)}, more than its place in the model"
        return
    ((name, expert), *_) = wanted.parts
    if expert is None:
        if piece.stacked or any(len(run) != size for run, size in zip(box[1:], wanted.shape[1:], strict=True)):
            problems[piece.name] = (
                f"tensor {piece.name} is split along another dim than 0 of {name}; this version reads dim-0 slices only"
            )
        else:
            yield Region(name, box[0] if wanted.shape else range(1))
        return
    for number in box[0]:
        for name, expert in wanted.parts:
            assert expert is not None
            yield from _expert_region(piece, wanted, box, number, name, expert, problems)


def _expert_region(
    piece: _Piece,
    wanted: _Target,
    box: list[range],
    number: int,
    name: str,
    expert: ExpertParameter,
    problems: dict[str, str],
) -> Iterator[Region]:
    place = expert.place
    run = box[place.dim]
    others = [d for d in range(1, len(box)) if d != place.dim]
    # those f for which first + step · f is in the run
    least = max(0, -((place.first - run.start) // place.step))
    most = min(expert.rows_an_expert - 1, (run.stop - 1 - place.first) // place.step)
    if most < least:
        return
    if any(len(box[d]) != wanted.shape[d] for d in others):
        problems[piece.name] = (
            f"tensor {piece.name} is split along another dim than 0 of {name}; this version reads dim-0 slices only"
        )
        return
    first = number * expert.rows_an_expert
    yield Region(
        name,
        range(first + least, first + most + 1),
        index=() if piece.stacked else (number,),
        first=place.first + place.step * least - run.start,
        step=place.step,
        transposed=place.dim == 2,
    )


def _gaps(runs: Iterable[range], shape: Shape) -> tuple[bool, bool]:
    """(whether any row is in none of the runs, whether any is in two)."""
    end, missing, repeated = 0, False, False
    for run in sorted(runs, key=lambda run: run.start):
        missing |= run.start > end
        repeated |= run.start < end
        end = max(end, run.stop)
    return missing or end < rows_of(shape), repeated


def _numbers(names: list[str]) -> list[int] | None:
    """The numbers in names that differ by one number alone; None where they differ otherwise."""
    numbers = [re.findall(r"\d+", name) for name in names]
    if len({len(n) for n in numbers}) != 1:
        return None
    varying = [i for i in range(len(numbers[0])) if len({n[i] for n in numbers}) > 1]
    return [int(n[varying[0]]) for n in numbers] if len(varying) == 1 else None


def _absent(names: list[str], count: int) -> str | None:
    """The first name missing from names that differ by one number; None where they differ otherwise."""
    there = _numbers(names)
    if there is None:
        return None
    absent = next(n for n in range(count) if n not in there)
    first, second = (list(re.finditer(r"\d+", name)) for name in names[:2])
    varying = next(a for a, b in zip(first, second, strict=True) if a.group() != b.group())
    return f"{names[0][: varying.start()]}{absent}{names[0][varying.end() :]}"


def _no_place(name: str) -> str:
    return f"tensor {name} has no place in this model; is config.json its own?"


def _misshapen(name: str, found: Shape, expected: Shape) -> str:
    return f"tensor {name} has shape {list(found)}; the config asks for {list(expected)}"

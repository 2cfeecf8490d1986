"""What a model's tensors are called on disk, and how they are put together there, of any family.

transformers' own mapping says it (`transformers.conversion_mapping`); here alone it is read, name by name, without a
tensor: which rectangle of which tensor on disk holds which rows of which of our parameters. Its functions are called;
its patterns are never picked apart.

Shape suffixes: E experts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ...moe.experts.layer import DMoE
from ...moe.experts.layout import ExpertParameter
from ...moe.experts.model_facts import facts_of
from ...moe.experts.model_layers import decoder_layers, moe_layers, moe_shape
from ...moe.hf_model.family_exceptions import SHARING_OUT
from ...moe.hf_model.mtp import mtp_of, shared_with_mtp
from ...moe.util.errors import ExpertMeshError
from ...sharding.state import StateTensor, saved_state, state_of
from ...sharding.topology import rows_of
from ..files.tensors import Region, uncovered

Shape = tuple[int, ...]
Parameters = dict[str, Shape]
"""Global shape of everything that a checkpoint of a model holds, by our name; what is tied appears once."""


@dataclass(frozen=True)
class _Target:
    """A tensor of transformers' model.

    parts: our parameters that stand in it, and what they are to experts. place: in the order of an export. transposed:
    whether the one that is no experts' is its transpose.
    """

    shape: Shape
    parts: tuple[tuple[str, ExpertParameter | None], ...]
    place: int
    transposed: bool = False


@dataclass(frozen=True)
class _Piece:
    """A tensor on disk that is a box of a target, beginning `at`.

    stacked: it lacks dim 0, where it is one expert. swapped: its last two dims lie the other way round on disk. first:
    where along dim 0 of the tensor on disk it begins, where that holds several targets; None elsewhere.
    """

    name: str
    shape: Shape
    at: Shape
    stacked: bool
    swapped: bool = False
    first: int | None = None


_Sources = dict[str | None, list[str]]
"""The tensors that make up a target, by the pattern of the converter that takes them; None where it is they."""


@dataclass(frozen=True)
class Matched:
    """Tensors on disk, matched with a model.

    Attributes:
        tensors: those that make it up, in the model's order, and the rows of parameters that stand in each.
        tied_copies: those that repeat one of these, as an output projection stored beside the tied embedding does.
        untrained: names that no trained module has: of layers for multi-token prediction, of parts that transformers
            leaves out of this class, or what is computed from the config.
        problems: what is wrong, by the name of the tensor.
    """

    tensors: dict[str, tuple[Region, ...]] = field(default_factory=dict)
    tied_copies: dict[str, tuple[Region, ...]] = field(default_factory=dict)
    untrained: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)

    def renamed(self, on_disk: Mapping[str, str]) -> "Matched":
        """The same, with the tensors' names replaced by those `on_disk`, where that has them."""

        def called(name: str) -> str:
            return on_disk.get(name, name)

        return Matched(
            {called(name): regions for name, regions in self.tensors.items()},
            {called(name): regions for name, regions in self.tied_copies.items()},
            [called(name) for name in self.untrained],
            {called(name): problem.replace(name, called(name)) for name, problem in self.problems.items()},
        )


class Names:
    """The names of a model from `build_model`, sharded or not.

    Attributes:
        parameters: everything that a checkpoint of it holds.
        experts: rows per expert, of each parameter that is experts'.
        transposed: parameters beside experts' that are the transposes of transformers' own.
        buffers: which are no parameters, and are never rounded.
        shape: of its MoE layers. num_moe_layers: how many there are.
        aliases: further names of tied parameters, and the name that each has in `parameters`.
        shared_with_mtp: those of them by which a layer for multi-token prediction repeats embedding and head.
        experts_transposed: whether their experts' matrices lie transposed in transformers' tensors.
    """

    def __init__(self, model: Any):
        self.model = model
        state = saved_state(model)
        self.parameters: Parameters = {name: part.shape for name, part in state.items()}
        self.experts = {name: part.expert.rows_an_expert for name, part in state.items() if part.expert is not None}
        self.transposed = {name for name, part in state.items() if part.transposed}
        self.buffers = {name for name, part in state.items() if not part.is_parameter}
        self.shape = moe_shape(model)
        self.num_moe_layers = len(moe_layers(model))
        self.experts_transposed = moe_layers(model)[0].mlp.layout.is_transposed
        self._targets = self._all_targets(state)
        self.aliases = {
            alias: names[0] for names in _shared(model).values() for alias in names[1:] if names[0] in self._targets
        }
        self._mtp, self._layers = mtp_of(model), _layers_path(model)
        self.shared_with_mtp = {} if self._mtp is None else shared_with_mtp(model)
        self.aliases |= {alias: self.aliases.get(name, name) for alias, name in self.shared_with_mtp.items()}
        self._computed = {name for name, part in state_of(model).items() if not part.persistent}
        self._ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        self._beyond = _layers_beyond(model)
        left_out = facts_of(model).left_out
        self._left_out = dict.fromkeys((name for names in left_out.values() for name in names), True)
        self._left_out_parts = tuple(f"{path}." for path in left_out)

    def with_vocabulary(self, size: int) -> "Names":
        """The same of a model with so many tokens: rows of its embedding and its head.

        Raises:
            ExpertMeshError: something else has a row for each token, too.
        """
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        paths = {path for path, module in self.model.named_modules() if module in ends}
        wide = {name: shape for name, shape in self.parameters.items() if name.rpartition(".")[0] in paths}
        sizes, others = (
            {shape[0] for shape in wide.values()},
            self.parameters.keys() - wide.keys() - self.experts.keys(),
        )
        if odd := sorted(name for name in others if self.parameters[name][:1] and self.parameters[name][0] in sizes):
            raise ExpertMeshError(
                f"--add-tokens, --resize-vocab: {odd[0]} has a row for each token, too: not supported"
            )
        found = copy(self)
        found.parameters = self.parameters | {name: (size, *shape[1:]) for name, shape in wide.items()}
        shapes = {name: replace(self._targets[name], shape=found.parameters[name]) for name in wide}
        found._targets = self._targets | shapes
        return found

    def _all_targets(self, state: Mapping[str, StateTensor]) -> dict[str, _Target]:
        targets: dict[str, _Target] = {}
        layers = {path: module for path, module in self.model.named_modules() if isinstance(module, DMoE)}
        for name, part in state.items():
            if part.expert is None:
                shape = part.shape[::-1] if part.transposed else part.shape
                targets[name] = _Target(shape, ((name, None),), len(targets), part.transposed)
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

    def match(self, shapes: Mapping[str, Shape]) -> Matched:
        """Which of the model's rows stand where in tensors on disk of these names and shapes."""
        if self._mtp is None:
            return self._match(shapes)
        on_disk = {self._mtp.ours(name, self._layers): name for name in shapes}
        return self._match({ours: shapes[name] for ours, name in on_disk.items()}).renamed(on_disk)

    def _match(self, shapes: Mapping[str, Shape]) -> Matched:
        from transformers.core_model_loading import dot_natural_key

        matched = Matched()
        (sources, copies), converters = self._sorted_out(shapes, matched), _by_pattern(self.model)
        natural = {name: dot_natural_key(name) for name in shapes}
        places: dict[str, tuple[int, Any]] = {}
        tensors: dict[str, tuple[Region, ...]] = {}
        covered: dict[str, list[range]] = {name: [] for name in self.parameters}
        for target, by_source in sources.items():
            wanted = self._targets[target]
            for piece in self._pieces(target, by_source, converters, shapes, matched.problems):
                regions = tuple(_regions(piece, wanted, matched.problems))
                if regions:
                    # parts of one tensor may be of several targets
                    places.setdefault(piece.name, (wanted.place, natural[piece.name]))
                    tensors[piece.name] = (*tensors.get(piece.name, ()), *regions)
                for region in regions:
                    covered[region.parameter].append(region.rows)
        matched.tensors.update((name, tensors[name]) for name in sorted(tensors, key=places.__getitem__))
        for name, target in copies.items():
            wanted = self._targets[target]
            if shapes[name] == wanted.shape:
                matched.tied_copies[name] = (Region(target, range(wanted.shape[0])),)
            else:
                matched.problems[name] = _misshapen(name, shapes[name], wanted.shape)
        self._check_coverage(covered, sources, matched.problems)
        return matched

    def _sorted_out(self, shapes: Mapping[str, Shape], matched: Matched) -> tuple[dict[str, _Sources], dict[str, str]]:
        """By target, the tensors that make it up; of copies of a tied one, their target. What belongs to no target goes
        into `matched`."""
        known = {**dict.fromkeys(self._targets, True), **dict.fromkeys(self.aliases, True), **self._left_out}
        sources: dict[str, _Sources] = {}
        copies: dict[str, str] = {}
        others: dict[str, bool] = {}
        for target, pattern, names in put_together(self.model, shapes, known, self.shape.num_experts):
            if target in self.aliases:
                copies |= dict.fromkeys(names, self.aliases[target])
            elif target in self._targets:
                sources.setdefault(target, {}).setdefault(pattern, []).extend(names)
            else:
                others |= {name: others.get(name, True) and self._is_untrained(name, target) for name in names}
        placed = {name for by_source in sources.values() for names in by_source.values() for name in names}
        for name, is_untrained in others.items():
            if is_untrained and name not in placed:
                matched.untrained.append(name)
            elif name not in placed:
                matched.problems[name] = _no_place(name)
        for name, target in list(copies.items()):
            if target not in sources:  # the only one there is
                sources[target] = {None: [name]}
                del copies[name]
        return sources, copies

    def _is_untrained(self, name: str, target: str) -> bool:
        is_beyond = self._beyond is not None and bool(self._beyond.match(target))
        if target in self._left_out or target.startswith(self._left_out_parts):
            return True
        is_ignored = any(pattern.search(name) or pattern.search(target) for pattern in self._ignored)
        return is_ignored or is_beyond or self.is_computed(target)

    def is_computed(self, name: str) -> bool:
        """Whether a tensor's values follow from the config."""
        return name in self._computed or name.endswith(".rotary_emb.inv_freq")

    def _pieces(
        self,
        target: str,
        by_source: _Sources,
        converters: dict[str, "_Converter"],
        shapes: Mapping[str, Shape],
        problems: dict[str, str],
    ) -> Iterator[_Piece]:
        """The boxes that tensors on disk are of a target, each of the right shape."""
        wanted = self._targets[target]
        for name in by_source.get(None, []):
            if shapes[name] == wanted.shape:
                yield _Piece(name, shapes[name], (0,) * len(wanted.shape), stacked=False)
            else:
                problems[name] = _misshapen(name, shapes[name], wanted.shape)
        converted = {pattern: names for pattern, names in by_source.items() if pattern is not None}
        if converted:
            converter = converters[next(iter(converted))]
            yield from converter.pieces(target, self._targets, converted, shapes, problems)

    def _check_coverage(
        self, covered: dict[str, list[range]], sources: dict[str, _Sources], problems: dict[str, str]
    ) -> None:
        """Every row of every parameter is somewhere, once."""
        said = set(problems)
        any_converted = any(pattern is not None for by_source in sources.values() for pattern in by_source)
        for target, wanted in self._targets.items():
            by_source = sources.get(target, {})
            names = [name for listed in by_source.values() for name in listed]
            if said & set(names):
                continue
            for parameter, _ in wanted.parts:
                missing, repeated = uncovered(covered[parameter], rows_of(self.parameters[parameter]))
                if repeated is not None:
                    problems[names[-1]] = (
                        f"tensor {names[-1]} repeats dim-0 slices of {parameter} that are also in another tensor"
                    )
                elif missing is not None:
                    fewer = (own for pattern, own in by_source.items() if pattern and len(own) < wanted.shape[0])
                    name = next(filter(None, (_absent(own, wanted.shape[0]) for own in fewer)), None)
                    if name is None:
                        is_fused = wanted.parts[0][1] is not None and not any_converted
                        name = target if is_fused else self._name_by_transformers(target)
                    if name in names:  # what is not there goes by another name that only transformers could say
                        problems[name] = f"tensor {name}: tensors that form {target} with it are missing"
                    else:
                        problems[name] = f"tensor {name} is missing{self._untied(target)}"
                    break

    def _untied(self, target: str) -> str:
        """Of a head that a family can tie to its embedding, that the config does not."""
        head = self.model.get_output_embeddings()
        path = next((path for path, module in self.model.named_modules() if module is head), None)
        if target != f"{path}.weight" or not self.model._tied_weights_keys:
            return ""
        return "; if it is the embedding's, set tie_word_embeddings to true in config.json"

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


def put_together(
    model: Any, found: Iterable[str], known: dict[str, bool], num_experts: int
) -> Iterator[tuple[str, str | None, list[str]]]:
    """(tensor of transformers' model, the pattern of the converter that makes it, those on disk that make it up). A
    tensor on disk may be in several: as a part of each, if it is taken apart.

    Args:
        num_experts: of each experts module.
    """
    converters = _by_pattern(model)
    made_of: dict[tuple[str, str | None], list[str]] = {}
    for name, target, pattern in renamed(model, found, known):
        made_of.setdefault((target, pattern), []).append(name)
    for (target, pattern), names in made_of.items():
        if pattern is None:
            yield target, None, names
            continue
        for other, some in converters[pattern].targets_of(target, names, num_experts):
            if some:
                yield other, pattern, some


def _by_pattern(model: Any) -> dict[str, "_Converter"]:
    return {pattern: _Converter(entry) for entry in _converters(model) for pattern in entry.source_patterns}


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


def _layers_path(model: Any) -> str:
    layers = decoder_layers(model)
    return next(path for path, module in model.named_modules() if module is layers)


def _layers_beyond(model: Any) -> re.Pattern[str] | None:
    """Names in the layers for multi-token prediction, which checkpoints number on from the last decoder layer."""
    layers, path = decoder_layers(model), _layers_path(model)
    extra = getattr(model.config.get_text_config(), "num_nextn_predict_layers", None)
    if not isinstance(extra, int) or extra < 1:
        return None
    numbers = "|".join(str(len(layers) + n) for n in range(extra))
    return re.compile(rf"{re.escape(path)}\.({numbers})\.")


class _Converter:
    """What one of transformers' converters makes of tensors on disk, without doing it.

    Attributes:
        merges: whether it stacks tensors of one expert each. joined: along which dim it concatenates. divided: whether
            each of its targets is a part along dim 0 of one tensor. shared_out: whether of the experts that it stacks
            each of its targets has as many as the others. transposes: its operation that swaps the last two dims.
        unknown: an operation that is not understood; None if all are.
    """

    def __init__(self, converter: Any):
        from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose

        self.converter = converter
        self.merges = self.divided = self.shared_out = False
        self.joined: int | None = None
        self.transposes: Any = None
        self.unknown: Any = None
        alone = len(converter.operations) == 1
        for operation in converter.operations:
            if isinstance(operation, MergeModulelist) and operation.dim == 0 and self.joined is None:
                self.merges = True
            elif isinstance(operation, Concatenate) and self.joined is None:
                self.joined = operation.dim
            elif type(operation) is Transpose and alone:
                self.transposes = operation
            elif (type(operation) is Chunk and alone and operation.dim == 0 and not operation.num_shards_attribute) or (
                type(operation).__name__ == "Split" and alone and operation.dim == 0
            ):  # the latter by its name: transformers 5.17 lacks it
                self.divided = True
            elif type(operation).__name__ in SHARING_OUT and alone and operation.stack_dim == 0:
                self.merges = self.shared_out = True
                self.joined = operation.concat_dim if len(converter.source_patterns) > 1 else None
            else:
                self.unknown = operation
                break

    def targets_of(self, target: str, names: list[str], num_experts: int) -> list[tuple[str, list[str]]]:
        """What tensors of one pattern become parts of, each with those that do.

        Args:
            target: the first of them, of which transformers derives the names of the others.
        """
        targets = self._all_of(target, self.converter.target_patterns[0])
        if not self.shared_out:
            return [(other, names) for other in targets]
        numbers = _numbers(names) or range(len(names))
        return [
            (other, [name for number, name in zip(numbers, names, strict=True) if number // num_experts == place])
            for place, other in enumerate(targets)
        ]

    def _all_of(self, target: str, pattern: str) -> list[str]:
        """The targets beside the one that a pattern stands for, and itself, in the order of their patterns."""
        return [target.replace(pattern, other) for other in self.converter.target_patterns]

    def pieces(
        self,
        target: str,
        targets: Mapping[str, _Target],
        sources: dict[str, list[str]],
        shapes: Mapping[str, Shape],
        problems: dict[str, str],
    ) -> Iterator[_Piece]:
        """The boxes of a target that tensors on disk are."""
        wanted, first = targets[target], next(iter(sources.values()))[0]
        by_place = [sources.get(pattern, []) for pattern in self.converter.source_patterns]
        if self.unknown is not None:
            problems[first] = (
                f"tensor {first}: transformers makes {target} of it by {self.unknown!r}, which expertmesh cannot read"
            )
        elif self.transposes is not None:
            yield from _transposed(first, self.transposes, wanted, shapes, problems)
        elif self.divided:
            pattern = max((p for p in self.converter.target_patterns if p in target), key=len)
            parts = self._all_of(target, pattern)
            yield from _part(first, parts.index(target), [targets.get(part) for part in parts], shapes, problems)
        elif self.merges:
            yield from _stacked(by_place, self.joined, wanted, shapes, problems, self.shared_out)
        else:
            assert self.joined is not None, "a converter has an operation"
            yield from _one_behind_the_other(chain(*by_place), self.joined, wanted, shapes, problems)


def _transposed(
    name: str, operation: Any, wanted: _Target, shapes: Mapping[str, Shape], problems: dict[str, str]
) -> Iterator[_Piece]:
    """A tensor whose last two dims lie the other way round; or, where transformers looks first, may do so."""
    dims = len(wanted.shape)
    at, there = (0,) * dims, (*wanted.shape[:-2], *wanted.shape[:-3:-1])
    if {operation.dim0 % dims, operation.dim1 % dims} != {dims - 2, dims - 1}:
        problems[name] = f"tensor {name}: transformers transposes it by {operation!r}, which expertmesh cannot read"
    elif operation.check_dims and shapes[name] == wanted.shape:
        yield _Piece(name, shapes[name], at, stacked=False)
    elif shapes[name] == there:
        yield _Piece(name, shapes[name], at, stacked=False, swapped=True)
    else:
        problems[name] = _misshapen(name, shapes[name], there)


def _part(
    name: str, place: int, parts: Sequence[_Target | None], shapes: Mapping[str, Shape], problems: dict[str, str]
) -> Iterator[_Piece]:
    """One of several parts of a tensor along dim 0, each with the rows of its target."""
    wanted = parts[place]
    assert wanted is not None, "what is asked for is a target"
    # a target that is none of the model's would be as large as this one: transformers cannot divide by it
    rows = [(part or wanted).shape[0] for part in parts]
    expected = (sum(rows), *wanted.shape[1:])
    if shapes[name] == expected:
        yield _Piece(name, shapes[name], (0,) * len(wanted.shape), stacked=False, first=sum(rows[:place]))
    else:
        problems[name] = _misshapen(name, shapes[name], expected)


def _stacked(
    by_place: Sequence[list[str]],
    joined: int | None,
    wanted: _Target,
    shapes: Mapping[str, Shape],
    problems: dict[str, str],
    shared_out: bool,
) -> Iterator[_Piece]:
    """One tensor per expert; those of several places, gate and up, are of one size, and joined along a dim."""
    box = list(wanted.shape[1:])
    if joined is not None:
        box[joined - 1] //= len(by_place)
    for place, names in enumerate(by_place):
        numbers = _numbers(names) or list(range(len(names)))
        # of experts that several targets share the numbers go on from those of another one
        before = min(numbers, default=0) // wanted.shape[0] * wanted.shape[0] if shared_out else 0
        for number, name in zip((number - before for number in numbers), names, strict=True):
            if shapes[name] != tuple(box):
                problems[name] = _misshapen(name, shapes[name], tuple(box))
            elif number >= wanted.shape[0]:
                problems[name] = _no_place(name)
            else:
                at = [number] + [0] * len(box)
                if joined is not None:
                    at[joined] = place * box[joined - 1]
                yield _Piece(name, shapes[name], tuple(at), stacked=True)


def _one_behind_the_other(
    names: Iterable[str], joined: int, wanted: _Target, shapes: Mapping[str, Shape], problems: dict[str, str]
) -> Iterator[_Piece]:
    """Tensors of any length, joined along a dim."""
    start = 0
    for name in names:
        shape, at = list(wanted.shape), [0] * len(wanted.shape)
        if len(shapes[name]) == len(shape):
            shape[joined], at[joined] = shapes[name][joined], start
        if shapes[name] != tuple(shape):
            problems[name] = _misshapen(name, shapes[name], tuple(shape))
            return
        start += shape[joined]
        yield _Piece(name, shapes[name], tuple(at), stacked=False)


def _regions(piece: _Piece, wanted: _Target, problems: dict[str, str]) -> Iterator[Region]:
    """Our parameters' rows in a tensor on disk, block by block."""
    sizes = (1, *piece.shape) if piece.stacked else piece.shape
    if piece.swapped:
        sizes = (*sizes[:-2], *sizes[:-3:-1])
    if piece.first is not None:
        sizes = wanted.shape
    box = [range(at, at + size) for at, size in zip(piece.at, sizes, strict=True)]
    if any(run.stop > size for run, size in zip(box, wanted.shape, strict=True)):
        problems[piece.name] = f"tensor {piece.name} has shape {list(piece.shape)}, larger than its place in the model"
        return
    ((name, expert), *_) = wanted.parts
    if expert is None:
        dim = 1 if wanted.transposed else 0
        others = [d for d in range(len(box)) if d != dim]
        is_part = piece.stacked or (piece.first is not None and wanted.transposed)
        if is_part or any(len(box[d]) != wanted.shape[d] for d in others):
            problems[piece.name] = (
                f"tensor {piece.name} is not split along dim 0 of {name}; only dim-0 slices can be read"
            )
        else:
            rows = box[dim] if wanted.shape else range(1)
            yield Region(name, rows, first=piece.first or 0, transposed=wanted.transposed != piece.swapped)
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
        problems[piece.name] = f"tensor {piece.name} is not split along dim 0 of {name}; only dim-0 slices can be read"
        return
    first = number * expert.rows_an_expert
    yield Region(
        name,
        range(first + least, first + most + 1),
        index=() if piece.stacked else (number,),
        first=place.first + place.step * least - run.start,
        step=place.step,
        transposed=(place.dim == 2) != piece.swapped,
    )


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
    return f"tensor {name} has no place in this model; does config.json belong to it?"


def _misshapen(name: str, found: Shape, expected: Shape) -> str:
    return f"tensor {name} has shape {list(found)}; config.json needs {list(expected)}"

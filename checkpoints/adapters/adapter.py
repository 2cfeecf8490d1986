"""`Adapter`: a directory as PEFT or `export_adapter` wrote it, opened for resuming or merging.

adapter_config.json, adapter_model.safetensors (see `checkpoints.adapters.peft_format`)
tokenizer and chat template                    as beside a model, so that whoever has the adapter has them too
generation_config.json                         where other tokens end answers than the base's generation: for merge
rope_scaling.json                              where the base was trained with RoPE scaling, as PEFT has no
                                               place for it: what `read_rope_scaling` reads
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...moe.experts.layer import DMoE
from ...moe.experts.lora import A, B, Lora
from ...moe.hf_model.rope import RopeScaling, read_rope_scaling
from ...moe.util.errors import ExpertMeshError
from ..files.dtypes import as_tensor
from ..files.open_files import OpenFiles
from ..files.tensors import overlap
from ..hf.class_names import ClassNames
from ..hf.headers import read_header
from ..hf.json_files import read_json
from ..hf.names import Names
from .peft_format import (
    PREFIX,
    REMAPPED,
    LoraPair,
    is_target,
    lora_names,
    names_a_pattern,
    packed_paths,
    possible_ranks,
    rank_and_scaling,
    target_name,
    unpack_experts,
    unread_settings,
)

CONFIG, WEIGHTS, ROPE = "adapter_config.json", "adapter_model.safetensors", "rope_scaling.json"


DELTA = ".token_adapter.trainable_tokens_delta"
"""What the name of rows of new tokens ends with in PEFT's files."""


_PAIRS_KEPT = 4
"""Gate, up and down of a layer's experts, and a linear layer's."""


def read_rope(path: Path) -> RopeScaling | None:
    """The RoPE scaling of the model that an adapter in a directory is for.

    Raises:
        ExpertMeshError: the file that says so is damaged.
    """
    file = path / ROPE
    return read_rope_scaling(json.dumps(read_json(file)), str(file)) if file.exists() else None


@dataclass(frozen=True)
class _Found:
    """A pair in a file: names of its tensors, and the rank and scale that the config gives it."""

    a: str
    b: str
    rank: int
    scale: float


@dataclass(frozen=True)
class _Beside:
    """What an adapter has beside a parameter.

    Attributes:
        ranks: that A and B may have, by the shapes in the file's header: two where their values alone tell whether gate
            and up share an A.
        scale: what B · A is multiplied by.
        found: the pairs in the file, one for each expert where the parameter is experts'. Empty where they are packed.
    """

    ranks: set[int]
    scale: float
    found: tuple[_Found, ...] = ()


class Adapter:
    """An adapter in a directory, that PEFT or `export_adapter` wrote, for a model of these names.

    Args:
        names: of the model that it is for.
        class_names: of the class that its config names; its names are read as well as the model's own.

    Attributes:
        beside: by the model's parameters that it changes; of tied ones, by the name that the adapter is beside.
        whole: by parameters and buffers that it has in their place: the tensor. ties: whether these stay tied.
        token_rows: by parameters of which it has some rows: the tensor, and the place in it of each token.
        pair: (parameter) -> A and B beside it, an expert's along dim 0 where it is experts'; None if it has none. The
            last few are kept.

    Raises:
        ExpertMeshError: a file is missing or damaged; it is no LoRA, or of another model; a tensor is missing, has no
            place, or another shape than its twin or its rank asks for.
    """

    def __init__(self, path: Path, names: Names, class_names: ClassNames | None = None):
        self.path, self.names, self.class_names = path, names, class_names or ClassNames()
        self.config = read_json(path / CONFIG)
        self._check_config()
        self.infos = read_header(path / WEIGHTS)
        self.layers = {p: m for p, m in names.model.named_modules() if isinstance(m, DMoE)}
        self.beside: dict[str, _Beside] = {}
        self.whole: dict[str, str] = {}
        self.token_rows: dict[str, tuple[str, dict[int, int]]] = {}
        self.ties = bool(self.config.get("ensure_weight_tying"))
        # of layers whose pairs are packed, by transformers' tensor
        self.packed: dict[str, dict[str, _Found]] = {}
        self._start_reading()
        self._find()

    def _start_reading(self) -> None:
        self.files = OpenFiles()
        # an export goes expert by expert, and asks for a layer's matrices in alternation
        self.pair = lru_cache(_PAIRS_KEPT)(self._pair)
        self._layer_pairs = lru_cache(maxsize=1)(self._unpacked)

    def reader(self) -> "Adapter":
        """The same, for another thread: what is read through it is read and kept by itself."""
        another = copy(self)
        another._start_reading()
        return another

    def theirs(self, parameter: str) -> str:
        """What transformers calls the module or tensor that holds a parameter."""
        path, _, own = parameter.rpartition(".mlp.")
        if parameter not in self.names.experts:
            return self.class_names.there(parameter.removesuffix(".weight"))
        part = next(part for part in self.layers[path].mlp.layout.parameters if part.name == own)
        return f"{self.class_names.there(path)}.{part.place.tensor}"

    def other_base(self, model: Path) -> str | None:
        """That the config names another model as the base than the one in a directory, in words; None where it may be
        the same, by the last part of the path or of the name on the hub."""
        named = self.config.get("base_model_name_or_path")
        if not isinstance(named, str) or not named or (Path(named).exists() and Path(named).samefile(model)):
            return None
        file = model / "config.json"
        own = read_json(file).get("_name_or_path") if file.exists() else None
        # a snapshot of the hub's cache is in models--OWNER--NAME/snapshots
        paths = {model.name, model.resolve().name, *(part.split("--")[-1] for part in model.parts if "--" in part)}
        if Path(named).name in paths | ({Path(own).name} if isinstance(own, str) else set()):
            return None
        return (
            f"warning: {self.path / CONFIG} names {named} as the adapter's base, and the model is {model}: of "
            "another base the result is wrong"
        )

    @property
    def _of_base(self) -> str:
        """Of which family this model is, and of which base the adapter."""
        family, named = self.names.model.config.model_type, self.config.get("base_model_name_or_path")
        return f", of the family {family}" + (f": the adapter is of {named}" if named else "")

    def _check_config(self) -> None:
        file = self.path / CONFIG
        if self.config.get("peft_type") != "LORA":
            raise ExpertMeshError(f"{file}: peft_type is {self.config.get('peft_type')!r:.80}; only LORA is read")
        for name in ("r", "lora_alpha"):
            value = self.config.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
                raise ExpertMeshError(f"{file}: {name} is {value!r:.80}; it must be a positive number")
        for name, kind in (
            ("target_parameters", list),
            ("modules_to_save", list),
            ("rank_pattern", dict),
            ("alpha_pattern", dict),
        ):
            if not isinstance(self.config.get(name) or kind(), kind):
                raise ExpertMeshError(f"{file}: {name} is {self.config[name]!r:.80}; it must be a {kind.__name__}")
        for name, value in unread_settings(self.config).items():
            raise ExpertMeshError(
                f"{file}: {name} is {value!r:.80}, which makes the adapter more than low-rank deltas: not "
                "supported; merge it with PEFT"
            )

    def _find(self) -> None:
        pairs = self._pairs()
        of_experts = {self.class_names.here(adapted_module(base)): adapted_module(base) for base in pairs}
        for path, layer in self.layers.items():
            theirs, targets, layout = of_experts.get(path, path), self.targets, layer.mlp.layout
            packed = {
                tensor: self._settled(pairs.pop(where), f"{theirs}.{tensor}", layer.shape.num_experts)
                for tensor, where in packed_paths(theirs, layout, targets).items()
                if where in pairs
            }
            self.packed[path], ranks = packed, {tensor: found.rank for tensor, found in packed.items()}
            for part in layout.parameters:
                if part.row and (found := packed.get(part.place.tensor)) is not None:
                    possible = possible_ranks(ranks, layout, part.name)
                    self.beside[f"{path}.mlp.{part.name}"] = _Beside(possible, found.scale)
        for parameter, numbers in self._find_linear(pairs).items():
            all_found = tuple(found for _, found in sorted(numbers.items()))
            if parameter in self.names.experts and len(numbers) != self.names.shape.num_experts:
                missing = min(set(range(self.names.shape.num_experts)) - set(numbers))
                raise ExpertMeshError(f"{self.path / WEIGHTS}: expert {missing} of {parameter} has no adapter")
            if len({(found.rank, found.scale) for found in all_found}) > 1:
                raise ExpertMeshError(
                    f"{self.path / CONFIG}: gives the experts of {parameter} different ranks or scales: not supported"
                )
            self.beside[parameter] = _Beside({all_found[0].rank}, all_found[0].scale, all_found)
        self._check_targets()
        self._check_whole()

    @property
    def targets(self) -> list[str]:
        """Ends of names of the parameters that are adapted."""
        return self.config.get("target_parameters") or []

    @property
    def scale(self) -> float:
        """What B · A is multiplied by where no pattern says otherwise."""
        rank = self.config["r"]
        return float(self.config["lora_alpha"]) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def line(self, lora: Lora) -> str | None:
        """What a run whose adapters begin as this one makes of it, in words; None where nothing differs."""
        smaller = sum(max(found.ranks) < lora.rank for found in self.beside.values())
        scaled = sum(not math.isclose(found.scale, lora.low_rank.scale, rel_tol=1e-6) for found in self.beside.values())
        padded = f"{smaller} of smaller ranks are padded to {lora.rank} with zeros, which stay zeros" if smaller else ""
        folded = f"{scaled} of other scales have these multiplied into B" if scaled else ""
        said = "; ".join(filter(None, (padded, folded)))
        return f"--init-adapter: of {len(self.beside)} pairs, {said}" if said else None

    def _check_targets(self) -> None:
        """An adapter of a model with fewer layers would leave the others of this one as they are, without a word.

        Raises:
            ExpertMeshError: something that the config names as a target has no adapter.
        """
        modules, config = self.config.get("target_modules"), self.config
        narrowed = ("exclude_modules", "layers_to_transform", "layers_pattern")
        if any(config.get(key) for key in narrowed):
            return  # PEFT's rules, of which targets are left
        there, linear = self.class_names.there, list[tuple[str, str]]()
        if isinstance(modules, list):
            plain = [target for target in modules if target not in REMAPPED]
            linear = [
                (there(path), f"{path}.weight")
                for path, module in self.names.model.named_modules()
                if isinstance(module, nn.Linear) and is_target(there(path), plain)
            ]
        experts = [
            (f"{there(path)}.{part.place.tensor}", f"{path}.mlp.{part.name}")
            for path, layer in self.layers.items()
            for part in layer.mlp.layout.parameters
            if part.row and is_target(f"{there(path)}.{part.place.tensor}", self.targets)
        ]
        for name, parameter in (*linear, *experts):
            if parameter not in self.beside:
                raise ExpertMeshError(
                    f"{self.path / WEIGHTS}: has no tensor for {name}, a target in {CONFIG}: the adapter is "
                    "for another model"
                )

    def _find_linear(self, pairs: Mapping[str, tuple[str, str]]) -> dict[str, dict[int, _Found]]:
        """The pairs of linear layers, and of single experts' matrices, by parameter and the expert's number."""
        of_parameters: dict[str, dict[int, _Found]] = {}
        bases, shapes = {}, {}
        for base, (a, b) in pairs.items():
            # of the matrix that they are beside, which is what transformers' mapping of names knows
            name = f"{self.class_names.here(base)}.weight"
            bases[name], shapes[name] = base, (self.infos[b].shape[0], self.infos[a].shape[1])
        known = self.names.match(shapes).tensors
        for name, base in bases.items():
            if len(known.get(name, ())) != 1:
                raise ExpertMeshError(
                    f"{self.path / WEIGHTS}: {PREFIX}{base} has no place in this model{self._of_base}"
                )
            (region,) = known[name]
            parameter = name if name in self.names.aliases else region.parameter
            number = self.names.experts.get(parameter)
            if number is None:
                found = self._settled(pairs[base], target_name(self.config, base), 1)
            else:
                found = self._settled_expert(pairs[base], base, parameter)
            own = of_parameters.setdefault(parameter, {})
            own[0 if number is None else region.rows.start // number] = found
        return of_parameters

    def _settled_expert(self, pair: tuple[str, str], base: str, parameter: str) -> _Found:
        """The pair of one expert's matrix, with rank and scale. Patterns may name it, or transformers' tensor of all
        experts': where that is made of gate and up, with the sum of their ranks."""
        path, _, own = parameter.rpartition(".mlp.")
        layout = self.layers[path].mlp.layout
        tensor = next(part.place.tensor for part in layout.parameters if part.name == own)
        fused = f"{self.class_names.there(path)}.{tensor}"
        with self._readable(base):
            if names_a_pattern(self.config, base) or not names_a_pattern(self.config, fused):
                return self._settled(pair, base, 1)
        joined = sum(part.place.tensor == tensor and bool(part.row) for part in layout.parameters)
        return self._settled(pair, fused, 1, joined)

    def _settled(self, pair: tuple[str, str], name: str, num_experts: int, joined: int = 1) -> _Found:
        """
        Args:
            name: by which patterns know it.
            num_experts: in the pair. joined: of how many such pairs the one is made whose rank the config has.
        """
        with self._readable(name):
            rank, scale = rank_and_scaling(self.config, name)
        if not 0 < scale < 1e9:
            raise ExpertMeshError(f"{self.path / CONFIG}: makes the scale of {name} {scale:g}")
        (a, b), (of_a, of_b) = pair, (self.infos[name].shape for name in pair)
        if of_a[0] * joined != rank * num_experts or of_b[1] * joined != rank * num_experts:
            times = f" x {num_experts} experts" if num_experts > 1 else ""
            wanted = f"{rank}{times}" if joined == 1 else f"{rank} / {joined}"
            raise ExpertMeshError(
                f"{self.path / WEIGHTS}: {a} has shape {list(of_a)} and {b} {list(of_b)}; {CONFIG} says rank {wanted}"
            )
        return _Found(a, b, rank // joined, scale)

    @contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        try:
            yield
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ExpertMeshError(f"{self.path / CONFIG}: the scale of {name} cannot be read: {error}") from error

    def _pairs(self) -> dict[str, tuple[str, str]]:
        """Names of A and B by what they are beside."""
        pairs = {}
        for name, info in self.infos.items():
            base = name.removeprefix(PREFIX).removesuffix(f".{A}.weight")
            if name.endswith(f".{A}.weight"):
                a, b = name, lora_names(base)[1]
                if b not in self.infos:
                    raise ExpertMeshError(f"{self.path / WEIGHTS}: tensor {b} is missing")
                if len(info.shape) != 2 or len(self.infos[b].shape) != 2 or not info.shape[0]:
                    raise ExpertMeshError(f"{self.path / WEIGHTS}: tensor {a} or {b} is not a matrix")
                pairs[base] = (a, b)
        others = self._find_whole(set(self.infos) - {name for pair in pairs.values() for name in pair})
        if others:
            bias = self.config.get("bias") or "none"
            raise ExpertMeshError(
                f"{self.path / WEIGHTS}: tensor {min(others)} has no place in this model: it is not {A} "
                f"or {B} of a linear layer or of experts"
                + (f"; {CONFIG} has bias {bias!r:.80}" if bias != "none" else "")
            )
        return pairs

    def _find_whole(self, tensors: set[str]) -> set[str]:
        """Find the parameters that these tensors stand for; gives the tensors that stand for none. PEFT does not name
        embedding and head where they have more tokens than the base's."""
        saved, model, others = self.config.get("modules_to_save") or [], self.names.model, set[str]()
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        ends_of = {path for path, module in model.named_modules() if module in ends}
        for name in tensors:
            theirs = name.removeprefix(PREFIX)
            if theirs.endswith(DELTA):
                self._find_token_rows(name, theirs.removesuffix(DELTA))
                continue
            here, module = self.class_names.here(theirs), theirs.rpartition(".")[0]
            own = self.names.aliases.get(here, here)
            is_meant = here.rpartition(".")[0] in ends_of or any(module.endswith(str(each)) for each in saved)
            if (
                not is_meant
                or own not in self.names.parameters
                or own in self.names.experts.keys() | self.names.transposed
            ):
                others.add(name)
                continue
            if (shape := self.infos[name].shape) != self.names.parameters[own]:
                raise ExpertMeshError(
                    f"{self.path / WEIGHTS}: tensor {name} has shape {list(shape)}, the model's "
                    f"{list(self.names.parameters[own])}"
                )
            self.whole[here] = name
        if self.ties:
            for alias, own in self.names.aliases.items():
                found = [self.whole[name] for name in (own, alias) if name in self.whole]
                self.whole |= dict.fromkeys((own, alias), found[0]) if found else {}
        return others

    def _find_token_rows(self, tensor: str, module: str) -> None:
        """
        Raises:
            ExpertMeshError: the config does not say of which tokens of the model these rows are.
        """
        said, own = self.config.get("trainable_token_indices"), f"{self.class_names.here(module)}.weight"
        tokens: Any = (
            next((said[key] for key in said if module.endswith(key)), None) if isinstance(said, dict) else said
        )
        shape, wanted = self.infos[tensor].shape, self.names.parameters.get(own)
        is_list = isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
        if not is_list or wanted is None or shape != (len(set(tokens)), *wanted[1:]) or max(tokens) >= wanted[0]:
            raise ExpertMeshError(
                f"{self.path / WEIGHTS}: tensor {tensor} has shape {list(shape)}, which is not a row for each of this "
                f"model's tokens that trainable_token_indices in {CONFIG} has"
            )
        places = {token: place for place, token in enumerate(tokens)}
        self.token_rows |= dict.fromkeys((own, *self._tied_to(own)), (tensor, places))

    def _tied_to(self, parameter: str) -> list[str]:
        return [alias for alias, own in self.names.aliases.items() if own == parameter]

    def rows_of_tokens(self, parameter: str) -> Tensor:
        """
        Raises:
            ExpertMeshError: a value is not finite.
        """
        return self._values(self.token_rows[parameter][0])

    def _values(self, tensor: str, rows: range | None = None) -> Tensor:
        stored = self.infos[tensor]
        value = as_tensor(self.files.array(stored, rows), stored.dtype)
        if not value.isfinite().all():
            raise ExpertMeshError(f"{self.path / WEIGHTS}: tensor {tensor} has values that are not finite")
        return value

    def _check_whole(self) -> None:
        """
        Raises:
            ExpertMeshError: a module of modules_to_save, or trainable_token_indices, has no tensor.
        """
        said = self.config.get("trainable_token_indices")
        if said and len({tensor for tensor, _ in self.token_rows.values()}) != (
            len(said) if isinstance(said, dict) else 1
        ):
            raise ExpertMeshError(
                f"{self.path / WEIGHTS}: lacks a tensor that trainable_token_indices in {CONFIG} asks for"
            )
        saved = [str(each) for each in self.config.get("modules_to_save") or []]
        for path, module in self.names.model.named_modules():
            if any(self.class_names.there(path).endswith(each) for each in saved):
                for name, _ in module.named_parameters(path):
                    if name not in self.whole:
                        raise ExpertMeshError(
                            f"{self.path / WEIGHTS}: has no tensor for {name}, which modules_to_save in {CONFIG} has"
                        )

    def whole_rows(self, parameter: str, rows: range) -> Tensor:
        """Rows of what stands in the place of a parameter; a scalar is one row.

        Raises:
            ExpertMeshError: a value is not finite.
        """
        name = self.whole[parameter]
        return self._values(name, rows if self.infos[name].shape else None)

    def _pair(self, parameter: str) -> LoraPair | None:
        if (beside := self.beside.get(parameter)) is None:
            return None
        if not beside.found:
            path, _, own = parameter.rpartition(".mlp.")
            return self._layer_pairs(path)[own]
        a, b = (
            [self._values(name).float() for name in names]
            for names in zip(*((each.a, each.b) for each in beside.found), strict=True)
        )
        return LoraPair(torch.stack(a), torch.stack(b)) if parameter in self.names.experts else LoraPair(a[0], b[0])

    def rank(self, parameter: str) -> int:
        """The rank of the pair beside a parameter, for which one that is packed may have to be read."""
        ranks = self.beside[parameter].ranks
        if len(ranks) == 1:
            return next(iter(ranks))
        pair = self.pair(parameter)
        assert pair is not None
        return pair.a.shape[-2]

    def rows(self, parameter: str, which: str, rows: range, rank: int) -> Tensor:
        """Rows of A or B beside a parameter, in fp32, and of the file no more than they take: experts' lie one behind
        another, padded with zeros to a rank. Of packed ones a layer is read, as each of its tensors is all experts'.

        Args:
            which: `A` or `B`.
            rank: that is at least the pair's.

        Raises:
            ExpertMeshError: a value is not finite.
        """
        lacking = rank - self.rank(parameter)
        if not (found := self.beside[parameter].found):
            pair = self.pair(parameter)
            assert pair is not None
            all_rows = pad(pair.a, (0, 0, 0, lacking)) if which == A else pad(pair.b, (0, lacking))
            return all_rows.flatten(0, 1)[rows.start : rows.stop]
        stored = [self.infos[each.a if which == A else each.b] for each in found]
        height, width = stored[0].shape
        height, width = (height + lacking, width) if which == A else (height, width + lacking)
        values = torch.zeros(len(rows), width)
        for number in range(rows.start // height, ceil(rows.stop / height)):
            first, own = number * height, stored[number]
            held = overlap(rows, range(first, first + own.shape[0]))
            part = self._values(own.name, range(held.start - first, held.stop - first))
            values[held.start - rows.start : held.stop - rows.start, : own.shape[1]] = part
        return values

    def _unpacked(self, path: str) -> dict[str, LoraPair]:
        """The pairs of a layer whose pairs are packed, by the layout's names."""
        packed = {
            tensor: LoraPair(self._values(found.a).float(), self._values(found.b).float())
            for tensor, found in self.packed[path].items()
        }
        try:
            return unpack_experts(packed, self.layers[path].mlp.layout, self.config.get("peft_version"))
        except ValueError as error:
            raise ExpertMeshError(f"{self.path}: {path}: {error}") from error


def rows_of_embedding(path: Path, names: Names, class_names: ClassNames) -> int | None:
    """Rows of the embedding that an adapter has; None where it has none."""
    read_json(path / CONFIG)  # without which it is none
    embedding = names.model.get_input_embeddings()
    own = next(path for path, module in names.model.named_modules() if module is embedding)
    tensor = read_header(path / WEIGHTS).get(f"{PREFIX}{class_names.there(own)}.weight")
    if tensor is not None:
        return tensor.shape[0]
    said = read_json(path / CONFIG).get("trainable_token_indices") or []
    tokens = [token for each in (said.values() if isinstance(said, dict) else [said]) for token in each]
    return max(tokens, default=-1) + 1 or None


def adapted_modules(path: Path) -> set[str]:
    """The modules of which an adapter's file has something, by the names of the class that its config names."""
    names = (name.removeprefix(PREFIX) for name in read_header(path / WEIGHTS))
    ends = (f".{A}.weight", f".{B}.weight", DELTA)
    found = (next((name.removesuffix(end) for end in ends if name.endswith(end)), name) for name in names)
    return {each for name in found for each in (adapted_module(name), name.rpartition(".")[0])}


def adapted_module(base: str) -> str:
    """The module whose parameters are adapted, each by a wrapper around the one before."""
    while base.endswith(".base_layer"):
        base = base.removesuffix(".base_layer")
    return base

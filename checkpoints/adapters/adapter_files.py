"""Adapters as PEFT's directories hold them: written from a sharded model, and read for resuming or merging.

    adapter_config.json, adapter_model.safetensors (see `checkpoints.adapters.peft_format`)
    tokenizer and chat template, LICENSE, NOTICE   as beside a model, so that whoever has the adapter has them too
    README.md                                      its model card
    generation_config.json                         where other tokens end answers than the base's generation: for merge
    rope_scaling.json                              where the base was trained with RoPE scaling, as PEFT has no
                                                   place for it: what `read_rope_scaling` reads

Shape suffixes: E experts, r rank.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import pad

from ...moe.experts.layer import DMoE
from ...moe.experts.lora import TOKENS, A, B, Lora
from ...moe.hf_model.rope import RopeScaling, read_rope_scaling
from ...moe.util.atomic_write import whole
from ...moe.util.errors import ExpertMeshError
from ...sharding.runtime.process import raise_together
from ...sharding.state import adapters_of, new_tokens_of, sharded_parameters, token_rows_of, whole_beside_adapters
from ...sharding.topology import Topology
from ..files.directories import write_errors
from ..files.dtype_names import ALL_NAMES, DTYPE_CODES
from ..files.dtypes import Array, as_array, as_tensor
from ..files.file_layout import OutputFile, OutputTensor, Strip, at_once, plain_output
from ..files.tensors import DiskTensor, Region, StoredTensor
from ..hf.class_names import ClassNames, class_names
from ..hf.export import replacing, write_sharded
from ..hf.names import Names
from ..hf.side_files import write_beside_adapter, write_generation_config
from ..hf.source import Checkpoint, read_header, read_json
from ..model_card import write_card
from ..verify import Comparison, whole_difference
from .peft_format import (
    PREFIX,
    REMAPPED,
    SCALE_SETTINGS,
    LoraPair,
    adapter_config,
    is_target,
    lora_names,
    names_a_pattern,
    pack_experts,
    packed_paths,
    possible_ranks,
    rank_and_scaling,
    reads_by_expert,
    target_name,
    unpack_experts,
    unread_settings,
)

CONFIG, WEIGHTS, ROPE = "adapter_config.json", "adapter_model.safetensors", "rope_scaling.json"
Form = Literal["auto", "per-expert", "packed"]
DELTA = ".token_adapter.trainable_tokens_delta"
"""What the name of rows of new tokens ends with in PEFT's files."""
_PAIRS_KEPT = 4
"""Gate, up and down of a layer's experts, and a linear layer's."""


def export_adapter(
    model: nn.Module,
    checkpoint: Checkpoint,
    topology: Topology,
    out: Path,
    lora: Lora,
    base_model: str,
    form: Form = "auto",
    tokenizer: Any = None,
    card: str = "",
) -> list[str]:
    """Write the adapters of a sharded model as a directory that PEFT loads. All ranks call it together.

    Args:
        checkpoint: of the model beside them.
        out: is replaced if it exists, once the new one is complete.
        base_model: what PEFT is to load it onto: a name on the hub or a path.
        form: of experts' adapters; "auto": per expert where `checkpoint` has a tensor for each expert's matrix, and
            PEFT reads such adapters.
        tokenizer: saved beside them with its chat template; None: the files of the base's own are copied.
        card: as of `export_model`.

    Returns:
        What servers must be told, in lines.

    Raises:
        ExpertMeshError: on all ranks, when rank 0 cannot write, or the model has no such form.
    """
    with raise_together():
        plan = _Plan(model, checkpoint, form)
    linear = {path: isinstance(model.get_submodule(path), nn.Linear) for path in plan.modules}
    there = plan.class_names.there
    config = adapter_config(
        base_model=base_model,
        rank=lora.rank,
        alpha=lora.alpha,
        use_rslora=lora.use_rslora,
        modules=[there(path) for path in plan.modules if linear[path]],
        weights=[there(path) for path in plan.modules if not linear[path]],
        experts={there(path): layer.mlp.layout for path, layer in plan.experts.items()},
        others=_not_adapted(plan.class_names.model or model, plan),
        modules_to_save=dict.fromkeys(there(name).rpartition(".")[0] for name in plan.whole),
        token_indices={there(path): new_tokens_of(model, path) for path in plan.token_rows},
        is_tied=not checkpoint.names.aliases.keys().isdisjoint(plan.whole),
        model_class=None if plan.class_names.model is None else type(plan.class_names.model),
    )
    shards = sharded_parameters(model, topology, adapters_of(model) | whole_beside_adapters(model))
    told: list[str] = []
    with replacing(out) as directory, raise_together(), write_errors(out):
        write_sharded([OutputFile(WEIGHTS, list(plan.outputs(config)))], shards, directory)
        if directory is not None:
            with whole(directory / CONFIG) as file:
                file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            if (scaling := checkpoint.source.rope_scaling) is not None:
                (directory / ROPE).write_text(json.dumps(scaling.as_json(), indent=2) + "\n", encoding="utf-8")
            write_generation_config(checkpoint.source, directory)
            write_beside_adapter(checkpoint.source, tokenizer, directory)
            told = write_card(card, directory, out)
    if not plan.is_packed or not (ranks := config["rank_pattern"].values()):
        return told
    return [
        *told,
        f"adapter: packed pairs of gate and up have rank {max(ranks)}, the others {lora.rank}; give servers that much "
        f"as their largest LoRA rank (vLLM: --max-lora-rank {max(ranks)})",
    ]


def read_rope(path: Path) -> RopeScaling | None:
    """The RoPE scaling of the model that an adapter in a directory is for.

    Raises:
        ExpertMeshError: the file that says so is damaged.
    """
    file = path / ROPE
    return read_rope_scaling(json.dumps(read_json(file)), str(file)) if file.exists() else None


def _not_adapted(model: nn.Module, plan: "_Plan") -> set[str]:
    adapted = set(map(plan.class_names.there, (*plan.modules, *plan.experts)))
    return {path for path, _ in model.named_modules() if path not in adapted} | {
        name for name, _ in model.named_parameters() if not name.endswith((A, B))
    }


class _Plan:
    """What is written.

    Attributes:
        modules: paths of linear layers and routers with adapters. experts: experts modules that have them, by path.
        token_rows: paths of modules with rows of new tokens.
        whole: by the names of what is trained whole, also those that are tied to it: our parameter.
        class_names: of the class that PEFT is to load.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, form: Form):
        self.state = adapters_of(model)
        self.modules = [name.removesuffix(f".{A}") for name in self.state if name.endswith(f".{A}")]
        layers = {path: module for path, module in model.named_modules() if isinstance(module, DMoE)}
        self.experts = {path: layer for path, layer in layers.items() if layer.mlp.layout.adapters}
        self.class_names = class_names(model, checkpoint.source.config)
        self.by_expert = _tensors_of_experts(checkpoint)
        whole, aliases = whole_beside_adapters(model), checkpoint.names.aliases
        self.state |= whole
        self.token_rows = [name.removesuffix(f".{TOKENS}") for name in token_rows_of(model)]
        self.whole = {name: name for name in whole} | {alias: own for alias, own in aliases.items() if own in whole}
        matrices = [f"{path}.mlp.{name}" for path, layer in self.experts.items() for name in _matrices(layer)]
        missing = next((name for name in matrices if name not in self.by_expert), None)
        if form == "per-expert" and missing is not None:
            raise ExpertMeshError(
                f"--adapter-format per-expert: {checkpoint.source.path} stores all experts' {missing} in "
                "one tensor, without names per expert; use packed"
            )
        loaded, there = self.class_names.model or model, self.class_names.there
        first = [(there(path), layer.mlp.layout) for path, layer in self.experts.items()][:1]
        is_read = missing is None and all(reads_by_expert(loaded, path, layout) for path, layout in first)
        self.is_packed = form == "packed" or (form == "auto" and not is_read)

    def outputs(self, config: Mapping[str, Any]) -> Iterator[OutputTensor]:
        for path in self.modules:
            names = lora_names(self.class_names.there(path))
            for name, own in zip(names, (f"{path}.{A}", f"{path}.{B}"), strict=True):
                yield self._rows(name, own, range(self.state[own].num_rows))
        for path in self.token_rows:
            own = f"{path}.{TOKENS}"
            yield self._rows(f"{PREFIX}{self.class_names.there(path)}{DELTA}", own, range(self.state[own].num_rows))
        for name, own in self.whole.items():
            yield self._rows(PREFIX + self.class_names.there(name), own, range(self.state[own].num_rows))
        for path, layer in self.experts.items():
            if self.is_packed:
                yield from self._packed(path, layer, config)
                continue
            for matrix in _matrices(layer):
                for number, tensor in enumerate(self.by_expert[f"{path}.mlp.{matrix}"]):
                    names = lora_names(self.class_names.there(tensor.removesuffix(".weight")))
                    for name, which in zip(names, (A, B), strict=True):
                        own = f"{path}.mlp.{matrix}_{which}"
                        count = self.state[own].num_rows // layer.shape.num_experts
                        yield self._rows(name, own, range(number * count, (number + 1) * count))

    def _rows(self, name: str, own: str, rows: range) -> OutputTensor:
        """Rows of one of our parameters as a tensor."""
        part = self.state[own]
        dtype = DTYPE_CODES[str(part.tensor.dtype)]
        return plain_output(DiskTensor(name, (len(rows), *part.shape[1:]), dtype, (Region(own, rows),)))

    def _packed(self, path: str, layer: DMoE, config: Mapping[str, Any]) -> Iterator[OutputTensor]:
        """A layer's packed pairs. With the first tensor all are made, as each takes several parameters."""
        layout, num_experts = layer.mlp.layout, layer.shape.num_experts
        own = [f"{path}.mlp.{name}_{which}" for name in _matrices(layer) for which in (A, B)]
        where = packed_paths(self.class_names.there(path), layout, config["target_parameters"])
        made: list[Array] = []

        def packed(values: Sequence[Tensor]) -> list[Tensor]:
            by_expert = [value.unflatten(0, (num_experts, -1)) for value in values]
            pairs = map(LoraPair, by_expert[::2], by_expert[1::2])
            by_tensor = pack_experts(dict(zip(_matrices(layer), pairs, strict=True)), layout)
            return [value.contiguous() for tensor in where for value in by_tensor[tensor]]

        def content(strip: Strip, parts: Sequence[Array]) -> Iterator[tuple[Array, int]]:
            if parts:
                made.extend(map(as_array, packed([as_tensor(part, dtype) for part in parts])))
            yield made.pop(0), 0

        dtype = DTYPE_CODES[str(self.state[own[0]].tensor.dtype)]
        shapes = packed([torch.empty(self.state[name].shape, device="meta") for name in own])
        names = [name for tensor in where for name in lora_names(where[tensor])]
        parts = tuple((region, region.rows) for region in (Region(n, range(self.state[n].num_rows)) for n in own))
        for name, shape in zip(names, shapes, strict=True):
            part = StoredTensor(name, tuple(shape.shape), dtype)
            yield OutputTensor(part, DiskTensor(name, part.shape, dtype), at_once(*parts), content)
            parts = ()


def _matrices(layer: DMoE) -> list[str]:
    return [part.name for part in layer.mlp.layout.parameters if part.row]


def _tensors_of_experts(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """By parameter, the tensors that each hold all that one expert has of it, in the order of experts."""
    found: dict[str, list[tuple[int, str]]] = {}
    for tensor in checkpoint.exported:
        if len(tensor.regions) == 1 and not tensor.regions[0].index:
            (region,) = tensor.regions
            found.setdefault(region.parameter, []).append((region.rows.start, tensor.name))
    return {name: [own for _, own in sorted(tensors)] for name, tensors in found.items() if len(tensors) > 1}


def describe_adapter(path: Path, list_tensors: bool) -> Iterator[str]:
    """Lines: form, base, rank, targets, tensors, file."""
    config, stored = read_json(path / CONFIG), read_header(path / WEIGHTS)
    sizes = {name: prod(part.shape) for name, part in stored.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    dtypes = sorted({ALL_NAMES[part.dtype] for part in stored.values()})
    targets = [*(config.get("target_modules") or []), *(config.get("target_parameters") or [])]
    yield f"path        {path}"
    yield f"form        PEFT adapter, {config.get('peft_type')}, of peft {config.get('peft_version')}"
    yield f"base        {config.get('base_model_name_or_path')}"
    yield f"rank        {config.get('r')}, alpha {config.get('lora_alpha')}" + ", rsLoRA" * bool(
        config.get("use_rslora")
    )
    yield f"targets     {', '.join(map(str, targets))}"
    yield f"elements    {sum(sizes.values()):,}, of them {experts:,} in tensors of experts"
    yield f"tensors     {len(stored):,}: {', '.join(dtypes)}"
    yield f"files       1, {(path / WEIGHTS).stat().st_size / 1e9:,.2f} GB"
    if (scaling := read_rope(path)) is not None:
        yield f"rope        for RoPE scaling by {json.dumps(scaling.as_json())}"
    if list_tensors:
        for name, part in stored.items():
            yield f"  {name}  {list(part.shape)}"


def compare_adapters(a: Path, b: Path, rtol: float | None, ignore_config: bool = False) -> Comparison:
    """Compare two adapters: what their configs say of scales and of anything beyond low-rank deltas, and the union of
    their tensors, by name: shape, then dtype and bits; or, with `rtol`, values within rtol of their row's largest. Not
    the path of the base, which may have moved."""
    differences = []
    if not ignore_config:
        configs = [read_json(path / CONFIG) for path in (a, b)]
        one, other = ({key: c[key] for key in SCALE_SETTINGS if c.get(key)} | unread_settings(c) for c in configs)
        differences += [
            f"{CONFIG}: {key} is {one.get(key)!r:.80} in {a}, {other.get(key)!r:.80} in {b}"
            for key in sorted(one.keys() | other.keys())
            if one.get(key) != other.get(key)
        ]
        if read_rope(a) != read_rope(b):
            differences.append(f"{ROPE}: RoPE scaling differs")
    of_a, of_b = (
        {name: DiskTensor(name, part.shape, part.dtype, parts=(part,)) for name, part in parts.items()}
        for parts in map(read_header, (a / WEIGHTS, b / WEIGHTS))
    )
    for name in sorted(of_a.keys() | of_b.keys()):
        if name not in of_a or name not in of_b:
            differences.append(f"{name}: only in {a if name in of_a else b}")
        elif (problem := whole_difference(of_a[name], of_b[name], rtol, by_row=True)) is not None:
            differences.append(f"{name}: {problem}")
    return Comparison(differences, len(of_a.keys() | of_b.keys()))


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
        read: gives A and B, an expert's along dim 0 where the parameter is experts'.
    """

    ranks: set[int]
    scale: float
    read: Callable[[], LoraPair]


class Adapter:
    """An adapter in a directory, that PEFT or `export_adapter` wrote, for a model of these names.

    Args:
        names: of the model that it is for.
        class_names: of the class that its config names; its names are read as well as the model's own.

    Attributes:
        beside: by the model's parameters that it changes; of tied ones, by the name that the adapter is beside.
        whole: by parameters and buffers that it has in their place: the tensor. ties: whether these stay tied.
        token_rows: by parameters of which it has some rows: the tensor, and the place in it of each token.
        pair: (parameter) -> A and B beside it, None if it has none; the last few are kept.

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
        # an export goes expert by expert, and asks for a layer's matrices in alternation
        beside = self.beside
        self.pair = lru_cache(_PAIRS_KEPT)(lambda name: beside[name].read() if name in beside else None)
        self._layer_pairs = lru_cache(maxsize=1)(self._unpacked)
        self._find()

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
        of_experts = {self.class_names.here(_wrapped(base)): _wrapped(base) for base in pairs}
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
                    read = partial(lambda path, name: self._layer_pairs(path)[name], path, part.name)
                    possible = possible_ranks(ranks, layout, part.name)
                    self.beside[f"{path}.mlp.{part.name}"] = _Beside(possible, found.scale, read)
        for parameter, numbers in self._find_linear(pairs).items():
            all_found = [found for _, found in sorted(numbers.items())]
            is_experts = parameter in self.names.experts
            if is_experts and len(numbers) != self.names.shape.num_experts:
                missing = min(set(range(self.names.shape.num_experts)) - set(numbers))
                raise ExpertMeshError(f"{self.path / WEIGHTS}: expert {missing} of {parameter} has no adapter")
            if len({(found.rank, found.scale) for found in all_found}) > 1:
                raise ExpertMeshError(
                    f"{self.path / CONFIG}: gives the experts of {parameter} different ranks or scales: not supported"
                )
            read = partial(self._read_all, all_found) if is_experts else partial(self._read, all_found[0])
            self.beside[parameter] = _Beside({all_found[0].rank}, all_found[0].scale, read)
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
        found: Any = next((said[key] for key in said if module.endswith(key)), None) if isinstance(said, dict) else said
        shape, wanted = self.infos[tensor].shape, self.names.parameters.get(own)
        is_list = isinstance(found, list) and all(type(token) is int and token >= 0 for token in found)
        if not is_list or wanted is None or shape != (len(set(found)), *wanted[1:]) or max(found) >= wanted[0]:
            raise ExpertMeshError(
                f"{self.path / WEIGHTS}: tensor {tensor} has shape {list(shape)}, which is not a row for each of this "
                f"model's tokens that trainable_token_indices in {CONFIG} has"
            )
        places = {token: place for place, token in enumerate(found)}
        self.token_rows |= dict.fromkeys((own, *self._tied_to(own)), (tensor, places))

    def _tied_to(self, parameter: str) -> list[str]:
        return [alias for alias, own in self.names.aliases.items() if own == parameter]

    def rows_of_tokens(self, parameter: str) -> Tensor:
        """
        Raises:
            ExpertMeshError: a value is not finite.
        """
        return self._values(self.token_rows[parameter][0], None)

    def _values(self, tensor: str, rows: range | None) -> Tensor:
        with safe_open(self.path / WEIGHTS, framework="pt") as file:
            value: Tensor = file.get_tensor(tensor) if rows is None else file.get_slice(tensor)[rows.start : rows.stop]
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

    def _unpacked(self, path: str) -> dict[str, LoraPair]:
        """The pairs of a layer whose pairs are packed, by the layout's names."""
        packed = {tensor: self._read(found) for tensor, found in self.packed[path].items()}
        try:
            return unpack_experts(packed, self.layers[path].mlp.layout, self.config.get("peft_version"))
        except ValueError as error:
            raise ExpertMeshError(f"{self.path}: {path}: {error}") from error

    def _read_all(self, found: Sequence[_Found]) -> LoraPair:
        """The pairs of all experts, in their order."""
        return LoraPair(*(torch.stack(values) for values in zip(*map(self._read, found), strict=True)))

    def _read(self, found: _Found) -> LoraPair:
        values = []
        with safe_open(self.path / WEIGHTS, framework="pt") as file:
            for name in (found.a, found.b):
                value = file.get_tensor(name).float()
                if not value.isfinite().all():
                    raise ExpertMeshError(f"{self.path / WEIGHTS}: tensor {name} has values that are not finite")
                values.append(value)
        return LoraPair(*values)


def rows_of_embedding(path: Path, names: Names, class_names: ClassNames) -> int | None:
    """Rows of the embedding that an adapter has; None where it has none."""
    read_json(path / CONFIG)  # without which it is none
    embedding = names.model.get_input_embeddings()
    own = next(path for path, module in names.model.named_modules() if module is embedding)
    found = read_header(path / WEIGHTS).get(f"{PREFIX}{class_names.there(own)}.weight")
    if found is not None:
        return found.shape[0]
    said = read_json(path / CONFIG).get("trainable_token_indices") or []
    tokens = [token for each in (said.values() if isinstance(said, dict) else [said]) for token in each]
    return max(tokens, default=-1) + 1 or None


def _wrapped(base: str) -> str:
    """The module whose parameters are adapted, each by a wrapper around the one before."""
    while base.endswith(".base_layer"):
        base = base.removesuffix(".base_layer")
    return base


def read_adapter(
    model: nn.Module,
    path: Path,
    lora: Lora,
    rope_scaling: RopeScaling | None = None,
    model_config: Any = None,
) -> Adapter:
    """Open an adapter that a model's own are to begin as, which needs none of its weights; by its config and the header
    of its file. `load_adapter` reads the values.

    Args:
        model: with its adapters, on any device; whole, not cut into stages.
        lora: of the model.
        rope_scaling: of the model.
        model_config: that the model was built from, if the adapter may go by the names of another class than its own.

    Raises:
        ExpertMeshError: its largest rank, its scale or its modules are not those of the model's adapters, or it was
            trained with another RoPE scaling.
    """
    if (scaling := read_rope(path)) != rope_scaling:
        there, here = (
            "no --rope-scaling" if found is None else f"--rope-scaling '{json.dumps(found.as_json())}'"
            for found in (scaling, rope_scaling)
        )
        raise ExpertMeshError(f"--init-adapter {path}: was trained with {there}, this run has {here}")
    adapter = Adapter(path, Names(model), None if model_config is None else class_names(model, model_config))
    wanted_rows = {name.replace(TOKENS, "weight"): part for name, part in token_rows_of(model).items()}
    wanted_pairs = {_beside(name) for name in adapters_of(model) if not name.endswith(TOKENS)}
    differing, of_experts = wanted_pairs ^ adapter.beside.keys(), adapter.names.experts.keys()
    if of_experts & adapter.beside.keys():
        differing -= wanted_pairs & of_experts  # those that have none there begin as zeros, and stay so
    if differing:
        name = min(differing)
        targets = adapter.config.get("target_modules") or []
        targets = [*([targets] if isinstance(targets, str) else targets), *adapter.targets]
        raise ExpertMeshError(
            f"--init-adapter {path}: {adapter.theirs(name)} "
            f"{'has no adapter there' if name in wanted_pairs else 'has one there'}; leave out --lora-targets, or name "
            f"what has: {CONFIG} has {', '.join(map(str, targets)):.200}"
        )
    wanted, aliases = set(whole_beside_adapters(model)), adapter.names.aliases
    if (found := {aliases.get(name, name) for name in adapter.whole}) != wanted:
        name = min(wanted ^ found)
        said = ", ".join(map(str, adapter.config.get("modules_to_save") or ["none"]))
        raise ExpertMeshError(
            f"--init-adapter {path}: {adapter.theirs(name)} is {'not ' if name in wanted else ''}trained whole there; "
            f"give the same --modules-to-save: {CONFIG} has {said}"
        )
    ids = {name: new_tokens_of(model, name.rpartition(".")[0]) for name in wanted_rows}
    found_ids = {name: list(places) for name, (_, places) in adapter.token_rows.items() if name not in aliases}
    if ids != found_ids:
        numbers = [len(next(iter(each.values()), ())) for each in (found_ids, ids)]
        raise ExpertMeshError(
            f"--init-adapter {path}: has rows of {numbers[0]} new tokens, this run trains {numbers[1]}, or others; "
            "give the same tokens, and --train-new-tokens if it has some"
        )
    if not adapter.ties and (untied := sorted(aliases.keys() & adapter.whole.keys() | wanted & set(aliases.values()))):
        raise ExpertMeshError(
            f"--init-adapter {path}: {adapter.theirs(untied[0])} is not tied there (ensure_weight_tying in {CONFIG} is "
            "not true), and a run keeps tied weights tied; merge the adapter, and begin with the result as --model"
        )
    least, most = (max(by(found.ranks) for found in adapter.beside.values()) for by in (min, max))
    if lora.rank not in (least, most) or not math.isclose(lora.low_rank.scale, adapter.scale, rel_tol=1e-6):
        raise ExpertMeshError(f"--init-adapter {path}: {_why_not(adapter, lora)}")
    if lora.rank > least and not any(_rank(adapter, base) == most for base in sorted(adapter.beside)):
        raise ExpertMeshError(f"--init-adapter {path}: {_why_not(adapter, lora)}")
    return adapter


@torch.no_grad()
def load_adapter(model: nn.Module, adapter: Adapter, lora: Lora, topology: Topology) -> None:
    """Fill a sharded model's adapters from what `read_adapter` has opened. All ranks call it together.

    A pair of a smaller rank is padded with zeros in both A and B, and a matrix of an expert that has none there gets
    zeros alone: these have no gradient, so that they stay zeros and the run trains what the adapter has. Where a pair
    has another scale than the run, its B is multiplied by what they differ by. With Adam its steps are then as large as
    they are at the run's scale.

    Args:
        lora: of the model.

    Raises:
        ExpertMeshError: on all ranks, when a file cannot be read, or has values that are not finite, or are of another
            rank than the model's adapters.
    """
    with raise_together():
        held = {n: part for n, part in adapters_of(model).items() if part.is_here and not n.endswith(TOKENS)}
        shards = sharded_parameters(model, topology, held)
        names = Names(model)
        for base in sorted({_beside(name) for name in shards}):
            pair = adapter.pair(base)
            here = {which: shards[_adapter_of(base, which, names)] for which in (A, B)}
            if pair is None:
                for shard in here.values():
                    shard.local.zero_()
                continue
            if (lacking := lora.rank - pair.a.shape[-2]) < 0:
                raise ExpertMeshError(f"--init-adapter {adapter.path}: {_why_not(adapter, lora)}")
            scale = adapter.beside[base].scale / lora.low_rank.scale
            b = pair.b if math.isclose(scale, 1, rel_tol=1e-6) else pair.b * scale
            padded = {A: pad(pair.a, (0, 0, 0, lacking)), B: pad(b, (0, lacking))}
            for which, shard in here.items():
                shard.local.copy_(padded[which].flatten(0, -2)[shard.rows.start : shard.rows.stop])


@torch.no_grad()
def load_whole(model: nn.Module, adapter: Adapter, topology: Topology) -> None:
    """Fill what a sharded model trains whole beside its adapters, and rows of new tokens, from what `read_adapter` has
    opened, in place of what the base has. All ranks call it together.

    Raises:
        ExpertMeshError: on all ranks, when the file cannot be read, or has values that are not finite.
    """
    with raise_together():
        here = {name: part for name, part in whole_beside_adapters(model).items() if part.is_here}
        for name, shard in sharded_parameters(model, topology, here).items():
            shard.fill(shard.rows, adapter.whole_rows(name, shard.rows).view(-1, *shard.row_shape))
        rows = {name: part for name, part in token_rows_of(model).items() if part.is_here}
        for name, shard in sharded_parameters(model, topology, rows).items():
            values = adapter.rows_of_tokens(name.replace(TOKENS, "weight"))
            shard.fill(shard.rows, values[shard.rows.start : shard.rows.stop])


def _rank(adapter: Adapter, base: str) -> int:
    pair = adapter.pair(base)
    assert pair is not None
    return pair.a.shape[-2]


def _why_not(adapter: Adapter, lora: Lora) -> str:
    """Why a run of another rank or scale cannot start from an adapter, and what to give."""
    rank, base = max((_rank(adapter, base), base) for base in sorted(adapter.beside))
    there = Lora(rank, _alpha_at(adapter.config, rank), use_rslora=bool(adapter.config.get("use_rslora")))
    wanted, given = (
        f"--lora-rank {each.rank} --lora-alpha {each.alpha:g}" + " --use-rslora" * each.use_rslora
        for each in (there, lora)
    )
    without = ", without --use-rslora" if lora.use_rslora and not there.use_rslora else ""
    largest = "" if rank == adapter.config["r"] else f" ({adapter.theirs(base)} has rank {rank}, the largest)"
    return f"was trained with {wanted}{largest}; this run has {given}; give {wanted}{without}"


def _alpha_at(config: Mapping[str, Any], rank: int) -> float:
    """The alpha with which a pair of this rank has the scale of a config's own rank and alpha."""
    times = rank / config["r"]
    return float(config["lora_alpha"]) * (math.sqrt(times) if config.get("use_rslora") else times)


def rank_and_alpha(path: Path) -> tuple[int, float]:
    """The --lora-rank and --lora-alpha with which a run begins as an adapter: its largest rank, its config's scale.

    Raises:
        ExpertMeshError, TypeError, ValueError, ArithmeticError: the adapter is damaged, which `Adapter` says better.
    """
    config, infos = read_json(path / CONFIG), read_header(path / WEIGHTS)
    targets = config.get("target_parameters") or []
    ranks, is_joined = set[int](), None
    for name in infos:
        if not name.endswith(f".{A}.weight"):
            continue
        module = _wrapped(name.removeprefix(PREFIX).removesuffix(f".{A}.weight"))
        found = {rank_and_scaling(config, target_name(config, module))[0]}
        inside = [f"{module}.{target.rpartition('.')[2]}" for target in targets]
        packed = {rank_and_scaling(config, each)[0] for each in inside if is_target(each, targets)}
        if packed and {infos[name].shape[0]} != found:
            found = packed
            if 2 * min(packed) == max(packed):
                if is_joined is None:
                    both = (lora_names(each)[1] for each in (module, f"{module}.base_layer"))
                    is_joined = _looks_joined(path, max(both, key=lambda b: infos[b].shape[1]))
                found = {min(packed)} if is_joined else packed
        ranks |= found
    rank = max(ranks, default=int(config["r"]))
    return rank, _alpha_at(config, rank)


def _looks_joined(path: Path, tensor: str) -> bool:
    """Whether a packed B has gate and up in blocks beside zeros, as `pack_experts` makes it: each of its rows has zeros
    in one half."""
    with safe_open(path / WEIGHTS, framework="pt") as file:
        halves = [half.any(1) for half in file.get_tensor(tensor).chunk(2, 1)]
    return not (halves[0] & halves[1]).any()


def _beside(adapter: str) -> str:
    """The parameter that an adapter's is beside."""
    if adapter.endswith((f".{A}", f".{B}")):
        return f"{adapter.rpartition('.')[0]}.weight"
    return adapter.removesuffix(f"_{A}").removesuffix(f"_{B}")


def _adapter_of(parameter: str, which: str, names: Names) -> str:
    return f"{parameter}_{which}" if parameter in names.experts else f"{parameter.removesuffix('weight')}{which}"

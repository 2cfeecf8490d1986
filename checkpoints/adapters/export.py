"""The adapters of a sharded model, written as a directory that PEFT loads."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...moe.experts.layer import DMoE
from ...moe.experts.lora import TOKENS, A, B, Lora
from ...moe.util.errors import ExpertMeshError
from ...sharding.runtime.process import raise_together
from ...sharding.state import (
    ShardedParameter,
    adapters_of,
    new_tokens_of,
    sharded_parameters,
    token_rows_of,
    whole_beside_adapters,
)
from ...sharding.topology import Topology
from ..files.directories import write_errors
from ..files.dtype_names import DTYPE_CODES
from ..files.dtypes import Array, as_array, as_tensor
from ..files.file_layout import OutputFile, OutputTensor, Strip, at_once, plain_output
from ..files.tensors import DiskTensor, Region, StoredTensor
from ..hf.checkpoint import Checkpoint
from ..hf.class_names import class_names
from ..hf.export import WRITER, replacing, write_sharded
from ..hf.side_files import SideFiles, plan_beside_adapter
from ..hf.tokenizer_files import Files
from ..model_card import write_card
from .adapter import CONFIG, DELTA, ROPE, WEIGHTS
from .peft_format import (
    PREFIX,
    LoraPair,
    adapter_config,
    lora_names,
    pack_experts,
    packed_paths,
    reads_by_expert,
)
from .servers import in_layer, serving_lines

Form = Literal["auto", "per-expert", "packed"]


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
        tokenizer: whose files lie beside them, with its chat template; None: the base's own.
        card: as of `export_model`.

    Returns:
        What servers must be told, in lines.

    Raises:
        ExpertMeshError: on all ranks, when rank 0 cannot write, or the model has no such form.
    """
    planned = model, checkpoint, lora, base_model, form, tokenizer
    with raise_together(), write_errors(out):
        plan = plan_adapter(*planned, is_writer=dist.get_rank() == WRITER)
    with replacing(out) as directory, raise_together(), write_errors(out):
        write_sharded([plan.weights], adapter_shards(model, topology), directory, out)
        if directory is None:
            return []
        plan.beside.write(directory)
        return [*write_card(card, directory, out), *plan.beside.lines]


def adapter_shards(model: nn.Module, topology: Topology) -> dict[str, ShardedParameter]:
    """What an adapter's files hold, as it is sharded."""
    return sharded_parameters(model, topology, adapters_of(model) | whole_beside_adapters(model))


@dataclass(frozen=True)
class AdapterPlan:
    """What an adapter's export is going to write. weights: the file of its tensors. beside: what lies beside it, with
    what servers must be told; nothing where another rank writes it."""

    weights: OutputFile
    beside: SideFiles

    @property
    def num_bytes(self) -> int:
        """Of all files, but for the header."""
        return self.weights.num_bytes + self.beside.num_bytes

    def write_names(self, directory: Path) -> None:
        """Write the directory without values: where these will be, its files take no room on the disk.

        Raises:
            OSError: a file cannot be written.
        """
        self.beside.write(directory)
        with (directory / WEIGHTS).open("wb") as file:
            file.write(self.weights.header)
            file.truncate(file.tell() + self.weights.num_bytes)


def plan_adapter(
    model: nn.Module,
    checkpoint: Checkpoint,
    lora: Lora,
    base_model: str,
    form: Form = "auto",
    tokenizer: Any = None,
    is_writer: bool = True,
) -> AdapterPlan:
    """What `export_adapter` writes, of a model that may still be on the meta device, known from names alone.

    Args:
        is_writer: whether this process writes what lies beside the weights.

    Raises:
        ExpertMeshError: the model has no such form, or a file cannot be taken along, or not be read.
        OSError: the tokenizer's files cannot be made.
    """
    tensors = _Tensors(model, checkpoint, form)
    linear = {path: isinstance(model.get_submodule(path), nn.Linear) for path in tensors.modules}
    there = tensors.class_names.there
    config = adapter_config(
        base_model=base_model,
        rank=lora.rank,
        alpha=lora.alpha,
        use_rslora=lora.use_rslora,
        modules=[there(path) for path in tensors.modules if linear[path]],
        weights=[there(path) for path in tensors.modules if not linear[path]],
        experts={there(path): layer.mlp.layout for path, layer in tensors.experts.items()},
        others=_not_adapted(tensors.class_names.model or model, tensors),
        modules_to_save=dict.fromkeys(there(name).rpartition(".")[0] for name in tensors.whole),
        token_indices={there(path): new_tokens_of(model, path) for path in tensors.token_rows},
        is_tied=not checkpoint.names.aliases.keys().isdisjoint(tensors.whole),
        model_class=None if tensors.class_names.model is None else type(tensors.class_names.model),
    )
    weights = OutputFile(WEIGHTS, list(tensors.outputs(config)))
    if not is_writer:
        return AdapterPlan(weights, SideFiles())
    tables = {CONFIG: config}
    if (scaling := checkpoint.source.rope_scaling) is not None:
        tables[ROPE] = scaling.as_json()
    written: Files = {name: (json.dumps(table, indent=2) + "\n").encode() for name, table in tables.items()}
    beside = plan_beside_adapter(checkpoint.source, tokenizer).files | written
    return AdapterPlan(weights, SideFiles(beside, _lines(config, tensors, checkpoint)))


def _lines(config: Mapping[str, Any], tensors: "_Tensors", checkpoint: Checkpoint) -> list[str]:
    """What servers must be told, and who publishes it."""
    lines, base_model = [], config["base_model_name_or_path"]
    if Path(base_model).is_dir():
        lines.append(
            f"adapter: {CONFIG} names the directory {base_model} as its base, as PEFT's would; before you publish the "
            "adapter, write the base's hub id there"
        )
    there = tensors.class_names.there
    names: dict[str, list[str]] = {}
    for tensor in checkpoint.exported:
        for parameter in {region.parameter for region in tensor.regions}:
            names.setdefault(parameter, []).append(tensor.name)
    on_disk = {path: names.get(f"{path}.weight", []) for path in tensors.modules}
    matrices = [(path, f"{path}.mlp.{_matrices(layer)[0]}") for path, layer in tensors.experts.items()]
    return lines + serving_lines(
        {there(path): found[0].removesuffix(".weight") if len(found) == 1 else None for path, found in on_disk.items()},
        rank=max((config["r"], *config["rank_pattern"].values())),
        is_packed=tensors.is_packed if tensors.experts else None,
        is_packed_elsewhere=any(
            not in_layer(name).startswith(f"{in_layer(there(path))}.")
            for path, own in matrices
            for name in names.get(own, ())
        ),
        use_rslora=config["use_rslora"],
        whole=[*tensors.whole, *tensors.token_rows],
    )


def _not_adapted(model: nn.Module, tensors: "_Tensors") -> set[str]:
    adapted = set(map(tensors.class_names.there, (*tensors.modules, *tensors.experts)))
    return {path for path, _ in model.named_modules() if path not in adapted} | {
        name for name, _ in model.named_parameters() if not name.endswith((A, B))
    }


class _Tensors:
    """The tensors that are written.

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

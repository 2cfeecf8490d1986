"""The command `merge`: a model with an adapter's LoRA deltas added to its weights, in Hugging Face form."""

import math
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ...moe.util.errors import ExpertMeshError
from ...sharding.runtime.process import raise_together
from ...sharding.topology import rows_of
from ..convert import HowToWrite, plan_hf, write_hf
from ..ep_shards.manifest import check_all_bytes, is_shards
from ..files.dtype_names import DTYPE_NAMES
from ..files.dtypes import Array, as_array, as_tensor, cast, torch_dtype
from ..files.file_layout import OutputTensor
from ..files.tensors import DiskTensor
from ..hf.checkpoint import Checkpoint
from ..hf.class_names import ClassNames, class_names
from ..hf.export import WRITER
from ..hf.export_plan import ExportPlan
from ..hf.reader import ParameterReader
from ..hf.source import GENERATION_CONFIG, read_ends
from ..hf.stream import Begun, read_tensors
from ..hf.tokenizer_files import read_tokenizer
from ..model_card import merged_card
from ..opening import open_any
from .adapter import CONFIG, WEIGHTS, Adapter, adapted_modules, read_rope, rows_of_embedding
from .export import AdapterPlan
from .peft_format import LoraPair

_ROWS_AT_ONCE = 256
_MUCH_LOST = 0.2
"""Rounding errors' norm over that of the LoRA deltas, from which on a remedy is named."""


def merge_adapter(base: Path, adapter: Path, out: Path, how: HowToWrite, dtype: str | None = None) -> int:
    """Write `base`, of any form and encoding, with W + s · B · A in the place of every adapted W, and what was
    trained whole in its own place. Sums are rounded once to fp32, from fp64, and then to the dtype that is written;
    `how.tell` is told what that leaves of the update. The config has the RoPE scaling that the adapter was trained
    with, and no longer ties what the adapter makes differ. Without a tokenizer of `how`, it is that beside the adapter.

    Args:
        dtype: of every parameter that is written, by its code; None: as the base has each.

    Returns:
        How many parameters were changed.

    Raises:
        ExpertMeshError: one of the two is damaged, they do not belong together, or `out` is not to be had.
    """
    checkpoint, changed, rounding = _open_merged(base, adapter, how, dtype)
    check_all_bytes(base)
    if (line := changed.other_base(base)) is not None:
        how.tell(line)
    for parameter in sorted(changed.beside):
        changed.pair(parameter)  # what cannot be merged is refused before anything is written
    for parameter in changed.token_rows:
        changed.rows_of_tokens(parameter)
    for parameter in changed.whole:
        changed.whole_rows(parameter, range(rows_of(changed.infos[changed.whole[parameter]].shape)))

    tokenizer = how.tokenizer or read_tokenizer(adapter, checkpoint.source.path, checkpoint.source.config)
    write_hf(checkpoint, out, replace(how, card=merged_card(adapter), tokenizer=tokenizer))
    if (line := rounding.line()) is not None:
        how.tell(line)
    return len(changed.beside) + len(changed.whole) + len(changed.token_rows)


def merged_tensors(
    base: Path, adapter: Path, how: HowToWrite, dtype: str | None, device: torch.device, to_all: bool
) -> Begun:
    """What `merge_adapter` writes, as tensors, which rank 0 reads. All ranks call it together.

    Args:
        device, to_all: see `sharded_tensors`.
    """
    outputs: list[OutputTensor] = []
    with raise_together():
        if dist.get_rank() == WRITER:
            checkpoint, plan = plan_hf(_open_merged(base, adapter, how, dtype)[0], how)
            outputs, reader = [output for file in plan.files for output in file.tensors], checkpoint.reader()

    def rows_of(parameter: str, rows: range, dtype: str) -> Array:
        found = reader.rows(parameter, rows)
        assert found is not None, parameter
        return cast(*found, dtype)

    return read_tensors(outputs, rows_of, device, to_all)


def planned_merge(base: Path, adapter: AdapterPlan, how: HowToWrite, dtype: str | None = None) -> ExportPlan:
    """What `merge_adapter` will write of an adapter that is yet to be exported, known from names alone.

    Raises:
        ExpertMeshError: it cannot be merged.
        OSError: a temporary file cannot be written.
    """
    with tempfile.TemporaryDirectory() as directory:
        adapter.write_names(Path(directory))
        opened, there = _opened(base, Path(directory), how.drop_untrained)
        checkpoint = _merged(opened, there, Adapter(Path(directory), opened.names, there), dtype)
        return plan_hf(checkpoint, how)[1]


def _open_merged(
    base: Path, adapter: Path, how: HowToWrite, dtype: str | None
) -> "tuple[Checkpoint, Adapter, Rounding]":
    """(the base with an adapter merged, which reads as both together; the adapter; what rounding has taken so far)"""
    opened, there = _opened(base, adapter, how.drop_untrained)
    changed = Adapter(adapter, opened.names, there)
    checkpoint = _merged(opened, there, changed, dtype)
    rounding = Rounding({region.parameter: t.dtype for t in checkpoint.exported for region in t.regions})
    checkpoint = replace(checkpoint, make_reader=lambda: MergedReader(opened.reader(), changed.reader(), rounding))
    return checkpoint, changed, rounding


def _merged(opened: Checkpoint, there: ClassNames, changed: Adapter, dtype: str | None) -> Checkpoint:
    """The base as an export with an adapter merged has it, but for its values.

    Args:
        dtype: see `merge_adapter`.
    """
    adapter = changed.path
    # what is written depends on these files too
    checkpoint = replace(opened, files=[*opened.files, adapter / CONFIG, adapter / WEIGHTS])
    if dtype is not None:
        checkpoint = checkpoint.exporting(opened.names.parameters.keys() - opened.names.buffers, dtype)
        checkpoint = replace(checkpoint, source=replace(checkpoint.source, dtype=dtype))
    if (scaling := read_rope(adapter)) is not None:
        checkpoint = checkpoint.stretched(scaling)
    if (adapter / GENERATION_CONFIG).exists():
        checkpoint = checkpoint.ending_in(read_ends(adapter / GENERATION_CONFIG))
    for alias, parameter in opened.names.aliases.items():
        if {alias, parameter} & (changed.beside.keys() | (set() if changed.ties else changed.whole.keys())):
            checkpoint = _untied(checkpoint, there, alias, parameter)
    return checkpoint


def _opened(base: Path, adapter: Path, drop_untrained: bool) -> tuple[Checkpoint, ClassNames]:
    """The model that an adapter is for, and the names of the class that its config names: with as many tokens, and with
    the parts that images pass where the adapter has something beside theirs."""
    opened = open_any(base, drop_untrained=drop_untrained)
    there, images = class_names(opened.names.model, opened.source.config), False
    size = rows_of_embedding(adapter, opened.names, there)
    if size is not None and size <= opened.source.text_config.vocab_size:
        size = None
    if there.model is not None and not opened.source.images and not opened.source.mtp:
        ours = {path for path, _ in opened.names.model.named_modules()}
        others = {path for path, _ in there.model.named_modules() if there.here(path) == path} - ours
        images = bool(others & adapted_modules(adapter))
    if images and is_shards(base):
        raise ExpertMeshError(
            f"{adapter}: changes {min(others & adapted_modules(adapter))}, which EP shards only carry over; give "
            f"the model that {base} was made of"
        )
    if size is not None or images:
        opened = open_any(base, drop_untrained=drop_untrained, vocab_size=size, images=images)
        there = class_names(opened.names.model, opened.source.config)
    return opened, there


class Rounding:
    """What is left of LoRA deltas, once the sums are rounded to what is written; of what this process has written, not
    of files that an interrupted one had finished. For several threads.

    Args:
        dtypes: that parameters are written in.
    """

    def __init__(self, dtypes: dict[str, str]):
        self.dtypes = dtypes
        self.elements = self.changed = 0
        self.lost = self.update = 0.0
        self.to: set[str] = set()
        self._lock = threading.Lock()

    def add(self, parameter: str, base: Tensor, update: Tensor, merged: Tensor) -> None:
        """Count rows: the base's, what is added to them, and both, in fp32."""
        dtype = self.dtypes[parameter]
        written = merged.to(torch_dtype(dtype))
        changed = int(torch.count_nonzero(written != base.to(written.dtype)))
        off, whole = (written - merged).flatten(), update.flatten()
        lost, size = float(off.dot(off)), float(whole.dot(whole))
        with self._lock:
            self.elements, self.changed = self.elements + merged.numel(), self.changed + changed
            self.lost, self.update = self.lost + lost, self.update + size
            self.to.add(DTYPE_NAMES[dtype])

    def line(self) -> str | None:
        """What has become of the deltas, in words; None where nothing was added to anything."""
        if not self.elements or not self.update:
            return None
        share, lost = self.changed / self.elements, math.sqrt(self.lost / self.update)
        said = f"merge: {share:.1%} of the {self.elements:,} elements of adapted matrices changed"
        if self.lost:
            said += f"; rounding to {', '.join(sorted(self.to - {'float32'}))} took {lost:.1%} from the LoRA deltas"
        if lost > _MUCH_LOST:
            said += (
                ": they are small against the weights. To keep them, merge with --dtype float32 (in a run "
                "--merge-dtype float32), or serve the adapter beside its base"
            )
        return said


def _untied(checkpoint: Checkpoint, there: ClassNames, alias: str, parameter: str) -> Checkpoint:
    """With a tensor for each of the two modules that share a weight, as an adapter beside one of them is not beside the
    other: PEFT adds it to the output projection alone, until it merges it into both."""
    exported, missing = [], {alias: there.there(alias), parameter: there.there(parameter)}
    copies = {tensor.name for tensor in checkpoint.tied_copies} | {missing[alias]}
    for tensor in checkpoint.exported:
        if tensor.regions[0].parameter == parameter:
            owner = alias if tensor.name in copies else parameter
            tensor = shared = _renamed(tensor, tensor.name, owner)
            del missing[owner]
        exported.append(tensor)
    # what is added is not encoded
    plain = replace(shared, parts=(), encoding=None)
    exported += [_renamed(plain, name, owner) for owner, name in missing.items()]
    return replace(checkpoint, exported=exported, source=replace(checkpoint.source, is_untied=True))


def _renamed(tensor: DiskTensor, name: str, parameter: str) -> DiskTensor:
    (region,) = tensor.regions
    return replace(tensor, name=name, regions=(replace(region, parameter=parameter),))


class MergedReader:
    """A `ParameterReader` of another's parameters with an adapter's LoRA deltas added, to each of two tied ones its
    own. Not for several threads."""

    def __init__(self, base: ParameterReader, adapter: Adapter, rounding: Rounding):
        self.base, self.adapter, self.rounding = base, adapter, rounding

    def rows(self, parameter: str, rows: range) -> tuple[Array, str] | None:
        found = self.base.rows(self.adapter.names.aliases.get(parameter, parameter), rows)
        if parameter in self.adapter.whole:
            return as_array(self.adapter.whole_rows(parameter, rows).float()), "F32"
        if parameter in self.adapter.token_rows:
            return self._with_tokens(parameter, rows)
        pair = self.adapter.pair(parameter)
        if found is None or pair is None:
            return found
        scale, width = self.adapter.beside[parameter].scale, self.adapter.names.experts.get(parameter)
        base = as_tensor(*found)
        merged = torch.empty(base.shape, dtype=torch.float32)
        start = rows.start
        while start < rows.stop:
            # within one expert
            end = rows.stop if width is None else (start // width + 1) * width
            run = range(start, min(end, rows.stop, start + _ROWS_AT_ONCE))
            here = slice(run.start - rows.start, run.stop - rows.start)
            update = scale * _update(pair, run, width, self._is_transposed(parameter))
            merged[here] = (base[here].double() + update).float()
            self.rounding.add(parameter, base[here], update, merged[here])
            start = run.stop
        return as_array(merged), "F32"

    def _with_tokens(self, parameter: str, rows: range) -> tuple[Array, str] | None:
        """Rows of a parameter of which the adapter has some: the others, and all that the base has, are the base's."""
        _, places = self.adapter.token_rows[parameter]
        own = self.adapter.names.aliases.get(parameter, parameter)
        num_base = next(
            (row for row in rows if row in places and self.base.rows(own, range(row, row + 1)) is None), rows.stop
        )
        if (found := self.base.rows(own, range(rows.start, num_base))) is None and num_base > rows.start:
            return None
        values = self.adapter.rows_of_tokens(parameter).float()
        merged = torch.empty(len(rows), values.shape[1])
        if found is not None:
            merged[: num_base - rows.start] = as_tensor(*found).float()
        for row in rows:
            if row in places:
                merged[row - rows.start] = values[places[row]]
        return as_array(merged), "F32"

    def close(self) -> None:
        self.base.close()
        self.adapter.files.close()

    def _is_transposed(self, parameter: str) -> bool:
        names = self.adapter.names
        return parameter.endswith(".w2") if parameter in names.experts else parameter in names.transposed


def _update(pair: LoraPair, rows: range, width: int | None, is_transposed: bool) -> Tensor:
    """Rows of B · A in fp64, or of its transpose.

    Args:
        width: rows per expert of the parameter, if it is experts'.
    """
    expert, first = (..., rows.start) if width is None else divmod(rows.start, width)
    within = slice(first, first + len(rows))
    a, b = pair.a[expert].double(), pair.b[expert].double()
    return a[:, within].t() @ b.t() if is_transposed else b[within] @ a

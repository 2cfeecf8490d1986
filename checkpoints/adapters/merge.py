"""The command `merge`: a model with an adapter's LoRA deltas added to its weights, in Hugging Face form."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ...sharding.topology import rows_of
from ..convert import HowToWrite, write_hf
from ..ep_shards.manifest import check_all_bytes
from ..files.dtypes import Array, as_array, as_tensor
from ..files.tensors import DiskTensor
from ..hf.checkpoint import Checkpoint
from ..hf.class_names import ClassNames, class_names
from ..hf.reader import ParameterReader
from ..hf.source import GENERATION_CONFIG, read_ends
from ..model_card import merged_card
from ..opening import open_any
from .adapter import CONFIG, WEIGHTS, Adapter, read_rope, rows_of_embedding
from .peft_format import LoraPair

_ROWS_AT_ONCE = 256


def merge_adapter(base: Path, adapter: Path, out: Path, how: HowToWrite) -> int:
    """Write `base`, of any form and encoding, with W + s · B · A in the place of every adapted W, and what was
    trained whole in its own place. Sums are rounded once
    to fp32, from fp64, and then to the dtype of the base. The config has the RoPE scaling that the adapter was trained
    with, and no longer ties what the adapter makes differ.

    Returns:
        How many parameters were changed.

    Raises:
        ExpertMeshError: one of the two is damaged, they do not belong together, or `out` is not to be had.
    """
    opened = open_any(base, drop_untrained=how.drop_untrained)
    check_all_bytes(base)
    there = class_names(opened.names.model, opened.source.config)
    size = rows_of_embedding(adapter, opened.names, there)
    if size is not None and size > opened.source.text_config.vocab_size:
        opened = open_any(base, drop_untrained=how.drop_untrained, vocab_size=size)
    changed = Adapter(adapter, opened.names, there)
    if (line := changed.other_base(base)) is not None:
        how.tell(line)
    for parameter in sorted(changed.beside):
        changed.pair(parameter)  # what cannot be merged is refused before anything is written
    for parameter in changed.token_rows:
        changed.rows_of_tokens(parameter)
    for parameter in changed.whole:
        changed.whole_rows(parameter, range(rows_of(changed.infos[changed.whole[parameter]].shape)))

    def make_reader() -> ParameterReader:
        return MergedReader(opened.reader(), Adapter(adapter, opened.names, there))

    # what is written depends on these files too
    files = [*opened.files, adapter / CONFIG, adapter / WEIGHTS]
    checkpoint = replace(opened, files=files, make_reader=make_reader)
    if (scaling := read_rope(adapter)) is not None:
        checkpoint = checkpoint.stretched(scaling)
    if (adapter / GENERATION_CONFIG).exists():
        checkpoint = checkpoint.ending_in(read_ends(adapter / GENERATION_CONFIG))
    for alias, parameter in opened.names.aliases.items():
        if {alias, parameter} & (changed.beside.keys() | (set() if changed.ties else changed.whole.keys())):
            checkpoint = _untied(checkpoint, there, alias, parameter)
    write_hf(checkpoint, out, replace(how, card=merged_card(adapter)))
    return len(changed.beside) + len(changed.whole) + len(changed.token_rows)


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

    def __init__(self, base: ParameterReader, adapter: Adapter):
        self.base, self.adapter = base, adapter

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
            update = _update(pair, run, width, self._is_transposed(parameter))
            merged[here] = (base[here].double() + scale * update).float()
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

"""Instruction data: files in many formats to tokens, sequences, and batches for each rank."""

from typing import TYPE_CHECKING

from expertmesh.moe.base.lazy import import_on_demand

if TYPE_CHECKING:
    from expertmesh.training.data.batch import IGNORED, Batch, Padding, PinnedBatch, SplitSequences, batch_of, collate
    from expertmesh.training.data.cache import cache_directory, cached_bytes
    from expertmesh.training.data.chat import TrainOn, answer_ends, set_chat_template
    from expertmesh.training.data.data_files import SampleBy, parse_datasets
    from expertmesh.training.data.data_order import DataOrder, share_out
    from expertmesh.training.data.digest import explain_samples, samples_facts
    from expertmesh.training.data.formats import Columns
    from expertmesh.training.data.packing import Rows, make_rows, pack
    from expertmesh.training.data.prefetch import made_ahead
    from expertmesh.training.data.preview import describe, print_preview, warnings_of
    from expertmesh.training.data.samples import (
        DataOptions,
        Origin,
        Sample,
        Samples,
        hold_out,
        load_samples,
        prompt_tokens,
    )
    from expertmesh.training.data.templates import TEMPLATES
else:
    __getattr__ = import_on_demand(__name__)

__all__ = [
    "IGNORED",
    "TEMPLATES",
    "Batch",
    "Columns",
    "DataOptions",
    "DataOrder",
    "Origin",
    "Padding",
    "PinnedBatch",
    "Rows",
    "Sample",
    "SampleBy",
    "Samples",
    "SplitSequences",
    "TrainOn",
    "answer_ends",
    "batch_of",
    "cache_directory",
    "cached_bytes",
    "collate",
    "describe",
    "explain_samples",
    "hold_out",
    "load_samples",
    "made_ahead",
    "make_rows",
    "pack",
    "parse_datasets",
    "print_preview",
    "prompt_tokens",
    "samples_facts",
    "set_chat_template",
    "share_out",
    "warnings_of",
]

"""Instruction data: files in many formats to tokens, rows, and batches for each rank."""

from typing import TYPE_CHECKING

from moe.lazy import import_on_demand

if TYPE_CHECKING:
    from training.data.batch import IGNORED, Batch, SharedRows, collate
    from training.data.cache import cache_directory, cached_bytes
    from training.data.chat import TrainOn, set_chat_template
    from training.data.digest import explain_samples, samples_facts
    from training.data.files import SampleBy, parse_datasets
    from training.data.formats import Columns
    from training.data.order import DataOrder, share_out
    from training.data.packing import Rows, make_rows, pack
    from training.data.preview import describe, print_preview
    from training.data.samples import DataOptions, Origin, Sample, Samples, hold_out, load_samples, prompt_tokens
    from training.data.templates import TEMPLATES
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
    "Rows",
    "Sample",
    "SampleBy",
    "Samples",
    "SharedRows",
    "TrainOn",
    "cache_directory",
    "cached_bytes",
    "collate",
    "describe",
    "explain_samples",
    "hold_out",
    "load_samples",
    "make_rows",
    "pack",
    "parse_datasets",
    "print_preview",
    "prompt_tokens",
    "samples_facts",
    "set_chat_template",
    "share_out",
]

"""What an export in Hugging Face form is going to write, known from names, headers and configs alone.

Whatever an export refuses, its plan refuses: a run makes it before its first step, and again when it writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.file_layout import INDEX_NAME, SINGLE_NAME, OutputFile, hf_index, plan_hf_files
from .requantized import hf_outputs
from .side_files import SideFiles, plan_export_files

if TYPE_CHECKING:
    from .checkpoint import Checkpoint


@dataclass(frozen=True)
class ExportPlan:
    """files: of weights. beside: what lies beside them; nothing where another rank writes it."""

    files: list[OutputFile]
    beside: SideFiles

    @property
    def num_bytes(self) -> int:
        """Of all files, but for headers and index."""
        return sum(file.num_bytes for file in self.files) + self.beside.num_bytes

    @property
    def last(self) -> str:
        """The file that makes the export complete: its index, or its only one."""
        return INDEX_NAME if len(self.files) > 1 else SINGLE_NAME

    @property
    def index(self) -> str | None:
        """What the index says; None of a single file."""
        return hf_index(self.files) if len(self.files) > 1 else None

    def write_beside(self, directory: Path) -> list[str]:
        """Write what lies beside the weights; what to say of it.

        Raises:
            ExpertMeshError: a file that is copied cannot be read.
            OSError: one cannot be written.
        """
        self.beside.write(directory)
        return self.beside.lines


def plan_export(
    checkpoint: Checkpoint, max_shard_size: int, tokenizer: Any = None, is_writer: bool = True
) -> ExportPlan:
    """
    Args:
        checkpoint: gives names, dtypes and the files beside the weights.
        max_shard_size: bytes per file, unless a single tensor has more.
        tokenizer: whose files lie there in place of the checkpoint's own.
        is_writer: whether this process writes what lies beside the weights.

    Raises:
        ExpertMeshError: it is to be encoded as another checkpoint is, which has a tensor in another shape; or a file
            cannot be taken along, or not be read.
        OSError: the tokenizer's files cannot be made.
    """
    files = plan_hf_files(hf_outputs(checkpoint), max_shard_size)
    return ExportPlan(files, plan_export_files(checkpoint, tokenizer) if is_writer else SideFiles())

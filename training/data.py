"""Instruction data: rows of prompt and response, tokenised, and the order in which ranks see them.

Which rows make up global batch n depends on the seed and the global batch size alone, never on how many ranks or
accumulation steps share them out.

Shape suffixes: B rows, S positions.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe import ExpertMeshError

IGNORED = -100


@dataclass(frozen=True)
class Sample:
    """tokens: prompt and response. prompt_length: how many of them are the prompt, on which there is no loss."""

    tokens: list[int]
    prompt_length: int


@dataclass(frozen=True)
class Batch:
    """One forward's input on one rank, padded on the right.

    tokens_BS: int64. is_token_BS: False for padding. targets_BS: the next token where it is to be learned, else -100.
    """

    tokens_BS: Tensor
    is_token_BS: Tensor
    targets_BS: Tensor

    def to(self, device: torch.device) -> "Batch":
        moved = (t.to(device, non_blocking=True) for t in (self.tokens_BS, self.is_token_BS, self.targets_BS))
        return Batch(*moved)


def load_samples(
    file: str, tokenizer: Any, prompt_column: str, response_column: str, prompt_template: str, max_seq_length: int
) -> Sequence[Sample]:
    """Read and tokenise a JSON or JSONL file with `datasets`, which keeps the result in its cache.

    Each sample is the filled-in template with the tokenizer's usual special tokens, then the response, then the end
    of sequence token; what exceeds max_seq_length is cut off.

    Raises:
        ExpertMeshError: the file is missing, empty, malformed (with the line), or lacks a column (with those found).
    """
    rows = _read_rows(Path(file), (prompt_column, response_column))
    template = prompt_template.replace("\\n", "\n")

    def tokenize(row: dict[str, Any], index: int) -> dict[str, Any]:
        for column in (prompt_column, response_column):
            if not isinstance(row[column], str):
                raise ExpertMeshError(f"{file}: row {index + 1}: {column} is {row[column]!r:.80}, not text")
        prompt = tokenizer(template.replace("{prompt}", row[prompt_column]))["input_ids"]
        if tokenizer.eos_token_id is not None and prompt[-1:] == [tokenizer.eos_token_id]:
            prompt = prompt[:-1]
        response = tokenizer(row[response_column], add_special_tokens=False)["input_ids"]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        tokens = (prompt + response + end)[:max_seq_length]
        return {"tokens": tokens, "prompt_length": min(len(prompt), len(tokens))}

    tokenized = rows.map(tokenize, with_indices=True, remove_columns=rows.column_names, desc="tokenising")
    return _Samples(tokenized)


class _Samples(Sequence[Sample]):
    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        row = self.dataset[index]
        return Sample(row["tokens"], row["prompt_length"])


def _read_rows(file: Path, columns: Sequence[str]) -> Any:
    from datasets import load_dataset

    if not file.is_file():
        raise ExpertMeshError(f"--dataset {file}: no such file")
    if file.stat().st_size == 0:
        raise ExpertMeshError(f"--dataset {file}: is empty")
    try:
        rows = load_dataset("json", data_files=str(file), split="train")
    except Exception as error:
        raise ExpertMeshError(f"--dataset {file}: {_what_is_wrong(file, error)}") from error
    if len(rows) == 0:
        raise ExpertMeshError(f"--dataset {file}: has no rows")
    for column, flag in zip(columns, ("--prompt-column", "--response-column"), strict=True):
        if column not in rows.column_names:
            found = ", ".join(rows.column_names)
            raise ExpertMeshError(f"--dataset {file}: has no column {column!r}; found: {found}; name one with {flag}")
    return rows


def _what_is_wrong(file: Path, error: Exception) -> str:
    """The first line that is no JSON object, for a JSON Lines file; else what the reader said."""
    with open(file, encoding="utf-8", errors="replace") as lines:
        if lines.read(1) != "[":
            lines.seek(0)
            for number, line in enumerate(lines, start=1):
                try:
                    if line.strip() and not isinstance(json.loads(line), dict):
                        return f"line {number} is no JSON object: {line.strip()[:80]}"
                except (json.JSONDecodeError, RecursionError) as problem:
                    return f"line {number} is not valid JSON ({problem}): {line.strip()[:80]}"
    cause = error.__cause__ or error
    return f"cannot be read as JSON: {cause}"


@dataclass(frozen=True)
class DataOrder:
    """Which rows each step, and in it each rank and each forward, sees.

    Attributes:
        num_rows: rows in the data set.
        world_size, per_device, accumulation: how a global batch is shared out.
        seed: of the order; every epoch is a permutation of its own.
    """

    num_rows: int
    world_size: int
    per_device: int
    accumulation: int
    seed: int

    @property
    def global_batch_size(self) -> int:
        return self.world_size * self.per_device * self.accumulation

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_rows / self.global_batch_size)

    def global_batch(self, step: int) -> list[int]:
        """Row numbers of global batch `step`, from 0 on. The last of an epoch may be short; no row is dropped."""
        epoch, position = divmod(step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(self.num_rows, generator=generator)
        start = position * self.global_batch_size
        return order[start : start + self.global_batch_size].tolist()

    def micro_batches(self, step: int, rank: int) -> list[list[int]]:
        """Row numbers of each forward of `rank` in a step: equally many on all ranks, some of them perhaps empty."""
        rows = self.global_batch(step)
        size = self.world_size * self.per_device
        return [rows[start : start + size][rank :: self.world_size] for start in range(0, len(rows), size)]


def collate(samples: Sequence[Sample]) -> Batch:
    """Pad samples on the right to the longest. No sample at all gives one position of padding, for a rank that has
    nothing to do but must take part in the collectives."""
    length = max([len(sample.tokens) for sample in samples], default=1)
    tokens_BS = torch.zeros(max(len(samples), 1), max(length, 1), dtype=torch.int64)
    is_token_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
    targets_BS = torch.full_like(tokens_BS, IGNORED)
    for row, sample in enumerate(samples):
        end = len(sample.tokens)
        tokens_BS[row, :end] = torch.tensor(sample.tokens)
        is_token_BS[row, :end] = True
        # position i predicts token i + 1, so the first target stands at the prompt's last position
        first = max(sample.prompt_length, 1)
        if first < end:
            targets_BS[row, first - 1 : end - 1] = tokens_BS[row, first:end]
    return Batch(tokens_BS, is_token_BS, targets_BS)

"""Instruction data: rows of prompt and response, tokenised, and the order in which ranks see them.

Which rows make up global batch n depends on the seed and the global batch size alone, never on how many ranks or
accumulation steps share them out.

Shape suffixes: B rows, S positions, N positions with a target.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
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
class DataFormat:
    """Where a row has its prompt and response, and how they become tokens.

    prompt_template: the text before the response; {prompt} stands for the prompt, a backslash and n for a line break.
    max_seq_length: what exceeds it is cut off.
    """

    prompt_column: str
    response_column: str
    prompt_template: str
    max_seq_length: int


class Samples(Sequence[Sample]):
    """Tokenised rows. num_cut: how many lost their end to max_seq_length. num_without_target: how many have no token
    left to learn."""

    def __init__(self, dataset: Any):
        self.dataset = dataset
        self.num_cut = sum(dataset["is_cut"])
        self.num_without_target = sum(not has for has in dataset["has_target"])

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        row = self.dataset[index]
        return Sample(row["tokens"], row["prompt_length"])


def load_samples(file: str, tokenizer: Any, data_format: DataFormat) -> Samples:
    """Read and tokenise a JSON or JSONL file with `datasets`, which keeps the result in its cache.

    Each sample is the filled-in template with the tokenizer's usual special tokens, then the response, then the end
    of sequence token.

    Raises:
        ExpertMeshError: the file is missing, empty or malformed (with the line), a row lacks a column (with those
            found) or has no text in it, or nothing is left to learn.
    """
    rows = _read_dataset(Path(file), data_format)
    template = data_format.prompt_template.replace("\\n", "\n")

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        prompt = tokenizer(template.replace("{prompt}", row["prompt"]))["input_ids"]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        if prompt[-1:] == end:
            prompt = prompt[:-1]
        response = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
        tokens = prompt + response + end
        kept = tokens[: data_format.max_seq_length]
        prompt_length = min(len(prompt), len(kept))
        return {
            "tokens": kept,
            "prompt_length": prompt_length,
            "is_cut": len(kept) < len(tokens),
            "has_target": len(kept) > max(prompt_length, 1),
        }

    samples = Samples(rows.map(tokenize, remove_columns=rows.column_names, desc="tokenising"))
    if samples.num_without_target == len(samples):
        raise ExpertMeshError(
            f"--dataset {file}: no row has a response token within --max-seq-length {data_format.max_seq_length}"
        )
    return samples


def _read_dataset(file: Path, data_format: DataFormat) -> Any:
    """The rows' prompts and responses as a `datasets.Dataset`, cached for as long as the file does not change."""
    from datasets import Dataset

    if not file.is_file():
        raise ExpertMeshError(f"--dataset {file}: no such file")
    if file.stat().st_size == 0:
        raise ExpertMeshError(f"--dataset {file}: is empty")
    version = f"{file.stat().st_size} {file.stat().st_mtime_ns}"
    settings = {"path": str(file.resolve()), "version": version, "data_format": data_format}
    try:
        rows = Dataset.from_generator(_prompts_and_responses, gen_kwargs=settings)
    except Exception as error:
        # `datasets` wraps what the generator raises
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ExpertMeshError):
            cause = cause.__cause__
        raise cause or error from None
    return rows


def _prompts_and_responses(path: str, version: str, data_format: DataFormat) -> Iterator[dict[str, str]]:
    number_of_rows = 0
    for place, row in _json_rows(Path(path)):
        if not isinstance(row, dict):
            raise ExpertMeshError(f"--dataset {path}: {place} is no JSON object: {row!r:.80}")
        texts = {}
        for name, column in (("prompt", data_format.prompt_column), ("response", data_format.response_column)):
            if column not in row:
                raise ExpertMeshError(
                    f"--dataset {path}: {place} has no column {column!r}; found: {', '.join(row)}; "
                    f"name one with --{name}-column"
                )
            if not isinstance(row[column], str):
                raise ExpertMeshError(f"--dataset {path}: {place}: {column} is {row[column]!r:.80}, not text")
            texts[name] = row[column]
        number_of_rows += 1
        yield texts
    if number_of_rows == 0:
        raise ExpertMeshError(f"--dataset {path}: has no rows")


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """(place, row) of a JSON Lines file, or of one JSON list."""
    first = b""
    with open(file, "rb") as lines:
        for line in lines:
            first = line.removeprefix(b"\xef\xbb\xbf").strip()
            if first:
                break
    if first.startswith(b"["):
        rows = _parse(file.read_bytes(), file, "the file")
        yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))
        return
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"line {number}", _parse(line, file, f"line {number}")


def _parse(content: bytes, file: Path, place: str) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ExpertMeshError(f"--dataset {file}: {place} is not UTF-8 text: {error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        start = content[:80].decode("utf-8", errors="replace").strip()
        raise ExpertMeshError(f"--dataset {file}: {place} is not valid JSON ({error}): {start}") from error


@dataclass(frozen=True)
class Batch:
    """One forward's input on one rank, padded on the right.

    tokens_BS: int64. is_token_BS: False for padding, or None when there is none. targets_BS: the next token where it
    is to be learned, else -100. num_tokens, num_targets: how many of each.
    """

    tokens_BS: Tensor
    is_token_BS: Tensor | None
    targets_BS: Tensor
    target_index_N: Tensor
    num_tokens: int
    num_targets: int

    def to(self, device: torch.device) -> "Batch":
        mask = None if self.is_token_BS is None else self.is_token_BS.to(device)
        moved = {name: getattr(self, name).to(device) for name in ("tokens_BS", "targets_BS", "target_index_N")}
        return replace(self, is_token_BS=mask, **moved)


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
    target_index_N = (targets_BS != IGNORED).flatten().nonzero().squeeze(1)
    num_tokens, num_targets = int(is_token_BS.sum()), len(target_index_N)
    has_padding = num_tokens < tokens_BS.numel()
    return Batch(tokens_BS, is_token_BS if has_padding else None, targets_BS, target_index_N, num_tokens, num_targets)


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
        start = position * self.global_batch_size
        return _permutation(self.num_rows, self.seed + epoch)[start : start + self.global_batch_size].tolist()

    def micro_batches(self, step: int, rank: int) -> list[list[int]]:
        """Row numbers of each forward of `rank` in a step: equally many on all ranks, some of them perhaps empty."""
        rows = self.global_batch(step)
        size = self.world_size * self.per_device
        return [rows[start : start + size][rank :: self.world_size] for start in range(0, len(rows), size)]


@lru_cache(maxsize=2)
def _permutation(num_rows: int, seed: int) -> Tensor:
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))

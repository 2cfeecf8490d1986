"""Rows of samples as tensors.

Shape suffixes: B rows, S positions, N target tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from training.data.samples import Sample

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """One forward's input on one rank, padded on the right.

    tokens_BS: int64.
    positions_BS: where each token stands within its own sample; None when every row is one sample. transformers takes
        a position that does not follow the one before it for the start of another sample, and lets none attend to
        another (`find_packed_sequence_indices`).
    segments: lengths of the samples, and of the padding behind them, row after row; None as for positions_BS.
    is_token_BS: False for padding, or None when there is none.
    targets_BS: the next token of the same sample where it is to be learned, else -100.
    target_index_N: the flat positions that have a target.
    num_tokens, num_targets: how many of each.
    num_pairs: of a token and one that it attends to, itself included.
    """

    tokens_BS: Tensor
    positions_BS: Tensor | None
    segments: tuple[int, ...] | None
    is_token_BS: Tensor | None
    targets_BS: Tensor
    target_index_N: Tensor
    num_tokens: int
    num_targets: int
    num_pairs: int

    def to(self, device: torch.device) -> "Batch":
        moved: dict[str, Any] = {n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def collate(rows: Sequence[Sequence[Sample]]) -> Batch:
    """Each row's samples one after the other, padded on the right to the longest row. No row at all gives one position
    of padding, for a rank that has nothing to do but must take part in the collectives."""
    length = max([sum(len(sample.tokens) for sample in row) for row in rows], default=1)
    tokens_BS = torch.zeros(max(len(rows), 1), max(length, 1), dtype=torch.int64)
    positions_BS = torch.zeros_like(tokens_BS)
    is_token_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
    targets_BS = torch.full_like(tokens_BS, IGNORED)
    for index, row in enumerate(rows):
        start = 0
        for sample in row:
            end = start + len(sample.tokens)
            tokens = torch.tensor(sample.tokens, dtype=torch.int64)
            trained = torch.tensor(sample.is_trained, dtype=torch.bool)
            tokens_BS[index, start:end] = tokens
            positions_BS[index, start:end] = torch.arange(end - start)
            is_token_BS[index, start:end] = True
            # position i predicts token i + 1; the last one of a sample predicts nothing
            targets_BS[index, start : max(end - 1, start)] = torch.where(trained[1:], tokens[1:], IGNORED)
            start = end
    target_index_N = (targets_BS.flatten() != IGNORED).nonzero().flatten()
    num_tokens = int(is_token_BS.sum())
    has_padding = num_tokens < tokens_BS.numel()
    is_packed = any(len(row) > 1 for row in rows)
    return Batch(
        tokens_BS,
        positions_BS if is_packed else None,
        _segments(rows, tokens_BS.shape[1]) if is_packed else None,
        is_token_BS if has_padding else None,
        targets_BS,
        target_index_N,
        num_tokens,
        len(target_index_N),
        sum(len(sample.tokens) * (len(sample.tokens) + 1) // 2 for row in rows for sample in row),
    )


def _segments(rows: Sequence[Sequence[Sample]], length: int) -> tuple[int, ...]:
    segments: list[int] = []
    for row in rows:
        lengths = [len(sample.tokens) for sample in row]
        segments += lengths + [length - sum(lengths)] * (sum(lengths) < length)
    return tuple(segments)

"""Rows of samples as tensors.

Shape suffixes: B rows, S positions, N target tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sharding import RowGroup
from training.data.samples import Sample

IGNORED = -100


@dataclass(frozen=True)
class SharedRows:
    """The rows that several ranks hold a run each of.

    sharers: these ranks. positions_BS: as in a `Batch` of all positions. is_packed: whether rows hold several samples.
    """

    sharers: RowGroup
    positions_BS: Tensor
    is_packed: bool


@dataclass(frozen=True)
class Batch:
    """One forward's input on one rank: rows padded on the right or, where ranks share them, this rank's run of each.

    tokens_BS: int64.
    positions_BS: where each token stands within its own sample; None when every row is one sample. transformers takes
        a position that does not follow the one before it for the start of another sample, and lets none attend to
        another (`find_packed_sequence_indices`). Where rows are shared, there are positions always.
    segments: lengths of the samples, and of the padding behind them, row after row; None when every row is one sample.
        Where rows are shared, of the whole rows.
    is_token_BS: False for padding, or None when there is none.
    targets_BS: the next token of the same sample where it is to be learned, else -100.
    target_index_N: the flat positions that have a target.
    num_tokens, num_targets: how many of each.
    spans: of each sample, the positions of its tokens that are here.
    shared: what is to be known of the whole rows, where this is a run of each.
    """

    tokens_BS: Tensor
    positions_BS: Tensor | None
    segments: tuple[int, ...] | None
    is_token_BS: Tensor | None
    targets_BS: Tensor
    target_index_N: Tensor
    num_tokens: int
    num_targets: int
    spans: tuple[range, ...]
    shared: SharedRows | None = None

    def to(self, device: torch.device) -> "Batch":
        moved: dict[str, Any] = {n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor)}
        if self.shared is not None:
            moved["shared"] = replace(self.shared, positions_BS=self.shared.positions_BS.to(device))
        return replace(self, **moved)


def collate(rows: Sequence[Sequence[Sample]], sharers: RowGroup | None = None) -> Batch:
    """Each row's samples one after the other, padded on the right to the longest row. No row at all gives one position
    of padding, for a rank that has nothing to do but must take part in the collectives.

    Args:
        sharers: the ranks that share the rows, if any: this one gets its run of each.
    """
    longest = max([sum(len(sample.tokens) for sample in row) for row in rows], default=1)
    runs = 1 if sharers is None else sharers.size
    length = -(-max(longest, 1) // runs) * runs
    tokens_BS = torch.zeros(max(len(rows), 1), length, dtype=torch.int64)
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
    is_packed = any(len(row) > 1 for row in rows)
    shared, run = None, slice(0, length)
    if sharers is not None:
        if not is_packed:
            # padding takes the last position that a token has: what looks for the longest row must find it
            positions_BS = torch.arange(length).clamp(max=max(longest - 1, 0)).expand_as(positions_BS)
        shared = SharedRows(sharers, positions_BS, is_packed)
        run = slice(length // runs * sharers.index, length // runs * (sharers.index + 1))
        parts = (tokens_BS, positions_BS, is_token_BS, targets_BS)
        tokens_BS, positions_BS, is_token_BS, targets_BS = (part[:, run].contiguous() for part in parts)
    target_index_N = (targets_BS.flatten() != IGNORED).nonzero().flatten()
    num_tokens = int(is_token_BS.sum())
    has_padding = num_tokens < tokens_BS.numel()
    return Batch(
        tokens_BS,
        positions_BS if is_packed or shared is not None else None,
        _segments(rows, length) if is_packed else None,
        is_token_BS if has_padding else None,
        targets_BS,
        target_index_N,
        num_tokens,
        len(target_index_N),
        _spans(rows, run),
        shared,
    )


def _spans(rows: Sequence[Sequence[Sample]], run: slice) -> tuple[range, ...]:
    """
    Args:
        run: of each row, the part that is here.
    """
    spans = []
    for row in rows:
        start = 0
        for sample in row:
            spans.append(range(max(run.start - start, 0), min(run.stop - start, len(sample.tokens))))
            start += len(sample.tokens)
    return tuple(span for span in spans if span)


def _segments(rows: Sequence[Sequence[Sample]], length: int) -> tuple[int, ...]:
    segments: list[int] = []
    for row in rows:
        lengths = [len(sample.tokens) for sample in row]
        segments += lengths + [length - sum(lengths)] * (sum(lengths) < length)
    return tuple(segments)

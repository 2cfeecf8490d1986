"""Sequences of one sample each, or of several: first-fit-decreasing packing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .samples import Sample, Samples


class Rows(Sequence[list[Sample]]):
    """What a batch is made of: each sequence is one sample, or several that were packed into it.

    Attributes:
        samples: all of them.
        groups: for each sequence the indices of its samples; None when sequence i is sample i.
        lengths: tokens of each sequence, int64.
    """

    def __init__(self, samples: Samples, groups: Sequence[Sequence[int]] | None = None):
        self.samples = samples
        self.groups = groups
        self.lengths = samples.lengths
        if groups is not None:
            self.lengths = torch.stack([samples.lengths[list(group)].sum() for group in groups])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        return [self.samples[sample] for sample in ([index] if self.groups is None else self.groups[index])]


def make_rows(samples: Samples, packing: bool, max_seq_length: int, seed: int) -> Rows:
    """Packed sequences of at most `max_seq_length` tokens, or one sequence per sample."""
    return Rows(samples, pack(samples.lengths, max_seq_length, seed) if packing else None)


def pack(lengths: Tensor, capacity: int, seed: int) -> list[list[int]]:
    """Pack samples into sequences of at most `capacity` tokens: the longest first, each into the first sequence with
    room (first-fit decreasing, which needs at most 11/9 of the fewest sequences possible, and one more; Dósa 2007).

    Samples of the same length are taken in a random order, so that neighbours in the data do not end up together.

    Args:
        lengths: tokens of each sample, int64, each at most `capacity`.
        capacity: tokens per sequence.
        seed: of that order.

    Returns:
        The samples of each sequence.
    """
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
    order = order[lengths[order].sort(descending=True, stable=True).indices]
    rooms = _FirstFit(len(lengths), capacity)
    rows: list[list[int]] = []
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        row = rooms.take(length)
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
    return rows


class _FirstFit:
    """The room left in each sequence, in a tree of maxima: the first with enough is found in log(sequences) steps."""

    def __init__(self, num_rows: int, capacity: int):
        self.leaves = 1
        while self.leaves < max(num_rows, 1):
            self.leaves *= 2
        self.room = [capacity] * (2 * self.leaves)

    def take(self, length: int) -> int:
        """Take `length` from the first sequence that has it; returns its number."""
        node = 1
        assert length <= self.room[node], (length, self.room[node])
        while node < self.leaves:
            node = 2 * node if self.room[2 * node] >= length else 2 * node + 1
        row = node - self.leaves
        self.room[node] -= length
        while node > 1:
            node //= 2
            self.room[node] = max(self.room[2 * node], self.room[2 * node + 1])
        return row

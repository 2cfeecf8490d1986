"""Sequences of one sample each, or of several: by first-fit-decreasing packing, or of texts that go on from one to the
next; and the order in which ranks see them.

Which sequences make up global batch n depends on the seed and the global batch size alone, never on how many ranks or
accumulation steps they are distributed over.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from .record_kinds import PIECES
from .samples import Origin, Sample, Samples, column_of
from .truncation import WRAPPED, Packing

T = TypeVar("T")

# transformers' LengthGroupedSampler sorts by length within as many batches
_GROUPED_BATCHES = 50


class Rows(Sequence[list[Sample]]):
    """What a batch is made of: each entry is one of the samples, of as many sequences as its kind has, or one sequence
    into which several were packed, one after the other.

    Attributes:
        samples: all of them.
        groups: for each sequence the indices of its samples; None when entry i is sample i.
        lengths: tokens of each sequence, or of the longest one of each entry, int64.
        num_sequences: of a batch that each entry becomes.
    """

    def __init__(self, samples: Samples, groups: Sequence[Sequence[int]] | None = None):
        self.samples = samples
        self.groups = groups
        self.num_sequences = samples.kind.sequences
        self.lengths = samples.longest
        if groups is not None:
            self.num_sequences = 1
            self.lengths = torch.stack([samples.lengths[list(group)].sum() for group in groups])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        return [sample for number in self.numbers(index) for sample in self.samples.entry(number)]

    def numbers(self, index: int) -> Sequence[int]:
        """The numbers of an entry's samples."""
        return [index] if self.groups is None else self.groups[index]

    def sequences(self, index: int) -> list[list[Sample]]:
        """What of it becomes sequences of a batch."""
        return [self[index]] if self.num_sequences == 1 else [[sample] for sample in self[index]]


class WrappedTexts(Samples):
    """Texts in the pieces that packed sequences have of them, each an entry.

    The table has them in other pieces, those of --truncation split, of which as few are read at a time as it takes.

    Args:
        samples: of plain text, all of whose tokens are trained on.
        groups: of each sequence the pieces, as `wrap` gives them.
    """

    kind = PIECES

    def __init__(self, samples: Samples, groups: Sequence[Sequence["Piece"]]):
        super().__init__(samples.dataset, [_of_texts(origin) for origin in samples.origins])
        self._pieces = torch.tensor([piece for group in groups for piece in group], dtype=torch.int64)
        self._first_lines, self._text_lengths = _texts(samples)
        # lines of a text share a token
        self._begins = torch.cat([torch.zeros(1, dtype=torch.int64), (self.lengths - 1).cumsum(0)])
        texts, begins, ends = self._pieces.unbind(1)
        self.lengths = self.longest = ends - begins
        self.targets = self.lengths - (ends == self._text_lengths[texts]).long()
        self.is_cut = torch.zeros_like(texts)
        self.sources = samples.sources[self._first_lines[texts]]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: Any) -> Any:
        text, begin, end = self._pieces[int(index)].tolist()
        beyond = end < int(self._text_lengths[text])
        before = int(self._begins[self._first_lines[text]])
        begin, end = before + begin, before + end + beyond
        first = int(torch.searchsorted(self._begins, begin, right=True)) - 1
        last = int(torch.searchsorted(self._begins, end - 1)) - 1
        lines = [super(WrappedTexts, self).__getitem__(line) for line in range(first, last + 1)]
        inside = slice(begin - int(self._begins[first]), end - int(self._begins[first]))
        tokens, is_trained, weights = (
            [value for at, of_line in enumerate(values) for value in (of_line or ())[at > 0 :]][inside]
            for values in zip(*((line.tokens, line.is_trained, line.weights) for line in lines), strict=True)
        )
        return Sample(tokens, is_trained, weights or None, beyond=beyond)


Piece = tuple[int, int, int]
"""The number of a text, and where in it a piece begins and ends, in tokens."""


def _texts(samples: Samples) -> tuple[Tensor, Tensor]:
    """Of each text its first line in the table, and its tokens, int64."""
    lengths = column_of(samples.dataset, "full_length")  # 0 in a text's further lines
    first_lines = lengths.nonzero().flatten()
    return first_lines, lengths[first_lines]


def _of_texts(origin: Origin) -> Origin:
    """The same, without the pieces that the table has."""
    used = origin.split - origin.without_target - len(origin.bad)
    return replace(origin, rows=origin.split, split=0, used=used)


def wrap(lengths: Tensor, capacity: int, seed: int) -> list[list[Piece]]:
    """Lay texts into sequences of exactly `capacity` tokens, but for the last, in a random order: one that does not fit
    goes on in the next sequence. What a sequence has of a text also predicts the token behind it, so that every token
    of a text is in one sequence, and all but the first are predicted once.

    Args:
        lengths: tokens of each text, int64.
        seed: of the order.
    """
    rows: list[list[Piece]] = []
    room = 0
    for text in torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist():
        begin, length = 0, int(lengths[text])
        # the last token predicts nothing: no sequence begins with it alone
        while begin < length - 1:
            if room == 0:
                rows.append([])
                room = capacity
            end = min(begin + room, length)
            rows[-1].append((text, begin, end))
            room -= end - begin
            begin = end
    return rows


def make_rows(samples: Samples, packing: Packing, max_seq_length: int, seed: int) -> Rows:
    """Packed sequences of at most `max_seq_length` tokens, of pairs twice as many; or an entry for each sample."""
    if packing == WRAPPED:
        pieces = wrap(_texts(samples)[1], max_seq_length, seed)
        ends = list(itertools.accumulate(map(len, pieces), initial=0))
        return Rows(WrappedTexts(samples, pieces), [range(*edges) for edges in itertools.pairwise(ends)])
    capacity = samples.kind.sequences * max_seq_length
    return Rows(samples, pack(samples.room(max_seq_length), capacity, seed) if packing else None)


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


@dataclass(frozen=True, eq=False)
class DataOrder:
    """Which sequences each step sees, and in it each reader and each micro-batch.

    Attributes:
        num_rows: sequences in the data set.
        num_readers, per_device, accumulation: how a global batch is distributed. A reader is a rank, or a
            context-parallel (CP) group.
        seed: of the order; every epoch is a permutation of its own.
        lengths: tokens of each sequence, to put sequences of like length into the same batch; None leaves the order
            random.
        sequences_per_step: of a global batch, where it is not as many as readers take in `accumulation` micro-batches.
    """

    num_rows: int
    num_readers: int
    per_device: int
    accumulation: int
    seed: int
    lengths: Tensor | None = None
    sequences_per_step: int | None = None

    @property
    def global_batch_size(self) -> int:
        if self.sequences_per_step is not None:
            return self.sequences_per_step
        return self.num_readers * self.per_device * self.accumulation

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_rows / self.global_batch_size)

    def global_batch(self, step: int) -> list[int]:
        """Numbers of the sequences of global batch `step`, from 0 on. The last of an epoch may be short; no sequence is
        dropped."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.global_batch_size
        rows: list[int] = _epoch(self, epoch)[start : start + self.global_batch_size].tolist()
        return rows

    def micro_batches(self, step: int, reader: int) -> list[list[int]]:
        """Numbers of the sequences of each micro-batch of a reader in a step: equally many micro-batches for all
        readers, some perhaps empty."""
        return share_out(self.global_batch(step), self.num_readers, self.per_device, reader)


def share_out(rows: list[T], num_readers: int, per_device: int, reader: int) -> list[list[T]]:
    """The sequences of each micro-batch of one reader: dealt out in turn, so that none gets two more than another."""
    size = num_readers * per_device
    return [rows[start : start + size][reader::num_readers] for start in range(0, len(rows), size)]


@lru_cache(maxsize=2)
def _epoch(order: DataOrder, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(order.seed + epoch)
    rows = torch.randperm(order.num_rows, generator=generator)
    if order.lengths is None:
        return rows
    size = order.global_batch_size
    groups = rows.split(size * _GROUPED_BATCHES)
    by_length = [group[order.lengths[group].sort(descending=True, stable=True).indices] for group in groups]
    batches = [batch for group in by_length for batch in group.split(size)]
    # the short batch stays last, and the batch with the longest sequence of all comes first: what does not fit fails at
    # once
    whole = len(batches) if len(batches[-1]) == size else len(batches) - 1
    mixed = torch.randperm(whole, generator=generator).tolist() + list(range(whole, len(batches)))
    longest = max(range(whole), key=lambda b: int(order.lengths[batches[b]].max()), default=0)  # type: ignore[index]
    mixed.insert(0, mixed.pop(mixed.index(longest)))
    return torch.cat([batches[b] for b in mixed])

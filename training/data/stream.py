"""Data that are read, tokenized and packed while a run trains: `--streaming`.

Records are taken in the order of the files, for ever, in windows of --shuffle-buffer of them. Each window is tokenized,
packed and shuffled by itself, by the seed and its number. So it can be made again from where it begins, which is all
that a checkpoint records. Every rank reads everything and takes its part, which needs no exchange: the sequences of a
global batch are the same on any number of ranks.
"""

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ...moe.util.errors import ExpertMeshError
from ...moe.util.terminal import folded
from .data_files import RowSource
from .sample_cache import left_out, samples_in_memory
from .sequences import Rows, make_rows
from .tokenizing import DataOptions, records_of
from .truncation import Packing

_STATES = 8
"""So many steps' are kept: batches are made up to three steps ahead."""
_PREFIX = "stream_"

Entry = tuple[Rows, int]
"""A sequence: the number of it among others."""


@dataclass(frozen=True)
class StreamPosition:
    """Where a window begins, and what of it was taken.

    epoch: passes over all files before. file: its number. record: records of this file before it. window: its number.
    taken: sequences of it that were in batches. bad: records of this pass before it that were left out, as they cannot
    be used.
    """

    epoch: int = 0
    file: int = 0
    record: int = 0
    window: int = 0
    taken: int = 0
    bad: int = 0

    def state(self) -> dict[str, int]:
        """For a checkpoint; `place_in` brings it back."""
        return {_PREFIX + name: value for name, value in asdict(self).items()}


def place_in(state: Mapping[str, int]) -> StreamPosition:
    """
    Raises:
        ExpertMeshError: the checkpoint is of a run that did not stream.
    """
    found = {name.removeprefix(_PREFIX): value for name, value in state.items() if name.startswith(_PREFIX)}
    if not found:
        raise ExpertMeshError("--streaming: the run to resume had its data in the cache; leave --streaming out")
    return StreamPosition(**found)


@dataclass(frozen=True)
class Window:
    """rows: its sequences. order: in which they are taken. begin: where it begins. ends_epoch: whether the last record
    of all files is in it."""

    rows: Rows
    order: list[int]
    begin: StreamPosition
    ends_epoch: bool


class Stream:
    """Windows of records, and batches of them.

    Args:
        flag: that named the files, for messages.
        files: in their order.
        size: records of a window.
        seed: of its shuffling and packing.

    Attributes:
        first: the first window, by which data are described and compared.
        begin: where batches begin (see `begin_at`).
        tells: whether records that are left out, as they cannot be used, are printed behind the first window.
    """

    def __init__(
        self,
        flag: str,
        files: Sequence[RowSource],
        tokenizer: Any,
        options: DataOptions,
        packing: Packing,
        size: int,
        seed: int,
    ):
        import datasets

        datasets.disable_progress_bars()  # there would be one for each window
        self.flag, self.files, self.tokenizer, self.options = flag, files, tokenizer, options
        self.packing, self.size, self.seed = packing, size, seed
        self.tells = False
        self._left_out: set[str] = set()
        self.first = next(self.windows(StreamPosition()))
        self.begin = StreamPosition()
        self._places = {0: self.begin}
        self._epochs: dict[int, int] = {}
        self._batches: Iterator[list[Entry]] | None = None

    @property
    def facts(self) -> dict[str, str]:
        """Of all files, beside what is compared of the first window."""
        return {
            "shuffle buffer": f"{self.size:,}",
            "files": f"{len(self.files):,}",
            "bytes": f"{sum(file.size for file in self.files):,}",
        }

    def begin_at(self, step: int, place: StreamPosition) -> None:
        """Have batches begin with that of a step, at the place that a checkpoint has recorded of it."""
        self.begin, self._places = place, {step: place}

    @property
    def left_out(self) -> int:
        """How many records were left out so far, as they cannot be used."""
        return len(self._left_out)

    def place(self, step: int) -> StreamPosition:
        """Where the batch of a step begins: the first one, or one before which a batch was made."""
        return self._places[step]

    def epoch(self, step: int) -> int:
        """Complete passes over all files in the batches before that of a step, once the one before it was made."""
        return self._epochs[step]

    def batch(self, step: int, size: int) -> list[Entry]:
        """The sequences of a global batch; those of steps one after the other, the first of which begins at `begin`."""
        if self._batches is None:
            self._batches = self._all_batches(step, size)
        return next(self._batches)

    def windows(self, begin: StreamPosition) -> Iterator[Window]:
        """From a place on, for ever.

        Raises:
            ExpertMeshError: a record is malformed, or none has anything to learn.
        """
        records: list[dict[str, Any]] = []
        since = begin
        for (place, record), (_, following) in itertools.pairwise(self._records(begin)):
            records += [] if record is None else [record]
            if len(records) == self.size or (record is None and records):
                window, bad = self._window(records, begin, ends_epoch=record is None or following is None)
                if window is not None:
                    yield window
                    since = place
                # a window ends with its pass
                bad = 0 if place.epoch > begin.epoch else begin.bad + bad
                begin, records = replace(place, window=begin.window + 1, bad=bad), []
            elif record is None:
                begin = replace(place, window=begin.window)
            if record is None and place.epoch > since.epoch + 1:
                raise ExpertMeshError(
                    f"{self.flag}: no record has a trained token within --max-seq-length {self.options.max_seq_length}"
                )

    def _records(self, begin: StreamPosition) -> Iterator[tuple[StreamPosition, dict[str, Any] | None]]:
        """Records, each with the place behind it; None at the end of each epoch."""
        epoch, first, before = begin.epoch, begin.file, begin.record
        while True:
            for number in range(first, len(self.files)):
                records = records_of(self.files[number], self.flag, self.options)
                for count, record in enumerate(records, start=1):
                    if count > before:
                        yield StreamPosition(epoch, number, count), record
                before = 0
            epoch, first = epoch + 1, 0
            yield StreamPosition(epoch), None

    def _window(
        self, records: list[dict[str, Any]], begin: StreamPosition, ends_epoch: bool
    ) -> tuple[Window | None, int]:
        """A window, None where there is nothing to learn, and how many of its records are left out."""
        options = replace(self.options, skip_bad_records=self.options.skip_bad_records - begin.bad)
        samples, bad = samples_in_memory(records, self.flag, self.tokenizer, options)
        new = [each for each in bad if each not in self._left_out]
        self._left_out.update(new)
        for line in left_out(self.flag, new) if self.tells else ():
            print(folded(line), file=sys.stderr, flush=True)
        if samples is None:
            return None, len(bad)
        seed = self.seed + begin.window
        rows = make_rows(samples, self.packing, self.options.max_seq_length, seed)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
        return Window(rows, order, begin, ends_epoch), len(bad)

    def _all_batches(self, step: int, size: int) -> Iterator[list[Entry]]:
        windows, taken = _ahead(self.windows(replace(self.begin, taken=0))), self.begin.taken
        window = next(windows)
        while True:
            entries: list[Entry] = []
            while len(entries) < size:
                if taken >= len(window.order):
                    window, taken = next(windows), 0
                numbers = window.order[taken : taken + size - len(entries)]
                entries += [(window.rows, number) for number in numbers]
                taken += len(numbers)
            step += 1
            self._places[step] = replace(window.begin, taken=taken)
            self._epochs[step] = window.begin.epoch + (window.ends_epoch and taken == len(window.order))
            for kept in (self._places, self._epochs):
                kept.pop(step - _STATES, None)
            yield entries


def _ahead(windows: Iterator[Window]) -> Iterator[Window]:
    """The same; a thread makes the next one while one is in use."""
    pool = ThreadPoolExecutor(1)
    following = pool.submit(next, windows)
    while True:
        window = following.result()
        following = pool.submit(next, windows)
        yield window

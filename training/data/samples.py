"""Tokenised samples: read, rendered and tokenised once, then kept between runs in a directory of our own in the cache
of `datasets`."""

import copy
import errno
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from ...checkpoints.files.kept import damage, record_kept, recorded_files, recorded_key
from ...moe.util.child import cores
from ...moe.util.errors import ExpertMeshError
from ...moe.util.progress import CountedProgress
from ...moe.util.versions import installed_version
from .chat import DROPS_REASONING, TrainOn, render, set_chat_template, tokenize, trained_messages
from .data_files import (
    KINDS,
    DatasetSpec,
    PlacedRow,
    RowError,
    RowPlace,
    RowSource,
    SampleBy,
    open_rows,
    parse_datasets,
)
from .encoding import encode_texts
from .formats import Columns, Conversation, PlainText, registered_formats
from .image_files import changed_images, identity, kept_file, kept_images, parts_of_record, record_of, samples_cache
from .labels import DESIRABLE, LABELLED_ANSWERS, PROMPT_HASH
from .pairs import FIRST, FIRST_TARGETS, PAIRS
from .pictures import COLUMNS, MORE_COLUMNS, ImageProcessor, Picture, check_unread
from .record_kinds import CONVERSATIONS, RECORD, RecordKind, Said
from .templates import reads_clock
from .truncation import Calls, Tokenized, Truncation, shortened, truncate

# raise it when the same input gives other tokens, so that what an older version has cached is not taken
_VERSION = 23
# one process tokenises this many records in less time than it takes to start more
_ROWS_A_WORKER = 5_000
_ROWS_WITH_IMAGES_A_WORKER = 100
_SURROGATE = re.compile(r"\\ud[89a-f]")
_BATCH_BYTES = 64 * 2**20
SAMPLES_AT_ONCE = 1000
_LONGEST = 10
"""So many records are told of as the longest."""
_BAD_TOLD = 10
"""So many of those that cannot be used."""
_OF_ROWS = ("place", "format", "is_plain", "told", "bad", "content")
"""Columns of records that are read, which those of their tokens do not have."""
_PLACE, _DELETE = "{}: tokenized samples cannot be", "delete that directory, and it is made again"


@dataclass(frozen=True)
class Sample:
    """tokens, and for each whether it is trained on, that is, whether it is a target of the token before it; and the
    weight of its loss, where one is not 1. images: in their order."""

    tokens: list[int]
    is_trained: list[bool]
    weights: list[float] | None = None
    images: Sequence[Picture] = ()

    @classmethod
    def of_prompt(cls, tokens: list[int], prompt_length: int) -> "Sample":
        """A prompt, on which there is no loss, and what follows it."""
        return cls(tokens, [position >= prompt_length for position in range(len(tokens))])


@dataclass(frozen=True)
class DataOptions:
    """How records become tokens.

    columns: where they are not the usual ones. prompt_template: if not empty, a question is written into it in place
    of {prompt} and the answer follows, without a chat template; backslash and n stand for a line break.
    train_on: which turns have a loss. max_seq_length: of longer samples, `truncation` says what is kept. hub_config,
    split: of a hub data set. num_workers: processes that tokenise; None chooses by the number of records. sample_by:
    what is a record of a .txt. template_date: see `Written`. kind: what a record is. images: the processor; None:
    records with images are refused. fetches: whether they are taken from the web. skip_bad_records: so many that
    cannot be used are left out.
    """

    max_seq_length: int
    columns: Columns = field(default_factory=Columns)
    prompt_template: str = ""
    train_on: TrainOn = "assistant"
    hub_config: str = ""
    split: str = "train"
    num_workers: int | None = None
    sample_by: SampleBy = "line"
    template_date: str = ""
    kind: RecordKind = CONVERSATIONS
    images: ImageProcessor | None = None
    fetches: bool = False
    truncation: Truncation = "right"
    skip_bad_records: int = 0


@dataclass(frozen=True)
class Noted:
    """Records, or files, of which a run tells: how many, and where the first one is."""

    number: int
    first: str


@dataclass(frozen=True)
class Origin:
    """What became of one data set: its records, those with nothing to learn (left out), those cut, those then used.

    too_long, untrained: those left out: of a prompt that leaves no room for an answer, and without an answer to train
    on. empty: those with an answer that says nothing, which are trained on. unread: files beside those that were read.
    is_plain: whether no chat template was used. endless: samples that are not cut in which no special token is trained
    on, so that nothing in them teaches the model to end. ends: tokens that are trained on as the end of an answer.
    weighted: samples in which some losses have another weight than 1. split: records that `rows` were made of by
    --split-turns, or by --truncation split; 0 where each is one sample. images_cut: those used that lost images to
    max_seq_length. calls_cut: those that lost an answer, as one of its tool calls would have been cut. dropped: those
    left out as too long. told: what reading says of some, in words that follow their number. lengths: of texts in
    tokens, before any is cut, each with how many have it, in order. lost: tokens of those that are cut, or left out for
    their length. untrained_tokens: those of samples without a trained one. bad: records that cannot be used, left out:
    where each is, and why. longest: records, with their tokens and places.
    """

    name: str
    format: str
    is_plain: bool
    rows: int
    without_target: int
    cut: int
    endless: int
    used: int
    ends: tuple[int, ...] = ()
    weighted: int = 0
    split: int = 0
    too_long: Noted | None = None
    untrained: Noted | None = None
    empty: Noted | None = None
    unexplained: Noted | None = None
    images_cut: Noted | None = None
    calls_cut: Noted | None = None
    dropped: Noted | None = None
    unread: Noted | None = None
    told: Sequence[tuple[str, Noted]] = ()
    lengths: Sequence[tuple[int, int]] = ()
    lost: int = 0
    untrained_tokens: int = 0
    bad: Sequence[str] = ()
    longest: Sequence[tuple[int, str]] = ()

    @property
    def tokens(self) -> int:
        """Of all texts, before any is cut."""
        return sum(length * number for length, number in self.lengths)


class Samples(Sequence[Sample]):
    """Tokenised samples of one or several data sets, in a fixed order: of conversations and plain text, each entry one
    sample. A class made of it holds what another kind of record becomes.

    Attributes:
        kind: what they were.
        lengths: tokens of each, int64. longest: of its longest sequence in a batch that is not packed.
        targets: trained tokens of each, int64.
        is_cut: 1 for those that lost their end to max_seq_length, int64.
        origins: where they come from. sources: of each, the number of its origin, int64.
    """

    kind = CONVERSATIONS

    def __init__(self, dataset: Any, origins: list[Origin]):
        self.dataset = dataset
        self.origins = origins
        self.lengths = self.longest = _column(dataset, "length")
        self.targets = _column(dataset, "num_targets")
        self.is_cut = _column(dataset, "is_cut")
        self.sources = torch.zeros(len(dataset), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        row = self.dataset[int(index)]
        return Sample(row["tokens"], row["is_trained"], row["weights"] or None, _images_of(row))

    def entry(self, index: int) -> list[Sample]:
        """All samples of one."""
        return [self[index]]

    def room(self, max_seq_length: int) -> Tensor:
        """Tokens that each takes in a packed sequence, int64."""
        return self.lengths

    @property
    def beside(self) -> dict[str, bytes]:
        """What they hold beside tokens, targets and weights, by name, to be compared."""
        return {}

    @property
    def is_weighted(self) -> bool:
        """Whether some losses have another weight than 1."""
        return any(origin.weighted for origin in self.origins)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the origins, as short as tells them apart."""
        given = [origin.name for origin in self.origins]
        short = [PurePath(name).stem if PurePath(name).suffix in KINDS else PurePath(name).name for name in given]
        names = [one if short.count(one) == 1 else name for one, name in zip(short, given, strict=True)]
        return tuple(name if names.count(name) == 1 else f"{name}#{n}" for n, name in enumerate(names, 1))

    @property
    def ends(self) -> list[int]:
        """Tokens with which answers end in them."""
        return sorted({token for origin in self.origins for token in origin.ends})

    @property
    def token_ids(self) -> set[int]:
        """All that occur in them."""
        table = self.dataset.select_columns(["tokens"]).with_format("arrow")
        found: set[int] = set()
        for batch in table.iter(batch_size=SAMPLES_AT_ONCE):
            found.update(batch["tokens"].combine_chunks().flatten().unique().to_pylist())
        return found

    @property
    def tokens_of_images(self) -> Tensor:
        """How many tokens each image takes, in the order of samples, int64."""
        return torch.tensor([tokens for own in self._image_tokens for tokens in own], dtype=torch.int64)

    @property
    def num_images(self) -> int:
        """How many images they have."""
        return sum(map(len, self._image_tokens))

    @property
    def most_image_tokens(self) -> int:
        """Those of the sample that has the most."""
        return max(map(sum, self._image_tokens), default=0)

    @property
    def image_digests(self) -> list[str] | None:
        """Checksums of the files of all images, in the order of samples; None: the data were read as text alone."""
        if not self._sees_images:
            return None
        rows = zip(self.dataset["images"], self.dataset["image_edges"], strict=True)
        return [parts_of_record(each)[1] for own, edges in rows for each in own[: len(edges) // 2]]

    @property
    def _image_tokens(self) -> list[list[int]]:
        edges = self.dataset["image_edges"] if self._sees_images else []
        return [[end - begin for begin, end in zip(own[::2], own[1::2], strict=True)] for own in edges]

    @property
    def _sees_images(self) -> bool:
        return "images" in self.dataset.column_names

    @property
    def records(self) -> Tensor:
        """A number for each, the same for those that were one record, int64."""
        if RECORD not in self.dataset.column_names:
            return torch.arange(len(self))
        return torch.unique_consecutive(_column(self.dataset, RECORD), return_inverse=True)[1]

    def select(self, indices: Sequence[int], origins: list[Origin] | None = None) -> "Samples":
        """Those at `indices`, in that order."""
        selected = type(self)(self.dataset.select(indices), self.origins if origins is None else origins)
        selected.sources = self.sources[torch.as_tensor(indices, dtype=torch.int64)]
        return selected


class Pairs(Samples):
    """Preference pairs; as a sample by itself each is its chosen one.

    Attributes:
        lengths, targets: of both sides together. is_cut: whether one of them is.
        targets_P2: trained tokens of the chosen and of the rejected one, int64.
    """

    kind = PAIRS

    def __init__(self, dataset: Any, origins: list[Origin]):
        super().__init__(dataset, origins)
        first, first_targets = _column(dataset, FIRST), _column(dataset, FIRST_TARGETS)
        self.targets_P2 = torch.stack([first_targets, self.targets - first_targets], dim=1)
        self.longest = torch.maximum(first, self.lengths - first)

    def __getitem__(self, index: Any) -> Any:
        return self.entry(int(index))[0]

    def entry(self, index: int) -> list[Sample]:
        """The chosen and the rejected one."""
        row = self.dataset[index]
        sides = (slice(0, row[FIRST]), slice(row[FIRST], None))
        return [Sample(row["tokens"][side], row["is_trained"][side]) for side in sides]


class Labelled(Samples):
    """Answers that are labelled.

    Attributes:
        is_desirable: of each, whether it is. prompts: tokens before each answer, int64.
        shift: the longest run of samples with one prompt.
        partners: of each, the sample whose answer stands behind its prompt in place of its own, int64.
    """

    kind = LABELLED_ANSWERS

    def __init__(self, dataset: Any, origins: list[Origin]):
        super().__init__(dataset, origins)
        self.is_desirable = _column(dataset, DESIRABLE).bool()
        self.prompts = _column(dataset, FIRST)
        prompts = _column(dataset, PROMPT_HASH)
        self.shift = int(torch.unique_consecutive(prompts, return_counts=True)[1].max())
        self.partners = _partners(prompts, self.shift)

    def room(self, max_seq_length: int) -> Tensor:
        """Of the longer one of the prompt's answers: its own, or the other one."""
        mismatched = self.prompts + (self.lengths - self.prompts)[self.partners]
        return torch.maximum(self.lengths, mismatched.clamp(max=max_seq_length))

    @property
    def beside(self) -> dict[str, bytes]:
        labels: bytes = self.is_desirable.numpy().tobytes()
        # what follows from the order of the samples is told by that
        is_rotated = torch.equal(self.partners, torch.arange(len(self)).roll(self.shift))
        return {"labels": labels if is_rotated else labels + self.partners.numpy().tobytes()}

    def partner(self, index: int) -> int:
        """The sample whose answer stands behind this one's prompt."""
        return int(self.partners[index])

    def mismatched(self, index: int) -> Sample:
        """A prompt, and the answer to another one."""
        asked, told = self.dataset[index], self.dataset[self.partner(index)]
        tokens, is_trained = (
            asked[name][: asked[FIRST]] + told[name][told[FIRST] :] for name in ("tokens", "is_trained")
        )
        return Sample(tokens, is_trained)


_SAMPLES: dict[str, type[Samples]] = {each.kind.name: each for each in (Pairs, Labelled)}


def _partners(prompts: Tensor, shift: int) -> Tensor:
    """For each sample one with another prompt, if there is any: as far before it as the longest run of samples with one
    prompt. Where that has the same prompt, all are taken prompt by prompt, as far back as the most frequent one has
    samples: so each is taken once, unless more than half have one prompt.

    Args:
        prompts: of each sample, as a number.
        shift: that longest run.
    """
    partners = torch.arange(len(prompts)).roll(shift)
    if shift == len(prompts) or not (prompts[partners] == prompts).any():
        return partners
    first: dict[int, int] = {}
    begun = torch.tensor([first.setdefault(prompt, at) for at, prompt in enumerate(prompts.tolist())])
    by_prompt = begun.sort(stable=True).indices
    partners[by_prompt] = by_prompt.roll(int(begun.bincount().max()))
    alike = (prompts[partners] == prompts).nonzero().flatten()
    if len(alike):
        others = (prompts != prompts[alike[0]]).nonzero().flatten()
        partners[alike] = others[torch.arange(len(alike)) % len(others)]
    return partners


def _column(dataset: Any, name: str) -> Tensor:
    values = dataset.with_format("numpy")[name][:]
    return torch.tensor(values, dtype=torch.int64)


def load_samples(
    flag: str,
    entries: list[str],
    tokenizer: Any,
    options: DataOptions,
    seed: int,
    checks: bool = True,
    repeats: bool = False,
) -> Samples:
    """Read and tokenise data sets, and mix them if they have weights.

    Args:
        flag: that named them, for messages.
        entries: paths or hub ids, each perhaps with `:weight`.
        tokenizer: a fast one, its chat template set (see `set_chat_template`).
        options: how records become tokens.
        seed: of the choice of records where weights leave some out.
        checks: whether what the cache holds is compared with its checksums.
        repeats: whether a mixture ends with the data set that is the last to be used up, not with the first.

    Raises:
        ExpertMeshError: a data set is missing, empty or malformed (with the line), a record has none of the known
            formats or does not fit the chat template, or nothing is left to learn.
    """
    check_fast(flag, tokenizer)
    specs = parse_datasets(flag, entries)
    own = [_own_of(spec, tokenizer, options) for spec in specs]
    sources = [
        open_rows(flag, spec.name, each.hub_config, each.split, each.sample_by)
        for spec, (_, each) in zip(specs, own, strict=True)
    ]
    parts = [_tokenised(source, flag, *each, checks) for source, each in zip(sources, own, strict=True)]
    return _mix(flag, specs, parts, seed, repeats)


def _own_of(spec: DatasetSpec, tokenizer: Any, options: DataOptions) -> tuple[Any, DataOptions]:
    """The tokenizer and the options of a data set, with what is its own."""
    options = replace(
        options,
        split=spec.split or options.split,
        columns=replace(options.columns, system_message=spec.system or options.columns.system_message),
    )
    if not spec.chat_template:
        return tokenizer, options
    tokenizer = copy.copy(tokenizer)
    set_chat_template(tokenizer, spec.chat_template)
    return tokenizer, options if reads_clock(tokenizer) else replace(options, template_date="")


def check_fast(flag: str, tokenizer: Any) -> None:
    """
    Raises:
        ExpertMeshError: the tokenizer does not tell where a token stands in the text.
    """
    if not tokenizer.is_fast:
        raise ExpertMeshError(f"{flag}: the tokenizer is a slow one, without token offsets; give a fast tokenizer")


def hold_out(samples: Samples, ratio: float, seed: int) -> tuple[Samples, Samples]:
    """(to train on, to evaluate on): a random `ratio` of the samples, at least one, is held out. Those that were one
    record stay together.

    Raises:
        ExpertMeshError: nothing would be left to train on.
    """
    records = samples.records
    total = int(records[-1]) + 1
    number = max(round(total * ratio), 1)
    if number >= total:
        raise ExpertMeshError(f"--eval-ratio {ratio} takes all {len(samples)} samples and leaves none to train on")
    is_held_out = torch.isin(records, torch.tensor(_shuffled(total, seed)[:number]))
    parts = (samples.select(which.nonzero().flatten().tolist()) for which in (~is_held_out, is_held_out))
    return next(parts), next(parts)


def _mix(flag: str, specs: list[DatasetSpec], parts: list[Samples], seed: int, repeats: bool) -> Samples:
    """All of every data set; or, with weights, as many of each as makes up its weight: all of the scarcest one, or, if
    the others are repeated, all of the one that is the last to be used up."""
    import datasets

    if specs[0].weight is not None:
        numbers = numbers_used([len(part) for part in parts], [spec.weight or 1 for spec in specs], repeats)
        parts = [_take(part, n, seed + i) for i, (part, n) in enumerate(zip(parts, numbers, strict=True))]
    origins = [origin for part in parts for origin in part.origins]
    mixed = type(parts[0])(datasets.concatenate_datasets([part.dataset for part in parts]), origins)
    mixed.sources = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(part) for part in parts]))
    return mixed


def numbers_used(lengths: Sequence[int], weights: Sequence[float], repeats: bool) -> list[int]:
    """How many samples a mixture takes of data sets of so many."""
    scales = [length / weight for length, weight in zip(lengths, weights, strict=True)]
    wanted = [max(round((max if repeats else min)(scales) * weight), 1) for weight in weights]
    return wanted if repeats else list(map(min, wanted, lengths))


def _take(part: Samples, number: int, seed: int) -> Samples:
    """So many of the samples, each as often as another, or once more."""
    (origin,) = part.origins
    times, more = divmod(number, len(part))
    chosen = sorted([*range(len(part))] * times + _shuffled(len(part), seed)[:more])
    return part.select(chosen, [Origin(**{**vars(origin), "used": number})])


def _shuffled(number: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(number, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def records_of(source: RowSource, flag: str, options: DataOptions) -> Iterator[dict[str, Any]]:
    """What `samples_in_memory` takes of a file."""
    return _records(source, flag, options)


def samples_in_memory(
    records: list[dict[str, Any]], flag: str, tokenizer: Any, options: DataOptions
) -> tuple[Samples | None, Sequence[str]]:
    """Samples of some records, which are in no cache, None where there is nothing to learn; and which are left out, as
    they cannot be used."""
    from datasets import Dataset

    rows = Dataset.from_list(records)
    name = f"{len(rows):,} records from {rows[0]['place'].removeprefix(flag).strip()}"
    _bad_ones(rows, rows, flag, name, options)
    tokenize_batch, size = _tokenize_batch(tokenizer, options), _batch_size(rows)
    spans = [range(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
    tables = [tokenize_batch(rows[span.start : span.stop], list(span)) for span in spans]
    table = {name: [value for part in tables for value in part[name]] for name in tables[0]}
    tokens = Dataset.from_dict(table, features=_features(options))
    bad = _bad_ones(rows, tokens, flag, name, options)
    has_targets = any(table["num_targets"])
    return _samples(rows, tokens, flag, name, options, ()) if has_targets else None, bad


def _bad_ones(rows: Any, table: Any, flag: str, name: str, options: DataOptions) -> tuple[str, ...]:
    """Where records stand that cannot be used, and why.

    Args:
        table: of the records, or of what became of them.

    Raises:
        ExpertMeshError: there are more than may be left out.
    """
    numbers = np.flatnonzero(table.data.column("bad").to_numpy() != "").tolist()
    row_of = numbers if rows is table else [table[number]["row"] for number in numbers]
    bad = [f"{rows[row]['place']}{table[number]['bad']}" for number, row in zip(numbers, row_of, strict=True)]
    if len(bad) <= options.skip_bad_records:
        return tuple(bad)
    if len(bad) == 1:
        raise ExpertMeshError(bad[0])
    few = [each.removeprefix(f"{flag} {name}: ") for each in bad[:_BAD_TOLD]]
    more = f", more than --skip-bad-records {options.skip_bad_records}" if options.skip_bad_records else ""
    raise ExpertMeshError(
        f"{flag} {name}: {len(bad):,} of {len(rows):,} records cannot be used{more}; the first {len(few)}: "
        f"{'; '.join(few)}; mend them, or leave them out with --skip-bad-records {len(bad)}"
    )


def left_out(name: str, bad: Sequence[str]) -> list[str]:
    """Lines that tell of records that cannot be used."""
    lines = [f"warning: {name}: left out, as it cannot be used: {each}" for each in bad[:_BAD_TOLD]]
    more = [f"warning: {name}: {len(bad):,} records are left out in all (--skip-bad-records)"]
    return lines + (more if len(bad) > _BAD_TOLD else [])


def _tokenised(source: RowSource, flag: str, tokenizer: Any, options: DataOptions, checks: bool) -> Samples:
    """One data set, without the samples that have nothing to learn."""
    from datasets import Dataset

    rows_key, tokens_key = keys_of(source.version, options, tokenizer, source.folders)
    try:
        for key in (rows_key, tokens_key) if checks else ():
            _check_kept(rows_key, key)
        with _telling(f"reading {source.name}"):
            rows = Dataset.from_generator(
                partial(_records, source, flag, options),
                cache_dir=str(samples_cache()),
                fingerprint=rows_key,
            )
        _record_kept(rows, rows_key)
        _bad_ones(rows, rows, flag, source.name, options)
        make_tokens = partial(
            rows.map,
            _tokenize_batch(tokenizer, options),
            with_indices=True,
            batched=True,
            batch_size=_batch_size(rows),
            remove_columns=rows.column_names,
            features=_features(options),
            num_proc=_workers(len(rows), options),
            new_fingerprint=tokens_key,
        )
        with _telling(f"tokenizing {source.name}", len(rows)):
            tokens = make_tokens()
            if checks and options.images is not None and _has_other_images(tokens, tokens_key, options.fetches):
                _record_file(tokens, tokens_key).unlink(missing_ok=True)
                tokens = make_tokens(load_from_cache_file=False)
        _record_kept(tokens, tokens_key)
        _check_columns(tokens, _features(options))
        _bad_ones(rows, tokens, flag, source.name, options)
        return _samples(rows, tokens, flag, source.name, options, source.unread)
    except Exception as error:
        raise _own_error(error) from None


@contextmanager
def _telling(what: str, total: int = 0) -> Iterator[None]:
    """Say how far `datasets` is, in place of its own bars: these come at once, and are redrawn in files, too.

    Args:
        total: of records, where `datasets` knows it.
    """
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, tqdm

    def update(bar: Any, number: int = 1) -> None:
        if (bar.total or 0) == total:  # others count files
            progress.add(number)

    is_shown = not are_progress_bars_disabled()
    progress = CountedProgress(what, total, "records", is_shown)
    with progress, mock.patch.object(tqdm, "update", update):
        disable_progress_bars()
        try:
            yield
        finally:
            if is_shown:
                enable_progress_bars()


def _check_kept(rows_key: str, key: str) -> None:
    """Compare the files of a data set in the cache with their checksums, before `datasets` reads them: what it raises
    where they are damaged may be anything.

    Raises:
        ExpertMeshError: a file is damaged.
    """
    for record in samples_cache().glob(f"*/*{rows_key}/*/{key}.json"):
        of_another = "" if recorded_key(record) == key else f"{record}: is damaged, or of other data"
        if found := of_another or damage(record, recorded_files(record)):
            raise ExpertMeshError(f"{_PLACE.format(samples_cache())} read there: {found}; {_DELETE}")


def _has_other_images(tokens: Any, key: str, reads: bool) -> bool:
    """Whether images have changed since samples in the cache were made.

    Args:
        reads: whether their checksums are compared, too, unless the samples have just been made.

    Raises:
        ExpertMeshError: one that is kept in the cache is not there any more.
    """
    if not tokens.cache_files:
        return False
    reads = reads and _record_file(tokens, key).exists()
    lists = tokens.data.column("images").chunks
    others = changed_images({each for chunk in lists for each in chunk.flatten().unique().to_pylist()}, reads)
    if lost := next((path for path in others if Path(path).parent == kept_images() and not identity(path)), None):
        raise ExpertMeshError(f"{_PLACE.format(samples_cache())} used: the image {lost} is missing; {_DELETE}")
    return bool(others)


def _record_file(dataset: Any, key: str) -> Path:
    """Where the checksums of a data set in the cache are."""
    return Path(dataset.cache_files[0]["filename"]).with_name(f"{key}.json")


def _record_kept(dataset: Any, key: str) -> None:
    """Write checksums beside new files of a data set in the cache."""
    import datasets

    files = [Path(file["filename"]) for file in dataset.cache_files]
    # no rows: who looks at the columns tells of it
    if files and not (record := _record_file(dataset, key)).exists():
        files.append(record.with_name(datasets.config.DATASET_INFO_FILENAME))
        record_kept(record, key, files, writer=str(os.getpid()))


def _check_columns(tokens: Any, expected: Collection[str]) -> None:
    """
    Raises:
        pyarrow.ArrowInvalid: some are not there: a file that ends within its header is read as one without any.
    """
    import pyarrow

    if missing := sorted({*expected} - {*tokens.column_names}):
        raise pyarrow.ArrowInvalid(f"no columns {', '.join(missing)}")


def _features(options: DataOptions) -> Any:
    from datasets import Features, Value
    from datasets.features import List

    kinds = {"tokens": "int32", "is_trained": "bool", "ends": "int32", "weights": "float32", "full_lengths": "int64"}
    if options.images is not None:
        kinds |= {"images": "string", "image_edges": "int32"}
    texts: Any = {"bad": Value("string")}
    lists: Any = {name: List(Value(kind)) for name, kind in kinds.items()}
    numbers: Any = {name: Value("int32") for name in ("length", "num_targets")}
    numbers |= {name: Value("int64") for name in ("full_length", "lost", "row")}
    flags: Any = {name: Value("bool") for name in ("is_endless", "is_empty", "is_unexplained")}
    flags |= {name: Value("bool") for name in ("is_cut", "is_dropped", "loses_call", "drops_reasoning")}
    if options.images is not None:
        flags["loses_images"] = Value("bool")
    numbers |= {name: Value(kind) for name, kind in options.kind.numbers.items()}
    flags |= {name: Value("bool") for name in options.kind.flags}
    return Features(texts | lists | numbers | flags)


def _samples(rows: Any, tokens: Any, flag: str, name: str, options: DataOptions, unread: Sequence[Path]) -> Samples:
    """The samples that have something to learn.

    Args:
        rows, tokens: what `_records` gave, and what became of it.
    """
    targets, is_cut, is_dropped = (_column(tokens, name) for name in ("num_targets", "is_cut", "is_dropped"))
    learnable, bad = targets.nonzero().flatten().tolist(), _bad_ones(rows, tokens, flag, name, options)
    is_bad = torch.from_numpy(tokens.data.column("bad").to_numpy() != "")
    if not learnable and bad:
        raise ExpertMeshError(f"{bad[0]}; nor has any other record a trained token")
    if not learnable:
        raise ExpertMeshError(
            f"{flag} {name}: no record has a trained token within --max-seq-length {options.max_seq_length}"
        )
    row_of, full_length = _column(tokens, "row"), _column(tokens, "full_length")

    def place(number: int) -> str:
        found: str = rows[int(row_of[number])]["place"]
        return found

    def noted(which: Tensor, more: str = "") -> Noted | None:
        found = (which if not more else which & (_column(tokens, more) == 1)).nonzero().flatten().tolist()
        return Noted(len(found), place(found[0])) if found else None

    is_learned, is_split = targets > 0, len(tokens) > len(rows)
    is_long = (is_cut | is_dropped) == 1
    one = rows[int(row_of[learnable[0]])]
    ends = {end for chunk in tokens.data.column("ends").chunks for end in chunk.flatten().unique().to_pylist()}
    origin = Origin(
        name,
        one["format"],
        is_plain=bool(options.prompt_template) or one["is_plain"],
        rows=len(tokens),
        without_target=int((~is_learned & (is_dropped == 0) & ~is_bad).sum()),
        cut=int(is_cut.sum()),
        endless=int((_column(tokens, "is_endless")[learnable]).sum()),
        used=len(learnable),
        ends=tuple(sorted(ends)),
        weighted=sum(bool(n) for chunk in tokens.data.column("weights").chunks for n in chunk.value_lengths().tolist()),
        split=len(rows) if is_split else len({*rows[RECORD]}) if RECORD in rows.column_names else 0,
        too_long=noted(~is_learned & (is_cut == 1)),
        dropped=noted(is_dropped == 1),
        untrained=noted(~is_learned & (is_cut == 0) & (is_dropped == 0) & ~is_bad),
        empty=noted(is_learned, "is_empty"),
        unexplained=noted(is_learned, "is_unexplained"),
        images_cut=None if options.images is None else noted(is_learned, "loses_images"),
        calls_cut=noted(is_learned | (is_cut == 1), "loses_call"),
        unread=Noted(len(unread), str(unread[0])) if unread else None,
        told=_told(rows) + [(DROPS_REASONING, of) for of in [noted(is_learned, "drops_reasoning")] if of],
        bad=bad,
        lengths=_lengths(tokens),
        # what is left out for its length is lost completely
        lost=int(torch.where(is_learned, _column(tokens, "lost"), full_length)[is_long].sum()),
        untrained_tokens=int(full_length[~is_learned & ~is_long].sum()),
        longest=tuple(
            (int(full_length[at]), place(at))
            for at in full_length.sort(descending=True, stable=True).indices[:_LONGEST].tolist()
            if full_length[at]
        ),
    )
    kept = tokens if len(learnable) == len(tokens) else tokens.select(learnable)
    return _SAMPLES.get(options.kind.name, Samples)(kept, [origin])


def _lengths(tokens: Any) -> tuple[tuple[int, int], ...]:
    """Each length of texts in tokens, before any is cut, with how many have it, in order."""
    values = [chunk.flatten().to_numpy() for chunk in tokens.data.column("full_lengths").chunks]
    lengths, numbers = torch.from_numpy(np.concatenate(values)).unique(return_counts=True)
    return tuple(zip(lengths.tolist(), numbers.tolist(), strict=True))


def _told(rows: Any) -> list[tuple[str, Noted]]:
    """What reading says of records, each with how many and where the first one is."""
    found: dict[str, list[int]] = {}
    column = rows.with_format("arrow")["told"][:]
    for counted in column.value_counts().to_pylist():
        first = column.index(counted["values"]).as_py()
        for said in filter(None, counted["values"].split("\n")):
            found.setdefault(said, []).extend([counted["counts"], first])
    return [(said, Noted(sum(of[::2]), rows[min(of[1::2])]["place"])) for said, of in found.items()]


def keys_of(version: str, options: DataOptions, tokenizer: Any, folders: Sequence[str] = ()) -> tuple[str, str]:
    """(of a source's records as they are read, of their tokens).

    Args:
        version, folders: of the source (see `RowSource`); the folders are those in which images are looked for.
    """
    of_images = [] if options.images is None else [options.images.facts]
    sees = [["images", *folders] for _ in of_images]
    columns = {name: value for name, value in asdict(options.columns).items() if name != "images"}
    if not columns["system_message"]:  # which came after data were cached
        del columns["system_message"]
    rows_key = _fingerprint(version, columns, options.kind.key, *registered_formats(), *sees)
    # which part of the source it is, is in its version
    settings = {**asdict(replace(options, images=None)), "num_workers": None, "hub_config": None, "split": None}
    settings["columns"] = columns
    # in the form, and the order, in which caches of earlier releases have it
    for name in ("kind", "images", "fetches", "skip_bad_records"):
        del settings[name]
    settings |= {name: name == options.kind.name for name in ("pairs", "labelled", "split_turns")}
    of_tokenizer = [tokenizer.backend_tokenizer.to_str(), tokenizer.bos_token, tokenizer.eos_token]
    # what renders templates, and what tokenizes
    of_tokenizer += map(installed_version, ("transformers", "jinja2", "tokenizers"))
    ends = sorted(_special_ids(tokenizer))
    return rows_key, _fingerprint(rows_key, settings, of_tokenizer, tokenizer.chat_template, ends, *of_images)


def _fingerprint(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([_VERSION, *parts]).encode()).hexdigest()[:32]


def _own_error(error: BaseException) -> BaseException:
    """What a generator or a worker raised, which `datasets` wraps, or what goes wrong with the cache."""
    import pyarrow

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ExpertMeshError | OSError):
        cause = cause.__cause__
    place = _PLACE.format(samples_cache())
    # what a generator met in the data is wrapped
    is_damaged = isinstance(error, FileNotFoundError | pyarrow.ArrowException | json.JSONDecodeError)
    if is_damaged or (isinstance(cause, OSError) and _is_of_reading(cause)):
        return ExpertMeshError(f"{place} read there: {error}; {_DELETE}")
    if isinstance(cause, OSError):
        return ExpertMeshError(
            f"{place} written there: {cause.strerror or cause}; choose another directory with the "
            "environment variable HF_DATASETS_CACHE"
        )
    return cause or error


def _is_of_reading(error: OSError) -> bool:
    """Whether it is no error of the disk that is written to: pyarrow raises one without a number where what a file
    holds is damaged."""
    return error.errno is None or (
        error.errno in (errno.EACCES, errno.EPERM)
        and os.path.isfile(error.filename or "")
        and not os.access(error.filename, os.R_OK)
    )


def _batch_size(rows: Any) -> int:
    """Records that are tokenised together: fewer where they are long."""
    return min(max(_BATCH_BYTES * len(rows) // max(rows.data.nbytes, 1), 1), 500)


def _workers(num_rows: int, options: DataOptions) -> int | None:
    wanted, rows = options.num_workers, _ROWS_A_WORKER if options.images is None else _ROWS_WITH_IMAGES_A_WORKER
    number = wanted if wanted is not None else min(cores(), num_rows // rows, 16)
    return number if number > 1 else None


def _records(source: RowSource, flag: str, options: DataOptions) -> Iterator[dict[str, Any]]:
    """Entries of records in a form that no schema can spoil: their place, their format, and what they say, as JSON: a
    list of one, or of the two of a pair."""
    reading, number = _Reading(options), -1
    for number, (place, row) in enumerate(_read(source, flag)):
        try:
            entries = list(reading.entries(place, row))
        except RowError as error:
            is_unknown = reading.format is None and not (options.skip_bad_records or isinstance(row, RowError))
            # nothing is known of how the others are written; or what is wrong with an image may be mended beside the
            # data, so that the cache must not keep it
            if is_unknown or options.images is not None:
                raise ExpertMeshError(f"{place} {error}") from error
            nothing = json.dumps([vars(PlainText(""))] * options.kind.sequences)
            entries = [_BAD | options.kind.blank | {"bad": f" {error}", "content": nothing}]
        for entry in entries:
            yield {"place": place, **({RECORD: number} if RECORD in options.kind.numbers else {}), **entry}
    if number < 0:
        raise ExpertMeshError(f"{flag} {source.name}: has no records")


_BAD = {"format": "", "is_plain": True, "told": ""}
"""Of a record that cannot be used."""


class _Reading:
    """What records say, as their columns have it, one after the other.

    Attributes:
        format: of the records; None before there is one that has any.
    """

    def __init__(self, options: DataOptions):
        self.options = options
        self.format: Any = None
        self.is_plain: bool | None = None

    def entries(self, place: RowPlace, row: Any) -> Iterator[dict[str, Any]]:
        """The entries of a record.

        Raises:
            RowError: it cannot be used.
        """
        kind, columns = self.options.kind, _columns_read(self.options)
        if isinstance(row, RowError):
            raise row
        try:
            known = self.format or kind.find_format(row, columns)
            self.format = known
            read = kind.read(row, known, columns, self.options.train_on)
            if self.options.images is not None:
                _check_images(row, [each for together, _ in read for each in together], columns)
            for together, more in read:
                yield {"format": known.name, "bad": "", **self._written(place, together), **more}
        except TypeError as error:
            raise RowError(str(error)) from error
        except OSError as error:  # of what a record names; what is written tells by itself what is wrong
            raise RowError(f"names what cannot be read: {error}") from error
        except RecursionError as error:
            raise RowError("is nested too deeply") from error

    def _written(self, place: RowPlace, together: Sequence[Said]) -> dict[str, Any]:
        """What is said in one entry, as JSON."""
        is_plain = isinstance(together[0], PlainText) if self.is_plain is None else self.is_plain
        if any(is_plain != isinstance(each, PlainText) for each in together):
            here, before = ("messages", "plain text") if is_plain else ("plain text", "messages")
            raise RowError(f"has {here}, but the records before it have {before}; put them into separate files")
        said = [replace(_with_files(each, place.folder, self.options), told=()) for each in together]
        content = json.dumps(list(map(vars, said)))
        # JSON can write half of a surrogate pair, which is no character and has no token
        if _SURROGATE.search(content) and not _is_text(json.loads(content)):
            raise RowError("has a lone surrogate, so its text was cut or damaged")
        self.is_plain = is_plain
        told = dict.fromkeys(itertools.chain(*(each.told for each in together)))
        return {"is_plain": is_plain, "told": "\n".join(told), "content": content}


def _columns_read(options: DataOptions) -> Columns:
    """Also those in which images are looked for where they are trained on."""
    return options.columns if options.images is None else replace(options.columns, images=(*COLUMNS, *MORE_COLUMNS))


def _check_images(row: Any, said: Sequence[Conversation | PlainText], columns: Columns) -> None:
    """
    Raises:
        RowError: a record seems to have images, and they were not read.
    """
    talks = [each for each in said if isinstance(each, Conversation)]
    texts = (message["content"] for each in talks for message in each.messages)
    check_unread(row, texts, sum(len(each.images) for each in talks), columns.images, [*vars(columns).values()])


def _with_files(said: Conversation | PlainText, folder: Path, options: DataOptions) -> Conversation | PlainText:
    """With the files of its images."""
    if isinstance(said, PlainText) or not said.images:
        return said
    if options.images is None:
        raise RowError("has images; give --images to train on them, or leave them out")
    return replace(said, images=[kept_file(each, folder, options.fetches) for each in said.images])


def _read(source: RowSource, flag: str) -> Iterator[PlacedRow]:
    try:
        yield from source.read()
    except OSError as error:
        raise ExpertMeshError(f"{flag} {source.name}: cannot be read: {error}") from error


def _is_text(value: Any) -> bool:
    """Whether all strings in what JSON can hold are Unicode text."""
    if isinstance(value, dict):
        return all(map(_is_text, value)) and all(map(_is_text, value.values()))
    if isinstance(value, list):
        return all(map(_is_text, value))
    return not (isinstance(value, str) and re.search("[\ud800-\udfff]", value))


_NOTHING = Tokenized((), ())


def _tokenize_batch(
    tokenizer: Any, options: DataOptions
) -> Callable[[dict[str, list[Any]], list[int]], dict[str, list[Any]]]:
    """What makes a table of samples of some records, given with their numbers."""
    ends = _special_ids(tokenizer)

    def bad_for(place: str, error: ValueError) -> str:
        if options.images is not None:  # see `_records`
            raise ExpertMeshError(f"{place}: {error}") from error
        return f": {error}"

    def tokenize_batch(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        results: list[Tokenized | None] = []
        rendered, flags, of_records, images = [], [], [], []
        contents = list(map(json.loads, batch["content"]))
        records = zip(batch["place"], batch["bad"], batch["is_plain"], contents, strict=True)
        for place, bad, is_plain, said in (
            (place, bad, is_plain, said) for place, bad, is_plain, both in records for said in both
        ):
            flags.append({"is_empty": False, "is_unexplained": False, "drops_reasoning": False, "bad": bad})
            of_records.append((place, said["weight"]))
            images.append(said.get("images", ()))
            results.append(_NOTHING)
            if bad:
                continue
            flags[-1]["is_empty"] = _says_nothing(is_plain, said, options)
            try:
                if options.prompt_template and not (is_plain and said["prompt"] is None):
                    text = _in_prompt_template(tokenizer, is_plain, said, options)
                    results[-1] = shortened(text, options.truncation, options.max_seq_length)
                elif is_plain:
                    text = _plain_tokens(tokenizer, PlainText(**said), options)
                    results[-1] = shortened(text, options.truncation, options.max_seq_length)
                else:
                    found = render(tokenizer, Conversation(**said), options.train_on, options.template_date)
                    flags[-1] |= {name: getattr(found, name) for name in ("is_unexplained", "drops_reasoning")}
                    if options.images is not None:
                        options.images.check(found.text, len(said["images"]))
                    results[-1] = None
                    rendered.append(found)
            except ValueError as error:
                flags[-1]["bad"] = bad_for(place, error)
        templated = tokenize(tokenizer, rendered)
        lines: list[list[dict[str, Any]]] = []
        for result, (place, weight), paths, of_text in zip(results, of_records, images, flags, strict=True):
            text = _weighed(next(templated) if result is None else result, weight)
            try:
                found_lines = _lines(text, paths, options, ends)
            except ValueError as error:
                of_text["bad"], found_lines = bad_for(place, error), _lines(_NOTHING, (), options, ends)
            lines.append([line | of_text for line in found_lines])
        table = {name: [line[name] for of_text in lines for line in of_text] for name in lines[0][0]}
        further: dict[str, list[Any]] = {name: batch[name] for name in batch if name not in _OF_ROWS} | {"row": numbers}
        if options.truncation == "split":  # each piece of a text is an entry
            numbers = [at for at, of_text in enumerate(lines) for _ in of_text]
            further = {name: [values[at] for at in numbers] for name, values in further.items()}
        row = further.pop("row")
        return options.kind.tabulated(table | further, contents) | {"row": row}

    return tokenize_batch


def _weighed(text: Tokenized, of_record: float) -> Tokenized:
    """With the record's weight."""
    if of_record == 0:
        return replace(text, is_trained=[False] * len(text.tokens), weights=(), calls=())
    if of_record == 1:
        return text
    return replace(text, weights=[of_record * w for w in text.weights or [1.0] * len(text.tokens)])


def _says_nothing(is_plain: bool, said: dict[str, Any], options: DataOptions) -> bool:
    """Whether an answer that is trained on is blank."""
    if is_plain:
        return not said["text"].strip()
    conversation = Conversation(**said)
    for message, is_trained in zip(
        conversation.messages, trained_messages(conversation, options.train_on), strict=True
    ):
        # reasoning may stand in the answer itself
        answer = message["content"].rpartition("</think>")[2].strip() or message.get("tool_calls")
        if is_trained and message["role"] == "assistant" and not answer:
            return True
    return False


def _special_ids(tokenizer: Any) -> set[int]:
    """Tokens that can end an answer: all special ones but that which begins a text."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    begins = set() if tokenizer.bos_token_id == tokenizer.eos_token_id else {tokenizer.bos_token_id}
    return (added | set(tokenizer.all_special_ids)) - begins


def _plain_tokens(tokenizer: Any, said: PlainText, options: DataOptions) -> Tokenized:
    """Text as it stands, between the special tokens that the tokenizer puts around it, and one that ends it.

    Of a prompt and a completion, which are one text, the completion alone is trained on, as in trl.
    """
    prompt = said.prompt or ""
    tokens, ends = _encode(tokenizer, prompt + said.text)
    tokens = _with_end(tokenizer, tokens)
    trains_all = options.train_on == "all" or said.prompt is None
    # a token belongs where its last character does, and those behind the text to its end
    inside = [trains_all or end > len(prompt) for end in ends]
    return Tokenized(tokens, inside + [True] * (len(tokens) - len(inside)), _eos(tokenizer))


def _in_prompt_template(tokenizer: Any, is_plain: bool, said: dict[str, Any], options: DataOptions) -> Tokenized:
    """A question in the template and its answer, each trained on as its message or else --train-on says."""
    is_trained: list[bool | float | None] = [None, None] if is_plain else said["is_trained"]
    pair = (said["prompt"], said["text"]) if is_plain else Conversation(**said).as_prompt_and_response
    if pair is None:
        beside = ": it has tools, which need a chat template" if said["tools"] else ""
        raise ValueError(f"--prompt-template takes one prompt and its response; this record has more{beside}")
    question, answer = pair
    prompt = prompt_tokens(tokenizer, options.prompt_template, question)
    (encoded,) = encode_texts(tokenizer, [answer])
    response = _with_end(tokenizer, list(encoded.tokens))
    on_prompt = is_trained[0] if is_trained[0] is not None else options.train_on == "all"
    inside = [bool(on_prompt)] * len(prompt) + [is_trained[1] is not False] * len(response)
    of_prompt, of_response = ([own if type(own) is float else 1.0] for own in is_trained)
    weights = of_prompt * len(prompt) + of_response * len(response) if of_prompt + of_response != [1.0, 1.0] else []
    return Tokenized(prompt + response, inside, _eos(tokenizer), weights)


def prompt_tokens(tokenizer: Any, template: str, prompt: str) -> list[int]:
    """The template with the prompt in the place of {prompt}, and the special tokens that usually precede a text."""
    tokens, _ = _encode(tokenizer, template.replace("\\n", "\n").replace("{prompt}", prompt))
    return tokens[:-1] if tokens[-1:] == [tokenizer.eos_token_id] else tokens


def _encode(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Tokens of a text, with the special ones that the tokenizer adds, and where in the text each ends: those that are
    added behind it do so beyond its end. A text that begins with BOS or ends with EOS gets no second one."""
    (encoded,) = encode_texts(tokenizer, [text], special=True)
    tokens = list(encoded.tokens)
    own = [at for at, (begin, end) in enumerate(zip(*encoded[1:], strict=True)) if begin < end] or [len(tokens)]
    ends = [end if at <= own[-1] else len(text) + 1 for at, end in enumerate(encoded.ends)]
    first = 1 if own[0] == 1 and tokens[:2] == [tokenizer.bos_token_id] * 2 else 0
    last = -1 if own[-1] == len(tokens) - 2 and tokens[-2:] == [tokenizer.eos_token_id] * 2 else None
    return tokens[first:last], ends[first:last]


def _eos(tokenizer: Any) -> set[int]:
    return set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}


def _with_end(tokenizer: Any, tokens: list[int]) -> list[int]:
    end = tokenizer.eos_token_id
    return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


def _images_of(row: Mapping[str, Any]) -> tuple[Picture, ...]:
    """Of a sample, in what the cache has of it."""
    if "images" not in row:
        return ()
    edges = row["image_edges"]
    # behind those that are in the sample there may be one that was cut off
    spans = zip(row["images"], edges[::2], edges[1::2], strict=False)
    return tuple(Picture(*parts_of_record(each)[:2], begin, end) for each, begin, end in spans)


def _lines(text: Tokenized, paths: Sequence[str], options: DataOptions, ends: set[int]) -> list[dict[str, Any]]:
    """The samples of a text, each a line of the table: one, or the pieces that it is split into. A text that is dropped
    leaves one without tokens.

    Args:
        paths: of its images. One that would be cut is dropped, with what follows it.
        ends: tokens that can end an answer.

    Raises:
        ValueError: it is too long, or has other images than places for them.
    """
    pictures: list[Picture] = []
    records: list[str] = []
    if options.images is not None:
        text, pictures, records = _with_tokens_of_images(text, paths, options.images)
    limit = next((each.begin for each in pictures if each.begin < options.max_seq_length < each.end), None)
    lines: list[dict[str, Any]] = []
    kept = truncate(text, options.truncation, options.max_seq_length, limit)
    lost = text.length - (kept.parts[-1][1] - kept.parts[0][0] if kept.parts else 0)
    for begin, end in kept.parts or [(0, 0)]:
        part, is_first, is_last = text.part(begin, end), not lines, not kept.parts or end == kept.parts[-1][1]
        taught = {token for token, inside in zip(part.tokens[1:], part.is_trained[1:], strict=True) if inside}
        line = {
            "tokens": part.tokens,
            "is_trained": part.is_trained,
            "weights": part.weights,
            "ends": sorted(taught & {*text.ends}),
            "length": len(part.tokens),
            # nothing comes before the first token, so nothing can predict it
            "num_targets": sum(part.is_trained[1:]),
            "full_length": text.length if is_first else 0,
            "full_lengths": [text.length] if is_first and text.length else [],
            "lost": lost if is_first else 0,
            "is_cut": bool(kept.parts) and lost > 0,
            "is_dropped": not kept.parts,
            "is_endless": is_last and not lost and not taught & ends,
            "loses_call": kept.loses_call,
        }
        if options.images is not None:
            inside = [each for each in pictures if each.end <= end]
            line["images"] = records
            line["image_edges"] = [edge for each in inside for edge in (each.begin, each.end)]
            line["loses_images"] = bool(kept.parts) and len(inside) < len(paths)
        lines.append(line)
    return lines


def _with_tokens_of_images(
    text: Tokenized, paths: Sequence[str], processor: ImageProcessor
) -> tuple[Tokenized, list[Picture], list[str]]:
    """The tokens that stand for each image in place of the one that a template writes, where they are, and what is
    recorded of each image. None of them is trained on."""
    places = [at for at, token in enumerate(text.tokens) if token == processor.token]
    if not paths and places:
        raise ValueError(f"has {processor.placeholder} in its text, which stands for an image; leave it out")
    if other := next((token for token in text.tokens if token in processor.others), None):
        name, said = processor.others[other], processor.processor.tokenizer.convert_ids_to_tokens(other)
        raise ValueError(f"has {said} in its text, the {name} of the model: only images are supported; leave it out")
    pictures: list[Picture] = []
    records: list[str] = []
    made, trained, weighed, at = list[int](), list[bool](), list[float](), 0
    for place, path in zip(places, paths, strict=False):
        begin = len(made) + place - at
        known_by = identity(path)  # before it is read: what changes meanwhile is another the next time
        digest, own = processor.tokens(path)
        records.append(record_of(path, digest, known_by))
        made += [*text.tokens[at:place], *own]
        trained += [*text.is_trained[at:place], *[False] * len(own)]
        weighed += [*text.weights[at:place], *[1.0] * len(own) * bool(text.weights)]
        pictures.append(Picture(path, digest, begin, len(made)))
        at = place + 1

    def moved(token: int) -> int:
        return token + sum(
            each.end - each.begin - 1 for place, each in zip(places, pictures, strict=False) if place < token
        )

    text = Tokenized(
        made + [*text.tokens[at:]],
        trained + [*text.is_trained[at:]],
        text.ends,
        weighed + [*text.weights[at:]],
        [Calls(*map(moved, calls)) for calls in text.calls],
    )
    return text, pictures, records

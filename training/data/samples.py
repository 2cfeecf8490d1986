"""Tokenised samples: read, rendered and tokenised once, then kept between runs in a directory of our own in the cache
of `datasets`."""

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.files.kept import damage, record_kept, recorded_files, recorded_key
from ...moe.util.child import cores
from ...moe.util.errors import ExpertMeshError
from ...moe.util.versions import installed_version
from .chat import Tokens, TrainOn, beginning, render, tokenize, trained_messages
from .data_files import KINDS, DatasetSpec, PlacedRow, RowError, RowSource, SampleBy, open_rows, parse_datasets
from .formats import Columns, Conversation, PlainText, registered_formats
from .labels import DESIRABLE, LABELLED_ANSWERS, PROMPT_HASH
from .pairs import FIRST, FIRST_TARGETS, PAIRS
from .pictures import ImageProcessor, Picture, kept_file
from .record_kinds import CONVERSATIONS, RECORD, RecordKind

# raise it when the same input gives other tokens, so that what an older version has cached is not taken
_VERSION = 21
# one process tokenises this many records in less time than it takes to start more
_ROWS_A_WORKER = 5_000
_ROWS_WITH_IMAGES_A_WORKER = 100
_SURROGATE = re.compile(r"\\ud[89a-f]")
_BATCH_BYTES = 64 * 2**20
SAMPLES_AT_ONCE = 1000
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
    train_on: which turns have a loss. max_seq_length: what exceeds it is cut off. hub_config, split: of a hub data
    set. num_workers: processes that tokenise; None chooses by the number of records. sample_by: what is a record of a
    .txt. template_date: see `Written`. kind: what a record is. images: the processor; None: records with images
    are refused. fetches: whether they are taken from the web.
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
    --split-turns; 0 without it. images_cut: those used that lost images to max_seq_length.
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
    unread: Noted | None = None


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
    def most_image_tokens(self) -> int:
        """Those of the sample that has the most."""
        return max(map(sum, self._image_tokens), default=0)

    @property
    def image_digests(self) -> list[str] | None:
        """Checksums of the files of all images, in the order of samples; None: the data were read as text alone."""
        if not self._sees_images:
            return None
        return [each.partition(":")[0] for own in self.dataset["images"] for each in own]

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
    flag: str, entries: list[str], tokenizer: Any, options: DataOptions, seed: int, checks: bool = True
) -> Samples:
    """Read and tokenise data sets, and mix them if they have weights.

    Args:
        flag: that named them, for messages.
        entries: paths or hub ids, each perhaps with `:weight`.
        tokenizer: a fast one, its chat template set (see `set_chat_template`).
        options: how records become tokens.
        seed: of the choice of records where weights leave some out.
        checks: whether what the cache holds is compared with its checksums.

    Raises:
        ExpertMeshError: a data set is missing, empty or malformed (with the line), a record has none of the known
            formats or does not fit the chat template, or nothing is left to learn.
    """
    check_fast(flag, tokenizer)
    specs = parse_datasets(flag, entries)
    sources = [open_rows(flag, spec.name, options.hub_config, options.split, options.sample_by) for spec in specs]
    parts = [_tokenised(source, flag, tokenizer, options, checks) for source in sources]
    return _mix(flag, specs, parts, seed)


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


def _mix(flag: str, specs: list[DatasetSpec], parts: list[Samples], seed: int) -> Samples:
    """All of every data set; or, with weights, as many of each as makes up its weight, all of the scarcest one."""
    import datasets

    if specs[0].weight is not None:
        scale = min(len(part) / (spec.weight or 1) for spec, part in zip(specs, parts, strict=True))
        counts = [max(round(scale * (spec.weight or 1)), 1) for spec in specs]
        parts = [
            _take(part, min(n, len(part)), seed + i) for i, (part, n) in enumerate(zip(parts, counts, strict=True))
        ]
    origins = [origin for part in parts for origin in part.origins]
    mixed = type(parts[0])(datasets.concatenate_datasets([part.dataset for part in parts]), origins)
    mixed.sources = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(part) for part in parts]))
    return mixed


def _take(part: Samples, number: int, seed: int) -> Samples:
    (origin,) = part.origins
    chosen = sorted(_shuffled(len(part), seed)[:number])
    return part.select(chosen, [Origin(**{**vars(origin), "used": number})])


def _shuffled(number: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(number, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def records_of(source: RowSource, flag: str, options: DataOptions) -> Iterator[dict[str, Any]]:
    """What `samples_in_memory` takes of a file."""
    return _records(source, flag, options)


def samples_in_memory(records: list[dict[str, Any]], flag: str, tokenizer: Any, options: DataOptions) -> Samples | None:
    """Samples of some records, which are in no cache; None where there is nothing to learn."""
    from datasets import Dataset

    rows = Dataset.from_list(records)
    tokenize_batch, size = _tokenize_batch(tokenizer, options), _batch_size(rows)
    tables = [tokenize_batch(rows[start : start + size]) for start in range(0, len(rows), size)]
    table = {name: [value for part in tables for value in part[name]] for name in tables[0]}
    tokens = Dataset.from_dict(table, features=_features(options))
    name = f"{len(rows):,} records from {rows[0]['place'].removeprefix(flag).strip()}"
    return _samples(rows, tokens, flag, name, options, ()) if any(table["num_targets"]) else None


def _tokenised(source: RowSource, flag: str, tokenizer: Any, options: DataOptions, checks: bool) -> Samples:
    """One data set, without the samples that have nothing to learn."""
    from datasets import Dataset

    rows_key, tokens_key = keys_of(source.version, options, tokenizer)
    try:
        for key in (rows_key, tokens_key) if checks else ():
            _check_kept(rows_key, key)
        rows = Dataset.from_generator(
            partial(_records, source, flag, options),
            cache_dir=str(samples_cache()),
            fingerprint=rows_key,
        )
        _record_kept(rows, rows_key)
        tokens = rows.map(
            _tokenize_batch(tokenizer, options),
            batched=True,
            batch_size=_batch_size(rows),
            remove_columns=rows.column_names,
            features=_features(options),
            num_proc=_workers(len(rows), options),
            new_fingerprint=tokens_key,
            desc=f"tokenizing {source.name}",
        )
        _record_kept(tokens, tokens_key)
        _check_columns(tokens, _features(options))
        return _samples(rows, tokens, flag, source.name, options, source.unread)
    except Exception as error:
        raise _own_error(error) from None


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


def _record_kept(dataset: Any, key: str) -> None:
    """Write checksums beside new files of a data set in the cache."""
    import datasets

    files = [Path(file["filename"]) for file in dataset.cache_files]
    # no rows: who looks at the columns tells of it
    if files and not (record := files[0].with_name(f"{key}.json")).exists():
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

    kinds = {"tokens": "int32", "is_trained": "bool", "ends": "int32", "weights": "float32"}
    if options.images is not None:
        kinds |= {"images": "string", "image_edges": "int32"}
    lists: Any = {name: List(Value(kind)) for name, kind in kinds.items()}
    numbers: Any = {name: Value("int32") for name in ("length", "num_targets")}
    flags: Any = {name: Value("bool") for name in ("is_cut", "is_endless", "is_empty", "is_unexplained")}
    if options.images is not None:
        flags["loses_images"] = Value("bool")
    numbers |= {name: Value(kind) for name, kind in options.kind.numbers.items()}
    flags |= {name: Value("bool") for name in options.kind.flags}
    return Features(lists | numbers | flags)


def _samples(rows: Any, tokens: Any, flag: str, name: str, options: DataOptions, unread: Sequence[Path]) -> Samples:
    """The samples that have something to learn.

    Args:
        rows, tokens: what `_records` gave, and what became of it.
    """
    targets, is_cut, is_empty = (_column(tokens, name) for name in ("num_targets", "is_cut", "is_empty"))
    learnable = targets.nonzero().flatten().tolist()
    if not learnable:
        raise ExpertMeshError(
            f"{flag} {name}: no record has a trained token within --max-seq-length {options.max_seq_length}"
        )

    def noted(which: Tensor) -> Noted | None:
        found = which.nonzero().flatten().tolist()
        return Noted(len(found), rows[found[0]]["place"]) if found else None

    ends = {end for chunk in tokens.data.column("ends").chunks for end in chunk.flatten().unique().to_pylist()}
    origin = Origin(
        name,
        rows[0]["format"],
        is_plain=bool(options.prompt_template) or rows[0]["is_plain"],
        rows=len(rows),
        without_target=len(rows) - len(learnable),
        cut=int(is_cut.sum()),
        endless=int((_column(tokens, "is_endless")[learnable]).sum()),
        used=len(learnable),
        ends=tuple(sorted(ends)),
        weighted=sum(bool(n) for chunk in tokens.data.column("weights").chunks for n in chunk.value_lengths().tolist()),
        split=len({*rows[RECORD]}) if RECORD in rows.column_names else 0,
        too_long=noted((targets == 0) & (is_cut == 1)),
        untrained=noted((targets == 0) & (is_cut == 0)),
        empty=noted((targets > 0) & (is_empty == 1)),
        unexplained=noted((targets > 0) & (_column(tokens, "is_unexplained") == 1)),
        images_cut=None if options.images is None else noted((targets > 0) & (_column(tokens, "loses_images") == 1)),
        unread=Noted(len(unread), str(unread[0])) if unread else None,
    )
    kept = tokens if len(learnable) == len(tokens) else tokens.select(learnable)
    return _SAMPLES.get(options.kind.name, Samples)(kept, [origin])


def keys_of(version: str, options: DataOptions, tokenizer: Any) -> tuple[str, str]:
    """(of a source's records as they are read, of their tokens).

    Args:
        version: of the source (see `RowSource`).
    """
    of_images = [] if options.images is None else [options.images.facts]
    sees = ["images" for _ in of_images]
    rows_key = _fingerprint(version, asdict(options.columns), options.kind.key, *registered_formats(), *sees)
    # which part of the source it is, is in its version
    settings = {**asdict(replace(options, images=None)), "num_workers": None, "hub_config": None, "split": None}
    # in the form, and the order, in which caches of earlier releases have it
    for name in ("kind", "images", "fetches"):
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
    found: Any = None
    columns, kind = options.columns, options.kind
    is_plain: bool | None = None
    for number, (place, row) in enumerate(_read(source, flag)):
        try:
            if found is None:
                found = kind.find_format(row, columns)
            entries = kind.read(row, found, columns, options.train_on)
            said = [each for together, _ in entries for each in together]
            is_plain = isinstance(said[0], PlainText) if is_plain is None else is_plain
            if any(is_plain != isinstance(each, PlainText) for each in said):
                here, before = ("messages", "plain text") if is_plain else ("plain text", "messages")
                raise RowError(f"has {here}, but the records before it have {before}; put them into separate files")
            contents = [
                json.dumps([vars(_with_files(each, place.folder, options)) for each in together])
                for together, _ in entries
            ]
        except (RowError, TypeError) as error:
            raise ExpertMeshError(f"{place} {error}") from error
        except RecursionError as error:
            raise ExpertMeshError(f"{place} is nested too deeply") from error
        # JSON can write half of a surrogate pair, which is no character and has no token
        if any(_SURROGATE.search(content) and not _is_text(json.loads(content)) for content in contents):
            raise ExpertMeshError(f"{place} has a lone surrogate, so its text was cut or damaged")
        for (_, more), content in zip(entries, contents, strict=True):
            more = {RECORD: number, **more} if RECORD in kind.numbers else more
            yield {"place": place, "format": found.name, "is_plain": is_plain, **more, "content": content}
    if found is None:
        raise ExpertMeshError(f"{flag} {source.name}: has no records")


def _with_files(said: Conversation | PlainText, folder: Path, options: DataOptions) -> Conversation | PlainText:
    """With the files of its images."""
    if isinstance(said, PlainText) or not said.images:
        return said
    if options.images is None:
        raise RowError("has images; give --images to train on them, or leave them out")
    kept = samples_cache() / "images"
    return replace(said, images=[kept_file(each, folder, kept, options.fetches) for each in said.images])


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


def _tokenize_batch(tokenizer: Any, options: DataOptions) -> Callable[[dict[str, list[Any]]], dict[str, list[Any]]]:
    ends = _special_ids(tokenizer)

    def tokenize_batch(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        results: list[Tokens | None] = []
        rendered, is_empty, is_unexplained, of_records, images = [], [], [], [], []
        contents = list(map(json.loads, batch["content"]))
        records = zip(batch["place"], batch["is_plain"], contents, strict=True)
        for place, is_plain, said in ((place, is_plain, said) for place, is_plain, both in records for said in both):
            is_empty.append(_says_nothing(is_plain, said, options))
            is_unexplained.append(False)
            of_records.append(said["weight"])
            images.append((place, said.get("images", ())))
            try:
                if options.prompt_template and not (is_plain and said["prompt"] is None):
                    results.append(_in_prompt_template(tokenizer, is_plain, said, options))
                elif is_plain:
                    results.append(_plain_tokens(tokenizer, PlainText(**said), options))
                else:
                    results.append(None)
                    rendered.append(render(tokenizer, Conversation(**said), options.train_on, options.template_date))
                    is_unexplained[-1] = rendered[-1].is_unexplained
                    if options.images is not None:
                        options.images.check(rendered[-1].text, len(said["images"]))
            except ValueError as error:
                raise ExpertMeshError(f"{place}: {error}") from error
        templated = iter(tokenize(tokenizer, rendered, options.max_seq_length))
        found = [_weighed(result or next(templated), w) for result, w in zip(results, of_records, strict=True)]
        if options.images is None:
            table = _table(found, [options.max_seq_length] * len(found), ends)
        else:
            table = _table_with_images(found, images, options.images, options.max_seq_length, ends)
        table["is_empty"], table["is_unexplained"] = is_empty, is_unexplained
        further = {name: batch[name] for name in batch if name not in ("place", "format", "is_plain", "content")}
        return options.kind.tabulated(table | further, contents)

    return tokenize_batch


def _weighed(found: Tokens, of_record: float) -> Tokens:
    """With the record's weight."""
    tokens, is_trained, ends, weights = found
    if of_record == 0:
        return tokens, [False] * len(tokens), ends, []
    return (
        found if of_record == 1 else (tokens, is_trained, ends, [of_record * w for w in weights or [1.0] * len(tokens)])
    )


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


def _plain_tokens(tokenizer: Any, said: PlainText, options: DataOptions) -> Tokens:
    """Text as it stands, between the special tokens that the tokenizer puts around it, and one that ends it.

    Of a prompt and a completion, which are one text, the completion alone is trained on, as in trl.
    """
    prompt = said.prompt or ""
    tokens, ends = _encode(tokenizer, beginning(tokenizer, prompt + said.text, options.max_seq_length))
    tokens = _with_end(tokenizer, tokens)
    trains_all = options.train_on == "all" or said.prompt is None
    # a token belongs where its last character does, and those behind the text to its end
    inside = [trains_all or end > len(prompt) for end in ends]
    return tokens, inside + [True] * (len(tokens) - len(inside)), _eos(tokenizer), []


def _in_prompt_template(tokenizer: Any, is_plain: bool, said: dict[str, Any], options: DataOptions) -> Tokens:
    """A question in the template and its answer, each trained on as its message or else --train-on says."""
    is_trained: list[bool | float | None] = [None, None] if is_plain else said["is_trained"]
    pair = (said["prompt"], said["text"]) if is_plain else Conversation(**said).as_prompt_and_response
    if pair is None:
        beside = ": it has tools, which need a chat template" if said["tools"] else ""
        raise ValueError(f"--prompt-template takes one prompt and its response; this record has more{beside}")
    question, answer = (beginning(tokenizer, text, options.max_seq_length) for text in pair)
    prompt = prompt_tokens(tokenizer, options.prompt_template, question)
    response = _with_end(tokenizer, tokenizer(answer, add_special_tokens=False)["input_ids"])
    on_prompt = is_trained[0] if is_trained[0] is not None else options.train_on == "all"
    inside = [bool(on_prompt)] * len(prompt) + [is_trained[1] is not False] * len(response)
    of_prompt, of_response = ([own if type(own) is float else 1.0] for own in is_trained)
    weights = of_prompt * len(prompt) + of_response * len(response) if of_prompt + of_response != [1.0, 1.0] else []
    return prompt + response, inside, _eos(tokenizer), weights


def prompt_tokens(tokenizer: Any, template: str, prompt: str) -> list[int]:
    """The template with the prompt in the place of {prompt}, and the special tokens that usually precede a text."""
    tokens, _ = _encode(tokenizer, template.replace("\\n", "\n").replace("{prompt}", prompt))
    return tokens[:-1] if tokens[-1:] == [tokenizer.eos_token_id] else tokens


def _encode(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Tokens of a text, with the special ones that the tokenizer adds, and where in the text each ends: those that are
    added behind it do so beyond its end. A text that begins with BOS or ends with EOS gets no second one."""
    encoded = tokenizer(text, return_offsets_mapping=True)
    tokens, offsets = encoded["input_ids"], encoded["offset_mapping"]
    own = [at for at, (begin, end) in enumerate(offsets) if begin < end] or [len(tokens)]
    ends = [end if at <= own[-1] else len(text) + 1 for at, (_, end) in enumerate(offsets)]
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
    spans = zip(row["images"], edges[::2], edges[1::2], strict=True)
    found = ((*each.partition(":"), begin, end) for each, begin, end in spans)
    return tuple(Picture(path, digest, begin, end) for digest, _, path, begin, end in found)


def _table_with_images(
    results: list[Tokens],
    images: list[tuple[str, list[str]]],
    processor: ImageProcessor,
    max_length: int,
    ends: set[int],
) -> dict[str, list[Any]]:
    """A table of samples in which images have their tokens. One that would be cut is dropped, with what follows it.

    Args:
        images: of each sample: where its record stands, and the files.
    """
    expanded, limits, kept, loses = [], [], [], []
    for result, (place, paths) in zip(results, images, strict=True):
        try:
            tokens, pictures = _with_tokens_of_images(result, paths, processor, max_length)
        except ValueError as error:
            raise ExpertMeshError(f"{place}: {error}") from error
        inside = [each for each in pictures if each.end <= max_length]
        expanded.append(tokens)
        limits.append(min([max_length, *(each.begin for each in pictures[len(inside) :])]))
        kept.append(inside)
        loses.append(len(inside) < len(paths))
    table = _table(expanded, limits, ends)
    table["images"] = [[f"{each.digest}:{each.path}" for each in own] for own in kept]
    table["image_edges"] = [[edge for each in own for edge in (each.begin, each.end)] for own in kept]
    table["loses_images"] = loses
    return table


def _with_tokens_of_images(
    found: Tokens, paths: Sequence[str], processor: ImageProcessor, max_length: int
) -> tuple[Tokens, list[Picture]]:
    """The tokens that stand for each image in place of the one that a template writes, and where they are. None of them
    is trained on. Images behind `max_length` are not looked at."""
    tokens, is_trained, ends, weights = found
    places = [at for at, token in enumerate(tokens) if token == processor.token]
    if not paths and places:
        raise ValueError(f"has {processor.placeholder} in its text, which stands for an image; leave it out")
    pictures: list[Picture] = []
    made, trained, weighed, at = list[int](), list[bool](), list[float](), 0
    for place, path in zip(places, paths, strict=False):
        begin = len(made) + place - at
        if begin >= max_length:
            break
        digest, own = processor.tokens(path)
        made += tokens[at:place] + own
        trained += is_trained[at:place] + [False] * len(own)
        weighed += weights[at:place] + [1.0] * len(own) * bool(weights)
        pictures.append(Picture(path, digest, begin, len(made)))
        at = place + 1
    return (made + tokens[at:], trained + is_trained[at:], ends, weighed + weights[at:]), pictures


def _table(results: list[Tokens], limits: list[int], ends: set[int]) -> dict[str, list[Any]]:
    names = ("tokens", "is_trained", "weights", "ends", "length", "num_targets", "is_cut", "is_endless")
    table: dict[str, list[Any]] = {name: [] for name in names}
    for (tokens, is_trained, own_ends, weights), max_length in zip(results, limits, strict=True):
        kept, trained = tokens[:max_length], is_trained[:max_length]
        is_cut = len(kept) < len(tokens)
        table["tokens"].append(kept)
        table["is_trained"].append(trained)
        table["weights"].append(weights[:max_length])
        table["length"].append(len(kept))
        # nothing comes before the first token, so nothing can predict it
        table["num_targets"].append(sum(trained[1:]))
        table["is_cut"].append(is_cut)
        taught = {token for token, inside in zip(kept[1:], trained[1:], strict=True) if inside}
        table["is_endless"].append(not is_cut and not taught & ends)
        table["ends"].append(sorted(taught & own_ends))
    return table


def samples_cache() -> Path:
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "expertmesh"

"""Tokenized samples of data sets: what each holds, what became of its data set, and which of them a run has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from ...moe.util.errors import ExpertMeshError
from .data_files import KINDS, DatasetSpec
from .image_files import parts_of_record
from .labels import DESIRABLE, LABELLED_ANSWERS, PROMPT_HASH
from .pairs import FIRST, FIRST_TARGETS, PAIRS
from .pictures import Picture
from .record_kinds import CONVERSATIONS, RECORD

SAMPLES_AT_ONCE = 1000


@dataclass(frozen=True)
class Sample:
    """tokens, and for each whether it is trained on, that is, whether it is a target of the token before it; and the
    weight of its loss, where one is not 1. images: in their order. beyond: whether the last token is not in the
    sequence, but only a target of the one before it."""

    tokens: list[int]
    is_trained: list[bool]
    weights: list[float] | None = None
    images: Sequence[Picture] = ()
    beyond: bool = False

    @property
    def length(self) -> int:
        """Positions in its sequence."""
        return len(self.tokens) - self.beyond

    @classmethod
    def of_prompt(cls, tokens: list[int], prompt_length: int) -> "Sample":
        """A prompt, on which there is no loss, and what follows it."""
        return cls(tokens, [position >= prompt_length for position in range(len(tokens))])


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
        self.lengths = self.longest = column_of(dataset, "length")
        self.targets = column_of(dataset, "num_targets")
        self.is_cut = column_of(dataset, "is_cut")
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
        return torch.unique_consecutive(column_of(self.dataset, RECORD), return_inverse=True)[1]

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
        first, first_targets = column_of(dataset, FIRST), column_of(dataset, FIRST_TARGETS)
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
        self.is_desirable = column_of(dataset, DESIRABLE).bool()
        self.prompts = column_of(dataset, FIRST)
        prompts = column_of(dataset, PROMPT_HASH)
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


SAMPLES: dict[str, type[Samples]] = {each.kind.name: each for each in (Pairs, Labelled)}
"""Of further kinds of records, by their names."""


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


def column_of(dataset: Any, name: str) -> Tensor:
    # `dataset[name]` would copy all that is known of all columns, which takes milliseconds
    values = dataset.data.column(name).to_numpy()
    if dataset._indices is not None:  # some of the rows, or in another order
        values = values[dataset._indices.column(0).to_numpy()]
    return torch.tensor(values, dtype=torch.int64)


def _images_of(row: Mapping[str, Any]) -> tuple[Picture, ...]:
    """Of a sample, in what the cache has of it."""
    if "images" not in row:
        return ()
    edges = row["image_edges"]
    # behind those that are in the sample there may be one that was cut off
    spans = zip(row["images"], edges[::2], edges[1::2], strict=False)
    return tuple(Picture(*parts_of_record(each)[:2], begin, end) for each, begin, end in spans)


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


def mix(flag: str, specs: list[DatasetSpec], parts: list[Samples], seed: int, repeats: bool) -> Samples:
    """All of every data set; or, with weights, as many of each as makes up its weight: all of the scarcest one, or, if
    the others are repeated, all of the one that is the last to be used up."""
    import datasets

    if specs[0].weight is not None:
        numbers = numbers_used([len(part) for part in parts], [spec.weight or 1 for spec in specs], repeats)
        parts = [_take(part, n, seed + i) for i, (part, n) in enumerate(zip(parts, numbers, strict=True))]
    origins = [origin for part in parts for origin in part.origins]
    tables = [part.dataset for part in parts]
    mixed = type(parts[0])(datasets.concatenate_datasets(tables) if len(tables) > 1 else tables[0], origins)
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

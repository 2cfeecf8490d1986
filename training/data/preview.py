"""What the model will see, for a person to look at before anything is trained: `--preview`."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from .lengths import lines_of_lengths
from .pictures import Picture
from .record_kinds import PIECES
from .sample_cache import left_out
from .samples import Noted, Origin, Sample, Samples
from .sequences import DataOrder, Rows
from .truncation import length_that_keeps

_LONGEST_PATH = 40
_MUCH = 0.05
"""A loss of this share of the tokens is no note, but a warning."""
_TRAINED, _CONTEXT, _EDGE = "bold green", "dim", "bold magenta"


def print_preview(rows: Rows, order: DataOrder, tokenizer: Any, max_seq_length: int, number: int = 3) -> None:
    """Print the first `number` sequences as the model sees them, trained tokens apart from context, and all counts.

    Without colours (in a pipe, or under NO_COLOR), trained text stands between « and ».
    """
    # `datasets` puts a copy in the place of os.environ when several processes tokenise; rich looks at the first one
    console = Console(highlight=False, soft_wrap=True, _environ=os.environ)
    for index in order.global_batch(0)[:number]:
        row = rows[index]
        tokens = sum(sample.length for sample in row)
        console.print(Text(f"sequence {index}: {_count(len(row), 'sample')}, {tokens:,} tokens", style=_EDGE))
        for place, sample in enumerate(row):
            if place:
                console.print(
                    Text("── next sample: positions start again at 0, attention does not reach back ──", _EDGE)
                )
            console.print(_as_text(sample, tokenizer, marks=console.color_system is None))
            if sample.beyond:
                console.print(Text("── its last token is predicted, and is not in this sequence ──", _EDGE))
        console.print()
    console.print(_counts(rows, order, max_seq_length), markup=False)
    console.print("\n".join(["", *lines_of_lengths(rows.samples.origins, max_seq_length)]), markup=False)


def _as_text(sample: Sample, tokenizer: Any, marks: bool) -> Text:
    text = Text()
    for each in _around_images(sample):
        if isinstance(each, Picture):
            where = each.path if len(each.path) <= _LONGEST_PATH else f"...{each.path[-_LONGEST_PATH:]}"
            text.append(f"[image {where}: {_count(each.end - each.begin, 'token')}]", style=_EDGE)
        else:
            text.append(_words(each, tokenizer, marks))
    return text


def _around_images(sample: Sample) -> Iterator[Sample | Picture]:
    """A sample's images, and what stands between them."""
    at = 0
    for picture in sample.images:
        yield _part(sample, at, picture.begin)
        yield picture
        at = picture.end
    yield _part(sample, at, len(sample.tokens))


def _part(sample: Sample, begin: int, end: int) -> Sample:
    # nothing predicts the first token of all
    trained = [position > 0 and sample.is_trained[position] for position in range(begin, end)]
    return Sample(sample.tokens[begin:end], trained, sample.weights and sample.weights[begin:end])


def _words(sample: Sample, tokenizer: Any, marks: bool) -> Text:
    text = Text()
    for tokens, is_trained, weight in _runs(sample):
        words = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if marks and is_trained:
            words = f"«{words}»"
        text.append(words, style=_TRAINED if is_trained else _CONTEXT)
        if is_trained and weight != 1:
            text.append(f"×{weight:g}", style=_EDGE)
    return text


def _runs(sample: Sample) -> list[tuple[list[int], bool, float]]:
    """Neighbouring tokens that are, or are not, trained on, with one weight."""
    runs: list[tuple[list[int], bool, float]] = []
    weights = sample.weights or [1.0] * len(sample.tokens)
    for token, is_target, weight in zip(sample.tokens, sample.is_trained, weights, strict=True):
        if not runs or runs[-1][1:] != (is_target, weight):
            runs.append(([], is_target, weight))
        runs[-1][0].append(token)
    return runs


def _counts(rows: Rows, order: DataOrder, max_seq_length: int) -> str:
    samples = rows.samples
    tokens, targets = int(samples.lengths.sum()), int(samples.targets.sum())
    cut = int(samples.is_cut.sum())
    positions, kind = positions_in_batches(rows, order), "batches" if rows.groups is None else "packed sequences"
    entry = "sequence" if rows.num_sequences == 1 else samples.kind.noun
    weighted = sum(origin.weighted for origin in samples.origins)
    facts = {
        f"{samples.kind.noun}s": f"{len(samples):,}"
        + ("" if rows.groups is None else f" in {_count(len(rows), 'sequence')}"),
        "tokens": f"{tokens:,}; longest sample {int(samples.longest.max()):,}{_before_cut(samples)}",
        **_image_counts(samples, tokens),
        "trained on": f"{targets:,} ({targets / tokens:.1%})",
        **(
            {"weighted": f"{_count(weighted, 'record')}: the loss is divided by the sum of weights"} if weighted else {}
        ),
        "truncated": f"{cut:,} at {max_seq_length} tokens" + _lost(samples.origins),
        f"{kind}": f"{tokens / positions:.1%} of all positions are tokens, the rest is padding",
        "an epoch": f"{_count(order.steps_per_epoch, 'step')} of {_count(order.global_batch_size, entry)}",
    }
    return "\n".join(f"{name:<12} {fact}" for name, fact in facts.items())


def _before_cut(samples: Samples) -> str:
    longest = max((origin.lengths[-1][0] for origin in samples.origins), default=0)
    return f" ({longest:,} before truncation)" if longest > int(samples.longest.max()) else ""


def _lost(origins: Sequence[Origin]) -> str:
    """What data sets lose to --max-seq-length, in words; empty: nothing."""
    lost, tokens = (sum(getattr(origin, name) for origin in origins) for name in ("lost", "tokens"))
    return f": {lost:,} tokens of {tokens:,} ({lost / tokens:.1%}) are lost" if lost else ""


def lost_in_words(samples: Samples) -> str:
    """What data sets lose to --max-seq-length, behind what of them is trained on; empty: nothing."""
    if samples.kind is PIECES:
        return "; no token is lost"
    lost, tokens = (sum(getattr(origin, name) for origin in samples.origins) for name in ("lost", "tokens"))
    return f"; {lost / tokens:.1%} of all tokens are lost to --max-seq-length" if lost else ""


def _image_counts(samples: Samples, tokens: int) -> dict[str, str]:
    of_images = samples.tokens_of_images
    if not len(of_images):
        return {}
    number = int(of_images.sum())
    return {
        "images": f"{len(of_images):,} of {number:,} tokens ({number / tokens:.1%}); largest {int(of_images.max()):,}"
    }


def describe_origin(origin: Origin) -> str:
    """One data set in words."""
    without = ", without a chat template" if origin.is_plain and origin.format != "text" else ""
    split = f"{_count(origin.split, 'row')} split into " if origin.split else ""
    parts = [f"{origin.format}{without}, {split}{_count(origin.rows, 'sample' if split else 'row')}"]
    dropped = origin.dropped.number if origin.dropped else 0
    if origin.without_target:
        parts.append(f"{origin.without_target:,} left out without a trained token")
    if dropped:
        parts.append(f"{dropped:,} left out as too long")
    if origin.bad:
        parts.append(f"{len(origin.bad):,} left out as they cannot be used")
    usable = origin.rows - origin.without_target - dropped - len(origin.bad)
    if origin.used != usable:
        repeated = ", some repeatedly," if origin.used > usable else ""
        parts.append(f"{origin.used:,} used{repeated} because of its weight")
    if origin.weighted:
        parts.append(f"{origin.weighted:,} with weights of their own")
    return ", ".join(parts)


def warnings_of(origin: Origin, max_seq_length: int) -> list[str]:
    """What of a data set is perhaps not as it was meant, in lines."""
    said = [
        f"{_of_records(of, origin)} {what}; the first: {of.first}"
        for of, what in (
            (
                origin.too_long,
                f"are left out, because their answers begin beyond --max-seq-length {max_seq_length}",
            ),
            (
                origin.calls_cut,
                f"lose an answer whose tool calls do not end within --max-seq-length {max_seq_length}: no part of a "
                "call is trained on",
            ),
            (origin.untrained, "are left out, because they have no trained token"),
            (origin.empty, "have an empty answer, so the model learns to answer nothing"),
            (
                origin.images_cut,
                f"lose images that do not end within --max-seq-length {max_seq_length}, with all that follows them",
            ),
            (
                origin.unexplained,
                "have text before an answer that only the chat template wrote and that is perhaps no part of the "
                "answer; it is trained on (--preview shows it)",
            ),
        )
        if of is not None
    ]
    if (of := origin.unread) is not None:
        said.append(
            f"{_count(of.number, 'file')} in the directory {'is' if of.number == 1 else 'are'} not "
            f"read (name text files directly, and unpack compressed files); the first: {of.first}"
        )
    notes = [f"{_of_records(of, origin)} {what}; the first: {of.first}" for what, of in origin.told]
    lines = [f"warning: {origin.name}: {line}" for line in said] + [f"note: {origin.name}: {line}" for line in notes]
    lost = [_of_lengths(origin, max_seq_length)] if origin.lost else []
    return left_out(origin.name, origin.bad) + lost + lines


def _of_lengths(origin: Origin, max_seq_length: int) -> str:
    """What a data set loses to --max-seq-length, and what would do."""
    cut, share = origin.cut + (origin.dropped.number if origin.dropped else 0), origin.lost / origin.tokens
    most, nearly_all = (length_that_keeps(origin.lengths, share) for share in (0.95, 0.99))
    is_corpus = origin.is_plain and origin.format == "text"
    return (
        f"{'warning' if share >= _MUCH else 'note'}: {origin.name}: {cut:,} of {_count(origin.rows, 'sample')} are "
        f"{'left out at' if origin.dropped else 'truncated at'} --max-seq-length {max_seq_length}: {origin.lost:,} "
        f"tokens of {origin.tokens:,} ({share:.1%}) are lost; the longest sample has {origin.lengths[-1][0]:,} tokens, "
        f"{most:,} would keep 95 % of all tokens, {nearly_all:,} 99 %"
        + ("; --truncation split keeps all" if is_corpus else "")
    )


def _of_records(noted: Noted, origin: Origin) -> str:
    return f"{noted.number:,} of {_count(origin.rows, 'sample' if origin.split else 'record')}"


def positions_in_batches(rows: Rows, order: DataOrder) -> int:
    """Positions of the micro-batches of one epoch over all readers, padding included."""
    total = 0
    for step in range(order.steps_per_epoch):
        for reader in range(order.num_readers):
            total += sum(_positions(rows, forward) for forward in order.micro_batches(step, reader))
    return total


def _positions(rows: Rows, forward: Sequence[int]) -> int:
    return len(forward) * rows.num_sequences * int(rows.lengths[list(forward)].max()) if forward else 1


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

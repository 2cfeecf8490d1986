"""How long samples are, and what of them is kept: tables of `--preview`."""

from collections.abc import Sequence
from itertools import pairwise

from .samples import Origin
from .truncation import Truncation, kept_tokens

_WIDTH = 40
"""Characters of the histogram's longest bar."""
_POLICIES: tuple[tuple[str, Truncation], ...] = (("right or left", "right"), ("drop", "drop"), ("split", "split"))


def lines_of_lengths(origins: Sequence[Origin], max_seq_length: int) -> list[str]:
    """What of each data set is kept, and why not all; how long samples are, and the longest of them; and what each
    --truncation would keep."""
    return [
        *_kept(origins),
        "",
        *_histogram(origins, max_seq_length),
        "",
        "longest samples, in tokens:",
        *(f"  {length:>11,}  {place}" for length, place in _longest(origins)),
        "",
        *_by_policy(origins, max_seq_length),
    ]


def _kept(origins: Sequence[Origin]) -> list[str]:
    lines = ["tokens of each data set:"]
    for origin in origins:
        causes = {
            "are beyond --max-seq-length": origin.lost,
            "are of samples without a trained token": origin.untrained_tokens,
        }
        kept = origin.tokens - sum(causes.values())
        said = [f"{number:,} ({number / origin.tokens:.1%}) {cause}" for cause, number in causes.items() if number]
        bad = [f"{len(origin.bad):,} records cannot be used"] if origin.bad else []
        lines.append(
            f"  {origin.name}: {origin.tokens:,}, of which {kept:,} are kept" + "".join(map("; ".__add__, said + bad))
        )
    return lines


def _histogram(origins: Sequence[Origin], max_seq_length: int) -> list[str]:
    """A bar for each range of lengths, which doubles from one to the next; one ends at --max-seq-length."""
    lengths = [each for origin in origins for each in origin.lengths]
    longest = max(length for length, _ in lengths)
    least = min(length for length, _ in lengths)
    edges = sorted({0, max_seq_length, *(2**power for power in range(longest.bit_length() + 1))})
    first = max(at for at, edge in enumerate(edges) if edge < least)
    last = next(at for at, edge in enumerate(edges) if edge >= longest)
    edges = edges[first : last + 1]
    ranges = list(pairwise(edges))
    counts = [sum(number for length, number in lengths if low < length <= high) for low, high in ranges]
    lines = ["samples by their length in tokens, before any is cut:"]
    for (low, high), count in zip(ranges, counts, strict=True):
        bar = "█" * max(round(_WIDTH * count / max(counts)), count > 0)
        mark = "  <- --max-seq-length" if high == max_seq_length else ""
        lines.append(f"  {f'{low + 1:,} to {high:,}':>21}  {bar} {count:,}{mark}")
    return lines


def _longest(origins: Sequence[Origin]) -> list[tuple[int, str]]:
    found = sorted((each for origin in origins for each in origin.longest), key=lambda each: -each[0])
    return found[: max((len(origin.longest) for origin in origins), default=0)]


def _by_policy(origins: Sequence[Origin], max_seq_length: int) -> list[str]:
    lengths = [each for origin in origins for each in origin.lengths]
    tokens = sum(length * number for length, number in lengths)
    kept = [(name, kept_tokens(lengths, policy, max_seq_length) / tokens) for name, policy in _POLICIES]
    of_plain_text = all(origin.is_plain and origin.format == "text" for origin in origins)
    kept = kept if of_plain_text else kept[:-1]
    said = ", ".join(f"{name} {share:.1%}" for name, share in kept)
    return [f"--truncation at {max_seq_length} would keep of all tokens: {said}"]

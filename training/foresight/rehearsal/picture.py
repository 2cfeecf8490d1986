"""A step over time, as SVG: memory by kind, and what kernels, exchanges and FSDP do."""

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import get_args

from expertmesh.training.foresight.memory import MemoryTerm
from expertmesh.training.foresight.planner.hardware import Hardware
from expertmesh.training.foresight.rehearsal.ledger import LedgerSpan, timeline
from expertmesh.training.foresight.rehearsal.peaks import kinds_over_time
from expertmesh.training.foresight.rehearsal.recorder import Event
from expertmesh.training.foresight.rehearsal.world import Rehearsed

LEFT, TOP, WIDTH, HEIGHT, STREAM = 70, 64, 900, 280, 26
BINS = 900
COLOURS: dict[MemoryTerm, str] = dict(
    zip(
        get_args(MemoryTerm),
        ("#1f5a96", "#7fa6cc", "#c06a1c", "#5b8f3a", "#8a4f9e", "#c9a227", "#9a9a9a"),
        strict=True,
    )
)
STREAMS = {"kernels": "#1f5a96", "exchanges": "#c06a1c", "FSDP": "#5b8f3a"}


def draw(rehearsed: Rehearsed, hardware: Hardware, gpus_per_node: int, title: str) -> str:
    """Draw the micro-batches that were run, and the update. What a rank waits for other stages is left out."""
    spans, phases = _in_order(rehearsed.step.events, hardware, gpus_per_node)
    seconds = max(span.end for span in spans)
    curve = _memory(rehearsed, spans, seconds)
    most = max(sum(held.values()) for held in curve)
    body = [f'<text x="8" y="20" font-size="14">{escape(title)}</text>']
    for number, (kind, colour) in enumerate(COLOURS.items()):
        x = LEFT + 130 * number
        body.append(f'<rect x="{x}" y="34" width="12" height="8" fill="{colour}"/>')
        body.append(f'<text x="{x + 16}" y="42">{kind}</text>')
    body += _area(curve, most)
    for share in (0.25, 0.5, 0.75, 1.0):
        height = TOP + HEIGHT * (1 - share)
        body.append(f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{most * share / 2**30:,.1f}</text>')
        body.append(f'<path d="M{LEFT} {height:.1f}H{LEFT + WIDTH}" stroke="#eee"/>')
    body.append(f'<text x="{LEFT - 8}" y="{TOP - 8}" text-anchor="end">GiB</text>')
    for begin, name in phases:
        at = LEFT + WIDTH * begin / seconds
        body.append(f'<path d="M{at:.1f} {TOP - 8}V{TOP + HEIGHT + 3 * STREAM + 20}" stroke="#999"/>')
        body.append(f'<text x="{at + 3:.1f}" y="{TOP - 2}">{name}</text>')
    for number, (name, colour) in enumerate(STREAMS.items()):
        y = TOP + HEIGHT + 14 + STREAM * number
        body.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end" font-size="9">{name}</text>')
        body += _stream([span for span in spans if _stream_of(span) == name], seconds, y, colour)
    bottom = TOP + HEIGHT + 14 + 3 * STREAM + 20
    body.append(f'<text x="{LEFT}" y="{bottom}">0</text>')
    body.append(f'<text x="{LEFT + WIDTH}" y="{bottom}" text-anchor="end">{seconds * 1e3:,.0f} ms</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 40}" height="{bottom + 16}" '
        'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _stream_of(span: LedgerSpan) -> str:
    if span.event.waits or span.event.is_read:
        return ""
    if span.event.is_sharding:
        return "FSDP"
    return "kernels" if span.event.collective is None else "exchanges"


def _in_order(
    events: Sequence[Event], hardware: Hardware, gpus_per_node: int
) -> tuple[list[LedgerSpan], list[tuple[float, str]]]:
    """Spans of all events in their order, and where phases begin."""
    spans: list[LedgerSpan] = []
    phases: list[tuple[float, str]] = []
    begin = 0.0
    for _, group in groupby(events, lambda event: (event.micro, event.action, event.phase == "optimizer step")):
        clock, found = timeline(list(group), hardware, gpus_per_node)
        last = ""
        for span in found:
            phase = "backward" if span.event.phase == "recomputation" else span.event.phase
            if phase != last and not span.runs_beside:
                phases.append((begin + span.start, phase))
                last = phase
            spans.append(LedgerSpan(span.event, span.runs_beside, begin + span.start, begin + span.end))
        begin += clock.now
    return spans, phases


def _memory(rehearsed: Rehearsed, spans: Sequence[LedgerSpan], seconds: float) -> list[dict[MemoryTerm, int]]:
    """The most that is held in each bin of time, by kind."""
    curve: list[dict[MemoryTerm, int]] = [{} for _ in range(BINS)]
    times = iter(spans)
    place = 0
    held: dict[MemoryTerm, int] = {}
    for held in kinds_over_time(rehearsed.step, rehearsed.storages, rehearsed.memory):
        span = next(times)
        if not span.runs_beside:
            following = min(int(span.start / seconds * BINS), BINS - 1)
            for skipped in range(place + 1, following):
                curve[skipped] = dict(held)
            place = max(place, following)
        if sum(held.values()) >= sum(curve[place].values()):
            curve[place] = dict(held)
    for skipped in range(place + 1, BINS):
        curve[skipped] = dict(held)
    return curve


def _area(curve: Sequence[dict[MemoryTerm, int]], most: int) -> list[str]:
    """Areas of the kinds of memory, stacked."""
    below = [0.0] * len(curve)
    paths = []
    for kind, colour in COLOURS.items():
        above = [low + held.get(kind, 0) / most for low, held in zip(below, curve, strict=True)]
        points = [(n, y) for n, y in enumerate(above)] + [(n, y) for n, y in reversed(list(enumerate(below)))]
        path = " ".join(f"{LEFT + WIDTH * n / BINS:.1f},{TOP + HEIGHT * (1 - y):.1f}" for n, y in points)
        paths.append(f'<polygon points="{path}" fill="{colour}"><title>{kind}</title></polygon>')
        below = above
    return paths


def _stream(spans: Sequence[LedgerSpan], seconds: float, y: int, colour: str) -> list[str]:
    """A stream's band, in each bin of time as high as the stream is busy."""
    busy: defaultdict[int, float] = defaultdict(float)
    width = seconds / BINS
    for span in spans:
        start = span.start
        while start < span.end:
            number = min(int(start / width + 1e-9), BINS - 1)
            end = span.end if number == BINS - 1 else min(span.end, (number + 1) * width)
            busy[number] += max(end - start, 0.0) / width
            start = end if end > start else span.end
    bars = (
        f"M{LEFT + WIDTH * n / BINS:.1f} {y + STREAM - 6}v{-(STREAM - 6) * min(share, 1.0):.1f}"
        for n, share in sorted(busy.items())
    )
    return [f'<path d="{"".join(bars)}" stroke="{colour}" stroke-width="1"/>']

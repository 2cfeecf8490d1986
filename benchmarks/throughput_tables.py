"""Tables and pictures of `benchmarks.throughput`."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from textwrap import wrap
from typing import Any

from benchmarks.traffic import KINDS
from expertmesh.moe.experts.shape import MoEShape
from expertmesh.training.monitoring.meter import peak_tflops

MB = 1e6
DASHES = ("none", "6 3", "2 3", "9 3 2 3")
COLORS = {"hf-fsdp": "#8a8a8a", "hf-ep": "#c98a2b", "hf-ours": "#7fb2e5", "ours-ep": "#1f5a96"}
KIND_COLORS = dict(zip(KINDS, ("#1f5a96", "#7fb2e5", "#c98a2b", "#8a8a8a", "#d0d0d0"), strict=True))


@dataclass(frozen=True)
class Figures:
    """One variant in one round.

    seconds, cpu_seconds, system_seconds, faults: a timed step each, the last three of all ranks together:
    system_seconds are those of the CPU time that the kernel took, faults minor page faults. losses: of all steps.
    peak_mb: of the largest rank during the steps, 10^6 bytes: on a GPU what torch held there, else resident memory, of
    which base_mb before there was a model.
    sent, calls: by kind of collective, in one step, of the mean rank. problem: why there are no figures.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    system_seconds: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    base_mb: float = 0.0
    sent: dict[str, float] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)
    device: str = ""
    problem: str | None = None


@dataclass(frozen=True)
class Case:
    """What all variants have in common. value: of the sweep, if there is one. tokens: per step of all ranks. flops:
    needed. bytes_a_number: of an activation on its way. peak_flops: per second of CPU time, of matmuls."""

    value: int | None
    shape: MoEShape
    layers: int
    tokens: int
    world_size: int
    flops: float
    bytes_a_number: int
    peak_flops: float | None = None

    def all_to_all_theory(self, ep_size: int) -> float:
        """Bytes that a rank sends in one step by expert-parallel layers under even routing: each token to K experts and
        back, and so its gradients."""
        rows = self.shape.top_k * self.tokens / self.world_size
        return self.layers * 4 * rows * self.shape.model_width * self.bytes_a_number * (ep_size - 1) / ep_size


@dataclass(frozen=True)
class Result:
    """A variant in a case, a figure for each round."""

    case: Case
    variant: str
    rounds: list[Figures]

    @property
    def ep_size(self) -> int:
        return int(self.variant.partition("=")[2] or 1)

    @property
    def last(self) -> Figures:
        return self.rounds[-1]

    def rate(self, figures: Figures, clock: str) -> float:
        """Tokens per second of the round's median step, by the "seconds" or the "cpu_seconds"."""
        return self.case.tokens / statistics.median(getattr(figures, clock))

    def rates(self, clock: str) -> list[float]:
        return [self.rate(figures, clock) for figures in self.rounds]

    def median_rate(self, clock: str) -> float:
        return statistics.median(self.rates(clock))

    def median_step(self, kind: str) -> float:
        """Median of the "cpu_seconds", "system_seconds" or "faults" of all timed steps."""
        return statistics.median(value for figures in self.rounds for value in getattr(figures, kind))

    @property
    def peak_mb(self) -> float:
        return statistics.median(figures.peak_mb for figures in self.rounds)

    @property
    def mfu(self) -> float | None:
        peak = peak_tflops(self.last.device)
        # the peak is that of bf16
        if peak is None or self.case.bytes_a_number != 2:
            return None
        return self.case.flops / self.case.tokens * self.median_rate("seconds") / self.case.world_size / (peak * 1e12)


def gain(a: Result, b: Result, clock: str) -> float:
    """How many times as fast a is as b: the median over the rounds, in which the two ran close by."""
    pairs = zip(a.rates(clock), b.rates(clock), strict=False)
    return statistics.median(x / y for x, y in pairs)


def find(results: Sequence[Result], case: Case, variant: str) -> Result | None:
    return next((r for r in results if r.case == case and r.variant == variant), None)


def cases_of(results: Sequence[Result]) -> list[Case]:
    return list(dict.fromkeys(result.case for result in results))


def short(figures: Figures) -> str:
    """What one variant did in one round, in a line."""
    return (
        f"{statistics.median(figures.seconds):.2f} s and {statistics.median(figures.cpu_seconds):.2f} CPU-s per step, "
        f"{statistics.median(figures.system_seconds):.2f} of them the kernel's, "
        f"{statistics.median(figures.faults):,.0f} page faults, "
        f"peak {figures.peak_mb:,.0f} MB, loss {figures.losses[-1]:.5f}"
    )


def clock_of(results: Sequence[Result]) -> str:
    """What variants are compared by: on a GPU seconds; on a CPU those it computed, which others on the machine change
    less."""
    return "cpu_seconds" if results[0].last.device == "cpu" else "seconds"


def print_tables(results: Sequence[Result]) -> None:
    """Speed, memory and traffic of the variants of one case; on a CPU also where its time goes."""
    print()
    _print_speed(results)
    if clock_of(results) == "cpu_seconds":
        print()
        _print_cpu(results)
    print()
    _print_traffic(results)


def _print_speed(results: Sequence[Result]) -> None:
    columns, clock = ("hf-fsdp", "ours-ep=1", "hf-ep"), clock_of(results)
    print(
        f"{'':12}{'tokens/s':>9}{'range':>16}{'tokens/CPU-s':>14}{'range':>16}{'peak MB':>9}   "
        + f"times {'tokens/s' if clock == 'seconds' else 'tokens/CPU-s'} (times memory) of"
    )
    print(f"{'':12}{'':66}" + "".join(f"{name:>17}" for name in ("hf-fsdp", "ours-ep=1", "hf at this ep")))
    for result in results:
        wall, cpu = result.rates("seconds"), result.rates("cpu_seconds")
        line = (
            f"{result.variant:12}{statistics.median(wall):9,.1f}{f'{min(wall):,.1f}-{max(wall):,.1f}':>16}"
            f"{statistics.median(cpu):14,.1f}{f'{min(cpu):,.1f}-{max(cpu):,.1f}':>16}{result.peak_mb:9,.0f} "
        )
        for column in columns:
            other = find(results, result.case, f"hf-ep={result.ep_size}" if column == "hf-ep" else column)
            if other is None or other.variant == result.variant:
                line += f"{'':17}"
            else:
                ratio = gain(result, other, clock)
                line += f"{f'{ratio:.2f} x ({result.peak_mb / other.peak_mb:.2f} x)':>17}"
        if result.mfu is not None:
            line += f"  MFU {result.mfu:.1%}"
        print(line.rstrip())


def _print_cpu(results: Sequence[Result]) -> None:
    """Print CPU figures of all ranks together per step, medians over all steps of all rounds. floor: the CPU time that
    the step's FLOPs would take at the peak of matmuls, as a fraction of what it took."""
    print(f"{'':12}{'CPU-s a step':>14}{'of them system':>24}{'page faults':>14}{'first to last':>26}{'floor':>8}")
    for result in results:
        case = result.case
        cpu, system, faults = (result.median_step(kind) for kind in ("cpu_seconds", "system_seconds", "faults"))
        steps = result.last.faults
        floor = "" if case.peak_flops is None else f"{case.flops / case.peak_flops / cpu:.0%}"
        line = f"{result.variant:12}{cpu:14.2f}{f'{system:.2f} ({system / cpu:.0%})':>24}{faults:14,.0f}"
        print(line + f"{f'{steps[0]:,.0f} to {steps[-1]:,.0f}':>26}{floor:>8}")


def _print_traffic(results: Sequence[Result]) -> None:
    kinds = [kind for kind in KINDS if any(r.last.calls.get(kind) for r in results)]
    print(f"{'':12}sent per rank in the first step, MB (calls); theory: tokens alone, routed evenly")
    print(f"{'':12}" + "".join(f"{kind:>17}" for kind in kinds) + f"{'all':>10}{'all-to-all / theory':>21}")
    for result in results:
        sent, calls = result.last.sent, result.last.calls
        line = "".join(f"{f'{sent[kind] / MB:,.1f} ({calls[kind]:.0f})':>17}" for kind in kinds)
        theory = result.case.all_to_all_theory(result.ep_size)
        share = f"{sent['all-to-all'] / theory:.4f}" if theory else ""
        print(f"{result.variant:12}{line}{sum(sent.values()) / MB:10,.1f}{share:>21}".rstrip())


@dataclass(frozen=True)
class Target:
    """A variant of ours against another. least: of tokens per CPU-second. most: of memory."""

    ours: str
    against: str
    least: float
    most: float


TARGETS = (
    Target("ours-ep=1", "hf-fsdp", 1.05, 0.82),
    Target("ours-ep=2", "hf-ep=2", 1.2, 0.97),
    Target("ours-ep=4", "hf-ep=4", 1.5, 0.95),
    Target("ours-ep=4", "hf-fsdp", 3.55, 0.86),
)
MOST_SYSTEM_SHARE = {"ours-ep=4": 0.1}
"""Of a variant's CPU time, what the kernel may take."""


def judge(results: Sequence[Result]) -> list[str]:
    """A line for each target that the run can tell about."""
    lines = []
    for case in cases_of(results):
        for target in TARGETS:
            ours, other = find(results, case, target.ours), find(results, case, target.against)
            if ours is None or other is None:
                continue
            speed, memory = gain(ours, other, "cpu_seconds"), ours.peak_mb / other.peak_mb
            lines.append(
                f"{ours.variant} against {other.variant}: {speed:.2f} x the tokens a CPU-second "
                f"(target {target.least} or more: {_verdict(speed >= target.least)}), "
                f"{memory:.2f} x the peak memory (target {target.most} or less: {_verdict(memory <= target.most)})"
            )
        for variant, most in MOST_SYSTEM_SHARE.items():
            found = find(results, case, variant)
            if found is not None:
                share = found.median_step("system_seconds") / found.median_step("cpu_seconds")
                lines.append(
                    f"{variant}: {share:.1%} of its CPU time is the kernel's (target {most:.0%} or less: "
                    f"{_verdict(share <= most)})"
                )
    return lines


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def draw(results: Sequence[Result], title: str, sweep: str | None) -> str:
    """An SVG: bars per variant for one case; for a sweep, or over ep, lines of time and bytes."""
    cases = cases_of(results)
    clock = clock_of(results)
    unit = {"seconds": "s", "cpu_seconds": "CPU-s"}[clock]
    panels: list[str] = []
    if len(cases) == 1:
        panels += [
            _bars(results, f"tokens / {unit}", lambda r: [r.median_rate(clock)]),
            _bars(results, "peak memory per rank, MB", lambda r: [r.peak_mb]),
            _bars(results, "sent per rank and step, MB", lambda r: [r.last.sent[k] / MB for k in KINDS], KINDS),
        ]
        kinds = {"hf-ep": ("hf-fsdp", "hf-ep"), "hf-ours": ("hf-ours",), "ours-ep": ("ours-ep",)}
        series = {name: [r for r in results if r.variant.startswith(of)] for name, of in kinds.items()}
        series = {name: found for name, found in series.items() if found}
        over, x_of = "ep", lambda r: r.ep_size
    else:
        names = list(dict.fromkeys(r.variant for r in results))
        series = {name: [r for r in results if r.variant == name] for name in names}
        over, x_of = str(sweep), lambda r: r.case.value
    panels += [
        _lines(series, over, f"{unit} a step", x_of, lambda r: r.case.tokens / r.median_rate(clock)),
        _lines(series, over, "sent per rank and step, MB", x_of, lambda r: sum(r.last.sent.values()) / MB),
        _lines(series, over, "of it all-to-all, MB", x_of, lambda r: r.last.sent["all-to-all"] / MB),
    ]
    width, height, columns = 440, 250, 3
    body = [f'<text x="12" y="{18 + 15 * n}">{escape(line)}</text>' for n, line in enumerate(wrap(title, 220))]
    for number, panel in enumerate(panels):
        x, y = width * (number % columns), 50 + height * (number // columns)
        body.append(f'<g transform="translate({x},{y})">{panel}</g>')
    rows = -(-len(panels) // columns)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * columns}" height="{60 + height * rows}" '
        'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _bars(
    results: Sequence[Result], title: str, values: Callable[[Result], list[float]], parts: Sequence[str] = ()
) -> str:
    """One bar per variant, of one part or several, one behind the other."""
    left, length = 90, 260
    longest = max(sum(values(r)) for r in results) or 1.0
    body = [f'<text x="12" y="16" font-size="13">{escape(title)}</text>']
    for number, result in enumerate(results):
        y, x = 28 + 22 * number, float(left)
        body.append(f'<text x="{left - 6}" y="{y + 12}" text-anchor="end">{escape(result.variant)}</text>')
        for place, value in enumerate(values(result)):
            fill = KIND_COLORS[parts[place]] if parts else _color(result.variant)
            body.append(f'<rect x="{x:.1f}" y="{y}" width="{length * value / longest:.1f}" height="16" fill="{fill}"/>')
            x += length * value / longest
        body.append(f'<text x="{x + 5:.1f}" y="{y + 12}">{sum(values(result)):,.4g}</text>')
    for place, part in enumerate(parts):
        x, y = 12 + 84 * place, 28 + 22 * len(results) + 10
        body.append(f'<rect x="{x}" y="{y}" width="9" height="9" fill="{KIND_COLORS[part]}"/>')
        body.append(f'<text x="{x + 12}" y="{y + 9}">{escape(part)}</text>')
    return "".join(body)


def _lines(
    series: dict[str, list[Result]],
    over: str,
    title: str,
    x_of: Callable[[Result], Any],
    y_of: Callable[[Result], float],
) -> str:
    """One line per series, its points evenly spaced in the order of x, from zero up."""
    left, width, top, height = 50, 340, 28, 170
    places = sorted({x_of(r) for results in series.values() for r in results})
    highest = max(y_of(r) for results in series.values() for r in results) or 1.0
    step = width / max(len(places) - 1, 1)
    body = [
        f'<text x="12" y="16" font-size="13">{escape(title)}, over {escape(over)}</text>',
        f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="#999"/>',
        f'<text x="{left - 4}" y="{top + 8}" text-anchor="end">{highest:,.4g}</text>',
    ]
    for number, place in enumerate(places):
        body.append(f'<text x="{left + step * number}" y="{top + height + 14}" text-anchor="middle">{place}</text>')
    for number, (name, results) in enumerate(series.items()):
        points = [
            (left + step * places.index(x_of(r)), top + height * (1 - y_of(r) / highest))
            for r in sorted(results, key=x_of)
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        alike = [other for other in series if _color(other) == _color(name)]
        dash = f' stroke-dasharray="{DASHES[alike.index(name) % len(DASHES)]}"'
        body.append(f'<path d="M{path}" fill="none" stroke="{_color(name)}" stroke-width="2"{dash}/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_color(name)}"/>' for x, y in points]
        x, y = left + 8 + 90 * (number % 4), top + height + 30 + 13 * (number // 4)
        body.append(f'<path d="M{x} {y - 4}h14" stroke="{_color(name)}" stroke-width="2"{dash}/>')
        body.append(f'<text x="{x + 17}" y="{y}">{escape(name)}</text>')
    return "".join(body)


def _color(variant: str) -> str:
    return COLORS[variant.partition("=")[0]]

"""Tokens per second per GPU over the number of GPUs, as SVG."""

from collections.abc import Sequence
from html import escape
from math import log2

from expertmesh.training.foresight.planner.search import VARIANTS, Point

COLOURS = dict(zip(VARIANTS, ("#1f5a96", "#c06a1c", "#5b8f3a"), strict=True))
LEFT, TOP, WIDTH, HEIGHT = 70, 50, 560, 320


def draw(points: Sequence[Point], title: str) -> str:
    """Draw one line per variant; a hollow mark where nothing fits, which has no speed and stands on the axis."""
    worlds = sorted({p.world_size for p in points})
    most = max((p.plan.tokens_per_second for p in points if p.plan.fits), default=1.0)
    first, span = log2(worlds[0]), max(log2(worlds[-1] / worlds[0]), 1.0)

    def x(world: int) -> float:
        return LEFT + WIDTH * (log2(world) - first) / span

    def y(speed: float) -> float:
        return TOP + HEIGHT * (1 - speed / most / 1.05)

    body = [f'<text x="8" y="20" font-size="14">{escape(title)}</text>']
    for world in worlds:
        body.append(f'<text x="{x(world):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{world:,}</text>')
        body.append(f'<path d="M{x(world):.1f} {TOP}V{TOP + HEIGHT}" stroke="#eee"/>')
    for share in (0.25, 0.5, 0.75, 1.0):
        body.append(f'<text x="{LEFT - 8}" y="{y(most * share) + 4:.1f}" text-anchor="end">{most * share:,.0f}</text>')
        body.append(f'<path d="M{LEFT} {y(most * share):.1f}H{LEFT + WIDTH}" stroke="#eee"/>')
    for number, variant in enumerate(VARIANTS):
        own = [p for p in points if p.variant == variant]
        fitting = [p for p in own if p.plan.fits]
        path = " ".join(f"{x(p.world_size):.1f},{y(p.plan.tokens_per_second):.1f}" for p in fitting)
        body.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[variant]}" stroke-width="2"/>')
        for p in own:
            height, fill = (y(p.plan.tokens_per_second), COLOURS[variant]) if p.plan.fits else (TOP + HEIGHT, "white")
            centre = f'cx="{x(p.world_size) + 6 * (number - 1) * (not p.plan.fits):.1f}" cy="{height:.1f}"'
            body.append(f'<circle {centre} r="4" fill="{fill}" stroke="{COLOURS[variant]}"/>')
        body.append(f'<rect x="{LEFT + 190 * number}" y="32" width="12" height="4" fill="{COLOURS[variant]}"/>')
        body.append(f'<text x="{LEFT + 190 * number + 18}" y="38">{variant}</text>')
    bottom = TOP + HEIGHT + 40
    body.append(f'<text x="{LEFT}" y="{bottom}">GPUs; tokens/s per GPU; hollow: does not fit</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 40}" height="{bottom + 16}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )

"""Which part of the model and of the data each rank holds, as an SVG picture."""

from collections.abc import Sequence
from fractions import Fraction
from html import escape

from ...sharding.topology import DENSE, DIVIDED, EXPERT, Axis, Topology
from .mesh_picture import crosses_nodes, layers_of, ranks_of

MOST_RANKS = 64
"""Ranks of the largest layout that is drawn."""

_COLUMNS = 4
_BOX, _GAP, _MARGIN, _PADDING = 108, 6, 10, 7
_HEAD, _ITEM, _BAR, _LINE = 22, 27, 8, 17
_BAR_WIDTH = _BOX - 2 * _PADDING
_WIDTH = 2 * _MARGIN + _COLUMNS * _BOX + (_COLUMNS - 1) * _GAP + 2 * _PADDING

_Part = tuple[str, str, float, float]
"""What a rank holds of a thing: the CSS class of its color, words, and from where to where of all of it."""

_GROUPS: tuple[tuple[Axis, str], ...] = (
    ("pp", "pass on layers' results"),
    ("ep", "exchange tokens"),
    ("tp", "divide heads, dense MLPs, vocabulary"),
    ("cp", "share a sequence"),
    ("dp", "shard the same experts"),
    ("dense", "shard non-expert parameters"),
)

# the background is its own, so that it is readable on light and on dark pages
_STYLE = (
    "text{font:12.5px system-ui,sans-serif;fill:#1c2430}.b{font-weight:600}.bar{fill:#dfe3ea}"
    ".experts{fill:#d9730d}.dense{fill:#2f6fde}.tp{fill:#0f9aa8}.layers{fill:#3c8f3c}.data{fill:#8b4fc6}"
)


def layout_picture(
    topology: Topology, gpus_per_node: int, num_experts: int, layers: Sequence[Sequence[range]] = ()
) -> str:
    """One box per rank, in the frame of its node; in it, a bar per thing, with the part that the rank holds.

    layers: of a pipeline the decoder layers of each pp index, of each of its stages.
    """
    box = _HEAD + _ITEM * len(_parts(topology, num_experts, layers, 0)) + 3
    drawn: list[str] = []
    y = _MARGIN
    for node, ranks in enumerate(topology.groups("node", gpus_per_node)):
        lines = -(-len(ranks) // _COLUMNS)
        height = _HEAD + lines * (box + _GAP)
        drawn.append(
            f'<rect x="{_MARGIN}" y="{y}" width="{_WIDTH - 2 * _MARGIN}" height="{height}" rx="8" fill="#eef1f5"/>'
        )
        drawn.append(_text(_MARGIN + _PADDING, y + 16, f"node {node}", "b"))
        for index, rank in enumerate(ranks):
            line, column = divmod(index, _COLUMNS)
            at = (_MARGIN + _PADDING + column * (_BOX + _GAP), y + _HEAD + line * (box + _GAP))
            drawn += _rank(rank, _parts(topology, num_experts, layers, rank), at, box)
        y += height + _GAP
    for text in _group_lines(topology, gpus_per_node):
        y += _LINE
        drawn.append(_text(_MARGIN, y - 2, text))
    height = y + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img">\n'
        f"<title>{escape(_title(topology))}</title>\n<style>{_STYLE}</style>\n"
        f'<rect width="{_WIDTH}" height="{height}" rx="10" fill="#fff"/>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _title(topology: Topology) -> str:
    sizes = (("pp", topology.pp_size), ("dp", topology.dp_size), ("ep", topology.ep_size))
    sharing = (("cp", topology.cp_size), ("tp", topology.tp_size))
    named = [f"{axis} {size}" for axis, size in (*sizes, *sharing) if size > 1 or axis == "ep"]
    return f"{topology.world_size} ranks: {', '.join(named)}, dense shard {topology.dense_shard}"


def _rank(rank: int, parts: Sequence[_Part], at: tuple[int, int], height: int) -> list[str]:
    x, y = at
    drawn = [f'<rect x="{x}" y="{y}" width="{_BOX}" height="{height}" rx="6" fill="#fff" stroke="#b9c0cb"/>']
    drawn.append(_text(x + _PADDING, y + 16, f"rank {rank}", "b"))
    for index, (color, words, start, stop) in enumerate(parts):
        top = y + _HEAD + index * _ITEM
        drawn.append(_text(x + _PADDING, top + 11, words))
        for kind, first, last in (("bar", 0.0, 1.0), (color, start, stop)):
            left, width = x + _PADDING + first * _BAR_WIDTH, (last - first) * _BAR_WIDTH
            drawn.append(
                f'<rect class="{kind}" x="{left:.2f}" y="{top + 15}" width="{width:.2f}" height="{_BAR}" rx="1"/>'
            )
    return drawn


def _parts(topology: Topology, num_experts: int, layers: Sequence[Sequence[range]], rank: int) -> list[_Part]:
    parts: list[_Part] = []
    if topology.pp_size > 1:
        pp_rank = topology.pp_rank(rank)
        of_all = (pp_rank / topology.pp_size, (pp_rank + 1) / topology.pp_size)
        parts.append(("layers", f"layers {layers_of(layers[pp_rank])}", *of_all))
    # as many rows per expert as all ranks can share evenly
    rows_per_expert = topology.world_size
    rows = topology.rows(num_experts * rows_per_expert, EXPERT, rank)
    parts.append(("experts", _experts(rows, rows_per_expert), *_of(rows, num_experts * rows_per_expert)))
    num_rows = topology.world_size
    if topology.tp_size > 1:
        rows = topology.rows(num_rows, DIVIDED, rank)
        parts.append(("tp", f"heads {Fraction(len(rows), num_rows)}", *_of(rows, num_rows)))
    rows = topology.rows(num_rows, DENSE, rank)
    words = "others" if topology.tp_size > 1 else "dense"
    parts.append(("dense", f"{words} {Fraction(len(rows), num_rows)}", *_of(rows, num_rows)))
    sharing = topology.ranks_per_sequence
    position = topology.group("sequences", rank).index(rank)
    words = f"sequence {topology.data_index(rank)}"
    parts.append(("data", words, position / sharing, (position + 1) / sharing))
    return parts


def _of(rows: range, num_rows: int) -> tuple[float, float]:
    return rows.start / num_rows, rows.stop / num_rows


def _experts(rows: range, rows_per_expert: int) -> str:
    first, last = rows.start // rows_per_expert, (rows.stop - 1) // rows_per_expert
    if first != last:
        return f"experts {first}-{last}"
    held = Fraction(len(rows), rows_per_expert)
    return f"expert {first}" if held == 1 else f"{held} of expert {first}"


def _group_lines(topology: Topology, gpus_per_node: int) -> list[str]:
    lines = []
    for axis, what_for in _GROUPS:
        groups = topology.groups(axis)
        if len(groups[0]) == 1:
            continue
        shown = [f"{group[0]} and {group[1]}" if len(group) == 2 else ranks_of(group, most=1) for group in groups]
        most = 2 if len(groups) > 3 else len(groups)
        ranks = ", ".join(shown[:most]) + (", ..." if most < len(groups) else "")
        crosses = any(crosses_nodes(group, gpus_per_node) for group in groups)
        lines.append(f"{axis}: {what_for}: {ranks}{' (across nodes)' if crosses else ''}")
    return lines


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    chosen = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{chosen}>{escape(words)}</text>'

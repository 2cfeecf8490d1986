"""Which ranks form which group, as text."""

from collections.abc import Sequence

from ...sharding.topology import Axis, Topology

MOST_GROUPS = 8
"""Groups of a kind that are written out; of more, the first ones and the last."""

MOST_COLUMNS = 16
"""Ranks of a row that are drawn."""

LEAST_COLUMNS = 3
"""Of those on a narrow terminal: the first, that there are others, and the last."""


def picture(
    topology: Topology,
    gpus_per_node: int,
    num_experts: int,
    width: int | None = None,
    layers: Sequence[Sequence[range]] = (),
) -> list[str]:
    """Lines: the grid of ranks, each group's ranks and whether it crosses nodes, each ep rank's experts.

    layers: of a pipeline the decoder layers of each pp index, of each of its stages.
    width: columns of the terminal; the grid and the groups' ranks stay within it, for which fewer of them are drawn.
    """
    ep, dp, world = topology.ep_size, topology.dp_size, topology.world_size
    pp = topology.pp_size
    nodes = -(-world // gpus_per_node)
    cp, tp, sharing = topology.cp_size, topology.tp_size, topology.ranks_per_sequence
    data = "" if sharing == 1 else f" = data {topology.data_size}{f' x cp {cp}' * (cp > 1)}{f' x tp {tp}' * (tp > 1)}"
    where = f"{gpus_per_node} per node, {nodes} node{'s' * (nodes > 1)}"
    lines = [f"{world} ranks = {f'pp {pp} x ' * (pp > 1)}dp {dp} x ep {ep}{data}, {where}", ""]
    columns = MOST_COLUMNS
    grid = _grid(topology, gpus_per_node, num_experts, columns)
    while width is not None and max(map(len, grid)) > width and columns > LEAST_COLUMNS:
        columns -= 1
        grid = _grid(topology, gpus_per_node, num_experts, columns)
    lines += grid
    lines.append("")
    if pp > 1:
        lines += _groups("pp", "layers' results, from each to the next", topology, gpus_per_node, width)
        for index in _shown(range(len(layers)), MOST_GROUPS):
            ranks = "" if index is None else ranks_of(topology.groups("stage")[index], most=1)
            lines.append("..." if index is None else f"pp {index}: layers {layers_of(layers[index])} on ranks {ranks}")
    lines += _groups("ep", "all-to-all of tokens", topology, gpus_per_node, width)
    if tp > 1:
        lines += _groups("tp", "heads, dense MLPs and the vocabulary divided", topology, gpus_per_node, width)
    if cp > 1:
        lines += _groups("cp", "each sequence split over them, attention by heads", topology, gpus_per_node, width)
    lines += _groups("dp", "the same experts, sharded over them", topology, gpus_per_node, width)
    if topology.dense_shard == "hybrid":
        lines.append("non-expert parameters: sharded within each ep group, replicated over dp")
    else:
        lines += _groups("dense", "non-expert parameters, sharded over them", topology, gpus_per_node, width)
    return lines


def _grid(topology: Topology, gpus_per_node: int, num_experts: int, most_columns: int) -> list[str]:
    """One row per pp and dp index, one column per ep index; | where a node ends."""
    ep, dp, pp = topology.ep_size, topology.dp_size, topology.pp_size
    here = num_experts // ep
    width = max(len(str(topology.world_size - 1)), len(experts_of(ep - 1, here))) + 1
    columns = _shown(range(ep), most_columns)
    head = "".join(" ..." if c is None else experts_of(c, here).rjust(width) for c in columns)
    name = max(9, len(_row_name(pp * dp - 1, topology)) + 1)
    lines = [f"{'experts':<{name}}{head}"]
    for row in _shown(range(pp * dp), MOST_GROUPS):
        if row is None:
            lines.append("...")
            continue
        cells = ""
        for column in columns:
            if column is None:
                cells += " ..."
                continue
            rank = row * ep + column
            ends = (rank + 1) % gpus_per_node == 0
            cells += str(rank).rjust(width) + ("|" if ends and column < ep - 1 else "")
        first, last = row * ep // gpus_per_node, (row * ep + ep - 1) // gpus_per_node
        nodes = f"node{f' {first}' if first == last else f's {first} to {last}'}"
        lines.append(f"{_row_name(row, topology):<{name}}{cells}   {nodes}")
    return lines


def _row_name(row: int, topology: Topology) -> str:
    pp_index, dp_index = divmod(row, topology.dp_size)
    return f"pp {pp_index} dp {dp_index}" if topology.pp_size > 1 else f"dp {dp_index}"


def layers_of(stages: Sequence[range]) -> str:
    """The layers of a pp index, as 0-3, 8-11."""
    return ", ".join(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in stages)


def experts_of(ep_index: int, here: int) -> str:
    """The experts of an ep rank, as 0 or 0-3."""
    first = ep_index * here
    return str(first) if here == 1 else f"{first}-{first + here - 1}"


def _groups(axis: Axis, what_for: str, topology: Topology, gpus_per_node: int, width: int | None) -> list[str]:
    groups = topology.groups(axis)
    crossing = sum(crosses_nodes(group, gpus_per_node) for group in groups)
    where = "all within a node" if crossing == 0 else f"{crossing} of them cross nodes"
    if len(groups) == 1:
        where = "crosses nodes" if crossing else "within a node"
    each = f"{len(groups)} group{'s' * (len(groups) > 1)} of {len(groups[0])}"
    lines = [f"{axis}: {each} ({what_for}), {where}"]
    for index in _shown(range(len(groups)), MOST_GROUPS):
        if index is None:
            lines.append("  ...")
        else:
            mark = "   crosses nodes" if crosses_nodes(groups[index], gpus_per_node) else ""
            line = f"  {ranks_of(groups[index], MOST_COLUMNS)}{mark}"
            if width is not None and len(line) > width:
                line = f"  {ranks_of(groups[index], most=1)}{mark}"
            lines.append(line)
    return lines


def crosses_nodes(ranks: range, gpus_per_node: int) -> bool:
    return ranks[0] // gpus_per_node != ranks[-1] // gpus_per_node


def ranks_of(ranks: Sequence[int], most: int) -> str:
    """The ranks of a group, which are equally far apart: of more than `most` only the first and the last."""
    if len(ranks) <= most:
        return " ".join(map(str, ranks))
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return f"{ranks[0]} to {ranks[-1]}" + (f" in steps of {step}" if step > 1 else "")


def _shown(items: range, most: int) -> list[int | None]:
    """All of them, or the first ones and the last with None between."""
    return list(items) if len(items) <= most else [*items[: most - 2], None, items[-1]]

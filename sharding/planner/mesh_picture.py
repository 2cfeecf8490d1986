"""Which ranks form which group, as text."""

from collections.abc import Sequence

from sharding.topology import Topology

MOST_GROUPS = 8
"""Groups of a kind that are written out; of more, the first ones and the last."""

MOST_COLUMNS = 16
"""Ranks of a row that are drawn."""

LEAST_COLUMNS = 3
"""Of those on a narrow terminal: the first, that there are others, and the last."""


def picture(topology: Topology, gpus_per_node: int, num_experts: int, width: int | None = None) -> list[str]:
    """Lines: the grid of ranks, each group's ranks and whether it crosses nodes, each ep rank's experts.

    width: columns of the terminal; the grid and the groups' ranks stay within it, for which fewer of them are drawn.
    """
    ep, dp, world = topology.ep_size, topology.dp_size, topology.world_size
    nodes = -(-world // gpus_per_node)
    data = "" if topology.cp_size == 1 else f" = data {topology.data_size} x cp {topology.cp_size}"
    where = f"{gpus_per_node} per node, {nodes} node{'s' * (nodes > 1)}"
    lines = [f"{world} ranks = dp {dp} x ep {ep}{data}, {where}", ""]
    columns = MOST_COLUMNS
    grid = _grid(topology, gpus_per_node, num_experts, columns)
    while width is not None and max(map(len, grid)) > width and columns > LEAST_COLUMNS:
        columns -= 1
        grid = _grid(topology, gpus_per_node, num_experts, columns)
    lines += grid
    replicas = [range(index * ep, (index + 1) * ep) for index in range(dp)]
    sharers = [range(index, world, ep) for index in range(ep)]
    lines += ["", *_groups("ep", "all-to-all of tokens", replicas, gpus_per_node, width)]
    if topology.cp_size > 1:
        readers = [range(start, start + topology.cp_size) for start in range(0, world, topology.cp_size)]
        lines += _groups("cp", "each sequence split over them, attention by heads", readers, gpus_per_node, width)
    lines += _groups("dp", "the same experts, sharded over them", sharers, gpus_per_node, width)
    if topology.dense_shard == "hybrid":
        lines.append("non-expert parameters: sharded within each ep group, replicated over dp")
    else:
        lines += _groups("all", "non-expert parameters, sharded over them", [range(world)], gpus_per_node, width)
    return lines


def _grid(topology: Topology, gpus_per_node: int, num_experts: int, most_columns: int) -> list[str]:
    """A row a dp index, a column an ep index; | where a node ends."""
    ep, dp = topology.ep_size, topology.dp_size
    here = num_experts // ep
    width = max(len(str(topology.world_size - 1)), len(experts_of(ep - 1, here))) + 1
    columns = _shown(range(ep), most_columns)
    head = "".join(" ..." if c is None else experts_of(c, here).rjust(width) for c in columns)
    lines = [f"experts  {head}"]
    for row in _shown(range(dp), MOST_GROUPS):
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
        lines.append(f"dp {row:<6}{cells}   node{f' {first}' if first == last else f's {first} to {last}'}")
    return lines


def experts_of(ep_index: int, here: int) -> str:
    """The experts of an ep rank, as 0 or 0-3."""
    first = ep_index * here
    return str(first) if here == 1 else f"{first}-{first + here - 1}"


def _groups(name: str, what_for: str, groups: Sequence[range], gpus_per_node: int, width: int | None) -> list[str]:
    crossing = sum(spans_nodes(group, gpus_per_node) for group in groups)
    where = "all within a node" if crossing == 0 else f"{crossing} of them cross nodes"
    if len(groups) == 1:
        where = "crosses nodes" if crossing else "within a node"
    each = f"{len(groups)} group{'s' * (len(groups) > 1)} of {len(groups[0])}"
    lines = [f"{name}: {each} ({what_for}), {where}"]
    for index in _shown(range(len(groups)), MOST_GROUPS):
        if index is None:
            lines.append("  ...")
        else:
            mark = "   crosses nodes" if spans_nodes(groups[index], gpus_per_node) else ""
            line = f"  {ranks_of(groups[index], MOST_COLUMNS)}{mark}"
            if width is not None and len(line) > width:
                line = f"  {ranks_of(groups[index], most=1)}{mark}"
            lines.append(line)
    return lines


def spans_nodes(ranks: range, gpus_per_node: int) -> bool:
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

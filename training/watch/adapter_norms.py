"""How far each expert's adapters have come: the norm of what starts from zero.

Shape suffixes: L MoE layers, E experts.
"""

from typing import Any

import torch
import torch.distributed as dist

from expertmesh.moe.experts.lora import B
from expertmesh.sharding import Mesh, StateTensor, adapters_of

LAYERS_NAMED = 4


def adapter_norms(model: Any, mesh: Mesh) -> list[list[float]]:
    """The Frobenius norm of all B of each expert (L, E), 0 for one that no token has reached; empty where experts have
    no adapters. All ranks call it together."""
    parts = [part for name, part in adapters_of(model).items() if part.expert is not None and name.endswith(B)]
    layers = list(dict.fromkeys(_layer(part) for part in parts))
    if not parts:
        return []
    num_experts = parts[0].num_rows // _rows_an_expert(parts[0])
    squares_LE = torch.zeros(len(layers), num_experts, dtype=torch.float64, device=mesh.grid.device_type)
    for part in parts:
        if not part.is_here:
            continue
        rows = mesh.topology.rows(part.num_rows, part.layout, dist.get_rank())
        experts = torch.arange(rows.start, rows.stop, device=squares_LE.device) // _rows_an_expert(part)
        squares_R = part.local.double().square().sum(dim=1).to(squares_LE.device)
        squares_LE[layers.index(_layer(part))].index_add_(0, experts, squares_R)
    dist.all_reduce(squares_LE)
    norms: list[list[float]] = squares_LE.sqrt().tolist()
    return norms


def _layer(part: StateTensor) -> str:
    return part.name.rpartition(".")[0]


def _rows_an_expert(part: StateTensor) -> int:
    assert part.expert is not None
    return part.expert.rows_an_expert


def norms_line(norms: list[list[float]]) -> str:
    """For the log."""
    means = [sum(layer) / len(layer) for layer in norms]
    still = [
        f"layer {layer}: {', '.join(str(expert) for expert, norm in enumerate(of_layer) if norm == 0)}"
        for layer, of_layer in enumerate(norms)
        if 0 in of_layer
    ]
    told = f"expert adapters: norm of B, mean per layer {min(means):.3g} to {max(means):.3g}"
    if not still:
        return f"{told}; every expert has learned"
    more = f"; and in {len(still) - LAYERS_NAMED} more layers" if len(still) > LAYERS_NAMED else ""
    return f"{told}; experts that no token has reached: {'; '.join(still[:LAYERS_NAMED])}{more}"

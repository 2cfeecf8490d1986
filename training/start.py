"""Start: from settings to an engine, as train_ep.py and `expertmesh.load` do it alike.

What needs torch is imported where it is used: a model that is not there is told of before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from expertmesh.checkpoints.hf.source import check_model
from expertmesh.training.config.train_config import TrainConfig

if TYPE_CHECKING:
    from expertmesh.sharding import Ranks
    from expertmesh.training.change.cpu_matmuls import MatmulLibraries
    from expertmesh.training.engine import Engine


def prepare_process(config: TrainConfig) -> None:
    """Settle what the settings ask of this process, before it joins a process group.

    Raises:
        ExpertMeshError: there is no such model, or a setting does not work here.
    """
    check_model(config.model)
    from expertmesh.sharding import device_type
    from expertmesh.training.change.determinism import compute_deterministically
    from expertmesh.training.change.tf32 import compute_in_tf32

    if config.tf32:
        compute_in_tf32(device_type(config.use_cpu))
    if config.deterministic:
        compute_deterministically()


def start_engine(
    config: TrainConfig, ranks: Ranks, tell: Callable[[str], object]
) -> tuple[Engine, MatmulLibraries | None]:
    """Open the model and make the engine, whose weights `Engine.place` reads. All ranks call it together.

    Args:
        tell: takes lines for the user, on rank 0.

    Returns:
        It, and the libraries that compute fp32 matmuls on a CPU; None on a GPU.

    Raises:
        ExpertMeshError: on all ranks, when the model cannot be read, or trained with these settings.
    """
    from expertmesh.checkpoints import open_source, resolve_model, side_files
    from expertmesh.sharding import raise_together
    from expertmesh.training.change.cpu_matmuls import choose_matmul_libraries
    from expertmesh.training.engine import Engine

    with raise_together(patient=ranks):
        source = open_source(resolve_model(config.model), config.rope)
        side_files(source.path)  # what cannot go along is better told now than at the export
    engine = Engine(config, source, ranks, tell)
    if engine.changes:
        engine.tell(f"elastic: {ranks.world_size} ranks: {'; '.join(engine.changes)}")
    return engine, choose_matmul_libraries(engine.config, ranks)

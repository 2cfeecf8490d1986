"""`ep_implementation="expertmesh"`: our experts under a name in transformers' registry of expert parallelism."""

import importlib
from importlib.metadata import version
from typing import Any

from .util.errors import ExpertMeshError

NAME = "expertmesh"
"""The name of our experts in `DistributedConfig(ep_implementation=...)`."""

NEEDED = "5.23"
"""The first transformers that has the registry."""

_MODULE = "transformers.distributed.expert_parallel"
_REGISTRY = "EPImplementationInterface"


def register_ep_implementation() -> None:
    """Make `DistributedConfig(ep_implementation="expertmesh")` known to transformers: within its own expert
    parallelism, tokens are then dispatched and experts computed by this project. May be called any number of times.

    Example:
        expertmesh.register_ep_implementation()
        config = transformers.DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="expertmesh")

    Raises:
        ExpertMeshError: the installed transformers has no such registry.
    """
    try:
        registry = getattr(importlib.import_module(_MODULE), _REGISTRY)
    except (ImportError, AttributeError) as error:
        raise ExpertMeshError(
            f'ep_implementation="{NAME}": transformers {version("transformers")} has no {_REGISTRY}; '
            f"install transformers>={NEEDED}"
        ) from error
    registry.register(NAME, _build)


def _build(experts: Any, ep_mesh: Any, tp_mesh: Any) -> Any:
    """Called by transformers for each experts module; loads the implementation when the first model needs it."""
    from .ep_implementation import ExpertMeshEP

    return ExpertMeshEP(experts, ep_mesh, tp_mesh)

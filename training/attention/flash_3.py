"""Flash attention 3 in the place of torch's own kernel, flash attention 2, where its package is installed.

torch replaces the very operators that `training.attention.flash` and sdpa call, forward and backward, windows included.
"""

import importlib
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from ...moe.torch_private import SUPPORTED
from ...moe.util.errors import ExpertMeshError
from ...moe.util.versions import installed_version
from ...sharding.runtime.process import Ranks
from ..config.train_config import TrainConfig

_MODULE, _PACKAGE, _NAME = "flash_attn_interface", "flash_attn_3", "FA3"
_HOPPER = 9


def use_flash_attention_3(model: Any, config: TrainConfig, ranks: Ranks) -> str | None:
    """Have torch compute flash attention with flash attention 3, from here on, if every rank can; else with its own
    kernel, whatever an earlier model of this process took. All ranks call it together, before a model attends.

    Returns:
        What was done, or why it was not, for the first lines of the log; None on a CPU, and where no rank has the
        package.

    Raises:
        ExpertMeshError: on all ranks, when torch could not take it after all.
    """
    found = _obstacle_of_ranks(model, config, ranks)
    if found is not None:
        _restore()
        return f"flash attention 3 is not used: {found}" if found else None
    _activate()
    which = f"{_MODULE} {installed_version(_PACKAGE)}".rstrip()
    return f"flash attention 3 ({which}) computes flash attention"


def _obstacle_of_ranks(model: Any, config: TrainConfig, ranks: Ranks) -> str | None:
    """Why it is not used, empty if there is nothing to say of it; None: every rank can."""
    if ranks.device.type != "cuda":
        return ""
    obstacles: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(obstacles, _obstacle(model, config))
    if all(obstacle == _NOT_INSTALLED for obstacle in obstacles):
        return ""
    first = next((rank for rank, obstacle in enumerate(obstacles) if obstacle), None)
    if first is None:
        return None
    where = "" if all(obstacles) else f"on rank {first} "
    return f"{where}{obstacles[first]}"


_NOT_INSTALLED = f"{_MODULE} is not installed"


def _obstacle(model: Any, config: TrainConfig) -> str:
    """Why it cannot be used here; empty if it can."""
    if find_spec(_MODULE) is None:
        return _NOT_INSTALLED
    major, minor = torch.cuda.get_device_capability()
    if major != _HOPPER:
        return f"it needs a GPU of compute capability {_HOPPER}.0 (Hopper); this one has {major}.{minor}"
    if dropout := getattr(model.config.get_text_config(), "attention_dropout", 0):
        return f"it has no dropout; this model's attention_dropout is {dropout:g}"
    if config.deterministic:
        return "--deterministic uses torch's own, which is known to be deterministic"
    try:
        importlib.import_module(_MODULE)
    except Exception as error:  # built for another torch or CUDA it fails in many ways
        return f"{_MODULE} cannot be imported: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"
    if missing := [name for name in ("fwd", "bwd") if not hasattr(torch.ops.flash_attn_3, name)]:
        return f"{_MODULE} has no operator flash_attn_3::{missing[0]}, which torch calls"
    if _NAME not in torch.nn.attention.list_flash_attention_impls():
        return f"torch {torch.__version__} does not support it (expertmesh was tested with torch {SUPPORTED})"
    return ""


def _restore() -> None:
    if torch.nn.attention.current_flash_attention_impl() == _NAME:
        torch.nn.attention.restore_flash_attention_impl()


def _activate() -> None:
    if torch.nn.attention.current_flash_attention_impl() == _NAME:
        return
    try:
        torch.nn.attention.activate_flash_attention_impl(_NAME)
    except (AttributeError, RuntimeError, ImportError) as error:
        raise ExpertMeshError(
            f"torch {torch.__version__} cannot use the flash attention 3 that is installed: {error}; uninstall "
            f"{_PACKAGE}, or install one that was built for this torch"
        ) from error

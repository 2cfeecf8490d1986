"""Newer flash attention in the place of torch's own kernel, flash attention 2, where the package of one is installed.

torch replaces the very operators that `training.attention.flash` and sdpa call, forward and backward, windows included.
Sinks are no matter of theirs: `flash` makes them of log-sum-exps.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)

from ...moe.torch_private import SUPPORTED
from ...moe.util.errors import ExpertMeshError
from ...moe.util.versions import installed_version
from ...sharding.runtime.process import Ranks
from ..config.train_config import TrainConfig
from . import flash_4


@dataclass(frozen=True)
class FlashKernels:
    """An implementation of flash attention that torch can take.

    Attributes:
        version: of flash attention.
        name: among torch's implementations.
        package, at_least: what is installed, and its oldest release that will do; empty: any.
        torch_at_least: torch's oldest release that will do.
        cards: major compute capabilities that it is for, with their names.
        lacking: after a check of the rest: imports the package, and says what it lacks of what torch calls.
        unsuited: says of a text model's config why they are not for it on this GPU.
    """

    version: int
    name: str
    package: str
    at_least: str
    torch_at_least: str
    cards: dict[int, str]
    lacking: Callable[[], str]
    unsuited: Callable[[Any], str]

    @property
    def words(self) -> str:
        return f"flash attention {self.version}"


def _lacking_of_3() -> str:
    importlib.import_module("flash_attn_interface")
    missing = [name for name in ("fwd", "bwd") if not hasattr(torch.ops.flash_attn_3, name)]
    return f"flash_attn_interface has no operator flash_attn_3::{missing[0]}, which torch calls" if missing else ""


FLASH_KERNELS = (
    # the release that was read: before it others take fewer widths of heads, and torch 2.11 no windows in its backward
    FlashKernels(
        version=4,
        name=flash_4.NAME,
        package="flash-attn-4",
        at_least="4.0.0b36",
        torch_at_least="2.12",
        cards={9: "Hopper", 10: "Blackwell"},
        lacking=flash_4.lacking,
        unsuited=flash_4.unsuited,
    ),
    FlashKernels(
        version=3,
        name="FA3",
        package="flash_attn_3",
        at_least="",
        torch_at_least="2.11",
        cards={9: "Hopper"},
        lacking=_lacking_of_3,
        unsuited=lambda text_config: "",
    ),
)
"""From the newest on. All take bf16 and fp16, heads of up to 256, and heads of queries that share keys; none has
dropout."""


def use_flash_kernels(model: Any, config: TrainConfig, ranks: Ranks) -> str | None:
    """Have torch compute flash attention by the newest implementation that every rank can use, from here on; if there
    is none by its own kernel, whatever an earlier model of this process took. All ranks call it together, before a
    model attends.

    Returns:
        What was done, and why no newer one is used, for the first lines of the log; None on a CPU, and where no rank
        has a package.

    Raises:
        ExpertMeshError: on all ranks, when torch could not take it after all.
    """
    chosen, reasons = _choice_of_ranks(model, config, ranks)
    if chosen is None:
        restore()
        return "; ".join(reasons) or None
    activate(chosen)
    which = f"{chosen.package} {installed_version(chosen.package)}"
    return "; ".join([f"{chosen.words} ({which}) computes flash attention", *reasons])


def _choice_of_ranks(model: Any, config: TrainConfig, ranks: Ranks) -> tuple[FlashKernels | None, list[str]]:
    """The newest that none of the ranks has an obstacle to, if any, and why those before it are not used, of which a
    rank has the package."""
    if ranks.device.type != "cuda":
        return None, []
    reasons: list[str] = []
    for kernels in FLASH_KERNELS:
        obstacles: list[Any] = [None] * ranks.world_size
        dist.all_gather_object(obstacles, _obstacle_to(kernels, model, config))
        first = next((rank for rank, found in enumerate(obstacles) if found), None)
        if first is None:
            return kernels, reasons
        if any(found != not_installed(kernels) for found in obstacles):
            where = "" if all(obstacles) else f"on rank {first} "
            reasons.append(f"{kernels.words} is not used: {where}{obstacles[first]}")
    return None, reasons


def _obstacle_to(kernels: FlashKernels, model: Any, config: TrainConfig) -> str:
    """Why they cannot be used here for this model and run; empty if they can."""
    # what takes seconds last: to import the package
    return (installed_version(kernels.package) and _not_for(kernels, model, config)) or obstacle(kernels)


def not_installed(kernels: FlashKernels) -> str:
    """What keeps those from it that do not have it."""
    return f"{kernels.package} is not installed"


def obstacle(kernels: FlashKernels) -> str:
    """Why it cannot be used with this GPU, torch and package; empty if it can."""
    if not (installed := installed_version(kernels.package)):
        return not_installed(kernels)
    capability = torch.cuda.get_device_capability()
    if capability[0] not in kernels.cards:
        known = " or ".join(f"{major} ({name})" for major, name in kernels.cards.items())
        return f"it needs a GPU of compute capability {known}; this one has {capability[0]}.{capability[1]}"
    for what, found, least in (
        (kernels.package, installed, kernels.at_least),
        ("torch", torch.__version__, kernels.torch_at_least),
    ):
        if least and Version(found) < Version(least):
            return f"it needs {what} {least} or newer; this is {found}"
    try:
        lacking = kernels.lacking()
    except Exception as error:  # built for another torch or CUDA it fails in many ways
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return f"{kernels.package} {installed} cannot be imported: {why}"
    if lacking:
        return f"{kernels.package} {installed}: {lacking}"
    if kernels.name not in list_flash_attention_impls():
        return f"torch {torch.__version__} does not support it (expertmesh was tested with torch {SUPPORTED})"
    return ""


def _not_for(kernels: FlashKernels, model: Any, config: TrainConfig) -> str:
    """Why they are not used for this model and run; empty if they can be."""
    text_config = model.config.get_text_config()
    if dropout := getattr(text_config, "attention_dropout", 0):
        return f"it has no dropout; this model's attention_dropout is {dropout:g}"
    if config.deterministic:
        return "--deterministic uses torch's own, which is known to be deterministic"
    return kernels.unsuited(text_config)


@contextmanager
def computing_by(kernels: FlashKernels) -> Iterator[None]:
    """Within it torch computes flash attention by them; then by its own kernel.

    Raises:
        ExpertMeshError: torch cannot take them.
    """
    activate(kernels)
    try:
        yield
    finally:
        restore()


def restore() -> None:
    """Have torch compute flash attention by its own kernel, where one of these has taken its place."""
    if current_flash_attention_impl() in [kernels.name for kernels in FLASH_KERNELS]:
        restore_flash_attention_impl()


def activate(kernels: FlashKernels) -> None:
    """Have torch compute flash attention by them.

    Raises:
        ExpertMeshError: torch cannot take them.
    """
    if current_flash_attention_impl() == kernels.name:
        return
    try:
        activate_flash_attention_impl(kernels.name)
    except (AttributeError, RuntimeError, ImportError) as error:
        raise ExpertMeshError(
            f"torch {torch.__version__} cannot use the {kernels.words} that is installed: {error}; uninstall "
            f"{kernels.package}, or install one that was built for this torch"
        ) from error

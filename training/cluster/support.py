"""Which ways of training a model supports, found out by building it as a run would, on the meta device.

`python -m expertmesh.moe families --table` prints it. Nothing is downloaded but a config.json, and no memory held.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from ...moe.experts.lora import store_frozen
from ...moe.hf_model.family_exceptions import UNSUPPORTED
from ...moe.util.errors import ExpertMeshError
from ..config.train_config import TrainConfig
from ..planning.rehearsal.building import build_rehearsed

METHODS = ("full", "LoRA", "packing", "CP", "TP", "quantized base")
"""Ways of training: of all weights, of adapters, with packed sequences, on context-parallel and on tensor-parallel
ranks, and of adapters beside quantized weights."""

_SIZE = 2
"""Ranks that are tried; others have to divide the attention heads, too."""

INCOMPLETE = "?"
"""The cells of a family whose default config makes no model: they depend on what a config.json says."""


def support_of(config: Any) -> dict[str, str]:
    """By method, the error that a model of this config ends in, empty where it has none."""
    if config.model_type in UNSUPPORTED:
        return dict.fromkeys(METHODS, UNSUPPORTED[config.model_type])
    found = dict.fromkeys(METHODS, "")
    try:
        _build(config)
    except ExpertMeshError as error:
        return dict.fromkeys(METHODS, str(error))
    try:
        _build(config, cp_size=_SIZE)
    except ExpertMeshError as error:
        found["CP"] = str(error)
    try:
        _build(config, tp_size=_SIZE)
    except ExpertMeshError as error:
        found["TP"] = str(error)
    try:
        _build(config, packing=True)
    except ExpertMeshError as error:
        found["packing"] = str(error)
    try:
        adapted = _build(config, adapter="lora")
    except ExpertMeshError as error:
        return found | {"LoRA": str(error), "quantized base": str(error)}
    try:
        store_frozen(adapted, "nf4")
    except ExpertMeshError as error:
        found["quantized base"] = str(error)
    return found


def _build(config: Any, **settings: Any) -> Any:
    return build_rehearsed(TrainConfig(model="model", dataset=["data"], **settings), config, "cpu")


def cells_of(config: Any) -> list[str]:
    """The table's cells, one per method."""
    found = support_of(config)
    if found["full"]:
        return ["no" if config.model_type in UNSUPPORTED else INCOMPLETE] * len(METHODS)
    return ["no" if error else "yes" for error in found.values()]


def markdown(rows: Iterable[tuple[str, Any]], *columns: str) -> Iterator[str]:
    """The table's lines in Markdown, each as soon as it is known.

    Args:
        rows: what a line begins with (as many cells as there are `columns`), and the config of its model.
    """
    header = [*columns, *METHODS]
    yield f"| {' | '.join(header)} |"
    yield f"|{' --- |' * len(header)}"
    for first, config in rows:
        yield f"| {' | '.join([first, *cells_of(config)])} |"

"""What a config.json claims beside what is trained: other parts of a model, and layers for multi-token prediction."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .untrained_tensors import by_module

if TYPE_CHECKING:
    from .source import Checkpoint

_PREDICTORS = re.compile(r"(\w+_)?(nextn|mtp)(_\w+)?_(layers|modules|heads)|use_mtp")
"""Settings that say how many layers for multi-token prediction there are, or whether."""


def without_untrained(raw: Mapping[str, Any], config: Any, keeps_predictors: bool = False) -> dict[str, Any]:
    """A config.json that claims no more than the causal language model which is trained: of one with several parts, the
    text part, where transformers has a class for it; and no layers for multi-token prediction.

    Args:
        config: transformers' object for it.
        keeps_predictors: whether a layer for multi-token prediction is trained.
    """
    from ...moe.hf_model.build import model_class

    causal, text = model_class(config), config.get_text_config()
    if not issubclass(type(config), causal.config_class):
        part = next((name for name in config.sub_configs if getattr(config, name, None) is text), None)
        said = raw.get(part) if part is not None else None
        kept = {name: raw[name] for name in ("dtype", "torch_dtype", "transformers_version") if name in raw}
        own = dict(said) if isinstance(said, dict) else text.to_dict()
        if "tie_word_embeddings" in raw:  # by which the whole goes, and the text part now does (see `load_config`)
            own["tie_word_embeddings"] = text.tie_word_embeddings
        raw = {"architectures": [causal.__name__], **kept, **own, "model_type": text.model_type}
        raw["architectures"] = [causal.__name__]
    return dict(raw) if keeps_predictors else _without_predictors(raw)


def _without_predictors(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_predictors(value)
        if isinstance(value, dict)
        else (type(value)(0) if _claims_predictors(name, value) else value)
        for name, value in raw.items()
    }


def _claims_predictors(name: str, value: Any) -> bool:
    return isinstance(value, int) and value > 0 and _PREDICTORS.fullmatch(name) is not None


def _predictors(raw: Mapping[str, Any]) -> Iterator[str]:
    """The settings that claim layers for multi-token prediction, as in "num_nextn_predict_layers 1"."""
    for name, value in raw.items():
        if isinstance(value, dict):
            yield from _predictors(value)
        elif _claims_predictors(name, value):
            yield f"{name} {value}"


def unfilled(raw: Mapping[str, Any], checkpoint: Checkpoint) -> tuple[str | None, str | None]:
    """What a config.json claims and no tensor of the checkpoint fills.

    Returns:
        (what transformers would fill with random values, layers for multi-token prediction, which it does without), in
        a line each; None where nothing is lacking.

    Raises:
        ExpertMeshError: transformers cannot build the class that config.json names.
    """
    from .class_names import whole_model  # needs torch, which to describe files does without

    lacking = without_tensors = None
    others = {tensor.name for tensor in checkpoint.carried}
    whole = whole_model(replace(checkpoint.source, mtp=None).config)
    if whole is not None:
        found = [tensor.name for tensor in checkpoint.exported] + sorted(others)
        targets = _targets(whole, found, checkpoint.names.shape.num_experts)
        missing = [same for same in _same_tensors(whole) if not same & targets.keys()]
        others -= {name for target in targets for name in targets[target]}
        if missing:
            told = by_module([min(same) for same in missing], targets)
            lacking = f"config.json names a {type(whole).__name__}, which lacks {len(missing):,} tensors: {told}"
    if predictors := missing_predictors(raw, checkpoint, others):
        without_tensors = f"layers for multi-token prediction that config.json names: {predictors}"
    return lacking, without_tensors


def missing_predictors(raw: Mapping[str, Any], checkpoint: Checkpoint, others: Iterable[str] | None = None) -> str:
    """The settings of a config.json that claim layers for multi-token prediction of which the checkpoint has no tensor;
    empty if there is none. A server that drafts by them would not start.

    Args:
        others: the tensors among which they would be; None: all that go along untrained.
    """
    others = [tensor.name for tensor in checkpoint.carried] if others is None else others
    are_there = checkpoint.source.mtp is not None or not all(map(checkpoint.names.is_computed, others))
    return "" if are_there else ", ".join(_predictors(raw))


def without_missing_predictors(raw: dict[str, Any], checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """A config.json that claims no such layers, and a line that says so, if it did."""
    claimed = missing_predictors(raw, checkpoint)
    if not claimed or checkpoint.drops_untrained:
        return raw, []
    return _without_predictors(raw), [
        f"config.json no longer has {claimed}: the model's files have no layer for multi-token prediction"
    ]


def _targets(model: Any, found: Iterable[str], num_experts: int) -> dict[str, list[str]]:
    """The names of tensors on disk by the tensor of a model of transformers that they make up."""
    from .names import put_together

    known = dict.fromkeys(model.state_dict(), True)
    targets: dict[str, list[str]] = {}
    for target, _, names in put_together(model, found, known, num_experts):
        if target in known:
            targets.setdefault(target, []).extend(names)
    return targets


def _same_tensors(model: Any) -> list[set[str]]:
    """The names of each tensor that a model's checkpoint must have: of a tied one several."""
    model.tie_weights()
    same: dict[int, set[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        same.setdefault(id(tensor), set()).add(name)
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    return [names for names in same.values() if not any(p.search(name) for p in ignored for name in names)]

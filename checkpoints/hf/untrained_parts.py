"""What a config.json claims beside what is trained: other parts of a model, and layers for multi-token prediction."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .untrained_tensors import by_module

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

_PREDICTORS = re.compile(r"(\w+_)?(nextn|mtp)(_\w+)?_(layers|modules|heads)|use_mtp")
"""Settings that say how many layers for multi-token prediction there are, or whether."""


def language_model_alone(raw: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """A config.json that claims no more than the causal language model which is trained: of one with several parts, the
    text part, where transformers has a class for it.

    Args:
        config: transformers' object for it.
    """
    from ...moe.hf_model.build import model_class

    if describes_language_model(config):
        return dict(raw)
    causal, text = model_class(config), config.get_text_config()
    part = next((name for name in config.sub_configs if getattr(config, name, None) is text), None)
    said = raw.get(part) if part is not None else None
    kept = {name: raw[name] for name in ("dtype", "torch_dtype", "transformers_version") if name in raw}
    own = dict(said) if isinstance(said, dict) else text.to_dict()
    if "tie_word_embeddings" in raw:  # by which the whole goes, and the text part now does (see `load_config`)
        own["tie_word_embeddings"] = text.tie_word_embeddings
    return {**kept, **own, "architectures": [causal.__name__], "model_type": text.model_type}


def describes_language_model(config: Any) -> bool:
    """Whether the class that is trained takes a config as it is: then it has no smaller one to give way to."""
    from ...moe.hf_model.build import model_class

    return isinstance(config, model_class(config).config_class)


def without_predictors(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that claims no layers for multi-token prediction."""
    return {
        name: without_predictors(value)
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


@dataclass(frozen=True)
class Unfilled:
    """What a config.json claims and no tensor of a checkpoint fills, in words; empty where nothing is lacking.

    parts: what transformers would fill with random values. has_none: whether of the parts beside the language model
    there is no tensor at all. predictors: settings that claim layers for multi-token prediction, which transformers
    does without, and by which a server that drafts would not start.
    """

    parts: str = ""
    has_none: bool = False
    predictors: str = ""


def unfilled(raw: Mapping[str, Any], checkpoint: Checkpoint) -> Unfilled:
    """
    Raises:
        ExpertMeshError: transformers cannot build the class that config.json names.
    """
    from .class_names import whole_model  # needs torch, which to describe files does without

    parts, has_none = "", False
    others = {tensor.name for tensor in checkpoint.carried}
    whole = whole_model(replace(checkpoint.source, mtp=None).config)
    if whole is not None:
        found = [tensor.name for tensor in checkpoint.exported] + sorted(others)
        targets = _targets(whole, found, checkpoint.names.shape.num_experts)
        missing = [same for same in _same_tensors(whole) if not same & targets.keys()]
        of_parts = others & {name for target in targets for name in targets[target]}
        others -= of_parts
        if missing:
            lacking = by_module([min(same) for same in missing], targets)
            parts = f"config.json names a {type(whole).__name__}, which lacks {len(missing):,} tensors: {lacking}"
            has_none = all(map(checkpoint.names.is_computed, of_parts))
    return Unfilled(parts, has_none, missing_predictors(raw, checkpoint, others))


def missing_predictors(raw: Mapping[str, Any], checkpoint: Checkpoint, others: Iterable[str]) -> str:
    """The settings of a config.json that claim layers for multi-token prediction of which the checkpoint has no tensor;
    empty if there is none.

    Args:
        others: untrained tensors that no other part of the model has.
    """
    are_there = checkpoint.source.mtp is not None or not all(map(checkpoint.names.is_computed, others))
    return "" if are_there else ", ".join(_predictors(raw))


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

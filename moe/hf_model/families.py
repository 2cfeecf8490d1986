"""The families of mixture-of-experts models that the installed transformers has."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..util.errors import ExpertMeshError
from .family_exceptions import UNDIVIDED, UNSUPPORTED


@dataclass(frozen=True)
class FamilyFacts:
    """A family's class and, by its default config, its decoder layers, those with experts, experts per layer and per
    token."""

    class_name: str
    layers: int
    moe_layers: int
    num_experts: int
    top_k: int


@cache
def causal_families() -> tuple[str, ...]:
    """The model type of every class that predicts next tokens, of text alone or of images and more beside it, whose
    module, or that of its language model, marks a class as experts: one type per class, that of complete checkpoints
    (`..._moe`) before that of their text part (`..._moe_text`)."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    marked = {name: kind for name, kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if _marks_experts(name)}
    several_parts = {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    with_parts = {
        name: kind
        for name, kind in several_parts.items()
        if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and _has_marked_part(name)
    }
    return tuple(sorted({**_type_by_class(with_parts), **_type_by_class(marked)}.values()))


def _type_by_class(classes: dict[str, Any]) -> dict[Any, str]:
    """Of each class one of its model types: one whose config has parts before others, and the last of several."""
    from transformers import CONFIG_MAPPING

    types: dict[Any, str] = {}
    for model_type, class_name in classes.items():
        if class_name not in types or CONFIG_MAPPING[model_type].sub_configs:
            types[class_name] = model_type
    return types


def _with_parts(kind: Any) -> list[Any]:
    """The class of a config and those of its parts; where it says of a part nothing but that it is a config, those of
    its default."""
    parts = getattr(kind, "sub_configs", {}).values()
    if any(part.__name__ == "AutoConfig" for part in parts):
        return [kind, type(kind().get_text_config())]
    return [kind, *(part for own in parts for part in _with_parts(own))]


@cache
def families_with_plan() -> tuple[str, ...]:
    """The families whose attention transformers' plans of tensor parallelism (`base_model_tp_plan`) divide; without
    those of which `family_exceptions` says that it cannot be."""
    from transformers import CONFIG_MAPPING

    found = []
    for family in causal_families():
        if family in UNDIVIDED:
            continue
        plans = [getattr(kind, "base_model_tp_plan", None) or {} for kind in _with_parts(CONFIG_MAPPING[family])]
        if any("attn." in name and style.startswith("rowwise") for plan in plans for name, style in plan.items()):
            found.append(family)
    return tuple(found)


def _has_marked_part(model_type: str) -> bool:
    """Whether a family of several parts, or the language model of its default config, marks experts."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if _marks_experts(model_type):
        return True
    # of most the default is not made: that would take seconds
    named = set(re.findall(r"\"(\w+)\"", family_source("configuration", model_type))) & CONFIG_MAPPING_NAMES.keys()
    if not any(map(_marks_experts, named)):
        return False
    return _marks_experts(CONFIG_MAPPING[model_type]().get_text_config().model_type)


def _marks_experts(model_type: str) -> bool:
    return "\n@use_experts_implementation" in family_source("modeling", model_type)


def family_source(kind: str, model_type: str) -> str:
    """A file of a family in transformers; empty if there is none."""
    # read, not imported: that would take all families' modules, and many seconds
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = model_type_to_module_name(model_type)
    file = Path(transformers.__file__).parent / "models" / folder / f"{kind}_{folder}.py"
    return file.read_text(encoding="utf-8") if file.exists() else ""


def describe_family(model_type: str) -> FamilyFacts | str:
    """The facts of a family, or why it cannot be trained or described."""
    from transformers import CONFIG_MAPPING

    from ..experts.model_layers import decoder_layers, moe_layers, moe_shape
    from .build import build_model

    if model_type in UNSUPPORTED:
        return f"no: {UNSUPPORTED[model_type]}"
    try:
        model = build_model(CONFIG_MAPPING[model_type]())
    except ExpertMeshError as error:
        return f"depends on its config.json: the default one is incomplete ({error})"
    shape = moe_shape(model)
    layers, with_experts = len(decoder_layers(model)), len(moe_layers(model))
    return FamilyFacts(type(model).__name__, layers, with_experts, shape.num_experts, shape.top_k)

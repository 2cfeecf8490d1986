"""Reading a config.json: checks that its numbers can be those of a model, and makes transformers' config object of it.

Integers that modules and tables are sized by are bounded: layers, experts, heads, tokens, widths. The bounds are far
beyond any existing model, and low enough that a damaged config builds nothing without end. Fractions size nothing,
whatever they are called; where an integer belongs, transformers' config class, which declares a type for each setting,
refuses a fraction when it is made.

Code that a directory brings (`auto_map`) is never run: a model is of the class that transformers has for its type.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..util.errors import ExpertMeshError

_MOST_LAYERS, _MOST_EXPERTS = 2**10, 2**12
_MOST_EXPERTS_OF_ALL_LAYERS = 2**17
_MOST_NUMBER, _MOST_FLOAT = 2**40, 1e38  # which fp32 holds
_LIMITS = r".*_limit"  # to which something is clamped: the largest float there is stands for none

# (which settings, the least and the most they may be); the first that matches. -1 is how some say "none" or "all"
_COUNTS: tuple[tuple[str, int, int], ...] = (
    (r"num_(hidden_)?layers|n_layers?", 1, _MOST_LAYERS),
    (r".*layers", -1, _MOST_LAYERS),
    # 0 too: of a dense layer, or of a part that has none
    (r".*experts.*|moe_(top)?k|n_groups?|topk_group", 0, _MOST_EXPERTS),
    (r"(num|n)_attention_heads|num_key_value_heads", 1, 2**12),
    (r".*heads", 0, 2**12),
    (r"vocab_size", 1, 2**24),
    (r".*vocab_size", -1, 2**24),
    (r"hidden_size|d_model", 1, 2**20),
    (r".*_size|.*_dim|.*_rank|.*_width", -1, 2**20),
    (r"max_position_embeddings", 1, 2**31),
)
_RANGES = ((r".*(dropout|jitter_noise)", 0.0, 1.0), (r".*_eps(ilon)?", 0.0, 1.0), (r".*_coef", 0.0, 1e6))


def check_config(raw: Mapping[str, Any], where: str) -> str:
    """Check the numbers of a config.json, and return its model type.

    Raises:
        ExpertMeshError: there is no model type; or a number is no number, not finite, or beyond any model's; or a
            window of attention has no tokens.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", model_type):
        raise ExpertMeshError(f"{where}: model_type is {model_type!r:.80}; it must be the name of a family of models")
    for path, name, value in _settings(raw):
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(where, path, name, value)
    _check_experts(raw, where)
    _check_window(raw, where)
    return model_type


def load_config(path: Path | None, raw: Mapping[str, Any], where: str) -> Any:
    """transformers' config object of a config.json, or of the directory that holds it.

    Args:
        path: None where there is no file yet.
        raw: its content, which has been checked.

    Raises:
        ExpertMeshError: transformers has no models of this type, or its config class refuses a setting.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if raw["model_type"] not in CONFIG_MAPPING:
        raise ExpertMeshError(f"{where}: {_unknown_type(raw)}")
    try:
        if path is None:
            config = CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
        else:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ExpertMeshError(f"{where}: transformers cannot read it: {reason:.400}") from error
    tie_text_as_whole(config, raw)
    return config


def tie_text_as_whole(config: Any, raw: Mapping[str, Any]) -> None:
    """Have a config's text part say, in place, whether embedding and output projection are tied, as config.json says it
    of the whole model. transformers' class of the whole goes by that; its class of the language model alone, which is
    trained, would go by what the text part says, and be another model where the two differ.

    Args:
        config: of transformers. raw: the config.json that it was read from.
    """
    from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM

    text = config.get_text_config()
    if text is config or "tie_word_embeddings" not in raw:
        return
    mappings: list[Any] = [auto._model_mapping for auto in (AutoModelForImageTextToText, AutoModelForMultimodalLM)]
    classes = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    # one without such keys leaves it to a causal language model inside it, which goes by the text part
    if any(whole._tied_weights_keys for whole in classes):
        text.tie_word_embeddings = config.tie_word_embeddings


def _unknown_type(raw: Mapping[str, Any]) -> str:
    """The message that transformers knows no such models, and what would work: the class that a directory's own code
    implements is often in transformers under another type."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    said = f"transformers {transformers.__version__} has no models of type {raw['model_type']}"
    listed = raw.get("architectures")
    class_name = listed[0] if isinstance(listed, list) and listed else None
    types = [model_type for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == class_name]
    if types:
        return (
            f"{said}; its architectures name {class_name}, a class of type {types[0]}: write "
            f'"model_type": "{types[0]}" in a copy of this config.json'
        )
    own_code = ", and a model's own code (auto_map) is never run" if "auto_map" in raw else ""
    return (
        f"{said}{own_code}; a later release may support them. `python -m expertmesh.moe families` "
        "lists what can be trained"
    )


def _settings(raw: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """(full name, name, value) of every setting, those in lists and tables of it included."""
    for name, value in raw.items():
        full = f"{path}{name}"
        yield full, str(name), value
        if isinstance(value, Mapping):
            yield from _settings(value, f"{full}.")
        elif isinstance(value, list):
            yield from _listed(value, full, str(name))


def _listed(values: list[Any], full: str, name: str) -> Iterator[tuple[str, str, Any]]:
    for number, value in enumerate(values):
        if isinstance(value, Mapping):
            yield from _settings(value, f"{full}[{number}].")
        elif isinstance(value, list):
            yield from _listed(value, f"{full}[{number}]", name)
        else:
            yield f"{full}[{number}]", name, value


def _check_number(where: str, path: str, name: str, value: Any) -> None:
    if isinstance(value, int):
        bounds = next(((least, most) for pattern, least, most in _COUNTS if re.fullmatch(pattern, name)), None)
        if bounds is not None and not bounds[0] <= value <= bounds[1]:
            raise ExpertMeshError(
                f"{where}: {path} is {_brief(value)}; it must be an integer from {bounds[0]:,} to {bounds[1]:,}"
            )
    for pattern, low, high in _RANGES:
        if re.fullmatch(pattern, name) and not low <= value <= high:  # not true of NaN
            raise ExpertMeshError(f"{where}: {path} is {_brief(value)}; it must be a number from {low:g} to {high:g}")
    most_number = _MOST_NUMBER if isinstance(value, int) else math.inf if re.fullmatch(_LIMITS, name) else _MOST_FLOAT
    if abs(value) != math.inf and not abs(value) <= most_number:  # not true of NaN
        raise ExpertMeshError(f"{where}: {path} is {_brief(value)}; that is more than any model has")


def _check_experts(raw: Mapping[str, Any], where: str) -> None:
    layers = [value for _, name, value in _settings(raw) if name in ("num_hidden_layers", "num_layers", "n_layer")]
    experts = [value for _, name, value in _settings(raw) if "experts" in name and type(value) is int]
    most = max((n for n in layers if type(n) is int), default=1) * max(experts, default=1)
    if most > _MOST_EXPERTS_OF_ALL_LAYERS:
        raise ExpertMeshError(
            f"{where}: {max(experts)} experts in each of {most // max(experts)} layers exceed "
            f"{_MOST_EXPERTS_OF_ALL_LAYERS:,}, more than any model has"
        )


def _check_window(raw: Mapping[str, Any], where: str, path: str = "") -> None:
    """With a window of no tokens nothing is attended to, and nothing says so. Where no layer has windows, some classes
    of transformers write 0."""
    window, layers = raw.get("sliding_window"), raw.get("layer_types")
    has_windows = raw.get("use_sliding_window") is not False and (
        not isinstance(layers, list) or any("sliding" in str(kind) for kind in layers)
    )
    if type(window) is int and window < 1 and has_windows:
        raise ExpertMeshError(
            f"{where}: {path}sliding_window is {_brief(window)}; it must be 1 or more tokens, or null for no window"
        )
    for name, value in raw.items():
        if isinstance(value, Mapping):
            _check_window(value, where, f"{path}{name}.")


def _brief(value: Any) -> str:
    return f"10^{math.log10(abs(value)):.0f}" if isinstance(value, int) and abs(value) > 2**64 else f"{value!r:.80}"

"""Kinds of decoder layers, by the names that configs have for them: which other tokens a token sees in such a layer.

A kind that is not here sees more than a mask shows: packed, its layers run sample by sample, and under context
parallelism with complete sequences, which is right for any, and slower. A kind of your own is one call of
`register_layer_kind`, before a model is built; README.md has an example.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ...moe.experts.model_layers import decoder_layers
from ...moe.util.entry_checks import check_fields

Sees = Literal["itself", "past", "window", "mask", "state"]


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer.

    Attributes:
        name: in a config's `layer_types` or `layers_block_type`.
        sees: what a token sees there of others. "itself": nothing. By attention that goes through transformers'
            interface: "past", all before it; "window", some of them, as a mask of transformers' for sliding windows
            says; "mask", what another mask leaves of them. "state": by a state or a convolution alone.
        mask: transformers' function that makes its mask of packed samples from positions; None: the model makes it.
    """

    name: str
    sees: Sees
    mask: Callable[..., Any] | None


LAYER_KINDS = {
    kind.name: kind
    for kind in (
        LayerKind("full_attention", "past", create_causal_mask),
        LayerKind("attention", "past", None),
        LayerKind("sliding_attention", "window", create_sliding_window_causal_mask),
        LayerKind("chunked_attention", "mask", None),
        LayerKind("linear_attention", "state", None),
        LayerKind("mamba", "state", None),
        LayerKind("conv", "state", None),
        # named by what stands beside attention, which sees all
        LayerKind("sparse", "past", None),
        LayerKind("dense", "past", None),
        LayerKind("moe", "itself", None),
        LayerKind("mlp", "itself", None),
    )
}
"""By name."""

_OURS = frozenset(LAYER_KINDS)


def has_layer_kinds_from_outside() -> bool:
    """Whether a kind is registered that is not of this project."""
    return not _OURS.issuperset(LAYER_KINDS)


def register_layer_kind(added: LayerKind) -> None:
    """Say what is seen in layers of one more kind. Packed samples and sequences on several ranks are tried when a model
    is built: one for which it is not true is refused, or computed as if it were not here.

    Raises:
        ValueError: its name is taken, or a field is not of its type.
    """
    if not added.name:
        raise ValueError("register_layer_kind: it has no name")
    check_fields(f"register_layer_kind: layers {added.name!r}", added)
    if added.name in LAYER_KINDS:
        raise ValueError(f"register_layer_kind: there are layers {added.name!r} already")
    LAYER_KINDS[added.name] = added


def kinds_of_layers(text_config: Any) -> set[str]:
    """As a config names them; empty where all are alike."""
    names = ("layer_types", "layers_block_type")
    return {str(kind) for name in names for kind in getattr(text_config, name, None) or ()}


def kinds_by_layer(model: Any) -> list[str | None]:
    """The kind of each of a model's layers as its config names it; None where all are alike."""
    text_config, num_layers = model.config.get_text_config(), len(decoder_layers(model))
    kinds = getattr(text_config, "layer_types", None) or getattr(text_config, "layers_block_type", None)
    return [str(kind) for kind in kinds[:num_layers]] if kinds else [None] * num_layers


def seen_in(kind: str) -> Sees | None:
    """What is seen in layers of a kind; None: more than a mask shows."""
    return LAYER_KINDS[kind].sees if kind in LAYER_KINDS else None


def seen_by_mask(kind: str | None) -> bool:
    """Whether all that a token sees in layers of this kind, beside itself, it sees by attention under a mask."""
    return kind is None or seen_in(kind) in ("itself", "past", "window", "mask")


def table_of_layer_kinds() -> str:
    """The table in README.md."""
    words_for = {
        "itself": "itself alone",
        "past": "all before it",
        "window": "a window",
        "mask": "what a mask leaves",
        "state": "by a state or a convolution",
    }
    rows = [("a token sees", "kinds of layers"), ("---",) * 2]
    for sees, words in words_for.items():
        rows.append((words, ", ".join(f"`{kind.name}`" for kind in LAYER_KINDS.values() if kind.sees == sees)))
    return "".join(f"| {words} | {names} |\n" for words, names in rows)

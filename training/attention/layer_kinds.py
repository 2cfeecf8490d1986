"""How decoder layers attend: one table, by what a token sees of other tokens in a layer, and the kinds of layers that
configs name.

A kind that is not here may see more than a mask shows: packed, its layers run sample by sample, and under context
parallelism with complete sequences, which is right for any, and slower. A kind of your own is one call of
`register_layer_kind`, before a model is built; docs/how-to/extend.md has an example.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ...moe.experts.model_layers import decoder_layers
from ...moe.util.entry_checks import check_fields

Sees = Literal["itself", "past", "window", "mask", "state"]


@dataclass(frozen=True)
class Attending:
    """How layers in which a token sees this much are computed.

    Attributes:
        words: what a token sees of others.
        by_attention: whether it sees them by attention alone that goes through transformers' interface. Then packed
            samples are kept apart by what attention is told, and a CP group's ranks each compute some heads. Else each
            sample is a sequence of its own (`by_sample`), and ranks compute complete sequences (`complete_sequences`).
        by_ours: whether our own attention (`packed_attention`) computes it, which needs no mask and is flash attention
            on a GPU. None: there is no attention to compute.
    """

    words: str
    by_attention: bool
    by_ours: bool | None


ATTENDING: dict[Sees | None, Attending] = {
    "itself": Attending("itself alone", by_attention=True, by_ours=None),
    "past": Attending("all before it", by_attention=True, by_ours=True),
    "window": Attending("a window", by_attention=True, by_ours=True),
    "mask": Attending("what another mask leaves", by_attention=True, by_ours=False),
    "state": Attending("all before it, by a state or a convolution", by_attention=False, by_ours=None),
    None: Attending("more than a mask shows, perhaps", by_attention=False, by_ours=False),
}


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
        raise ValueError("register_layer_kind: the layer kind has no name")
    check_fields(f"register_layer_kind: layers {added.name!r}", added)
    if added.name in LAYER_KINDS:
        raise ValueError(f"register_layer_kind: {added.name!r} is already registered")
    LAYER_KINDS[added.name] = added


def kinds_in_config(text_config: Any) -> list[str]:
    """The kind of each layer as a config names it; empty where all are alike."""
    kinds = getattr(text_config, "layer_types", None) or getattr(text_config, "layers_block_type", None) or ()
    return [str(kind) for kind in kinds]


def kinds_by_layer(model: Any) -> list[str | None]:
    """The kind of each of a model's layers as its config names it; None where all are alike."""
    kinds, num_layers = kinds_in_config(model.config.get_text_config()), len(decoder_layers(model))
    return [*kinds[:num_layers]] if kinds else [None] * num_layers


def seen_in(kind: str | None) -> Sees | None:
    """What is seen in layers of a kind; None: perhaps more than a mask shows. Where all layers are alike they attend to
    the past, or a window of it."""
    if kind is None:
        return "past"
    return LAYER_KINDS[kind].sees if kind in LAYER_KINDS else None


def has_windows(text_config: Any) -> bool:
    """Whether a token sees a window of those before it in some layers."""
    if kinds := kinds_in_config(text_config):
        return any(seen_in(kind) == "window" for kind in kinds)
    return getattr(text_config, "sliding_window", None) is not None


def attends(kind: str | None) -> bool:
    """Whether all that a token sees in layers of this kind, beside itself, it sees by attention."""
    return ATTENDING[seen_in(kind)].by_attention


_CACHES = frozenset({"cache", "past_key_values", "past_key_value", "cache_params"})
"""Names of the argument that transformers' modules take their cache by: `cache` since 5.24."""


def mixers_of(layer: nn.Module) -> Iterator[nn.Module]:
    """The parts of a decoder layer that may mix positions: the outermost modules that take a cache. What sees other
    positions needs one in generation, and what takes none looks at each position by itself."""
    for part in layer.children():
        if _CACHES.isdisjoint(inspect.signature(type(part).forward).parameters):
            yield from mixers_of(part)
        else:
            yield part

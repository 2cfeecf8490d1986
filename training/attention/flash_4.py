"""Flash attention 4 as torch calls it: torch looks up `_flash_attn_fwd` and `_flash_attn_bwd` in the module that it is
told of, which is this one in the place of the package's own.

Two things are between them. Since 4.0.0b20 the package's forward returns more than its output and log-sum-exps, which
torch before 2.14 takes for an error. And of those that it takes on Blackwell are heads of up to 128, and of 256 without
windows: widths between them are filled up with zeros, which add nothing to a score, and what they give as values is cut
off.

`use_flash_kernels` (`training.attention.flash_kernels`) has torch take it. No GPU has run it yet.

Shape suffixes: W widths of heads as given, F filled up; the dims before, ..., are (N, H) or (B, S, H).
"""

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import register_flash_attention_impl

from ...moe import torch_private
from ...moe.util.errors import ExpertMeshError
from ...moe.util.versions import takes
from .layer_kinds import has_windows

NAME = "expertmesh FA4"
"""Among torch's implementations of flash attention."""
MODULE = "flash_attn.cute.interface"

_COMMON = ("softmax_scale", "causal", "window_size_left", "window_size_right", "cu_seqlens_q", "cu_seqlens_k")
TAKEN = {
    "_flash_attn_fwd": (
        ("q", "k", "v"),
        (*_COMMON, "return_lse", "max_seqlen_q", "max_seqlen_k", "seqused_k", "page_table", "num_splits", "out"),
    ),
    "_flash_attn_bwd": (("q", "k", "v", "out", "dout", "lse"), (*_COMMON, "deterministic")),
}
"""What torch gives the package's functions: by position, and by name."""

_BLACKWELL = 10
_BLACKWELLS_NARROW, _BLACKWELLS_WIDE = 128, 256
"""Widths of heads there: of any up to the first, or of the second."""


def unsuited(text_config: Any) -> str:
    """Why it is not for a model on this GPU, in words; empty if it is."""
    if not _is_blackwell() or not has_windows(text_config) or _widest_head(text_config) <= _BLACKWELLS_NARROW:
        return ""
    return f"on Blackwell it has no windows for heads wider than {_BLACKWELLS_NARROW}"


def _widest_head(text_config: Any) -> int:
    """At most: a config may name the parts of a head, and heads of layers without attention."""
    named = {name: width for name, width in vars(text_config).items() if name.endswith("head_dim")}
    widths = [width for width in named.values() if isinstance(width, int)]
    if not widths:
        return int(text_config.hidden_size // text_config.num_attention_heads)
    parts = [named.get(f"qk_{part}_head_dim") or 0 for part in ("nope", "rope")]
    return max(*widths, sum(parts))


def _is_blackwell() -> bool:
    return torch.cuda.get_device_capability()[0] == _BLACKWELL


def lacking() -> str:
    """What torch and the installed package lack of what each expects of the other, in words; empty if nothing.

    Raises:
        Exception: anything, where the package cannot be imported.
        ExpertMeshError: this torch has no flash attention 4.
    """
    _ = torch_private.register_flash_attention_fa4
    package = importlib.import_module(MODULE)
    for name, (by_place, by_name) in TAKEN.items():
        function = getattr(package, name, None)
        if function is None:
            return f"{MODULE} has no {name}, which torch calls"
        if not takes(function, by_place, by_name):
            return f"{MODULE}.{name} does not take what torch gives it"
    return ""


def _flash_attn_fwd(query_W: Tensor, key_W: Tensor, value_W: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Output, which is of the values' width, and log-sum-exps; settings: as the package's own takes them.

    Raises:
        ExpertMeshError: windows in heads of a width for which its backward has none.
    """
    package = importlib.import_module(MODULE)
    widths = _filled_widths(query_W, value_W)
    if _is_blackwell() and max(widths) == _BLACKWELLS_WIDE and settings["window_size_left"] is not None:
        raise ExpertMeshError(
            f"flash attention 4 takes no heads of {query_W.shape[-1]} with windows on Blackwell; uninstall flash-attn-4"
        )
    if widths == (query_W.shape[-1], value_W.shape[-1]):
        out_W, lse = package._flash_attn_fwd(query_W, key_W, value_W, **settings)[:2]
        return out_W, lse
    into_W = settings.pop("out", None)
    settings["softmax_scale"] = _scale(query_W, settings)
    filled = (_filled(x, width) for x, width in ((query_W, widths[0]), (key_W, widths[0]), (value_W, widths[1])))
    out_F, lse = package._flash_attn_fwd(*filled, **settings)[:2]
    out_W = _cut(out_F, value_W.shape[-1])
    return (out_W if into_W is None else into_W.copy_(out_W)), lse


def _flash_attn_bwd(
    query_W: Tensor, key_W: Tensor, value_W: Tensor, out_W: Tensor, grad_W: Tensor, lse: Tensor, **settings: Any
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values; settings: as the package's own takes them."""
    package = importlib.import_module(MODULE)
    widths = _filled_widths(query_W, value_W)
    settings["softmax_scale"] = _scale(query_W, settings)
    filled = [_filled(x, widths[0]) for x in (query_W, key_W)] + [
        _filled(x, widths[1]) for x in (value_W, out_W, grad_W)
    ]
    gradients = package._flash_attn_bwd(*filled, lse, **settings)
    pairs = zip(gradients, (query_W, key_W, value_W), strict=True)
    return tuple(_cut(gradient_F, x_W.shape[-1]) for gradient_F, x_W in pairs)


def _scale(query_W: Tensor, settings: dict[str, Any]) -> float:
    """Of scores: that of the width before it was filled up, where none was asked for."""
    scale: float | None = settings["softmax_scale"]
    return query_W.shape[-1] ** -0.5 if scale is None else scale


def _filled_widths(query_W: Tensor, value_W: Tensor) -> tuple[int, int]:
    """Widths of keys' and values' heads that the package is given."""
    widths = query_W.shape[-1], value_W.shape[-1]
    is_taken = not _is_blackwell() or max(widths) <= _BLACKWELLS_NARROW
    return widths if is_taken else (_BLACKWELLS_WIDE, _BLACKWELLS_WIDE)


def _filled(x_W: Tensor, width: int) -> Tensor:
    missing = width - x_W.shape[-1]
    return F.pad(x_W, (0, missing)) if missing else x_W


def _cut(x_F: Tensor, width: int) -> Tensor:
    is_filled = x_F.shape[-1] > width
    return x_F.narrow(-1, 0, width).clone(memory_format=torch.contiguous_format) if is_filled else x_F


register_flash_attention_impl(NAME, register_fn=lambda: torch_private.register_flash_attention_fa4(__name__))

"""Attention within the samples of packed rows, without a mask of row length squared.

A mask would have most pairs of positions multiplied only to be thrown away: of 20 samples in a row of 4,096 tokens, 19
pairs in 20. Here each sample is a sequence of its own.

Shape suffixes: B rows, S positions, N = B·S positions of all rows, H heads, G heads of keys and values, A head width.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask, sdpa_mask

from moe import ExpertMeshError, settled_attention
from moe.gpu import is_rehearsing_gpu
from training.data import Batch

PACKED = "expertmesh_packed"
"""Name of this attention among those of transformers; without `segments` it is their sdpa."""


SHARED = "expertmesh_shared_"
"""What the name begins with of an attention in rows that several ranks share; the rest is that of the one within."""

_BY_MASK = frozenset(
    {"attention", "full_attention", "sliding_attention", "chunked_attention", "sparse", "dense", "moe", "mlp"}
)
"""Kinds of layers that a mask keeps within a sample, or that look at each token by itself."""

_STATE = (
    "carry a state from one token to the next, also from one sample to the next in a packed row, and transformers' "
    "PyTorch code for them does not begin it anew"
)
_BLOCKS = "put a row's tokens together in blocks, whose ends are not the samples'"
_CHOICE = "choose the tokens to attend to in the whole row, and choose others if other samples share it"
_NOT_APART = {
    r"linear_attention|mamba|conv|hybrid.*": _STATE,
    r".*compressed.*|.*_sparse": _BLOCKS,
    r"indexed.*": _CHOICE,
}
"""Why no mask keeps the samples of a packed row apart, by patterns of the names of kinds of layers."""

_NOT_FOR_ATTENTION = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)
"""Arguments that models of transformers hand down to all their parts, and that no attention's result depends on."""

_WIDEST_VARLEN = 256
"""Of the heads that flash attention takes."""


def choose_attention(attn_implementation: str, packing: bool, config: Any) -> str:
    """PACKED for packed rows with sdpa, where every token sees its sample's whole past; else what was asked for, which
    keeps samples apart by the mask that transformers makes from their positions. "auto" is sdpa, or eager for a family
    that has no sdpa.

    Raises:
        ExpertMeshError: packed rows with flash attention: it takes no mask, and finds out only of single rows where
            their samples begin; or in a model with layers that no mask keeps within a sample.
    """
    if packing and "flash" in attn_implementation:
        raise ExpertMeshError(
            f"--attn-implementation {attn_implementation}: does not keep packed samples apart; with --packing use "
            "sdpa, which on a GPU in bf16 runs a flash-attention kernel sample by sample"
        )
    attn_implementation = settled_attention(config, attn_implementation)
    if not packing:
        return attn_implementation
    text_config = config.get_text_config()
    kinds = kinds_of_layers(text_config)
    if others := kinds_not_by_mask(config):
        raise ExpertMeshError(
            f"--packing: {_why_not(config.model_type, others)}; leave it out, --group-by-length saves padding"
        )
    sees_all = kinds == {"full_attention"} if kinds else getattr(text_config, "sliding_window", None) is None
    return PACKED if attn_implementation == "sdpa" and sees_all else attn_implementation


def inner_attention(model: Any) -> str:
    """Name of the attention by which a model computes, be its rows shared or not."""
    name: str = model.config._attn_implementation
    return name.removeprefix(SHARED)


def _why_not(model_type: str, kinds: set[str]) -> str:
    of_reason: dict[str, list[str]] = {}
    for kind in sorted(kinds):
        reasons = (reason for pattern, reason in _NOT_APART.items() if re.fullmatch(pattern, kind))
        reason = next(reasons, "are not known to keep the samples of a packed row apart")
        of_reason.setdefault(reason, []).append(kind)
    return ", ".join(f"layers of {model_type} ({', '.join(found)}) {reason}" for reason, found in of_reason.items())


def kinds_of_layers(text_config: Any) -> set[str]:
    """As a config names them; empty where all are alike."""
    names = ("layer_types", "layers_block_type")
    return {str(kind) for name in names for kind in getattr(text_config, name, None) or ()}


def kinds_not_by_mask(config: Any) -> set[str]:
    """Those that see other tokens otherwise than by attention under a mask."""
    return kinds_of_layers(config.get_text_config()) - _BY_MASK


def check_packing(model: Any) -> None:
    """
    Raises:
        ExpertMeshError: neither transformers nor we have a mask that would keep apart samples in a row of this model.
    """
    is_masked = inner_attention(model) == PACKED or model.masks_by_position
    if not is_masked and (unknown := kinds_of_layers(model.config.get_text_config()) - _MASKS.keys()):
        raise ExpertMeshError(
            f"--packing: nothing keeps packed samples apart in layers of {type(model).__name__} "
            f"({', '.join(sorted(unknown))}); leave it out, --group-by-length saves padding"
        )


def attention_arguments(model: Any, batch: Batch) -> dict[str, Any]:
    """What to tell a model's attention in its forward of a batch, beside the positions: nothing, as a rule."""
    if batch.segments is None:
        # Causal attention hides padding behind rows by itself, and a mask would only cost memory; layers that carry a
        # state need one.
        if batch.is_token_BS is None or not kinds_not_by_mask(model.config):
            return {}
        return {"attention_mask": batch.is_token_BS.long()}
    if inner_attention(model) == PACKED:
        # transformers takes a mask of four dimensions as it is, and builds none of its own; nobody reads this one
        unread = torch.empty(1, 1, 1, 1, device=batch.tokens_BS.device)
        return {"segments": batch.segments, "attention_mask": unread}
    if model.masks_by_position:
        return {}
    return {"attention_mask": _masks(model, batch)}


@contextmanager
def told_whether_packed(batch: Batch) -> Iterator[None]:
    """Within it, transformers is told where a batch has one sample a row: by itself it would look for several in every
    forward, and wait for the device to find out. Of a run of rows it could not tell."""
    if batch.segments is not None and batch.shared is None:
        yield
        return
    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


_MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


def _masks(model: Any, batch: Batch) -> Any:
    """transformers' own masks, made from the positions as the model itself does not: one for each kind of layer."""
    like_BSD = torch.empty(*batch.tokens_BS.shape, 0, device=batch.tokens_BS.device)
    arguments: dict[str, Any] = dict(
        config=model.config.get_text_config(),
        inputs_embeds=like_BSD,
        attention_mask=None,
        past_key_values=None,
        position_ids=batch.positions_BS,
    )
    kinds = kinds_of_layers(model.config.get_text_config())
    return {kind: _MASKS[kind](**arguments) for kind in kinds} if kinds else create_causal_mask(**arguments)


def packed_attention(
    module: Any,
    query_BHSA: Tensor,
    key_BGSA: Tensor,
    value_BGSA: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segments: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each segment, in the signature of transformers' attention functions; (B, S, H, A) out,
    where A is the width of the values.

    Raises:
        ExpertMeshError: the module asks for more than that (attention sinks, a window, a cap on scores). Also without
            `segments`, so that the forward in which a model is probed finds it out, before anything is loaded.
    """
    _refuse_unknown(module, kwargs)
    if segments is None:
        return sdpa_attention_forward(
            module, query_BHSA, key_BGSA, value_BGSA, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    rows, positions = query_BHSA.shape[0], query_BHSA.shape[2]
    assert sum(segments) == rows * positions, (segments, query_BHSA.shape)
    query_NHA, key_NGA, value_NGA = (x.transpose(1, 2).flatten(0, 1) for x in (query_BHSA, key_BGSA, value_BGSA))
    is_gpus = query_BHSA.is_cuda or is_rehearsing_gpu()
    has_kernel = is_gpus and query_BHSA.dtype in (torch.bfloat16, torch.float16)
    if has_kernel and dropout == 0 and _varlen_width(query_NHA, value_NGA) <= _WIDEST_VARLEN:
        out_NHA = _by_varlen_kernel(query_NHA, key_NGA, value_NGA, segments, scaling)
    else:
        out_NHA = _one_by_one(query_NHA, key_NGA, value_NGA, segments, scaling, dropout)
    return out_NHA.unflatten(0, (rows, positions)), None


def _refuse_unknown(module: Any, arguments: dict[str, Any]) -> None:
    unknown = [name for name, value in arguments.items() if value is not None and name not in _NOT_FOR_ATTENTION]
    if unknown:
        raise ExpertMeshError(
            f"--packing: {type(module).__name__} gives its attention {', '.join(unknown)}, which attention sample by "
            "sample would leave out; use --attn-implementation eager"
        )


def _one_by_one(
    query_NHA: Tensor,
    key_NGA: Tensor,
    value_NGA: Tensor,
    segments: tuple[int, ...],
    scale: float | None,
    dropout: float,
) -> Tensor:
    # split's backward is one concatenation; that of a slice would be a tensor of all N positions for each segment
    parts = zip(*(x.split(segments) for x in (query_NHA, key_NGA, value_NGA)), strict=True)
    outputs = []
    for part in parts:
        query_1HLA, key_1GLA, value_1GLA = (x.transpose(0, 1).unsqueeze(0) for x in part)
        out_1HLA = F.scaled_dot_product_attention(
            query_1HLA, key_1GLA, value_1GLA, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=True
        )
        outputs.append(out_1HLA.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def _by_varlen_kernel(
    query_NHA: Tensor, key_NGA: Tensor, value_NGA: Tensor, segments: tuple[int, ...], scale: float | None
) -> Tensor:
    """One flash-attention kernel for all segments (`torch.nn.attention.varlen`), which wants one width of head."""
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = _ends(segments, query_NHA.device), max(segments)
    scale = query_NHA.shape[-1] ** -0.5 if scale is None else scale
    width, value_width = _varlen_width(query_NHA, value_NGA), value_NGA.shape[-1]
    # zeros add nothing to a score, and what they give as values is cut off
    query_NHA, key_NGA, value_NGA = (_widened(x, width) for x in (query_NHA, key_NGA, value_NGA))
    options = _causal()
    if (groups := query_NHA.shape[1] // key_NGA.shape[1]) > 1:
        if "enable_gqa" in _varlen_parameters():
            options["enable_gqa"] = True
        else:
            key_NGA, value_NGA = (x.repeat_interleave(groups, dim=1) for x in (key_NGA, value_NGA))
    out: Any = varlen_attn(query_NHA, key_NGA, value_NGA, ends, ends, longest, longest, scale=scale, **options)
    return out[..., :value_width]


@lru_cache(maxsize=1)
def _ends(segments: tuple[int, ...], device: torch.device) -> Tensor:
    """Where segments begin, and the last one ends, int32; once for all layers of a batch."""
    return torch.tensor([0, *segments]).cumsum(0).int().pin_memory().to(device, non_blocking=True)


def _varlen_width(query_NHA: Tensor, value_NGA: Tensor) -> int:
    """Of the heads that the kernel is given: the wider of keys' and values', up to a multiple of 8."""
    return -(-max(query_NHA.shape[-1], value_NGA.shape[-1]) // 8) * 8


def _widened(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def _causal() -> dict[str, Any]:
    """How this torch's varlen_attn is told to be causal: 2.10 has a flag, later ones a window."""
    return {"window_size": (-1, 0)} if "window_size" in _varlen_parameters() else {"is_causal": True}


@cache
def _varlen_parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)

"""Attention within the samples of packed sequences, within windows and with sinks, without a mask of sequence length
squared.

A mask would have most pairs of positions multiplied only to be thrown away: of 20 samples in a sequence of 4,096
tokens, 19 pairs in 20. Here attention sees each sample by itself, and a query meets the keys of its window.

Shape suffixes: B sequences, S positions, N = B·S positions of all sequences, Q queries and K keys of a sequence, H
heads, G heads of keys and values, A head width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import and_masks, create_causal_mask, packed_sequence_mask_function, sdpa_mask

from ...moe.experts.forward import Forward, current_forward
from ...moe.experts.model_facts import facts_of
from ...moe.hf_model.build import model_class, settled_attention
from ...moe.hf_model.images import KINDS, sees_both_ways
from ...moe.transformers_private import replacing_sample_search
from ...moe.util.errors import ExpertMeshError
from ...moe.util.gpu import bring_to
from ..data.batch import Batch
from .flash import flash_attention, has_kernel
from .layer_kinds import ATTENDING, LAYER_KINDS, attends, kinds_in_config, seen_in

OWN = "expertmesh"
"""Name of this attention among those of transformers."""

BOTH_WAYS = "expertmesh_both_ways"
"""Name of sdpa for packed samples whose images are seen both ways: within a sample, by the masks of the model."""

CP_PREFIX = "expertmesh_shared_"
"""Prefix of the name of a context-parallel attention; the rest is the name of the attention within."""

_NOT_FOR_ATTENTION = frozenset(
    {
        *("labels", "position_ids", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "sliding_window"),
    }
)
"""Arguments that models of transformers hand down to all their parts, and that no attention's result depends on; and
the window, which is in the mask."""


def choose_attention(attn_implementation: str, packing: bool, config: Any, images: bool = False) -> str:
    """OWN for packed sequences, windows and sinks, where what a token sees is all of its sample's past or a window of
    it; else what was asked for, which keeps samples apart by the mask that transformers makes from their positions.
    "auto" is otherwise sdpa, or eager for a family that has no sdpa; "sdpa" is OWN for packed sequences without windows
    alone. BOTH_WAYS for packed sequences with images that are seen so.

    Raises:
        ExpertMeshError: packed sequences with flash attention: it takes no mask, and finds out only of single sequences
            where their samples begin. Or with images that are seen both ways and another attention than sdpa.
    """
    if packing and "flash" in attn_implementation:
        raise ExpertMeshError(
            f"--attn-implementation {attn_implementation}: cannot keep packed samples apart; with "
            "--packing use sdpa, which runs a flash-attention kernel per sample on a GPU in bf16"
        )
    settled = settled_attention(config, attn_implementation)
    if images and sees_both_ways(config):
        if packing and settled != "sdpa":
            raise ExpertMeshError(
                f"--attn-implementation {settled}: keeps no packed samples apart whose images are seen both ways; give "
                "sdpa, or leave out --packing"
            )
        return BOTH_WAYS if packing else settled
    text_config = config.get_text_config()
    seen = [seen_in(kind) for kind in kinds_in_config(text_config)]
    sees_less = any(what not in ("itself", "past") for what in seen)
    has_windows = sees_less if seen else getattr(text_config, "sliding_window", None) is not None
    if packing and settled == "sdpa" and not has_windows:
        return OWN
    if attn_implementation != "auto" or not (packing or has_windows or settled == "eager"):
        return settled
    # their attention is told all but the mask by arguments: as that of a family must be that has sdpa, or flash
    # attention. Packed, layers without attention run sample by sample
    is_told = model_class(config)._supports_sdpa or model_class(config)._supports_flash_attn
    how = [ATTENDING[what] for what in seen]
    suits = is_told and all(each.by_ours is not False and (packing or each.by_attention) for each in how)
    return OWN if suits else settled


def inner_attention(model: Any) -> str:
    """Name of the attention by which a model computes, context-parallel or not."""
    name: str = model.config._attn_implementation
    return name.removeprefix(CP_PREFIX)


def run_model(model: Any, batch: Batch, forward: Forward) -> Any:
    """What a call of the model gives for a batch, in steps and in trials of its attention. forward: what it is told
    beside its arguments."""
    # masks are made before the model is called
    with forward, told_whether_packed(model, batch):
        return model(
            **_attention_arguments(model, batch),
            **_image_arguments(batch, forward),
            input_ids=batch.tokens_BS,
            position_ids=_positions(batch),
            use_cache=False,
        )


def _image_arguments(batch: Batch, forward: Forward) -> dict[str, Tensor]:
    """What the model takes for a batch's images. In a pipeline every stage makes masks, and the first one embeds
    images."""
    if batch.images is None:
        return {}
    embeds = forward.stage is None or forward.stage.number == 0
    kinds = {} if batch.images.kinds_BS is None else {KINDS: batch.images.kinds_BS}
    return {**batch.images.inputs, **kinds} if embeds else kinds


def _positions(batch: Batch) -> Tensor | None:
    """Within samples; or these before those in time, height and width, as language models of transformers take them."""
    if batch.images is None or batch.images.positions_3BL is None:
        return batch.positions_BS
    positions_3BL = batch.images.positions_3BL
    return positions_3BL if batch.positions_BS is None else torch.cat([batch.positions_BS[None], positions_3BL])


def _attention_arguments(model: Any, batch: Batch) -> dict[str, Any]:
    """What to tell a model's attention in its forward of a batch, beside the positions: nothing, as a rule."""
    if inner_attention(model) == BOTH_WAYS or (batch.images is not None and batch.images.kinds_BS is not None):
        return {}  # its masks are made in the model
    text_config = model.config.get_text_config()
    kinds = kinds_in_config(text_config)
    if batch.segments is None:
        # Causal attention hides padding behind sequences by itself, and a mask would only cost memory; layers that
        # carry a state need one.
        if batch.is_token_BS is None or batch.split is not None or all(map(attends, kinds)):
            return {}
        return {"attention_mask": batch.is_token_BS.long()}
    if inner_attention(model) == OWN:
        return {"segments": batch.segments}
    masks = {kind: LAYER_KINDS[kind].mask if kind in LAYER_KINDS else None for kind in kinds}
    if facts_of(model).masks_by_position or None in masks.values():
        # without a mask they run sample by sample, see `training.attention.by_sample`
        return {}
    # transformers' own masks, made from the positions as the model itself does not: one for each kind of layer
    like_BSD = torch.empty(*batch.tokens_BS.shape, 0, device=batch.tokens_BS.device)
    # by their places: releases of transformers call the cache, which is the fourth, by other names
    arguments = (text_config, like_BSD, None, None, batch.positions_BS)
    made = {kind: make(*arguments) for kind, make in masks.items() if make is not None}
    return {"attention_mask": made if made else create_causal_mask(*arguments)}


@contextmanager
def told_whether_packed(model: Any, batch: Batch) -> Iterator[None]:
    """Within it, transformers is told where a batch has one sample per sequence: by itself it would look for several in
    every forward, and wait for the device to find out. For a part of each sequence it could not tell, and for our own
    attention it need not."""
    if batch.segments is not None and batch.split is None and inner_attention(model) not in (OWN, BOTH_WAYS):
        yield
        return
    with replacing_sample_search(lambda position_ids: None, model):
        yield


def own_attention(
    module: Any,
    query_BHSA: Tensor,
    key_BGSA: Tensor,
    value_BGSA: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    segments: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each segment, in the signature of transformers' attention functions; (B, S, H, A) out,
    where A is the width of the values.

    Args:
        attention_mask: from `mask_where_needed`.
        s_aux: (H,), the heads' sinks: see `training.attention.flash`.
        segments: lengths of all sequences' samples, B·S in all; None: each sequence is one.

    Raises:
        ExpertMeshError: the module asks for more than that (a cap on scores, a bias). Also on the meta device, so that
            the forward in which a model is probed finds it out, before anything is loaded.
    """
    _refuse_unknown(module, kwargs)
    rows, _, positions, _ = query_BHSA.shape
    window = window_told(attention_mask, positions)
    if attention_mask is not None and window is None:
        return _under_mask(module, query_BHSA, key_BGSA, value_BGSA, attention_mask, dropout, scaling, s_aux), None
    assert positions == key_BGSA.shape[2], "a query is at the place of its key"
    is_row = segments is None
    segments = (positions,) * rows if segments is None else segments
    assert sum(segments) == rows * positions, (segments, query_BHSA.shape)
    window = window if window is not None and window < max(segments) else 0
    is_plain = s_aux is None and window == 0
    if is_plain and is_row:
        return sdpa_attention_forward(
            module, query_BHSA, key_BGSA, value_BGSA, None, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout and not is_plain:
        is_seen_B1SS = _seen(segments, window, rows, query_BHSA.device)
        return _under_mask(module, query_BHSA, key_BGSA, value_BGSA, is_seen_B1SS, dropout, scaling, s_aux), None
    query_NHA, key_NGA, value_NGA = (x.transpose(1, 2).flatten(0, 1) for x in (query_BHSA, key_BGSA, value_BGSA))
    if is_plain and (dropout or not has_kernel(query_NHA, value_NGA)):
        out_NHA = _one_by_one(query_NHA, key_NGA, value_NGA, segments, scaling, dropout)
    else:
        out_NHA = flash_attention(query_NHA, key_NGA, value_NGA, segments, scaling, window, s_aux)
    return out_NHA.unflatten(0, (rows, positions)), None


def mask_where_needed(**arguments: Any) -> Tensor | None:
    """In the signature of transformers' mask functions: none where each sequence is causal, which attention is by
    itself; for windows a mask that is never read, and holds no memory, whose width tells theirs. Not every family gives
    its attention the window as an argument, and some give one that their masks do not have."""
    is_square = arguments["q_length"] == arguments["kv_length"]
    if arguments.pop("allow_is_causal_skip", True) and is_square and arguments.get("attention_mask") is None:
        window = arguments.get("local_size")
        if window is None or window >= arguments["q_length"]:
            return None
        return torch.ones((), dtype=torch.bool, device=arguments.get("device")).expand(1, 1, 1, window)
    return sdpa_mask(**arguments, allow_is_causal_skip=False)


def tells_window(mask: Tensor) -> bool:
    """Whether it is a mask that only tells the width of a window: no dim of it is of positions."""
    return mask.dim() == 4 and mask.shape[:3] == (1, 1, 1)


def window_told(mask: Tensor | None, queries: int) -> int | None:
    """Keys that each of a sequence's queries sees, itself among them, by a mask from `mask_where_needed`; None: that is
    no window, but none at all or a mask to be read."""
    return mask.shape[-1] if mask is not None and mask.shape[2] == 1 < queries else None


def _refuse_unknown(module: Any, arguments: dict[str, Any]) -> None:
    unknown = [name for name, value in arguments.items() if value is not None and name not in _NOT_FOR_ATTENTION]
    if unknown:
        raise ExpertMeshError(
            f"--attn-implementation: {type(module).__name__} gives its attention {', '.join(unknown)}, "
            "which attention without a mask would ignore; use --attn-implementation eager"
        )


def _seen(segments: tuple[int, ...], window: int, rows: int, device: torch.device) -> Tensor:
    """(B, 1, S, S), true where a query sees a key."""
    sample_B1S = _sample_of_each(segments, device).view(rows, 1, -1)
    place_S = torch.arange(sample_B1S.shape[-1], device=device)
    ahead_SS = place_S - place_S.unsqueeze(1)
    is_near_SS = (ahead_SS <= 0) & (ahead_SS > -window) if window else ahead_SS <= 0
    return is_near_SS & (sample_B1S.unsqueeze(-1) == sample_B1S.unsqueeze(-2))


def _sample_of_each(segments: tuple[int, ...], device: torch.device) -> Tensor:
    """The number of each position's sample, (N,)."""
    lengths = bring_to(torch.tensor(segments), device)
    # told how many there will be, the host does not wait
    return torch.arange(len(segments), device=device).repeat_interleave(lengths, output_size=sum(segments))


def _under_mask(
    module: Any,
    query_BHQA: Tensor,
    key_BGKA: Tensor,
    value_BGKA: Tensor,
    is_seen_B1QK: Tensor,
    dropout: float,
    scale: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """(B, Q, H, A): by sdpa, or with sinks as transformers' `eager_attention_forward` of gpt_oss has them."""
    if sinks_H is None:
        out_BQHA, _ = sdpa_attention_forward(
            module, query_BHQA, key_BGKA, value_BGKA, is_seen_B1QK, dropout=dropout, scaling=scale
        )
        return out_BQHA
    groups = query_BHQA.shape[1] // key_BGKA.shape[1]
    key_BHKA, value_BHKA = (x.repeat_interleave(groups, dim=1) for x in (key_BGKA, value_BGKA))
    scale = query_BHQA.shape[-1] ** -0.5 if scale is None else scale
    scores_BHQK = (query_BHQA @ key_BHKA.mT * scale).masked_fill(~is_seen_B1QK, float("-inf"))
    sinks_BHQ1 = sinks_H.to(scores_BHQK.dtype).view(-1, 1, 1).expand(*scores_BHQK.shape[:-1], 1)
    weights_BHQK = torch.cat([scores_BHQK, sinks_BHQ1], dim=-1).softmax(dim=-1)[..., :-1]
    return (F.dropout(weights_BHQK, dropout) @ value_BHKA).transpose(1, 2).contiguous()


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


def mask_within_samples(**arguments: Any) -> Tensor | None:
    """In the signature of transformers' mask functions: that of sdpa, where no token sees another sample of its
    sequence. transformers' own asks for an image's tokens by their positions within samples."""
    forward = current_forward()
    if forward is None or forward.segments is None:
        return sdpa_mask(**arguments)
    sample_N = _sample_of_each(forward.segments, arguments["device"])
    of_samples = packed_sequence_mask_function(sample_N.view(arguments["batch_size"], -1))
    arguments["mask_function"] = and_masks(of_samples, arguments["mask_function"])
    return sdpa_mask(**{**arguments, "allow_is_causal_skip": False})


AttentionInterface.register(OWN, own_attention)
AttentionMaskInterface.register(OWN, mask_where_needed)
AttentionInterface.register(BOTH_WAYS, sdpa_attention_forward)
AttentionMaskInterface.register(BOTH_WAYS, mask_within_samples)

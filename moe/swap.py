"""Puts `DroplessMoE` layers where a Hugging Face model has its own MoE blocks; attention and the rest stay HF's."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from moe.counts import ParameterCounts, active_parameters
from moe.errors import ExpertMeshError
from moe.families import Family
from moe.kernels import Kernel
from moe.layer import DroplessMoE
from moe.matmul import use_linear
from moe.router import RouterStats
from moe.shape import MoEShape


def build_model(family: Family, config: Any, kernel: Kernel, attn_implementation: str = "sdpa") -> nn.Module:
    """The family's HF model on the meta device, fp32, with its MoE blocks swapped. Holds no memory yet.

    Raises:
        ExpertMeshError: transformers cannot build it from this config with this attention.
    """
    import transformers

    model_class = getattr(transformers, family.model_class)
    # HF would compute its balancing loss from router modules that are no longer there; ours is in moe.losses
    config = deepcopy(config)
    config.output_router_logits = False
    with torch.device("meta"):
        try:
            model = model_class._from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
        except Exception as error:
            raise ExpertMeshError(
                f"transformers cannot build {family.model_class} from this config.json "
                f"with --attn-implementation {attn_implementation}: {type(error).__name__}: {error}"
            ) from error
        swap_moe_blocks(model, family, family.shape(config), kernel)
    for layer in decoder_layers(model):
        use_linear(layer)
    return model


def swap_moe_blocks(model: nn.Module, family: Family, shape: MoEShape, kernel: Kernel) -> None:
    """Replace each decoder layer's MoE block by a `DroplessMoE` with uninitialised weights, in place.

    Padding is told to the layers by the model's own arguments: a 2-D `attention_mask`, as with any HF model, or
    `is_token_BS` (bool) alone. The latter suffices for right-padded training batches, where causal attention hides
    the padding by itself and a mask would only cost memory.
    """
    for layer in decoder_layers(model):
        setattr(layer, family.block, DroplessMoE(shape, kernel))
    decoder_stack(model).register_forward_pre_hook(_before_forward, with_kwargs=True)


def _before_forward(stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    is_token_BS = kwargs.pop("is_token_BS", None)
    attention_mask = kwargs.get("attention_mask")
    if is_token_BS is None and isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        candidates = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        tokens = next(t for t in candidates if t is not None)
        # with a KV cache the mask also covers the tokens of earlier calls
        is_token_BS = attention_mask[:, -tokens.shape[1] :].bool()
    for block in moe_blocks(stack):
        block.is_token_BS = is_token_BS
        block.recording = True
    return args, kwargs


def decoder_stack(model: Any) -> nn.Module:
    """The part of a HF causal language model that holds embeddings and decoder layers."""
    return model.model


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a HF causal language model."""
    return model.model.layers


def moe_blocks(model: nn.Module) -> list[DroplessMoE]:
    """The model's MoE layers, first to last."""
    return [module for module in model.modules() if isinstance(module, DroplessMoE)]


def count_parameters(model: Any, shape: MoEShape) -> ParameterCounts:
    """Counts of a Hugging Face causal language model whose MoE blocks were swapped; it may be on the meta device."""
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for block in moe_blocks(model) for p in block.experts.parameters())
    embedding, head = model.get_input_embeddings().weight.numel(), model.get_output_embeddings().weight.numel()
    return ParameterCounts(total, experts, embedding, head, active_parameters(total, experts, shape))


def take_stats(model: nn.Module) -> list[RouterStats]:
    """The routing statistics of the latest forward, one entry a MoE layer; call it before `backward`."""
    stats = []
    for block in moe_blocks(model):
        assert block.stats is not None, "take_stats before any forward"
        stats.append(block.stats)
        block.stats = None
        # activation checkpointing runs the layer again in backward: what it records then would keep alive all that
        # was recomputed, layer upon layer
        block.recording = False
    return stats

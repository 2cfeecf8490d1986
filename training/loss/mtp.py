"""The loss of a layer for multi-token prediction (MTP), which drafts the token after the next one.

DeepSeek-V3 (arXiv 2412.19437, section 2.2, equations 21 to 25), with one such layer: where the model has read token
t_i, h'_i = M [norm(Emb(t_{i+1})); norm(h_i)] goes through a decoder layer and a norm of its own, and the model's own
head predicts t_{i+2}. The paper writes the two in the other order; published weights have the embedding first (vLLM and
transformers' `MtpLayer` read all of them so). h_i is taken behind the model's final norm: that is what vLLM's models
give, and transformers hands to its `MtpModel`.

The last layer of the model is this one (see `moe.hf_model.mtp`). It is called after the others, with what they are
called with; what it is given it hands on unchanged, and what it makes of it waits for the head.

Shape suffixes: B sequences, S positions, D model width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...moe.experts.forward import current_forward
from ...moe.experts.model_layers import decoder_layers
from ...moe.hf_model.mtp import final_norm
from ...moe.util.change_order import begin_change
from ...moe.util.step_parts import register_step_part
from .head import loss_head

register_step_part(__name__, "LM head, loss")


def use_mtp(model: Any, detach: bool) -> None:
    """Have a model's last layer draft, in place: in forwards that are told what follows (`Forward.ahead`).

    Args:
        model: from `add_mtp`, assembled but for this.
        detach: whether the loss has no gradients but those of the layer itself: none of the model below it, nor of the
            embedding and the head, which it shares.
    """
    begin_change(model, "drafts")
    *_, layer = decoder_layers(model)
    layer.forward = Drafting(layer, model.get_input_embeddings(), final_norm(model), detach)
    loss_head(model).detaches_drafts = detach


class Drafting:
    """The forward of the layer, from now on. No `nn.Module`: embedding and norm stay where they are."""

    def __init__(self, layer: Any, embedding: Any, norm: Any, detach: bool):
        self.layer, self.decode, self.embedding, self.norm, self.detach = layer, layer.forward, embedding, norm, detach

    def __call__(self, x_BSD: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        forward = current_forward()
        if forward is None or forward.ahead is None:
            return x_BSD
        layer = self.layer
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            h_BSD, next_BSD = self.norm(x_BSD), self.embedding(forward.ahead.tokens_BS)
        both = torch.cat([layer.enorm(next_BSD), layer.hnorm(h_BSD)], dim=-1)
        drafts_BSD = layer.shared_head.norm(self.decode(layer.eh_proj(both), *args, **kwargs))
        x_BSD, forward.drafts_BSD = _Together.apply(x_BSD, drafts_BSD)
        return x_BSD


class _Together(torch.autograd.Function):
    """Both as they are. FSDP makes a layer's parameters ready for its backward when the gradient of what the layer
    gives is there: so nothing in the layer may have its backward before."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, drafts_BSD: Tensor) -> tuple[Tensor, Tensor]:
        # FSDP watches the first, which must be no view that code behind it might write to
        return x_BSD.clone(), drafts_BSD.view_as(drafts_BSD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor, grad_drafts_BSD: Tensor) -> tuple[Tensor, Tensor]:
        return grad_BSD, grad_drafts_BSD

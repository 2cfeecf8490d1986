"""How the experts' load is kept even: by auxiliary losses, or by moving a bias of the router's scores.

Shape suffixes: L MoE layers, E experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...moe.experts.model_facts import facts_of
from ...moe.experts.model_layers import moe_layers
from ...moe.experts.router_stats import Routing
from ...moe.hf_model.mtp import mtp_of
from ...moe.util.errors import ExpertMeshError
from ...moe.util.step_parts import register_step_part
from ..config.train_config import TrainConfig

register_step_part(__name__, "optimizer step")

BIAS_RATE = 0.001
"""What DeepSeek-V3 was trained with (arXiv 2412.19437, 4.2)."""


@dataclass(frozen=True)
class LossWeights:
    """Coefficients of the auxiliary losses; 0 leaves one out.

    balance_per_layer: whether each layer is balanced by itself, not all of them pooled. mtp: of the loss of a layer for
    multi-token prediction.
    """

    balance: float
    z: float
    balance_per_layer: bool = False
    mtp: float = 0.0

    @property
    def of_routers(self) -> bool:
        """Whether there is one."""
        return self.balance > 0 or self.z > 0


@dataclass(frozen=True)
class Balance:
    """weights: of the losses. origin: where the balancing loss's comes from, in words. bias_rate: by which the routers'
    correction biases move each step; None where the model has none."""

    weights: LossWeights
    origin: str
    bias_rate: float | None = None

    def line(self) -> str:
        """For a run's first lines."""
        parts = [f"balancing loss {self.weights.balance:g} ({self.origin})"]
        if self.weights.balance_per_layer:
            parts.append("each layer separately")
        if self.weights.z > 0:
            parts.append(f"z-loss {self.weights.z:g}")
        if self.bias_rate:
            parts.append(f"router bias changes by {self.bias_rate:g} per step")
        elif self.bias_rate is not None:
            parts.append("router bias constant")
        return "routers: " + ", ".join(parts)

    def remedy(self) -> str:
        """What to do about experts that are loaded unevenly."""
        if self.bias_rate is not None:
            if self.bias_rate == 0:
                return f"update the router's bias with --router-bias-update-rate {BIAS_RATE:g}"
            return f"raise --router-bias-update-rate (now {self.bias_rate:g})"
        if self.weights.balance == 0:
            # by layer: pooled, it asks nothing of layers that make up for one another, however high its coefficient
            return "turn the balancing loss on, as with --router-aux-loss-coef 0.02 --router-aux-loss-per-layer"
        raised = f"raise --router-aux-loss-coef (now {self.weights.balance:g})"
        per_layer = (
            "" if self.weights.balance_per_layer else "balance each layer separately with --router-aux-loss-per-layer, "
        )
        return per_layer + raised


def choose_balance(config: TrainConfig, model: Any, model_config: Any) -> Balance:
    """What was asked for; where nothing was, the coefficient with which transformers would add a balancing loss, and
    biases that stay.

    Raises:
        ExpertMeshError: transformers has no balancing loss for this family; its routers give no logits that a z-loss
            could be taken of; or a bias is to move that it has not got.
    """
    biases = correction_biases(model)
    rate = config.router_bias_update_rate
    if rate > 0 and not biases:
        raise ExpertMeshError(
            f"--router-bias-update-rate {rate:g}: the routers of {model_config.model_type} have no "
            "correction bias; use --router-aux-loss-coef instead"
        )
    coefficient, origin = _balancing_coefficient(config, model, model_config.get_text_config())
    if coefficient > 0 and facts_of(model).balance is None:
        instead = f"--router-bias-update-rate {BIAS_RATE:g} balances without a loss" if biases else "leave it out"
        raise ExpertMeshError(
            f"--router-aux-loss-coef {coefficient:g}: transformers' {type(model).__name__} has no balancing loss; "
            f"{instead}"
        )
    # a dry run's model is made of config.json alone, and has no layer for multi-token prediction
    mtp = 0.0 if mtp_of(model) is None else config.train_mtp
    weights = LossWeights(coefficient, config.router_z_loss_coef, config.router_aux_loss_per_layer, mtp)
    if (weights.balance > 0 or weights.z > 0) and any(layer.router is None for layer in moe_layers(model)):
        flag = "--router-aux-loss-coef" if weights.balance > 0 else "--router-z-loss-coef"
        raise ExpertMeshError(
            f"{flag}: the routers of {model_config.model_type} give no logits per expert, so the loss "
            "cannot be computed; set it to 0"
        )
    return Balance(weights, origin, rate if biases else None)


def _balancing_coefficient(config: TrainConfig, model: Any, text_config: Any) -> tuple[float, str]:
    """(the coefficient, where it comes from)."""
    if config.router_aux_loss_coef is not None:
        return config.router_aux_loss_coef, "--router-aux-loss-coef"
    in_config = facts_of(model).balance
    if in_config is None:
        return 0.0, f"{type(model).__name__} has none"
    if not getattr(text_config, "output_router_logits", False):
        return 0.0, "config.json does not set output_router_logits"
    return in_config, "config.json, which sets output_router_logits"


class BiasUpdate:
    """Moves each router's correction bias after an update (auxiliary-loss-free balancing, arXiv 2408.15664): up by
    `rate` for an expert that got less than the mean of the layer's tokens, down for one that got more.

    The load is that of all ranks and micro-steps, in integers, so that every rank moves its copy alike, and none
    depends on the parallel layout.
    """

    def __init__(self, model: Any, rate: float):
        self.rate = rate
        self.biases = [
            (number, model.get_buffer(layer.correction_bias))
            for number, layer in enumerate(moe_layers(model))
            if layer.correction_bias is not None
        ]

    @torch.no_grad()
    def step(self, routing: Routing) -> None:
        """Take in this rank's part of a step's routing. All ranks call it together."""
        counts_LE = routing.counts_LE.clone()
        dist.all_reduce(counts_LE)
        lack_LE = counts_LE.sum(dim=1, keepdim=True) - counts_LE.shape[1] * counts_LE
        for layer, bias_E in self.biases:
            bias_E += self.rate * lack_LE[layer].sign().to(bias_E.dtype).view_as(bias_E)


def correction_biases(model: Any) -> set[str]:
    """Names of the routers' correction biases, of which some families have one a MoE layer."""
    return {layer.correction_bias for layer in moe_layers(model) if layer.correction_bias is not None}

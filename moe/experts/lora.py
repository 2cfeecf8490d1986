"""LoRA (Hu et al. 2021, arXiv 2106.09685): low-rank deltas beside frozen weights of linear layers, routers, experts.

    y = x · Wᵀ + s · (dropout(x) · Aᵀ) · Bᵀ          A (r, in), B (out, r), s = alpha / r, or alpha / √r

An expert has its own A and B for each of its matrices; a layer's are concatenated along dim 0 as its weights are, so
that they are placed with their experts and sharded like them. They are added before anything is sharded, and start from
random numbers that depend on the seed and on names alone: the same for every parallel layout.

Shape suffixes: E experts, D model width, F expert width, r rank.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from ..linear.linear import Linear, is_linear, only_multiplies, quantize_weight
from ..linear.low_rank import LowRank
from ..linear.quantized import Kind, store
from ..util.change_order import begin_change
from ..util.step_parts import register_step_part
from .expert_mlp import ExpertMLP
from .layer import DMoE
from .layout import ExpertParameter
from .model_facts import facts_of
from .model_layers import layer_prefixes, router_prefixes

register_step_part(__name__, "adapters")

A, B = "lora_A", "lora_B"
"""Names of an adapter's two parameters in a linear layer's module; among experts' weights they are as in
`w1_lora_A`."""
TOKENS = "token_rows"
"""Name of the rows of new tokens beside the weight of an embedding or a head, where these rows alone are trained."""


@dataclass(frozen=True)
class Lora:
    """LoRA's settings, as in PEFT's `LoraConfig`. dropout: probability that an element of the input is left out of the
    delta."""

    rank: int
    alpha: float
    dropout: float = 0.0
    use_rslora: bool = False

    @property
    def low_rank(self) -> LowRank:
        scale = self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)
        return LowRank(self.rank, scale, self.dropout)


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter's A or B, or of rows of new tokens."""
    return name.endswith((A, B, TOKENS))


def add_adapters(
    model: nn.Module, lora: Lora, linear: Collection[str], routers: Collection[str], experts: bool
) -> None:
    """Give modules of a model adapters, in place, on the meta device, and freeze everything else.

    Args:
        model: from `build_model`, before it is parallelised.
        linear: paths of linear layers. routers: paths of other modules whose `weight` (E, D) is multiplied as in a
            linear layer.
        experts: whether all experts have them, at each of their matrices.
    """
    begin_change(model, "adapters")
    model.requires_grad_(False)
    for path in linear:
        _adapt_linear(model.get_submodule(path), lora)
    for path in routers:
        _adapt_router(model.get_submodule(path), lora)
    for module in model.modules():
        if experts and isinstance(module, DMoE):
            _adapt_experts(module.mlp, lora)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers of a model that nothing has been done to yet, by path."""
    return {path: module for path, module in model.named_modules() if only_multiplies(module)}


def _adapt_linear(module: Any, lora: Lora) -> None:
    assert only_multiplies(module), type(module)
    module.__class__ = Linear
    _register(module, lora, module.out_features, module.in_features)


def store_frozen(model: Any, kind: Kind) -> None:
    """Quantize the frozen matrices of a model's decoder layers, in place, before it is parallelised: those of experts
    and of linear layers, in mxfp4 of experts alone. Trained parameters, routers, norms, embeddings and head stay as
    they are, and so do the layers that `unquantized` names."""
    for module in model.modules():
        if isinstance(module, ExpertMLP):
            for part in module.layout.parameters:
                if part.row and kind == "mxfp4" and part.name == "w2":
                    _store_turned(module, part)
                elif part.row:
                    store(module, part.name, kind)
    if kind != "mxfp4":
        for module in to_quantize(model).values():
            quantize_weight(module, kind)


def _store_turned(mlp: ExpertMLP, w2: ExpertParameter) -> None:
    """Have w2 stored as (E·D, F): values that share a scale are along what is summed over."""
    shape, place = mlp.layout.shape, replace(w2.place, dim=3 - w2.place.dim)
    turned = ExpertParameter(w2.name, shape.model_width, (shape.expert_width,), place)
    store(mlp, w2.name, "mxfp4", (shape.num_experts * shape.model_width, shape.expert_width))
    mlp.layout = replace(mlp.layout, parameters=tuple(turned if part is w2 else part for part in mlp.layout.parameters))


def to_quantize(model: Any) -> dict[str, nn.Module]:
    """The linear layers whose weights `store_frozen` quantizes, by path."""
    kept = unquantized(model)
    return {path: module for path, module in layers_linear(model).items() if path not in kept}


def unquantized(model: Any) -> list[str]:
    """Paths of the decoder layers' linear layers that `store_frozen` leaves as they are: other code than their own
    forward reads their weight, or the family keeps it in fp32."""
    facts = facts_of(model)
    return [path for path in layers_linear(model) if path in facts.read_weights or f"{path}.weight" in facts.fp32_names]


def layers_linear(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers of a model's decoder layers, but for routers, by path."""
    layers, routers = layer_prefixes(model), router_prefixes(model)
    return {
        path: module
        for path, module in model.named_modules()
        if is_linear(module) and path.startswith(layers) and not f"{path}.".startswith(routers)
    }


def _adapt_router(module: Any, lora: Lora) -> None:
    """Add an adapter to a router. Its own code still multiplies by `weight`, which during a forward is W + s · B · A:
    that is small for a router, which has only one row per expert."""
    out_features, in_features = module.weight.shape
    _register(module, lora, out_features, in_features)
    own_forward = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        weight = self._parameters["weight"]
        update = (self.lora_B @ self.lora_A) * self.low_rank.scale
        self._parameters["weight"] = weight + update.to(weight.dtype)
        try:
            return own_forward(self, *args, **kwargs)
        finally:
            self._parameters["weight"] = weight

    module.forward = MethodType(forward, module)


def _register(module: Any, lora: Lora, out_features: int, in_features: int) -> None:
    module.low_rank = lora.low_rank
    module.register_parameter(A, nn.Parameter(torch.empty(lora.rank, in_features, device="meta")))
    module.register_parameter(B, nn.Parameter(torch.empty(out_features, lora.rank, device="meta")))


def _adapt_experts(mlp: ExpertMLP, lora: Lora) -> None:
    """Add adapters to experts: A (E·r, D) and B (E·F, r) beside w1 and v1; beside w2, which is transposed, A (E·r, F)
    and B (E·D, r)."""
    shape, adapters = mlp.layout.shape, []
    for part in mlp.layout.parameters:
        if part.row:  # not of biases
            into, out = shape.model_width, shape.expert_width
            if part.name == "w2":
                into, out = out, into
            adapters.append(ExpertParameter(f"{part.name}_{A}", lora.rank, (into,), part.place))
            adapters.append(ExpertParameter(f"{part.name}_{B}", out, (lora.rank,), part.place))
    mlp.layout = replace(mlp.layout, adapters=tuple(adapters))
    mlp.low_rank = lora.low_rank
    for part in adapters:
        size = (shape.num_experts * part.rows_an_expert, *part.row)
        mlp.register_parameter(part.name, nn.Parameter(torch.empty(size, device="meta")))


def first_values(name: str, rows: range, row: int, rows_a_matrix: int, seed: int) -> Tensor:
    """Initial values of some rows of an adapter's parameter: zeros for B, a uniform distribution within 1/√in for A, as
    in PEFT (kaiming_uniform_ with a = √5), drawn matrix by matrix.

    Args:
        row: elements per row.
        rows_a_matrix: r of A, of each expert's where there are several; `rows` may be part of some of them.
    """
    values = torch.zeros(len(rows), row)
    if name.endswith(B):
        return values
    for number in range(rows.start // rows_a_matrix, -(-rows.stop // rows_a_matrix)):
        generator = torch.Generator().manual_seed(crc32(f"{seed} {name} {number}".encode()))
        matrix = torch.empty(rows_a_matrix, row).uniform_(-(row**-0.5), row**-0.5, generator=generator)
        first = number * rows_a_matrix
        mine = range(max(rows.start, first), min(rows.stop, first + rows_a_matrix))
        values[mine.start - rows.start : mine.stop - rows.start] = matrix[mine.start - first : mine.stop - first]
    return values

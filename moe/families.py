"""Model families: one record each says where the MoE block sits, what its router does, and what its tensors are
called on disk. A new family is a new record.

Orientation (which matrix is gate, up or down, and which is transposed) always comes from a tensor's name, never from
its shape: F < D exists.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe.errors import ExpertMeshError
from moe.layer import MoEShape


@dataclass(frozen=True)
class PerExpertNames:
    """Tensors of one MoE layer on disk, one a matrix and expert: gate and up (F, D), down (D, F), router (E, D).

    Templates with {layer} and, but for the router, {expert}.
    """

    router: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class FusedNames:
    """Tensors of one MoE layer on disk, all experts in one: gate_up (E, 2F, D), gate first; down (E, D, F)."""

    router: str
    gate_up: str
    down: str


DiskNames = PerExpertNames | FusedNames


@dataclass(frozen=True)
class Family:
    """What is particular to a family of Hugging Face MoE models.

    Attributes:
        model_type: `model_type` in config.json.
        model_class: the class in transformers that is trained.
        block: name of the MoE block in a decoder layer of that class.
        shape: reads the MoE layer's sizes from a config.
        disk_names: every way its MoE tensors are called on disk; the first fits what `save_pretrained` writes.
        ignored_on_disk: regular expressions for tensors in old checkpoints that the model recomputes.
    """

    model_type: str
    model_class: str
    block: str
    shape: Callable[[Any], MoEShape]
    disk_names: tuple[DiskNames, ...]
    ignored_on_disk: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)


def _mixtral_shape(config: Any) -> MoEShape:
    return MoEShape(
        model_width=config.hidden_size,
        expert_width=config.intermediate_size,
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        normalize_top_k=True,
        jitter_noise=config.router_jitter_noise,
    )


MIXTRAL = Family(
    model_type="mixtral",
    model_class="MixtralForCausalLM",
    block="mlp",
    shape=_mixtral_shape,
    disk_names=(
        PerExpertNames(
            router="model.layers.{layer}.block_sparse_moe.gate.weight",
            gate="model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
            up="model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
            down="model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
        ),
        FusedNames(
            router="model.layers.{layer}.mlp.gate.weight",
            gate_up="model.layers.{layer}.mlp.experts.gate_up_proj",
            down="model.layers.{layer}.mlp.experts.down_proj",
        ),
    ),
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in (MIXTRAL,)}


def family_of(model_type: Any, where: str) -> Family:
    """The record for a config's `model_type`; `where` names the file for the error.

    Raises:
        ExpertMeshError: the family is unknown; the message lists those that are known.
    """
    if model_type not in FAMILIES:
        raise ExpertMeshError(f"{where}: model_type is {model_type!r}; known MoE families are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def check_config(family: Family, config: Any, where: str) -> MoEShape:
    """The MoE sizes of a config, checked.

    Raises:
        ExpertMeshError: a size is not positive, top-k exceeds the experts, or the activation is not SiLU.
    """
    shape = family.shape(config)
    for field in ("model_width", "expert_width", "num_experts", "top_k"):
        value = getattr(shape, field)
        if not isinstance(value, int) or value < 1:
            raise ExpertMeshError(f"{where}: {field.replace('_', ' ')} is {value!r}; it must be a whole number above 0")
    if shape.top_k > shape.num_experts:
        raise ExpertMeshError(f"{where}: {shape.top_k} experts a token, but only {shape.num_experts} experts")
    if config.hidden_act not in ("silu", "swish"):
        raise ExpertMeshError(f"{where}: hidden_act is {config.hidden_act!r}; the expert kernels know only 'silu'")
    return shape

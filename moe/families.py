"""Model families: one record each says where the MoE block sits, what its router does, and what its tensors are
called on disk. A new family is a new record.

Orientation (which matrix is gate, up or down, and which is transposed) always comes from a tensor's name, never from
its shape: F < D exists.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from moe.errors import ExpertMeshError
from moe.shape import MoEShape


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
        defaults: what transformers takes for settings of interest here that a config.json leaves out.
        renamed: other names that a config.json can have for some of them.
        shape: reads the MoE layer's sizes from a config.
        parameters: name and global shape of every parameter of the model that a config describes, in its order, with
            its MoE blocks swapped (see `moe.build_model`).
        disk_names: every way its MoE tensors are called on disk; the first fits what `save_pretrained` writes.
        ignored_on_disk: regular expressions for tensors in old checkpoints that the model recomputes.
    """

    model_type: str
    model_class: str
    block: str
    defaults: Mapping[str, Any]
    renamed: Mapping[str, str]
    shape: Callable[[Any], MoEShape]
    parameters: Callable[[Any], dict[str, tuple[int, ...]]]
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


def _mixtral_parameters(config: Any) -> dict[str, tuple[int, ...]]:
    return dict(_each_mixtral_parameter(config, _mixtral_shape(config)))


def _each_mixtral_parameter(config: Any, moe: MoEShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = config.hidden_size
    head_width = config.head_dim or width // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_width, config.num_key_value_heads * head_width
    yield "model.embed_tokens.weight", (config.vocab_size, width)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", (queries, width)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, width)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, width)
        yield f"{prefix}.self_attn.o_proj.weight", (width, queries)
        yield f"{prefix}.mlp.router.weight", (moe.num_experts, width)
        for matrix in ("w1", "v1", "w2"):
            yield f"{prefix}.mlp.experts.{matrix}", (moe.num_experts * moe.expert_width, width)
        yield f"{prefix}.input_layernorm.weight", (width,)
        yield f"{prefix}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, width)


MIXTRAL = Family(
    model_type="mixtral",
    model_class="MixtralForCausalLM",
    block="mlp",
    defaults=dict(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=None,
        hidden_act="silu",
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        sliding_window=None,
        attention_dropout=0.0,
        num_experts_per_tok=2,
        num_local_experts=8,
        router_aux_loss_coef=0.001,
        router_jitter_noise=0.0,
        rope_parameters=None,
    ),
    renamed={"num_experts": "num_local_experts"},
    shape=_mixtral_shape,
    parameters=_mixtral_parameters,
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
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ExpertMeshError(
            f"{where}: model_type is {model_type!r:.80}; known MoE families are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def read_settings(family: Family, raw: Mapping[str, Any]) -> Any:
    """What a config.json says, by attribute as in transformers' config, which reads it too but takes seconds to import.
    Nothing is checked (see `check_config`)."""
    given = {family.renamed.get(name, name): value for name, value in raw.items()}
    return SimpleNamespace(**{name: given.get(name, default) for name, default in family.defaults.items()})


# Far beyond any model there is, and near enough that a damaged config has no modules or tables built without end.
_MOST = {
    "vocab_size": 2**24,
    "max_position_embeddings": 2**31,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
}
_MOST_OF_MOE = {"model_width": 2**20, "expert_width": 2**20, "num_experts": 2**12, "top_k": 2**12}
_MOST_EXPERTS = 2**17
"""Of all layers."""
_MOST_HEAD_WIDTH = 2**14
# bounds of what need not be whole
_RANGES = {
    "rms_norm_eps": (0.0, 1.0),
    "attention_dropout": (0.0, 1.0),
    "router_jitter_noise": (0.0, 1.0),
    "router_aux_loss_coef": (0.0, 1e6),
}


def check_config(family: Family, config: Any, where: str) -> MoEShape:
    """The MoE sizes of a config, checked, and whether its other sizes can be those of a model.

    Raises:
        ExpertMeshError: a size is not positive, or beyond any model's; top-k exceeds the experts; heads do not divide
            what they share; a number is not finite or out of its range; or the activation is not SiLU.
    """
    shape = family.shape(config)
    for field, most in _MOST_OF_MOE.items():
        _check_whole(where, field.replace("_", " "), getattr(shape, field), most)
    for field, most in _MOST.items():
        _check_whole(where, field, getattr(config, field), most)
    if shape.top_k > shape.num_experts:
        raise ExpertMeshError(f"{where}: {shape.top_k} experts a token, but only {shape.num_experts} experts")
    if shape.num_experts * config.num_hidden_layers > _MOST_EXPERTS:
        raise ExpertMeshError(
            f"{where}: {shape.num_experts} experts in each of {config.num_hidden_layers} layers are more than "
            f"{_MOST_EXPERTS:,}, and than any model has"
        )
    _check_heads(config, where)
    if config.sliding_window is not None:
        _check_whole(where, "sliding_window", config.sliding_window, 2**31)
    for field, (low, high) in _RANGES.items():
        _check_number(where, field, getattr(config, field), low, high)
    if type(config.tie_word_embeddings) is not bool:
        raise ExpertMeshError(
            f"{where}: tie_word_embeddings is {config.tie_word_embeddings!r:.80}; it must be true or false"
        )
    rotary = config.rope_parameters or {}
    if not isinstance(rotary, dict):
        raise ExpertMeshError(f"{where}: rope_parameters is {rotary!r:.80}; it must be a table")
    for field, value in rotary.items():
        if isinstance(value, int | float):
            _check_number(where, f"rope_parameters.{field}", value, 0.0, 1e30)
    if config.hidden_act not in ("silu", "swish"):
        raise ExpertMeshError(f"{where}: hidden_act is {config.hidden_act!r:.80}; the expert kernels know only 'silu'")
    return shape


def _check_heads(config: Any, where: str) -> None:
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if heads % shared:
        raise ExpertMeshError(f"{where}: num_key_value_heads {shared} does not divide num_attention_heads {heads}")
    if config.head_dim is None and config.hidden_size % heads:
        raise ExpertMeshError(f"{where}: num_attention_heads {heads} does not divide hidden_size {config.hidden_size}")
    width = config.hidden_size // heads if config.head_dim is None else config.head_dim
    _check_whole(where, "head_dim", width, _MOST_HEAD_WIDTH)
    if width % 2:
        raise ExpertMeshError(f"{where}: a head's width is {width}; rotary position embedding needs an even one")


def _check_whole(where: str, field: str, value: Any, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ExpertMeshError(
            f"{where}: {field} is {_brief(value)}; it must be a whole number above 0, at most {most:,}"
        )


def _check_number(where: str, field: str, value: Any, low: float, high: float) -> None:
    if not isinstance(value, int | float) or not low <= value <= high:  # not true of NaN
        raise ExpertMeshError(f"{where}: {field} is {_brief(value)}; it must be a number from {low:g} to {high:g}")


def _brief(value: Any) -> str:
    return f"10^{math.log10(abs(value)):.0f}" if isinstance(value, int) and abs(value) > 2**64 else f"{value!r:.80}"

"""Tiny models of every causal MoE family that the installed transformers has, made by rules and not by a list.

A family is found by `use_experts_implementation` in its source, and shrunk by the names of its settings: each is given
the tiny value of the first rule that fits its name, and each list with an entry a layer is cut down to the layers that
show every kind of entry. What a family needs beyond that stands in `KINDS` and `EXTRA`.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCABULARY = 320
TEXT_IDS = 300
"""Ids from 3 up to here are text: those below are pad, bos and eos, those above stand for images and the like."""
POSITIONS = 256
EXPERTS = 8
ROTARY = 8
"""Of a head of multi-head latent attention, whose other widths keep their proportion to it."""

FEW: dict[str, int] = {"index_topk": 2, "indexer_budget": 8, "index_topk_blocks": 2}
"""How many tokens, or blocks of them, layers choose: fewer than samples have."""
MANY_HEADS = {"index_n_heads": 16, "indexer_n_heads": 16, "index_kpool": 2}
"""Scores are sums of what is positive of each head's: of few heads' many are 0, and which of equal ones is chosen may
turn on how many there are. Blocks are chosen by each head for itself. Tokens that are chosen together are to be few."""

COMPLETE = Version("5.24")
"""The first transformers with all that the tests name, families above all. Older ones are supported from 5.17 on."""
UNSHRINKABLE: dict[str, str] = {}
"""Model type to the reason why `tiny_config` cannot shrink it."""

# Names of settings, the first that fits wins. Given in any case: what an MoE model cannot do without, and what is a
# kind of its own (shared experts, groups of experts, dense first layers), even where a default config has none of it.
EXACTLY: list[tuple[str, Any]] = [
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"eos_token_id", 2),
    (r"vocab_size\w*", VOCABULARY),
    # ids for which a head has columns only to fill up; its logits leave them out
    (r"unpadded_vocab_size", VOCABULARY - 8),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts", EXPERTS),
    (r"num_experts_per_tok(en)?|top_k_experts|moe_topk|moe_k", 2),
    (r"moe_intermediate_size|shared_intermediate_size", 24),
    (r"n_shared_experts|(moe_)?num_shared_experts", 1),
    (r"n_group|num_expert_groups?", 2),
    (r"topk_group", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"mlp_only_layers", [0]),
    # a factor of 1, or none, would hide that it was forgotten
    (r"(moe_)?route[rd]_scaling_factor|logits_scaling|(embedding|residual)_multiplier", 1.5),
    (r"final_logit_softcapping", 30.0),
    (r"lm_head_bias", True),
    (r"use_cache|use_\w*kernels|output_hidden_states", False),
]

# Upper bounds of whole numbers; where a default is None, it stays.
AT_MOST: list[tuple[str, int]] = [
    # which positions an indexer chooses may turn on the last bit of a score, so it may choose all
    (r"max_position_embeddings|model_max_length|index_topk|indexer_budget", POSITIONS),
    (r"((text|out|audio)_)?hidden_size|adapter_(in|out)\w*_dim|adapter_input_size", 32),
    (r"\w*experts?_intermediate_size", 24),
    (r"\w*intermediate_size", 48),
    (r"\w*attention_heads\w*|num_heads|\w*num_value_heads|linear_num_heads|mamba_(n|num)_heads", 4),
    (r"\w*num_(key_value|key)_heads|index(er)?_n_heads|\w*groups", 2),
    (r"\w*head_dim|mamba_d_head", 16),
    (r"rotary_dim|\w*sliding_window(_size)?|index_block_size", 8),
    (r"\w+", 16),
]
LARGE = 64
"""Numbers up to here that only the last rule fits are no sizes of tensors worth shrinking: kernels, periods, depths."""

# Kinds of layers that a family has and its default config does not show, by the model type of the language model: each
# list is repeated over the layers of the default before the tiny model's are chosen.
KINDS: dict[str, dict[str, list[str]]] = {
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "cohere2_moe": {"mlp_layer_types": ["dense", "sparse"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "inkling_text": {"mlp_layer_types": ["dense", "sparse"]},
    "laguna": {"layer_types": ["full_attention", "sliding_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"]},
}

# What no rule can know.
EXTRA: dict[str, dict[str, Any]] = {
    # tokens are compressed by 128 to one by default, and a test's rows are shorter
    "deepseek_v4": dict(compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}),
    # chooses by groups only where it is told to
    "deepseek_v2": dict(topk_method="group_limited_greedy"),
    # a width for text and one for images; and of a head's frequencies those for rows, columns and time
    "ernie4_5_vl_moe_text": dict(
        moe_intermediate_size=[24, 16],
        rope_parameters={"rope_type": "default", "rope_theta": 5e5, "mrope_section": [1, 1, 2]},
    ),
    # clamps its projections in place, where it is told to
    "olmoe": dict(clip_qkv=1.0),
    # its MoE blocks are off by default
    "gemma4_text": dict(enable_moe_block=True),
    # of a head's frequencies those for time, rows and columns
    "glm4v_moe_text": dict(
        head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    ),
    # of the part of a head with positions, its frequencies for time, rows and columns
    "hy_v4_vl_text": dict(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    ),
    # a width for every factor of a patch's size
    "inkling_vision": dict(num_hidden_layers=3, patch_size=2, temporal_patch_size=2),
    # attention at layer 1, experts at 1 and 3, so that experts follow attention and Mamba
    "jamba": dict(num_hidden_layers=4, attn_layer_period=3, attn_layer_offset=1),
    # a layer without positions, and one with the keys and values of another
    "mistral_large4_text": dict(
        num_hidden_layers=4,
        layer_types=["indexed_attention"] * 4,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        no_rope_layers=[1, 0, 1, 1],
        indexer_types=["full", "full", "full", "shared"],
        kv_source_layers=[0, 1, 2, 2],
    ),
    # a chunk's own part of its context
    "nemotron3_diarization": dict(chunk_length=16, chunk_right_context=4, chunk_left_context=4),
    # hashed n-grams (at the first layer, counted from 1) and the indexer are off by default
    "qwen4_exp_text": dict(
        ple_layer_ids=[1],
        heads_per_ngram=2,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=POSITIONS,
        indexer_compress_ratio=4,
    ),
    # which their classes read and do not declare
    "qwen3_omni_moe_thinker": dict(vision_start_token_id=TEXT_IDS + 10),
    "qwen3_omni_moe_talker_text": dict(shared_expert_intermediate_size=24),
    "Qwen3OmniMoeTalkerConfig": dict(spatial_merge_size=2),
    # takes one expert a token and no other number
    "zaya": dict(num_experts_per_tok=1, sliding_window=8),
}


def is_older() -> bool:
    """Whether the installed transformers is older than the one that the tests describe."""
    return Version(transformers.__version__) < COMPLETE


def skip_if_older(reason: str) -> None:
    """Skip a test under an older transformers; under others it goes on, and may fail."""
    if is_older():
        pytest.skip(f"transformers {transformers.__version__} {reason}")


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """A config of this type with 3 or 4 layers, 8 experts, top-2, and nothing random: some 100,000 parameters.

    `changes` are settings of the language model, under any name that transformers accepts; in a config with parts they
    go to its `text_config`. Another depth has to bring the lists that have an entry a layer. A test of a family that an
    older transformers has not is skipped.
    """
    if model_type not in CONFIG_MAPPING:
        skip_if_older(f"has no {model_type}")
    return _tiny(CONFIG_MAPPING[model_type](), lambda part: tiny_config(part.model_type, **changes), changes)


def few_choices(family: str) -> dict[str, Any]:
    """Changes to the tiny config by which layers choose fewer tokens than samples have; none where they choose none."""
    named = tiny_config(family).get_text_config().to_dict()
    changes = {name: value for name, value in FEW.items() if name in named}
    if changes and "index_topk_blocks" not in changes:
        changes |= {name: value for name, value in MANY_HEADS.items() if name in named}
    return changes


def has_auxiliary_loss(config: PreTrainedConfig) -> bool:
    """Whether its own class adds a loss that balances the load of experts (as test_balancing.py finds)."""
    return hasattr(config.get_text_config(), "router_aux_loss_coef")


def tiny_like(config: PreTrainedConfig) -> PreTrainedConfig:
    """A config as small as `tiny_config`'s that has the settings of another one, but for its sizes."""
    return _tiny(config, tiny_like, {})


def _tiny(
    config: PreTrainedConfig, of_text: Callable[[PreTrainedConfig], PreTrainedConfig], changes: dict[str, Any]
) -> PreTrainedConfig:
    """
    Args:
        of_text: makes a tiny config of the part for text, of a config that has parts.
    """
    config_class = type(config)
    tiny = _shrink(config)
    for part in config_class.sub_configs:
        found = getattr(config, part)
        if found is None:
            tiny[part] = None
        elif found.get_text_config() is config.get_text_config():
            tiny[part] = of_text(found).to_dict()
        else:
            tiny[part] = _shrink_all(found)
    own = {_declared_name(config_class, name): value for name, value in changes.items()}
    if config.get_text_config() is not config:
        own = {name: value for name, value in own.items() if name in tiny}
    return config_class(**{**tiny, **own})


def _declared_name(config_class: type[PreTrainedConfig], name: str) -> str:
    """The field of the class that `name` is, or is another name for; `name` itself if there is none."""
    same_as = config_class.attribute_map
    fields = [field.name for field in dataclasses.fields(config_class)]
    aliases = [field for field in fields if same_as.get(field, field) == same_as.get(name, name)]
    return name if name in fields or not aliases else aliases[0]


def _shrink_all(default: PreTrainedConfig) -> dict[str, Any]:
    """A part that is no language model, and its own parts."""
    parts = {name: getattr(default, name, None) for name in type(default).sub_configs}
    tiny = {name: None if part is None else _shrink_all(part) for name, part in parts.items()}
    return {**_shrink(default), **tiny}


def _shrink(default: PreTrainedConfig) -> dict[str, Any]:
    same_as, stated = default.attribute_map, default.to_dict()
    # only what the class declares: the rest it derives from that
    fields = [field.name for field in dataclasses.fields(type(default))]
    settings = {name: stated[same_as.get(name, name)] for name in fields if same_as.get(name, name) in stated}
    for name, kinds in KINDS.get(default.model_type, {}).items():
        settings[name] = list(itertools.islice(itertools.cycle(kinds), settings["num_hidden_layers"]))
    tiny = {name: _tiny_value(name, value, settings) for name, value in settings.items()}
    if "num_hidden_layers" in tiny:
        tiny.update(_tiny_layers(settings, tiny, stated.get("per_layer_config") or {}))
    return {**tiny, **EXTRA.get(default.model_type or type(default).__name__, {})}


def _tiny_value(name: str, value: Any, settings: dict[str, Any]) -> Any:
    for pattern, exact in EXACTLY:
        if re.fullmatch(pattern, name):
            return exact
    if re.fullmatch(r"\w*token_(id|index)", name):
        special = sorted(other for other in settings if re.fullmatch(r"\w*token_(id|index)", other))
        return None if value is None else TEXT_IDS + special.index(name)
    if isinstance(value, float) and re.search(r"dropout|jitter|layerdrop", name):
        return 0.0
    rotary = settings.get("qk_rope_head_dim")
    if name == "head_dim" and value is None and not rotary:
        return 16
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name == "num_key_value_heads" and value == settings["num_attention_heads"]:
        return _tiny_value("num_attention_heads", value, settings)
    if rotary and re.fullmatch(r"(qk_(\w+_)?|v_|index_)?head_dim", name):
        # of multi-head latent attention, one is the sum or the double of others
        return value * ROTARY // rotary
    bound = next((pattern, bound) for pattern, bound in AT_MOST if re.fullmatch(pattern, name))
    return value if bound == AT_MOST[-1] and value <= LARGE else min(value, bound[1])


def _tiny_layers(settings: dict[str, Any], tiny: dict[str, Any], per_layer: dict[Any, Any]) -> dict[str, Any]:
    """All that is said of single layers, for the fewest layers, and at least 3, that show each kind of entry."""
    depth = settings["num_hidden_layers"]
    lists = {name: value for name, value in tiny.items() if isinstance(value, list) and len(value) == depth}
    chosen: list[int] = []
    for layer in range(depth):
        if any(value[layer] not in [value[other] for other in chosen] for value in lists.values()):
            chosen.append(layer)
    # from the end, where no dense layer is
    others = [layer for layer in reversed(range(depth)) if layer not in chosen]
    chosen = sorted(chosen + others[: max(0, 3 - len(chosen))])
    layers: dict[str, Any] = {
        name: [_tiny_value(name, value[layer], settings) for layer in chosen] for name, value in lists.items()
    }
    overrides = {int(layer): values for layer, values in per_layer.items()}
    if overrides:
        # in proportion, so that what differs from the rest of the layers still does
        layers["per_layer_config"] = {
            place: {
                name: max(value * tiny[name] // settings[name], min(value, 2))
                for name, value in overrides[layer].items()
            }
            for place, layer in enumerate(chosen)
            if layer in overrides
        }
    if "moe_layer_end_index" in tiny:
        layers["moe_layer_end_index"] = len(chosen) - 1
    return {**layers, "num_hidden_layers": len(chosen)}


def tiny_model(model_type: str, seed: int, **changes: Any) -> PreTrainedModel:
    """The model of `tiny_config` in fp32 on the CPU with eager attention, every value of it drawn from `seed`.

    Matrices are small and random, vectors (norms, biases, decays) near what transformers starts them with, and so are
    the buffers in floating point that checkpoints hold: none has one value throughout, so that a lost one shows.
    """
    return random_model(tiny_config(model_type, **changes), seed)


def random_model(config: PreTrainedConfig, seed: int, auto: Any = None) -> PreTrainedModel:
    """The model of a tiny config, as `tiny_model` makes it; in the class that `auto` makes of it."""
    torch.manual_seed(seed)
    auto = auto or auto_class(config)
    model = running_text(auto.from_config(config, dtype=torch.float32, attn_implementation="eager"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.2 * noise)
            else:
                parameter.add_(0.05 * noise)
        for buffer in persistent_buffers(model).values():
            if buffer.is_floating_point():
                # below the spread of a router's scores: a larger bias would send all tokens to one expert
                noise = 0.02 * torch.randn(buffer.shape, generator=generator)
                # a matrix of decays is 0 where a token would see later ones
                buffer.add_(noise.where(buffer != 0, 0.0) if buffer.dim() > 1 and buffer.any() else noise)
            elif buffer.dim() == 2 and not buffer.any():
                # the experts of each token id, which only a checkpoint fills
                experts = next(m.down_proj.shape[0] for m in model.modules() if hasattr(m, "is_concatenated"))
                chances = torch.rand(len(buffer), experts, generator=generator)
                buffer.copy_(chances.topk(buffer.shape[1]).indices)
    return model


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class that makes a family's own of its config: where there is none for text alone, the one for
    images and more, which is complete."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForMultimodalLM


def load_model(path: Any, **settings: Any) -> Any:
    """A checkpoint, by transformers itself, in the class that `auto_class` gives."""
    return running_text(auto_class(AutoConfig.from_pretrained(path)).from_pretrained(path, **settings))


def running_text(model: Any) -> Any:
    """A model of transformers; one that only holds others, and has no forward, with that of the one for text."""
    if type(model).forward is nn.Module.forward:
        text = model.config.get_text_config()
        model.forward = next(part.forward for part in model.children() if part.config.get_text_config() is text)
    return model


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in state}

"""What a seed stands for: a tiny model of some family, data, and two parallel layouts with the flags of their runs.

Values of a config are drawn by kind of field, so that every mechanism acts at tiny size: windows, choices of tokens and
the positions before RoPE scaling are shorter than samples, experts are few and often odd, groups are limited.
"""

import inspect
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.moe.hf_model.families import causal_families
from expertmesh.moe.hf_model.family_exceptions import UNSUPPORTED
from expertmesh.training.data.samples import Sample
from tests.families.configs import TEXT_IDS, UNSHRINKABLE, persistent_buffers, random_model, tiny_config
from tests.images import FAMILIES as WITH_IMAGES
from tests.images import image_config, image_inputs, image_model, is_vision, picture

FAMILIES = [family for family in causal_families() if family not in UNSHRINKABLE and family not in UNSUPPORTED]
MOST_TOKENS = 30
"""Of a sample."""
BY_LENGTH = ("dynamic", "longrope")
"""RoPE scaling by the longest sample at hand: results depend on what is computed together, also in transformers."""
BIAS = 0.3
"""Standard deviation of correction biases: as wide as the scores are spread."""


@dataclass(frozen=True)
class Layout:
    """world_size: ranks. flags: of the parallel layout, and of how it computes what does not depend on it."""

    world_size: int
    flags: dict[str, Any]

    def without(self, name: str) -> "Layout":
        return Layout(self.world_size, {key: value for key, value in self.flags.items() if key != name})


@dataclass(frozen=True)
class Draw:
    """
    Attributes:
        changes: to the family's tiny config.
        rows: of samples, all of one step; of images, height and width in tokens, and a seed. micro_batches: of the
            step; the first one has each so-manieth row.
        flags: of what is computed: the same for both layouts.
    """

    seed: int
    family: str
    changes: dict[str, Any]
    rows: list[list[Sample]]
    micro_batches: int
    flags: dict[str, Any]
    layouts: list[Layout] = field(default_factory=list)

    @property
    def has_adapters(self) -> bool:
        return "adapter" in self.flags

    def model(self) -> Any:
        """The family's own class, random."""
        if "images" in self.flags:
            model = image_model(self.family, self.seed, **self.changes)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not is_vision(name) or "train_vision" in self.flags)
        else:
            model = random_model(tiny_config(self.family, **self.changes), self.seed)
        experts = {len(module.down_proj) for module in model.modules() if hasattr(module, "is_concatenated")}
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for tensor in (*persistent_buffers(model).values(), *correction_parameters(model)):
                if tensor.is_floating_point() and tensor.numel() in experts:
                    tensor.copy_(BIAS * torch.randn(tensor.shape, generator=generator))
        return model

    def image_inputs(self, samples: Sequence[Sample], tokens_BS: Tensor) -> dict[str, Tensor]:
        """As a processor makes them of the samples' images; nothing where there are none in the step."""
        if "images" not in self.flags:
            return {}
        config = image_config(self.family, **self.changes)
        like = SimpleNamespace(config=config)
        sizes: list[Any] = [size for sample in samples for size in sample.images]
        pictures = [picture(like, *size) for size in sizes]
        return image_inputs(config.model_type, pictures, tokens_BS, config.image_token_id)

    def inputs(self, model: Any, sample: Sample) -> dict[str, Any]:
        """What transformers' own model takes for a sample."""
        tokens_1S, takes = torch.tensor([sample.tokens]), inspect.signature(model.forward).parameters
        seen = self.image_inputs([sample], tokens_1S) if sample.images else {}
        seen = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in seen.items() if name in takes}
        return {"input_ids": tokens_1S, "use_cache": False, **seen}


def correction_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith("correction_bias")]


def draw(seed: int) -> Draw:
    # each family once among as many seeds as there are families
    block, place = divmod(seed, len(FAMILIES))
    family = random.Random(f"families {block}").sample(FAMILIES, len(FAMILIES))[place]
    changes = draw_changes(random.Random(f"config {seed}"), settings_of(family))
    rng = random.Random(f"data {seed}")
    rows, packing = draw_rows(rng, is_by_length(changes))
    flags = draw_flags(random.Random(f"flags {seed}")) | ({"packing": True} if packing else {})
    of_images = random.Random(f"images {seed}")
    if family in WITH_IMAGES and of_images.random() < 0.5:
        rows = with_images(of_images, rows, image_config(family))
        # adapters, and losses of routers, are drawn without images
        flags = {name: value for name, value in flags.items() if not re.match("router|adapter|lora|use_rslora", name)}
        flags |= {"images": True} | ({"train_vision": ["tower", "projector"]} if of_images.random() < 0.6 else {})
    micro_batches = min(rng.choice((1, 1, 2, 3)), len(rows))
    num_experts = next(
        value for name, value in {**settings_of(family), **changes}.items() if re.fullmatch(EXPERTS, name)
    )
    layouts = draw_layouts(random.Random(f"layouts {seed}"), num_experts)
    return Draw(seed, family, changes, rows, micro_batches, flags, layouts)


# ---- config ----

EXPERTS = r"num_(local_)?experts|n_routed_experts|moe_num_experts"
TOP_K = r"num_experts_per_tok(en)?|top_k_experts|moe_topk|moe_k"
WINDOW = r"\w*sliding_window(_size)?"
LEFT_ALONE = (
    r"use_cache|use_\w*kernels|output_\w+|is_encoder_decoder|return_dict|enable_moe_block|use_sliding_window|"
    r"lm_head_bias"
)
CHOICES: list[tuple[str, float, Sequence[Any]]] = [
    (r"n_shared_experts|(moe_)?num_shared_experts", 0.6, (0, 1, 2, 2, 3)),
    (r"(moe_)?route[rd]?_scal(e|ing_factor)|router_scaling_factor", 0.7, (0.5, 1.0, 2.5)),
    (r"(moe_|\w*experts?_|shared_|dense_)?intermediate_size", 0.4, (8, 16, 20, 40)),
    (r"(mamba_)?chunk_size|block_size|index_block_size", 0.7, (4, 8, 16)),
    (r"index_topk", 0.9, (2, 3, 5)),
    (r"index_topk_blocks|index_kpool", 0.9, (1, 2)),
    (r"indexer_budget", 0.9, (4, 8)),
    (r"\w*conv\w*(kernel(_dim|_size)?|_cache)", 0.3, (2, 3, 4)),
    (r"swiglu_limit", 0.6, (0.3, 1.0, 7.0)),
    (r"clip_qkv", 0.6, (0.3, 1.0)),
    (r"\w*softcapping", 0.4, (2.0, 30.0)),
    (r"hidden_act", 0.15, ("silu", "gelu", "gelu_pytorch_tanh", "relu")),
    (r"\w+_multiplier|logits?_scal(e|ing)", 0.3, (0.5, 2.0)),
]
"""Names of fields, how often they are drawn, and from what; of fields that have a number or a word by default."""


def settings_of(family: str) -> dict[str, Any]:
    """What the tiny config of a family says of its language model, by the names that its class declares."""
    config = tiny_config(family).get_text_config()
    stated, same_as = config.to_dict(), config.attribute_map
    names = [declared.name for declared in fields(type(config))]
    return {name: stated[same_as.get(name, name)] for name in names if same_as.get(name, name) in stated}


def draw_changes(rng: random.Random, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Changes to a tiny config."""

    def happens(chance: float) -> bool:
        return rng.random() < chance

    def named(pattern: str) -> str | None:
        return next((name for name in settings if re.fullmatch(pattern, name)), None)

    changes: dict[str, Any] = {}
    for pattern, chance, values in CHOICES:
        for name in settings:
            if re.fullmatch(pattern, name) and type(settings[name]) in (int, float, str) and happens(chance):
                changes[name] = rng.choice(values)
    if "index_topk_blocks" not in settings:
        # scores are sums of what is positive of each head's: of few heads' many are 0, and alike
        changes |= {name: 16 for name in settings if re.fullmatch(r"index(er)?_n_heads", name)}
    for name, value in settings.items():
        chance = 0.3 if name in ("norm_topk_prob", "tie_word_embeddings", "attention_bias") else 0.1
        if isinstance(value, bool) and not re.fullmatch(LEFT_ALONE, name) and happens(chance):
            changes[name] = not value

    experts, top_k, groups, limit = map(named, (EXPERTS, TOP_K, r"n_group|num_expert_groups?", "topk_group"))
    if experts and top_k and settings[top_k] != 1 and happens(0.85):
        number, at_most = rng.choice((3, 4, 5, 6, 7, 8, 9, 10)), 10
        if groups and limit:
            # of two experts each at least, by the best two of which families choose groups
            count, size = rng.choice(((2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (4, 2), (4, 3)))
            number, changes[groups], changes[limit] = count * size, count, rng.randint(1, count - 1)
            at_most = changes[limit] * size
        changes[experts] = number
        changes[top_k] = min(rng.choice((1, 2, 2, 2, 3, 3, number)), number, at_most)
    heads, kv_heads = settings.get("num_attention_heads"), settings.get("num_key_value_heads")
    if heads and kv_heads and "kv_lora_rank" not in settings and happens(0.4):
        changes["num_key_value_heads"] = rng.choice([n for n in (1, 2, 4) if heads % n == 0])
    if "unpadded_vocab_size" not in settings and happens(0.4):
        sizes = [name for name in settings if re.fullmatch(r"vocab_size\w*", name)]
        changes |= dict.fromkeys(sizes, settings["vocab_size"] + rng.choice((1, 2, 7)))
    _draw_layers(rng, settings, changes, happens)
    _draw_rope(rng, settings, changes, happens)
    return changes


def _draw_layers(rng: random.Random, settings: Mapping[str, Any], changes: dict[str, Any], happens: Any) -> None:
    """Which layers have windows, which have experts, and how wide windows are."""
    depth = settings.get("num_hidden_layers") or len(settings["layers_block_type"])
    for name, value in settings.items():
        if re.fullmatch(WINDOW, name) and not isinstance(value, bool) and happens(0.9 if value else 0.5):
            changes[name] = rng.choice((2, 3, 4, 5, 7, 8))
            if "use_sliding_window" in settings:
                changes["use_sliding_window"] = True
    by_layer = {name for name, value in settings.items() if isinstance(value, list) and len(value) == depth}
    kinds: Any = settings.get("layer_types") or []
    is_free = not by_layer - {"layer_types", "mlp_layer_types"} and not settings.get("per_layer_config")
    has_windows = {*kinds} <= {"full_attention", "sliding_attention"}
    if kinds and is_free and happens(0.6):
        possible = ["full_attention", "sliding_attention"] if has_windows else sorted({*kinds})
        drawn = [rng.choice(possible) for _ in range(depth - 1)]
        changes["layer_types"] = [*drawn, possible[-1] if possible[-1] not in drawn else rng.choice(possible)]
    if settings.get("mlp_layer_types") and {*settings["mlp_layer_types"]} == {"dense", "sparse"} and happens(0.5):
        drawn = [rng.choice(("dense", "sparse", "sparse")) for _ in range(depth)]
        changes["mlp_layer_types"] = drawn if "sparse" in drawn else [*drawn[:-1], "sparse"]
    elif "mlp_only_layers" in settings and happens(0.5):
        changes["mlp_only_layers"] = sorted(rng.sample(range(depth), rng.randint(0, depth - 1)))
    else:
        for name in ("first_k_dense_replace", "num_dense_layers"):
            if isinstance(settings.get(name), int) and "mlp_layer_types" not in settings and happens(0.4):
                changes[name] = rng.randint(0, depth - 1)


def _draw_rope(rng: random.Random, settings: Mapping[str, Any], changes: dict[str, Any], happens: Any) -> None:
    """RoPE scaling from fewer positions than samples have."""
    parameters = settings.get("rope_parameters")
    if not isinstance(parameters, dict):
        return
    positions, factor = rng.choice((6, 8, 12)), rng.choice((2.0, 4.0, 8.0))
    stretched = {"factor": factor, "original_max_position_embeddings": positions}
    if "rope_type" not in parameters and "type" not in parameters:
        # by kind of layers
        kind = rng.choice(("linear", "yarn"))
        by_kind = {
            name: {**value, "rope_type": kind, **stretched}
            if isinstance(value, dict) and value.get("rope_type") == "default" and happens(0.6)
            else value
            for name, value in parameters.items()
        }
        if by_kind != parameters:
            changes["rope_parameters"] = by_kind
        return
    if parameters.get("rope_type", parameters.get("type")) == "yarn":
        changes["rope_parameters"] = {**parameters, **stretched}
        return
    if parameters.get("rope_type") != "default" or not happens(0.5):
        return
    any_kind = ("yarn", "yarn", "linear", "llama3", "dynamic", "longrope")
    kind = rng.choice(any_kind[:3] if "mrope_section" in parameters else any_kind)
    scaling: dict[str, Any] = {**parameters, "rope_type": kind, **stretched}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        width = settings.get("qk_rope_head_dim") or settings.get("head_dim") or 8
        width = int(width * parameters.get("partial_rotary_factor", 1.0)) // 2
        scaling["short_factor"] = [1.0 + 0.5 * place for place in range(width)]
        scaling["long_factor"] = [3.0 + 0.5 * place for place in range(width)]
    if kind in ("linear", "dynamic"):
        del scaling["original_max_position_embeddings"]
    changes["rope_parameters"] = scaling
    changes["max_position_embeddings"] = positions if kind in BY_LENGTH else int(positions * factor)


def is_by_length(changes: Mapping[str, Any]) -> bool:
    return changes.get("rope_parameters", {}).get("rope_type") in BY_LENGTH


# ---- data ----


def draw_rows(rng: random.Random, one_length: bool) -> tuple[list[list[Sample]], bool]:
    """(rows of samples, whether they are packed). At least one token is trained."""
    lengths = [
        rng.choice((1, MOST_TOKENS, *(rng.randint(2, MOST_TOKENS) for _ in range(4)))) for _ in range(rng.randint(1, 7))
    ]
    lengths[0] = max(lengths[0], MOST_TOKENS // 2)
    if one_length:
        lengths = [lengths[0]] * len(lengths)
    samples = [_sample(rng, length) for length in lengths]
    first = samples[0]
    if not any(any(sample.is_trained[1:]) for sample in samples):
        samples[0] = Sample(first.tokens, [place == 1 for place in range(len(first.tokens))])
    packing = rng.random() < 0.5
    rows: list[list[Sample]] = []
    for sample in samples:
        if packing and rows and rng.random() < 0.6:
            rows[-1].append(sample)
        else:
            rows.append([sample])
    return rows, packing


def _sample(rng: random.Random, length: int) -> Sample:
    tokens = [rng.randrange(3, TEXT_IDS - 10) for _ in range(length)]
    begin, one = rng.randrange(length), rng.randrange(length)
    trained = {
        "response": [place >= begin for place in range(length)],
        "all": [True] * length,
        "one": [place == one for place in range(length)],
        "some": [rng.random() < 0.5 for _ in range(length)],
        "none": [False] * length,
    }
    return Sample(tokens, rng.choice([*trained.values()]))


def with_images(rng: random.Random, rows: list[list[Sample]], config: Any) -> list[list[Sample]]:
    """The same samples, some of which have images: the first one has."""

    def seeing(sample: Sample, number: int) -> Sample:
        tokens, is_trained = list(sample.tokens), list(sample.is_trained)
        sizes: list[Any] = []
        # the last one first; with text between any two
        for place in sorted(rng.sample(range(len(tokens) + 1), min(number, len(tokens))), reverse=True):
            size = rng.randint(1, 3), rng.randint(1, 3), rng.randrange(1000)
            taken = picture(SimpleNamespace(config=config), *size).tokens
            tokens[place:place], is_trained[place:place] = [config.image_token_id] * taken, [False] * taken
            sizes.insert(0, size)
        return replace(sample, tokens=tokens, is_trained=is_trained, images=sizes)

    numbers = [[rng.choice((0, 0, 1, 1, 2)) for _ in row] for row in rows]
    numbers[0][0] = max(1, numbers[0][0])
    return [[seeing(*each) for each in zip(row, n, strict=True)] for row, n in zip(rows, numbers, strict=True)]


# ---- flags ----


def draw_flags(rng: random.Random) -> dict[str, Any]:
    """Of what is computed."""
    flags: dict[str, Any] = {"max_grad_norm": rng.choice((0.25, 0.5, 1.0, 100.0))}
    if rng.random() < 0.4:
        flags["router_aux_loss_coef"] = rng.choice((0.1, 0.5))
        flags["router_aux_loss_per_layer"] = rng.random() < 0.3
    if rng.random() < 0.4:
        flags["router_z_loss_coef"] = rng.choice((0.01, 0.1))
    if rng.random() < 0.25:
        flags |= {"adapter": "lora", "lora_rank": rng.choice((1, 2, 3, 4)), "lora_alpha": rng.choice((1.0, 5.0))}
        flags["use_rslora"] = rng.random() < 0.3
        targets = rng.choice((["attention", "experts"], ["experts"], ["attention", "experts", "router"], []))
        flags |= {"lora_targets": targets} if targets else {}
    return flags


def draw_layouts(rng: random.Random, num_experts: int) -> list[Layout]:
    """Two different ones, the first of several ranks."""
    first, second = _layout(rng, num_experts, (2, 2, 4)), _layout(rng, num_experts, (1, 2, 2, 4))
    while first == second:
        second = _layout(rng, num_experts, (1, 2, 2, 4))
    return [first, second]


def _layout(rng: random.Random, num_experts: int, sizes: Sequence[int]) -> Layout:
    world_size = rng.choice(sizes)
    flags: dict[str, Any] = {}
    # one axis is there, the others as it comes
    axes = ["cp", "cp", "tp", "tp", "pp", "dp", *["ep"] * (4 if num_experts % 2 == 0 else 0)]
    axis = rng.choice(axes) if world_size > 1 else "dp"
    left = world_size
    for name in dict.fromkeys((axis, *rng.sample(("cp", "tp", "pp"), 3))):
        divisors = [n for n in (1, 2, 4) if left % n == 0]
        size = rng.choice(divisors[1:] or [1]) if name == axis else rng.choice((1, 1, *divisors))
        if name in ("cp", "tp", "pp") and size > 1:
            flags[f"{name}_size"] = size
            left //= size
    on_stage = world_size // flags.get("pp_size", 1)
    fitting = [n for n in (1, 2, 4) if on_stage % n == 0 and num_experts % n == 0]
    ep_size = rng.choice(fitting[1:] or [1]) if axis == "ep" else rng.choice(fitting)
    flags["ep_size"] = ep_size
    if world_size > 1 and rng.random() < 0.3:
        flags["dense_shard"] = "hybrid"
    flags |= {
        "gradient_checkpointing": rng.choice(("none", "full", "selective")),
        "expert_kernel": rng.choice(("loop", "torch-grouped")),
        "attn_implementation": rng.choice(("auto", "auto", "eager")),
        "cross_entropy": rng.choice(("auto", "chunked", "full")),
    }
    if ep_size > 1:
        flags["dispatch"] = rng.choice(("auto", "plain", "rank", "node"))
        flags |= {"overlap_chunks": 2} if rng.random() < 0.2 else {}
    if flags["gradient_checkpointing"] != "none" and rng.random() < 0.2:
        flags["offload_activations"] = True
    if flags["gradient_checkpointing"] == "selective" and rng.random() < 0.3:
        flags["keep_expert_products"] = 1
    if rng.random() < 0.3:
        flags["reshard_after_forward"] = False
    if "tp_size" in flags and rng.random() < 0.3:
        flags["loss_parallel"] = False
    if "pp_size" in flags and rng.random() < 0.3:
        flags |= {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}
    if rng.random() < 0.3:
        flags["keep_expert_copies"] = True
    return Layout(world_size, flags)

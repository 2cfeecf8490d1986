"""Small models with vision towers, samples with images, and what a step on them should give.

The reference is transformers' own class in one process, one sample after the other: its own positions, masks and
placing of images. Of ours it uses nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoModelForMultimodalLM

from tests.families.configs import TEXT_IDS, random_model, tiny_config

GRIDS = (
    "qwen3_vl_moe",
    "qwen3_5_moe",
    "qwen4_exp",
    "glm4v_moe",
    "glm5_next",
    "minimax_m3_vl",
    "hy_v4_vl",
    "muse_spark",
)
"""Families whose images are flat patches beside a grid of time, height and width."""
BOTH_WAYS = "gemma4"
"""The family whose images are attended to both ways."""
FAMILIES = (*GRIDS, BOTH_WAYS)
IGNORED = -100
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": dict(depth=3, deepstack_visual_indexes=[0, 1]),
    "gemma4": dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        pooling_kernel_size=2,
        patch_size=2,
        position_embedding_size=64,
        use_clipped_linears=False,
    ),
}
_TEXT: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": dict(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        num_hidden_layers=4,
        num_key_value_heads=4,
    ),
    "gemma4": dict(use_bidirectional_attention="vision", hidden_size_per_layer_input=0),
}
_BESIDE: dict[str, dict[str, Any]] = {
    "muse_spark": dict(out_hidden_size=128),
}
"""Of the complete config: widths of the tower, which is as wide as the rules of `tiny_config` make it."""


def image_config(family: str, **changes: Any) -> Any:
    """A tiny config with a tower of a few layers."""
    config: Any = tiny_config(family, **{**_TEXT.get(family, {}), **changes})
    vision = config.vision_config or CONFIG_MAPPING[f"{family}_vision"]()
    for name, value in _TOWERS.get(family, {"depth": 2} if hasattr(vision, "depth") else {}).items():
        setattr(vision, name, value)
    config.vision_config = vision
    for name, value in _BESIDE.get(family, {}).items():
        setattr(config, name, value)
    return config


def image_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """transformers' class that takes images, with random values."""
    config = image_config(family, **changes)
    return random_model(config, seed, image_class(config))


def image_class(config: Any) -> Any:
    """What makes transformers' class that takes images of a config."""
    autos = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
    return next(auto for auto in autos if type(config) in auto._model_mapping)


@dataclass(frozen=True)
class Picture:
    """Pixels, and what tells its size, as a processor makes them. tokens: that it takes."""

    pixels: Tensor
    size: Tensor
    tokens: int


def picture(model: Any, height: int, width: int, seed: int) -> Picture:
    """
    Args:
        height, width: in image tokens.
    """
    generator, vision = torch.Generator().manual_seed(seed), model.config.vision_config
    if model.config.model_type == BOTH_WAYS:
        pool = vision.pooling_kernel_size
        most = 16 * pool**2
        places = torch.full((most, 2), -1)
        grid = torch.cartesian_prod(torch.arange(width * pool), torch.arange(height * pool))
        places[: len(grid)] = grid
        pixels = torch.rand(most, 3 * vision.patch_size**2, generator=generator)
        pixels[len(grid) :] = 0
        return Picture(pixels, places, height * width)
    merge = getattr(vision, "spatial_merge_size", None) or vision.merge_size
    frames = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
    shape = (3 * frames * vision.patch_size**2,)
    pixels = torch.randn(height * width * merge**2, *shape, generator=generator)
    # one family writes a token at the end of each of its rows
    tokens = height * (width + 1) if model.config.model_type == "hy_v4_vl" else height * width
    return Picture(pixels, torch.tensor([1, height * merge, width * merge]), tokens)


@dataclass(frozen=True)
class ImageSample:
    """labels: of each token. pictures: in the order in which they stand in the tokens."""

    tokens: list[int]
    labels: list[int]
    pictures: tuple[Picture, ...] = ()


def sample(model: Any, *parts: int | tuple[int, int], seed: int) -> ImageSample:
    """
    Args:
        parts: a number of text tokens, or the height and width of an image.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    labels: list[int] = []
    pictures: list[Picture] = []
    token = model.config.image_token_id
    for part in parts:
        if isinstance(part, tuple):
            pictures.append(picture(model, *part, seed=seed + len(pictures)))
            tokens += [token] * pictures[-1].tokens
            labels += [token] * pictures[-1].tokens  # as some collators have it; never learned
        else:
            text = torch.randint(3, TEXT_IDS, (part,), generator=generator).tolist()
            tokens += text
            labels += text
    return ImageSample(tokens, labels, tuple(pictures))


def samples_of(model: Any) -> list[ImageSample]:
    """With no image, one, and two; among four ranks' own, some without any."""
    parts: list[tuple[int | tuple[int, int], ...]] = [
        (4, (2, 3), 5),
        (9,),
        ((2, 2), 6, (1, 2), 4),
        (3,),
        (2, (1, 3), 7),
        (3, (3, 2), 2),
        (12,),
        (5,),
    ]
    return [sample(model, *part, seed=number) for number, part in enumerate(parts)]


def collated(model: Any, rows: Sequence[Sequence[ImageSample]]) -> dict[str, Any] | None:
    """A batch as transformers' and trl's collators make it, each row several samples."""
    if not rows:
        return None
    length = max(sum(len(each.tokens) for each in row) for row in rows)
    batch = {
        "input_ids": torch.zeros(len(rows), length, dtype=torch.long),
        "labels": torch.full((len(rows), length), IGNORED),
        "attention_mask": torch.zeros(len(rows), length, dtype=torch.long),
    }
    is_packed = any(len(row) > 1 for row in rows)
    if is_packed:
        batch["position_ids"] = torch.zeros(len(rows), length, dtype=torch.long)
    for number, row in enumerate(rows):
        start = 0
        for each in row:
            end = start + len(each.tokens)
            batch["input_ids"][number, start:end] = torch.tensor(each.tokens)
            batch["labels"][number, start:end] = torch.tensor(each.labels)
            batch["attention_mask"][number, start:end] = 1
            if is_packed:
                batch["position_ids"][number, start:end] = torch.arange(end - start)
            start = end
    pictures = [each for row in rows for one in row for each in one.pictures]
    return {**batch, **image_inputs(model.config.model_type, pictures, batch["input_ids"], model.config.image_token_id)}


def image_inputs(family: str, pictures: Sequence[Picture], tokens_BS: Tensor, token: int) -> dict[str, Tensor]:
    kinds = {"mm_token_type_ids": (tokens_BS == token).long()}
    if not pictures:
        return kinds
    sizes = torch.stack([each.size for each in pictures])
    if family == BOTH_WAYS:
        pixels = torch.stack([each.pixels for each in pictures])
        return {**kinds, "pixel_values": pixels, "image_position_ids": sizes}
    return {**kinds, "pixel_values": torch.cat([each.pixels for each in pictures]), "image_grid_thw": sizes}


@dataclass
class Answer:
    """grads, weights: as transformers names parameters, weights after some steps."""

    loss: float
    grads: dict[str, Tensor]


def answer(model: Any, samples: Sequence[ImageSample], trained: Sequence[str] = ()) -> Answer:
    """The loss of one step and the gradients, by transformers' class."""
    import inspect

    model.train()
    model.zero_grad()
    takes = inspect.signature(model.forward).parameters
    token = model.config.image_token_id
    labels = [torch.tensor(each.labels[1:]) for each in samples]
    labels = [each.masked_fill(each == token, IGNORED) for each in labels]
    count = sum(int((each != IGNORED).sum()) for each in labels)
    total = 0.0
    for each, wanted in zip(samples, labels, strict=True):
        tokens_1S = torch.tensor([each.tokens])
        inputs = image_inputs(model.config.model_type, each.pictures, tokens_1S, token)
        inputs = {name: value for name, value in inputs.items() if name in takes}
        if not each.pictures:
            inputs = {}
        logits = model(input_ids=tokens_1S, use_cache=False, **inputs).logits[0, :-1]
        loss = F.cross_entropy(logits.float(), wanted, ignore_index=IGNORED, reduction="sum") / count
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Answer(total, grads)


def is_vision(name: str) -> bool:
    return any(part in name for part in ("visual", "vision", "multi_modal_projector"))


def without_vision(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not is_vision(name)}


def stepped(
    model: Any, samples: Sequence[ImageSample], steps: int, rate: float, trained: Any = None
) -> dict[str, Tensor]:
    """The weights after some steps of torch's AdamW; of the parameters whose names are `trained`."""
    chosen = [p for name, p in model.named_parameters() if trained is None or trained(name)]
    optimizer = torch.optim.AdamW(chosen, lr=rate, weight_decay=0.0)
    for _ in range(steps):
        answer(model, samples)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}

"""A model's sizes, from its config.json alone: no weights, no memory."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import moe
from moe import ExpertMeshError, MoEShape, ParameterCounts
from moe.exceptions import FORECAST

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Hugging Face causal language model whose MoE blocks were swapped, unit by unit as FSDP2 wraps them.

    Attributes:
        config: the model's.
        moe: of one MoE layer.
        counts: of parameters.
        num_layers: decoder layers.
        num_heads, num_kv_heads, head_width: of attention.
        vocabulary: tokens there are.
        layer: shapes of one decoder layer's parameters that belong to no expert.
        experts: shapes of w1, v1 and w2 of one layer, all experts.
        root: shapes of what is in no decoder layer: embedding, final norm and, if it is not tied, head.
    """

    config: Any
    moe: MoEShape
    counts: ParameterCounts
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    vocabulary: int
    layer: Shapes
    experts: Shapes
    root: Shapes

    @cached_property
    def layer_parameters(self) -> int:
        """Of one decoder layer, without experts."""
        return sum(map(prod, self.layer))

    @cached_property
    def expert_parameters(self) -> int:
        """Of all experts of one layer."""
        return sum(map(prod, self.experts))

    @cached_property
    def root_parameters(self) -> int:
        return sum(map(prod, self.root))

    @property
    def is_tied(self) -> bool:
        """Whether the head's weight is the embedding's."""
        return bool(getattr(self.config, "tie_word_embeddings", False))


def shape_of_model(model: Any, config: Any) -> ModelShape:
    """The sizes of a model from `moe.build_model`, before it is sharded."""
    layers, blocks = moe.decoder_layers(model), moe.moe_layers(model)
    experts = {p for block in blocks for p in block.mlp.parameters()}
    in_layers = {p for layer in layers for p in layer.parameters()}
    return ModelShape(
        config=config,
        moe=moe.moe_shape(model),
        counts=moe.count_parameters(model),
        num_layers=len(layers),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
        layer=tuple(tuple(p.shape) for p in layers[0].parameters() if p not in experts),
        experts=tuple(tuple(p.shape) for p in blocks[0].mlp.parameters()),
        root=tuple(tuple(p.shape) for p in model.parameters() if p not in in_layers),
    )


def shape_of_config(config: Any, where: str) -> ModelShape:
    """The sizes of the model that a config describes.

    Raises:
        ExpertMeshError: there is no forecast for this family, or no model of these sizes; `where` names the config.
    """
    moe.check_config(config.to_dict(), where)
    if config.model_type not in FORECAST:
        raise ExpertMeshError(
            f"{where}: there is no forecast for {config.model_type}: the planner's formulas hold for "
            f"{', '.join(sorted(FORECAST))} alone; the model trains all the same"
        )
    try:
        return shape_of_model(moe.build_model(config), config)
    except ExpertMeshError as error:
        raise ExpertMeshError(f"{where}: {error}") from error


def read_config(model: str) -> tuple[Any, str]:
    """The config that `--model` names, and where it lies: a directory, a config.json, or a hub id (of which only
    config.json is fetched, from the cache where there is no network).

    Raises:
        ExpertMeshError: there is none, or it cannot be read.
    """
    path = Path(model).expanduser()
    if not path.exists() and (model.count("/") != 1 or model.startswith((".", "/", "~")) or path.suffix == ".json"):
        raise ExpertMeshError(f"--model {model}: no such file or directory; give one, a config.json, or a hub id")
    if path.is_dir() and not (path / "config.json").exists():
        raise ExpertMeshError(f"--model {model}: the directory has no config.json")
    if path.exists() and not (path / "config.json" if path.is_dir() else path).is_file():
        raise ExpertMeshError(f"--model {model}: config.json is no file")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path) if path.exists() else model, trust_remote_code=False), model
    except Exception as error:
        where = "cannot be read" if path.exists() else "is no directory, and the hub gives no config.json"
        reason = str(error).strip().splitlines()
        raise ExpertMeshError(f"--model {model} {where}: {reason[0] if reason else type(error).__name__}") from error

"""Small Mixtral models and tokenizers for tests."""

from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def tiny_config(**changes: Any) -> MixtralConfig:
    settings: dict[str, Any] = dict(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        router_aux_loss_coef=0.02,
    )
    return MixtralConfig(**{**settings, **changes})


def tiny_mixtral(seed: int = 0, **changes: Any) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    return MixtralForCausalLM(tiny_config(**changes))


def save_model(path: Path, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB", **changes: Any) -> None:
    """Save a random model as transformers does; `save_original_format=False` among the changes gives fused names."""
    original = changes.pop("save_original_format", True)
    model: Any = tiny_mixtral(**changes)
    model.to(dtype)
    model.save_pretrained(path, max_shard_size=max_shard_size, save_original_format=original)


def save_tokenizer(path: Path) -> None:
    """A byte-level BPE tokenizer trained on a few words, with <s> and </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["say hello to the world of experts"] * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(path)


def relative_error(found: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """2-norm of the difference over that of what is expected, or over `floor` if that is larger; of two zeros, 0."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=max(floor, 1e-30))) if difference > 0 else 0.0

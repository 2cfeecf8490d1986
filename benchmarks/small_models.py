"""Small random models, and tokenizers trained on a benchmark's own texts."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def save_byte_pairs(
    path: Path,
    texts: Iterable[str],
    vocabulary: int,
    special: Sequence[str],
    splits_digits: bool = False,
    **of_tokenizer: Any,
) -> None:
    """Save a tokenizer of byte pairs of texts.

    Args:
        special: tokens that get the first numbers.
        splits_digits: whether each digit is a token of its own.
        of_tokenizer: of transformers' `PreTrainedTokenizerFast`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = by_bytes
    if splits_digits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **of_tokenizer).save_pretrained(path)


def save_model(path: Path, family: str, seed: int, sizes: Mapping[str, Any]) -> int:
    """A random model with the vocabulary of the tokenizer that is there; its number of parameters.

    Args:
        sizes: by names that configs of several families have; a config takes those that are its own.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(path)
    own = AutoConfig.for_model(family).to_dict()
    of_tokenizer = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    of_model = {name: size for name, size in sizes.items() if name in own}
    config = AutoConfig.for_model(family, **of_model, **of_tokenizer, vocab_size=len(tokenizer))
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def random_mixtral(arguments: argparse.Namespace, seed: int = 0, **sizes: Any) -> Any:
    """A Mixtral in fp32 of the flags' sizes, and of others that no flag says."""
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    own = dict(num_attention_heads=8, num_key_value_heads=4, num_local_experts=8)
    config = MixtralConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        num_hidden_layers=arguments.layers,
        **(own | sizes),
    )
    torch.manual_seed(seed)
    return MixtralForCausalLM(config)

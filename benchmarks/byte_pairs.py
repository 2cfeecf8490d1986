"""Small tokenizers, trained on a benchmark's own texts."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


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

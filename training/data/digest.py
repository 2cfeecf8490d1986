"""What tokenized samples are, in facts that can be compared with those of another node, or of the run that began."""

from collections.abc import Mapping

import numpy as np
import xxhash
from numpy.typing import NDArray

from .samples import SAMPLES_AT_ONCE, Samples

_TOKENS, _TARGETS, _UNORDERED = "tokens in order", "targets in order", "samples in any order"


def samples_facts(samples: Samples) -> dict[str, str]:
    """How many samples and tokens there are, and digests of all token ids and targets, in order and without it."""
    tokens, targets = _hashes(samples)
    return {
        "samples": f"{len(samples):,}",
        "tokens": f"{int(samples.lengths.sum()):,}",
        "targets": f"{int(samples.targets.sum()):,}",
        _TOKENS: xxhash.xxh3_64_hexdigest(tokens.tobytes()),
        _TARGETS: xxhash.xxh3_64_hexdigest(targets.tobytes()),
        # the sum wraps around, as it should
        _UNORDERED: f"{int(targets.sum(dtype=np.uint64)):016x}",
        **_of_images(samples),
        **{name: xxhash.xxh3_64_hexdigest(values) for name, values in samples.beside.items()},
    }


def _of_images(samples: Samples) -> dict[str, str]:
    """By their files' checksums, wherever those are."""
    digests = samples.image_digests
    if digests is None:
        return {}
    return {"images": f"{len(digests):,}: {xxhash.xxh3_64_hexdigest(','.join(digests).encode())}"}


def explain_samples(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """What two differing sets of facts have in common, in words; empty where that is nothing."""
    alike = {name for name, value in one.items() if other.get(name) == value}
    if _UNORDERED in alike:
        return "the same samples in another order"
    if _TOKENS in alike:
        return "the same tokens, but other trained tokens"
    return ""


def _hashes(samples: Samples) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """(of each sample's token ids, of these and what is trained on among them)."""
    of_tokens: list[int] = []
    of_targets: list[int] = []
    columns = ["tokens", "is_trained", *["weights"] * samples.is_weighted]
    table = samples.dataset.select_columns(columns).with_format("arrow")
    for batch in table.iter(batch_size=SAMPLES_AT_ONCE):
        column = batch["tokens"].combine_chunks()
        ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
        tokens = column.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
        trained = batch["is_trained"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        for own_tokens, own_trained in zip(np.split(tokens, ends[:-1]), np.split(trained, ends[:-1]), strict=True):
            of_tokens.append(xxhash.xxh3_64_intdigest(own_tokens.tobytes()))
            of_targets.append(xxhash.xxh3_64_intdigest(own_trained.tobytes(), seed=of_tokens[-1]))
        if samples.is_weighted:
            weights = [np.array(own, dtype=np.float32).tobytes() for own in batch["weights"].to_pylist()]
            since = len(of_targets) - len(weights)
            of_targets[since:] = map(xxhash.xxh3_64_intdigest, weights, of_targets[since:])
    return np.array(of_tokens, dtype=np.uint64), np.array(of_targets, dtype=np.uint64)

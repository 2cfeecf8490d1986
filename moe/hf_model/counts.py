"""Parameters and floating point operations of a model, from its shapes alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

from ..experts.model_facts import Attention
from ..experts.shape import MoEShape


def seen_pairs(attention: Sequence[Attention], spans: Iterable[range]) -> tuple[int, ...]:
    """Pairs of a token and one that it attends to, itself included: one count for each entry of `attention`.

    Args:
        spans: for each sample, the positions of the tokens that attend to those before them in the sample.
    """
    ends = [(span.start, span.stop) for span in spans]
    return tuple(
        sum(_causal(end, kind.window) - _causal(start, kind.window) for start, end in ends) for kind in attention
    )


def _causal(length: int, window: int) -> int:
    """Pairs among the first `length` tokens of a sample."""
    unseen = max(length - window, 0) if window else 0
    return length * (length + 1) // 2 - unseen * (unseen + 1) // 2


@dataclass(frozen=True)
class ParameterCounts:
    """total: every parameter once. experts: those in experts. embedding: the table that input tokens are looked up in.
    head: the matrix that makes logits, which may be the same table. active: those that one token uses. attention: no
    parameters, but layers by what their tokens see. frozen: of `active`, without embedding and head, those without a
    gradient. frozen_head: whether the head has none. images: floating point operations by patch, and by pair of patches
    of one image (see `image_costs.image_flops`); parameters that images alone pass are in `total` alone.
    """

    total: int
    experts: int
    embedding: int
    head: int
    active: int
    attention: tuple[Attention, ...]
    frozen: int = 0
    frozen_head: bool = False
    images: tuple[float, float] | None = None


def active_parameters(total: int, experts: int, shape: MoEShape) -> int:
    """Parameters that one token uses: all non-expert ones, and K of the E experts of each layer."""
    return total - experts + experts * shape.top_k // shape.num_experts


def training_flops(
    counts: ParameterCounts, config: Any, tokens: int, targets: int, pairs: Sequence[int], of_images: Sequence[int] = ()
) -> float:
    """Floating point operations that one forward and backward of these tokens need, on all ranks together.

    A multiplication and an addition for each parameter that a token uses, once forward and twice backward (6 N, Kaplan
    et al. 2020): the input embedding is looked up, not multiplied; the head is needed at target tokens only. Attention
    adds a dot product and a weighted sum over each pair of tokens that see one another. Of frozen parameters one of the
    two backward products is left out. What activation checkpointing recomputes is not counted.

    Args:
        config: the model's; says whether its head is its embedding.
        tokens: without padding.
        targets: tokens with a loss.
        pairs: from `seen_pairs` for `counts.attention`.
        of_images: how many images, patches, and pairs of patches of one image.
    """
    is_tied = counts.embedding == counts.head and bool(getattr(config, "tie_word_embeddings", False))
    matrices = counts.active - counts.head - (0 if is_tied else counts.embedding)
    frozen = tokens * counts.frozen + targets * (counts.head if counts.frozen_head else 0)
    attended = sum(kind.width * number for kind, number in zip(counts.attention, pairs, strict=True))
    vision = sum(map(mul, counts.images, of_images[1:])) if counts.images is not None else 0.0
    return 6.0 * (tokens * matrices + targets * counts.head + attended) - 2.0 * frozen + vision

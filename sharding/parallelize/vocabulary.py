"""The vocabulary divided over a tensor-parallel group: which of embedding and head can be, and the embedding itself.

Each rank has the rows of some of the tokens. It looks up what it has of all tokens of the group, with zeros for the
others, and the sum over the ranks is exact: all but one of the summands are zero.

Shape suffixes: n ranks, B sequences, L positions of each on this rank, D model width, V vocabulary, v = V/n of it on
this rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...moe.experts.forward import current_forward
from ...moe.experts.model_facts import facts_of
from ...moe.util.errors import ExpertMeshError
from ..collectives.tensor_parallel import TPGroup
from ..state import local_tensor


@dataclass(frozen=True)
class DividedVocabulary:
    """Why a model's embedding, and its head, are not divided by vocabulary; None where they are."""

    no_embedding: str | None
    no_head: str | None

    @property
    def embedding(self) -> bool:
        return self.no_embedding is None

    @property
    def head(self) -> bool:
        return self.no_head is None

    def line(self) -> str:
        """For a run's first lines."""
        parts = {"embedding": self.no_embedding, "head": self.no_head}
        return "vocabulary: " + ", ".join(
            f"{name} divided" if reason is None else f"{name} complete on each rank ({reason})"
            for name, reason in parts.items()
        )


def divided_vocabulary(model: Any, tp_size: int, cross_entropy: str) -> DividedVocabulary:
    """What `--tp-size` divides by vocabulary.

    Args:
        model: from `build_model`.
        cross_entropy: of `--cross-entropy`. Only chunks are computed of a divided head.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is head.weight:
        return DividedVocabulary("tied to the head", "tied to the embedding")
    no_embedding, no_head = _indivisible(embedding, tp_size), _indivisible(head, tp_size)
    if not isinstance(embedding, nn.Embedding):
        no_embedding = f"a {type(embedding).__name__} is no nn.Embedding"
    path = next(path for path, module in model.named_modules() if module is head)
    facts = facts_of(model)
    if not facts.head_is_last:
        no_head = "its logits are scaled or capped afterwards"
    elif path in facts.read_weights:
        no_head = "other modules read its weight"
    elif cross_entropy not in ("auto", "chunked"):
        no_head = f"--cross-entropy {cross_entropy} computes with all of it; chunked computes with parts"
    return DividedVocabulary(no_embedding, no_head)


def _indivisible(module: Any, tp_size: int) -> str | None:
    size = len(module.weight)
    return None if size % tp_size == 0 else f"its {size:,} tokens are no multiple of --tp-size {tp_size}"


def divide_embedding(embedding: nn.Embedding, group: TPGroup) -> None:
    """Have an embedding compute with this rank's rows of its weight, in place.

    The parameter, now complete or a DTensor, stays the module's `weight`; when it is called, v rows of it are here, as
    a DTensor or as a plain tensor.

    It gives each rank its positions in a forward whose sequences are split, and else all of them: the ranks of the
    group then have the same.
    """
    kind = type(embedding)
    rows = len(embedding.weight) // group.size
    embedding.__class__ = type(kind.__name__, (_DividedEmbedding, kind), {"__module__": kind.__module__})
    vars(embedding)["_group"] = group
    # as torch has it, the token whose row has no gradient is within the rows
    padding = -1 if embedding.padding_idx is None else embedding.padding_idx - rows * group.index
    embedding.padding_idx = padding if 0 <= padding < rows else None


class _DividedEmbedding(nn.Embedding):
    """Comes before the family's own class, whose forward may scale or norm what it looks up."""

    def forward(self, tokens_BL: Tensor) -> Tensor:
        group: TPGroup = vars(self)["_group"]
        forward = current_forward()
        is_split = forward is not None and forward.split is not None
        if not is_split and torch.is_grad_enabled() and self.weight.requires_grad:
            raise ExpertMeshError(
                "--tp-size: where the vocabulary is divided, a model that is called by itself gives no gradients; take "
                "them from the engine (forward_backward), or call the model under torch.no_grad()"
            )
        if is_split:
            return group.reduce_scatter(self._rows(group.all_gather(tokens_BL, dim=0), group.index), dim=0)
        x_BSD = self._rows(tokens_BL, group.index)
        if group.ranks is not None:
            dist.all_reduce(x_BSD, group=group.ranks)
        return x_BSD

    def _rows(self, tokens_BS: Tensor, index: int) -> Tensor:
        """What the family's own forward makes of these tokens; zeros for those of other ranks."""
        weight_vD = local_tensor(self.weight)
        own_BS = tokens_BS - index * len(weight_vD)
        # spread over all rows, so that no row gets the gradients, zeros though they are, of many tokens at once
        place_BS = own_BS % len(weight_vD)
        # an attribute of the instance comes before a parameter of its name
        vars(self)["weight"] = weight_vD
        try:
            x_BSD: Tensor = super().forward(place_BS)
        finally:
            del vars(self)["weight"]
        return x_BSD.masked_fill((place_BS != own_BS).unsqueeze(-1), 0)

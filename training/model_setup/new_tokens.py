"""Rows of new tokens, the only ones of embedding and head that are trained beside adapters: --train-new-tokens.

They are a parameter of their own, in the place of those rows of the frozen weight, as PEFT's `TrainableTokensLayer` has
it. Where embedding and head are tied, the head computes with the embedding's.

Shape suffixes: B sequences, S positions, D model width, N new tokens, V vocabulary or this rank's part.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...moe.experts.lora import TOKENS
from ...moe.util.change_order import begin_change
from ...moe.util.errors import ExpertMeshError
from ...sharding.state import computing_with


def train_new_tokens(model: Any, ids: tuple[int, ...]) -> str:
    """Have a model train rows of these tokens, in place, on the meta device; all others stay as they are.

    Args:
        model: with its adapters and its `LossHead`, its vocabulary divided already.
        ids: in order.

    Returns:
        A line for a run's first ones.

    Raises:
        ExpertMeshError: embedding or head is trained whole, or is one that PEFT has no such layer for.
    """
    begin_change(model, "new tokens")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight.requires_grad or head.weight.requires_grad:
        raise ExpertMeshError("--train-new-tokens: --modules-to-save trains all rows already; give one of the two")
    if head.bias is not None or not isinstance(embedding, nn.Embedding):
        what = "a head with a bias" if head.bias is not None else f"a {type(embedding).__name__}"
        raise ExpertMeshError(f"--train-new-tokens: PEFT has no layer for {what}; give --modules-to-save")
    is_tied = embedding.weight is head.weight
    for module in (embedding,) if is_tied else (embedding, head):
        rows_ND = torch.empty(len(ids), module.weight.shape[1], device="meta")
        module.register_parameter(TOKENS, nn.Parameter(rows_ND))
        module.register_buffer("new_tokens", torch.tensor(ids), persistent=False)
    vars(embedding)["forward"] = _Embedding(embedding)
    head.new_rows_of = (embedding if is_tied else head,)  # in a tuple, so that it is no module of the head's
    where = "embedding and head, which are tied" if is_tied else "embedding and of head"
    return f"new tokens: {len(ids):,} rows of the {where}, are trained"


class _Embedding:
    """The forward of an embedding with rows of new tokens."""

    def __init__(self, embedding: Any):
        self.embedding = embedding

    def __call__(self, tokens_BS: Tensor) -> Tensor:
        return with_new_tokens(self.embedding, tokens_BS, type(self.embedding).forward(self.embedding, tokens_BS))


def with_new_tokens(embedding: Any, tokens_BS: Tensor, x_BSD: Tensor) -> Tensor:
    """What an embedding gives for these tokens: for new ones from their rows, for others x_BSD."""
    ids_N, padding = embedding.new_tokens, embedding.padding_idx
    place_BS = torch.searchsorted(ids_N, tokens_BS).clamp(max=len(ids_N) - 1)
    embedding.padding_idx = None  # which is no place among these rows
    try:
        with computing_with(embedding, {"weight": getattr(embedding, TOKENS)}):
            new_BSD = type(embedding).forward(embedding, place_BS)
    finally:
        embedding.padding_idx = padding
    return torch.where((ids_N[place_BS] == tokens_BS).unsqueeze(-1), new_BSD.to(x_BSD.dtype), x_BSD)


def with_new_rows(weight_VD: Tensor, module: Any, first: int = 0) -> Tensor:
    """A frozen weight with the rows of new tokens in their places.

    Args:
        module: that has these rows.
        first: the token of the weight's first row.
    """
    place_N = module.new_tokens - first
    is_here_N = (place_N >= 0) & (place_N < len(weight_VD))
    return weight_VD.index_copy(0, place_N[is_here_N], getattr(module, TOKENS)[is_here_N].to(weight_VD.dtype))

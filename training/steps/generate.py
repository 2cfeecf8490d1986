"""Sample generations from the sharded model: greedy, by transformers' own `generate`, on all ranks together.

Shape suffixes: B prompts on this rank, S positions.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig

from ...moe.util.errors import ExpertMeshError
from ...sharding.pipeline.pipeline import pipeline_of
from ...sharding.runtime.preemption import boundary
from ...sharding.runtime.process import Ranks
from .evaluate import inference
from .pipelined import through_stages


def generate(
    model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos_token_ids: Sequence[int], ranks: Ranks
) -> list[list[int]]:
    """The model's greedy continuation of each prompt, the same on every rank. All ranks call it together.

    The prompts are distributed over the ranks. It ends when every continuation has, on every rank: the experts of one
    rank compute the others' tokens until then. Training continues as if nothing had happened: in the same mode, with
    the same random numbers, gradients and weights. Call it where no forward waits for its backward.

    Args:
        model: sharded.
        prompts: token ids, the same on all ranks. Of one that does not fit into the model's positions together with
            its continuation, the end is kept.
        max_new_tokens: of each continuation.
        eos_token_ids: each ends a continuation and is its last token; none lets all run to max_new_tokens.

    Returns:
        Token ids of the continuations, in the order of the prompts.

    Raises:
        ExpertMeshError: a prompt has no token.
    """
    if not prompts:
        return []
    if not all(prompts):
        raise ExpertMeshError("a prompt has no token; give a longer prompt, or a tokenizer with a BOS token")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    longest = max(positions - max_new_tokens, 1)
    # a rank without a prompt of its own takes part with the first one, which ends when it ends elsewhere
    pipeline = pipeline_of(model)
    # the ranks of a pipeline have the same ones, and so have those of a tensor-parallel group
    ranks_per_stage = ranks.world_size if pipeline is None else pipeline.groups.topology.ranks_per_stage
    tp_size = model.tensor_parallel.group.size if hasattr(model, "tensor_parallel") else 1
    readers, reader = ranks_per_stage // tp_size, ranks.rank % ranks_per_stage // tp_size
    mine = [prompt[-longest:] for prompt in prompts[reader::readers] or prompts[:1]]
    tokens_BS, attention_mask_BS = (t.to(ranks.device) for t in _pad_left(mine))
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=0,
        # a KV cache tells its length by the first layer, which other stages have not
        use_cache=pipeline is None,
    )
    stages = nullcontext() if pipeline is None else through_stages(model, pipeline)
    with inference(model), _generation_config(model, settings), stages, _cut_between_tokens(model):
        out_BS = model.generate(
            tokens_BS, attention_mask=attention_mask_BS, generation_config=settings, synced_gpus=ranks.world_size > 1
        )
    continued = [_until_end(row, eos_token_ids) for row in out_BS[:, tokens_BS.shape[1] :].tolist()]
    everyone: list[list[list[int]]] = [[] for _ in range(ranks.world_size)]
    dist.all_gather_object(everyone, continued)
    return [everyone[i % readers * tp_size][i // readers] for i in range(len(prompts))]


def _pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """tokens_BS and attention_mask_BS, int64: prompts end together, where their continuations begin."""
    length = max(len(prompt) for prompt in prompts)
    tokens = [[0] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens), torch.tensor(mask)


@contextmanager
def _generation_config(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """`settings` alone: what they leave open, transformers takes from the model's own."""
    own, model.generation_config = model.generation_config, settings
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _cut_between_tokens(model: Any) -> Iterator[None]:
    """All ranks compute each next token together, also those whose own continuations have ended."""
    forwards = count()

    def ask(*_: Any) -> None:
        if next(forwards) > 0:
            boundary()

    hook = model.register_forward_pre_hook(ask, prepend=True)  # before FSDP's own, which gathers parameters
    try:
        yield
    finally:
        hook.remove()


def _until_end(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Up to and with the first end of sequence; what follows is padding."""
    ends = [position for position, token in enumerate(tokens) if token in eos_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens

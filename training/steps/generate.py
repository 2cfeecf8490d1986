"""Text from the sharded model: greedy or sampled, by transformers' own `generate`, on all ranks together.

Shape suffixes: B prompts of a batch on this rank, S positions, V vocabulary.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

from ...moe.util.errors import ExpertMeshError
from ...sharding.parallelize.parallelize import keeping_dense
from ...sharding.pipeline.pipeline import pipeline_of
from ...sharding.runtime.preemption import boundary
from ...sharding.runtime.process import Ranks
from ..data.sequences import share_out
from .evaluate import inference
from .pipelined import through_stages


@dataclass(frozen=True)
class Sampling:
    """How next tokens are drawn: from softmax(logits / temperature), by `seed` and the number of the prompt alone, so
    that answers are the same for every parallel layout."""

    temperature: float
    seed: str


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    ranks: Ranks,
    per_device: int | None = None,
    sampling: Sampling | None = None,
) -> list[list[int]]:
    """The model's continuation of each prompt, the same on every rank. All ranks call it together.

    The prompts are distributed over the ranks. A batch ends when each of its continuations has, on every rank: the
    experts of one rank compute the others' tokens until then. Non-expert parameters are gathered once for all of them.
    Training continues as if nothing had happened: in the same mode, with the same random numbers, gradients and
    weights. Call it where no forward waits for its backward.

    Args:
        model: sharded.
        prompts: token ids, the same on all ranks. Of one that does not fit into the model's positions together with
            its continuation, the end is kept.
        max_new_tokens: of each continuation.
        eos_token_ids: each ends a continuation and is its last token; none lets all run to max_new_tokens.
        per_device: prompts of a batch, on each rank, of which those of like length share one; None: all.
        sampling: None: the likeliest token is taken.

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
    pipeline = pipeline_of(model)
    # the ranks of a pipeline have the same ones, and so have those of a tensor-parallel group
    ranks_per_stage = ranks.world_size if pipeline is None else pipeline.groups.topology.ranks_per_stage
    tp_size = model.tensor_parallel.group.size if hasattr(model, "tensor_parallel") else 1
    readers, reader = ranks_per_stage // tp_size, ranks.rank % ranks_per_stage // tp_size
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=0,
        # a KV cache tells its length by the first layer, which other stages have not
        use_cache=pipeline is None,
    )
    order = list(range(len(prompts)))
    if per_device is not None:
        order.sort(key=lambda number: -min(len(prompts[number]), longest))
    mine, of_first = (share_out(order, readers, per_device or len(prompts), number) for number in (reader, 0))
    found: dict[int, list[int]] = {}
    stages = nullcontext() if pipeline is None else through_stages(model, pipeline)
    with (
        inference(model),
        keeping_dense(model),
        _generation_config(model, settings),
        stages,
        _cut_between_tokens(model),
    ):
        for numbers, others in zip(mine, of_first, strict=True):
            # a rank without a prompt of its own takes part with the first one, which ends when it ends elsewhere
            taken = numbers or others[:1]
            tokens_BS, mask_BS = (
                t.to(ranks.device) for t in _pad_left([prompts[number][-longest:] for number in taken])
            )
            out_BS = model.generate(
                tokens_BS,
                attention_mask=mask_BS,
                generation_config=settings,
                logits_processor=[] if sampling is None else [_Drawn(sampling, taken)],
                synced_gpus=ranks.world_size > 1,
            )
            continued = out_BS[:, tokens_BS.shape[1] :].tolist()
            found |= {n: _until_end(row, eos_token_ids) for n, row in zip(numbers, continued, strict=False)}
    everyone: list[dict[int, list[int]]] = [{} for _ in range(ranks.world_size)]
    dist.all_gather_object(everyone, found)
    answers = {number: answer for own in everyone for number, answer in own.items()}
    return [answers[number] for number in range(len(prompts))]


def generate_in_step(model: Any) -> None:
    """Have a model's own `generate`, which others call with prompts of their own on each rank, compute each next token
    on all ranks together, non-expert parameters gathered once, as `generate` here does; in place. All ranks call it
    equally often.
    """
    own = type(model).generate

    def in_step(*args: Any, **kwargs: Any) -> Any:
        with inference(model), keeping_dense(model), _cut_between_tokens(model):
            return own(model, *args, **{"synced_gpus": dist.get_world_size() > 1, **kwargs})

    model.generate = in_step


class _Drawn(LogitsProcessor):
    """Leaves of each prompt's logits the one token that is drawn, which greedy generation then takes."""

    def __init__(self, sampling: Sampling, numbers: Sequence[int]):
        self.temperature = sampling.temperature
        self.draws = [Random(f"{sampling.seed} {number}") for number in numbers]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The inverse of the cumulative distribution, in fp64, at a number in [0, 1) for each prompt."""
        below_BV = (scores.double() / self.temperature).softmax(dim=-1).cumsum(dim=-1)
        drawn_B1 = torch.tensor([[draw.random()] for draw in self.draws], dtype=torch.float64, device=scores.device)
        token_B1 = torch.searchsorted(below_BV, drawn_B1 * below_BV[:, -1:], right=True)
        token_B1 = token_B1.clamp(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token_B1, 0.0)


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

"""How a family's router scores experts from its logits, found by running one on random numbers.

Softmax, sigmoid or another function; in groups of experts or not: configs rarely say it, and code does in many ways.

Shape suffixes: T tokens, E experts, K experts per token.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOG_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits_TE: logits_TE.log_softmax(dim=-1),
    "sigmoid": F.logsigmoid,
    "sqrtsoftplus": lambda logits_TE: F.softplus(logits_TE).log() / 2,
    "given": lambda scores_TE: scores_TE.log(),
}
"""Logarithm of an expert's score, up to a constant per token; "given": the router's logits are scores."""


@dataclass(frozen=True)
class RouterKind:
    """score: how logits become weights, a key of LOG_SCORES; None where it is none of them. num_groups: groups of
    experts, of which each token uses only some; 1 where there are none."""

    score: str | None
    num_groups: int = 1


UNKNOWN = RouterKind(None)


@torch.no_grad()
def try_router(router: nn.Module, args: tuple[Any, ...], num_experts: int, said: tuple[int, int] | None) -> RouterKind:
    """Run a copy of a router.

    Args:
        router: on the meta device.
        args: those of its forward, on the meta device.
        said: (groups of experts, groups per token) by the config, which some routers use.
    """
    generator = torch.Generator().manual_seed(0)

    def random(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.is_floating_point():
            return torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return torch.zeros(x.shape, dtype=x.dtype)

    copied = deepcopy(router).to_empty(device="cpu")
    for parameter in copied.parameters():
        # a vector, such as a norm's or the experts' scales, leaves no trace in the output
        parameter.copy_(random(parameter) / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else torch.tensor(1.0))
    for buffer in copied.buffers():
        buffer.zero_()
    try:
        with torch.random.fork_rng(devices=[]):
            logits, *rest = copied.eval()(*map(random, args))
    except Exception:
        return UNKNOWN
    chosen = [x.flatten(0, -2) for x in rest if isinstance(x, Tensor) and x.dim() >= 2]
    experts_TK = next((x for x in chosen if x.dtype == torch.long and x.shape[-1] <= num_experts), None)
    if experts_TK is None or logits.shape[-1] != num_experts:
        return UNKNOWN
    weights_TK = next((x for x in chosen if x.is_floating_point() and x.shape == experts_TK.shape), None)
    score = None if weights_TK is None else _score(logits.flatten(0, -2).float(), experts_TK, weights_TK.float())
    is_grouped = said is not None and _keeps_to_groups(experts_TK, num_experts, *said)
    return RouterKind(score, said[0] if is_grouped and said is not None else 1)


def _score(logits_TE: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> str | None:
    """The score function that explains the ratios between the weights of a token's experts."""
    if experts_TK.shape[1] == 1:
        return "softmax"  # one weight is as good as any: nothing speaks against what most families have
    if (experts_TK == experts_TK[:, :1]).all():
        return None  # chosen by a table, which is empty here
    found_TK = weights_TK.log() - weights_TK[:, :1].log()
    for name, log_scores in LOG_SCORES.items():
        chosen_TK = log_scores(logits_TE).gather(1, experts_TK)
        if torch.allclose(found_TK, chosen_TK - chosen_TK[:, :1], rtol=1e-3, atol=1e-3):
            return name
    return None


def _keeps_to_groups(experts_TK: Tensor, num_experts: int, num_groups: int, groups_a_token: int) -> bool:
    """Whether no token has experts from more than `groups_a_token` groups, though it has more experts than that."""
    if not 0 < groups_a_token < num_groups or num_experts % num_groups or experts_TK.shape[1] <= groups_a_token:
        return False
    groups_TK = experts_TK // (num_experts // num_groups)
    return all(len(set(groups)) <= groups_a_token for groups in groups_TK.tolist())

"""The dropless experts of one layer: dispatch, experts, combine. Parallelism is applied to it from outside.

    HF's block:   router(x) ─ weights_TK, experts_TK ─┐
                                                      ├─ DMoE ─ out_TD
                  x_TD ───────────────────────────────┘
    DMoE:  send ─ for each part of the rows: arrive ─ ExpertMLP ─ give back ─ combine

Shape suffixes: B sequences, S sequence length, T = B·S tokens on this rank, D model width, E experts, e experts on this
rank, K experts per token.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..dispatch.alltoall import LocalDispatcher
from ..dispatch.dispatcher_registry import Dispatcher
from ..dispatch.permute import count_experts
from ..util.step_parts import register_step_part
from .expert_mlp import ExpertMLP
from .forward import Beside, forward_of_experts
from .router_stats import UNKNOWN, router_stats
from .shape import MoEShape

register_step_part(__name__, "router")


class DMoE(nn.Module):
    """Takes the place of the module that transformers marks as a layer's experts; no token is dropped.

    Attributes:
        mlp: the experts' weights.
        post_expert_norm: the norm of the family's module on each expert's output; None for most.
        dispatcher: local until `sharding` puts one in its place that reaches other ranks.
        beside: the part of the block that is computed during the all-to-alls; None for most families.
        router: path in the model of the module that chooses from these experts and gives each a logit; None where there
            is no such module, and so neither an auxiliary loss nor an entropy.
        kind: how that one scores experts from its logits.
        correction_bias: path of the buffer that is added to its scores, but for the choice alone; None if it has none.
        num_choices: see `SeenExperts`.
    """

    def __init__(self, mlp: ExpertMLP, post_expert_norm: nn.Module | None = None):
        super().__init__()
        self.mlp = mlp
        self.post_expert_norm = post_expert_norm
        self.dispatcher: Dispatcher = LocalDispatcher(self.shape.num_experts)
        self.beside: Beside | None = None
        self.router: str | None = None
        self.correction_bias: str | None = None
        self.num_choices: int | None = 0
        self.kind = UNKNOWN

    @property
    def shape(self) -> MoEShape:
        return self.mlp.layout.shape

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The weighted sum of each token's experts, in x_TD's dtype, summed up in fp32. Leaves the routing's statistics
        with the current `Forward`, which says what is padding and has the router's logits.

        Args:
            experts_TK: int64, expert of each choice.
            weights_TK: weight of each choice. Those of padding, which is not routed, may be anything.
        """
        num_experts = self.shape.num_experts
        forward = forward_of_experts()
        is_token_T = None if forward.is_token_BS is None else forward.is_token_BS.reshape(-1)
        if is_token_T is not None:
            experts_TK = experts_TK.masked_fill(~is_token_T.unsqueeze(-1), num_experts)
        counts_E = count_experts(experts_TK, num_experts)
        weights_TK = weights_TK.to(torch.promote_types(weights_TK.dtype, torch.float32))
        sent = self.dispatcher.send(x_TD, experts_TK, weights_TK, counts_E, is_token_T is not None)
        if self.beside is not None and self.dispatcher.is_remote:
            self.beside.compute(x_TD, forward)
        returned = self.mlp(sent.rows, sent.parts, lambda: sent.reads_outputs, self.post_expert_norm)
        logits_TE = forward.logits_TE.pop(self, None)
        # with a graph also in the recomputation of a checkpointed layer, which must keep as many tensors
        if forward.has_router_losses or not forward.is_again:
            num_rows = sum(part.experts.num_rows for part in sent.parts)
            given = counts_E, logits_TE, is_token_T, num_rows, self.kind.score
            stats = router_stats(*given, has_losses=forward.has_router_losses)
            stats = replace(stats, replayed_2=forward.replayed_2.pop(self, None))
            if not forward.is_again:
                forward.stats[self] = stats
        return sent.combine(returned)

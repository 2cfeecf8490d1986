"""The dropless experts of one layer: dispatch, experts, combine. Parallelism is applied to it from outside.

    HF's block:   router(x) ─ weights_TK, experts_TK ─┐
                                                      ├─ DroplessExperts ─ out_TD
                  x_TD ───────────────────────────────┘
    DroplessExperts:  send ─ for each part of the rows: arrive ─ ExpertMLP ─ give back ─ combine

Shape suffixes: B sequences, S sequence length, T = B·S tokens on this rank, D model width, E experts, e experts on this
rank, K experts a token.
"""

import torch
from torch import Tensor, nn

from moe.beside import Beside
from moe.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher
from moe.experts import ExpertMLP
from moe.routing import RouterStats, count_experts, router_stats
from moe.scores import UNKNOWN
from moe.shape import MoEShape


class DroplessExperts(nn.Module):
    """Takes the place of the module that transformers marks as a layer's experts; no token is dropped.

    Attributes:
        mlp: the experts' weights.
        post_expert_norm: of the family's module, on each expert's output; None for most.
        dispatcher: local until `sharding` puts an all-to-all one in its place.
        beside: what of the block is computed while rows travel; None for most families.
        router: path in the model of the module that chooses from these experts and gives a logit each; None where there
            is no such module, and so neither an auxiliary loss nor an entropy.
        kind: what that one makes of its logits.
        correction_bias: path of the buffer that is added to its scores, but for the choice alone; None if it has none.
        is_token_BS: set before each forward where the batch holds padding (see `moe.model`); None means no padding.
        logits_TE: of the router, which a hook on it leaves here before each forward.
        stats: the routing statistics of the latest forward, until `moe.take_stats` takes them.
        recording: whether a forward leaves its statistics in `stats`.
    """

    def __init__(self, mlp: ExpertMLP, post_expert_norm: nn.Module | None = None):
        super().__init__()
        self.mlp = mlp
        self.post_expert_norm = post_expert_norm
        self.dispatcher: Dispatcher = LocalDispatcher(self.shape.num_experts)
        self.beside: Beside | None = None
        self.router: str | None = None
        self.correction_bias: str | None = None
        self.kind = UNKNOWN
        self.is_token_BS: Tensor | None = None
        self.logits_TE: Tensor | None = None
        self.stats: RouterStats | None = None
        self.recording = True

    @property
    def shape(self) -> MoEShape:
        return self.mlp.layout.shape

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The weighted sum of each token's experts, in x_TD's dtype, summed up in fp32.

        Args:
            experts_TK: int64, expert of each choice.
            weights_TK: of each choice. Those of padding, which is not routed, may be anything.
        """
        num_experts = self.shape.num_experts
        is_token_T = None if self.is_token_BS is None else self.is_token_BS.reshape(-1)
        if is_token_T is not None:
            experts_TK = experts_TK.masked_fill(~is_token_T.unsqueeze(-1), num_experts)
        counts_E = count_experts(experts_TK, num_experts)
        sent = self.dispatcher.send(x_TD, experts_TK, counts_E, is_token_T is not None)
        if self.beside is not None and isinstance(self.dispatcher, AllToAllDispatcher):
            self.beside.compute(x_TD)
        needs_output = sent.reads_outputs or self.post_expert_norm is not None
        returned = self.mlp(sent.rows, sent.parts, needs_output, self.post_expert_norm)
        logits_TE, self.logits_TE = self.logits_TE, None
        # also where it is not recorded: what a checkpointed layer computes again must keep as many tensors
        num_rows = sum(part.num_rows for part in sent.parts)
        stats = router_stats(counts_E, logits_TE, is_token_T, num_rows, self.kind.score)
        if self.recording:
            self.stats = stats
        weights_TK = weights_TK.to(torch.promote_types(weights_TK.dtype, torch.float32))
        return sent.combine(returned, weights_TK)

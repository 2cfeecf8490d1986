"""The dropless MoE layer: router, dispatch, experts, combine. Parallelism is applied to it from outside.

    x_TD ─ Router ─ weights_TK, experts_TK ─ dispatch ─ rows_RD, counts_e ─ ExpertMLP ─ combine ─ out_TD

Shape suffixes: B sequences, S sequence length, T = B·S tokens on this rank, D model width, F expert width,
E experts, e experts on this rank, K experts a token, R rows received.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe.dispatch import Dispatcher, LocalDispatcher
from moe.kernels import Kernel, loop
from moe.router import Router, RouterStats
from moe.shape import MoEShape


class ExpertMLP(nn.Module):
    """All experts' weights, concatenated: w1 (gate), v1 (up), w2 (down, transposed), each (E·F, D)."""

    def __init__(self, shape: MoEShape, kernel: Kernel = loop):
        super().__init__()
        self.kernel = kernel
        size = (shape.num_experts * shape.expert_width, shape.model_width)
        self.w1 = nn.Parameter(torch.empty(size))
        self.v1 = nn.Parameter(torch.empty(size))
        self.w2 = nn.Parameter(torch.empty(size))

    def forward(self, rows_RD: Tensor, counts_e: Tensor) -> Tensor:
        """Run even when R is 0: an expert that sits out would leave the other ranks' collectives waiting."""
        return self.kernel(rows_RD, counts_e, _local(self.w1), _local(self.v1), _local(self.w2))


def _local(weight: Tensor) -> Tensor:
    """Experts that have been distributed are DTensors; a kernel computes on this rank's part."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class DroplessMoE(nn.Module):
    """Drop-in for HF's sparse MoE block: (B, S, D) in, (B, S, D) out, no token dropped.

    Attributes:
        dispatcher: local until `sharding` puts an all-to-all one in its place.
        is_token_BS: set before each forward where the batch holds padding (see `moe.swap`); None means no padding.
        stats: the routing statistics of the latest forward, until `moe.swap.take_stats` takes them.
        recording: whether a forward leaves its statistics in `stats`.
    """

    def __init__(self, shape: MoEShape, kernel: Kernel = loop):
        super().__init__()
        self.shape = shape
        self.router = Router(shape.model_width, shape.num_experts, shape.top_k, shape.normalize_top_k)
        self.experts = ExpertMLP(shape, kernel)
        self.dispatcher: Dispatcher = LocalDispatcher(shape.num_experts)
        self.is_token_BS: Tensor | None = None
        self.stats: RouterStats | None = None
        self.recording = True

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.training and self.shape.jitter_noise > 0:
            low, high = 1.0 - self.shape.jitter_noise, 1.0 + self.shape.jitter_noise
            x_BSD = x_BSD * torch.empty_like(x_BSD).uniform_(low, high)
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        is_token_T = None if self.is_token_BS is None else self.is_token_BS.reshape(-1)
        routing = self.router(x_TD, is_token_T)
        has_padding = is_token_T is not None
        rows_RD, counts_e, plan = self.dispatcher.dispatch(
            x_TD, routing.experts_TK, routing.stats.counts_E, has_padding
        )
        rows_RD = self.experts(rows_RD, counts_e)
        if self.recording:
            self.stats = replace(routing.stats, rows_computed=rows_RD.shape[0])
        # the union of dispatchers takes back only the plan it gave, which a type checker cannot see
        out_TD = self.dispatcher.combine(rows_RD, routing.weights_TK, plan)  # type: ignore[arg-type]
        return out_TD.view_as(x_BSD)

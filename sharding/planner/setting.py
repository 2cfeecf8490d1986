"""How a model is trained: all that memory, traffic and time depend on beside the model itself."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from sharding.choices import Checkpointing
from sharding.planner.shapes import ModelShape, Shapes
from sharding.topology import DenseShard, Topology


@dataclass(frozen=True)
class StateBytes:
    """Bytes that an optimizer needs for each parameter: the parameter, its gradient, and the optimizer's state."""

    parameter: float
    gradient: float
    state: float

    @property
    def total(self) -> float:
        return self.parameter + self.gradient + self.state


BLOCK = 256
"""Values of 8-bit state that share an fp32 scale."""

OPTIMIZERS = {
    "adamw_torch_fused": StateBytes(4, 4, 8),
    "adamw_torch_8bit": StateBytes(4, 4, 2 + 8 / BLOCK),
    "adamw_bf16": StateBytes(2, 2, 4),
    # of attention's and the experts' matrices, which are nearly all; embeddings and norms have AdamW's 8
    "muon": StateBytes(4, 4, 4),
}
"""By `--optim`."""


@dataclass(frozen=True)
class Setting:
    """One way to run.

    Attributes:
        world_size, ep_size, dense_shard: see `Topology`.
        micro_batch: rows a rank takes in one forward, each of `seq_length` tokens.
        accumulation: forwards and backwards a step.
        checkpointing: what backward computes again (see `sharding.checkpointing`).
        keep_expert_products: layers that do not compute their experts' first products again.
        bf16: whether forward and backward compute in bf16; else in fp32.
        tf32: whether fp32 products are computed in TF32.
        optimizer: a key of OPTIMIZERS.
        expert_kernel: see `moe.KERNELS`; or fp8, for `--expert-precision`.
        reshard_after_forward: whether gathered parameters are given up between forward and backward.
        offload: parameters, gradients and optimizer state in host memory.
        offload_activations: checkpointed layers' inputs in host memory.
        imbalance: tokens of the busiest expert over the mean (`expert_load_max_over_mean` in metrics.jsonl). Memory and
            time go by the busiest rank.
        trained: share of the tokens that have a loss.
        device: "cuda" with nccl, or "cpu" with gloo.
        ep_across_nodes: what if neighbouring ranks were replicas, and those of an ep group dp_size apart? No run is
            arranged so; a sweep asks what it would cost.
    """

    world_size: int
    ep_size: int
    dense_shard: DenseShard = "full"
    micro_batch: int = 1
    seq_length: int = 4096
    accumulation: int = 1
    checkpointing: Checkpointing = "none"
    keep_expert_products: int = 0
    bf16: bool = True
    tf32: bool = False
    optimizer: str = "adamw_torch_fused"
    expert_kernel: str = "torch-grouped"
    reshard_after_forward: bool = True
    offload: bool = False
    offload_activations: bool = False
    imbalance: float = 1.0
    trained: float = 1.0
    device: Literal["cuda", "cpu"] = "cuda"
    ep_across_nodes: bool = False

    @property
    def topology(self) -> Topology:
        return Topology(self.world_size, self.ep_size, self.dense_shard)

    @property
    def dp_size(self) -> int:
        return self.world_size // self.ep_size

    @property
    def dense_ranks(self) -> int:
        """Ranks that share out the rows of what is no expert."""
        return self.ep_size if self.dense_shard == "hybrid" else self.world_size

    @property
    def tokens(self) -> int:
        """A rank's in one forward."""
        return self.micro_batch * self.seq_length

    @property
    def compute_bytes(self) -> int:
        return 2 if self.bf16 else 4

    @property
    def state_bytes(self) -> StateBytes:
        return OPTIMIZERS[self.optimizer]

    @property
    def experts_are_gathered(self) -> bool:
        """Whether the experts are an FSDP2 unit, which makes copies: to gather them over dp, or to bring them from host
        memory."""
        return self.dp_size > 1 or self.offload

    @property
    def experts_are_cast(self) -> bool:
        """Whether the experts' weights are rounded to the dtype that is computed in, without an FSDP2 unit."""
        return not self.experts_are_gathered and self.state_bytes.parameter != self.compute_bytes


@dataclass(frozen=True)
class Unit:
    """What FSDP2 gathers and reduces at once. It cuts each parameter by rows, and pads every rank's part to the
    largest.

    shard: parameters on each rank, padding included. ranks: that share them out. gathered: all of them together.
    """

    shard: int
    ranks: int

    @property
    def gathered(self) -> int:
        return self.shard * self.ranks


def unit(shapes: Shapes, ranks: int) -> Unit:
    return Unit(sum(-(-shape[0] // ranks) * prod(shape[1:]) for shape in shapes), ranks)


@dataclass(frozen=True)
class Units:
    """The units of a run: one decoder layer without its experts, the experts of one layer on this ep rank, the root."""

    layer: Unit
    experts: Unit
    root: Unit


def units_of(model: ModelShape, setting: Setting) -> Units:
    own_experts = tuple((rows // setting.ep_size, *rest) for rows, *rest in model.experts)
    return Units(
        unit(model.layer, setting.dense_ranks),
        unit(own_experts, setting.dp_size),
        unit(model.root, setting.dense_ranks),
    )

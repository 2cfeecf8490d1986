"""How a model is trained: all that memory, traffic and time depend on beside the model itself."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ....moe.dispatch.dispatcher_entries import PLAIN_ENTRY, DispatcherEntry, resolve_dispatch
from ....sharding.parallelize.choices import Checkpointing, ranks_of_equal_nodes
from ....sharding.pipeline.schedule import ScheduleName
from ....sharding.topology import Axis, DenseShard, Topology
from ...config.optimizers import ADAMW_FUSED
from ...model_setup.rates import rank_imbalance
from .measured import ModelParameters, Workload


@dataclass(frozen=True)
class Setting:
    """One way to run.

    Attributes:
        world_size, ep_size, dense_shard, pp_size, cp_size, tp_size: see `Topology`.
        chunks: stages of a pp index.
        schedule: the order of a pipeline's micro-batches (see `make_schedule`).
        stage_layers: decoder layers of each stage; None: such that all take equally long.
        micro_batch: sequences per micro-batch of a rank, or of the `cp_size` * `tp_size` ranks that share them, each of
            `seq_length` tokens; those of all pp indices are the same.
        accumulation: micro-batches per step.
        checkpointing: what backward recomputes (see `sharding.parallelize.recompute`).
        bf16: whether forward and backward compute in bf16; else in fp32.
        tf32: whether fp32 products are computed in TF32.
        optimizer: the name of one (see `training.config.optimizers`).
        reshard_after_forward: whether gathered parameters are freed between forward and backward.
        keep_expert_copies: whether experts that are not gathered are in the compute dtype from one update to the next.
        overlap_chunks: chunks in which a layer's tokens are sent to their experts.
        keep_expert_products: in how many layers selective checkpointing keeps the outputs of the first expert GEMMs;
            what that takes is measured.
        offload: parameters, gradients and optimizer state in host memory.
        offload_activations: checkpointed layers' inputs in host memory. offload_experts: frozen experts.
        imbalance: tokens of the busiest expert over the mean (`expert_load_max_over_mean` in metrics.jsonl). Memory and
            time go by the busiest rank.
        trained: share of the tokens that have a loss.
        device: "cuda" with nccl, or "cpu" with gloo.
        dispatch: how tokens travel to their experts; "auto" goes by `ranks_per_node`, those of a node. sums_in_fp32:
            see `Strategy`.
    """

    world_size: int
    ep_size: int
    dense_shard: DenseShard = "full"
    micro_batch: int = 1
    seq_length: int = 4096
    accumulation: int = 1
    checkpointing: Checkpointing = "none"
    bf16: bool = True
    tf32: bool = False
    optimizer: str = ADAMW_FUSED.name
    reshard_after_forward: bool = True
    cp_size: int = 1
    overlap_chunks: int = 1
    keep_expert_products: int = 0
    offload: bool = False
    offload_activations: bool = False
    offload_experts: bool = False
    imbalance: float = 1.0
    trained: float = 1.0
    device: Literal["cuda", "cpu"] = "cuda"
    pp_size: int = 1
    chunks: int = 1
    schedule: ScheduleName = "1f1b"
    stage_layers: tuple[int, ...] | None = None
    dispatch: str = "auto"
    ranks_per_node: int = 8
    sums_in_fp32: bool = False
    tp_size: int = 1
    keep_expert_copies: bool = False

    @cached_property
    def topology(self) -> Topology:
        return Topology(self.world_size, self.ep_size, self.dense_shard, self.cp_size, self.pp_size, self.tp_size)

    @cached_property
    def dp_size(self) -> int:
        return self.topology.dp_size

    @property
    def ranks_per_stage(self) -> int:
        """The ranks of one pp index."""
        return self.topology.ranks_per_stage

    def group(self, axis: Axis) -> range:
        """The ranks of rank 0's group of an axis."""
        return self.topology.group(axis, 0, self.ranks_per_node)

    @property
    def dense_ranks(self) -> int:
        """Ranks over which non-expert parameters are sharded."""
        return len(self.group("dense"))

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch of a rank."""
        return self.micro_batch * self.seq_length // self.topology.ranks_per_sequence

    @property
    def compute_bytes(self) -> int:
        return 2 if self.bf16 else 4

    @property
    def experts_are_gathered(self) -> bool:
        """Whether the experts are an FSDP unit, which makes copies: to gather them over dp, or to copy them from host
        memory."""
        return self.dp_size > 1 or self.offload or self.offload_experts

    @property
    def keeps_casts(self) -> bool:
        """Whether experts that are no FSDP unit, and are not computed with in the dtype that they are held in, keep
        their weights in the other one."""
        return not self.experts_are_gathered and (self.keep_expert_copies or not self.reshard_after_forward)

    def dispatcher(self, top_k: int) -> DispatcherEntry:
        """How tokens travel to their `top_k` experts each."""
        if self.ep_size == 1:
            return PLAIN_ENTRY
        of_ep = ranks_of_equal_nodes(self.world_size, self.ranks_per_node, self.ep_size)
        return resolve_dispatch(self.dispatch, self.ep_size, of_ep, top_k)

    def workload(self, model: ModelParameters) -> Workload:
        """What one rank computes for a micro-batch."""
        own = not self.experts_are_gathered
        is_cast = any(p.stored != p.computed for kind in model.kinds for p in kind.experts)
        dispatch = self.dispatcher(model.top_k)
        return Workload(
            self.micro_batch,
            self.seq_length,
            round(self.tokens * self.trained),
            self.bf16,
            self.checkpointing,
            self.ep_size,
            self.rows_received(model.num_experts, model.top_k),
            self.overlap_chunks,
            self.cp_size,
            self.offload_activations,
            self.experts_are_gathered,
            own and self.accumulation > 1,
            is_cast and self.keeps_casts,
            self.device,
            dispatch.name,
            self.ranks_of_ep if dispatch.by_nodes else 1,
            self.sums_in_fp32 and dispatch.sums,
            self.tp_size,
        )

    @property
    def ranks_of_ep(self) -> int:
        """The ranks of an ep group on a node."""
        return len(self.group("ep inside node"))

    def rows_received(self, num_experts: int, top_k: int) -> int:
        """Rows that the busiest rank's experts receive (see `rank_imbalance`): where all experts are equally busy, as
        many as are sent."""
        if self.ep_size == 1:
            return self.tokens * top_k
        # rounded for one sequence, so that as many sequences have as many times its rows
        rows = self.seq_length // self.topology.ranks_per_sequence * top_k
        return self.micro_batch * round(rows * rank_imbalance(self.imbalance, num_experts, self.ep_size))

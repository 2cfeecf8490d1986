"""Where tensors live: topology, mesh, expert placement, FSDP2, activation checkpointing, clipping."""

from typing import TYPE_CHECKING

from moe.lazy import import_on_demand

if TYPE_CHECKING:
    from sharding.agreement import check_alike, differences
    from sharding.allocator import let_segments_grow
    from sharding.checkpointing import checkpoint_layers
    from sharding.choices import Checkpointing, Strategy
    from sharding.clipping import clip_grad_norm
    from sharding.context import RowGroup
    from sharding.debugger import debugging
    from sharding.mesh import Mesh, build_mesh
    from sharding.parallelize import fill_adapters, fsdp_units, materialize, zeros_by_rows
    from sharding.process import (
        Ranks,
        device_type,
        end_process_group,
        raise_together,
        refuse_at_start,
        settle_malloc,
        start_process_group,
        use_own_cores,
    )
    from sharding.replicas import check_replicas
    from sharding.state import (
        StateTensor,
        adapters_of,
        changing_state,
        has_dtensor,
        local_tensor,
        parameters_of,
        saved_state,
        set_parameter_dtype,
        state_of,
        trainable_of,
    )
    from sharding.topology import DenseShard, Topology, check_cp_size, check_ep_size, rows_of
    from sharding.torchrun import node_name, nodes_of, read_environment, spans_nodes
    from sharding.watchdog import NO_LIMIT_SECONDS, SAVERS, STUCK, Watchdog, collectives_limit
else:
    __getattr__ = import_on_demand(__name__)

__all__ = [
    "NO_LIMIT_SECONDS",
    "SAVERS",
    "STUCK",
    "Checkpointing",
    "DenseShard",
    "Mesh",
    "Ranks",
    "RowGroup",
    "StateTensor",
    "Strategy",
    "Topology",
    "Watchdog",
    "adapters_of",
    "build_mesh",
    "changing_state",
    "check_alike",
    "check_cp_size",
    "check_ep_size",
    "check_replicas",
    "checkpoint_layers",
    "clip_grad_norm",
    "collectives_limit",
    "debugging",
    "device_type",
    "differences",
    "end_process_group",
    "fill_adapters",
    "fsdp_units",
    "has_dtensor",
    "let_segments_grow",
    "local_tensor",
    "materialize",
    "node_name",
    "nodes_of",
    "parameters_of",
    "raise_together",
    "read_environment",
    "refuse_at_start",
    "rows_of",
    "saved_state",
    "set_parameter_dtype",
    "settle_malloc",
    "spans_nodes",
    "start_process_group",
    "state_of",
    "trainable_of",
    "use_own_cores",
    "zeros_by_rows",
]

"""Where tensors live: topology, mesh, expert placement, FSDP2, activation checkpointing, clipping."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "sharding":  # `python -m sharding` in a checkout: its own modules, whatever is installed
    sys.path.insert(0, str(Path(__file__).parents[1] / "training" / "public"))

from expertmesh.moe.base.lazy import import_on_demand

if TYPE_CHECKING:
    from expertmesh.sharding.clipping import clip_grad_norm
    from expertmesh.sharding.comms.context_parallel import CPGroup
    from expertmesh.sharding.comms.node_groups import check_tp_groups
    from expertmesh.sharding.comms.tensor_parallel import TPGroup
    from expertmesh.sharding.life.agreement import check_alike, differences
    from expertmesh.sharding.life.allocator import let_segments_grow
    from expertmesh.sharding.life.debugger import debugging
    from expertmesh.sharding.life.process import (
        Ranks,
        device_type,
        end_process_group,
        join_process_group,
        raise_together,
        refuse_at_start,
        settle_malloc,
        start_process_group,
        use_own_cores,
    )
    from expertmesh.sharding.life.torchrun import node_name, nodes_of, read_environment, spans_nodes, tell_mistake
    from expertmesh.sharding.life.watchdog import NO_LIMIT_SECONDS, SAVERS, STUCK, Watchdog, collectives_limit
    from expertmesh.sharding.mesh import Mesh, build_mesh
    from expertmesh.sharding.pipeline.pipeline import cut_into_stages, pipeline_of, stage_group
    from expertmesh.sharding.pipeline.schedule import ScheduleName
    from expertmesh.sharding.place.choices import Checkpointing, Dispatch, DispatchSums, Strategy
    from expertmesh.sharding.place.parallelize import (
        fill_adapters,
        free_gathered,
        materialize,
        zeros_by_rows,
    )
    from expertmesh.sharding.place.recompute import checkpoint_layers
    from expertmesh.sharding.place.unreached import agree_on_gradients
    from expertmesh.sharding.replicas import check_replicas
    from expertmesh.sharding.state import (
        StateTensor,
        adapters_of,
        changing_state,
        divided_of,
        has_dtensor,
        local_tensor,
        parameters_of,
        saved_state,
        set_parameter_dtype,
        state_of,
        trainable_of,
    )
    from expertmesh.sharding.topology import (
        DenseShard,
        Topology,
        check_divides,
        check_sizes,
        rows_of,
    )
else:
    __getattr__ = import_on_demand(__name__)

__all__ = [
    "NO_LIMIT_SECONDS",
    "SAVERS",
    "STUCK",
    "CPGroup",
    "Checkpointing",
    "DenseShard",
    "Dispatch",
    "DispatchSums",
    "Mesh",
    "Ranks",
    "ScheduleName",
    "StateTensor",
    "Strategy",
    "TPGroup",
    "Topology",
    "Watchdog",
    "adapters_of",
    "agree_on_gradients",
    "build_mesh",
    "changing_state",
    "check_alike",
    "check_divides",
    "check_replicas",
    "check_sizes",
    "check_tp_groups",
    "checkpoint_layers",
    "clip_grad_norm",
    "collectives_limit",
    "cut_into_stages",
    "debugging",
    "device_type",
    "differences",
    "divided_of",
    "end_process_group",
    "fill_adapters",
    "free_gathered",
    "has_dtensor",
    "join_process_group",
    "let_segments_grow",
    "local_tensor",
    "materialize",
    "node_name",
    "nodes_of",
    "parameters_of",
    "pipeline_of",
    "raise_together",
    "read_environment",
    "refuse_at_start",
    "rows_of",
    "saved_state",
    "set_parameter_dtype",
    "settle_malloc",
    "spans_nodes",
    "stage_group",
    "start_process_group",
    "state_of",
    "tell_mistake",
    "trainable_of",
    "use_own_cores",
    "zeros_by_rows",
]

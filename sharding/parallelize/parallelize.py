"""Applies expert parallelism, activation checkpointing and FSDP2 to a finished model on the meta device.

The loss of every rank is its local sum divided by a global count, so gradients are plain sums over ranks: FSDP's
averaging is switched off, and no factor of dp or ep exists anywhere.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ...moe.experts.expert_mlp import ExpertMLP
from ...moe.experts.lora import first_values
from ...moe.experts.model_layers import moe_layers
from ...moe.hf_model.build import fp32_parameters
from ...moe.hf_model.images import trains_images
from ...moe.linear.quantized import SCALES, view_codes
from ...moe.util.change_order import begin_change
from ...moe.util.gpu import is_gpu
from ...moe.util.step_parts import register_step_part
from ..collectives.gloo import GlooAllGather, GlooReduceScatter, SharedMemory
from ..mesh import Mesh
from ..pipeline.cut import cut
from ..stages import experts_here, layers_by_stage, layers_here, stages_of
from ..state import adapters_of, local_tensor, parameters_of
from ..topology import Topology, check_chunks
from .choices import Strategy
from .dispatchers import choose_dispatcher
from .offload import copies_of, offload_frozen, offload_inputs
from .recompute import checkpoint_layers, keep_products
from .tower import run_tower_together, tower_blocks
from .unreached import reduce_unreached

register_step_part(__name__, None, lasting=("zeros_by_rows",))


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    compute_dtype: torch.dtype,
    strategy: Strategy,
) -> None:
    """Place every parameter of `model` on its mesh, in place. Gradients are reduced in fp32.

    Args:
        model: from `build_model`, on the meta device.
        mesh: the ranks.
        compute_dtype: dtype of parameters and activations in forward and backward.
        strategy: what to keep, to free and to recompute.

    Raises:
        ExpertMeshError: a rank has fewer experts, or the model fewer MoE layers, than `strategy` asks for.
    """
    view_codes(model, compute_dtype)
    place_experts(model, mesh, strategy)
    place_divided(model, mesh)
    checkpoint_layers(model, strategy.checkpointing)
    keep_products(model, strategy.keep_expert_products)
    if blocks := tower_blocks(model):
        run_tower_together(model)
    if strategy.offload_activations:
        offload_inputs(model, mesh.grid.device_type)
    # activations have the dtypes that transformers' code gives them, fp32 for some families' rotary positions
    precision = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    # host memory can be pinned only for a GPU
    placement = CPUOffloadPolicy(pin_memory=mesh.grid.device_type == "cuda") if strategy.offload else OffloadPolicy()
    shard_dense(model, mesh, precision, placement, strategy.offload_experts)
    experts = {layer.mlp for layer in moe_layers(model)}  # which compute with no tokens, too
    # what a pipeline's model has around its layers is for the first and the last stage, which have no use for the
    # other; but what images pass is for ranks of the first stage that have some
    around = {model} if stages_of(model) is not None and not trains_images(model) else set()
    reduce_unreached(model, (unit for unit in fsdp_units(model) if unit not in experts | around))
    for unit in fsdp_units(model):
        _sum_gradients(unit)
        if not strategy.reshard_after_forward:
            unit.set_reshard_after_forward(False, recurse=False)
    for layer in moe_layers(model):
        layer.mlp.working.are_kept = strategy.keep_expert_copies or not strategy.reshard_after_forward
    # over gloo nothing overlaps: it would only cost the memory of another layer
    if is_gpu(mesh.grid.device_type):
        by_stage = layers_by_stage(model)
        for layers in by_stage:
            prefetch_layers(model, layers, from_root=len(by_stage) == 1)
        prefetch_layers(model, [block for block in blocks if isinstance(block, FSDPModule)], from_root=False)
    else:
        communicate_over_gloo(model)
    if (stages := stages_of(model)) is not None:
        cut(model, stages)


def place_experts(model: nn.Module, mesh: Mesh, strategy: Strategy) -> None:
    """Give each ep rank its block of experts, and every MoE layer the dispatcher that reaches them.

    Raises:
        ExpertMeshError: a rank has fewer experts than `strategy.overlap_chunks`, or nodes have unequally many ranks.
    """
    ep_size, chunks = mesh.topology.ep_size, strategy.overlap_chunks
    make_dispatcher = None
    if ep_size > 1:
        # also on a stage without experts: all ranks make the groups together
        make_dispatcher = choose_dispatcher(mesh, strategy, moe_layers(model)[0].shape.top_k)
    for layer in experts_here(model):
        for name, weight in list(layer.mlp.named_parameters()):
            placed = distribute_tensor(weight.detach(), mesh.ep, [Shard(0)])
            layer.mlp.register_parameter(name, nn.Parameter(placed, requires_grad=weight.requires_grad))
        if make_dispatcher is not None:
            check_chunks(chunks, ep_size, layer.shape.num_experts)
            layer.dispatcher = make_dispatcher(layer.shape.num_experts)


def shard_dense(
    model: nn.Module, mesh: Mesh, precision: MixedPrecisionPolicy, placement: OffloadPolicy, from_host: bool = False
) -> None:
    """Give experts an FSDP unit of their own over dp, and non-expert parameters the units of `_dense_units` over all
    ranks.

    With one rank in dp experts are not sharded over it, and a unit would only copy them, and their gradients,
    from buffer to buffer: they have one only to fetch them from host memory. They cast themselves to the compute dtype.

    Args:
        from_host: whether frozen experts are in host memory.
    """
    begin_change(model, "sharding")
    if mesh.dp.size() > 1 or isinstance(placement, CPUOffloadPolicy) or from_host:
        copies = copies_of(mesh.grid.device_type) if from_host else None
        for layer in experts_here(model):
            _make_unit(layer.mlp, mesh=mesh.dp, mp_policy=precision, offload_policy=placement)
            if copies is not None:
                offload_frozen(layer.mlp, mesh.dp.size() > 1, mesh.grid.device_type, copies)
    for unit in _dense_units(model):
        policy = replace(precision, param_dtype=torch.float32) if unit.is_fp32 else precision
        own = {model.get_parameter(name) for name in unit.names}
        _make_unit(
            unit.module,
            mesh=mesh.dense_of_tp if unit.is_divided else mesh.dense,
            mp_policy=policy,
            offload_policy=placement,
            ignored_params=set(unit.module.parameters()) - own,
            reshard_after_forward=unit.reshards,
        )


def without_copies(model: nn.Module, compute_dtype: torch.dtype) -> str | None:
    """Why this rank's experts have no copies in the compute dtype that could be kept, in words; None where they do."""
    experts = [layer.mlp for layer in experts_here(model)]
    if any(isinstance(mlp, FSDPModule) for mlp in experts):
        return "experts are sharded over dp, or come from host memory, and are gathered; see --no-reshard-after-forward"
    weights = [weight for mlp in experts for weight in mlp.parameters() if weight.is_floating_point()]
    if weights and all(weight.dtype == compute_dtype for weight in weights):
        return f"experts are held in {str(compute_dtype).removeprefix('torch.')}, as they are computed"
    return None


def _make_unit(module: nn.Module, **how: Any) -> None:
    """Call FSDP2's `fully_shard`, which derives a class of a unit's own: leave it in the file of the one it is derived
    from. transformers knows no names on disk of a model whose class lies outside its files."""
    file = type(module).__module__
    fully_shard(module, **how)
    type(module).__module__ = file


def divided_here(model: Any) -> Mapping[str, str]:
    """For each parameter of this rank's stages that is divided, the path of the module whose call needs it. The scales
    of a quantized one are divided as it is."""
    divided: Mapping[str, str] = getattr(model, "divided", {})
    stages = stages_of(model)
    here = {name: path for name, path in divided.items() if stages is None or stages.is_here(name)}
    parameters = {name for name, _ in model.named_parameters()} if here else set()
    return here | {name + SCALES: path for name, path in here.items() if name + SCALES in parameters}


def place_divided(model: Any, mesh: Mesh) -> None:
    """Give each tp rank its part of what tensor parallelism divides, cut along dim 0 and then sharded by FSDP over the
    ranks with the same tp index, in place; and the modules that are divided their group."""
    begin_change(model, "divided parameters")
    names = divided_here(model)
    if not getattr(model, "divided", None):
        return
    for name in names:
        owner, _, own_name = name.rpartition(".")
        weight = model.get_parameter(name)
        placed = distribute_tensor(weight.detach(), mesh.tp, [Shard(0)])
        module: nn.Module = model.get_submodule(owner)
        module.register_parameter(own_name, nn.Parameter(placed, requires_grad=weight.requires_grad))
    assert mesh.cp_group is not None
    assert mesh.cp_group.tp is not None
    model.tensor_parallel.place(mesh.cp_group.tp, set(names.values()))


@dataclass(frozen=True)
class _DenseUnit:
    """An FSDP unit of non-expert parameters.

    Attributes:
        module: whose forward gathers them.
        names: of the parameters, in the model.
        is_fp32: whether they are computed with in fp32 whatever the dtype of the other units.
        reshards: whether they are freed after a forward; None: FSDP's default, which frees all but the root's.
        is_divided: whether tensor parallelism divides them.
    """

    module: nn.Module
    names: Set[str]
    is_fp32: bool = False
    reshards: bool | None = None
    is_divided: bool = False


def _dense_units(model: nn.Module) -> list[_DenseUnit]:
    """One unit per decoder layer and per block of a large tower, and one for the parameters around them. Another one
    for all that the family keeps in fp32: the parameters of a unit have one dtype. Outer ones first, as an outer unit's
    parameters may lie in inner modules. What tensor parallelism divides has units by the modules that need it."""
    experts = {parameter for layer in moe_layers(model) for parameter in layer.mlp.parameters()}
    stages = stages_of(model)
    names = {name for name, p in model.named_parameters() if p not in experts}
    divided = divided_here(model)
    dense = {name for name in names if stages is None or stages.is_here(name)} - divided.keys()
    assert fp32_parameters(model).keys() <= names
    kept = dense & fp32_parameters(model).keys()
    paths = {module: path for path, module in model.named_modules()}
    layers = [
        _DenseUnit(layer, own)
        for layer in (*layers_here(model), *tower_blocks(model))
        # of a tower, none where it is on another stage
        if (own := {name for name in dense - kept if name.startswith(f"{paths[layer]}.")})
    ]
    around = dense - kept - {name for layer in layers for name in layer.names}
    by_module: dict[str, set[str]] = {}
    for name, path in divided.items():
        by_module.setdefault(path, set()).add(name)
    in_layers = tuple(f"{paths[layer]}." for layer in layers_here(model))
    for path, own in by_module.items():
        # embedding and head stay gathered from forward to backward, as what is of the root
        reshards = None if path.startswith(in_layers) else False
        layers.append(_DenseUnit(model.get_submodule(path), own, reshards=reshards, is_divided=True))
    if not kept:
        return [_DenseUnit(model, around), *layers]
    # called once a forward as the model is, and no decoder layer
    stack = next(child for child in model.children() if any(part is layers[0].module for part in child.modules()))
    if all(name.startswith(f"{paths[stack]}.") for name in kept):
        return [_DenseUnit(model, around), _DenseUnit(stack, kept, is_fp32=True, reshards=False), *layers]
    # of the head, say
    assert all(name.startswith(f"{paths[stack]}.") for name in around), around
    return [_DenseUnit(model, kept, is_fp32=True), _DenseUnit(stack, around, reshards=False), *layers]


def prefetch_layers(model: nn.Module, decoders: Iterable[nn.Module], from_root: bool = True) -> None:
    """Have FSDP gather, while a layer computes, the parameters of the next of `decoders`, in backward those of the one
    before; in place. `from_root`: and those of the first, or last, as soon as the model is called.

    By itself FSDP gathers a unit ahead only once the host gets there, and the host blocks while it waits for the counts
    of a layer's rows. After torchtitan (`models/llama4/infra/parallelize.py`). What is in a layer comes before the next
    one in any case: where nobody has gathered it ahead, as in a pipeline's stages, it would come behind that.
    """
    # the layer's own unit, and its experts' where they have one
    layers: list[list[Any]] = [fsdp_units(layer) for layer in decoders]
    root: Any = model
    if from_root:
        root.set_modules_to_forward_prefetch(layers[0])
        root.set_modules_to_backward_prefetch(layers[-1])
    for (layer, *inside), following in pairwise([*layers, []]):
        layer.set_modules_to_forward_prefetch([*inside, *following])
    for (layer, *inside), preceding in pairwise([*reversed(layers), []]):
        layer.set_modules_to_backward_prefetch([*inside, *preceding])


def communicate_over_gloo(model: nn.Module) -> None:
    """Give every FSDP unit the collectives of `gloo`, and all of them the same memory for what they
    send."""
    memory = SharedMemory()
    for unit in fsdp_units(model):
        unit.set_custom_all_gather(GlooAllGather(memory))
        unit.set_custom_reduce_scatter(GlooReduceScatter(memory))


def shared_memory(model: nn.Module) -> list[Tensor]:
    """The pieces of memory that the collectives of `communicate_over_gloo` share."""
    found: dict[int, SharedMemory] = {}
    for unit in fsdp_units(model):
        group = unit._get_fsdp_state()._fsdp_param_group
        gather = None if group is None else group._all_gather_comm
        if isinstance(gather, GlooAllGather):
            found[id(gather.memory)] = gather.memory
    return [piece for memory in found.values() for piece in memory.pieces]


def _sum_gradients(unit: FSDPModule) -> None:
    unit.set_gradient_divide_factor(1.0)
    # without it a factor of 1 still goes through ReduceOp.PREMUL_SUM, which gloo lacks
    unit.set_force_sum_reduction_for_comms(True)


def fsdp_units(module: nn.Module) -> list[FSDPModule]:
    """The FSDP units in `module`, each before those within it."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


def free_gathered(model: nn.Module) -> None:
    """Free the parameters that FSDP units hold gathered: after a forward without a backward the root does, and with
    --no-reshard-after-forward every unit."""
    for unit in fsdp_units(model):
        unit.reshard()


@contextmanager
def keeping_dense(model: nn.Module) -> Iterator[None]:
    """Within it, non-expert parameters stay gathered from their first forward on: for many forwards between two
    updates. They still are when it ends; `free_gathered` frees them. Experts are gathered as ever."""
    experts = {layer.mlp for layer in moe_layers(model)}
    # FSDP itself keeps those of the root
    units = [unit for unit in fsdp_units(model) if unit is not model and unit not in experts and _reshards(unit)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)


def _reshards(unit: FSDPModule) -> bool:
    """Whether it frees what it has gathered after its forward."""
    group = unit._get_fsdp_state()._fsdp_param_group
    return group is not None and group.post_forward_mesh_info is not None


def forget_forwards(model: nn.Module) -> None:
    """Have FSDP end a step of which there was no backward on this rank: it remembers each forward until one ends."""
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._root_post_backward_final_callback()


def materialize(model: Any, device: torch.device, offload: bool = False, offload_experts: bool = False) -> None:
    """Allocate this rank's shards (uninitialised), in host memory with `offload`, and with `offload_experts` what is
    frozen of experts; buffers go to `device` as is, those of other stages of a pipeline too: they are small, and the
    same on all ranks."""
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    here = {part.tensor for part in parameters_of(model).values() if part.is_here}
    here |= {part.scales for part in parameters_of(model).values() if part.is_here and part.scales is not None}
    for module in model.modules():
        if not here.isdisjoint(module._parameters.values()):
            in_host = offload_experts and isinstance(module, ExpertMLP)
            module._apply(partial(_empty, device=device, offload=offload, frozen_in_host=in_host), recurse=False)
    for name, buffer in buffers.items():
        owner, _, own_name = name.rpartition(".")
        model.get_submodule(owner)._buffers[own_name] = buffer
    # to_empty unties shared parameters
    model.tie_weights()


def _empty(tensor: Tensor, device: torch.device, offload: bool, frozen_in_host: bool) -> Tensor:
    in_host = offload or (frozen_in_host and not tensor.requires_grad)
    return torch.empty_like(tensor, device="cpu" if in_host else device)


@torch.no_grad()
def fill_adapters(model: nn.Module, topology: Topology, seed: int) -> None:
    """Give adapters the values that they start from, which depend on the seed and their names alone."""
    for name, part in adapters_of(model).items():
        if not part.is_here:
            continue
        rows = topology.rows(part.num_rows, part.layout, dist.get_rank())
        rows_a_matrix = part.num_rows if part.expert is None else part.expert.rows_an_expert
        part.local.copy_(first_values(name, rows, part.shape[1], rows_a_matrix, seed))


def zeros_by_rows(parameter: Tensor, row_shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros with as many rows as `parameter` has, sharded as it is and held where its rows are."""
    local = local_tensor(parameter)
    zeros = torch.zeros((local.shape[0], *row_shape), dtype=dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    whole = torch.empty((parameter.shape[0], *row_shape), device="meta")
    placed = DTensor.from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    # from_local takes it to the mesh's device; the parameter may lie in host memory
    return placed.to(local.device)

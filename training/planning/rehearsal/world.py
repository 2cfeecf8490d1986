"""Dry-runs one step of one rank of any world on fake tensors.

What depends on data is given. Attention is a fused kernel's, as on a GPU.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import add, sub
from traceback import walk_tb
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ....moe.dispatch.dispatcher_entries import resolve_dispatch
from ....moe.experts.forward import Ahead, Targets
from ....moe.experts.lora import store_frozen
from ....moe.experts.model_layers import decoder_layers, moe_layers, moe_shape
from ....moe.experts.router_stats import NO_ROUTING
from ....moe.hf_model.image_costs import KnownValues, image_of, on_device, put_on_host
from ....moe.hf_model.images import PIXELS
from ....moe.linear.quantized import mxfp4_pairs, nf4_pairs
from ....moe.torch_private import (
    FakeStore,
    FSDPParam,
    _current_autograd_node,
    _resolve_process_group,
    around_shapes_found_out,
    replacing_sdpa,
    sharing_empty_chunks,
)
from ....moe.transformers_private import never_tracing, without_packages
from ....moe.util.errors import ExpertMeshError
from ....sharding.collectives.context_parallel import CPGroup
from ....sharding.collectives.groups import group_name
from ....sharding.collectives.node_groups import check_tp_groups
from ....sharding.mesh import build_mesh
from ....sharding.parallelize.choices import ranks_of_equal_nodes
from ....sharding.parallelize.parallelize import fsdp_units, materialize, parallelize, shared_memory
from ....sharding.pipeline.pipeline import Pipeline, cut_into_stages, pipeline_of
from ....sharding.pipeline.schedule import Action, make_schedule
from ....sharding.stages import stages_of
from ....sharding.topology import check_sizes
from ...config.train_config import TrainConfig
from ...data.batch import Batch, LossBatch, SplitSequences
from ...data.images import ImageReader
from ...engine.assembly import compute_dtype
from ...loss.balance import BiasUpdate, LossWeights, choose_balance
from ...loss.objective import as_they_are
from ...monitoring.attribution import Parts
from ...optim.low_bit import dynamic_map
from ...optim.optimizer import build_optimizer, occasional
from ...steps import step
from ...steps.micro_batch import StepCounts, figure_names, no_losses
from ...steps.step import Gradients, train_step
from ...tasks.registry import task_of
from ...tasks.task import DataTraits
from ..imbalance import GivenRouting
from ..planner.account import KINDS, Moment
from ..planner.asked import Asked
from .building import build_rehearsed
from .dispatched import check_recorded, given_rows
from .fake_tensors import FakeTensors
from .gpu_stand_in import NoCopies, as_on_gpu
from .host_memory import HostMemory
from .live_memory import LiveTensors
from .peaks import bytes_of, held_at, kept_of, kinds_of_storages, optimizer_state
from .recorder import Maker, Recorder, recording_actions, recording_triton, recording_waits, sharing_occasional
from .recurrent_stand_in import recorded, replaced_functions
from .triton_stand_in import import_kernels


@dataclass(frozen=True)
class Rehearsed:
    """A step of a rank.

    Attributes:
        asked: whose it is.
        recorder: what it has done, with a few micro-batches at most.
        model: whose step it was.
        kept: bytes of each storage that autograd keeps from a forward to its backward, with what made it.
        held: the most that a rank's tensors hold at each moment, in bytes by kind (see `held_at`); before_update: what
            they hold when the update begins.
        parameter_bytes, trained_bytes: of its part of the parameters. state: bytes of its optimizer's.
        groups: process groups' names, by torch's.
        rows_over_mean: of this rank's experts, over all layers.
    """

    asked: Asked
    recorder: Recorder
    model: Any
    kept: Sequence[tuple[Maker, int]]
    held: Mapping[Moment, tuple[int, ...]]
    before_update: tuple[int, ...]
    parameter_bytes: int
    trained_bytes: int
    state: int
    groups: dict[str, str]
    rows_over_mean: float

    def with_update(self, other: "Rehearsed") -> "Rehearsed":
        """The same step with the update and the optimizer's state of another one, in place; beside these lies what lay
        there."""
        own, update = self.recorder, other.recorder
        own.events[own.update_begins[0] :] = update.events[update.update_begins[0] :]
        state = [(other.state - self.state) * (kind == "optimizer") for kind in KINDS]
        beside = list(map(add, state, map(sub, self.before_update, other.before_update)))

        def of(held: Mapping[Moment, tuple[int, ...]], is_update: bool, more: Iterable[int]) -> Any:
            moments = [moment for moment in held if (moment.phase == "optimizer step") == is_update]
            return {moment: tuple(map(add, held[moment], more)) for moment in moments}

        held = of(self.held, False, state) | of(other.held, True, beside)
        groups = self.groups | other.groups
        assert self.groups.items() <= groups.items(), "process groups of one layout have the same names"
        return replace(self, held=held, state=other.state, groups=groups)


def rehearse(
    asked: Asked, model_config: Any, keep: Sequence[int] | None = None, is_update_alone: bool = False
) -> Rehearsed:
    """Dry-run one step of one rank, as `train_ep.py` with these flags would run it: forward and backward of one
    micro-batch, where there are several of one that finds gradients, as all after the first are alike; and the update.
    In a pipeline, of as many micro-batches as the rank holds as much with as with all.

    Every sequence is full. In this process there must be no process group.

    Args:
        keep: numbers of the decoder layers that a short model has (see `short`); None: all.
        is_update_alone: whether no forward and no backward is run: all gradients are there.

    Raises:
        ExpertMeshError: the model cannot be built, or its experts not be divided among the ranks; or an operator fails.
    """
    with warnings.catch_warnings(action="ignore"):
        if asked.device == "cuda":
            import_kernels()
        model = build_rehearsed(asked.config, model_config, asked.device, keep)
        check_sizes(asked.topology, moe_shape(model).num_experts)
        dist.init_process_group("fake", rank=asked.rank, world_size=asked.world_size, store=FakeStore())
        try:
            return _rehearse(asked, model, model_config, keep, is_update_alone)
        finally:
            dist.destroy_process_group()


def _rehearse(
    asked: Asked, model: Any, model_config: Any, keep: Sequence[int] | None = None, is_update_alone: bool = False
) -> Rehearsed:
    config, world_size, is_gpu = asked.config, asked.world_size, asked.device == "cuda"
    # within it our code does what it would do on such a device
    as_there = as_on_gpu if is_gpu else nullcontext
    balance, shape = choose_balance(config, model, model_config), moe_shape(model)
    image = image_of(model, asked.routing.image_tokens) if asked.routing.image_tokens else None
    ranks_per_node = config.ranks_per_node or asked.cluster.gpus_per_node
    if config.ep_size > 1:
        of_ep = ranks_of_equal_nodes(world_size, ranks_per_node, config.ep_size)
        check_recorded(resolve_dispatch(config.dispatch, config.ep_size, of_ep, shape.top_k).name)
    check_tp_groups(asked.topology, ranks_per_node)
    mesh = build_mesh("cpu", asked.topology)
    if config.pp_size > 1:
        cut_into_stages(
            model, mesh, compute_dtype(config), config.schedule_name, config.pipeline_chunks, config.layers_of_stages
        )
    if (kind := config.quantized_base) is not None:
        store_frozen(model, kind)
    shares = asked.routing.shares(shape.num_experts, config.ep_size)
    strategy = replace(config.strategy, ranks_per_node=ranks_per_node)
    with as_there(), sharing_empty_chunks():
        parallelize(model, mesh, compute_dtype(config), strategy)
    # made once in a process: not of fake tensors
    for signed in (True, False):
        dynamic_map(signed, torch.device("cpu"))
    nf4_pairs(torch.device("cpu")), mxfp4_pairs(torch.device("cpu"))
    with as_there(), FakeTensors() as fake, nullcontext() if image is None else KnownValues():
        materialize(model, torch.device("cpu"), config.offload, config.offload_experts)
        optimizer = build_optimizer(model.train(), replace(config, **config.optimizer_entry.dry_run), mesh)
        batch = _batch(config, mesh.cp_group, asked.routing, fake)
        if image is not None:
            batch = _with_images(batch, model, image, asked, fake)
        micro_batches = config.micro_batches(world_size)
        batches = [batch] * micro_batches_to_run(pipeline_of(model), micro_batches)
        bias_update = BiasUpdate(model, balance.bias_rate) if balance.bias_rate else None
        # forwards of mismatched answers are not modelled
        objective = replace(task_of(config).objective(config, DataTraits()), complete=as_they_are)
        of_step = model, optimizer, batches, mesh, balance.weights, config.max_grad_norm, bias_update
        recorder = Recorder(Parts(model, until=_rehearse.__code__))
        given = partial(_giving, asked, batch.num_tokens, shape.top_k, shares)
        shared: list[Tensor] = []
        if not is_gpu and not is_update_alone:
            # memory that collectives over gloo share is there from the first step on
            unheard = Recorder(recorder.parts)
            with given(unheard), unheard, unheard.paused():
                train_step(*of_step, objective=objective)
            shared = shared_memory(model)
        is_later = config.pp_size == 1 and micro_batches > 1
        if is_later and not is_update_alone:
            # what FSDP makes when it first gathers is there when a later micro-batch comes
            unheard = Recorder(recorder.parts)
            with unheard, unheard.paused():
                for unit in fsdp_units(model):
                    unit.unshard()
                    unit.reshard()
        if config.pp_size == 1:
            # before FSDP's own, which begins to gather
            model.register_forward_pre_hook(recorder.next_forward, prepend=True)
        # those of other stages are on the meta device
        held = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
        live = LiveTensors([*held, *shared], changed=recorder.changed)
        _mark_layers(model, recorder)
        # on a CPU they are run as they are
        looping = decoder_layers(model) if is_gpu else ()
        recurrent = replaced_functions(module for layer in looping for module in layer.modules())

        # of those of earlier micro-batches, which are replaced unless they are summed in place
        earlier: list[int | None] = []

        def at(doing: str) -> None:
            if doing == "the gradient norm":
                recorder.begin_update()
            elif doing == "the step's beginning" and (is_later or is_update_alone):
                # what is run is a micro-batch that comes after others, or none
                with recorder.paused():
                    for parameter in model.parameters():
                        if parameter.requires_grad and not parameter.is_meta:
                            parameter.grad = torch.empty_like(parameter)
                            earlier.append(live.number(parameter.grad))

        with (
            given(recorder),
            _leaving_out_shapes(live, recorder),
            _bringing_back(config, recorder),
            recording_triton(recorder),
            recording_waits(recorder),
            sharing_occasional(recorder, occasional(config)),
            recording_actions(recorder),
            _naming_layers(recorder, keep),
            recorded(recurrent, recorder.kernel),
            mock.patch.object(step, "step_gradients", _no_gradients) if is_update_alone else nullcontext(),
            HostMemory(recorder.bring_blocking) if is_gpu else nullcontext(),
            live,
            recorder,
            live.noting_casts() as casts,
        ):
            train_step(*of_step, at, objective=objective)
        storages = kinds_of_storages(recorder, live, casts, model, optimizer, shared, earlier)
        here, state = [p for p in model.parameters() if not p.is_meta], bytes_of(optimizer_state(optimizer))
        held_then = held_at(recorder, storages, state)
        sizes = bytes_of(here), bytes_of(p for p in here if p.requires_grad)
    used = {event.group for event in recorder.events if event.collective is not None}
    of_torch: Any = {name: _resolve_process_group(name) for name in used}  # type: ignore[arg-type]
    groups = {name: group_name(group.group_desc) for name, group in of_torch.items()}
    rows_over_mean = shares[asked.rank % config.ep_size] * config.ep_size if shares else 1.0
    kept = kept_of(recorder, storages)
    return Rehearsed(asked, recorder, model, kept, *held_then, *sizes, state, groups, rows_over_mean)


def _no_gradients(model: Any, batches: Sequence[Batch], weights: LossWeights, at: Any, objective: Any) -> Gradients:
    """In place of `step_gradients`, where the gradients are there already."""
    names, layers = figure_names(weights, objective), moe_layers(model)
    counts_LE = torch.zeros(len(layers), moe_shape(model).num_experts, dtype=torch.int64)
    routing = replace(NO_ROUTING, counts_LE=counts_LE)
    losses = no_losses(names, torch.device("cpu"))
    return Gradients(losses, routing, StepCounts(1, 1, (1,), (1,), 1), names)


def _mark_layers(model: Any, recorder: Recorder) -> None:
    """Have `recorder` know which layer a forward or a backward comes to."""
    layers, stages = list(decoder_layers(model)), stages_of(model)
    lasts = {len(layers) - 1} if stages is None else {numbers[-1] for numbers in stages.layers}

    # what is recomputed is within a backward that is marked already
    def begin(number: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if _current_autograd_node() is None:
            recorder.mark(number)
            if number == 0 and args and args[0].requires_grad:
                args[0].register_hook(lambda gradient: recorder.mark(None))

    def end(number: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        result = output if isinstance(output, Tensor) else output[0]
        if _current_autograd_node() is None and result.requires_grad:
            # it comes before FSDP's own hook, by which backward begins to gather parameters
            result.register_hook(lambda gradient: recorder.mark(number))

    def go_on(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if _current_autograd_node() is None:
            recorder.mark(None)

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(begin, number), prepend=True)
        layer.register_forward_hook(partial(end, number), prepend=True)
        if number in lasts:
            layer.register_forward_hook(go_on)


@contextmanager
def _naming_layers(recorder: Recorder, keep: Sequence[int] | None) -> Iterator[None]:
    """
    Raises:
        ExpertMeshError: an exception inside; it names where: phase, layer, and the module in which it was raised.
    """
    try:
        yield
    except ExpertMeshError:
        raise
    except Exception as error:
        number = recorder.layer if keep is None or recorder.layer is None else keep[recorder.layer]
        layer = "" if number is None else f" of decoder layer {number}"
        owners = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
        paths = [recorder.parts.paths.get(owner) for owner in owners if isinstance(owner, nn.Module)]
        module = next((f", in {path}" for path in reversed(paths) if path), "")
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        raise ExpertMeshError(f"the dry run fails in the {recorder.phase}{layer}{module}: {told}") from error


def micro_batches_to_run(pipeline: Pipeline | None, micro_batches: int) -> int:
    """How many of a step's micro-batches show all that it does: in a pipeline a round more than those with which every
    rank holds as much at once as with all of them."""
    if pipeline is None:
        return 1

    def most(number: int) -> list[tuple[tuple[int, int], ...]]:
        return list(map(_most_held, make_schedule(pipeline.schedule, pipeline.stages.pp_size, pipeline.chunks, number)))

    of_all = most(micro_batches)
    least = next(number for number in range(min(2, micro_batches), micro_batches + 1) if most(number) == of_all)
    return min(least + pipeline.stages.pp_size, micro_batches)


def _most_held(actions: Sequence[Action]) -> tuple[tuple[int, int], ...]:
    """What a rank holds at the most, in micro-batches of a stage, until all of its stages have gradients, and then: how
    many in all, and how many of these wait for their weight gradients."""
    stages, has_gradients = {action.stage for action in actions}, set[int]()
    has_weights = any(action.kind == "weights" for action in actions)
    in_flight = queued = 0
    most, later = [(0, 0)], [(0, 0)]
    for action in actions:
        if action.kind == "forward":
            in_flight += 1
        elif action.kind == "weights":
            queued, in_flight = queued - 1, in_flight - 1
        else:
            has_gradients.add(action.stage)
            queued, in_flight = (queued + 1, in_flight) if has_weights else (queued, in_flight - 1)
        (later if has_gradients == stages else most).append((in_flight, queued))
    return tuple((max(n for n, _ in held), max(q for _, q in held)) for held in (most, later))


def _batch(config: TrainConfig, cp_group: CPGroup | None, routing: GivenRouting, fake: FakeTensors) -> Batch:
    """A batch in which all tokens but each sample's first have a loss; under context parallelism, this rank's chunk."""
    rows, samples = (
        config.per_device_train_batch_size * config.sequences_per_row,
        routing.samples if config.packing else 1,
    )
    length = config.max_seq_length // samples
    if length < 2:
        raise ExpertMeshError(f"--samples-per-row {samples}: samples of {length} tokens have no trained token")
    if length < routing.image_tokens + 2:
        raise ExpertMeshError(
            f"--image-tokens {routing.image_tokens}: does not fit into samples of {length} tokens with a target; "
            "give fewer, or a longer --max-seq-length"
        )
    ranks = config.ranks_per_sequence
    here = -(-samples * length // ranks)
    firsts = max(rows * samples // ranks, 1)
    targets = rows * here - firsts - rows * samples * routing.image_tokens // ranks
    if routing.trained is not None:
        targets = max(1, round(rows * here * routing.trained))
    padding = here * ranks - samples * length
    segments = ((length,) * samples + (padding,) * (padding > 0)) * rows if config.packing else None
    with fake:
        tokens_BS = torch.zeros(rows, here, dtype=torch.int64)
        positions_BS = torch.zeros_like(tokens_BS) if config.packing or cp_group is not None else None
        index_N = torch.zeros(targets, dtype=torch.int64)
        shared = ahead = for_loss = None
        if cp_group is not None:
            whole_BS = torch.zeros(rows, here * cp_group.size, dtype=torch.int64)
            shared = SplitSequences(cp_group, whole_BS, bool(config.packing), (targets,) * cp_group.size)
        if (task := task_of(config)).objective(config, DataTraits()).by_token:
            number = rows * (cp_group is None or cp_group.index == 0)
            inputs = task.example_inputs(config, number, targets)
            for_loss = LossBatch(index_N, index_N, number, inputs, index_N, rows, cp_group)
        if config.train_mtp > 0:
            number = max(1, targets - firsts)
            drafts = Targets(torch.zeros_like(tokens_BS), torch.zeros(number, dtype=torch.int64))
            ahead = Ahead(torch.zeros_like(tokens_BS), drafts, () if cp_group is None else (number,) * cp_group.size)
    of_rows = tokens_BS, positions_BS, segments, None, tokens_BS, index_N, rows * here, targets, (), shared
    return Batch(*of_rows, for_loss, ahead=ahead)


def _with_images(batch: Batch, model: Any, image: Mapping[str, Tensor], asked: Asked, fake: FakeTensors) -> Batch:
    """The batch with an image behind the first token of each sample: where it stands, and how large it is, is known.
    image: what the model takes for it."""
    reader, rows, config, routing = ImageReader(model), len(batch.tokens_BS), asked.config, asked.routing
    samples = routing.samples if config.packing else 1
    number, length = rows * samples, config.max_seq_length // samples
    shape, here = batch.tokens_BS.shape, slice(0, batch.tokens_BS.shape[1])
    if batch.split is not None:
        shape, index = batch.split.positions_BS.shape, batch.split.cp_group.index
        here = slice(index * here.stop, (index + 1) * here.stop)
    with _disable_current_modes():
        tokens_BS = torch.full(shape, int(reader.facts.token == 0))
        for start in range(0, samples * length, length):
            tokens_BS[:, start + 1 : start + 1 + routing.image_tokens] = reader.facts.token
        found = {name: torch.cat([value] * number) for name, value in image.items()}
        is_token_BS = torch.ones_like(tokens_BS, dtype=torch.bool)
        images = reader.placed(found, tokens_BS, is_token_BS, [[length] * samples] * rows, here)
        tokens_BL = tokens_BS[:, here].contiguous()
    assert images is not None
    with fake:
        pixels = torch.zeros_like(found[PIXELS], device="cpu")
    images = replace(images, inputs={**found, PIXELS: pixels}, sizes=put_on_host(images.sizes))
    with _disable_current_modes():
        return replace(batch, tokens_BS=tokens_BL, images=images).moved(on_device)


@contextmanager
def _giving(asked: Asked, tokens: int, top_k: int, shares: Sequence[float], recorder: Recorder) -> Iterator[None]:
    """Within it what depends on data or on a GPU is given (see `given_rows`)."""
    with (
        given_rows(asked, tokens, top_k, shares, recorder),
        replacing_sdpa(_fused_attention) if asked.device == "cuda" else nullcontext(),
        never_tracing(),
        without_packages(),
    ):
        yield


@contextmanager
def _leaving_out_shapes(live: LiveTensors, recorder: Recorder) -> Iterator[None]:
    """Within it, the unsharded tensors are not recorded, without memory in any run, on which DTensor tries an operator
    once to find out the shapes of its results."""

    @contextmanager
    def paused() -> Iterator[None]:
        with live.paused(), recorder.paused():
            yield

    with around_shapes_found_out(paused):
        yield


@contextmanager
def _bringing_back(config: TrainConfig, recorder: Recorder) -> Iterator[None]:
    """Within it, what FSDP gathers from host memory has memory on the GPU besides: in a dry run there is one device."""
    if not (config.offload or config.offload_experts):
        yield
        return
    gathered: Any = FSDPParam.all_gather_inputs
    inputs = gathered.fget

    def brought(param: Any) -> Any:
        # a lone rank's frozen experts have come already (see `offload_frozen`)
        is_here = config.offload_experts and param.mesh_info.shard_mesh_size == 1
        if is_here or not param.offload_to_cpu:
            return inputs(param)
        in_host = param._sharded_param_data
        recorder.bring(in_host.nbytes)
        with recorder.paused():
            param._sharded_param_data = in_host.clone()
        try:
            return inputs(param)
        finally:
            param._sharded_param_data = in_host

    come = NoCopies.come

    def came(copies: NoCopies, host: Any, left: None) -> tuple[Tensor, None]:
        tensor, end = come(copies, host, left)
        recorder.bring(tensor.nbytes)
        return tensor, end

    with (
        mock.patch.object(FSDPParam, "all_gather_inputs", property(brought)),
        mock.patch.object(NoCopies, "come", came),
    ):
        yield


_sdpa = F.scaled_dot_product_attention


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    """`scaled_dot_product_attention`, by an operator that a GPU runs where attention has no mask.

    Flash attention wants heads that are all as wide. Where values are narrower, as in multi-head latent attention, a
    GPU has two others, memory-efficient attention and cuDNN's; torch's versions differ in which of them comes first and
    in what cuDNN's takes. This is the first, which takes whatever is aligned; both hold as much.
    """
    dropout, scale = kwargs.get("dropout_p", 0.0), kwargs.get("scale")
    out: Tensor
    if kwargs.get("attn_mask") is not None:
        return _sdpa(query, key, value, **kwargs)
    causal = bool(kwargs.get("is_causal"))
    if query.shape[-1] == value.shape[-1]:
        out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, scale=scale)[0]
        return out
    # it has no groups of queries that share a key, and reads 16 bytes at once
    is_aligned = all(tensor.shape[-1] * tensor.element_size() % 16 == 0 for tensor in (query, key, value))
    if query.shape[1] != key.shape[1] or not is_aligned:
        return _sdpa(query, key, value, **kwargs)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out = efficient(query, key, value, None, torch.is_grad_enabled(), dropout, causal, scale=scale)[0]
    return out

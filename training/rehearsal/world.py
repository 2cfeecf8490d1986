"""One rank of any world, and one step of it, with tensors that hold no memory.

What depends on data is told: routing is even. Attention is the flash kernel's, as on a GPU.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import masking_utils

import moe.dispatch
from moe import (
    ParameterCounts,
    build_model,
    choose_kernel,
    count_parameters,
    kernel_needs,
    moe_shape,
    store_frozen,
    use_kernel,
)
from moe.gpu import rehearsing_gpu
from moe.quantised import nf4_pairs
from sharding import Topology, build_mesh, local_tensor, materialize, set_parameter_dtype
from sharding.parallelize import parallelize
from training.adapters import adapt
from training.balance import LossWeights
from training.config import TrainConfig
from training.data import Batch
from training.freezing import freeze
from training.fused import fuse_layers
from training.head import attach_loss_head
from training.low_bit import dynamic_map
from training.optimizer import build_optimizer
from training.rehearsal.live import LiveTensors
from training.rehearsal.parts import Parts
from training.rehearsal.recorder import Recorder, recording_triton, recording_waits
from training.step import train_step


@dataclass(frozen=True)
class Rehearsed:
    """recorder: what the step has done, with two forwards and backwards at most. model, optimizer: whose step it was.
    memory: what a rank's tensors hold at most. counts: of its parameters.
    """

    recorder: Recorder
    model: Any
    optimizer: torch.optim.Optimizer
    memory: "PeakMemory"
    counts: ParameterCounts


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of a rank's tensors, in any step after the first.

    peak: at the most. when: what the step was at then. parameters: of these, all that the model holds; trained: those
    of them that are trained. state: of the optimizer.
    """

    peak: int
    when: str
    parameters: int
    trained: int
    state: int


def rehearse(config: TrainConfig, model_config: Any, world_size: int, rank: int = 0) -> Rehearsed:
    """One step of one rank, as `train_ep.py` with these flags would run it on GPUs: forward and backward of two
    micro-batches at most, as all after the first are alike, and the update.

    Every row is one sample of `max_seq_length` tokens, all of them trained on; every expert gets as many rows.

    Raises:
        ExpertMeshError: the model cannot be built, or its experts not be shared out so.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with rehearsing_gpu():
            return _rehearse(config, model_config, world_size)
    finally:
        dist.destroy_process_group()


def _rehearse(config: TrainConfig, model_config: Any, world_size: int) -> Rehearsed:
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    model = _build(config, model_config, dtype)
    counts = count_parameters(model)
    if config.base_dtype in ("fp8", "nf4"):
        store_frozen(model, config.base_dtype)
    mesh = build_mesh("cpu", Topology(world_size, config.ep_size, config.dense_shard))
    parallelize(model, mesh, dtype, config.strategy)
    # made once in a process: not of tensors that hold no memory
    for signed in (True, False):
        dynamic_map(signed, torch.device("cpu"))
    nf4_pairs(torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        materialize(model, torch.device("cpu"))
        optimizer = build_optimizer(model.train(), config, mesh)
        recorder = Recorder(Parts(model))
        model.register_forward_pre_hook(recorder.next_forward)
        batches = [_batch(config, fake)] * min(config.gradient_accumulation_steps, 2)
        weights = LossWeights(config.router_aux_loss_coef or 0.0, config.router_z_loss_coef)
        live = LiveTensors([*model.parameters(), *model.buffers()], moment=recorder.now)
        with (
            _told(config, moe_shape(model).top_k),
            _leaving_out_shapes(live),
            recording_triton(recorder),
            recording_waits(recorder),
            live,
            recorder,
        ):
            train_step(model, optimizer, batches, mesh, weights, config.max_grad_norm, at=recorder.moment)
    return Rehearsed(recorder, model, optimizer, _peak_memory(live, model, optimizer), counts)


def _peak_memory(live: LiveTensors, model: Any, optimizer: torch.optim.Optimizer) -> PeakMemory:
    """The optimizer's state is made in the first update, and in later steps is there from the start."""
    state = _bytes(
        value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)
    )
    return PeakMemory(
        live.peak + (0 if str(live.when).startswith("update") else state),
        str(live.when),
        _bytes(model.parameters()),
        _bytes(p for p in model.parameters() if p.requires_grad),
        state,
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of this rank's parts."""
    return sum(local_tensor(tensor.detach()).untyped_storage().nbytes() for tensor in tensors)


def _build(config: TrainConfig, model_config: Any, dtype: torch.dtype) -> Any:
    model = build_model(model_config, "sdpa")
    if config.adapter != "none":
        adapt(model, config)
    elif config.freeze:
        freeze(model, config.freeze)
    needs = kernel_needs(model, "cpu", dtype)
    use_kernel(model, choose_kernel(_kernel(config), needs, config.expert_precision).kernel)
    fuse_layers(model)
    attach_loss_head(model, "chunked")
    if config.optim == "adamw_bf16":
        set_parameter_dtype(model, torch.bfloat16)
    elif config.holds_base_in_bf16:
        set_parameter_dtype(model, torch.bfloat16, frozen_alone=True)
    return model


def _kernel(config: TrainConfig) -> str:
    """What "auto" takes on a GPU from Hopper on, in bf16."""
    is_auto = config.expert_kernel == "auto" and config.bf16
    return "torch-grouped" if is_auto else config.expert_kernel


def _batch(config: TrainConfig, fake: FakeTensorMode) -> Batch:
    rows, length = config.per_device_train_batch_size, config.max_seq_length
    with fake:
        tokens_BS = torch.zeros(rows, length, dtype=torch.int64)
        index_N = torch.zeros(rows * (length - 1), dtype=torch.int64)
    pairs = rows * length * (length + 1) // 2
    return Batch(tokens_BS, None, None, None, tokens_BS, index_N, tokens_BS.numel(), len(index_N), pairs)


class _Splits:
    """Of each part rows to and from each ep rank: as many everywhere, and of every expert."""

    def __init__(self, rows: int, ranks: int, sizes: Sequence[int]):
        ends = [rows // ranks * end // sum(sizes) for end in accumulate(sizes, initial=0)]
        self.rows = [[[end - start] * ranks for start, end in pairwise(ends)]] * 2

    def tolist(self) -> list[list[list[int]]]:
        return self.rows


@contextmanager
def _told(config: TrainConfig, top_k: int) -> Iterator[None]:
    """Within it, what only data or a GPU could tell is told."""
    rows = config.per_device_train_batch_size * config.max_seq_length * top_k

    def even(counts_E: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> tuple[Tensor, _Splits]:
        return torch.empty_like(counts_E), _Splits(rows, config.ep_size, sizes)

    with (
        mock.patch.object(moe.dispatch, "exchange_counts", even),
        mock.patch.object(moe.dispatch, "_wait_for_counts", return_value=None),
        mock.patch.object(F, "scaled_dot_product_attention", _flash_attention),
        # transformers makes masks that no kernel needs where it takes a forward for one that is being exported
        mock.patch.object(masking_utils, "is_tracing", return_value=False),
    ):
        yield


@contextmanager
def _leaving_out_shapes(live: LiveTensors) -> Iterator[None]:
    """Within it, `live` does not count the whole tensors, without memory in any run, on which DTensor tries an operator
    to find out the shapes of its results."""
    find_out = ShardingPropagator._propagate_tensor_meta_non_cached

    def paused(*args: Any, **kwargs: Any) -> Any:
        was_paused, live.is_paused = live.is_paused, True
        try:
            return find_out(*args, **kwargs)
        finally:
            live.is_paused = was_paused

    with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", paused):
        yield


_sdpa = F.scaled_dot_product_attention


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    """`scaled_dot_product_attention`, by the operator that a GPU runs where attention is causal and has no mask."""
    takes_flash = kwargs.get("attn_mask") is None and kwargs.get("is_causal") and query.shape[-1] == value.shape[-1]
    if not takes_flash:
        return _sdpa(query, key, value, **kwargs)
    dropout, scale = kwargs.get("dropout_p", 0.0), kwargs.get("scale")
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout, True, scale=scale)[0]
    return out

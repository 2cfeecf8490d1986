"""One rank of any world, and one step of it, with tensors that hold no memory.

What depends on data is told: routing is even. Attention is the flash kernel's, as on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from sharding import Topology, build_mesh, materialize, set_parameter_dtype
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
from training.rehearsal.kinds import Stack, kinds_of_layers, shortened_stack, whole_stack
from training.rehearsal.live import LiveTensors
from training.rehearsal.parts import Parts
from training.rehearsal.peaks import PeakMemory, peak_memory
from training.rehearsal.recorder import Recorder, recording_triton
from training.rehearsal.repeated import WholeStep, whole_step
from training.rehearsal.shortened import Shortened
from training.step import train_step


@dataclass(frozen=True)
class Rehearsed:
    """step: what it has done, with two forwards and backwards at most. recorder: what of it was run, as told by stack.
    model, optimizer: whose step it was. memory: what a rank's tensors hold at most. counts: of its parameters.
    """

    step: WholeStep
    recorder: Recorder
    stack: Stack
    model: Any
    optimizer: torch.optim.Optimizer
    memory: PeakMemory
    counts: ParameterCounts


def rehearse(
    config: TrainConfig, model_config: Any, world_size: int, rank: int = 0, shortened: bool = True
) -> Rehearsed:
    """One step of one rank, as `train_ep.py` with these flags would run it on GPUs: forward and backward of two
    micro-batches at most, as all after the first are alike, and the update.

    Every row is one sample of `max_seq_length` tokens, all of them trained on; every expert gets as many rows.

    Args:
        shortened: run one layer for all that are like it, and repeat what it does; with the same outcome.

    Raises:
        ExpertMeshError: the model cannot be built, or its experts not be shared out so.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with rehearsing_gpu():
            return _rehearse(config, model_config, world_size, shortened)
    finally:
        dist.destroy_process_group()


def _rehearse(config: TrainConfig, model_config: Any, world_size: int, shortened: bool) -> Rehearsed:
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    model = _build(config, model_config, dtype)
    counts = count_parameters(model)
    if config.base_dtype in ("fp8", "nf4"):
        store_frozen(model, config.base_dtype)
    kinds = kinds_of_layers(model)
    stack = shortened_stack(kinds) if shortened else whole_stack(kinds)
    mesh = build_mesh("cpu", Topology(world_size, config.ep_size, config.dense_shard))
    parallelize(model, mesh, dtype, config.gradient_checkpointing, False, config.reshard_after_forward)
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
        live = LiveTensors([*model.parameters(), *model.buffers()], changed=recorder.changed)
        short = Shortened(model, stack, recorder, live)

        def at(doing: str) -> None:
            if doing == "the gradient norm":
                short.add_gradients()
            recorder.moment(doing)

        with (
            _told(config, moe_shape(model).top_k),
            _leaving_out_shapes(live, recorder),
            recording_triton(recorder),
            short,
            live,
            recorder,
        ):
            train_step(model, optimizer, batches, mesh, weights, config.max_grad_norm, at=at)
        step = whole_step(recorder, stack)
        memory = peak_memory(step, recorder, live, model, optimizer)
    return Rehearsed(step, recorder, stack, model, optimizer, memory, counts)


def _build(config: TrainConfig, model_config: Any, dtype: torch.dtype) -> Any:
    model = build_model(model_config, "sdpa")
    if config.adapter != "none":
        adapt(model, config)
    elif config.freeze:
        freeze(model, config.freeze)
    use_kernel(model, choose_kernel(_kernel(config), kernel_needs(model, "cpu", dtype)).kernel)
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
    """Rows to and from each ep rank: as many everywhere."""

    def __init__(self, rows: int, ranks: int):
        self.rows = [[rows // ranks] * ranks] * 2

    def tolist(self) -> list[list[int]]:
        return self.rows


@contextmanager
def _told(config: TrainConfig, top_k: int) -> Iterator[None]:
    """Within it, what only data or a GPU could tell is told."""
    rows = config.per_device_train_batch_size * config.max_seq_length * top_k

    def even(counts_E: Tensor, group_name: str) -> tuple[Tensor, _Splits]:
        return torch.empty_like(counts_E), _Splits(rows, config.ep_size)

    with (
        mock.patch.object(moe.dispatch, "exchange_counts", even),
        mock.patch.object(moe.dispatch, "_wait_for_counts", return_value=None),
        mock.patch.object(F, "scaled_dot_product_attention", _flash_attention),
        # transformers makes masks that no kernel needs where it takes a forward for one that is being exported
        mock.patch.object(masking_utils, "is_tracing", return_value=False),
    ):
        yield


@contextmanager
def _leaving_out_shapes(live: LiveTensors, recorder: Recorder) -> Iterator[None]:
    """Within it, nothing is told of the whole tensors, without memory in any run, on which DTensor tries an operator
    once to find out the shapes of its results."""
    find_out = ShardingPropagator._propagate_tensor_meta_non_cached

    def paused(*args: Any, **kwargs: Any) -> Any:
        with live.paused(), recorder.paused():
            return find_out(*args, **kwargs)

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

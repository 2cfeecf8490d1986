"""From a configuration to a model on its ranks: what is trained, what computes each part, in which dtype.

`assemble` and `place` are the one assembly: `train_ep.py`, dry runs, the planner, the reference of the parity tests and
the benchmarks make their models here, in one order. What is trained is chosen, then what ranks share, then what
computes each part, then the dtypes it is held in; then the model is sharded and its weights are read.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ...checkpoints.adapters.adapter import Adapter
from ...checkpoints.adapters.initial import load_adapter, load_whole, read_adapter
from ...checkpoints.files.encodings import quantization_of
from ...checkpoints.hf.checkpoint import Checkpoint
from ...checkpoints.hf.source import ModelSource
from ...checkpoints.load import load_model, open_for, shard_and_load
from ...checkpoints.new_rows import fill_new_rows, fill_token_rows
from ...moe.experts.lora import store_frozen, to_quantize
from ...moe.hf_model.build import kernel_needs, use_kernel
from ...moe.hf_model.images import images_of
from ...moe.hf_model.mtp import mtp_of
from ...moe.kernels.expert_kernels import KernelChoice, choose_kernel
from ...moe.util.errors import ExpertMeshError
from ...sharding.mesh import Mesh
from ...sharding.parallelize.parallelize import fill_adapters
from ...sharding.pipeline.pipeline import cut_into_stages
from ...sharding.runtime.process import raise_together
from ...sharding.state import set_parameter_dtype
from ..attention.by_sample import apply_packing
from ..attention.context_parallel_attention import apply_context_parallel
from ..attention.packed_attention import choose_attention
from ..config.train_config import TrainConfig
from ..fused.liger import use_liger
from ..loss.head import attach_loss_head
from ..loss.mtp import use_mtp
from ..model_setup.compiling import compile_layers
from ..model_setup.dense_precision import multiply_in_fp8
from ..model_setup.freezing import check_experts_frozen, freeze, freeze_images, images_line
from ..model_setup.lora_targets import adapt, lora_of, unquantized_lines
from ..model_setup.new_tokens import train_new_tokens
from ..model_setup.rates import experts_apart
from ..start.resume import Tell
from ..tensor_parallel.divide import apply_tensor_parallel, divide_vocabulary
from ..tensor_parallel.overlap import check_async, symmetric_memory


class Buildable(Protocol):
    """What a model can be built of: a `ModelSource`, or a config alone."""

    @property
    def config(self) -> Any: ...

    def build(self, attn_implementation: str) -> Any: ...


@dataclass(frozen=True)
class Assembled:
    """A model on the meta device, complete but for its weights. trained: what is, where it is not everything."""

    model: Any
    kernel: KernelChoice
    trained: list[str]


def kernel_of(config: TrainConfig, model: Any, device_type: str) -> KernelChoice:
    """What computes the experts, by the flags of a run and what its device has.

    Raises:
        ExpertMeshError: the kernel that was asked for is not installed or cannot compute these experts.
    """
    needs = kernel_needs(model, device_type, compute_dtype(config))
    choice = choose_kernel(config.expert_kernel, needs, config.expert_precision)
    is_gpu = device_type == "cuda" and torch.cuda.is_available()
    return replace(choice, most_apart=experts_apart(torch.cuda.get_device_name())) if is_gpu else choice


def compute_dtype(config: TrainConfig) -> torch.dtype:
    """What matmuls compute in."""
    return torch.bfloat16 if config.bf16 else torch.float32


def assemble(
    config: TrainConfig,
    source: Buildable,
    device_type: str,
    choose: Callable[[TrainConfig, Any, str], KernelChoice] = kernel_of,
    compiles: bool = True,
) -> Assembled:
    """The model on the meta device, with its adapters, our experts and our loss.

    Args:
        source: what it is built of.
        device_type: "cuda" or "cpu", for which kernels are chosen.
        choose: what computes the experts.
        compiles: whether --compile is heeded.

    Raises:
        ExpertMeshError: it cannot be built, or not be trained with these flags.
    """
    if config.base_dtype == "mxfp4" and quantization_of(source.config.to_dict()) is None:
        raise ExpertMeshError(
            "--base-dtype mxfp4: keeps experts as a checkpoint in MXFP4 has them, and config.json says of no quantized "
            "tensors; --base-dtype nf4 holds any weights in 4 bits"
        )
    attention = choose_attention(config.attn_implementation, bool(config.packing), source.config, config.images)
    model = source.build(attention)
    if config.packing:
        apply_packing(model)
    trained, new_tokens = [], getattr(source, "new_tokens", ())
    if images_of(model) is not None:
        freeze_images(model, config.train_vision)
    if config.adapter != "none":
        trained += [adapt(model, config).line(), *unquantized_lines(model, config)]
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        if new_tokens and not config.train_new_tokens and not all(end.weight.requires_grad for end in ends):
            flag = "--add-tokens" if config.add_tokens else "--resize-vocab"
            raise ExpertMeshError(
                f"{flag}: beside adapters, the rows of new tokens would stay as they begin; give --train-new-tokens, "
                "or --modules-to-save embed_tokens lm_head"
            )
    elif config.freeze:
        trained.append(freeze(model, config.freeze).line())
    if images_of(model) is not None:
        trained.insert(0, images_line(model))
    if config.offload_experts:
        check_experts_frozen(model)
    if config.dense_precision == "fp8":
        trained.append(multiply_in_fp8(model, device_type))
    if config.tp_size > 1:
        if config.async_tp:
            check_async(device_type)
        trained.append(apply_tensor_parallel(model, config.tp_size).line())
    if config.ranks_per_sequence > 1:
        apply_context_parallel(model, config.cp_size, bool(config.packing), config.tp_size)
    if config.async_tp:
        quantized = to_quantize(model).values() if config.quantizes_linear else ()
        trained.append(model.tensor_parallel.overlapped_line(set(quantized)))
    kernel = choose(config, model, device_type)
    use_kernel(model, kernel.kernel, kernel.most_apart)
    if compiles and config.compile:
        trained.append(compile_layers(model))
    if device_type == "cuda":
        trained.append(use_liger(model, compute_dtype(config)))
    attach_loss_head(model, "chunked" if config.cross_entropy == "auto" else config.cross_entropy)
    if config.tp_size > 1 and config.loss_parallel:
        trained.append(divide_vocabulary(model, config.cross_entropy))
    if (mtp := mtp_of(model)) is not None:
        use_mtp(model, config.mtp_detach)
        trained.append(mtp.line(config.train_mtp, config.mtp_detach))
    if config.adapter != "none" and config.train_new_tokens and new_tokens:
        trained.append(train_new_tokens(model, new_tokens))
    if config.optimizer_entry.parameters_in_bf16:
        set_parameter_dtype(model, torch.bfloat16)
    elif config.holds_base_in_bf16:
        set_parameter_dtype(model, torch.bfloat16, frozen_alone=True)
    return Assembled(model, kernel, trained)


@dataclass(frozen=True)
class Opened:
    """The files of a model whose ranks know what they will hold: names, shapes and dtypes. adapter: that of
    --init-adapter, where it begins with one."""

    checkpoint: Checkpoint
    adapter: Adapter | None


def open_weights(
    config: TrainConfig,
    model: Any,
    source: ModelSource,
    mesh: Mesh,
    resume_from: Path | None = None,
    tell: Tell = lambda line: None,
) -> Opened:
    """Say which rank of an assembled model will hold what and in which form, and read names, shapes and dtypes of its
    weights. All ranks call it together.

    Args:
        resume_from: the training checkpoint that will fill what is trained.

    Raises:
        ExpertMeshError: on all ranks, where the checkpoint is damaged or does not fit.
    """
    adapter = None
    if config.init_adapter and resume_from is None:
        with raise_together():
            # while all layers are here
            of_model = (lora_of(config), config.rope, source.config)
            adapter = read_adapter(model, Path(config.init_adapter), *of_model)
            for line in filter(None, [adapter.other_base(source.path), adapter.line(lora_of(config))]):
                tell(line)
    if mesh.topology.pp_size > 1:
        schedule = (config.schedule_name, config.pipeline_chunks, config.layers_of_stages)
        with raise_together():
            cut_into_stages(model, mesh, compute_dtype(config), *schedule)
    if (kind := config.quantized_base) is not None:
        store_frozen(model, kind)
    return Opened(open_for(model, source), adapter)


def place(
    config: TrainConfig,
    model: Any,
    source: ModelSource,
    mesh: Mesh,
    device: torch.device,
    resume_from: Path | None = None,
    tell: Tell = lambda line: None,
    opened: Opened | None = None,
) -> Checkpoint:
    """Shard an assembled model over the ranks and read its weights. All ranks call it together.

    Args:
        resume_from: the training checkpoint that will fill what is trained, which is then not read.
        opened: from `open_weights`, if that was called before.

    Raises:
        ExpertMeshError: on all ranks, where the checkpoint is damaged or does not fit.
    """
    opened = opened or open_weights(config, model, source, mesh, resume_from, tell)
    adapter = opened.adapter
    if config.async_tp:
        assert mesh.cp_group is not None
        assert mesh.cp_group.tp is not None
        with raise_together():
            model.tensor_parallel.operators = symmetric_memory(mesh.cp_group.tp, device)
    trains_all = config.adapter == "none" and resume_from is None
    dtype, strategy = compute_dtype(config), config.strategy
    how = dtype, strategy, trains_all, opened.checkpoint
    checkpoint = shard_and_load(model, source, mesh, device, *how)
    if config.adapter != "none":
        fill_adapters(model, mesh.topology, config.seed)
        if adapter is not None:  # before weights are read, which may take minutes: its values may not be finite
            load_adapter(model, adapter, lora_of(config), mesh.topology)
        load_model(model, checkpoint, mesh.topology)
    if source.vocab_size is not None and (trains_all or config.adapter != "none"):
        fill_new_rows(model, checkpoint, mesh.topology, config.seed)
    if config.train_new_tokens:
        fill_token_rows(model, checkpoint, mesh.topology, config.seed)
    if adapter is not None:
        load_whole(model, adapter, mesh.topology)
    return checkpoint

"""The assembly of a model: from a configuration to a model on its ranks, loaded.

`train_ep.py`, dry runs, the planner, the reference of the parity tests and the benchmarks make their models here, in
one order: what is trained is chosen, then what ranks share, then what computes each part, then what numbers are held
in; then the model is sharded and its weights are read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from checkpoints import Checkpoint, ModelSource, Names, load_adapter, shard_and_load
from moe import KernelChoice, choose_kernel, kernel_needs, store_frozen, use_kernel
from sharding import Mesh, fill_adapters, set_parameter_dtype
from training.adapters import adapt, lora_of, unquantized_lines
from training.attention import check_packing, choose_attention
from training.compiling import compile_layers
from training.config import TrainConfig
from training.freezing import freeze
from training.fused import fuse_layers
from training.head import attach_loss_head, choose_cross_entropy
from training.shared_attention import share_rows


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


def kernel_of(config: TrainConfig, model: Any, device_type: str, name: str | None = None) -> KernelChoice:
    """What computes the experts, by the flags of a run and what its device has; `name` in place of --expert-kernel.

    Raises:
        ExpertMeshError: the kernel that was asked for is not installed or cannot compute these experts.
    """
    needs = kernel_needs(model, device_type, compute_dtype(config))
    return choose_kernel(name or config.expert_kernel, needs, config.expert_precision)


def compute_dtype(config: TrainConfig) -> torch.dtype:
    """What matmuls compute in."""
    return torch.bfloat16 if config.bf16 else torch.float32


def assemble(
    config: TrainConfig,
    source: Buildable,
    device_type: str,
    choose: Callable[[TrainConfig, Any, str], KernelChoice] = kernel_of,
    cross_entropy: Callable[[Any, str], str] = choose_cross_entropy,
    compiles: bool = True,
) -> Assembled:
    """The model on the meta device, with its adapters, our experts and our loss.

    Args:
        source: what it is built of.
        device_type: "cuda" or "cpu", for which kernels are chosen.
        choose: what computes the experts.
        cross_entropy: what computes the loss, of `--cross-entropy` and the type of device.
        compiles: whether --compile is heeded.

    Raises:
        ExpertMeshError: it cannot be built, or not be trained with these flags.
    """
    model = source.build(choose_attention(config.attn_implementation, config.packing, source.config))
    trained = []
    if config.adapter != "none":
        trained += [adapt(model, config).line(), *unquantized_lines(model, config)]
    elif config.freeze:
        trained.append(freeze(model, config.freeze).line())
    if config.packing:
        check_packing(model)
    if config.cp_size > 1:
        share_rows(model, config.cp_size, config.packing)
    kernel = choose(config, model, device_type)
    use_kernel(model, kernel.kernel)
    if compiles and config.compile:
        compile_layers(model)
    if device_type == "cuda":
        fuse_layers(model)
    attach_loss_head(model, cross_entropy(config.cross_entropy, device_type))
    if config.optim == "adamw_bf16":
        set_parameter_dtype(model, torch.bfloat16)
    elif config.holds_base_in_bf16:
        set_parameter_dtype(model, torch.bfloat16, frozen_alone=True)
    return Assembled(model, kernel, trained)


def place(
    config: TrainConfig,
    model: Any,
    source: ModelSource,
    mesh: Mesh,
    device: torch.device,
    resume_from: Path | None = None,
) -> Checkpoint:
    """Shard an assembled model over the ranks and read its weights. All ranks call it together.

    Args:
        resume_from: the training checkpoint that will fill what is trained, which is then not read.

    Raises:
        ExpertMeshError: on all ranks, where the checkpoint is damaged or does not fit.
    """
    if config.base_dtype in ("fp8", "nf4"):
        store_frozen(model, config.base_dtype)
    reads = resume_from is None or config.adapter != "none"
    checkpoint = shard_and_load(model, source, mesh, device, compute_dtype(config), config.strategy, read_weights=reads)
    if config.adapter != "none":
        fill_adapters(model, mesh.topology, config.seed)
        if config.init_adapter and resume_from is None:
            of_model = (lora_of(config), config.rope, source.config)
            load_adapter(model, Path(config.init_adapter), Names(model), mesh.topology, *of_model)
    return checkpoint

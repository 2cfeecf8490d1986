"""A model as a run builds it, before it is sharded, on the meta device, without a checkpoint."""

from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ....moe.experts.model_layers import decoder_layers
from ....moe.hf_model.build import build_model, kernel_needs
from ....moe.hf_model.mtp import PublishedMTP, add_mtp
from ....moe.hf_model.rope import RopeScaling, check_rope, with_rope_scaling
from ....moe.kernels.expert_kernels import KernelChoice, check_kernel, choose_kernel
from ....moe.kernels.kernel_entries import KERNELS
from ....moe.kernels.kernel_registry import NotInstalled
from ....sharding.state import set_parameter_dtype
from ...config.train_config import TrainConfig
from ...engine.assembly import assemble, compute_dtype, kernel_of
from ...model_setup.rates import published
from .liger_stand_in import computed_by_torch
from .quack_stand_in import taken_as_installed
from .short import keep_layers

DeviceType = Literal["cuda", "cpu"]
HOPPER = (9, 0)
"""A compute capability."""


@dataclass(frozen=True)
class ConfigAlone:
    """A model's config, in place of a directory with a checkpoint.

    keep: numbers of the decoder layers that a short model has; None: all. renumber: see `keep_layers`. has_mtp: whether
    it has a layer for multi-token prediction, like its last one. images: whether it has the parts that images pass.
    """

    config: Any
    rope: RopeScaling | None = None
    keep: Sequence[int] | None = None
    renumber: bool = False
    has_mtp: bool = False
    images: bool = False

    def build(self, attn_implementation: str) -> Any:
        number = self.config.get_text_config().num_hidden_layers
        config = PublishedMTP(number, number - 1, False).with_layer(self.config) if self.has_mtp else self.config
        model = build_model(config, attn_implementation, self.images)
        if self.rope is not None:
            check_rope(model, self.rope)
        if self.keep is not None:
            keep_layers(model, self.keep, self.renumber)
        if self.has_mtp:
            number = len(decoder_layers(model)) - 1
            add_mtp(model, PublishedMTP(number, number - 1, False))
        return model


def build_rehearsed(
    config: TrainConfig,
    model_config: Any,
    device_type: DeviceType,
    keep: Sequence[int] | None = None,
) -> Any:
    """What `train_ep.py` would build for these flags, with the kernels of a GPU or of a CPU.

    Args:
        keep: numbers of the decoder layers that a short model has; None: all.

    Raises:
        ExpertMeshError: the model cannot be built, or not trained with these flags.
    """
    # a short model's config is cut with it
    of_model = model_config if keep is None else deepcopy(model_config)
    of_model = with_rope_scaling(of_model, config.rope)
    is_cut = config.pp_size > 1
    source = ConfigAlone(of_model, config.rope, keep, is_cut, has_mtp=config.train_mtp > 0, images=config.images)
    # exchanges beside GEMMs are an operator of a GPU's, of which the parts are not known
    if config.async_tp:
        config = replace(config, async_tp=False)
    # operators are what is recorded, not what a compiler makes of them
    with computed_by_torch():
        model = assemble(config, source, device_type, _kernel, compiles=False).model
    if config.optimizer_entry.parameters_in_bf16 and config.adapter == "none" and source.config.dtype != torch.bfloat16:
        # as a checkpoint of that dtype has them (see `checkpoints.load.hold_exactly`)
        set_parameter_dtype(model, torch.float32, frozen_alone=True)
    return model


def _kernel(config: TrainConfig, model: Any, device_type: str) -> KernelChoice:
    """The expert kernel: on a GPU what is recorded for the one that is asked for, or chosen on Hopper, as this process
    cannot ask the GPU. What is asked for need not be installed here."""
    if device_type != "cuda":
        return kernel_of(config, model, "cpu")
    needs = replace(kernel_needs(model, "cuda", compute_dtype(config)), assumed_capability=HOPPER)
    name = choose_kernel(config.expert_kernel, needs).name if config.expert_kernel == "auto" else config.expert_kernel
    with suppress(NotInstalled):
        check_kernel(name, needs)
    with taken_as_installed():
        choice = choose_kernel(KERNELS.get(name).recorded_as, needs, config.expert_precision)
    return replace(choice, most_apart=published("H100").experts_apart)

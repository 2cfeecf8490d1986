"""Which flags of a run its forecasts do not cover: refused, where the run would be another one than was forecast, or
said beside the figures. All others are read by a forecast, or are in `NO_EFFECT`."""

from collections.abc import Sequence

from ...moe.util.errors import ExpertMeshError
from ...moe.util.parser import flag_of
from ...moe.util.versions import without_kernels
from ..config.train_config import SETTINGS, TrainConfig, read_by

NOT_MODELLED = {
    "add_tokens": "the rows of new tokens are not in it",
    "train_new_tokens": "the rows of new tokens are not in it",
    "resize_vocab": "the rows of new tokens are not in it",
    "async_tp": "all exchanges of a tensor-parallel group are taken to be waited for",
    "compile": "the forecast is without it",
    "deterministic": "the forecast is of the faster kernels",
    "detect_anomaly": "its checks of every module's output are not in it",
    "check_replicas": "its comparisons are not in it",
    "profile": "the forecast is for steps without it",
    "debug_ranks": "the forecast is of a run without it",
    "streaming": "the host's time to read and tokenize is not in it",
    "eval_dataset": "the forecast is of training steps; evaluations are not in it",
    "eval_ratio": "the forecast is of training steps; evaluations are not in it",
    "generate_steps": "the forecast is of training steps; generating is not in it",
    "resume": "the forecast is of a run from its beginning, and a run that is resumed keeps its pipeline's schedule",
}
"""Flags that change a step in a way that no forecast has, and what it says instead."""
NO_EFFECT = SETTINGS.keys() - read_by("plan") - NOT_MODELLED.keys()
"""Flags on which neither memory nor time of a forecast depends: of data, as all sequences are taken to be full, and all
tokens to be trained on, with weights or without; numbers with which the same kernels compute; what comes between steps,
or after the last."""


def check_covered(config: TrainConfig) -> None:
    """
    Raises:
        ExpertMeshError: with these flags no step on GPUs is taken, or one of another layout.
    """
    if config.use_cpu:
        raise ExpertMeshError("--use-cpu: the forecast is of a run on GPUs; leave it out")
    for flag, given in (("--preview", config.preview), ("--prepare-only", config.prepare_only)):
        if given:
            raise ExpertMeshError(f"{flag}: a run with it takes no step to forecast; leave it out")
    if config.max_steps == 0:
        raise ExpertMeshError("--max-steps 0: a run with it takes no step to forecast; leave it out")
    if config.elastic:
        raise ExpertMeshError(
            "--elastic: would choose another --ep-size at the start than was forecast; leave it out, and give --ep-size"
        )


def assumed_code(looped: Sequence[tuple[str, str]], by_liger: bool) -> list[str]:
    """Whose code is taken to compute what depends on the packages of the machine with the GPUs, a line each.

    Args:
        looped, by_liger: of `ModelFacts`.
    """
    lines = []
    for package in sorted({package for _, package in looped}):
        names = [name for name, other in looped if other == package]
        known = f"{package} is installed; without it" if package else "no figures of kernels are known, so"
        lines.append(f"assumed: {known} {without_kernels(names)}")
    if by_liger:
        lines.append("assumed: liger-kernel is installed, and computes norms and rotary positions; without it slower")
    return lines


def not_modelled(config: TrainConfig) -> list[str]:
    """What of the configuration is not in its forecast, a line each."""
    default = TrainConfig(model="-")
    lines = [
        f"{flag_of(name)}: not modelled; {said}"
        for name, said in NOT_MODELLED.items()
        if getattr(config, name) != getattr(default, name)
    ]
    if config.estimates_divergence:
        lines.append(f"--task {config.task}: the forward pass of mismatched answers before each step is not modelled")
    if config.offload:
        lines.append(
            "--offload: copies to and from host memory are not modelled, and the optimizer step is taken to run on the "
            "GPU"
        )
    if config.offload_experts:
        lines.append("--offload-experts: copied at the rate of PCI Express in data sheets, which nothing else uses")
    if config.offload_activations:
        lines.append("--offload-activations: the time of its copies is not modelled")
    if config.train_mtp > 0:
        lines.append(
            "--train-mtp: the checkpoint is taken to bring one layer for it, of the same kind as the model's last"
        )
    return lines

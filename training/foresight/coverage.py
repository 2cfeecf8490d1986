"""Which flags of a run its forecasts do not cover: refused, where the run would be another one than was forecast, or
said beside the figures."""

from expertmesh.moe import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig

NOT_MODELLED = {
    "async_tp": "all exchanges of a tensor-parallel group are taken to be waited for",
    "compile": "the forecast is without it",
    "deterministic": "the forecast is of the faster kernels",
    "detect_anomaly": "its checks of every module's output are not in it",
    "check_replicas": "its comparisons are not in it",
    "profile": "the forecast is of steps without it",
    "debug_ranks": "the forecast is of a run without it",
}
"""Flags that change a step in a way that no forecast has, and what it says instead."""


def check_covered(config: TrainConfig) -> None:
    """
    Raises:
        ExpertMeshError: with these flags no step on GPUs is taken, or one of another layout.
    """
    if config.use_cpu:
        raise ExpertMeshError("--use-cpu: the forecast is of a run on GPUs; leave it out")
    if config.preview:
        raise ExpertMeshError("--preview: a run with it takes no step to forecast; leave it out")
    if config.max_steps == 0:
        raise ExpertMeshError("--max-steps 0: a run with it takes no step to forecast; leave it out")
    if config.elastic:
        raise ExpertMeshError(
            "--elastic: would choose another --ep-size at the start than was forecast; leave it out, and give --ep-size"
        )


def not_modelled(config: TrainConfig) -> list[str]:
    """What of the configuration is not in its forecast, a line each."""
    default = TrainConfig(model="-")
    asked = (name for name in NOT_MODELLED if getattr(config, name) != getattr(default, name))
    lines = [f"--{name.replace('_', '-')}: not modelled; {NOT_MODELLED[name]}" for name in asked]
    if config.offload:
        lines.append(
            "--offload: copies to and from host memory are not modelled, and the optimizer step is taken to run on the "
            "GPU"
        )
    if config.offload_activations:
        lines.append("--offload-activations: the time of its copies is not modelled")
    if config.cross_entropy == "liger":
        lines.append("--cross-entropy liger: not modelled; the forecast is of the chunked loss")
    return lines

"""What a training checkpoint and the configuration that resumes it must have in common."""

from pathlib import Path
from typing import Any

from expertmesh.moe import ExpertMeshError, read_rope_scaling
from expertmesh.moe.base.parser import flag_of
from expertmesh.training.config.train_config import TrainConfig

_ADAPTER_SETTINGS = ("adapter", "lora_rank", "lora_alpha", "use_rslora", "lora_targets", "base_dtype")


def check_trained(settings: dict[str, Any], config: TrainConfig, path: Path) -> None:
    """Refuse a checkpoint whose state means nothing to this configuration: one optimizer's means nothing to another, to
    another adapter, or to what was frozen; and weights trained with one RoPE scaling are not meant for another.

    Args:
        settings: that the checkpoint was saved with.

    Raises:
        ExpertMeshError: they differ.
    """
    if settings.get("adapter", "none") != "none" or config.adapter != "none":
        for name in _ADAPTER_SETTINGS:
            if settings.get(name, "none") != getattr(config, name):
                flag = flag_of(name)
                raise ExpertMeshError(
                    f"--resume {path}: that run had {flag} {settings.get(name, 'none')}, this one has "
                    f"{getattr(config, name)}; take the same"
                )
    there = settings.get("optim", "adamw_torch_fused")
    if there != config.optim:
        raise ExpertMeshError(
            f"--resume {path}: that run had --optim {there}, this one has {config.optim}; take the same"
        )
    if config.optim == "shampoo":
        # the shapes of its state depend on the one, and whether there are roots yet on the other
        for flag, number, own in (
            ("--shampoo-block-size", settings["shampoo_block_size"], config.shampoo_block_size),
            ("--shampoo-start", settings["shampoo_start"] or settings["shampoo_frequency"], config.first_roots),
        ):
            if number != own:
                is_default = flag == "--shampoo-start" and config.shampoo_start is None
                also = ", by default its --shampoo-frequency" if is_default else ""
                raise ExpertMeshError(
                    f"--resume {path}: that run had {flag} {number}, this one has {own}{also}; use {flag} {number}"
                )
    scaling = settings.get("rope_scaling", "")
    if (read_rope_scaling(scaling) if scaling else None) != config.rope:
        there, here = (
            f"--rope-scaling {text}" if text else "no --rope-scaling" for text in (scaling, config.rope_scaling)
        )
        raise ExpertMeshError(f"--resume {path}: that run had {there}, this one has {here}; take the same")
    frozen = settings.get("freeze", [])
    if sorted(frozen) != sorted(config.freeze):
        there, here = (
            f"--freeze {' '.join(entries)}" if entries else "nothing frozen" for entries in (frozen, config.freeze)
        )
        raise ExpertMeshError(f"--resume {path}: that run had {there}, this one has {here}; take the same")

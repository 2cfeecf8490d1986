"""fp32 matmuls on a GPU's tensor cores, with 10 bits of mantissa (--tf32)."""

import torch

from ...moe.util.errors import ExpertMeshError


def set_tf32(is_on: bool, device_type: str) -> None:
    """Have torch multiply fp32 matrices in TF32, or in full, from here on, whatever it was set to: the setting is the
    process's, in which a notebook may load one model after the other.

    Args:
        device_type: what the run computes on.

    Raises:
        ExpertMeshError: it has no TF32, as no CPU and no GPU before Ampere.
    """
    if not is_on:
        torch.set_float32_matmul_precision("highest")
        return
    if device_type != "cuda":
        raise ExpertMeshError(f"--tf32 needs a GPU; this run is on {device_type}; leave it out")
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        raise ExpertMeshError(
            f"--tf32 needs a GPU of compute capability 8.0 (Ampere) or more; this one has {major}.{minor}; leave it out"
        )
    torch.set_float32_matmul_precision("high")

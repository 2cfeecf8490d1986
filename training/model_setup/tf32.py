"""fp32 matmuls on a GPU's tensor cores, with 10 bits of mantissa (--tf32)."""

import torch

from ...sharding.runtime.process import check_tf32


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
    check_tf32(device_type)
    torch.set_float32_matmul_precision("high")

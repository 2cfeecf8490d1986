"""NCCL's options for groups whose collectives run beside GEMMs."""

from typing import Any

import torch.distributed as dist

from ...moe.kernels.carve_out import LEFT


def few_blocks(device_type: str) -> Any:
    """Options with which NCCL has no more blocks than expert GEMMs in chunks leave it multiprocessors (see
    `moe.kernels.carve_out`). torch writes into them: for one group only. None where there is no NCCL."""
    if device_type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = LEFT
    return options

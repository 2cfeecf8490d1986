"""Multiprocessors that expert GEMMs leave to NCCL, where all-to-alls are under way beside them.

torch's grouped GEMMs are persistent kernels, a block on every multiprocessor, and a block of NCCL's does not share one:
beside an all-to-all such a GEMM waits for it, or takes twice as long (pytorch#143988).
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

LEFT = 16
"""Multiprocessors that are left; as many blocks as NCCL may take then (see `sharding.collectives.groups`)."""


def leaving_room(multiply: Callable[..., Tensor], is_beside: bool) -> Callable[..., Tensor]:
    """A grouped GEMM that leaves `LEFT` multiprocessors free if all-to-alls are under way beside it."""
    if not is_beside:
        return multiply
    _silence()
    from ..torch_private import _get_sm_carveout_experimental, _set_sm_carveout_experimental

    def multiply_on_fewer(*arguments: Any, **options: Any) -> Tensor:
        before = _get_sm_carveout_experimental()
        _set_sm_carveout_experimental(LEFT)
        try:
            return multiply(*arguments, **options)
        finally:
            _set_sm_carveout_experimental(before)

    return multiply_on_fewer


@cache
def _silence() -> None:
    """torch warns that the setting is experimental; that it is there is tested before it is used."""
    warnings.filterwarnings("ignore", "Setting the SM carveout")

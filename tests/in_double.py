"""Double precision, in which sums in another order differ by far less than what is left out or twice there."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InDouble(TorchFunctionMode):
    """What is written for fp32 computes in double precision."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        # a dtype is an argument of its own, and in no list or dict of them
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return function(*args, **kwargs)

"""Finds the first tensor of a step that is not finite, over all ranks (--detect-anomaly)."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sharding import local_tensor


class AnomalyDetector:
    """Hooks on every module of a sharded model that test its output in forward, and that output's gradient in backward.

    A test leaves one flag on the device, in order of execution; nothing waits for it before `first_nonfinite`. Forwards
    without gradients (evaluation, answers) are not tested. Nothing that is computed changes.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.tests: list[tuple[str, Tensor]] = []
        for name, module in model.named_modules():
            module.register_forward_hook(partial(self._after_forward, name or "the model"))

    def _after_forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for tensor in _tensors(output):
            self._test(f"output of {name}, in forward", tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._test, f"gradient of the output of {name}, in backward"))

    def _test(self, what: str, tensor: Tensor) -> None:
        self.tests.append((what, is_nonfinite(tensor)))

    def forget(self) -> None:
        """Begin a new step."""
        self.tests = []

    def first_nonfinite(self) -> str:
        """What was not finite first in the latest step, to be asked before the next update. All ranks call it together
        and get the same answer.

        Parameters as they were before the step come first, then outputs and their gradients in order of execution,
        then the parameters' gradients; of ranks at the same point, the lowest.
        """
        parameters = list(self.model.named_parameters())
        tests = [(f"parameter {name}, before the step", is_nonfinite(p)) for name, p in parameters]
        tests += self.tests
        tests += [
            (f"gradient of parameter {name}, after backward", is_nonfinite(p.grad))
            for name, p in parameters
            if p.grad is not None
        ]
        # one copy from the device for all of them; with --offload, parameters lie in host memory
        device = self.tests[-1][1].device
        flags = torch.stack([flag.to(device) for _, flag in tests]).tolist()
        own = next(((i, dist.get_rank(), what) for i, (what, _) in enumerate(tests) if flags[i]), None)
        found: list[tuple[int, int, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        firsts = [entry for entry in found if entry is not None]
        if not firsts:
            return "every tensor is finite: the gradients are, but not the sum of their squares"
        _, rank, what = min(firsts)
        return f"first non-finite tensor: {what}, on rank {rank}"


def is_nonfinite(tensor: Tensor) -> Tensor:
    """Whether any element of this rank's part is infinite or not a number: a bool scalar on its device."""
    return torch.isfinite(local_tensor(tensor.detach())).all().logical_not()


def _tensors(output: Any) -> Iterator[Tensor]:
    """The floating point tensors in what a module returns."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)
    elif is_dataclass(output):
        for field in fields(output):
            yield from _tensors(getattr(output, field.name))

"""Finds the first tensor of a step that is not finite, over all ranks (--detect-anomaly)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...moe.experts.forward import current_forward
from ...moe.util.change_order import begin_change
from ...sharding.state import local_tensor


@dataclass(frozen=True)
class _Test:
    """what: was tested. flag: whether it is not finite, on the device.

    when: in a pipeline (micro-batch, 0 in forward and 1 in backward, stages that come before in that), else all 0: what
    causes what, over ranks that execute other stages in another order.
    """

    what: str
    flag: Tensor
    when: tuple[int, int, int] = (0, 0, 0)


class AnomalyDetector:
    """Hooks on every module of a sharded model that test its output in forward, and that output's gradient in backward.

    A test leaves one flag on the device, in order of execution; nothing waits for it before `first_nonfinite`. Forward
    passes without gradients (evaluation, sample generations) are not tested. Nothing that is computed changes.

    On a later stage of a pipeline what comes before its first layer has no values, and is not tested.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.tests: list[_Test] = []
        begin_change(model, "watching")
        for name, module in model.named_modules():
            module.register_forward_hook(partial(self._after_forward, name or "the model"))

    def _after_forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        forward, backward = (0, 0, 0), (0, 0, 0)
        running = current_forward()
        if running is not None and (stage := running.stage) is not None:
            if not stage.has_values:
                return
            forward = (stage.micro_batch, 0, stage.number)
            backward = (stage.micro_batch, 1, -stage.number)
        for tensor in _tensors(output):
            self._test(f"output of {name}, in forward", forward, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._test, f"gradient of the output of {name}, in backward", backward))

    def _test(self, what: str, when: tuple[int, int, int], tensor: Tensor) -> None:
        self.tests.append(_Test(what, is_nonfinite(tensor), when))

    def forget(self) -> None:
        """Begin a new step."""
        self.tests = []

    def first_nonfinite(self) -> str:
        """What was not finite first in the latest step, to be asked before the next update. All ranks call it together
        and get the same result.

        Parameters as they were before the step come first, then outputs and their gradients in order of execution, in a
        pipeline each micro-batch's through all stages, then the parameters' gradients; of ranks at the same point, the
        lowest.
        """
        # those of a pipeline's other stages have no values
        parameters = [(name, p) for name, p in self.model.named_parameters() if not p.is_meta]
        before = [_Test(f"parameter {name}, before the step", is_nonfinite(p)) for name, p in parameters]
        after = [
            _Test(f"gradient of parameter {name}, after backward", is_nonfinite(p.grad))
            for name, p in parameters
            if p.grad is not None
        ]
        tests = [
            ((part, *test.when, number), test)
            for part, of_part in enumerate((before, self.tests, after))
            for number, test in enumerate(of_part)
        ]
        # one copy from the device for all of them; with --offload, parameters lie in host memory
        device = self.tests[-1].flag.device
        flags = torch.stack([test.flag.to(device) for _, test in tests]).tolist()
        here = [(when, dist.get_rank(), test.what) for (when, test), flag in zip(tests, flags, strict=True) if flag]
        found: list[tuple[Any, int, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, min(here, default=None))
        firsts = [entry for entry in found if entry is not None]
        if not firsts:
            return "every gradient is finite, but not the sum of their squares"
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

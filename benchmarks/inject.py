"""train_ep.py with a fault put into one step: `torchrun ... -m benchmarks.inject FAULT RANK STEP [flags]`.

What is changed is changed from outside: the product has no code for it.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from expertmesh import train_ep
from expertmesh.moe.util.command import run_command
from expertmesh.sharding.pipeline.pipeline import Messages
from expertmesh.sharding.stages import experts_here, layers_here
from expertmesh.sharding.state import local_tensor


def _die(model: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _freeze(model: Any) -> None:
    """As a machine that stops: no connection is closed, nothing responds any more."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(model: Any) -> None:
    raise OSError("an error made up by benchmarks.inject")


def _stand_still(model: Any) -> None:
    """Hang in a layer's forward, where the others then wait for this rank's tokens."""

    def sleep(module: nn.Module, inputs: Any) -> None:
        time.sleep(10_000)

    layers_here(model)[-1].register_forward_pre_hook(sleep)


def _die_sending(model: Any) -> None:
    """As the first tensors for another stage are about to go."""
    begin = Messages.begin

    def instead(self: Messages, send: Any, *more: Any) -> Any:
        if send:
            _die(model)
        return begin(self, send, *more)

    Messages.begin = instead  # type: ignore[method-assign, assignment]


def _hang_receiving(model: Any) -> None:
    """Once something is to be received."""
    begin, wait = Messages.begin, Messages.wait
    receiving: set[Messages] = set()

    def noting(self: Messages, send: Any, to: int, shapes: Any, source: int) -> Any:
        result = begin(self, send, to, shapes, source)
        if shapes:
            receiving.add(self)
        return result

    def sleep(self: Messages) -> None:
        if self in receiving:
            time.sleep(10_000)
        wait(self)

    Messages.begin, Messages.wait = noting, sleep  # type: ignore[method-assign]


def _poison(model: Any) -> None:
    """One element of a gradient of the experts becomes NaN in this step."""
    mlp: Any = experts_here(model)[-1].mlp
    handle: Any = None

    def spoil(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        local_tensor(parameter.grad)[0, 0] = float("nan")
        handle.remove()

    handle = mlp.w1.register_post_accumulate_grad_hook(spoil)


def _flip(model: Any) -> None:
    """One bit of one weight of attention, as cosmic rays and bad memory do: right before the update, when a checkpoint
    under way has been copied. What flips while it is copied, after the check before it, is in the checkpoint."""
    attention: Any = layers_here(model)[0].self_attn

    def flip(*_: Any) -> None:
        handle.remove()
        weight = local_tensor(attention.q_proj.weight.detach())
        weight.view(torch.int32)[0, 0] ^= 1 << 20

    handle = register_optimizer_step_pre_hook(flip)


def _lose_output(model: Any) -> None:
    """The output directory goes elsewhere."""
    out = Path(sys.argv[sys.argv.index("--output-dir") + 1])
    out.rename(out.with_name("elsewhere"))


_FAULTS = (_die, _freeze, _raise, _stand_still, _die_sending, _hang_receiving, _poison, _flip, _lose_output)
FAULTS: dict[str, Callable[[Any], None]] = {fault.__name__[1:].replace("_", "-"): fault for fault in _FAULTS}


def main() -> int:
    fault, rank, step, *flags = sys.argv[1:]
    inject(FAULTS[fault], int(rank), int(step))
    return train_ep.main(flags)


def inject(fault: Callable[[Any], None], rank: int, step: int) -> None:
    """Let `fault` happen on a rank at the beginning of a step of this process, counted from 1."""
    from expertmesh.training.engine import engine

    train_step, made = engine.train_step, 0

    def with_fault(model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        if (
            made == step
            and int(os.environ.get("RANK", "0")) == rank
            and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        ):
            print(f"inject: {fault.__name__} on rank {rank} in step {step} at {time.time():.3f}", flush=True)
            fault(model)
        return train_step(model, *args, **kwargs)

    engine.train_step = with_fault


if __name__ == "__main__":
    run_command(main)

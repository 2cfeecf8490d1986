"""Stands in for triton where it is not installed, as beside a torch for CPUs: a dry run launches no kernel, but what
launches it must be imported, as it makes the tensors that a kernel writes and says which they are."""

import importlib
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from .... import moe, training
from ...optim.updates import Compiled


class Kernel:
    """What `triton.jit` makes of a function; `recording_triton` patches `run`."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self.run, grid=grid, warmup=False)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        raise AssertionError(f"{self.fn.__name__}: is launched without triton, outside a dry run")


class Constant:
    """`triton.language.constexpr`."""

    def __init__(self, value: Any):
        self.value = value


def kinds_of_kernels() -> tuple[type, ...]:
    """The classes of kernels, whose `run` launches them."""
    if find_spec("triton") is None:
        return Compiled, Kernel
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    # the second is what a kernel is where Triton's interpreter is on
    return Compiled, JITFunction, InterpretedFunction


@cache
def import_kernels() -> None:
    """Import all of our modules with Triton kernels, which nothing but a dry run does without triton.

    The stand-ins are no longer to be found afterwards: others ask whether triton is installed.
    """
    if find_spec("triton") is not None:
        return
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    vars(triton).update(language=language, jit=_jit, cdiv=_cdiv, next_power_of_2=_next_power_of_2)
    vars(language).update(constexpr=Constant)
    sys.modules.update({"triton": triton, "triton.language": language})
    try:
        for name in _modules():
            importlib.import_module(name)
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


def _modules() -> list[str]:
    names = []
    for package in (moe, training):
        root = Path(package.__path__[0])
        files = (file.relative_to(root).with_suffix("") for file in sorted(root.rglob("*_triton.py")))
        names += [".".join((package.__name__, *file.parts)) for file in files]
    return names


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def _cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()

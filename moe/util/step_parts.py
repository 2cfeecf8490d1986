"""What code declares of itself, for cost breakdowns, dry runs and profiles: which part of a step its operators are,
which functions make what outlives a step, and what a Triton kernel writes.

The place of a module and the names of its functions do not matter. A module that calls operators in a step has a
constant of this form, after its imports:

    STEP_PART: StepPart = "router"
"""

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Literal, TypeVar

StepPart = (
    Literal[
        "router",
        "dispatch",
        "permute, combine",
        "expert GEMMs",
        "experts' activation",
        "dequantization",
        "adapters",
        "norms",
        "rotary",
        "LM head, loss",
        "pipeline",
        "clipping",
        "optimizer step",
        "the step",
    ]
    | None
)
"""The part of a step that a module's operators belong to; None, as for helpers: that of the module's caller. "the step"
is everything else: the code that calls all parts, and `backward`, so that in a backward it says nothing."""

Kernel = TypeVar("Kernel")
Function = TypeVar("Function", bound=Callable[..., Any])

# by identity: code objects of different files can be equal
_LASTING: dict[int, CodeType] = {}


def lasting(function: Function) -> Function:
    """Declare that a function makes what outlives a step, such as optimizer state, or that it computes nothing: what it
    and its callees do is part of no step. Returns the function itself."""
    assert isinstance(function, FunctionType), function
    _LASTING[id(function.__code__)] = function.__code__
    return function


def is_lasting(code: CodeType) -> bool:
    """Whether this is the code of a function that is declared `lasting`."""
    return id(code) in _LASTING


def writes(*written: str, updates: tuple[str, ...] = ()) -> Callable[[Kernel], Kernel]:
    """Declare, above `triton.jit`, to which tensors a kernel writes; its other tensors are read.

    Args:
        written: names of parameters that it writes without reading them.
        updates: names of those that it reads and writes.
    """

    def declare(kernel: Any) -> Any:
        kernel.fn.written, kernel.fn.updated = frozenset(written), frozenset(updates)
        return kernel

    return declare


def written_by(kernel: Any) -> tuple[frozenset[str], frozenset[str]]:
    """(written, updated): the names that a kernel declares by `writes`; none for another package's kernel, whose
    tensors then all count as read."""
    return getattr(kernel.fn, "written", frozenset()), getattr(kernel.fn, "updated", frozenset())

"""Gradients of experts' weights, computed later than those of their inputs: for zero-bubble pipelines.

Zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241) divide a backward in two: the gradients of inputs, for which
the stage before waits, and those of weights, for which nobody waits before the update, and which fill what would be
idle time. Here the second part is the GEMMs of experts' matrices, gradᵀ · x; all else is computed at once.

A forward whose `Forward` names a `WeightGradients` builds its graph so that experts' kernels can leave these GEMMs to
it, and a backward within `collecting` does. Operands and operations are those of an ordinary backward, and gradients
are added to the parameters' in the order of `compute`: if that is the order of the backwards, bits are the same.

Until then each layer's rows (R, D), the gradients of its results (R, D), the gradients of gate and up and the hidden
activations (each (R, F)) stay in memory: R · (2·D + 3·F) elements per layer and micro-batch in the compute dtype,
without a gate R · (2·D + 2·F); with the kernel `loop`, of plain SwiGLU, in the dtype that it multiplies in (fp32 on a
CPU without bf16).
With activation checkpointing they are the recomputed ones. Weights are not kept.

Deferred by the kernels `loop`, `torch-grouped` and by GEMMs in fp8. Computed at once: by
`megablocks-sparse`, whose GEMMs are stk's own autograd functions; biases, a sum; adapters, which are small, and whose
experts' weights are frozen; and all dense layers, as FSDP reduces a unit's gradients at the end of its backward.

Shape suffixes: R rows, D model width, F expert width.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only


class WeightGradients:
    """The weights' gradients that backwards have left for later, by micro-batch.

    Args:
        finish: called after the gradients of one layer have been added to those of the parameters that its forward
            computed with (`ExpertsCall.parameters`), for what then has to be done with them; by default nothing.
    """

    def __init__(self, finish: Callable[["ExpertsCall"], None] | None = None):
        self._finish = finish
        # by calls of layers: all gradients of a call are computed before they are added
        self._waiting: dict[Hashable, dict[ExpertsCall, list[_Gradients]]] = {}
        # not a ContextVar: on a GPU nodes run in threads of autograd's
        self._micro_batch: Hashable = None

    def __len__(self) -> int:
        """How many micro-batches' gradients wait."""
        return len(self._waiting)

    @property
    def bytes(self) -> int:
        """The memory of the tensors from which waiting gradients will be computed."""
        kept: dict[tuple[int, int], int] = {}
        for tensor in tree_leaves([waiting.operands for waiting in self._all()]):
            # several GEMMs read the same rows
            kept[tensor.untyped_storage()._cdata, tensor.storage_offset()] = tensor.numel() * tensor.element_size()
        return sum(kept.values())

    @contextmanager
    def collecting(self, micro_batch: Hashable) -> Iterator[None]:
        """Within it a backward leaves its experts' weight gradients for `compute`, if its forward's `Forward` names
        this object. If it raises, nothing of it is left.

        Args:
            micro_batch: its number, or (stage, number) where stages share this object; not None. `compute` finds the
                gradients by it; none with the same may be waiting.
        """
        assert micro_batch is not None
        assert self._micro_batch is None, "one backward runs at a time"
        assert micro_batch not in self._waiting, micro_batch
        self._waiting[micro_batch] = {}
        self._micro_batch = micro_batch
        try:
            yield
        except BaseException:
            del self._waiting[micro_batch]
            raise
        finally:
            self._micro_batch = None

    def compute(self, micro_batch: Hashable) -> None:
        """Compute what the backward of `micro_batch` has left, and add it to the parameters' gradients."""
        calls = self._waiting.pop(micro_batch)
        while calls:
            call = next(iter(calls))
            edges, grads = [], []
            for waiting in calls.pop(call):
                with torch.no_grad():
                    computed = waiting.compute(*waiting.operands)
                for edge, grad in zip(waiting.edges, computed, strict=True):
                    if edge is not None:
                        edges.append(edge)
                        grads.append(grad)
            torch.autograd.backward(edges, grads)
            if self._finish is not None:
                self._finish(call)

    def clear(self) -> None:
        """Discard all that waits: for a step that is given up."""
        self._waiting.clear()

    @property
    def is_collecting(self) -> bool:
        return self._micro_batch is not None

    def _add(self, call: "ExpertsCall", gradients: "_Gradients") -> None:
        assert self._micro_batch is not None
        self._waiting[self._micro_batch].setdefault(call, []).append(gradients)

    def _all(self) -> Iterator["_Gradients"]:
        for calls in self._waiting.values():
            for waiting in calls.values():
                yield from waiting


@dataclass(frozen=True, eq=False)
class ExpertsCall:
    """One call of a layer's experts in a forward: graphs of its matmuls are built so that the gradients of their
    weights can be left for later. Such a gradient may be None, which the graph that made the weight has to take, as
    that of working weights does (see `moe.experts.bf16_copies`).

    module: the experts. parameters: those that it computed with, by name; where FSDP gathers them, the gathered ones.
    """

    queue: WeightGradients
    module: nn.Module
    parameters: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class _Gradients:
    """Gradients of a GEMM's weights, or of several GEMMs', to be computed as `compute(*operands)`. edges: where each
    goes on from there; None: nowhere, as it is frozen."""

    edges: tuple[GradientEdge | None, ...]
    compute: Callable[..., tuple[Tensor, ...]]
    operands: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Deferral:
    """What an autograd function needs to leave its weights' gradients for later: made in its forward."""

    call: ExpertsCall
    edges: tuple[GradientEdge | None, ...]


def deferral_of(call: ExpertsCall | None, *weights: Tensor) -> Deferral | None:
    """For the forward of an autograd function with these weights; None: their gradients are computed at once."""
    if call is None or not any(weight.requires_grad for weight in weights):
        return None
    return Deferral(call, tuple(get_gradient_edge(weight) if weight.requires_grad else None for weight in weights))


def now_or_later(
    deferral: Deferral | None, compute: Callable[..., tuple[Tensor, ...]], *operands: Any
) -> tuple[Tensor | None, ...]:
    """The weights' gradients for the backward of an autograd function: `compute(*operands)`; or, in a backward that
    leaves them for later, None for each.

    Args:
        compute: holds no tensors beside those that it is given.
        operands: tensors, and iterators of tensors, each of whose items is computed when `compute` takes it, or now if
            the gradients are left for later.
    """
    if deferral is None or not deferral.call.queue.is_collecting:
        return compute(*operands)
    kept = tuple(list(operand) if isinstance(operand, Iterator) else operand for operand in operands)
    # a tensor that was an input would hold the graph before it
    kept = tree_map_only(Tensor, Tensor.detach, kept)
    deferral.call.queue._add(deferral.call, _Gradients(deferral.edges, compute, kept))
    return (None,) * len(deferral.edges)

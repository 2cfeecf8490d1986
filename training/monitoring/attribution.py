"""Which part of a step asks for an operator: that of the code that calls it, or what its forward was part of."""

import re
import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.utils import checkpoint

from ...moe.experts.layer import DMoE
from ...moe.experts.model_layers import decoder_layers, moe_layers, router_prefixes
from ...moe.torch_private import FSDPState, ShardingPropagator, _current_autograd_node, _get_sequence_nr
from ...moe.util.step_parts import STEP_PARTS, is_lasting

LASTING, FSDP = "lasting", "FSDP"
_OF_TORCH = {torch.optim.__name__: "optimizer step", fsdp.__name__: FSDP}
"""What the packages of torch are a part of that call operators for themselves."""
assert is_lasting(torch.optim.AdamW._init_group), "what makes AdamW's state is told by its name"
assert is_lasting(ShardingPropagator._propagate_tensor_meta_non_cached), "what finds out shapes is told by its name"
assert FSDPState.__module__.startswith(f"{fsdp.__name__}."), "what FSDP calls is told by its package's name"


_CALL_BACKWARD = ("the step", "pipeline")
"""Whose code calls backward: what runs there is a part by its forward."""


@dataclass(frozen=True)
class StepPlace:
    """part: of a step, None for what is no part of any. layer: number of the decoder layer, None outside of them.
    is_recomputed: asked for by activation checkpointing."""

    part: str | None
    layer: int | None
    is_recomputed: bool = False


@dataclass(frozen=True)
class _Code:
    """What is known of the operators that a function calls, by its module.

    code: held, so that no other gets its address. is_lasting: whether they are part of no step. checkpoints: whether it
    recomputes a forward in backward. is_method: has a `self`.
    """

    code: CodeType
    is_lasting: bool
    checkpoints: bool
    part: str | None
    part_in_backward: str | None
    is_method: bool

    @staticmethod
    def of(frame: FrameType) -> "_Code":
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        known = STEP_PARTS.get(module)
        part = _of_another(module, code) if known is None else known.part
        return _Code(
            code,
            known is not None and code.co_qualname in known.lasting,
            module == checkpoint.__name__,
            part,
            None if part in _CALL_BACKWARD else part,
            code.co_varnames[:1] == ("self",),
        )


def _of_another(module: str, code: CodeType) -> str | None:
    """The part of a step that a function of another package is, as far as that is known."""
    of_torch = next((part for name, part in _OF_TORCH.items() if f"{module}.".startswith(f"{name}.")), None)
    return of_torch or ("rotary" if "rotary" in code.co_name else None)


def _own_self(frame: FrameType) -> Any:
    """`self` in a method's frame. Up to Python 3.12 a frame keeps what it was asked for, a copy of its variables, which
    would keep tensors alive that the method has released, and they would be counted."""
    variables = frame.f_locals
    owner = variables.get("self")
    if sys.version_info < (3, 13):
        variables.clear()
    return owner


class Parts:
    """Finds the place of the operator that is being called.

    Forward: the innermost frame of the call stack whose module is a part of a step by `moe.util.step_parts`, or is
    FSDP's or an optimizer's, or whose `self` is one of the model's modules. Backward of operators: as in the forward
    that made the node of the graph.

    Args:
        until: code of the function that runs the step: frames outside of it say nothing of a step, and are not looked
            at.
    """

    def __init__(self, model: Any, until: CodeType | None = None):
        self.until = until
        self.paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
        layers = decoder_layers(model)
        self.layer_paths = {self.paths[layer]: number for number, layer in enumerate(layers)}
        self.layers = set(layers)
        self.routers = router_prefixes(model)
        self.blocks = {self.paths[layer].rpartition(".")[0] for layer in moe_layers(model)}
        self.of_node: dict[int, StepPlace] = {}
        self.told: dict[int, _Code] = {}
        self.of_module: dict[nn.Module, tuple[int | None, str | None]] = {}

    def here(self) -> StepPlace:
        """The place of the operator whose `__torch_dispatch__` has called this."""
        node = _current_autograd_node()
        place = self._of_frames(sys._getframe(2), in_backward=node is not None)
        if node is None:
            # the node that an operator's forward has made is the newest one; those after it may have made none
            self.of_node.setdefault(_get_sequence_nr() - 1, place)
        # no backward goes through what is recomputed, whose nodes another thread may number, from 0 again
        elif not place.is_recomputed:
            of_node = self.of_node.get(node._sequence_nr(), StepPlace("other", None))
            if place.part is not None:
                # the backward of our own functions, which no module calls
                return StepPlace(place.part, of_node.layer) if place.layer is None else place
            return StepPlace("gradients added up", None) if "AccumulateGrad" in node.name() else of_node
        return StepPlace("other", place.layer, place.is_recomputed) if place.part is None else place

    def _of_frames(self, frame: FrameType | None, in_backward: bool) -> StepPlace:
        part: str | None = None
        layer: int | None = None
        while frame is not None and frame.f_code is not self.until:
            code = self.told.get(id(frame.f_code)) or self._told_by(frame)
            if code.is_lasting:
                return StepPlace(LASTING, None)
            if in_backward and code.checkpoints:
                return StepPlace(part or "other", layer, is_recomputed=True)
            if part is None:
                part = code.part_in_backward if in_backward else code.part
            if layer is None and code.is_method:
                owner = _own_self(frame)
                if isinstance(owner, nn.Module) and owner in self.paths:
                    layer, of_module = self._told_by_module(owner)
                    part = part or of_module
            frame = frame.f_back
        return StepPlace(part, layer)

    def _told_by(self, frame: FrameType) -> "_Code":
        """What is known of a frame's function, found once per function, as a step calls few of them very often."""
        return self.told.setdefault(id(frame.f_code), _Code.of(frame))

    def _told_by_module(self, module: nn.Module) -> tuple[int | None, str | None]:
        """Its layer, and its part of a step."""
        if module not in self.of_module:
            path = self.paths[module]
            self.of_module[module] = self._layer_of(path), self._part_of(module, path)
        return self.of_module[module]

    def _layer_of(self, path: str) -> int | None:
        names = path.split(".")
        return next(
            (n for i in range(len(names)) if (n := self.layer_paths.get(".".join(names[: i + 1]))) is not None), None
        )

    def _part_of(self, module: nn.Module, path: str) -> str | None:
        kind = type(module).__name__
        if "Norm" in kind:
            return "norms"
        if "Rotary" in kind:
            return "rotary"
        if isinstance(module, nn.Embedding):
            return "embedding"
        if module in self.layers:
            return "residuals"
        if isinstance(module, DMoE) or f"{path}.".startswith(self.routers):
            return "router"
        if re.search("attn|attention", path, re.IGNORECASE):
            return "attention projections" if isinstance(module, nn.Linear) else "attention"
        if path in self.blocks:
            return "router"
        if isinstance(module, nn.Linear):
            return "dense and shared MLPs"
        return "dense and shared MLPs" if self._layer_of(path) is not None else None

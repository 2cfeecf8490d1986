"""Which part of a step asks for an operator: told by the code that calls it, or by what its forward was part of."""

import re
import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from moe import DroplessExperts, decoder_layers, moe_layers, router_prefixes

_BY_FILE = {
    "/moe/permute.py": "permute, combine",
    "/moe/permute_triton.py": "permute, combine",
    "/moe/dispatch.py": "dispatch",
    "/moe/swiglu.py": "experts' activation",
    "/moe/swiglu_triton.py": "experts' activation",
    "/moe/activation.py": "experts' activation",
    "/moe/fp8.py": "expert GEMMs",
    "/moe/fp8_triton.py": "expert GEMMs",
    "/moe/grouped.py": "expert GEMMs",
    "/moe/products.py": "expert GEMMs",
    "/moe/kernels.py": "expert GEMMs",
    "/moe/megablocks.py": "expert GEMMs",
    "/moe/experts.py": "expert GEMMs",
    "/moe/quantised.py": "dequantization",
    "/moe/widen_triton.py": "dequantization",
    "/moe/adapters.py": "adapters",
    "/moe/routing.py": "router",
    "/moe/losses.py": "router",
    "/moe/layer.py": "router",
    "/training/head.py": "LM head, loss",
    "/training/low_bit.py": "optimizer step",
    "/training/low_bit_triton.py": "optimizer step",
    "/training/muon.py": "optimizer step",
    "/training/balance.py": "optimizer step",
    "/torch/optim/": "optimizer step",
    "/sharding/clipping.py": "clipping",
    "/torch/distributed/fsdp/": "FSDP",
    "/training/step.py": "the step",
    "/training/routing.py": "router",
}
LASTING = "lasting"
_NO_PART = ("_init_group", "_no_moments", "zeros_by_rows", "_propagate_tensor_meta_non_cached")
"""Functions that make what lasts from the first step on, or that find out shapes alone: no part of a step."""


@dataclass(frozen=True)
class Place:
    """part: of a step, None for what is no part of any. layer: number of the decoder layer, None outside of them.
    is_recomputed: asked for by activation checkpointing."""

    part: str | None
    layer: int | None
    is_recomputed: bool = False


@dataclass(frozen=True)
class _Code:
    """What a function's name and file tell of the operators that it calls.

    is_no_part: of a step. checkpoints: whether in backward it computes a forward again. is_method: has a `self`.
    """

    is_no_part: bool
    checkpoints: bool
    part: str | None
    part_in_backward: str | None
    is_method: bool

    @staticmethod
    def of(code: CodeType) -> "_Code":
        by_name = "rotary" if "rotary" in code.co_name else None
        part = next((name for file, name in _BY_FILE.items() if file in code.co_filename), by_name)
        return _Code(
            code.co_name in _NO_PART,
            code.co_filename.endswith("/torch/utils/checkpoint.py"),
            part,
            by_name if code.co_filename.endswith("/training/step.py") else part,
            code.co_varnames[:1] == ("self",),
        )


def _own_self(frame: FrameType) -> Any:
    """`self` in a method's frame. Up to Python 3.12 a frame keeps what it was asked for, a copy of its variables, in
    which tensors would live on that the method has let go of, and be counted."""
    variables = frame.f_locals
    owner = variables.get("self")
    if sys.version_info < (3, 13):
        variables.clear()
    return owner


class Parts:
    """Finds the place of the operator that is being called.

    Forward: the innermost frame of the call stack that is in one of our files, FSDP's or an optimizer's, or whose
    `self` is one of the model's modules. Backward of operators: as in the forward that made the node of the graph.
    """

    def __init__(self, model: Any):
        self.paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
        layers = decoder_layers(model)
        self.layer_paths = {self.paths[layer]: number for number, layer in enumerate(layers)}
        self.layers = set(layers)
        self.routers = router_prefixes(model)
        self.blocks = {self.paths[layer].rpartition(".")[0] for layer in moe_layers(model)}
        self.of_node: dict[int, Place] = {}
        self.told: dict[CodeType, _Code] = {}
        self.of_module: dict[nn.Module, tuple[int | None, str | None]] = {}

    def here(self) -> Place:
        """Of the operator whose `__torch_dispatch__` has called this."""
        node = torch._C._current_autograd_node()
        place = self._of_frames(sys._getframe(2), in_backward=node is not None)
        if node is None:
            # the node that an operator's forward has made is the newest one; those after it may have made none
            self.of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
        # no backward goes through what is recomputed, whose nodes another thread may number, from 0 again
        elif not place.is_recomputed:
            of_node = self.of_node.get(node._sequence_nr(), Place("other", None))
            if place.part is not None:
                # the backward of our own functions, which no module calls
                return Place(place.part, of_node.layer) if place.layer is None else place
            return Place("gradients added up", None) if "AccumulateGrad" in node.name() else of_node
        return Place("other", place.layer, place.is_recomputed) if place.part is None else place

    def _of_frames(self, frame: FrameType | None, in_backward: bool) -> Place:
        part: str | None = None
        layer: int | None = None
        while frame is not None:
            code = self.told.get(frame.f_code) or self._told_by(frame.f_code)
            if code.is_no_part:
                return Place(LASTING, None)
            if in_backward and code.checkpoints:
                return Place(part or "other", layer, is_recomputed=True)
            if part is None:
                part = code.part_in_backward if in_backward else code.part
            if layer is None and code.is_method:
                owner = _own_self(frame)
                if isinstance(owner, nn.Module) and owner in self.paths:
                    layer, of_module = self._told_by_module(owner)
                    part = part or of_module
            frame = frame.f_back
        return Place(part, layer)

    def _told_by(self, code: CodeType) -> "_Code":
        """Once for each function, as a step calls few of them very often."""
        return self.told.setdefault(code, _Code.of(code))

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
        if isinstance(module, DroplessExperts) or f"{path}.".startswith(self.routers):
            return "router"
        if re.search("attn|attention", path, re.IGNORECASE):
            return "attention projections" if isinstance(module, nn.Linear) else "attention"
        if path in self.blocks:
            return "router"
        if isinstance(module, nn.Linear):
            return "dense and shared MLPs"
        return "dense and shared MLPs" if self._layer_of(path) is not None else None

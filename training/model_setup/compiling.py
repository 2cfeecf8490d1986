"""Regional compilation: what lies between the collectives, by `torch.compile`, and what became of it."""

import os
import shutil
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ...moe.experts.layer import DMoE
from ...moe.experts.model_layers import decoder_layers
from ...moe.torch_private import calculate_time_spent, counters
from ...moe.util.change_order import begin_change
from ...moe.util.errors import ExpertMeshError
from ..attention.by_sample import BySample
from ..attention.complete_sequences import CompleteSequences
from ..attention.packed_attention import CP_PREFIX, OWN


def compile_layers(model: Any) -> str:
    """Have attention, norms and what else of every layer holds no experts compiled when they first run, in place;
    names of parameters stay.

    All layers have the same code, and share its graphs. The sizes of a batch are symbols there: only a size of 1, or
    one that happens to equal a width of the model, is compiled for itself. What holds collectives, or waits for the
    device, stays as it is: the MoE block, FSDP's hooks, context-parallel attention and what is given complete
    sequences there (`training.attention.complete_sequences`), what tensor parallelism divides. So does our own
    attention (`training.attention.packed_attention`), and what runs sample by sample (`training.attention.by_sample`),
    which would be compiled for every way of packing a sequence.

    Returns:
        A line for a run's first ones: what is compiled.

    Raises:
        ExpertMeshError: there is no C++ compiler, which code for a CPU and triton's launchers of GPU kernels need.
    """
    begin_change(model, "compiling")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ExpertMeshError(
            f"--compile needs a C++ compiler, but {compiler} was not found; install it, set the "
            "environment variable CXX to another one, or leave --compile out"
        )
    layer: Any
    attention = model.config._attn_implementation
    # ranks that divide a layer share its sequences too
    stays = attention == OWN or attention.startswith(CP_PREFIX)
    compiled: Counter[str] = Counter()
    for layer in decoder_layers(model):
        for part in layer.children():
            if any(isinstance(module.forward, (BySample, CompleteSequences)) for module in part.modules()):
                continue
            has_experts = any(isinstance(module, DMoE) for module in part.modules())
            # of a layer's parts without experts, attention and dense MLPs alone have parts of their own
            if not has_experts and not (stays and any(part.children())):
                part.compile(dynamic=True)
                compiled[type(part).__name__] += 1
    return f"torch.compile: {', '.join(f'{number} {name}' for name, number in compiled.items())}"


@dataclass(frozen=True)
class Compilation:
    """What torch.compile has done so far in this process: graphs, places where it had to break one off, seconds."""

    graphs: int
    breaks: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.graphs} graphs in {self.seconds:.0f} s, {self.breaks} graph breaks"

    def is_more_than(self, earlier: "Compilation") -> bool:
        return (self.graphs, self.breaks) != (earlier.graphs, earlier.breaks)


def compilation() -> Compilation:
    return Compilation(
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
        calculate_time_spent().get("total_wall_time", 0.0),
    )

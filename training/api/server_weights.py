"""trl's `VLLMGeneration` on an engine: vLLM, as a server or in the ranks' own processes, generates with its weights."""

from typing import Any

from ...moe.util.errors import ExpertMeshError
from ..engine.engine import Engine


def send_weights_of(engine: Engine, generation: Any) -> None:
    """Have a `VLLMGeneration` send the tensors of an engine, with adapters merged, in place of its model's parameters.
    All ranks call it together, once.

    Raises:
        ExpertMeshError: the adapters cannot be merged, or trl does it in a way that is not known here.
    """
    missing = [name for name in ("_iter_named_params", "_weight_metadata") if not hasattr(generation, name)]
    if missing:
        raise ExpertMeshError(f"use_vllm: trl's VLLMGeneration has no {missing[0]}, as trl 1.16 has; install that")
    # a server's weights come from rank 0; in the ranks' own processes each loads its own
    stream = engine.tensors(engine.config.adapter != "none", all_ranks=generation.mode == "colocate")
    generation._iter_named_params = stream.__iter__
    # else it would have all sent once to look at them
    generation._weight_metadata = [
        (name, str(dtype)[len("torch.") :], [*shape]) for name, dtype, shape in stream.metadata()
    ]

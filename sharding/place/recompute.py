"""Activation checkpointing: what a decoder layer keeps from forward for its backward, and what it recomputes."""

import warnings
from collections.abc import Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from expertmesh.moe import ExpertMeshError, current_forward, moe_layers
from expertmesh.moe.base.declared import StepPart
from expertmesh.moe.experts.replay import KEEPER, Keeper
from expertmesh.moe.forward import Forward
from expertmesh.sharding.place.choices import Checkpointing

STEP_PART: StepPart = None

_ROUTING = frozenset({"aten::topk"})
"""Routers scale the weights that topk gave them where they lie: what is kept must be a copy. It is small."""
_ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "expertmesh::flash_attention",
    }
)


def checkpoint_layers(model: Any, mode: Checkpointing) -> None:
    """Have every decoder layer of a Hugging Face model recomputed in backward (non-reentrant), in place.

    `full` keeps a layer's input alone, in a model of width D that is D elements per token. `selective` also keeps what
    is expensive to repeat: the rows received in the two all-to-alls (2·K·D per token with K experts), attention's
    output (D; not with dropout, nor compiled), the router's choice and the exchanged counts. Backward then sends no row
    twice, does not recompute each expert's last GEMM, whose results would be sent, does not wait for the device to tell
    counts, and has the forward's routing by construction. With Mixtral's K = 2 that is 6·D per token and layer; on one
    ep rank, without an all-to-all, 2·D. Without checkpointing it is 27·D, or more where experts are wider than
    Mixtral's 3.5·D.
    """
    if mode == "none":
        return
    # preserve_rng_state, torch's default, makes jitter and dropout repeat, and with them the routing
    arguments: dict[str, Any] = {"use_reentrant": False, "context_fn": _full_contexts}
    if mode == "selective":
        # Dropout's random numbers must be drawn again, or whatever draws after it would get them; and compiled code is
        # free to write over the memory of what it has computed.
        is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
        keeps_attention = not getattr(model.config.get_text_config(), "attention_dropout", 0) and not is_compiled
        kept = _ROUTING | _ATTENTION if keeps_attention else _ROUTING
        arguments["context_fn"] = partial(_selective_contexts, kept)
    with warnings.catch_warnings():
        # its name in the earliest transformers that is supported; later ones warn that they have another for it
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def keep_products(model: Any, num_layers: int) -> None:
    """Have selective checkpointing also keep the outputs of each expert's first GEMMs, in the last `num_layers` MoE
    layers, in place: 2·K·F elements per token with experts of width F, for two GEMMs fewer in backward.

    Raises:
        ExpertMeshError: the model has fewer MoE layers, or its experts' kernel is not made for it.
    """
    layers = list(moe_layers(model))
    if num_layers > len(layers):
        raise ExpertMeshError(
            f"--keep-expert-products {num_layers}: this model has {len(layers)} MoE layers; use at most {len(layers)}"
        )
    for layer in layers[len(layers) - num_layers :]:
        if layer.mlp.kernel.product is None:
            raise ExpertMeshError(
                f"--keep-expert-products {num_layers}: --expert-kernel {layer.mlp.kernel.name} recomputes them; use "
                "torch-grouped or loop"
            )
        layer.mlp.keeps_products = True


def _full_contexts() -> tuple[AbstractContextManager[Any], Forward]:
    """Context managers for a forward of one layer, and for its recomputation: that runs, on a GPU, in a thread of
    autograd's, where no forward would be current, and anywhere when another may have been begun since."""
    return nullcontext(), _again()


def _again() -> Forward:
    forward = current_forward()
    assert forward is not None, "a checkpointed layer is called within a forward"
    return forward.again()


def _selective_contexts(operators: Set[str]) -> tuple["_Keep", "_Reuse"]:
    """As `_full_contexts`.

    Not torch's `create_selective_checkpoint_contexts`, which demands (since 2.13) that recomputation calls no operator
    more often than the forward has: those of FSDP's hooks on the experts, it may.
    """
    first = Keeper(is_replaying=False)
    return _Keep(operators, first), _Reuse(operators, Keeper(is_replaying=True, results=first.results), _again())


class _Keep(TorchDispatchMode):
    """Keeps the results of some operators, and what a forward itself asks to have kept (see `moe.experts.replay`)."""

    def __init__(self, operators: Set[str], keeper: Keeper):
        super().__init__()
        self.operators = operators
        self.keeper = keeper

    def __enter__(self) -> Self:
        self.token = KEEPER.set(self.keeper)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        KEEPER.reset(self.token)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled code stays compiled in this mode, instead of being run operator by operator."""
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operator(*args, **(kwargs or {}))
        if operator.name() in self.operators:
            is_changed = operator.name() in _ROUTING
            self.keeper.keep(operator.name(), tree_map_only(Tensor, Tensor.clone, found) if is_changed else found)
        return found


class _Reuse(_Keep):
    """Returns what was kept, instead of calling those operators. What only they would have read is not computed (see
    `moe.experts.replay`)."""

    def __init__(self, operators: Set[str], keeper: Keeper, again: Forward):
        super().__init__(operators, keeper)
        self.again = again

    def __enter__(self) -> Self:
        self.again.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.again.__exit__(*error)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.name() in self.operators:
            return self.keeper.take(operator.name())
        return operator(*args, **(kwargs or {}))

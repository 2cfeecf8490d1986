"""Activation checkpointing: what a decoder layer keeps from forward for its backward, and what it recomputes."""

import warnings
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Self

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ...moe.experts.forward import Forward, current_forward
from ...moe.experts.layer import DMoE
from ...moe.experts.model_facts import facts_of
from ...moe.experts.model_layers import decoder_layers, moe_layers
from ...moe.kernels.kernel_entries import kernels_that
from ...moe.transformers_private import calls, replacing_attention
from ...moe.util.change_order import begin_change
from ...moe.util.errors import ExpertMeshError
from ...moe.util.recompute_cache import KEEPER, Keeper
from .choices import Checkpointing

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
    begin_change(model, "checkpointing")
    if mode == "none":
        return
    # the random state is set back so that jitter and dropout repeat, and with them the routing; which takes time
    draws = _draws(model)
    arguments: dict[str, Any] = {"use_reentrant": False, "context_fn": _full_contexts, "preserve_rng_state": draws}
    if mode == "selective":
        # Dropout's random numbers must be drawn again, or whatever draws after it would get them; and compiled code is
        # free to write over the memory of what it has computed.
        is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
        keeps_attention = not getattr(model.config.get_text_config(), "attention_dropout", 0) and not is_compiled
        kept = _ROUTING | _ATTENTION if keeps_attention else _ROUTING
        arguments["context_fn"] = partial(_selective_contexts, kept)
        for layer in decoder_layers(model):
            watch_choices(layer)
    with warnings.catch_warnings():
        # its name in the earliest transformers that is supported; later ones warn that they have another for it
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def _draws(model: Any) -> bool:
    """Whether its layers, or its adapters, draw random numbers in training."""
    low_rank = (getattr(module, "low_rank", None) for module in model.modules())
    return facts_of(model).draws or any(adapter is not None and adapter.dropout > 0 for adapter in low_rank)


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
        entry = layer.mlp.kernel
        if not entry.keeps_products:
            raise ExpertMeshError(
                f"--keep-expert-products {num_layers}: --expert-kernel {entry.name} recomputes them; use "
                f"{kernels_that(lambda entry: entry.keeps_products)}"
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


def _selective_contexts(operators: Set[str]) -> tuple["_Keeping", "_Keeping"]:
    """As `_full_contexts`.

    Not torch's `create_selective_checkpoint_contexts`, which demands (since 2.13) that recomputation calls no operator
    more often than the forward has: those of FSDP's hooks on the experts, it may.
    """
    first = Keeper(is_replaying=False)
    return _Keeping(operators, first), _Keeping(operators, Keeper(is_replaying=True, results=first.results), _again())


class _Keeping:
    """Current in one call of a layer: results of some operators are kept, and what a forward itself asks to have kept
    (see `recompute_cache`); or, in its recomputation, returned instead of calling these operators. What only they
    would have read is not computed.

    Operators are looked at only where those in question may be called, as each then takes Python's time, several times
    what it takes else: in attention functions (`_in_attention`), and in modules that choose (`watch_choices`).
    """

    def __init__(self, operators: Set[str], keeper: Keeper, again: Forward | None = None):
        self.watch = _Watch(operators, keeper)
        self.keeper = keeper
        self.again = again
        self.keeps_attention = not operators.isdisjoint(_ATTENTION)
        self.depth = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self.again is not None:
                stack.enter_context(self.again)
            stack.callback(KEEPER.reset, KEEPER.set(self.keeper))
            stack.callback(_CURRENT.reset, _CURRENT.set(self))
            if self.keeps_attention:
                stack.enter_context(replacing_attention(self._in_attention))
            # of choices whose module did not come to its end: recomputation ends with an exception
            stack.callback(self.stop_watching)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def _in_attention(self, name: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        def attention(*args: Any, **kwargs: Any) -> Any:
            self.enter_watch()
            try:
                return function(*args, **kwargs)
            finally:
                self.leave_watch()

        return attention

    def enter_watch(self) -> None:
        """Look at operators until as many calls of `leave_watch`."""
        if self.depth == 0:
            self.watch.__enter__()
        self.depth += 1

    def leave_watch(self) -> None:
        if self.depth == 1:
            self.watch.__exit__(None, None, None)
        self.depth = max(0, self.depth - 1)

    def stop_watching(self) -> None:
        if self.depth:
            self.watch.__exit__(None, None, None)
        self.depth = 0


_CURRENT: ContextVar[_Keeping | None] = ContextVar("_CURRENT", default=None)


def watch_choices(layer: nn.Module) -> None:
    """Have selective checkpointing keep what a layer's modules choose, in place: look at the operators of those whose
    own code calls `topk`, up to where experts begin, which have been chosen by then."""
    roots = [module for module in layer.modules() if module._compiled_call_impl is not None]
    compiled = {part for root in roots for part in root.modules()}
    for module in layer.modules():
        if isinstance(module, DMoE):
            module.register_forward_pre_hook(_stop_watching)
        elif module not in compiled and calls(type(module), "topk"):
            module.register_forward_pre_hook(_enter_watch)
            module.register_forward_hook(_leave_watch)


def _enter_watch(*_: Any) -> None:
    if (keeping := _CURRENT.get()) is not None:
        keeping.enter_watch()


def _leave_watch(*_: Any) -> None:
    if (keeping := _CURRENT.get()) is not None:
        keeping.leave_watch()


def _stop_watching(*_: Any) -> None:
    if (keeping := _CURRENT.get()) is not None:
        keeping.stop_watching()


class _Watch(TorchDispatchMode):
    def __init__(self, operators: Set[str], keeper: Keeper):
        super().__init__()
        self.operators = operators
        self.keeper = keeper

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.name()
        if name not in self.operators:
            return operator(*args, **(kwargs or {}))
        if self.keeper.is_replaying:
            return self.keeper.take(name)
        found = operator(*args, **(kwargs or {}))
        self.keeper.keep(name, tree_map_only(Tensor, Tensor.clone, found) if name in _ROUTING else found)
        return found

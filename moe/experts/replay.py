"""Routing replay: the experts that an earlier forward, or a server, has chosen, used again for the same tokens.

Reinforcement learning compares a token's probability under the policy with that under an older one. Where a router has
moved a little, tokens go to other experts, and the ratio jumps. With the experts of the older policy's forward (R2,
arXiv 2507.18071), or of the server that generated (R3, arXiv 2510.11370), the choice stays, while the chosen experts'
weights are the router's own of now, with their gradient. Families choose by `topk`: in a block that holds experts that
one result is replaced, and what is made of it stays the family's code. Experts are numbered as by that `topk`.

Shape suffixes: B sequences, S positions, T = B·S tokens, L MoE layers, E experts to choose from, G groups of them, K
experts per token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..util.change_order import begin_change
from ..util.errors import ExpertMeshError
from .forward import Forward, current_forward
from .layer import DMoE
from .model_layers import decoder_layers, moe_layers, moe_shape

ROUTED_EXPERTS = "routed_experts"
"""Their name in a batch, as vLLM, verl and prime-rl call them."""
NO_ROUTE = -1
"""In the place of each of a token's experts in a layer: the router is to choose."""
_TOP_K = (torch.topk, Tensor.topk)


class SeesChoices(TorchFunctionMode):
    """Within it, calls of `topk` are handed to `chose`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _TOP_K:
            return function(*args, **kwargs)
        k = args[1] if len(args) > 1 else kwargs["k"]
        return self.chose(args[0], k, lambda scores: function(scores, *args[1:], **kwargs))

    def chose(self, scores: Tensor, k: int, top_k: Any) -> Any:
        """What the call gives. top_k: the function called, of scores alone."""
        raise NotImplementedError


class _Choosing(SeesChoices):
    """Has a layer's choice be that of a `Forward`, or leave it there."""

    def __init__(self, forward: Forward, experts: DMoE, number: int):
        super().__init__()
        self.forward, self.experts = forward, experts
        routes_BSLK = forward.routed_experts_BSLK
        self.routes_TK = None if routes_BSLK is None else routes_BSLK[..., number, :].flatten(0, 1).long()

    def chose(self, scores: Tensor, k: int, top_k: Any) -> Any:
        routes_TK, num_choices, columns = self.routes_TK, self.experts.num_choices, scores.shape[-1]
        assert num_choices
        if columns == num_choices and k == self.experts.shape.top_k:
            own = top_k(scores)
            chosen = own.indices
            if routes_TK is not None:
                routes = routes_TK.view_as(chosen)
                chosen = torch.where(routes < 0, chosen, routes)
                self._count(own.indices, chosen, routes >= 0)
            if self.forward.records_choices:
                self.forward.chosen_TK[self.experts] = chosen.flatten(0, -2)
            return own if routes_TK is None else torch.return_types.topk((scores.gather(-1, chosen), chosen))
        if routes_TK is not None and scores.shape == (len(routes_TK), columns) and num_choices % columns == 0:
            # groups of experts: those of the replayed ones first, or their scores would be masked
            groups_TK = routes_TK.clamp(min=0) // (num_choices // columns)
            is_replayed_TG = torch.zeros(len(routes_TK), columns, dtype=torch.bool, device=scores.device)
            is_replayed_TG = is_replayed_TG.scatter(1, groups_TK, routes_TK >= 0)
            return top_k(scores.masked_fill(is_replayed_TG, torch.inf))
        return top_k(scores)

    def _count(self, own: Tensor, chosen: Tensor, is_replayed: Tensor) -> None:
        if not self.forward.is_again:
            is_other = ~(own.unsqueeze(-1) == chosen.unsqueeze(-2)).any(dim=-1)
            self.forward.replayed_2[self.experts] = torch.stack([(is_other & is_replayed).sum(), is_replayed.sum()])


class _Block:
    """The block around a layer's experts, which chooses them as its `Forward` says. No `nn.Module`, see `Beside`."""

    def __init__(self, block: Any, experts: DMoE, number: int):
        self.experts, self.number = experts, number
        self._forward = block.forward
        block.forward = self._run

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        forward = current_forward()
        if forward is None or (forward.routed_experts_BSLK is None and not forward.records_choices):
            return self._forward(*args, **kwargs)
        with _Choosing(forward, self.experts, self.number):
            return self._forward(*args, **kwargs)


def take_routes(model: nn.Module) -> None:
    """Have blocks with experts choose as the current `Forward` says, and calls of the model take what `replaying` and
    `recording` say where they have a `Forward` of their own; in place."""
    begin_change(model, "experts")
    paths = {module: path for path, module in model.named_modules()}
    for number, experts in enumerate(moe_layers(model)):
        if experts.num_choices:
            _Block(model.get_submodule(paths[experts].rpartition(".")[0]), experts, number)
    model.register_forward_pre_hook(_give)
    model.register_forward_hook(_take, prepend=True)  # before the forward ends


@dataclass
class _Given:
    """routed_experts_BSLK: of sequences that models are called with, one call after the other. begin: of the next."""

    routed_experts_BSLK: Tensor
    begin: int = 0


_GIVEN: ContextVar[_Given | None] = ContextVar("_GIVEN", default=None)
_FOUND: ContextVar[list[Tensor] | None] = ContextVar("_FOUND", default=None)


@contextmanager
def replaying(routed_experts_BSLK: Tensor | None) -> Iterator[None]:
    """Within it, calls of a model use these experts, as `RouteReader.read` gives them, for their sequences in turn."""
    token = _GIVEN.set(None if routed_experts_BSLK is None else _Given(routed_experts_BSLK))
    try:
        yield
    finally:
        _GIVEN.reset(token)


@contextmanager
def recording() -> Iterator[list[Tensor]]:
    """Within it, the experts of each call of a model are added to the list: (T, L, K), see `used_experts`."""
    found: list[Tensor] = []
    token = _FOUND.set(found)
    try:
        yield found
    finally:
        _FOUND.reset(token)


def _give(model: nn.Module, args: Any) -> None:
    forward, given = current_forward(), _GIVEN.get()
    assert forward is not None, "`give_forwards` comes before"
    forward.records_choices |= _FOUND.get() is not None
    if given is not None:
        assert forward.shape_BS is not None
        begin, given.begin = given.begin, given.begin + forward.shape_BS[0]
        forward.routed_experts_BSLK = given.routed_experts_BSLK[begin : given.begin]
        assert forward.routed_experts_BSLK.shape[:2] == forward.shape_BS, "experts of other sequences"


def _take(model: nn.Module, args: Any, output: Any) -> None:
    forward, found = current_forward(), _FOUND.get()
    if forward is not None and found is not None:
        found.append(used_experts(model, forward))


def used_experts(model: nn.Module, forward: Forward) -> Tensor:
    """The experts that a forward has used, (T, L, K) int16; NO_ROUTE for padding, and for layers that have no choice or
    are of other stages of a pipeline."""
    assert forward.shape_BS is not None, "recorded before the forward"
    shape = (forward.shape_BS.numel(), moe_shape(model).top_k)
    none_TK = torch.full(shape, NO_ROUTE, dtype=torch.int64, device=forward.device)
    routes_TLK = torch.stack([forward.chosen_TK.get(layer, none_TK) for layer in moe_layers(model)], dim=1)
    if forward.is_token_BS is not None:
        routes_TLK = routes_TLK.masked_fill(~forward.is_token_BS.view(-1, 1, 1), NO_ROUTE)
    return routes_TLK.to(torch.int16)


@dataclass(frozen=True)
class RouteReader:
    """Reads `routed_experts` of batches.

    num_choices: of each MoE layer. top_k: experts per token. places: of each MoE layer, its number among the
    `num_layers` decoder layers. problem: why the model cannot replay them; None: it can.
    """

    num_choices: tuple[int | None, ...]
    top_k: int
    places: tuple[int, ...]
    num_layers: int
    problem: str | None = None

    def check(self) -> None:
        """
        Raises:
            ExpertMeshError: the model cannot replay routes.
        """
        if self.problem is not None:
            raise ExpertMeshError(self.problem)

    def read(self, given: Any, is_token_BS: Tensor) -> Tensor:
        """The experts of a batch, (B, S, L, K) int16 in host memory, NO_ROUTE where there is none, and for padding.

        Args:
            given: (B, S, MoE layers or decoder layers, K) integers; those of decoder layers without experts may be
                anything, as vLLM's, which are 0.
            is_token_BS: False for padding, where `given` may have anything.

        Raises:
            ExpertMeshError: it is something else, or the model cannot replay it.
        """
        self.check()
        try:
            routes = torch.as_tensor(given).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ExpertMeshError(f"{ROUTED_EXPERTS} of a batch is not a tensor: {error}") from error
        layers = dict.fromkeys((len(self.num_choices), self.num_layers))
        shapes = [(*is_token_BS.shape, number, self.top_k) for number in layers]
        is_integer = not (routes.is_floating_point() or routes.is_complex() or routes.dtype == torch.bool)
        if tuple(routes.shape) not in shapes or not is_integer:
            raise ExpertMeshError(
                f"{ROUTED_EXPERTS} of a batch is {routes.dtype} of shape {tuple(routes.shape)}; it must be integers of "
                f"shape {' or '.join(map(str, shapes))}: sequences, positions, MoE layers or all layers, experts per "
                f"token; {NO_ROUTE} where a position has none, such as the last one of a server's"
            )
        routes = routes.long()
        if routes.shape[2] != len(self.num_choices):
            routes = routes[:, :, list(self.places)]
        routes = routes.masked_fill(~is_token_BS[..., None, None], NO_ROUTE)
        for layer, number in enumerate(self.num_choices):
            self._check_layer(routes[:, :, layer], layer, number)
        return routes.to(torch.int16)

    def _check_layer(self, routes_BSK: Tensor, layer: int, num_choices: int | None) -> None:
        if num_choices is None:
            return  # by a table, which says the same
        sorted_BSK = routes_BSK.sort(dim=-1).values
        is_none = (routes_BSK == NO_ROUTE).all(dim=-1)
        is_outside = ((routes_BSK < 0) | (routes_BSK >= num_choices)).any(dim=-1)
        is_twice = (sorted_BSK[..., 1:] == sorted_BSK[..., :-1]).any(dim=-1)
        if bool((is_wrong := ~is_none & (is_outside | is_twice)).any()):
            row, position = is_wrong.nonzero()[0].tolist()
            raise ExpertMeshError(
                f"{ROUTED_EXPERTS} of a batch has {routes_BSK[row, position].tolist()} in sequence {row} at position "
                f"{position}, MoE layer {layer}; it must be {self.top_k} different experts, 0 to {num_choices - 1}, or "
                f"{NO_ROUTE} for each of them, where the router is to choose"
            )


def route_reader(model: nn.Module, looks_ahead: bool = False) -> RouteReader:
    """The reader of a model that was built here.

    Args:
        looks_ahead: whether its last layer is for multi-token prediction.
    """
    layers, decoders = moe_layers(model), decoder_layers(model)
    places = [n for n, decoder in enumerate(decoders) for module in decoder.modules() if isinstance(module, DMoE)]
    problem = None
    if looks_ahead:
        problem = f"{ROUTED_EXPERTS} do not go with train_mtp, whose layer no server has run; leave one of them out"
    elif any(layer.num_choices == 0 for layer in layers):
        problem = (
            f"{ROUTED_EXPERTS}: {type(model).__name__} chooses experts by other code than one topk of all scores, so "
            "its choice cannot be replayed; leave them out"
        )
    elif len(places) != len(layers):
        problem = f"{ROUTED_EXPERTS}: {type(model).__name__} has experts beside its decoder layers; leave them out"
    num_choices, top_k = tuple(layer.num_choices for layer in layers), layers[0].shape.top_k
    # a layer with experts twice has no place of its own
    num_layers = len(decoders) if len(set(places)) == len(places) else len(layers)
    return RouteReader(num_choices, top_k, tuple(places), num_layers, problem)

"""How a family's model calls its parts, seen in forwards on the meta device: nothing is computed, no memory held.

What configs name and code does in many ways shows when the model runs: how many experts each token has, which module is
the router, whether anything is done to the logits after the head, which linear layers' weights are read by other code
than the layers' own, how many tokens each layer's attention sees, and by how much the loss is raised for experts that
are loaded unevenly. How a router scores experts from its logits (softmax, sigmoid or another function; in groups of
experts or not) shows when one is run on random numbers.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..experts.layout import expert_modules
from ..experts.model_facts import Attention, ProbedFacts, SeenExperts
from ..experts.replay import SeesChoices
from ..experts.router_stats import LOG_SCORES, UNKNOWN, RouterKind
from ..torch_private import CalledDirectly
from ..util.errors import ExpertMeshError
from ..util.tensors import tensors_in
from .known_results import KnownResults, Result

_POSITIONS = 8
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution"})


def probe(model: Any) -> ProbedFacts:
    """Run a model of transformers that is on the meta device. What it keeps in fp32, and what was left out of it, is
    not found so.

    Raises:
        ExpertMeshError: it does not run, or calls its experts otherwise than as (tokens, choices, weights).
    """
    from ..transformers_private import replacing_sample_search

    positions_BS = torch.arange(_POSITIONS, device="meta").unsqueeze(0)
    random: list[Any] = []
    looked_at: list[Tensor] = []

    def note_random(operator: Any, args: Any, kwargs: Any) -> None:
        # operators with a dropout draw numbers where it is above zero
        if torch.Tag.nondeterministic_seeded in operator.tags:
            names = [argument.name for argument in operator._schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            if given.get("dropout_p", 0.0 if "dropout_p" in names else 1.0) > 0:
                random.append(operator)

    noting_choices = _noting_choices(model)
    with _on_meta(model) as calls, noting_choices as choices, _noting_reads(model) as (reads, handed, uncalled):
        # kernels that are for training alone may take weights of several layers at once
        with _BeforeOperators(note_random), _NotingWeights() as weights:
            asked = {"labels": torch.zeros_like(positions_BS), "output_router_logits": True}
            try:
                balance = weights.of_term(_run(model.train(), "", position_ids=positions_BS, **asked).loss)
            except ExpertMeshError:  # whose router gives no logits, of which its loss would be made
                balance = None
                _run(model.train(), "does not run", position_ids=positions_BS)
        with (
            _noting_calls(model) as called,
            replacing_sample_search(looked_at.append, model),
            _noting_attention() as widths,
        ):
            logits = _run(model.eval(), "does not run", position_ids=positions_BS).logits
    head = next(path for path, module in model.named_modules() if module is model.get_output_embeddings())
    experts: dict[str, SeenExperts] = {}
    kinds: dict[type, RouterKind] = {}
    for path, (x_TD, experts_TK) in calls.items():
        router, beside = _router(experts_TK, called), _beside(path, x_TD, called)
        num_choices = _num_choices(model, path, experts_TK.shape[1], choices[path])
        if router is None:
            experts[path] = SeenExperts(experts_TK.shape[1], None, 0, UNKNOWN, beside, num_choices)
            continue
        num_logits, module = called[router].output[0].shape[-1], model.get_submodule(router)
        if type(module) not in kinds:
            kinds[type(module)] = try_router(module, called[router].args, num_logits, _groups(model.config))
        kind = kinds[type(module)]
        experts[path] = SeenExperts(experts_TK.shape[1], router, num_logits, kind, beside, num_choices)
    return ProbedFacts(
        experts,
        head in called and logits is called[head].output,
        bool(looked_at),
        frozenset(reads - handed),
        frozenset(handed.keys() - (reads - handed).keys()),
        frozenset(uncalled),
        tuple(Attention(window, width) for window, width in sorted(widths.items())),
        bool(random),
        balance=balance,
    )


def unmet_by_text(model: Any) -> list[str]:
    """Paths of the outermost modules of a model of several parts that no text token passes: towers, projectors, and
    experts for other tokens than text. In decoder layers only parts with experts are said to be: of others some are
    passed only by longer texts.

    Args:
        model: of transformers, on the meta device.

    Raises:
        ExpertMeshError: it does not run on text.
    """
    if model.config.get_text_config() is model.config:
        return []
    used: dict[int, Tensor] = {}

    def note_tensors(operator: Any, args: Any, kwargs: Any) -> None:
        used.update((id(tensor), tensor) for tensor in tensors_in(args, kwargs))

    with _on_meta(model) as calls, _BeforeOperators(note_tensors), _noting_calls(model) as called:
        _run(model.eval(), "does not run on text alone")
    owners = {
        path
        for path, module in model.named_modules()
        if any(id(tensor) in used for tensor in (*module._parameters.values(), *module._buffers.values()))
    }
    met = _with_parents({*called, *owners})
    with_experts, with_layers = _with_parents(path for path, _ in expert_modules(model)), _with_parents(calls)

    def unmet(path: str, module: nn.Module, in_layer: bool) -> Iterator[str]:
        has_tensors = any(True for _ in (*module.parameters(), *module.buffers()))
        if path not in met and has_tensors and (not in_layer or path in with_experts):
            yield path
        elif path in met:
            in_layer = in_layer or (isinstance(module, nn.ModuleList) and path in with_layers)
            for name, child in module.named_children():
                yield from unmet(f"{path}.{name}".removeprefix("."), child, in_layer)

    return list(unmet("", model, in_layer=False))


def _with_parents(paths: Iterable[str]) -> set[str]:
    """With the paths of all modules that hold them, the model's own among them."""
    parts = [path.split(".") for path in paths]
    return {"", *(".".join(names[: number + 1]) for names in parts for number in range(len(names)))}


def computes_as_held(model: Any) -> bool:
    """Whether a model of transformers that is on the meta device computes in the dtypes that its parameters have."""

    def refuse_mixed(operator: Any, args: Any, kwargs: Any) -> None:
        # as every device but meta does
        dtypes = {factor.dtype for factor in args if isinstance(factor, Tensor)}
        if operator.name() in _PRODUCTS and len(dtypes) > 1:
            raise TypeError(f"{operator.name()} of {dtypes}")

    with _on_meta(model), _BeforeOperators(refuse_mixed):
        try:
            _run(model.eval(), "does not run")
        except ExpertMeshError:
            # any other error is reported by `probe`, for the model that is trained
            return False
    return True


@contextmanager
def _on_meta(model: Any) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Within it a model of transformers runs on the meta device, and experts compute nothing. Yields the tokens (T, D)
    and choices (T, K) that they are called with, by path."""
    calls: dict[str, tuple[Tensor, Tensor]] = {}

    def called_with(path: str, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs or len(args) != 3 or not all(isinstance(x, Tensor) and x.dim() == 2 for x in args):
            raise ExpertMeshError(
                f"transformers' {type(model).__name__} calls its experts in a way that is not supported"
            )
        calls[path] = args[:2]
        return torch.empty_like(args[0])

    with answering_host(), leaving_no_trace(model):
        for path, experts in expert_modules(model):
            experts.forward = partial(called_with, path)
        yield calls


def _run(model: Any, what: str, **arguments: Any) -> Any:
    tokens_BS = torch.zeros(1, _POSITIONS, dtype=torch.long, device="meta")
    try:
        return model(input_ids=tokens_BS, use_cache=False, **arguments)
    except ExpertMeshError:
        raise
    except Exception as error:
        name = type(model).__name__
        raise ExpertMeshError(f"transformers' {name} {what}: {type(error).__name__}: {error}") from error


class _BeforeOperators(CalledDirectly, TorchDispatchMode):
    """Calls `look(operator, args, kwargs)` before each operator."""

    def __init__(self, look: Callable[[Any, Any, Any], None]):
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look(operator, args, kwargs or {})
        return operator(*args, **(kwargs or {}))


class _NotingWeights(CalledDirectly, TorchDispatchMode):
    """Notes of sums of two scalars by which number one of them was multiplied."""

    def __init__(self) -> None:
        super().__init__()
        # live tensors have distinct ids
        self.products: dict[int, tuple[Tensor, float]] = {}
        self.sums: dict[int, tuple[Tensor, float]] = {}

    def of_term(self, total: Tensor) -> float | None:
        """The weight of the last term that was added to this sum with one; None: there is none."""
        return self.sums[id(total)][1] if id(total) in self.sums else None

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.dim():
            name = operator.overloadpacket._qualified_op_name
            if name == "aten::mul" and isinstance(args[1], int | float):
                self.products[id(result)] = result, float(args[1])
            elif name in ("aten::add", "aten::add_") and id(args[1]) in self.products:
                self.sums[id(result)] = result, self.products[id(args[1])][1]
        return result


@dataclass(frozen=True)
class _Called:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@contextmanager
def _noting_calls(model: nn.Module) -> Iterator[dict[str, _Called]]:
    """The last call of each module within it, by path, in the order in which their first ones ended."""
    called: dict[str, _Called] = {}
    with ExitStack() as stack:
        for path, module in model.named_modules():

            def note(module: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
                called[path] = _Called(args, kwargs, output)

            stack.enter_context(module.register_forward_hook(note, with_kwargs=True))
        yield called


@torch.no_grad()
def try_router(
    router: nn.Module, args: tuple[Any, ...], num_experts: int, grouping: tuple[int, int] | None
) -> RouterKind:
    """Run a copy of a router.

    Args:
        router: on the meta device.
        args: those of its forward, on the meta device.
        grouping: (groups of experts, groups per token) by the config, which some routers use.
    """
    generator = torch.Generator().manual_seed(0)

    def random(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.is_floating_point():
            return torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return torch.zeros(x.shape, dtype=x.dtype)

    copied = deepcopy(router).to_empty(device="cpu")
    for parameter in copied.parameters():
        # a vector, such as a norm's or the experts' scales, leaves no trace in the output
        parameter.copy_(random(parameter) / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else torch.tensor(1.0))
    for buffer in copied.buffers():
        buffer.zero_()
    try:
        with torch.random.fork_rng(devices=[]):
            logits, *rest = copied.eval()(*map(random, args))
    except Exception:
        return UNKNOWN
    chosen = [x.flatten(0, -2) for x in rest if isinstance(x, Tensor) and x.dim() >= 2]
    experts_TK = next((x for x in chosen if x.dtype == torch.long and x.shape[-1] <= num_experts), None)
    if experts_TK is None or logits.shape[-1] != num_experts:
        return UNKNOWN
    weights_TK = next((x for x in chosen if x.is_floating_point() and x.shape == experts_TK.shape), None)
    score = None if weights_TK is None else _score(logits.flatten(0, -2).float(), experts_TK, weights_TK.float())
    is_grouped = grouping is not None and _keeps_to_groups(experts_TK, num_experts, *grouping)
    return RouterKind(score, grouping[0] if is_grouped and grouping is not None else 1)


def _score(logits_TE: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> str | None:
    """The score function that explains the ratios between the weights of a token's experts."""
    if experts_TK.shape[1] == 1:
        return "softmax"  # one weight is as good as any: nothing speaks against what most families have
    if (experts_TK == experts_TK[:, :1]).all():
        return None  # chosen by a table, which is empty here
    found_TK = weights_TK.log() - weights_TK[:, :1].log()
    for name, log_scores in LOG_SCORES.items():
        chosen_TK = log_scores(logits_TE).gather(1, experts_TK)
        if torch.allclose(found_TK, chosen_TK - chosen_TK[:, :1], rtol=1e-3, atol=1e-3):
            return name
    return None


def _keeps_to_groups(experts_TK: Tensor, num_experts: int, num_groups: int, groups_a_token: int) -> bool:
    """Whether no token has experts from more than `groups_a_token` groups, though it has more experts than that."""
    if not 0 < groups_a_token < num_groups or num_experts % num_groups or experts_TK.shape[1] <= groups_a_token:
        return False
    groups_TK = experts_TK // (num_experts // num_groups)
    return all(len(set(groups)) <= groups_a_token for groups in groups_TK.tolist())


def _groups(config: Any) -> tuple[int, int] | None:
    """(groups of experts, groups per token) by a config."""
    text_config = config.get_text_config()
    groups, a_token = getattr(text_config, "n_group", None), getattr(text_config, "topk_group", None)
    return (groups, a_token) if isinstance(groups, int) and isinstance(a_token, int) else None


class _NotingChoices(SeesChoices):
    def __init__(self) -> None:
        super().__init__()
        self.last: tuple[int, int] | None = None

    def chose(self, scores: Tensor, k: int, top_k: Any) -> Any:
        self.last = (scores.shape[-1], k)
        return top_k(scores)


@contextmanager
def _noting_choices(model: nn.Module) -> Iterator[dict[str, tuple[int, int] | None]]:
    """(scores, chosen ones) of the last `topk` that a block has called before its experts, by their path; to be entered
    within `_on_meta`."""
    found: dict[str, tuple[int, int] | None] = {}

    def run(own: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        with _NotingChoices() as noting:
            noted[path] = noting
            return own(*args, **kwargs)

    def called(own: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        found[path] = noted[path].last
        return own(*args, **kwargs)

    noted: dict[str, _NotingChoices] = {}
    for path, experts in expert_modules(model):
        block = model.get_submodule(path.rpartition(".")[0])
        block.forward, experts.forward = partial(run, block.forward, path), partial(called, experts.forward, path)
    yield found


def _num_choices(model: nn.Module, path: str, top_k: int, last: tuple[int, int] | None) -> int | None:
    """See `SeenExperts`. last: see `_noting_choices`."""
    if last is not None and last[1] == top_k:
        return last[0]
    buffers = model.get_submodule(path.rpartition(".")[0]).buffers()
    is_table = any(not x.is_floating_point() and x.dim() == 2 and x.shape[1] == top_k for x in buffers)
    return None if is_table else 0


def _router(experts_TK: Tensor, called: dict[str, _Called]) -> str | None:
    """The innermost module that returned a choice, behind logits."""
    chose = [
        path
        for path, call in called.items()
        if isinstance(call.output, tuple)
        and any(part is experts_TK for part in call.output)
        and isinstance(call.output[0], Tensor)
    ]
    return max(chose, key=lambda path: path.count("."), default=None)


def _beside(path: str, x_TD: Tensor, called: dict[str, _Called]) -> str | None:
    """The outermost module of the same decoder layer that was called after the experts, on their tokens alone."""
    order = list(called)
    for other in sorted(order[order.index(path) + 1 :], key=lambda other: other.count(".")):
        args, kwargs, out = called[other].args, called[other].kwargs, called[other].output
        is_near = path.startswith(f"{other.rpartition('.')[0]}.") and not path.startswith(f"{other}.")
        if is_near and len(args) == 1 and not kwargs and isinstance(out, Tensor) and out.numel() == x_TD.numel():
            x = args[0]
            if isinstance(x, Tensor) and x.untyped_storage()._cdata == x_TD.untyped_storage()._cdata:
                return other
    return None


@contextmanager
def _noting_attention() -> Iterator[Counter[int]]:
    """Multiplications for a pair of tokens, by the window of the mask that transformers makes for a layer; 0: no
    window, or a mask made elsewhere, as for layers that choose tokens, or compress them."""
    from transformers import masking_utils

    from ..transformers_private import replacing_attention

    masks, windows, widths = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, dict[int, int](), Counter[int]()
    kept = []  # live storages have distinct addresses

    def making(make: Any) -> Any:
        def mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> Any:
            if local_size is None:
                return make(*args, **kwargs)
            # a mask for windows is left out where they are as wide as the complete sequence
            made = make(*args, **kwargs | {"local_size": local_size, "allow_is_causal_skip": False})
            if isinstance(made, Tensor):
                kept.append(made)
                windows[made.untyped_storage()._cdata] = local_size
            return made

        return mask

    def noting(name: Any, function: Any) -> Any:
        def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(("query", "key", "value", "attention_mask"), args, strict=False)) | kwargs
            query_BHSA, value, mask = arguments["query"], arguments["value"], arguments["attention_mask"]
            window = windows.get(mask.untyped_storage()._cdata, 0) if isinstance(mask, Tensor) else 0
            if mask is None and "flash" in str(name):
                window = arguments.get("sliding_window") or 0
            widths[window] += query_BHSA.shape[1] * (query_BHSA.shape[-1] + value.shape[-1])
            return function(module, *args, **kwargs)

        return attention

    names = list(masks)
    for name in names:
        masks[name] = making(masks[name])
    try:
        with replacing_attention(noting):
            yield widths
    finally:
        for name in names:
            del masks[name]


@contextmanager
def _noting_reads(model: nn.Module) -> Iterator[tuple[Counter[str], Counter[str], set[str]]]:
    """How often the weights of linear layers, by path, are read within it by other code than their own forward, and how
    often of that to hand them to functions that multiply by them in the end; and paths of those whose own forward is
    not called."""
    from ..transformers_private import projecting_functions, replacing_functions

    paths: dict[nn.Module, str] = {
        module: path for path, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    own_classes = {module: type(module) for module in paths}
    computing: set[nn.Module] = set()
    reads, handed, uncalled = Counter[str](), Counter[str](), set(paths.values())

    def hand(function: Any, *args: Any, outproj_weight: Any = None, **kwargs: Any) -> Any:
        handed.update(path for module, path in paths.items() if module._parameters["weight"] is outproj_weight)
        return function(*args, outproj_weight=outproj_weight, **kwargs)

    def noting(own: Any) -> Any:
        def look_up(module: nn.Module, name: str) -> Any:
            if name == "weight" and module not in computing:
                reads[paths[module]] += 1
            return own.__getattr__(module, name)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            uncalled.discard(paths[module])
            computing.add(module)
            try:
                return own.forward(module, *args, **kwargs)
            finally:
                computing.discard(module)

        return type(own.__name__, (own,), {"__getattr__": look_up, "forward": forward})

    noting_classes = {own: noting(own) for own in set(own_classes.values())}
    for module, own in own_classes.items():
        module.__class__ = noting_classes[own]
    try:
        with replacing_functions(projecting_functions(model.modules()), hand):
            yield reads, handed, uncalled
    finally:
        for module, own in own_classes.items():
            module.__class__ = own


@contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    """Remove at the end what forwards within it leave on the model's modules: on the meta device it has no values, and
    some would be read in the next forward."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    # transformers installs some for good, to collect what it was asked for
    hooks = [
        (found, dict(found)) for _, attributes, _ in before for name, found in attributes.items() if "hooks" in name
    ]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers = buffers
        for found, content in hooks:
            found.clear()
            found.update(content)


@contextmanager
def answering_host() -> Iterator[None]:
    """Within it, a forward on the meta device continues where its code asks for values."""
    # only the size of a mask is known
    from ..torch_private import _config
    from ..transformers_private import without_packages

    sizes = _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    with _AnswerHost(), sizes, torch.no_grad(), without_packages():
        yield


class _AnswerHost(CalledDirectly, TorchDispatchMode):
    """Answers 1, or True, where code asks the device for a value, which the meta device does not have."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operator is torch.ops.aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        return _KNOWN.call(operator, args, kwargs, partial(operator, *args, **kwargs), Result.on_meta)


def _meta(tensor: Tensor) -> torch.device | None:
    return tensor.device if tensor.is_meta and type(tensor) in (Tensor, nn.Parameter) else None


_KNOWN = KnownResults(_meta)
"""Of all models of a process."""

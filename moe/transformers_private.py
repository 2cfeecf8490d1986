"""What this project replaces in transformers, and what it uses of it that transformers does not declare public.

What is assumed is tested where it is used first: a release that has changed it is refused with its version and what has
changed. Attention and masks that are registered by transformers' public interfaces do not belong here.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import transformers
from torch import Tensor, nn
from transformers import masking_utils
from transformers.integrations import hub_kernels
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .util.errors import ExpertMeshError

SUPPORTED = "5.17 to 5.24"
"""Releases of transformers with which all assumptions made here were tested."""

_SEARCH = "find_packed_sequence_indices"
_CHECKPOINT = "_gradient_checkpointing_func"


def api_changed(what: str) -> ExpertMeshError:
    """The error that says what this release of transformers has changed."""
    return ExpertMeshError(
        f"transformers {transformers.__version__}: {what}; expertmesh was tested with transformers {SUPPORTED}"
    )


@contextmanager
def replacing_sample_search(replacement: Callable[[Tensor], Any], model: Any) -> Iterator[Callable[[Tensor], Any]]:
    """Within it, transformers calls `replacement`, with position_ids (B, S), where it looks for several samples in a
    sequence as it makes a mask for `model`. Yields transformers' own function.

    Raises:
        ExpertMeshError: it would not be called.
    """
    _check_sample_search(type(model))  # type: ignore[arg-type]
    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = replacement  # type: ignore[assignment]
    try:
        yield find
    finally:
        masking_utils.find_packed_sequence_indices = find


@cache
def _check_sample_search(kind: type) -> None:
    """Run once for each class of models, whose module may import the function by name."""
    find = getattr(masking_utils, _SEARCH, None)
    if find is None or list(inspect.signature(find).parameters) != ["position_ids"]:
        raise api_changed(f"masking_utils.{_SEARCH}(position_ids) is gone, or takes something else")
    others = [value for value in vars(masking_utils).values() if inspect.isfunction(value) and value is not find]
    if not any(mentions(other, _SEARCH) for other in others):
        raise api_changed(f"no function of masking_utils calls {_SEARCH} any more")
    for name, module in list(sys.modules.items()):
        is_theirs = name.startswith("transformers.") and module is not masking_utils
        if is_theirs and getattr(module, "__dict__", {}).get(_SEARCH) is not None:
            raise api_changed(f"{name} has its own {_SEARCH}, which is not replaced")


@contextmanager
def never_tracing() -> Iterator[None]:
    """Within it, transformers makes masks as in a forward that is not being exported: it takes tensors without memory
    for such a forward, and makes masks that no kernel needs.

    Raises:
        ExpertMeshError: it would not check.
    """
    functions = [value for value in vars(masking_utils).values() if inspect.isfunction(value)]
    with _answering(masking_utils, "is_tracing", False, functions):
        yield


@contextmanager
def without_packages() -> Iterator[None]:
    """Within it, transformers computes by its own code what it would have packages' kernels compute, as in a forward
    that is being exported. To be used where tensors have no memory, or none on a GPU, which kernels would read.

    Raises:
        ExpertMeshError: it would not ask.
    """
    decorate = hub_kernels.use_kernel_func_from_hub_with_fallback
    with _answering(hub_kernels, "is_torchdynamo_exporting", True, [decorate]):
        yield


@contextmanager
def _answering(file: ModuleType, asks: str, answer: bool, askers: Iterable[Callable[..., Any]]) -> Iterator[None]:
    """Within it, a function that a file calls by this name gives this answer to the askers there."""
    if not hasattr(file, asks) or not any(mentions(asker, asks) for asker in askers):
        raise api_changed(f"{file.__name__.rpartition('.')[2]} does not ask {asks} any more")

    def says(*_: Any) -> bool:  # a Mock would keep what it is asked about
        return answer

    with mock.patch.object(file, asks, says):
        yield


@contextmanager
def replacing_attention(around: Callable[[Any, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within it, a model that asks transformers for an attention function by name gets `around(name, function)`.

    Raises:
        ExpertMeshError: models ask otherwise.
    """
    _check_interface()
    attributes = vars(ALL_ATTENTION_FUNCTIONS)
    # within another replacement it is that one's
    own, outer = ALL_ATTENTION_FUNCTIONS.get_interface, attributes.get("get_interface")

    def get(name: Any, default: Any) -> Callable[..., Any]:
        return around(name, own(name, default))

    attributes["get_interface"] = get
    try:
        yield
    finally:
        if outer is None:
            del attributes["get_interface"]
        else:
            attributes["get_interface"] = outer


@cache
def _check_interface() -> None:
    get_interface = getattr(ALL_ATTENTION_FUNCTIONS, "get_interface", None)
    if get_interface is None or len(inspect.signature(get_interface).parameters) != 2:
        raise api_changed("ALL_ATTENTION_FUNCTIONS.get_interface(name, default) is gone, or takes something else")


def wrap_checkpointing(model: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have the layers of a model, whose gradient checkpointing is on, checkpoint by `around(function)` in place of the
    `function`, called as (forward, *inputs), that they checkpoint by now; in place.

    Raises:
        ExpertMeshError: they would not call it.
    """
    modules = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    checkpointed = [module for module in modules if callable(getattr(module, _CHECKPOINT, None))]
    kinds = {type(module) for module in checkpointed}
    if not any(map(_calls_checkpointing, kinds)):
        raise api_changed(f"no module of {type(model).__name__} calls a {_CHECKPOINT} where checkpointing is on")
    for module in checkpointed:
        setattr(module, _CHECKPOINT, around(getattr(module, _CHECKPOINT)))


def _calls_checkpointing(kind: type) -> bool:
    """Whether a class's own code, or that of a base class, calls its checkpointing function."""
    methods = [vars(base).get(name) for base in kind.__mro__ for name in ("__call__", "forward")]
    # a decorated one calls it, or what it was made of does
    functions = [part for method in methods if inspect.isfunction(method) for part in (method, inspect.unwrap(method))]
    return any(_CHECKPOINT in _looked_up(function.__code__) for function in functions)


def calls(kind: type, name: str) -> bool:
    """Whether the code of a class of modules, or that of a base class, looks up a global or an attribute of this name
    (but for what all modules have)."""
    own = (value for base in kind.__mro__ if base not in nn.Module.__mro__ for value in vars(base).values())
    return any(mentions(value, name) for value in own if inspect.isfunction(value))


def mentions(function: Callable[..., Any], name: str) -> bool:
    """Whether a function's own code looks up an attribute of this name."""
    return name in looked_up(function)


def looked_up(function: Callable[..., Any]) -> frozenset[str]:
    """Names of all attributes and globals that a function's own code looks up."""
    return _looked_up(inspect.unwrap(function).__code__)


@cache
def _looked_up(code: CodeType) -> frozenset[str]:
    """By a function, and by those defined in it."""
    return frozenset(code.co_names).union(*(_looked_up(c) for c in code.co_consts if isinstance(c, CodeType)))


_Method = TypeVar("_Method", bound=Callable[..., Any])


def in_place_of_trainers(method: _Method) -> _Method:
    """Marks a method that takes the place of one of `transformers.Trainer`, most of which are private: one that is
    renamed there would no longer be called, and Trainer would do in its stead what is wrong for a sharded model.

    Raises:
        ExpertMeshError: Trainer has no such method, or calls it with other arguments.
    """
    theirs = getattr(transformers.Trainer, method.__name__, None)
    if theirs is None:
        raise api_changed(f"Trainer.{method.__name__} is gone")
    ours, parameters = inspect.signature(method).parameters, inspect.signature(theirs).parameters
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    mine = [name for name, parameter in ours.items() if parameter.kind not in kinds]
    takes_more = any(parameter.kind in kinds for parameter in ours.values())
    if mine != list(parameters)[: len(mine)] or (len(mine) < len(parameters) and not takes_more):
        raise api_changed(f"Trainer.{method.__name__} takes {', '.join(parameters)}, not {', '.join(mine)}")
    return method


def looping_functions(modules: Iterable[nn.Module]) -> dict[ModuleType, dict[str, FunctionType]]:
    """Functions that these modules' classes call by names of their files, and whose code has a loop."""
    return _functions_of(modules, _has_loop)


def projecting_functions(modules: Iterable[nn.Module]) -> dict[ModuleType, dict[str, FunctionType]]:
    """Functions that these modules' classes call by names of their files, and that, given the weight and bias of a
    linear layer as `outproj_weight` and `outproj_bias`, multiply by them in the end, as mamba-ssm's kernel does."""
    return _functions_of(modules, lambda function: "outproj_weight" in inspect.signature(function).parameters)


def _functions_of(
    modules: Iterable[nn.Module], is_such: Callable[[FunctionType], bool]
) -> dict[ModuleType, dict[str, FunctionType]]:
    found: dict[ModuleType, dict[str, FunctionType]] = {}
    for kind in {type(module) for module in modules}:
        file = sys.modules[kind.__module__]
        if not file.__name__.startswith("transformers.models."):
            continue
        methods = (inspect.unwrap(method) for method in vars(kind).values() if isinstance(method, FunctionType))
        for name in {name for method in methods for name in method.__code__.co_names}:
            function = vars(file).get(name)
            if isinstance(function, FunctionType) and is_such(function):
                found.setdefault(file, {})[name] = function
    return found


def _has_loop(function: FunctionType) -> bool:
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return False
    return any(isinstance(node, ast.For | ast.While) for node in ast.walk(source))


class PackagedKernel(NamedTuple):
    """What transformers looks for in a package, to take it in place of a function of its own. package: its name for
    pip. name: of the function there."""

    package: str
    name: str
    is_installed: bool


def kernel_name_of(function: FunctionType) -> PackagedKernel | None:
    """What transformers looks for in place of a function; None: nothing. Where it looks is in no interface: nothing is
    found where a release has changed that."""
    known: Mapping[str, str] = getattr(hub_kernels, "_PACKAGE_TO_DISTRIBUTION", {})
    decorated = inspect.getclosurevars(function).nonlocals
    if not decorated.keys() >= {"is_new_implementation", "package", "func_name"}:
        return None
    package = decorated["package"]
    return PackagedKernel(known.get(package, package), decorated["func_name"], decorated["is_new_implementation"])


def missing_kernels(modules: Iterable[nn.Module]) -> dict[str, list[str]]:
    """Packages, by their names for pip, in which transformers looked in vain for kernels of what these modules compute
    in loops, with the names of the functions that do so. Where nothing is found (see `kernel_name_of`) it warns by
    itself, at the first call."""
    missing: dict[str, list[str]] = {}
    for functions in looping_functions(modules).values():
        for name, function in functions.items():
            kernel = kernel_name_of(function)
            if kernel is not None and not kernel.is_installed:
                missing.setdefault(kernel.package, []).append(name)
    return missing


@contextmanager
def replacing_functions(
    functions: Mapping[ModuleType, Mapping[str, FunctionType]], call: Callable[..., Any]
) -> Iterator[None]:
    """Within it `call(function, *args, **kwargs)` is called in the place of each, which files of models call by these
    names."""
    with ExitStack() as patches:
        for file, named in functions.items():
            calls = {name: partial(call, function) for name, function in named.items()}
            patches.enter_context(mock.patch.dict(vars(file), calls))
        yield


@contextmanager
def replacing_calls(modules: Iterable[nn.Module], call: Callable[..., Any]) -> Iterator[None]:
    """Within it `call` is called in the place of modules of these modules' classes."""
    with ExitStack() as patches:
        for kind in {type(module) for module in modules}:
            patches.enter_context(mock.patch.object(kind, "__call__", call))
        yield


_PROCESSOR_METHODS = ("check_argument_for_proper_class", "get_attributes", "get_processor_dict", "from_args_and_dict")


def processor_of_images(directory: str, config: Any) -> Any:
    """A family's own processor with its parts for texts and images: that for videos, which it cannot be loaded without,
    needs torchvision.

    Raises:
        ExpertMeshError: the family has no processor.
    """
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    if type(config) not in PROCESSOR_MAPPING:
        raise ExpertMeshError(f"transformers has no processor for {config.model_type}")
    kind: Any = PROCESSOR_MAPPING[type(config)]
    if lacking := next((name for name in _PROCESSOR_METHODS if not hasattr(kind, name)), None):
        raise api_changed(f"{kind.__name__} has no {lacking}")

    def check(processor: Any, name: str, part: Any) -> Any:
        return type(part) if part is None else kind.check_argument_for_proper_class(processor, name, part)

    of_images: Any = type(kind.__name__, (kind,), {_PROCESSOR_METHODS[0]: check, "__module__": kind.__module__})
    parts: dict[str, Any] = {"tokenizer": AutoTokenizer, "image_processor": AutoImageProcessor}
    made = [
        parts[name].from_pretrained(directory, trust_remote_code=False) if name in parts else None
        for name in kind.get_attributes()
    ]
    return of_images.from_args_and_dict(made, kind.get_processor_dict(directory)[0])

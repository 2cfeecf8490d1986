"""All that this project uses of torch that torch does not declare public.

Each name is imported when it is first used, as many cost time to load, and what is assumed of it is tested then: a
release of torch that has changed it is refused with its version and what has changed. Left out are
`torch.utils._pytree` and `torch.utils._python_dispatch`, which torch's own guides use, and operators and methods, which
fail at their call if they are gone.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.nn.functional as F

from .util.errors import ExpertMeshError

if TYPE_CHECKING:
    from torch._C import _current_autograd_node as _current_autograd_node
    from torch._C import _current_graph_task_id as _current_graph_task_id
    from torch._C import _distributed_c10d as _distributed_c10d
    from torch._C import _get_sm_carveout_experimental as _get_sm_carveout_experimental
    from torch._C import _set_sm_carveout_experimental as _set_sm_carveout_experimental
    from torch._C import _storage_Use_Count as _storage_Use_Count
    from torch._C._autograd import DeviceType as DeviceType
    from torch._C._autograd import _get_sequence_nr as _get_sequence_nr
    from torch._C._autograd import _top_saved_tensors_default_hooks as _top_saved_tensors_default_hooks
    from torch._C._profiler import _RecordFunctionFast as _RecordFunctionFast
    from torch._dynamo import mark_static as mark_static
    from torch._dynamo.utils import calculate_time_spent as calculate_time_spent
    from torch._dynamo.utils import counters as counters
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group as enable_symm_mem_for_group
    from torch.distributed.distributed_c10d import _get_default_store as _get_default_store
    from torch.distributed.distributed_c10d import _resolve_process_group as _resolve_process_group
    from torch.distributed.distributed_c10d import _set_pg_timeout as _set_pg_timeout
    from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler as _terminate_process_handler
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param import _chunk_with_empty as _chunk_with_empty
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as FSDPState
    from torch.distributed.tensor._sharding_prop import ShardingPropagator as ShardingPropagator
    from torch.fx.experimental import _config as _config
    from torch.nn.attention._fa4 import register_flash_attention_fa4 as register_flash_attention_fa4
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore

SUPPORTED = "2.11 to 2.13"
"""Releases of torch with which all assumptions made here were tested."""


def changed(what: str) -> ExpertMeshError:
    """The error that says what this release of torch has changed."""
    return ExpertMeshError(f"torch {torch.__version__}: {what}; expertmesh was tested with torch {SUPPORTED}")


FLIGHT_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
# as the imports above, which type checkers and editors follow
_MODULES = {
    "_current_autograd_node": "torch._C",
    "_current_graph_task_id": "torch._C",
    "_distributed_c10d": "torch._C",
    "_get_sm_carveout_experimental": "torch._C",
    "_set_sm_carveout_experimental": "torch._C",
    "_storage_Use_Count": "torch._C",
    "DeviceType": "torch._C._autograd",
    "_get_sequence_nr": "torch._C._autograd",
    "_top_saved_tensors_default_hooks": "torch._C._autograd",
    "_RecordFunctionFast": "torch._C._profiler",
    "mark_static": "torch._dynamo",
    "calculate_time_spent": "torch._dynamo.utils",
    "counters": "torch._dynamo.utils",
    "FakeTensor": "torch._subclasses.fake_tensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "enable_symm_mem_for_group": "torch.distributed._symmetric_memory",
    "_terminate_process_handler": "torch.distributed.elastic.multiprocessing.api",
    "_get_default_store": "torch.distributed.distributed_c10d",
    "_resolve_process_group": "torch.distributed.distributed_c10d",
    "_set_pg_timeout": "torch.distributed.distributed_c10d",
    "AllGather": "torch.distributed.fsdp._fully_shard._fsdp_api",
    "ReduceScatter": "torch.distributed.fsdp._fully_shard._fsdp_api",
    "FSDPParam": "torch.distributed.fsdp._fully_shard._fsdp_param",
    "_chunk_with_empty": "torch.distributed.fsdp._fully_shard._fsdp_param",
    "FSDPParamGroup": "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "FSDPState": "torch.distributed.fsdp._fully_shard._fsdp_state",
    "ShardingPropagator": "torch.distributed.tensor._sharding_prop",
    "_config": "torch.fx.experimental",
    "register_flash_attention_fa4": "torch.nn.attention._fa4",
    "FakeStore": "torch.testing._internal.distributed.fake_pg",
}


def __getattr__(name: str) -> Any:
    """
    Raises:
        ExpertMeshError: it is missing, or has changed.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(import_module(_MODULES[name]), name)
    except (ImportError, AttributeError) as error:
        raise changed(f"{name} is not where it was: {error}") from error
    if name in _TESTS and not _TESTS[name](found):
        raise changed(f"{name} is not what it was")
    globals()[name] = found  # looked up only once
    return found


def _takes(function: Any, *parameters: str) -> bool:
    """Whether a function's first parameters have these names."""
    return callable(function) and tuple(inspect.signature(function).parameters)[: len(parameters)] == parameters


def _is_collective(kind: Any, *parameters: str) -> bool:
    """Whether a collective of FSDP is called as `sharding.collectives.gloo` expects it."""
    allocate = _takes(kind.allocate, "self", "size", "dtype", "device")
    return allocate and _takes(kind.__call__, "self", "output_tensor", "input_tensor", "group", *parameters)


_TESTS: dict[str, Callable[[Any], bool]] = {
    "AllGather": lambda kind: _is_collective(kind, "async_op"),
    "ReduceScatter": lambda kind: _is_collective(kind, "op", "async_op"),
    "_get_default_store": lambda function: callable(function) and not inspect.signature(function).parameters,
    "_set_pg_timeout": lambda function: _takes(function, "timeout", "group"),
    "mark_static": lambda function: _takes(function, "t", "index"),
    # of parameters that are gathered from host memory
    "FSDPParam": lambda kind: "self._sharded_param_data" in inspect.getsource(kind.all_gather_inputs.fget),
    "_chunk_with_empty": lambda function: _takes(function, "tensor", "num_chunks", "dim"),
    "FSDPParamGroup": lambda kind: _takes(kind.unshard, "self", "async_op") and _takes(kind.wait_for_unshard, "self"),
    # which dry runs replace
    "FSDPState": lambda kind: _takes(getattr(kind, "_root_post_backward_final_callback", None), "self"),
    "ShardingPropagator": lambda kind: _takes(getattr(kind, "_propagate_tensor_meta_non_cached", None), "self"),
    # gloo's record of collectives is apart from NCCL's, which a build for CPUs does not have
    "_distributed_c10d": lambda module: any(hasattr(module, dump) for dump in FLIGHT_RECORDERS),
    "_config": lambda module: hasattr(module, "meta_nonzero_assume_all_nonzero"),
    "register_flash_attention_fa4": lambda function: _takes(function, "module_path"),
}


def forget_process_groups() -> None:
    """Have no process group any more, in the fork of a process that has some: nothing is said to other ranks.

    Raises:
        ExpertMeshError: this release of torch holds them elsewhere.
    """
    groups: Any = import_module("torch.distributed.distributed_c10d")
    if not hasattr(groups, "_World") or not hasattr(groups, "_unregister_all_process_groups"):
        raise changed("process groups are held elsewhere")
    # a group that goes waits for threads, which a fork does not have
    _FORGOTTEN.append(groups._world)
    groups._world = groups._World()
    groups._unregister_all_process_groups()


_FORGOTTEN: list[Any] = []


_FLASH = ("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal")
_FLASH_OPERATORS = {
    "_flash_attention_forward": (*_FLASH, "return_debug_mask"),
    "_flash_attention_backward": ("grad_out", *_FLASH[:3], "out", "logsumexp", *_FLASH[3:], "rng_state", "unused"),
}


@cache
def flash_operator(name: str) -> Any:
    """`_flash_attention_forward` or `_flash_attention_backward` of aten, which are called by position.

    Raises:
        ExpertMeshError: it is missing, or takes other arguments.
    """
    packet = getattr(torch.ops.aten, name, None)
    expected = _FLASH_OPERATORS[name]
    taken = () if packet is None else tuple(argument.name for argument in packet.default._schema.arguments)
    if taken[: len(expected)] != expected:
        raise changed(f"aten::{name} takes {', '.join(taken) or 'nothing'}, and not {', '.join(expected)}")
    return packet


@contextmanager
def replacing_sdpa(replacement: Callable[..., Any]) -> Iterator[None]:
    """Within it `replacement` is called in the place of `scaled_dot_product_attention`."""
    with mock.patch.object(F, "scaled_dot_product_attention", replacement):
        yield


@contextmanager
def watching_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Within it `resized` is called after a storage was resized, of which no operator tells."""
    resize = torch.UntypedStorage.resize_

    def watched(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        resized(storage)
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", watched):
        yield


@contextmanager
def sharing_empty_chunks() -> Iterator[None]:
    """Within it FSDP fills up the chunks of a parameter with fewer rows than there are ranks by one empty tensor, in
    the place of one for each further rank, of which a dry run may have 100,000."""
    __getattr__("_chunk_with_empty")

    def chunks(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
        found = list(tensor.chunk(num_chunks, dim))
        return found + [found[0].new_empty(0)] * (num_chunks - len(found))

    with mock.patch.object(import_module(_MODULES["_chunk_with_empty"]), "_chunk_with_empty", chunks):
        yield


@contextmanager
def before_torchrun_ends(first: Callable[[], object]) -> Iterator[None]:
    """Within it torchrun calls `first` in the handler of a signal, before it has its ranks end."""
    handle = __getattr__("_terminate_process_handler")

    def handled(number: int, frame: Any) -> None:
        first()
        handle(number, frame)

    module = import_module(_MODULES["_terminate_process_handler"])
    with mock.patch.object(module, "_terminate_process_handler", handled):
        yield


@contextmanager
def around_shapes_found_out(around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Within it DTensor finds out the shapes of an operator's results, by trying it once, `around` that."""
    kind = __getattr__("ShardingPropagator")
    find_out = kind._propagate_tensor_meta_non_cached

    def found_out(*args: Any, **kwargs: Any) -> Any:
        with around():
            return find_out(*args, **kwargs)

    with mock.patch.object(kind, "_propagate_tensor_meta_non_cached", found_out):
        yield


def fake_like(kind: Any, made: torch.Tensor, device: torch.device, held: Mapping[str, Any]) -> Any:
    """What `FakeTensor(mode, made, device)` gives, without torch's checks of its arguments, which take several times as
    long.

    Args:
        kind: `FakeTensor`. made: on the meta device, without a gradient. held: the attributes of one that torch has
            made in that mode, on that device.
    """
    of_torch: Any = torch.Tensor
    fake = of_torch._make_subclass(kind, made, False, dispatch_device=True, device_for_backend_keys=device)
    if held["fake_mode"]._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(held)
    return fake


class CalledDirectly:
    """Of a dispatch mode, named before torch's class: each of its calls is not wrapped against compilers, of which
    there is none within it; a call takes as long as what wraps it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

"""That a release of torch or transformers which has changed what is relied on is refused, instead of silently used."""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Trainer, masking_utils
from transformers.integrations import hub_kernels
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from expertmesh.moe import torch_private, transformers_private
from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.experts.model_layers import decoder_layers
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.torch_private import flash_operator
from expertmesh.moe.transformers_private import (
    in_place_of_trainers,
    looping_functions,
    missing_kernels,
    never_tracing,
    replacing_attention,
    replacing_sample_search,
    without_packages,
    wrap_checkpointing,
)
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.parallelize.offload import offload_inputs
from expertmesh.sharding.parallelize.recompute import checkpoint_layers
from tests.families import configs
from tests.tiny import loaded, tiny_config, tiny_mixtral

ROOT = Path(__file__).parents[2]
PUBLIC_ENOUGH = ("torch.utils._pytree", "torch.utils._python_dispatch")


@pytest.fixture(autouse=True)
def _tested_anew() -> Iterator[None]:
    """What was tested before is tested once more, before and after a test that changes it."""

    def forget() -> None:
        transformers_private._check_sample_search.cache_clear()
        transformers_private._check_interface.cache_clear()
        flash_operator.cache_clear()
        for name in NAMES:
            vars(torch_private).pop(name, None)

    forget()
    yield
    forget()


NAMES = torch_private._MODULES


def test_names_of_torch_are_those_that_editors_see() -> None:
    tree = ast.parse(Path(str(torch_private.__file__)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_torch_that_is_gone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert getattr(torch_private, name) is not None
    vars(torch_private).pop(name)
    monkeypatch.delattr(importlib.import_module(NAMES[name]), name)
    with pytest.raises(ExpertMeshError, match=rf"torch {re.escape(torch.__version__)}: {name} is not where it was"):
        getattr(torch_private, name)


def otherwise(*_: Any) -> None:
    """Takes what nothing of torch takes."""


class Otherwise:
    def allocate(self, size: Any, dtype: Any, device: Any) -> None: ...

    def __call__(self, input_tensor: Any, output_tensor: Any, group: Any, async_op: Any) -> None: ...

    @property
    def all_gather_inputs(self) -> list[Any]:
        return []

    def unshard(self) -> None: ...


CHANGED: dict[str, Any] = {
    "AllGather": Otherwise,
    "ReduceScatter": Otherwise,
    "_get_default_store": lambda store: store,
    "_set_pg_timeout": otherwise,
    "mark_static": otherwise,
    "FSDPParam": Otherwise,
    "_chunk_with_empty": otherwise,
    "FSDPParamGroup": Otherwise,
    "FSDPState": Otherwise,
    "ShardingPropagator": Otherwise,
    "register_flash_attention_fa4": otherwise,
    "_distributed_c10d": ModuleType("_distributed_c10d"),
    "_config": ModuleType("_config"),
}


@pytest.mark.parametrize("rows", [1, 5, 8, 24])
def test_chunks_of_which_the_empty_ones_are_one(rows: int) -> None:
    """As torch's own, in number, shapes and values."""
    tensor = torch.randn(rows, 3)
    module = importlib.import_module(NAMES["_chunk_with_empty"])
    expected = module._chunk_with_empty(tensor, 8, dim=0)
    with torch_private.sharing_empty_chunks():
        found = module._chunk_with_empty(tensor, 8, dim=0)
    assert len(found) == 8
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert len({id(x) for x in found if not x.numel()}) <= 1


def test_all_that_is_tested_of_torch_is_tested_here() -> None:
    assert CHANGED.keys() == torch_private._TESTS.keys()


@pytest.mark.parametrize("name", CHANGED)
def test_a_name_of_torch_that_is_something_else(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(importlib.import_module(NAMES[name]), name, CHANGED[name])
    for _ in range(2):
        with pytest.raises(ExpertMeshError, match=rf"torch .*: {name} is not what it was; expertmesh was tested with"):
            getattr(torch_private, name)


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_flash_attention_backward"])
def test_flash_attention_with_other_arguments(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert flash_operator(name) is getattr(torch.ops.aten, name)
    flash_operator.cache_clear()
    expected = torch_private._FLASH_OPERATORS[name]
    monkeypatch.setitem(torch_private._FLASH_OPERATORS, name, (*expected[:3], "one more", *expected[3:]))
    with pytest.raises(ExpertMeshError, match=f"aten::{name} takes .*query.*, and not .*one more"):
        flash_operator(name)


def test_nothing_private_of_torch_is_imported_elsewhere() -> None:
    found = []
    for package in ("moe", "sharding", "training", "checkpoints"):
        for file in (ROOT / package).rglob("*.py"):
            if file.name == "torch_private.py":
                continue
            text = file.read_text(encoding="utf-8")
            names = re.findall(r"\btorch\._C\.[\w.]+", text)
            for module, imported in re.findall(r"^ *from (torch(?:\.\w+)*) import (\([^)]*\)|.*)", text, re.MULTILINE):
                names += [f"{module}.{name}" for name in re.findall(r"(?<! as )\b[A-Za-z_]\w*", imported)]
            found += [
                (file.name, name)
                for name in names
                if re.search(r"\._[a-zA-Z]", name) and not name.startswith(PUBLIC_ENOUGH)
            ]
    assert found == []


def test_the_search_for_samples_is_replaced() -> None:
    model = tiny_mixtral()
    tokens_BS = torch.zeros(1, 4, dtype=torch.long)
    seen: list[torch.Tensor] = []
    with replacing_sample_search(seen.append, model) as own:
        assert own is not masking_utils.find_packed_sequence_indices
        model(input_ids=tokens_BS, position_ids=torch.arange(4)[None], use_cache=False)
    assert len(seen) == 1
    assert own is masking_utils.find_packed_sequence_indices


def enter_search() -> None:
    with replacing_sample_search(lambda position_ids: None, None):
        pass


def test_the_search_for_samples_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_search()
    transformers_private._check_sample_search.cache_clear()
    with monkeypatch.context() as patch:
        patch.delattr(masking_utils, "find_packed_sequence_indices")
        with pytest.raises(ExpertMeshError, match=r"transformers .*indices\(position_ids\) is gone"):
            enter_search()
    with monkeypatch.context() as patch:
        patch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids, segments: None)
        with pytest.raises(ExpertMeshError, match="takes something else"):
            enter_search()
    with monkeypatch.context() as patch:
        patch.setattr(masking_utils, "_preprocess_mask_arguments", otherwise)
        with pytest.raises(ExpertMeshError, match="no function of masking_utils calls find_packed"):
            enter_search()
    with monkeypatch.context() as patch:
        module: Any = ModuleType("transformers.models.new.modeling_new")
        module.find_packed_sequence_indices = masking_utils.find_packed_sequence_indices
        patch.setitem(sys.modules, module.__name__, module)
        with pytest.raises(ExpertMeshError, match=r"transformers\.models\.new\.modeling_new has its own"):
            enter_search()
    enter_search()


def test_whether_transformers_asks_if_it_is_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    own = masking_utils.is_tracing
    with never_tracing():
        assert masking_utils.is_tracing(torch.zeros(1)) is False
    assert masking_utils.is_tracing is own
    callers = [
        name
        for name, value in vars(masking_utils).items()
        if inspect.isfunction(value) and "is_tracing" in inspect.unwrap(value).__code__.co_names
    ]
    assert callers
    for name in callers:
        monkeypatch.setattr(masking_utils, name, otherwise)
    with pytest.raises(ExpertMeshError, match="does not ask is_tracing any more"), never_tracing():
        pass


def test_whether_transformers_asks_if_it_is_exporting(monkeypatch: pytest.MonkeyPatch) -> None:
    own = hub_kernels.is_torchdynamo_exporting
    with without_packages():
        assert hub_kernels.is_torchdynamo_exporting() is True
    assert hub_kernels.is_torchdynamo_exporting is own
    monkeypatch.setattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", otherwise)
    with pytest.raises(ExpertMeshError, match="hub_kernels does not ask is_torchdynamo_exporting"), without_packages():
        pass


def test_how_models_ask_for_attention_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def around(name: Any, function: Any) -> Any:
        asked.append(name)
        return function

    with replacing_attention(around):
        ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", otherwise)
    ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", otherwise)
    assert asked == ["sdpa"]
    with replacing_attention(around):
        with replacing_attention(around):
            ALL_ATTENTION_FUNCTIONS.get_interface("eager", otherwise)
        ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", otherwise)
    ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", otherwise)
    assert asked == ["sdpa", "eager", "eager", "sdpa"]
    transformers_private._check_interface.cache_clear()
    monkeypatch.setattr(type(ALL_ATTENTION_FUNCTIONS), "get_interface", lambda self, name: None)
    with pytest.raises(ExpertMeshError, match=r"get_interface\(name, default\) is gone"), replacing_attention(around):
        pass


def test_checkpointing_is_wrapped() -> None:
    theirs = tiny_mixtral()
    model: Any = loaded(build_model(theirs.config), theirs).train()
    checkpoint_layers(model, "full")
    called = []

    def around(function: Any) -> Any:
        def wrapped(forward: Any, *inputs: Any) -> Any:
            called.append(len(inputs))
            return function(forward, *inputs)

        return wrapped

    wrap_checkpointing(model, around)
    with Forward():
        model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    assert called == [1] * model.config.num_hidden_layers


@pytest.mark.parametrize("change", ["renamed", "off", "not called"])
def test_checkpointing_has_changed(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """No input would be offloaded, and nothing would say so."""
    model = build_model(tiny_config())
    if change != "off":
        checkpoint_layers(model, "full")
    if change == "renamed":
        for module in model.modules():
            vars(module).pop("_gradient_checkpointing_func", None)
    if change == "not called":
        for kind in {type(module) for module in model.modules() if hasattr(module, "gradient_checkpointing")}:
            for base in kind.__mro__[:-1]:
                if base is not torch.nn.Module and ("forward" in vars(base) or "__call__" in vars(base)):
                    monkeypatch.setattr(base, "forward", otherwise)
                    monkeypatch.setattr(base, "__call__", torch.nn.Module.__call__)
    with pytest.raises(ExpertMeshError, match="no module of MixtralForCausalLM calls a _gradient_checkpointing_func"):
        offload_inputs(model, "cpu")


def test_messages_name_the_release() -> None:
    with mock.patch("transformers.__version__", "6.0.0"):
        assert str(transformers_private.api_changed("this is gone")) == (
            "transformers 6.0.0: this is gone; expertmesh was tested with transformers 5.17 to 5.24"
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (lambda patch: patch.delattr(Trainer, "_clip_grad_norm"), "is gone"),
        (lambda patch: patch.setattr(Trainer, "_clip_grad_norm", lambda self, norm: 0), "takes self, norm, not"),
    ],
    ids=["gone", "other arguments"],
)
def test_what_takes_the_place_of_trainers(monkeypatch: pytest.MonkeyPatch, changes: Any, said: str) -> None:
    def _clip_grad_norm(self: Any, model: Any) -> float:
        return 0.0

    assert in_place_of_trainers(_clip_grad_norm) is _clip_grad_norm
    changes(monkeypatch)
    with pytest.raises(ExpertMeshError, match=f"Trainer._clip_grad_norm {said}"):
        in_place_of_trainers(_clip_grad_norm)


@pytest.mark.parametrize(
    ("family", "package", "distribution"),
    [("mixtral", "", ""), ("qwen3_next", "fla", "flash-linear-attention"), ("jamba", "mamba_ssm", "mamba_ssm")],
)
def test_packages_with_kernels_are_missed_until_they_are_there(
    monkeypatch: pytest.MonkeyPatch, family: str, package: str, distribution: str
) -> None:
    """By transformers' own decorator, with a package that has all of these functions."""
    model = build_model(configs.tiny_config(family))
    missing = missing_kernels(model.modules())
    assert set(missing) == {distribution} - {""}
    found = looping_functions(module for layer in decoder_layers(model) for module in layer.modules())
    assert sorted(name for names in missing.values() for name in names) == sorted(
        name for functions in found.values() for name in functions
    )
    installed = ModuleType(package)
    monkeypatch.setitem(sys.modules, package, installed)
    for file, functions in found.items():
        for name, function in functions.items():
            of_package = inspect.getclosurevars(function).nonlocals["func_name"]
            monkeypatch.setattr(installed, of_package, lambda *args: None, raising=False)
            decorate = use_kernel_func_from_hub_with_fallback(of_package, package)
            monkeypatch.setattr(file, name, decorate(inspect.unwrap(function)))
    assert missing_kernels(model.modules()) == {}

"""That what part of a step something is, is declared by the code itself: nowhere by a path or a name of ours."""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from expertmesh.moe.util import step_parts as declared
from expertmesh.moe.util.step_parts import lasting, writes, written_by
from expertmesh.sharding.topology import Topology
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.monitoring.profiling import _Ranges
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.planning.rehearsal.attribution import LASTING, Parts, StepPlace
from expertmesh.training.planning.rehearsal.world import rehearse
from expertmesh.training.step import train_step
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, my_batches, sharded_model
from tests.distributed.test_parity import SAMPLES
from tests.families.configs import tiny_config
from tests.tiny import save_model
from tests.training.test_measure import SETTINGS, flags_of

ROOT = Path(__file__).parents[2]
PRODUCT = "expertmesh."
RECORDING = ("expertmesh.training.planning.rehearsal.", "expertmesh.training.monitoring.profiling")


@contextmanager
def noting_undeclared() -> Iterator[set[str]]:
    """Modules of ours without STEP_PART that call an operator within it, or stand on the call stack between an operator
    and the module that says what part of a step it is; but for those that record, or stand in for a GPU."""
    found: set[str] = set()
    here = Parts.here

    def noting(parts: Parts) -> StepPlace:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            name = str(frame.f_globals.get("__name__"))
            is_ours = name.startswith(PRODUCT) and not name.startswith(RECORDING)
            if is_ours and "STEP_PART" not in frame.f_globals:
                found.add(name)
            if frame.f_globals.get("STEP_PART") is not None:
                break
            frame = frame.f_back
        return here(parts)

    with mock.patch.object(Parts, "here", noting):
        yield found


DRY_RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    **SETTINGS,
    "muon": ("mixtral", 8, {"ep_size": 4, "optim": "muon"}),
    "fp8, chunks": ("mixtral", 8, {"ep_size": 2, "overlap_chunks": 2, "expert_precision": "fp8"}),
    "packing": ("mixtral", 8, {"ep_size": 8, "packing": True, "cross_entropy": "full"}),
    "products kept, losses": (
        "mixtral",
        8,
        {
            "ep_size": 8,
            "gradient_checkpointing": "selective",
            "keep_expert_products": 1,
            "router_aux_loss_coef": 0.02,
            "router_z_loss_coef": 0.01,
        },
    ),
    "8-bit state": ("mixtral", 8, {"ep_size": 8, "optim": "adamw_torch_8bit"}),
    "biases that move": ("deepseek_v3", 8, {"ep_size": 8}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DRY_RUNS)
def test_every_module_that_calls_operators_declares_its_part_on_a_gpu(name: str) -> None:
    family, world_size, flags = DRY_RUNS[name]
    with noting_undeclared() as undeclared:
        rehearse(flags_of(**flags), tiny_config(family), world_size)
    assert undeclared == set()


BF16 = {"optim": "adamw_bf16"}
REAL_RUNS: dict[str, tuple[Topology, Case]] = {
    "selective": (Topology(4, 2, "full"), Case(SAMPLES[:16], balance=0.02, gradient_checkpointing="selective")),
    "hybrid": (Topology(4, 4, "hybrid"), Case(SAMPLES[:16], settings={"optim": "muon"}, gradient_checkpointing="full")),
    "LoRA": (Topology(2, 1, "full"), Case(SAMPLES[:16], settings={"adapter": "lora", "lora_rank": 4})),
    "bf16": (
        Topology(2, 2, "full"),
        Case(SAMPLES[:16], compute_dtype=torch.bfloat16, settings=BF16),
    ),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", REAL_RUNS)
def test_every_module_that_calls_operators_declares_its_part_on_a_cpu(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    save_model(tmp_path)
    topology, case = REAL_RUNS[name]
    for undeclared in ranks.run(_undeclared, topology.world_size, tmp_path, topology, case):
        assert undeclared == set()


def _undeclared(path: Path, topology: Topology, case: Case) -> set[str]:
    model, mesh, _ = sharded_model(path, topology, case)
    optimizer = build_optimizer(model.train(), TrainConfig(model="-", dataset=["-"], **case.settings), mesh)
    batches = my_batches(case, topology, dist.get_rank())
    with noting_undeclared() as undeclared, _Ranges(Parts(model)):
        train_step(model, optimizer, batches, mesh, LossWeights(case.balance, case.z), max_grad_norm=0.1)
    return undeclared


def test_a_module_that_does_not_declare_its_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("expertmesh.moe.dispatch.exchange.STEP_PART")
    with noting_undeclared() as undeclared:
        rehearse(flags_of(ep_size=4), tiny_config("mixtral"), 8)
    assert undeclared == {"expertmesh.moe.dispatch.exchange"}


class _Modules(torch.nn.Module):
    """What `Parts` asks of a model, without a layer."""


@contextmanager
def parts_of_no_model() -> Iterator[Parts]:
    with (
        mock.patch.multiple(
            "expertmesh.training.planning.rehearsal.attribution",
            decoder_layers=lambda model: [],
            moe_layers=lambda model: [],
        ),
        mock.patch("expertmesh.training.planning.rehearsal.attribution.router_prefixes", return_value=()),
    ):
        yield Parts(_Modules())


def told(source: str, name: str = "anything", part: Any = ..., file: str = "anywhere.py") -> StepPlace:
    """The place that is found for an operator which `call` of a module with this source would call."""
    module: dict[str, Any] = {"__name__": name, "lasting": lasting}
    if part is not ...:
        module["STEP_PART"] = part
    exec(compile(source, file, "exec"), module)
    with parts_of_no_model() as parts:
        # in the place of `__torch_dispatch__`
        def operator() -> StepPlace:
            return parts.here()

        place: StepPlace = module["call"](operator)
    return place


PLAIN = "def call(operator):\n    return operator()\n"


def test_neither_file_nor_name_of_ours_says_what_part_something_is() -> None:
    for file in ("/x/moe/dispatch/alltoall.py", "/x/training/loss/head.py", "elsewhere.py"):
        for function in ("call", "_no_moments", "zeros_by_rows"):
            source = PLAIN.replace("call", function) + f"call = {function}\n"
            assert told(source, part="router", file=file).part == "router"
            assert told(source, file=file).part == "other"
    renamed = "def rotary_embedding(operator):\n    return operator()\ncall = rotary_embedding\n"
    assert told(renamed, part="router").part == "router"
    assert told(PLAIN, name="expertmesh.moe.dispatch.alltoall", part="rotary").part == "rotary"


def test_what_another_package_calls_is_told_by_its_modules() -> None:
    assert told(PLAIN, name="torch.optim.adam").part == "optimizer step"
    assert told(PLAIN, name="torch.distributed.fsdp._fully_shard._fsdp_state").part == "FSDP"
    assert told(PLAIN, name="torch.optimal").part == "other"


def test_what_lasts_is_declared_by_its_function() -> None:
    assert told(f"@lasting\n{PLAIN}", part="router").part == LASTING
    assert told(PLAIN, part="router").part == "router"


def test_functions_alike_in_two_modules_are_told_apart() -> None:
    """Their code objects are equal: neither the file nor the module is compared."""
    with parts_of_no_model() as parts:
        found = []
        for part in ("router", "dispatch"):
            module: dict[str, Any] = {"STEP_PART": part}
            exec(compile(PLAIN, f"{part}.py", "exec"), module)
            found.append(module["call"](lambda: parts.here()).part)
    assert found == ["router", "dispatch"]


def test_parts_are_those_that_there_are() -> None:
    known = {part for literal in get_args(declared.StepPart) for part in get_args(literal)} | {None}
    found = set()
    for package in ("moe", "sharding", "training", "checkpoints"):
        for file in sorted((ROOT / package).rglob("*.py")):
            if re.search("^STEP_PART", file.read_text(), re.MULTILINE):
                name = PRODUCT + ".".join(file.relative_to(ROOT).with_suffix("").parts)
                if name.endswith("_triton"):
                    pytest.importorskip("triton")
                found.add(importlib.import_module(name).STEP_PART)
    assert found == known


def kernels() -> list[Any]:
    """Triton kernels of ours that are launched, and not called by another one."""
    found: dict[tuple[str, str], Any] = {}
    for file in [*ROOT.glob("moe/**/*_triton.py"), *ROOT.glob("training/**/*_triton.py")]:
        module = importlib.import_module(PRODUCT + ".".join(file.relative_to(ROOT).with_suffix("").parts))
        of_module = {name: value for name, value in vars(module).items() if hasattr(value, "fn")}
        calls = [node for kernel in of_module.values() for node in ast.walk(tree_of(kernel))]
        called = {node.func.id for node in calls if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        found |= {(module.__name__, name): kernel for name, kernel in of_module.items() if name not in called}
    return list(found.values())


def tree_of(kernel: Any) -> ast.FunctionDef:
    (function,) = ast.parse(inspect.getsource(kernel.fn)).body
    assert isinstance(function, ast.FunctionDef)
    return function


def pointers(kernel: Any, operator: str) -> set[str]:
    """Parameters that `tl.load` or `tl.store` are given, or a sum that begins with one; also in functions that it
    calls."""
    function = tree_of(kernel)
    begun_with = {
        node.targets[0].id: first_name(node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"tl.{operator}":
            name = first_name(node.args[0])
            while name in begun_with:
                name = begun_with[name]
            found.add(name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = kernel.fn.__globals__.get(node.func.id)
            if hasattr(called, "fn"):
                given = zip(tree_of(called).args.args, node.args, strict=False)
                names = {parameter.arg: first_name(argument) for parameter, argument in given}
                found |= {names[name] for name in pointers(called, operator)}
    return found


def first_name(node: ast.expr) -> str:
    while isinstance(node, ast.BinOp):
        node = node.left
    return node.id if isinstance(node, ast.Name) else ""


def test_kernels_declare_what_they_write() -> None:
    pytest.importorskip("triton")
    assert len(kernels()) >= 16
    for kernel in kernels():
        written, updated = written_by(kernel)
        loaded, stored = (pointers(kernel, operator) for operator in ("load", "store"))
        assert stored, kernel.fn
        assert written == stored - loaded, kernel.fn
        assert updated == stored & loaded, kernel.fn


def test_a_kernel_that_declares_nothing_reads_all() -> None:
    """As another package's: what it fills counts once all the same."""

    class Kernel:
        fn = staticmethod(lambda x_ptr, out_ptr: None)

    assert written_by(Kernel()) == (frozenset(), frozenset())
    assert written_by(writes("out_ptr", updates=("x_ptr",))(Kernel())) == ({"out_ptr"}, {"x_ptr"})

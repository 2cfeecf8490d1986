"""What part of a step code is: that every module that computes in one says so, and what is made of it."""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from pathlib import Path
from textwrap import indent
from types import FrameType
from typing import Any, get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from expertmesh.moe.util import step_parts
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.step_parts import (
    STEP_PARTS,
    StepPart,
    Writes,
    has_modules_from_outside,
    is_lasting,
    register_step_part,
    writes,
    written_by,
)
from expertmesh.sharding.topology import Topology
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.monitoring import attribution
from expertmesh.training.monitoring.attribution import LASTING, Parts, StepPlace
from expertmesh.training.monitoring.profiling import _Ranges
from expertmesh.training.optim.low_bit import update_8bit, update_bf16, update_fp32
from expertmesh.training.optim.matrices import change_weight
from expertmesh.training.optim.muon import take_gradient
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.forecasts import has_code_from_outside
from expertmesh.training.planning.rehearsal.triton_stand_in import import_kernels
from expertmesh.training.planning.rehearsal.world import rehearse
from expertmesh.training.steps.step import train_step
from tests.distributed.pool import RankPool
from tests.distributed.reference import my_batches, sharded_model
from tests.families.configs import tiny_config
from tests.parity.case import SAMPLES, Case
from tests.tiny import save_model
from tests.training.dry_runs import CLUSTER, SETTINGS, flags_of

ROOT = Path(__file__).parents[2]
PRODUCT = "expertmesh."
RECORDING = (
    "expertmesh.training.planning.rehearsal.",
    "expertmesh.training.monitoring.attribution",
    "expertmesh.training.monitoring.profiling",
)
HELPERS = {
    "moe.dispatch.exchange",
    "moe.experts.bf16_copies",
    "moe.experts.forward",
    "moe.experts.model_layers",
    "moe.experts.replay",
    "moe.hf_model.build",
    "moe.hf_model.tensor_plan",
    "moe.hf_model.trial",
    "moe.kernels.carve_out",
    "moe.kernels.expert_rows",
    "moe.kernels.fp8_casts",
    "moe.kernels.weight_gradients",
    "moe.linear.division",
    "moe.linear.fp8",
    "moe.linear.linear",
    "moe.util.recompute_cache",
    "sharding.collectives.context_parallel",
    "sharding.collectives.differentiable",
    "sharding.collectives.gloo",
    "sharding.collectives.groups",
    "sharding.collectives.tensor_parallel",
    "sharding.parallelize.offload",
    "sharding.parallelize.recompute",
    "sharding.parallelize.unreached",
    "sharding.parallelize.weight_gradients",
    "sharding.pipeline.cut",
    "sharding.state",
    "training.api.own_loss",
    "training.attention.by_sample",
    "training.attention.complete_sequences",
    "training.attention.context_parallel_attention",
    "training.attention.flash",
    "training.attention.packed_attention",
    "training.model_setup.dense_precision",
    "training.optim.updates",
    "training.tensor_parallel.divide",
    "training.tensor_parallel.kept_positions",
    "training.tensor_parallel.overlap",
    "training.tensor_parallel.regions",
}
"""Modules that run in a step and say nothing, as what they compute belongs to the part that calls them."""


def is_silent(name: str) -> bool:
    """Whether a module of ours has not said what it is, and is no helper."""
    return name not in STEP_PARTS and name.removeprefix(PRODUCT) not in HELPERS


@pytest.fixture(scope="module", autouse=True)
def all_have_said() -> None:
    """Imports every module that says what it is."""
    import_kernels()
    for file in sources():
        if "register_step_part(" in file.read_text():
            importlib.import_module(module_of(file))


def sources() -> Iterator[Path]:
    for folder in ("moe", "sharding", "checkpoints", "training"):
        yield from (ROOT / folder).rglob("*.py")


def module_of(file: Path) -> str:
    return PRODUCT + ".".join(file.relative_to(ROOT).with_suffix("").parts)


@contextmanager
def noting_unlisted() -> Iterator[set[str]]:
    """Modules of ours that have not said what they are and call an operator within it, or stand on the call stack
    between an operator and the module whose part of a step it is; but for helpers, and for those that record, or stand
    in for a GPU."""
    found: set[str] = set()
    here = Parts.here

    def noting(parts: Parts) -> StepPlace:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            name = str(frame.f_globals.get("__name__"))
            is_ours = name.startswith(PRODUCT) and not name.startswith(RECORDING)
            if is_ours and is_silent(name):
                found.add(name)
            if name in STEP_PARTS and STEP_PARTS[name].part is not None:
                break
            frame = frame.f_back
        return here(parts)

    with mock.patch.object(Parts, "here", noting):
        yield found


DRY_RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    # the other settings run no module that these do not
    **{name: SETTINGS[name] for name in ("mixtral", "hybrid", "DeltaNet", "Mamba", "LoRA beside nf4", "shared rows")},
    **{name: SETTINGS[name] for name in ("shared experts, dense first layers, MLA", "biases, windows, sinks")},
    **{name: SETTINGS[name] for name in ("divided in replicas", "divided, and shared rows", "inputs in host memory")},
    "fp32": SETTINGS["grouped products in fp32"],
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


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("name", DRY_RUNS)
def test_every_module_that_calls_operators_is_listed_on_a_gpu(name: str) -> None:
    family, world_size, flags = DRY_RUNS[name]
    with noting_unlisted() as unlisted:
        rehearse(Asked(flags_of(**flags), world_size, CLUSTER), tiny_config(family))
    assert unlisted == set()


BF16 = {"optim": "adamw_bf16"}
REAL_RUNS: dict[str, tuple[Topology, Case]] = {
    "selective": (Topology(4, 2, "full"), Case(SAMPLES[:16], balance=0.02, gradient_checkpointing="selective")),
    "hybrid": (Topology(4, 4, "hybrid"), Case(SAMPLES[:16], settings={"optim": "muon"}, gradient_checkpointing="full")),
    "LoRA": (Topology(2, 1, "full"), Case(SAMPLES[:16], settings={"adapter": "lora", "lora_rank": 4})),
    "bf16": (Topology(2, 2, "full"), Case(SAMPLES[:16], compute_dtype=torch.bfloat16, settings=BF16)),
}


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", REAL_RUNS)
def test_every_module_that_calls_operators_is_listed_on_a_cpu(ranks: RankPool, tmp_path: Path, name: str) -> None:
    save_model(tmp_path)
    topology, case = REAL_RUNS[name]
    for unlisted in ranks.run(_unlisted, topology.world_size, tmp_path, topology, case):
        assert unlisted == set()


def _unlisted(path: Path, topology: Topology, case: Case) -> set[str]:
    model, mesh, _ = sharded_model(path, topology, case)
    optimizer = build_optimizer(model.train(), TrainConfig(model="-", dataset=["-"], **case.settings), mesh)
    batches = my_batches(case, topology, dist.get_rank())
    with noting_unlisted() as unlisted, _Ranges(Parts(model)):
        train_step(model, optimizer, batches, mesh, LossWeights(case.balance, case.z), max_grad_norm=0.1)
    return unlisted


def test_a_module_that_is_not_listed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(STEP_PARTS, "expertmesh.moe.dispatch.permute")
    HELPERS.remove("moe.dispatch.exchange")
    with noting_unlisted() as unlisted:
        rehearse(Asked(flags_of(ep_size=4), 8, CLUSTER), tiny_config("mixtral"))
    HELPERS.add("moe.dispatch.exchange")
    assert unlisted == {"expertmesh.moe.dispatch.permute", "expertmesh.moe.dispatch.exchange"}


class _Modules(torch.nn.Module):
    """What `Parts` asks of a model, without a layer."""


@contextmanager
def parts_of_no_model() -> Iterator[Parts]:
    with (
        mock.patch.multiple(
            "expertmesh.training.monitoring.attribution",
            decoder_layers=lambda model: [],
            moe_layers=lambda model: [],
        ),
        mock.patch("expertmesh.training.monitoring.attribution.router_prefixes", return_value=()),
    ):
        yield Parts(_Modules())


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(step_parts, "STEP_PARTS", dict(STEP_PARTS))
    monkeypatch.setattr(attribution, "STEP_PARTS", step_parts.STEP_PARTS)


def told(source: str, name: str = "anything", file: str = "anywhere.py") -> StepPlace:
    """The place that is found for an operator which `call` of a module with this source would call."""
    module: dict[str, Any] = {"__name__": name}
    exec(compile(source, file, "exec"), module)
    with parts_of_no_model() as parts:
        # in the place of `__torch_dispatch__`
        def operator() -> StepPlace:
            return parts.here()

        place: StepPlace = module["call"](operator)
    return place


PLAIN = "def call(operator):\n    return operator()\n"
METHOD = f"class Own:\n    @staticmethod\n{indent(PLAIN, '    ')}\ncall = Own.call\n"


@pytest.mark.usefixtures("outside")
def test_a_module_from_outside_is_the_part_that_it_is_registered_as() -> None:
    register_step_part("theirs.router", "router", lasting=("Own.call",))
    for file in ("/x/moe/dispatch/alltoall.py", "elsewhere.py"):
        assert told(PLAIN, "theirs.router", file).part == "router"
        assert told(PLAIN, "theirs", file).part == "other"
    assert told(METHOD, "theirs.router").part == LASTING
    renamed = PLAIN.replace("call", "rotary_embedding") + "call = rotary_embedding\n"
    assert told(renamed, "theirs.router").part == "router"
    assert told(renamed).part == "rotary"
    # last, as what runs the tests has this name too
    register_step_part("__main__", "norms")
    assert told(PLAIN, "__main__").part == told(METHOD, "__main__").part == "norms"


@pytest.mark.usefixtures("outside")
def test_a_helper_from_outside_is_what_its_caller_is() -> None:
    register_step_part("theirs.helper", None)
    helper: dict[str, Any] = {"__name__": "theirs.helper"}
    exec(PLAIN, helper)
    caller = {"__name__": "expertmesh.moe.dispatch.alltoall", "helper": helper["call"]}
    exec("def call(operator):\n    return helper(operator)\n", caller)
    with parts_of_no_model() as parts:
        assert caller["call"](lambda: parts.here()).part == "dispatch"


@pytest.mark.usefixtures("outside")
def test_what_cannot_be_registered_is_refused_by_name() -> None:
    with pytest.raises(ExpertMeshError, match=r"theirs cannot be registered as part 'routers' .* router, dispatch"):
        register_step_part("theirs", "routers")  # type: ignore[arg-type]
    register_step_part("theirs", "router")
    register_step_part("theirs", "router")
    for name in ("theirs", "expertmesh.moe.experts.layer"):
        with pytest.raises(ExpertMeshError, match=f"{name} is registered already, as part 'router'"):
            register_step_part(name, "norms")


@pytest.mark.usefixtures("outside")
def test_figures_may_depend_on_code_from_outside() -> None:
    assert not has_modules_from_outside()
    assert not has_code_from_outside(flags_of())
    register_step_part("theirs", "router")
    assert has_code_from_outside(flags_of())


def test_what_another_package_calls_is_told_by_its_modules() -> None:
    assert told(PLAIN, name="torch.optim.adam").part == "optimizer step"
    assert told(PLAIN, name="torch.optim.adagrad").part == "optimizer step"
    assert told(PLAIN, name="torch.distributed.fsdp._fully_shard._fsdp_state").part == "FSDP"
    assert told(PLAIN, name="torch.optimal").part == "other"


def test_functions_alike_in_two_modules_are_told_apart() -> None:
    """Their code objects are equal: neither the file nor the module is compared."""
    with parts_of_no_model() as parts:
        found = []
        for name in ("expertmesh.moe.experts.layer", "expertmesh.moe.dispatch.alltoall"):
            module: dict[str, Any] = {"__name__": name}
            exec(compile(PLAIN, f"{name}.py", "exec"), module)
            found.append(module["call"](lambda: parts.here()).part)
    assert found == ["router", "dispatch"]


def test_what_is_listed_is_there() -> None:
    for name, module in STEP_PARTS.items():
        if name.startswith(PRODUCT):
            file = ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py")
            assert file.is_file(), name
            functions = dict(functions_in(ast.parse(file.read_text())))
            assert functions.keys() >= {*module.lasting, *module.kernels}, name
            for kernel, told in module.kernels.items():
                parameters = {parameter.arg for parameter in functions[kernel].args.args}
                assert parameters >= told.written | told.updated, (name, kernel)
        else:
            of_torch = [attrgetter(path)(importlib.import_module(name)) for path in module.lasting]
            assert of_torch, name
            assert all(map(is_lasting, of_torch)), name
            # as torch's compiler wraps optimizers' own as soon as some package imports it, perhaps before us
            assert all(map(is_lasting, map(torch._dynamo.disable, of_torch))), name
    assert {module.part for module in STEP_PARTS.values()} == {*get_args(StepPart), None}
    for name in HELPERS:
        assert PRODUCT + name not in STEP_PARTS, name
        assert ROOT.joinpath(*name.split(".")).with_suffix(".py").is_file(), name


def functions_in(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Those of a module and of its classes, by their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from functions_in(node, f"{prefix}{node.name}.")


@cache
def computing_by_text() -> set[str]:
    """Modules of ours that have an autograd function, a module of a model or Triton kernels."""
    found = set()
    for file in sources():
        text = file.read_text()
        bases = {
            ast.unparse(base).rpartition(".")[2]
            for node in (ast.walk(ast.parse(text)) if "Function" in text or "Module" in text else ())
            if isinstance(node, ast.ClassDef)
            for base in node.bases
        }
        if bases & {"Function", "Module"} or file.stem.endswith("_triton"):
            found.add(module_of(file))
    return found


def unlisted_by_text() -> set[str]:
    """Those of them that do not say what they are, whether or not a test runs them; but for helpers, and for those that
    record."""
    return {name for name in computing_by_text() if is_silent(name) and not name.startswith(RECORDING)}


def test_every_module_that_has_layers_or_kernels_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unlisted_by_text() == set()
    left_out = {f"{PRODUCT}moe.experts.layer", f"{PRODUCT}moe.linear.dequantize_triton", f"{PRODUCT}training.loss.head"}
    for name in left_out:
        monkeypatch.delitem(STEP_PARTS, name)
    assert unlisted_by_text() == left_out


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


def test_kernels_write_what_is_listed() -> None:
    pytest.importorskip("triton")
    assert len(kernels()) >= 12
    for kernel in kernels():
        told = written_by(kernel)
        loaded, stored = (pointers(kernel, operator) for operator in ("load", "store"))
        assert stored, kernel.fn
        assert told == Writes(frozenset(stored - loaded), frozenset(stored & loaded)), kernel.fn
    for compiled in (update_fp32, update_8bit, update_bf16, change_weight, take_gradient):
        assert frozenset() < written_by(compiled).updated < frozenset(inspect.signature(compiled.fn).parameters)


@pytest.mark.usefixtures("outside")
def test_a_kernel_that_is_not_listed_reads_all() -> None:
    """As another package's: what it fills counts once all the same."""
    module: dict[str, Any] = {"__name__": "theirs"}
    exec("def kernel(x_ptr, out_ptr): pass\nclass Kernel:\n    fn = staticmethod(kernel)\n", module)
    assert written_by(module["Kernel"]()) == Writes()
    told = writes("out_ptr", updates=("x_ptr",))
    register_step_part("theirs", "router", kernels={"kernel": told})
    assert written_by(module["Kernel"]()) == told == Writes(frozenset({"out_ptr"}), frozenset({"x_ptr"}))

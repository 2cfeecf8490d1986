"""Every Triton kernel compiles for GPUs without a flaw."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernel_calls import EXAMPLES
from benchmarks.kernels import SHARED_LIMITS, Row, by_pointer, by_width, flaws

ROOT = Path(__file__).parents[2]
FINE: dict[str, Any] = dict(
    kernel="k", module="m", example="e", variant="", capability=80, registers=9, spills=0, shared=0, loads={128: 4},
    stores={128: 1}, narrow={}, multiplies=False, tensor_core={}, size=1,
)  # fmt: skip


linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton comes for Linux alone")


def compiled_by(*module: str) -> str:
    """What a module prints in a process where kernels are not interpreted: only there can they be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def launched_kernels() -> set[tuple[str, str]]:
    """(module, name) of the kernels of all files except tests: what `triton.jit` decorates, but what others of them
    call."""
    found = set()
    for file in ROOT.glob("[!.]*/**/*.py"):
        if file.is_relative_to(ROOT / "tests"):
            continue
        module = "expertmesh." + ".".join(file.relative_to(ROOT).with_suffix("").parts)
        functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
        kernels = {f.name: f for f in functions if any("triton.jit" in ast.unparse(d) for d in f.decorator_list)}
        calls = [node for f in kernels.values() for node in ast.walk(f) if isinstance(node, ast.Call)]
        called = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        found |= {(module, name) for name in kernels.keys() - called}
    return found


@linux
@pytest.mark.release
def test_every_kernel_compiles_without_a_flaw(tmp_path: Path) -> None:
    """Beyond the exit code: figures are there, and of what is narrow nothing is explained that is wide."""
    printed = compiled_by("benchmarks.kernels", "--json", str(tmp_path / "figures.json"))
    rows: list[dict[str, Any]] = json.loads((tmp_path / "figures.json").read_text())
    there = {(row["module"], row["kernel"]) for row in rows}
    assert ("expertmesh.moe.kernels.swiglu_triton", "_forward_kernel") in launched_kernels()
    assert launched_kernels() <= there
    assert {name for _, name in there} >= {"_padded_copy", "_sdd_kernel", "_dsd_kernel"}
    since = {example.title: example.since for example in EXAMPLES}
    for kernel in there:
        of_kernel = [row for row in rows if (row["module"], row["kernel"]) == kernel]
        earliest = min(since[row["example"]] for row in of_kernel)
        assert {row["capability"] for row in of_kernel} == {sm for sm in SHARED_LIMITS if sm >= earliest}

    for row in rows:
        assert f"{row['kernel']} " in printed
        assert 10 < row["registers"] < 256
        assert row["loads"]
        assert row["stores"]
        if row["module"].endswith("_triton"):
            assert row["loads"].keys() & {"128", "64"}  # codes of 4 bits are half as wide as what they make
            # the largest number of a column or row, or a few numbers of a row, are all that these write
            writes_few = row["kernel"] in {"_largest_kernel", "_row_figures_kernel"}
            assert row["stores"].get("128", 0) > 0 or writes_few
    tensor_cores = {row["capability"]: set(row["tensor_core"]) for row in rows if row["kernel"] == "_sdd_kernel"}
    assert tensor_cores == {80: {"HMMA"}, 90: {"HGMMA"}, 100: {"UTCHMMA"}}
    for example in EXAMPLES:
        narrow = {name for row in rows if row["example"] == example.title for name in row["narrow"]}
        assert narrow == example.narrow.keys(), example.title


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spills": 2}, "has 2 instructions that spill"),
        ({"shared": 164 * 1024}, "takes 167936 bytes of shared memory per block, of 166912"),
        ({"narrow": {"grad": ""}, "loads": {32: 1}}, "at grad, for which"),
        ({"loads": {128: 3, 64: 1}}, "where its source moves 128"),
        ({"multiplies": True}, "without tensor cores"),
    ],
)
def test_flaws(change: dict[str, Any], said: str) -> None:
    assert flaws(Row(**FINE)) == []
    (flaw,) = flaws(Row(**{**FINE, **change}))
    assert flaw.startswith("m.k () for sm_80 ")
    assert said in flaw


def test_flaws_that_are_none() -> None:
    assert flaws(Row(**{**FINE, "narrow": {"grad": "a scalar"}, "loads": {32: 1}})) == []
    assert flaws(Row(**{**FINE, "shared": 164 * 1024, "capability": 90})) == []
    assert flaws(Row(**{**FINE, "multiplies": True, "tensor_core": {"HMMA": 8}})) == []


def test_widths_of_machine_code() -> None:
    code = """
        /*0000*/  @!P0 LDG.E R8, desc[UR10][R36.64] ;
        /*0010*/       LDG.E.64 R34, [R34.64] ;
        /*0020*/       LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0030*/       LDGSTS.E.BYPASS.LTC128B.128 [R3], [R2.64] ;
        /*0040*/       LDG.E.U16 R4, [R2.64] ;
        /*0050*/       LDS.128 R4, [R2] ;
        /*0060*/       STG.E.U8 [R2.64], R4 ;
    """
    assert by_width(code, "LDG") == {128: 2, 64: 1, 32: 1, 16: 1}
    assert by_width(code, "STG") == {8: 1}


def test_widths_by_pointer(tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text("x = tl.load(x_ptr + i)\ny = tl.load(y + i)\ntl.store(out_ptr + i, x)\n")
    llir = f"""
        %1 = call i32 asm sideeffect "@$1 ld.global.v4.b32 {{ $0 }}, [ $2 + 0 ];", "=r,b,l"(i1 true), !dbg !5
        %2 = call i32 asm sideeffect "ld.global.L1::evict_last.b16 {{ $0 }}, [ $1 + 0 ];", "=c,l"(ptr %p), !dbg !5
        call void asm sideeffect "cp.async.cg.shared.global [ $0 + 0 ], [ $1 + 0 ], 0x10, 0x10;", "r,l"(), !dbg !6
        call void asm sideeffect "st.global.v2.b32 [ $1 + 0 ], {{ $0 }};", "r,l"(), !dbg !7
!3 = !DIFile(filename: "k.py", directory: "{tmp_path}")
!4 = distinct !DISubprogram(name: "k", scope: !3, file: !3, line: 1)
!5 = !DILocation(line: 1, column: 5, scope: !4)
!6 = !DILocation(line: 2, column: 5, scope: !4, inlinedAt: !5)
!7 = !DILocation(line: 3, column: 1, scope: !4)
"""
    assert by_pointer(llir) == {"x": 16, "y": 128, "out": 64}


@pytest.mark.slow
@linux
def test_no_kernel_is_compiled_anew_for_another_number_of_rows() -> None:
    """Routing and batches decide how many rows there are: a step would wait for the compiler somewhere in a run."""
    compiled = json.loads(compiled_by("tests.benchmarks.specialisations"))
    assert {f"{module}.{name}" for module, name in launched_kernels()} - compiled.keys() == {
        # these see parameters, whose shapes stay
        "expertmesh.moe.linear.dequantize_triton._fp8_kernel",
        "expertmesh.moe.linear.dequantize_triton._mxfp4_kernel",
        "expertmesh.moe.linear.dequantize_triton._nf4_kernel",
    }
    for name, kinds in compiled.items():
        assert len(kinds) == 1, f"{name} is compiled {len(kinds)} times: {kinds}"

"""That a run on a GPU which Triton could compile nothing for ends before its weights are loaded, in one line."""

import re
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from expertmesh.moe.kernels.c_compiler import check_c_compiler
from expertmesh.moe.util.errors import ExpertMeshError


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import build

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    if hasattr(build, "_find_compiler"):  # Triton 3.6 looks for one each time
        build._find_compiler.cache_clear()


def test_a_compiler_that_is_there_is_used_and_its_work_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_c_compiler("cuda")
    assert list((tmp_path / "cache").rglob("expertmesh_probe*"))
    without_compiler(tmp_path, monkeypatch)
    check_c_compiler("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's access to the driver was compiled before")
def test_none_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(tmp_path, monkeypatch)
    with pytest.raises(ExpertMeshError, match=r"CC is not set, and neither gcc nor clang is in PATH.*install gcc"):
        check_c_compiler("cuda")
    check_c_compiler("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's access to the driver was compiled before")
def test_a_compiler_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(ExpertMeshError, match="CC is /nowhere/cc"):
        check_c_compiler("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's access to the driver was compiled before")
def test_missing_headers_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = sysconfig.get_paths() | {"include": str(tmp_path)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda *args, **settings: paths)
    with pytest.raises(ExpertMeshError, match=re.escape(f"Python.h belongs in {tmp_path}")):
        check_c_compiler("cuda")


def test_triton_that_is_not_installed_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr("expertmesh.moe.kernels.c_compiler.find_spec", lambda name: None)
    check_c_compiler("cuda")


def without_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import build

    monkeypatch.setenv("PATH", str(tmp_path))
    if hasattr(build, "_find_compiler"):  # Triton 3.6 looks for one each time
        build._find_compiler.cache_clear()

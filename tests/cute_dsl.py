"""Packages of kernels in CuTe DSL, in the user's cache, and scripts that have their kernels compiled for cards that
this machine has not."""

import os
import subprocess
import sys
from pathlib import Path

from tests.real.conftest import kept_packages

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "flash-attn-4==4.0.0b36",
    *(f"nvidia-cutlass-dsl{part}==4.8.1" for part in ("", "-libs-base", "-libs-core", "-libs-cu12")),
    *("cuda-bindings==13.5.0", "cuda-pathfinder==1.9.1", "protobuf==7.36.2", "apache-tvm-ffi==0.1.15.post2"),
    *("quack-kernels==0.6.5", "torch-c-dlpack-ext==0.1.5", "einops==0.8.2"),
)
"""Without what these ask for: torch is that of the tests. Some 300 MB."""
MULTIPROCESSORS = {9: 132, 10: 148}
"""Of a card, by its major compute capability: of Hopper and Blackwell."""


def run_with_packages(script: str, major: int, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m script major *arguments`, with the packages, as on such a card; `folder` is for their files."""
    # quack-kernels asks by this name which functions are of packages
    packages = folder / "site-packages"
    packages.symlink_to(kept_packages("flash-attn-4", "--no-deps", *PACKAGES))
    paths = (ROOT / ".package", ROOT, packages, packages / "nvidia_cutlass_dsl" / "dsl_packages")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "FLASH_ATTENTION_ARCH": f"sm_{major}0",
        "QUACK_ARCH": f"sm_{major}0",
        "QUACK_CACHE_DIR": str(folder),
        "CUTE_DSL_ARCH": f"sm_{major}0a",
        "FLASH_ATTENTION_NUM_SMS": str(MULTIPROCESSORS[major]),
    }
    command = [sys.executable, "-m", script, *map(str, (major, *arguments))]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)

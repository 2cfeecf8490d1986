"""What torch gives flash attention 4 through our code is what the package takes, and its kernels compile for Hopper and
Blackwell: all but running them, which needs a card."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real.conftest import kept_packages

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "flash-attn-4==4.0.0b36",
    *(f"nvidia-cutlass-dsl{part}==4.8.1" for part in ("", "-libs-base", "-libs-core", "-libs-cu12")),
    *("cuda-bindings==13.5.0", "cuda-pathfinder==1.9.1", "protobuf==7.36.2", "apache-tvm-ffi==0.1.15.post2"),
    *("quack-kernels==0.6.5", "torch-c-dlpack-ext==0.1.5", "einops==0.8.2"),
)
"""Without what these ask for: torch is that of the tests."""
HOPPER, BLACKWELL = (9, 132), (10, 148)
"""Major compute capability, and multiprocessors of such a card."""

pytestmark = pytest.mark.release


@pytest.fixture(scope="module")
def packages() -> Path:
    """Some 300 MB."""
    return kept_packages("flash-attn-4", "--no-deps", *PACKAGES)


@pytest.mark.parametrize(
    ("card", "widths", "window", "said"),
    [
        (HOPPER, (64, 64), 0, ""),
        (HOPPER, (64, 64), 64, ""),
        (HOPPER, (192, 192), 64, ""),
        (BLACKWELL, (128, 128), 0, ""),
        (BLACKWELL, (128, 128), 64, ""),
        (BLACKWELL, (192, 192), 0, ""),
        (BLACKWELL, (192, 192), 64, "ExpertMeshError: flash attention 4 takes no heads of 192 with windows"),
    ],
)
def test_kernels_compile(
    packages: Path, card: tuple[int, int], widths: tuple[int, int], window: int, said: str
) -> None:
    major, multiprocessors = card
    paths = (ROOT / ".package", ROOT, packages, packages / "nvidia_cutlass_dsl" / "dsl_packages")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "FLASH_ATTENTION_ARCH": f"sm_{major}0",
        "CUTE_DSL_ARCH": f"sm_{major}0a",
        "FLASH_ATTENTION_NUM_SMS": str(multiprocessors),
    }
    command = [sys.executable, "-m", "tests.training.compile_flash_4", *map(str, (major, *widths, window))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert (done.returncode == 0) is (said == ""), done.stderr
    assert said in done.stderr

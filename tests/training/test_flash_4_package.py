"""What torch gives flash attention 4 through our code is what the package takes, and its kernels compile for Hopper and
Blackwell: all but running them, which needs a card."""

from pathlib import Path

import pytest

from tests.cute_dsl import run_with_packages

HOPPER, BLACKWELL = 9, 10

pytestmark = pytest.mark.release


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
def test_kernels_compile(tmp_path: Path, card: int, widths: tuple[int, int], window: int, said: str) -> None:
    done = run_with_packages("tests.training.compile_flash_4", card, *widths, window, folder=tmp_path)
    assert (done.returncode == 0) is (said == ""), done.stderr
    assert said in done.stderr

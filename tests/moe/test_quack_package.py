"""What the expert kernel `quack` gives its package is what that takes, the stand-in computes as the package's own
references do, and the kernels compile for Hopper and Blackwell: all but running them, which needs a card."""

from pathlib import Path

import pytest

from tests.cute_dsl import MULTIPROCESSORS, run_with_packages

pytestmark = pytest.mark.release


@pytest.mark.parametrize("card", MULTIPROCESSORS)
def test_kernels_compile(tmp_path: Path, card: int) -> None:
    done = run_with_packages("tests.moe.compile_quack", card, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    # the six GEMMs of experts whose gate and up are one tensor, the one of them that weighs rows, the four that gather
    # them, and one by a transposed weight
    assert len(list(tmp_path.glob("*/*.o"))) == 12

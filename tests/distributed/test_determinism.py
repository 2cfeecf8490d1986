"""--deterministic: the same run twice has the same bits."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from expertmesh.training.model_setup.determinism import set_determinism
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import Ended, Runs, Told, assert_same_bits, tell

FLAGS = (
    "--max-steps 3 --learning-rate 1e-3 --router-aux-loss-coef 0.02 --router-z-loss-coef 0.01 --deterministic --ep-size"
)


def assert_same_twice(first: Ended, second: Ended) -> None:
    assert_same_bits(first.weights, second.weights)
    for key in ("loss", "grad_norm"):
        assert first.values(key) == second.values(key)


@contextmanager
def torch_as_before() -> Iterator[None]:
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
            os.environ.pop(name, None)


def run_deterministic(argv: list[str]) -> Told:
    """train_ep.py on this rank, where torch is told."""
    with torch_as_before():
        told = tell(argv)
        assert torch.are_deterministic_algorithms_enabled()
        return told


def empty_memory() -> list[bool]:
    """Whether torch fills memory that it allocates, without and with --deterministic."""
    found = []
    with torch_as_before():
        for prepare in (lambda: torch.use_deterministic_algorithms(True), lambda: set_determinism(True)):
            prepare()
            memory = torch.full((1 << 16,), 7.0)
            # the allocator gives the same memory again
            del memory
            found.append(bool(torch.empty(1 << 16).isnan().all()))
    return found


def test_it_is_as_the_flag_says_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second model of a process too; a variable that the user has set stays."""
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with torch_as_before():
        for is_on in (True, False, True, False):
            set_determinism(is_on)
            assert torch.are_deterministic_algorithms_enabled() == is_on
            assert torch.utils.deterministic.fill_uninitialized_memory != is_on  # type: ignore[attr-defined]
            assert ("FLASH_ATTENTION_DETERMINISTIC" in os.environ) == is_on
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_memory_is_not_filled(ranks: RankPool) -> None:
    assert ranks.run(empty_memory, 1) == [[True, False]]


@pytest.mark.slow
@pytest.mark.parametrize("more", ["--packing", "--bf16 --gradient-checkpointing --expert-kernel=torch-grouped"])
def test_twice_on_cpu(runs: Runs, more: str) -> None:
    first, second = (runs(2, f"{FLAGS} 2 {more}", name, call=run_deterministic) for name in ("first", "second"))
    assert_same_twice(first, second)

"""--deterministic: the same run twice has the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from expertmesh.training.model_setup.determinism import compute_deterministically
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import ROOT, read, run_main
from tests.tiny import save_model, save_tokenizer


def flags(model: Path, data: Path, out: Path) -> list[str]:
    return [
        "--model", str(model), "--dataset", str(data), "--output-dir", str(out), "--max-steps", "3",
        "--learning-rate", "1e-3", "--router-aux-loss-coef", "0.02", "--router-z-loss-coef", "0.01", "--deterministic",
    ]  # fmt: skip


def assert_same_bits(first: Path, second: Path) -> None:
    weights, expected = read(first / "hf"), read(second / "hf")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    losses, others = (
        [
            (line["loss"], line["grad_norm"])
            for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
            if "warning" not in line
        ]
        for out in (first, second)
    )
    assert losses == others


def run_deterministic(argv: list[str]) -> tuple[int, str, bool]:
    """train_ep.py on this rank, and whether torch was told; the next test's torch is as before."""
    try:
        return *run_main(argv), torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
            os.environ.pop(name, None)


def empty_memory() -> tuple[bool, bool]:
    """Whether torch fills memory that it allocates, without and with --deterministic."""
    found = []
    try:
        for prepare in (lambda: torch.use_deterministic_algorithms(True), compute_deterministically):
            prepare()
            memory = torch.full((1 << 16,), 7.0)
            # the allocator gives the same memory again
            del memory
            found.append(bool(torch.empty(1 << 16).isnan().all()))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
            os.environ.pop(name, None)
    return found[0], found[1]


def test_memory_is_not_filled(ranks: RankPool) -> None:
    assert ranks.run(empty_memory, 1) == [(True, False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["--packing"], ["--bf16", "--gradient-checkpointing", "--expert-kernel=torch-grouped"]]
)
def test_twice_on_cpu(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, more: list[str]) -> None:
    for name in ("first", "second"):
        argv = [*flags(tiny_model, tiny_data, tmp_path / name), *more, "--use-cpu", "--ep-size", "2"]
        results = ranks.run(run_deterministic, 2, argv, join_group=False)
        assert [(code, told) for code, _, told in results] == [(0, True)] * 2, results
    assert_same_bits(tmp_path / "first", tmp_path / "second")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more",
    [
        ["--bf16", "--expert-kernel", "torch-grouped"],
        ["--bf16", "--expert-kernel", "loop", "--packing"],
        ["--cross-entropy", "chunked", "--gradient-checkpointing", "selective"],
        ["--cross-entropy", "full"],
    ],
    ids=" ".join,
)
def test_twice_on_a_gpu(tiny_data: Path, tmp_path: Path, more: list[str]) -> None:
    """Each time in a process of its own: cuBLAS reads its setting once."""
    save_model(tmp_path / "model", hidden_size=128, intermediate_size=128)
    save_tokenizer(tmp_path / "model")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "CUBLAS_WORKSPACE_CONFIG")}
    for name in ("first", "second"):
        command = [sys.executable, "train_ep.py", *flags(tmp_path / "model", tiny_data, tmp_path / name), *more]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert_same_bits(tmp_path / "first", tmp_path / "second")

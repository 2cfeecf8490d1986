"""Two ranks on one card, over NCCL: the steps of one rank, in every parallel layout, and over a save and a resume."""

import shutil
from pathlib import Path

import pytest

from tests.distributed.whole_runs import Ended, Runs, assert_same_bits
from tests.gpu.one_card import assert_near, run_on

LAYOUTS = {
    "ep 2": "--ep-size 2",
    "a row a rank": "--ep-size 2 --dispatch rank",
    "two chunks": "--ep-size 2 --overlap-chunks 2",
    "recomputed": "--ep-size 2 --overlap-chunks 2 --gradient-checkpointing selective --keep-expert-products 2",
    "inputs offloaded": "--ep-size 2 --gradient-checkpointing full --offload-activations",
    "all offloaded": "--ep-size 2 --offload",
    "hybrid": "--ep-size 2 --dense-shard hybrid",
    "gathered once": "--ep-size 2 --no-reshard-after-forward",
    "FSDP": "",
    "pp 2, 1f1b": "--pp-size 2 --pipeline-schedule 1f1b",
    "pp 2, interleaved": "--pp-size 2 --pipeline-schedule interleaved",
    "pp 2, zero-bubble": "--pp-size 2 --pipeline-schedule zero-bubble",
    "tp 2": "--tp-size 2",
    "tp 2, whole logits": "--tp-size 2 --no-loss-parallel",
    "cp 2": "--cp-size 2",
    "cp 2, packed": "--cp-size 2 --packing",
}
TOLERANCE = 1e-4
"""In fp32, some of whose sums come in any order on a GPU."""


@pytest.fixture(scope="module")
def alone() -> dict[str, Ended]:
    """Runs on one rank, by their flags."""
    return {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_as_one(card_runs: Runs, device: str, alone: dict[str, Ended], layout: str) -> None:
    """Losses, gradient norms, and what became of every weight."""
    found = run_on(device, card_runs, 2, LAYOUTS[layout], layout)
    more = "--packing" if "--packing" in LAYOUTS[layout] else ""
    if more not in alone:
        alone[more] = run_on(device, card_runs, 1, more, f"alone{more}")
    assert_near(found, alone[more], card_runs.model, TOLERANCE, of_weights=10 * TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["--expert-kernel torch-grouped", "--dispatch rank --dispatch-sums float32"])
def test_in_bf16(card_runs: Runs, device: str, more: str, tmp_path: Path) -> None:
    one, two = (
        run_on(device, card_runs, number, f"--bf16 --ep-size {number} {more}", tmp_path / str(number))
        for number in (1, 2)
    )
    assert_near(two, one, card_runs.model, 1e-2, of_weights=0.1)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch_8bit", "muon", "shampoo"])
@pytest.mark.parametrize("world_size", [2, 1])
def test_saved_and_resumed(card_runs: Runs, device: str, tmp_path: Path, optim: str, world_size: int) -> None:
    """From a checkpoint that was written beside the training of two ranks, on as many or on one."""
    flags = f"--save-steps 2 --async-save --optim {optim} --learning-rate 1e-2 --ep-size"
    whole = run_on(device, card_runs, 2, f"{flags} 2", tmp_path / "whole")
    assert whole.saved == [2, 3]
    shutil.copytree(whole.out, tmp_path / "part")
    for gone in ("hf", "checkpoints/step-00000003"):
        shutil.rmtree(tmp_path / "part" / gone)
    (tmp_path / "part" / "finished.json").unlink()
    resumed = run_on(device, card_runs, world_size, f"{flags} {world_size} --resume auto", tmp_path / "part")
    assert resumed.values("step") == [1, 2, 3]
    assert_near(resumed, whole, card_runs.model, 10 * TOLERANCE, of_weights=1e-2)
    if world_size == 2 and device == "cpu":
        assert_same_bits(resumed.weights, whole.weights)

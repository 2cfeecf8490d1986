"""What runs beside the stream that computes: the counts' exchange, copies to host memory and back, batches made ahead;
and what sees it: the profiler, the recorder of collectives."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import expertmesh
from benchmarks.gpu_step import WAIT
from expertmesh.moe.dispatch.alltoall import exchange_counts, wait_for_counts
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.sharding.mesh import build_mesh
from expertmesh.sharding.parallelize.offload import InputStore, copies_of
from expertmesh.sharding.runtime.process import end_process_group, start_process_group
from expertmesh.sharding.runtime.watchdog import recorded_collectives
from expertmesh.sharding.topology import Topology
from expertmesh.training.data.batch import collate
from expertmesh.training.steps.step import begin_to_read
from tests.distributed.pool import RankPool
from tests.distributed.test_offloading import chain
from tests.images import collated, image_model, sample
from tests.training.test_batches import assert_same
from tests.training.test_prefetched import ROWS
from tests.training.test_profiling import Told, check_files_of_a_stretch, recorded, two_parts


def test_counts_do_not_wait_for_what_is_queued_after_them() -> None:
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        counts_E = torch.arange(8, device=device)
        group: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        exchange_counts(counts_E, group, [8])  # communicators are made when first used
        wait_for_counts(device)
        queued = torch.cuda.Event()
        received_E, told = exchange_counts(counts_E, group, [3, 5])
        torch.cuda._sleep(10**10)
        queued.record()
        wait_for_counts(device)
        assert not queued.query(), "the wait was for the counts alone"
        assert (told.sent_PS, told.received_PS) == ([[3], [25]], [[3], [25]])
        assert told.by_expert == [[0, 1, 2], [3, 4, 5, 6, 7]]
        assert received_E.tolist() == counts_E.tolist()
    finally:
        dist.destroy_process_group()


def test_numbers_do_not_wait_for_what_is_queued_after_them() -> None:
    read, queued = begin_to_read(torch.arange(3.0, device="cuda")), torch.cuda.Event()
    torch.cuda._sleep(10**10)
    queued.record()
    assert read() == [0.0, 1.0, 2.0]
    assert not queued.query(), "the wait was for the numbers alone"


STEPS: dict[str, dict[str, Any]] = {
    "fused AdamW": {},
    "8-bit state": {"optim": "adamw_torch_8bit"},
    "in bf16 alone": {"optim": "adamw_bf16"},
    "Muon": {"optim": "muon"},
    "images": {"images": True, "router_aux_loss_coef": 0.0},
}


@pytest.mark.parametrize("name", STEPS)
def test_the_host_waits_few_times_a_step(
    ranks: RankPool, device: str, tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """For counts, losses, the gradients' norm and the signal to stop; and once a layer where rows are padded."""
    settings, model = STEPS[name], tiny_model
    if "images" in settings:
        image_model("qwen3_vl_moe").save_pretrained(model := tmp_path)
    ((waits, layers),) = ranks.run(_waits_of_a_step, 1, model, device, settings, join_group=False)
    assert len(waits) <= 4 + layers, waits


def _waits_of_a_step(model: Path, device: str, settings: dict[str, Any]) -> tuple[list[str], int]:
    """The lines that have the host wait, and how many MoE layers there are."""
    engine = expertmesh.load(model, use_cpu=device == "cpu", bf16=True, **settings)
    tokens = torch.arange(32).view(2, 16)
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0
    batch: Any = {"input_ids": tokens, "labels": tokens.where(mask > 0, -100), "attention_mask": mask}
    if "images" in settings:
        parts = ((1, (2, 3), 9), (9,))
        batch = collated(engine.model, [[sample(engine.model, *each, seed=0)] for each in parts])
    for _ in range(2):
        engine.step([batch])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            assert engine.step([batch]).loss > 0
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    end_process_group()
    waits = [f"{each.filename}:{each.lineno}" for each in told if WAIT in str(each.message)]
    return waits, len(moe_layers(engine.model))


def test_offloaded_inputs_keep_every_bit(device: str) -> None:
    assert all(map(torch.equal, chain(copies_of(device), device), chain(None, device)))


def test_offloaded_inputs_leave_the_gpu() -> None:
    """None of 16 inputs is there at the end of forward."""
    held = []
    for copies in (None, copies_of("cuda")):
        plain = partial(checkpoint, use_reentrant=False)
        run = plain if copies is None else InputStore(copies).around(plain)
        first = x = torch.randn(2**20, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        for _ in range(16):
            x = run(torch.sin, x)
        held.append((torch.cuda.memory_allocated() - before) / 2**22)
        x.sum().backward()
        assert first.grad is not None
    # the result; and the inputs, of which the first is the caller's
    assert held == [16, 1]


def test_batches_come_from_pinned_memory() -> None:
    batch = collate(ROWS[:3])
    moved = batch.to(torch.device("cuda"))
    assert moved.tokens_BS.is_cuda
    assert moved.to(torch.device("cuda")).tokens_BS.data_ptr() == moved.tokens_BS.data_ptr()
    assert all(tensor.is_pinned() for tensor in batch.pinned().tensors())
    assert_same(moved.to(torch.device("cpu")), batch)


def test_files_of_the_profiler(tmp_path: Path) -> None:
    check_files_of_a_stretch(tmp_path, "cuda", ["json", "memory.pickle", "trace.json.gz"])


def test_kernels_of_each_part() -> None:
    """Their time, and the device's memory; in backward, which has a thread of its own there, too."""

    def run(told: Told) -> None:
        two_parts(told, "cuda")
        told.part = "backward"
        x = torch.ones(1024, 1024, device="cuda", requires_grad=True)
        loss: Tensor = (x @ x).sum()
        told.part = "gradients"
        loss.backward()

    # cuBLAS takes room of its own the first time
    two_parts(Told(), "cuda")
    _, wall, costs = recorded(run, device="cuda")
    matrix = 256 * 256 * 4
    assert costs["products"].allocated_bytes == 2 * matrix
    for name in ("products", "sums", "backward", "gradients"):
        assert 0 < costs[name].seconds < wall, name
    assert costs["gradients"].allocated_bytes >= 2 * 1024 * 1024 * 4


def test_the_recorder_knows_collectives_over_nccl(ranks: RankPool, device: str) -> None:
    (latest,) = ranks.run(_reduce, 1, device, join_group=False)
    assert latest[:3] == ("all_reduce", "world", [[3]])
    assert latest[3] in (("scheduled", "started", "completed") if device == "cuda" else ("",)), "gloo tells none"


def _reduce(device: str) -> tuple[str, str, list[list[int]], str]:
    ranks = start_process_group(use_cpu=device == "cpu", timeout_seconds=60)
    build_mesh(device, Topology(1, 1))
    dist.all_reduce(torch.ones(3, device=ranks.device))
    latest = recorded_collectives()[-1]
    end_process_group()
    return latest.name, latest.group, latest.sizes, latest.state

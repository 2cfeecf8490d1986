"""The cost model's arithmetic, and what must hold of it whatever the machine."""

from dataclasses import replace
from typing import Any

import pytest

from expertmesh.moe.hf_model.counts import training_flops
from expertmesh.training.model_setup.rates import Constant, Rates
from expertmesh.training.planning.planner.clock import Clock
from expertmesh.training.planning.planner.cost import StepTime, model_flops, seconds_among, step_time
from expertmesh.training.planning.planner.hardware import DEVICES, Device, Hardware, Link, products_in
from expertmesh.training.planning.planner.setting import Setting
from expertmesh.training.planning.planner.step_order import PlannedRun
from expertmesh.training.planning.planner.traffic import Traffic, between_nodes, by_link, step_traffic
from tests.sharding.planned import tiny_run
from tests.tiny import tiny_config

MACHINE = Hardware("round numbers", Device(1e12, 1e11, 1e11, 8e10), Link(1e9, 1e-6), Link(1e8, 1e-5))
PROPORTIONATE = {"hidden_size": 64, "intermediate_size": 128}


def run_of(world_size: int, ep_size: int, **flags: Any) -> PlannedRun:
    flags = {"ep_size": ep_size, "bf16": True, "max_seq_length": 512, "per_device_train_batch_size": 1, **flags}
    return tiny_run(world_size, flags, PROPORTIONATE, "cuda")


def collective_time(traffic: Traffic, setting: Setting, gpus_per_node: int) -> float:
    return seconds_among(traffic.kind, traffic.sent, setting.group(traffic.group), MACHINE, gpus_per_node)


def test_experts_come_from_host_memory() -> None:
    """Those of each layer twice a micro-batch, at the rate that the device says; beside what is computed, if it can."""
    lora: dict[str, Any] = {"adapter": "lora", "offload_experts": True}
    run = run_of(2, 2, **lora)
    brought = 2 * sum(unit.in_host for unit in run.units.values())
    # 4 of 8 experts, of three matrices 64 x 128 in bf16
    assert brought == 2 * len(run.model.layers) * 4 * 3 * 64 * 128 * 2

    def seconds(host_bandwidth: float, **flags: Any) -> StepTime:
        machine = replace(MACHINE, device=replace(MACHINE.device, host_bandwidth=host_bandwidth))
        return step_time(run_of(2, 2, **flags), machine, 8)

    there, fast, slow = seconds(1e30, adapter="lora"), seconds(1e30, **lora), seconds(1e3, **lora)
    assert slow.total - fast.total == pytest.approx(brought / 1e3, rel=1e-3)
    assert fast.total < 1.5 * there.total


def test_a_ring_sends_one_rank_in_k_across_nodes() -> None:
    setting = Setting(16, 8)
    over_all = Traffic("layers", "all-gather", "stage", 1, 1e8)
    assert between_nodes(over_all, setting, 8) == 1 / 8
    assert between_nodes(over_all, setting, 16) == 0
    # replicas are 8 ranks apart: nobody of a dp group shares a node
    assert between_nodes(replace(over_all, group="dp"), setting, 8) == 1
    # 7/8 of 1e8 bytes at 1e9 a second, 1/8 at 1e8; 7 hops inside a node and 1 between
    assert collective_time(over_all, setting, 8) == pytest.approx(0.125 + 7e-6 + 1e-5)


def test_an_all_to_all_goes_straight_to_each_rank() -> None:
    rows = Traffic("rows", "all-to-all", "ep", 1, 7e8)
    assert between_nodes(rows, Setting(16, 8), 8) == 0
    assert between_nodes(rows, Setting(16, 8), 4) == pytest.approx(4 / 7)
    assert collective_time(rows, Setting(16, 8), 4) == pytest.approx(4e8 / 1e8 + 1e-5)


def test_fsdp_hides_behind_kernels_and_all_to_alls_do_not() -> None:
    clock = Clock(Rates())
    clock.kernel(1.0)
    ready = clock.shard(0.5)
    clock.kernel(0.25)
    clock.until(ready)
    assert (clock.now, clock.exposed) == (1.5, 0.25)
    clock.wait(1.0)
    clock.shard(0.5)
    clock.end()
    assert (clock.now, clock.computing, clock.waiting, clock.sharding, clock.exposed) == (3.0, 1.25, 1.0, 1.0, 0.75)


def test_kernels_run_beside_all_to_alls_that_travel() -> None:
    """Which go one after the other among the same ranks; FSDP's are others'."""
    clock = Clock(Rates())
    sent = [clock.send(*each) for each in (("ep", 1.0), ("ep", 0.5), ("others", 0.25))]
    clock.kernel(0.75)
    gathered = clock.shard(0.25)
    assert clock.arrive("ep") == 0.25
    clock.kernel(1.0)
    assert clock.arrive("ep") == clock.arrive("others") == 0.0
    assert [(each.start, each.end) for each in (*sent, gathered)] == [(0, 1), (1, 1.5), (0, 0.25), (0.75, 1.0)]
    assert (clock.now, clock.computing, clock.waiting, clock.exposed) == (2.0, 1.75, 0.25, 0.0)


def test_what_overlaps_is_slower() -> None:
    """Beside a collective kernels run at half their speed; it takes four fifths of its own."""
    clock = Clock(Rates((), (Constant("compute beside", 0.5, ""), Constant("collective beside", 0.8, ""))))
    gathered = clock.shard(0.4)
    # 0.5 s until it has come, in which 0.25 s are computed, and then the rest
    clock.kernel(1.0)
    assert clock.now == pytest.approx(1.25)
    clock.until(gathered)
    assert (gathered.start, gathered.end) == pytest.approx((0.0, 0.5))
    assert (clock.computing, clock.exposed, clock.waiting) == pytest.approx((1.0, 0.25, 0.0))
    # 0.2 s of kernels take 0.4, in which 0.32 of the all-to-all's 0.5 s pass
    clock.send("ep", 0.5)
    clock.kernel(0.2)
    assert clock.arrive("ep") == pytest.approx(0.18)
    assert clock.waiting == pytest.approx(0.2 + 0.18)
    assert clock.now == pytest.approx(1.25 + 0.4 + 0.18)
    # nothing beside what is waited for at once
    clock.shard(0.3)
    clock.wait(0.2)
    clock.end()
    assert clock.now == pytest.approx(1.83 + 0.3)
    assert clock.now == pytest.approx(clock.computing + clock.exposed + clock.waiting)


def test_kernels_wait_for_the_host() -> None:
    """Which is ahead, until it has to know what they have found."""
    clock = Clock(Rates((), (Constant("wait", 0.125, ""),)))
    clock.call(0.25)
    clock.launch()
    clock.kernel(1.0)
    clock.call(0.5)
    clock.launch()
    assert (clock.now, clock.launching) == (1.25, 0.25)
    clock.read()
    clock.call(0.25)
    clock.launch()
    assert (clock.now, clock.launching) == (1.625, 0.625)


def test_links_share_out_all_bytes() -> None:
    run = run_of(16, 4, dense_shard="hybrid")
    traffic = step_traffic(run)
    assert sum(by_link(traffic, run.setting, 8)) == pytest.approx(sum(t.total for t in traffic))
    assert by_link(traffic, run.setting, 16)[1] == 0


def test_a_lone_rank_only_computes() -> None:
    run = run_of(1, 1)
    time = step_time(run, MACHINE, 8)
    assert time.sharding == time.exposed == time.all_to_alls == 0
    kernels = [
        kernel for part in (run.measured.root, *run.measured.kinds) for span in part.forward for kernel in span.kernels
    ]
    assert kernels
    assert time.matrices > model_flops(run) / 1e12
    assert time.host > 0


def test_flops_are_those_of_the_closed_formula() -> None:
    """FLOPs of all parts but router statistics and the like, which have no matmuls."""
    run = run_of(1, 1)
    formula = training_flops(run.model.counts, tiny_config(**PROPORTIONATE), 512, 511, [512 * 513 // 2])
    assert model_flops(run) == pytest.approx(formula, rel=0.01)
    # what is recomputed is not needed, and not counted
    assert model_flops(run_of(1, 1, gradient_checkpointing="full")) == pytest.approx(model_flops(run))
    again = step_time(run_of(1, 1, gradient_checkpointing="full"), MACHINE, 8).matrices
    assert 1.1 < again / step_time(run, MACHINE, 8).matrices < 1.34


def test_products_run_at_the_rate_of_their_dtype() -> None:
    """Where products take so long that nothing else counts: in bf16 at 1e7 operations a second, in TF32 at half of it,
    in fp32 at 1e6."""
    slow = replace(MACHINE, device=Device(1e7, 1e6, 1e11, 8e10))
    run = run_of(1, 1)
    dtypes = [(True, False), (False, True), (False, False), (True, True)]
    seconds = [step_time(run, products_in(slow, *dtype, fp8=False), 8).matrices for dtype in dtypes]
    assert [s / seconds[0] for s in seconds] == pytest.approx([1, 2, 10, 1], rel=1e-3)


def test_a_fast_card_waits_for_the_host() -> None:
    fast = replace(MACHINE, device=Device(1e18, 1e17, 1e16, 8e10))
    time = step_time(run_of(1, 1), fast, 8)
    assert time.total == pytest.approx(time.host, rel=1e-3)
    assert time.launching > 0.5 * time.total


@pytest.mark.parametrize("gpu", DEVICES)
def test_fp32_is_far_slower_than_bf16(gpu: str) -> None:
    device = DEVICES[gpu]
    assert 14 <= device.matrix / device.fp32 <= 30


@pytest.mark.parametrize("ep_size", [1, 8])
def test_slower_links_cost_time(ep_size: int) -> None:
    run = run_of(16, ep_size)
    fast = step_time(run, MACHINE, 8)
    slow = step_time(run, replace(MACHINE, between=Link(1e6, 1e-3)), 8)
    assert slow.total > fast.total
    for time in (fast, slow):
        assert 0 <= time.exposed <= time.sharding


@pytest.mark.release
def test_uneven_experts_cost_time_only_where_rows_travel() -> None:
    def matrices(ep_size: int, imbalance: float) -> float:
        flags = {"ep_size": ep_size, "bf16": True, "max_seq_length": 512, "per_device_train_batch_size": 1}
        return step_time(tiny_run(8, flags, PROPORTIONATE, "cuda", imbalance=imbalance), MACHINE, 8).matrices

    assert matrices(8, 1.5) > matrices(8, 1.0)
    # what the model needs is no more
    runs = [tiny_run(8, {"ep_size": 8, "bf16": True}, PROPORTIONATE, "cuda", imbalance=x) for x in (1.0, 1.5)]
    assert model_flops(runs[1]) == pytest.approx(model_flops(runs[0]), rel=1e-3)
    assert matrices(1, 1.5) == matrices(1, 1.0)

"""The cost model's arithmetic, and what must hold of it whatever the machine."""

from dataclasses import replace

import pytest

from sharding.planner.cost import collective_time, model_flops, step_time
from sharding.planner.hardware import DEVICES, Device, Hardware, Link
from sharding.planner.setting import Setting
from sharding.planner.traffic import Traffic, between_nodes, by_link, step_traffic
from tests.sharding.planned import model_shape

MACHINE = Hardware("round numbers", Device(1e12, 1e11, 1e11, 8e10), Link(1e9, 1e-6), Link(1e8, 1e-5), 1.0, 1.0, 1.0)


def test_a_ring_sends_one_rank_in_k_across_nodes() -> None:
    setting = Setting(16, 8)
    over_all = Traffic("layers", "all-gather", "all", 1, 1e8)
    assert between_nodes(over_all, setting, 8) == 1 / 8
    assert between_nodes(over_all, setting, 16) == 0
    # replicas are 8 ranks apart: nobody of a dp group shares a node
    assert between_nodes(replace(over_all, group="dp"), setting, 8) == 1
    # 7/8 of 1e8 bytes at 1e9 a second, 1/8 at 1e8; 7 hops inside a node and 1 between
    assert collective_time(over_all, setting, MACHINE, 8) == pytest.approx(0.125 + 7e-6 + 1e-5)


def test_an_all_to_all_goes_straight_to_each_rank() -> None:
    rows = Traffic("rows", "all-to-all", "ep", 1, 7e8)
    assert between_nodes(rows, Setting(16, 8), 8) == 0
    assert between_nodes(rows, Setting(16, 8), 4) == pytest.approx(4 / 7)
    assert between_nodes(rows, Setting(16, 8, ep_across_nodes=True), 2) == 1
    assert collective_time(rows, Setting(16, 8), MACHINE, 4) == pytest.approx(4e8 / 1e8 + 1e-5)


def test_links_share_out_all_bytes() -> None:
    setting = Setting(16, 4, "hybrid", seq_length=32)
    traffic = step_traffic(model_shape(), setting)
    assert sum(by_link(traffic, setting, 8)) == pytest.approx(sum(t.total for t in traffic))
    assert by_link(traffic, setting, 16)[1] == 0


def test_a_lone_rank_only_computes() -> None:
    setting = Setting(1, 1, seq_length=512, checkpointing="none")
    time = step_time(model_shape(), setting, MACHINE, 8)
    assert time.sharding == time.exposed == time.all_to_alls == 0
    assert time.matrices == pytest.approx(model_flops(model_shape(), setting) / 1e12)
    full = step_time(model_shape(), replace(setting, checkpointing="full"), MACHINE, 8)
    assert full.matrices == pytest.approx(4 / 3 * time.matrices)


def test_products_run_at_the_rate_of_their_dtype() -> None:
    """Compute-bound: in bf16 at 1e12 operations a second, in TF32 at half of it, in fp32 at 1e11."""
    bf16 = Setting(1, 1, seq_length=512, checkpointing="none")
    seconds = [
        step_time(model_shape(), setting, MACHINE, 8).matrices
        for setting in (bf16, replace(bf16, bf16=False, tf32=True), replace(bf16, bf16=False), replace(bf16, tf32=True))
    ]
    assert [s / seconds[0] for s in seconds] == pytest.approx([1, 2, 10, 1])


@pytest.mark.parametrize("gpu", DEVICES)
def test_fp32_is_far_slower_than_bf16(gpu: str) -> None:
    device = DEVICES[gpu]
    assert 14 <= device.matrix / device.fp32 <= 30


@pytest.mark.parametrize(
    "setting", [Setting(16, 1, seq_length=512), Setting(16, 8, seq_length=512)], ids=["ep1", "ep8"]
)
def test_slower_links_cost_time(setting: Setting) -> None:
    fast = step_time(model_shape(), setting, MACHINE, 8)
    slow = step_time(model_shape(), setting, replace(MACHINE, between=Link(1e6, 1e-3)), 8)
    assert slow.total > fast.total
    for time in (fast, slow):
        assert 0 <= time.exposed <= time.sharding


def test_uneven_experts_cost_time_only_where_rows_travel() -> None:
    even, uneven = Setting(8, 8, seq_length=512), Setting(8, 8, seq_length=512, imbalance=1.5)
    assert step_time(model_shape(), uneven, MACHINE, 8).matrices > step_time(model_shape(), even, MACHINE, 8).matrices
    alone = [step_time(model_shape(), replace(s, ep_size=1), MACHINE, 8).total for s in (even, uneven)]
    assert alone[0] == alone[1]

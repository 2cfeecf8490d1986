"""The cost model's arithmetic, and what must hold of it whatever the machine."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from expertmesh.moe.hf_model.counts import training_flops
from expertmesh.sharding.topology import Topology
from expertmesh.training.model_setup.rates import AT_BEST, RateConstant, Rates, Work
from expertmesh.training.planning.imbalance import GivenRouting
from expertmesh.training.planning.planner.account import Account
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.clock import Clock, StepTime
from expertmesh.training.planning.planner.costs import Cluster, kernel_seconds, seconds_among, share_away
from expertmesh.training.planning.planner.hardware import DEVICES, Device, Hardware, Link, products_in
from tests.sharding.planned import flags_of, tiny_forecasts
from tests.tiny import tiny_config

MACHINE = Hardware("round numbers", Device(1e12, 1e11, 1e11, 8e10), Link(1e9, 1e-6), Link(1e8, 1e-5))
PROPORTIONATE = {"hidden_size": 64, "intermediate_size": 128}


@cache
def _account(world_size: int, machine: Hardware, flags: tuple[tuple[str, Any], ...], busiest: float) -> Account:
    settings = {"bf16": True, "max_seq_length": 512, "per_device_train_batch_size": 1, **dict(flags)}
    asked = Asked(flags_of(**settings), world_size, Cluster(machine, 8, 8e10), 0, GivenRouting(busiest=busiest))
    return tiny_forecasts(PROPORTIONATE, "cuda").account(asked)


def account_of(world_size: int, machine: Hardware = MACHINE, busiest: float = 1.0, **flags: Any) -> Account:
    return _account(world_size, machine, tuple(flags.items()), busiest)


def test_a_kernel_takes_its_matmuls_or_its_memory() -> None:
    """Whichever is longer, and its launch; in fp8 and fp32 at other rates."""
    machine = replace(MACHINE, device=replace(MACHINE.device, fp8=4e12))
    launch, matmul = AT_BEST.launch, Work("matmul", 1.0)
    assert kernel_seconds(0.0, 1e11, matmul, machine) == pytest.approx(1 + launch)
    assert kernel_seconds(1e12, 1e9, matmul, machine) == pytest.approx(1 + launch)
    assert kernel_seconds(1e9, 1e11, matmul, machine) == pytest.approx(1 + launch)
    for operator, rate in (("matmul fp32", 1e11), ("grouped matmul fp8", 4e12), ("grouped matmul", 1e12)):
        named: Any = operator
        work = Work(named, 1.0)
        assert kernel_seconds(8e12, 0.0, work, machine) == pytest.approx(8e12 / rate + launch)


def test_a_ring_sends_one_rank_in_k_across_nodes() -> None:
    stage = Topology(16, 8).group("stage", 0)
    assert share_away("all-gather", stage, 8) == 1 / 8
    assert share_away("all-gather", stage, 16) == 0
    # replicas are 8 ranks apart: nobody of a dp group shares a node
    assert share_away("all-reduce", Topology(16, 8).group("dp", 0), 8) == 1
    # 7/8 of 1e8 bytes at 1e9 a second, 1/8 at 1e8; 7 hops inside a node and 1 between
    seconds = seconds_among("all-gather", 1e8, stage, MACHINE, 8)
    assert seconds == pytest.approx(0.125 + 7e-6 + 1e-5)
    assert seconds_among("all-reduce", 1e8, stage, MACHINE, 8) == pytest.approx(0.125 + 2 * (7e-6 + 1e-5))


def test_an_all_to_all_goes_straight_to_each_rank() -> None:
    ep = Topology(16, 8).group("ep", 0)
    assert share_away("all-to-all", ep, 8) == 0
    assert share_away("all-to-all", ep, 4) == pytest.approx(4 / 7)
    assert seconds_among("all-to-all", 7e8, ep, MACHINE, 4) == pytest.approx(4e8 / 1e8 + 1e-5)


def test_what_a_stage_sends_takes_the_slowest_link_of_its_group() -> None:
    assert share_away("send", (0, 8), 8) == 1
    assert share_away("send", (0, 2), 8) == 0
    assert seconds_among("send", 1e8, (0, 8), MACHINE, 8) == pytest.approx(1 + 1e-5)
    assert seconds_among("send", 1e8, (0, 2), MACHINE, 8) == pytest.approx(0.1 + 1e-6)


def test_fsdp_hides_behind_kernels_and_all_to_alls_do_not() -> None:
    clock = Clock(Rates())
    clock.kernel(1.0)
    ready = clock.shard(0.5)
    clock.kernel(0.25)
    clock.until(ready)
    assert (clock.now, clock.spent.exposed) == (1.5, 0.25)
    clock.wait(1.0)
    clock.shard(0.5)
    clock.end()
    spent = StepTime(elementwise=1.25, all_to_alls=1.0, sharding=1.0, exposed=0.75)
    assert (clock.now, clock.spent) == (3.0, spent)


def test_kernels_run_beside_all_to_alls_that_travel() -> None:
    """Which go one after the other among the same ranks; FSDP's are others'."""
    clock = Clock(Rates())
    for each in (("ep", 1.0), ("ep", 0.5), ("others", 0.25)):
        clock.send(*each)
    clock.kernel(0.75)
    clock.shard(0.25)
    assert clock.arrive("ep") == 0.25
    clock.kernel(1.0)
    assert clock.arrive("ep") == clock.arrive("others") == 0.0
    assert (clock.now, clock.spent) == (2.0, StepTime(elementwise=1.75, all_to_alls=0.25, sharding=0.25))


def test_what_overlaps_is_slower() -> None:
    """Beside a collective kernels run at half their speed; it takes four fifths of its own."""
    clock = Clock(Rates((), (RateConstant("compute beside", 0.5, ""), RateConstant("collective beside", 0.8, ""))))
    gathered = clock.shard(0.4)
    # 0.5 s until it has come, in which 0.25 s are computed, and then the rest
    clock.kernel(1.0)
    assert clock.now == pytest.approx(1.25)
    clock.until(gathered)
    assert (clock.now, clock.spent.exposed, clock.spent.all_to_alls) == pytest.approx((1.25, 0.25, 0.0))
    # 0.2 s of kernels take 0.4, in which 0.32 of the all-to-all's 0.5 s pass
    clock.send("ep", 0.5)
    clock.kernel(0.2)
    assert clock.arrive("ep") == pytest.approx(0.18)
    assert clock.spent.all_to_alls == pytest.approx(0.2 + 0.18)
    assert clock.now == pytest.approx(1.25 + 0.4 + 0.18)
    # nothing beside what is waited for at once
    clock.shard(0.3)
    clock.wait(0.2)
    clock.end()
    assert clock.now == pytest.approx(1.83 + 0.3)
    assert clock.now == pytest.approx(clock.spent.total)


def test_kernels_wait_for_the_host() -> None:
    """Which is ahead, until it has to know what they have found."""
    clock = Clock(Rates((), (RateConstant("wait", 0.125, ""),)))
    clock.call(0.25)
    clock.launch()
    clock.kernel(1.0)
    clock.call(0.5)
    clock.launch()
    assert (clock.now, clock.spent.launching) == (1.25, 0.25)
    clock.read()
    clock.call(0.25)
    clock.launch()
    assert (clock.now, clock.spent.launching) == (1.625, 0.625)


@pytest.mark.slow
def test_experts_come_from_host_memory() -> None:
    """Those of each layer twice a micro-batch, at the rate that the device says; beside what is computed, if it can."""
    # 4 of 8 experts, of three matrices 64 x 128 in bf16, of 2 layers
    brought = 2 * 2 * 4 * 3 * 64 * 128 * 2
    lora: dict[str, Any] = {"ep_size": 2, "adapter": "lora"}

    def seconds(host_bandwidth: float, **flags: Any) -> float:
        machine = replace(MACHINE, device=replace(MACHINE.device, host_bandwidth=host_bandwidth))
        return account_of(2, machine, **lora, **flags).time.total

    there, fast, slow = seconds(1e30), seconds(1e30, offload_experts=True), seconds(1e3, offload_experts=True)
    assert slow - fast == pytest.approx(brought / 1e3, rel=1e-3)
    assert fast < 1.5 * there
    assert account_of(2, **lora, offload_experts=True).in_host == brought / 2


def test_links_share_out_all_bytes() -> None:
    for each in account_of(16, ep_size=4, dense_shard="hybrid").sent:
        assert 0 <= each.between <= each.total
        # 16 ranks are two nodes: of groups inside a node nothing leaves it
        assert (each.between > 0) == (each.group in ("dp", "stage", "world")), each


def test_a_lone_rank_only_computes() -> None:
    account = account_of(1)
    time = account.time
    assert time.sharding == time.exposed == time.all_to_alls == 0
    assert account.sent == ()
    assert time.matrices > account.needed / 1e12
    assert time.host > 0


@pytest.mark.slow
def test_flops_are_those_of_the_closed_formula() -> None:
    """FLOPs of all parts but router statistics and the like, which have no matmuls."""
    account, again = account_of(1), account_of(1, gradient_checkpointing="full")
    counts = tiny_forecasts(PROPORTIONATE, "cuda").facts(flags_of(bf16=True)).counts
    formula = training_flops(counts, tiny_config(**PROPORTIONATE), 512, 511, [512 * 513 // 2])
    assert account.needed == pytest.approx(formula, rel=0.01)
    # what is recomputed is not needed, and not counted
    assert again.needed == pytest.approx(account.needed)
    assert 1.1 < again.time.matrices / account.time.matrices < 1.34


@pytest.mark.slow
def test_products_run_at_the_rate_of_their_dtype() -> None:
    """Where products take so long that nothing else counts: in bf16 at 1e7 operations a second, in TF32 at half of it,
    in fp32 at 1e6."""
    slow = replace(MACHINE, device=Device(1e7, 1e6, 1e11, 8e10))
    dtypes = [(True, False), (False, True), (False, False), (True, True)]
    seconds = [account_of(1, products_in(slow, *dtype, fp8=False)).time.matrices for dtype in dtypes]
    assert [s / seconds[0] for s in seconds] == pytest.approx([1, 2, 10, 1], rel=1e-3)


@pytest.mark.slow
def test_a_fast_card_waits_for_the_host() -> None:
    time = account_of(1, replace(MACHINE, device=Device(1e18, 1e17, 1e16, 8e10))).time
    assert time.total == pytest.approx(time.host, rel=1e-3)
    assert time.launching > 0.5 * time.total


@pytest.mark.parametrize("gpu", DEVICES)
def test_fp32_is_far_slower_than_bf16(gpu: str) -> None:
    device = DEVICES[gpu]
    assert 14 <= device.matrix / device.fp32 <= 30


@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [1, 8])
def test_slower_links_cost_time(ep_size: int) -> None:
    fast = account_of(16, ep_size=ep_size).time
    slow = account_of(16, replace(MACHINE, between=Link(1e6, 1e-3)), ep_size=ep_size).time
    assert slow.total > fast.total
    for time in (fast, slow):
        assert 0 <= time.exposed <= time.sharding * (1 + 1e-9)


@pytest.mark.release
def test_uneven_experts_cost_time_only_where_rows_travel() -> None:
    def uneven(ep_size: int, busiest: float) -> Account:
        return account_of(8, busiest=busiest, ep_size=ep_size)

    assert uneven(8, 1.5).time.matrices > uneven(8, 1.0).time.matrices
    # what the model needs is no more
    assert uneven(8, 1.5).needed == pytest.approx(uneven(8, 1.0).needed, rel=1e-3)
    assert uneven(1, 1.5).time.matrices == uneven(1, 1.0).time.matrices

"""A dry run of a step, and its cost breakdown."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from expertmesh.moe.hf_model.build import count_parameters
from expertmesh.moe.hf_model.counts import ParameterCounts, training_flops
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import WEIGHT, Batch, LossBatch
from expertmesh.training.loss.balance import choose_balance
from expertmesh.training.monitoring.attribution import StepPlace
from expertmesh.training.planning.planner.account import KINDS, PartCost
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.costs import Cluster
from expertmesh.training.planning.planner.hardware import Device, Hardware, Link
from expertmesh.training.planning.planner.model_config import find_config
from expertmesh.training.planning.rehearsal import world
from expertmesh.training.planning.rehearsal.building import build_rehearsed
from expertmesh.training.planning.rehearsal.figures import needed_flops, parts_of, times_of
from expertmesh.training.planning.rehearsal.recorder import Event, Recorder
from expertmesh.training.planning.rehearsal.seconds import event_seconds
from expertmesh.training.planning.rehearsal.triton_stand_in import kinds_of_kernels
from expertmesh.training.planning.rehearsal.world import Rehearsed, _fused_attention, rehearse
from tests.families.configs import tiny_config
from tests.published.models import CONFIGS
from tests.training.dry_runs import CLUSTER, flags_of

TOKENS = 512
HARDWARE = Hardware("a card", Device(1e12, 1e11, 1e9, 0), Link(1e8, 0), Link(1e8, 0))


class Anywhere:
    """Parts of no model."""

    def here(self) -> StepPlace:
        return StepPlace("somewhere", None)


def recorded(run: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Event]:
    recorder = Recorder(Anywhere())  # type: ignore[arg-type]
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=dtype) for shape in shapes]
        with recorder:
            run(*tensors)
    return recorder.events


OPERATORS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int, int, float]] = {
    # what is run, shapes, numbers read and written, FLOPs
    "product": (torch.mm, ((8, 16), (16, 4)), 8 * 16 + 16 * 4, 8 * 4, 2 * 8 * 16 * 4),
    "product with a transposed view": (lambda a, b: a @ b.t(), ((8, 16), (4, 16)), 192, 32, 1024),
    "batch of products": (torch.bmm, ((3, 8, 16), (3, 16, 4)), 3 * 192, 3 * 32, 3 * 1024),
    "product added to": (lambda s, a, b: s.addmm_(a, b), ((8, 4), (8, 16), (16, 4)), 32 + 192, 32, 1024),
    "sum of two": (torch.add, ((8, 16), (8, 16)), 256, 128, 0),
    "sum in place": (lambda a, b: a.add_(b), ((8, 16), (8, 16)), 256, 128, 0),
    "a row for all rows": (lambda a, b: a * b.expand(8, 16), ((8, 16), (16,)), 128 + 16, 128, 0),
    "copy": (lambda a, b: a.copy_(b), ((8, 16), (8, 16)), 128, 128, 0),
    "zeros": (lambda a: a.zero_(), ((8, 16),), 0, 128, 0),
    "half of it": (lambda a: a[:4] + 1, ((8, 16),), 64, 64, 0),
    "zeros like another": (lambda a: torch.zeros_like(a), ((8, 16),), 0, 128, 0),
    "view": (lambda a: a.view(16, 8).t()[2:], ((8, 16),), 0, 0, 0),
    "room": (lambda a: torch.empty_like(a), ((8, 16),), 0, 0, 0),
    "mean over columns": (lambda a: a.mean(dim=1), ((8, 16),), 128, 8, 0),
    "several copies": (
        lambda a, b, c, d: torch._foreach_copy_([a, b], [c, d]),
        ((8, 16), (4,), (8, 16), (4,)),
        132,
        132,
        0,
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_bytes_and_flops_of_operators(name: str) -> None:
    run, shapes, read, written, flops = OPERATORS[name]
    events = recorded(run, *shapes)
    assert sum(event.read for event in events) == 4 * read
    assert sum(event.written for event in events) == 4 * written
    assert sum(event.flops for event in events) == flops


def test_a_gather_reads_what_it_gives_and_its_index() -> None:
    def run(table: Tensor) -> None:
        index = torch.zeros(3, dtype=torch.int64)
        table.index_select(0, index)
        nn.functional.embedding(index, table)

    gathers = [event for event in recorded(run, (100, 16), dtype=torch.bfloat16) if "zeros" not in event.name]
    assert [event.read for event in gathers] == [3 * 16 * 2 + 3 * 8] * 2
    assert [event.written for event in gathers] == [3 * 16 * 2] * 2


def test_causal_attention_counts_pairs_that_see_one_another() -> None:
    def run(query: Tensor, key: Tensor, value: Tensor) -> None:
        torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)

    (event,) = recorded(run, (2, 4, 10, 8), (2, 2, 10, 8), (2, 2, 10, 8), dtype=torch.bfloat16)
    assert event.flops == 2 * (2 * 4 * 55) * 16


def test_values_narrower_than_keys_take_a_fused_kernel() -> None:
    """As in multi-head latent attention: no score is held. What that kernel does not read is computed without it."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> None:
        _fused_attention(query, key, value, is_causal=True)

    events = recorded(run, (2, 4, 10, 24), (2, 4, 10, 24), (2, 4, 10, 16), dtype=torch.bfloat16)
    (event,) = (event for event in events if event.flops)
    assert "efficient_attention" in event.name
    assert event.flops == 2 * (2 * 4 * 55) * (24 + 16)
    assert all(event.written < 2 * 4 * 10 * (16 * 2 + 4 * 32) for event in events)
    odd = recorded(run, (2, 4, 10, 24), (2, 4, 10, 24), (2, 4, 10, 15), dtype=torch.bfloat16)
    assert not any("efficient_attention" in event.name for event in odd)


def test_products_in_fp8() -> None:
    """Grouped GEMMs of rows (64, 32) and two experts' matrices (48, 32); and of (48, 64) and (32, 64), summed over
    rows, with space for two experts' padding. Scales take 4 bytes, an expert's end as many."""

    def run(rows: Tensor, weight: Tensor, grad: Tensor, columns: Tensor) -> None:
        ends = torch.empty(2, dtype=torch.int32)
        for a, b, b_scales in ((rows, weight.transpose(1, 2), (2, 48)), (grad, columns.t(), (2 * 32,))):
            a_scales = torch.empty(64 if a is rows else 2 * 48)
            torch._scaled_grouped_mm(a, b, a_scales, torch.empty(b_scales), offs=ends, out_dtype=torch.bfloat16)

    shapes = ((64, 32), (2, 48, 32), (48, 64 + 2 * 16), (32, 64 + 2 * 16))
    product, gradient = recorded(run, *shapes, dtype=torch.float8_e4m3fn)
    assert (product.flops, gradient.flops) == (2 * 64 * 48 * 32, 2 * 64 * 48 * 32)
    assert product.read == 64 * 32 + 2 * 48 * 32 + 4 * (64 + 2 * 48 + 2)
    assert product.written == 2 * 64 * 48
    assert gradient.read == (48 + 32) * 96 + 4 * (2 * 48 + 2 * 32 + 2)
    assert gradient.written == 2 * 2 * 48 * 32
    fast = replace(HARDWARE, device=replace(HARDWARE.device, fp8=1e3))
    assert event_seconds(product, fast) == pytest.approx(product.flops / 1e3, rel=1e-3)


def rehearsed(name: str, layers: int = 2, **settings: Any) -> tuple[Rehearsed, Any]:
    """Full-width layers on 8 ranks."""
    model_config = find_config(str(CONFIGS / name)).load()
    model_config.num_hidden_layers = layers
    config = TrainConfig(
        model="-",
        dataset=["-"],
        bf16=True,
        ep_size=8,
        dispatch="plain",
        gradient_checkpointing="selective",
        max_seq_length=TOKENS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=3,
        **settings,
    )
    return rehearse(Asked(config, 8, CLUSTER, 5), model_config), model_config


def counts_of(step: Rehearsed, model_config: Any) -> ParameterCounts:
    return count_parameters(build_rehearsed(step.asked.config, model_config, "cuda"))


@pytest.fixture(scope="module", params=["mixtral-8x7b", "qwen3-30b-a3b"])
def step(request: pytest.FixtureRequest) -> tuple[Rehearsed, Any]:
    return rehearsed(request.param)


def parts(step: Rehearsed, hardware: Hardware = HARDWARE) -> dict[str, PartCost]:
    return parts_of(step.recorder.events, times_of(step, 3), Cluster(hardware, 8, 0.0))


@pytest.mark.sample(4)
def test_flops_are_those_of_the_closed_formula(step: tuple[Rehearsed, Any]) -> None:
    rehearsed, model_config = step
    tokens, targets, pairs = 3 * TOKENS, 3 * (TOKENS - 1), [3 * TOKENS * (TOKENS + 1) // 2]
    formula = training_flops(counts_of(rehearsed, model_config), model_config, tokens, targets, pairs)
    assert needed_flops(rehearsed, times_of(rehearsed, 3)) == pytest.approx(formula, rel=1e-2)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_step_of_weighted_data_is_as_any_other(tp_size: int) -> None:
    """In FLOPs, kernels and what is sent and held, but for the weights themselves: 4 bytes a target."""
    made = world._batch

    def weighted(config: TrainConfig, cp_group: Any, routing: Any, fake: Any) -> Batch:
        batch = made(config, cp_group, routing, fake)
        index_N = batch.target_index_N
        with fake:
            inputs = {WEIGHT: torch.ones(len(index_N))}
            return replace(batch, for_loss=LossBatch(index_N, index_N, 1, inputs, index_N, 1, cp_group))

    plain, _ = rehearsed("qwen3-30b-a3b", 1, tp_size=tp_size)
    with mock.patch.object(world, "_batch", weighted):
        step, _ = rehearsed("qwen3-30b-a3b", 1, tp_size=tp_size)
    of_head = [[event for event in of.recorder.events if event.place.part == "LM head, loss"] for of in (plain, step)]
    kernels = [Counter(event.name for event in events if event.name.endswith("_kernel")) for events in of_head]
    products = [[event.flops for event in events if event.flops] for events in of_head]
    assert kernels[0] == kernels[1]
    assert products[0] == products[1]
    assert len(products[0]) == 3  # logits, and the gradients of rows and weight
    weights = 4 * (TOKENS - 1)
    peaks, moved = ([max(map(sum, of.held.values())) for of in (plain, step)], [_moved(events) for events in of_head])
    assert peaks[0] <= peaks[1] <= peaks[0] + 8 * weights
    assert moved[0] < moved[1] <= moved[0] + 16 * weights
    assert needed_flops(step, times_of(step, 3)) == needed_flops(plain, times_of(plain, 3))


def _moved(events: list[Event]) -> int:
    return sum(event.read + event.written for event in events)


@pytest.mark.slow
def test_a_step_in_fp8() -> None:
    """As many FLOPs, of which the experts' are faster; rows are cast once for all products that take them so."""
    step, config = rehearsed("mixtral-8x7b", expert_precision="fp8")
    events = [event for event in step.recorder.events if event.place.part == "expert GEMMs"]
    products = [event for event in events if event.work.operator == "grouped matmul fp8"]
    casts = [event.name for event in events if event.name in ("_rows_kernel", "_columns_kernel")]
    # of two layers and a micro-batch: three products, two when recomputed, six in backward
    assert len(products) == 2 * (3 + 2 + 6)
    assert sum(event.flops for event in products) == sum(event.flops for event in events)
    # rows, w1, v1, w2, hidden numbers; again rows, w1, v1; the output's gradient, w2 and, both ways, gate's and up's
    # and w1 and v1; columns of rows, hidden numbers and the output's gradient
    assert len(casts) == 2 * (5 + 3 + 11)
    tokens, targets, pairs = 3 * TOKENS, 3 * (TOKENS - 1), [3 * TOKENS * (TOKENS + 1) // 2]
    formula = training_flops(counts_of(step, config), config, tokens, targets, pairs)
    assert needed_flops(step, times_of(step, 3)) == pytest.approx(formula, rel=1e-2)
    fast, slow = (
        sum(part.seconds for part in parts(step, replace(HARDWARE, device=replace(HARDWARE.device, fp8=rate))).values())
        for rate in (2e12, 1e12)
    )
    assert fast < slow


@pytest.mark.slow
def test_all_to_alls_send_what_they_must(step: tuple[Rehearsed, Any]) -> None:
    rehearsed, config = step
    rows = TOKENS * config.num_experts_per_tok
    events = [event for event in rehearsed.recorder.events if event.collective == "all-to-all"]
    # two layers: in forward how many rows each expert gets, an int64 each; rows there and back, forward and backward
    assert all(event.ranks == tuple(range(8)) for event in events)
    counts, sent = 8 * config.num_experts * 7 / 8, rows * config.hidden_size * 2 * 7 / 8
    assert Counter(event.sent for event in events) == {counts: 2, sent: 2 * 2 * 2}


def test_every_part_is_known(step: tuple[Rehearsed, Any]) -> None:
    found = parts(step[0])
    assert {"expert GEMMs", "attention", "norms", "rotary", "optimizer step", "clipping", "FSDP"} <= found.keys()
    other = found.get("other", PartCost())
    assert other.moved < 0.001 * sum(part.moved for part in found.values())


def test_fused_adamw_moves_32_bytes_a_parameter(step: tuple[Rehearsed, Any]) -> None:
    """Read: parameter, gradient and moments in fp32; written: these, and the gradient that it scales to clip it."""
    model: Any = step[0].model
    numbers = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    assert parts(step[0])["optimizer step"].moved == pytest.approx(32 * numbers, rel=1e-3)


def test_memory_is_what_a_rank_holds(step: tuple[Rehearsed, Any]) -> None:
    """Parameters, gradients and moments in fp32, of this rank's part alone, are there in the update: 16 bytes each.
    Before it at most some tensors of the head's size, gathered or gradients, are there besides."""
    (rehearsed, _), head = step, 4 * step[1].vocab_size * step[1].hidden_size
    peak, parameters = max(map(sum, rehearsed.held.values())), rehearsed.parameter_bytes
    assert rehearsed.state == pytest.approx(2 * parameters, rel=1e-4)
    assert {len(kinds) for kinds in rehearsed.held.values()} == {len(KINDS)}
    assert 4 * parameters <= peak < 4 * parameters + 8 * head


def test_a_dry_run_runs_no_kernel() -> None:
    """Neither in its step nor where it tries, on the CPU, whether layers can be packed: there may be no GPU. The second
    time the family's functions are replaced from the start."""
    with ExitStack() as patches:
        for kind in kinds_of_kernels():
            patches.enter_context(mock.patch.object(kind, "run", side_effect=AssertionError("a kernel is run")))
        for _ in range(2):
            told = rehearse(Asked(flags_of(ep_size=4, packing=True), 8, CLUSTER), tiny_config("deepseek_v3"))
    assert "_triton_rope" in {event.name for event in told.recorder.events}


def test_a_balancing_loss_of_config_json_is_computed() -> None:
    """As a run with these flags would."""

    class Chosen(Exception):
        pass

    def note(*args: Any) -> None:
        raise Chosen(choose_balance(*args).weights.balance)

    model_config = tiny_config("mixtral", output_router_logits=True, router_aux_loss_coef=0.001)
    with mock.patch.object(world, "choose_balance", note), pytest.raises(Chosen, match=r"0\.001"):
        rehearse(Asked(flags_of(), 1, CLUSTER, 0, device="cpu"), model_config)

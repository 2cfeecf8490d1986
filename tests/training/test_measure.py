"""What is measured of single layers and composed, against a dry run of the full step."""

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.planner.cost import step_time, update_kernels, update_moved
from expertmesh.training.planning.planner.hardware import preset
from expertmesh.training.planning.planner.measured import MeasuredModel, Workload
from expertmesh.training.planning.planner.model_config import find_config, read_config
from expertmesh.training.planning.planner.peak_memory import communicators, peak, peaks
from expertmesh.training.planning.planner.step_order import PlannedRun
from expertmesh.training.planning.planner.traffic import step_traffic
from expertmesh.training.planning.rehearsal import cached
from expertmesh.training.planning.rehearsal import rank_summary as account
from expertmesh.training.planning.rehearsal.building import build_rehearsed
from expertmesh.training.planning.rehearsal.cached import CachedMeasure
from expertmesh.training.planning.rehearsal.measure import Measurer
from expertmesh.training.planning.rehearsal.rank_summary import parts_of, times_of
from expertmesh.training.planning.rehearsal.run_setting import planned, setting_of
from expertmesh.training.planning.rehearsal.world import Rehearsed, rehearse
from tests.families.configs import tiny_config
from tests.published.models import CONFIGS
from tests.tiers import tiered
from tests.tiny import tiny_config as tiny_mixtral

TOKENS = 256
H100 = preset("H100", "infiniband-ndr")


def flags_of(**flags: Any) -> TrainConfig:
    settings: dict[str, Any] = dict(bf16=True, per_device_train_batch_size=1, max_seq_length=TOKENS)
    return TrainConfig(model="-", dataset=["-"], **(settings | flags))


def both(model_config: Any, world_size: int, **flags: Any) -> tuple[Rehearsed, PlannedRun]:
    config = flags_of(**flags)
    run = planned(config, model_config, world_size, is_kept=False, trained=1 - 1 / config.max_seq_length)
    return rehearse(config, model_config, world_size), run


SETTINGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mixtral": ("mixtral", 16, {"ep_size": 8, "gradient_checkpointing": "selective"}),
    "not checkpointed": ("mixtral", 8, {"ep_size": 4, "gradient_accumulation_steps": 2}),
    "experts of one rank": ("mixtral", 8, {"ep_size": 8, "gradient_checkpointing": "full"}),
    "kept casts": ("mixtral", 8, {"ep_size": 8, "reshard_after_forward": False}),
    "casts kept alone": (
        "mixtral",
        8,
        {"ep_size": 8, "keep_expert_copies": True, "gradient_checkpointing": "full", "gradient_accumulation_steps": 2},
    ),
    "hybrid": ("mixtral", 16, {"ep_size": 4, "dense_shard": "hybrid", "optim": "adamw_bf16"}),
    "alone": ("mixtral", 1, {}),
    "1,024 ranks": ("qwen3_moe", 1024, {"ep_size": 8, "gradient_checkpointing": "selective"}),
    "shared experts, dense first layers, MLA": ("deepseek_v3", 64, {"ep_size": 4, "gradient_checkpointing": "full"}),
    "biases, windows, sinks": ("gpt_oss", 16, {"ep_size": 8, "gradient_checkpointing": "selective"}),
    "DeltaNet": ("qwen3_next", 16, {"ep_size": 2}),
    "Mamba": ("jamba", 16, {"ep_size": 2, "gradient_checkpointing": "full"}),
    "gates per channel": ("kimi_linear", 16, {"ep_size": 2, "gradient_checkpointing": "selective"}),
    "grouped products in fp32": ("mixtral", 8, {"ep_size": 4, "bf16": False, "expert_kernel": "torch-grouped"}),
    "LoRA": ("mixtral", 8, {"ep_size": 4, "adapter": "lora"}),
    "LoRA beside nf4": ("qwen3_moe", 8, {"ep_size": 8, "adapter": "lora", "base_dtype": "nf4"}),
    "routers in fp32": ("ernie4_5_moe", 8, {"ep_size": 4}),
    "shared rows": ("qwen3_moe", 8, {"ep_size": 4, "cp_size": 2, "gradient_checkpointing": "selective"}),
    "heads and dense layers divided": (
        "qwen3_moe",
        8,
        {"ep_size": 4, "tp_size": 2, "gradient_checkpointing": "selective"},
    ),
    "divided in replicas": ("mixtral", 16, {"ep_size": 4, "tp_size": 2, "dense_shard": "hybrid"}),
    "divided, and shared rows": (
        "mixtral",
        8,
        {"ep_size": 8, "tp_size": 2, "cp_size": 2, "gradient_checkpointing": "full", "loss_parallel": False},
    ),
    "inputs in host memory": (
        "mixtral",
        16,
        {"ep_size": 8, "gradient_checkpointing": "full", "offload_activations": True},
    ),
    "frozen": ("glm4_moe", 16, {"ep_size": 4, "freeze": ["embeddings", "router"]}),
}


@pytest.mark.slow
@pytest.mark.sample(7)
@pytest.mark.parametrize("name", SETTINGS)
def test_memory_is_that_of_the_rehearsal(name: str) -> None:
    family, world_size, flags = SETTINGS[name]
    rehearsed, run = both(tiny_config(family), world_size, **flags)
    assert peak(run).tensors == pytest.approx(rehearsed.memory.peak, rel=0.03)
    state = sum(unit.state for unit in run.units.values())
    # steps are counted besides, a number for each parameter
    steps = 4 * sum(unit.num_trained for unit in run.units.values())
    assert rehearsed.memory.state - steps <= state <= rehearsed.memory.state
    recorded = account.communicators(rehearsed.recorder.events, rehearsed.groups)
    assert sum(each.size for each in communicators(run)) == sum(each.size for each in recorded)


@pytest.mark.parametrize("flags", [{}, {"adapter": "lora"}], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_bf16", "adamw_torch_8bit"])
def test_bytes_moved_by_an_update(monkeypatch: pytest.MonkeyPatch, optim: str, flags: dict[str, Any]) -> None:
    """Where parameters are updated one by one, as large ones are: those of all kernels that are recorded, of the norm
    and of clipping too. The first clips in its own kernel."""
    monkeypatch.setattr("expertmesh.training.config.optimizers.LARGEST_ALIKE", 0)
    rehearsed, run = both(tiny_mixtral(num_hidden_layers=1), 4, ep_size=2, optim=optim, max_seq_length=32, **flags)
    events = [event for event in rehearsed.recorder.events if event.phase == "optimizer step"]
    assert update_moved(run) == pytest.approx(sum(e.moved for e in events if e.collective is None), rel=0.02)


def test_copies_that_are_kept_are_rounded_once_a_step() -> None:
    """Else in each of two micro-batches' forwards and recomputations: in a dry run, which runs the product's code, and
    in the planner's sums, to the last byte and launch."""
    model_config, flags = tiny_mixtral(num_hidden_layers=1), {"ep_size": 4, "gradient_checkpointing": "full"}
    found = []
    for kept in (False, True):
        settings = dict(flags, max_seq_length=32, gradient_accumulation_steps=2, keep_expert_copies=kept)
        rehearsed, run = both(model_config, 4, **settings)
        kernels = [event for event in rehearsed.recorder.events if event.collective is None]
        moved = sum(times_of(rehearsed, 2)[event.micro] * event.moved for event in kernels)
        found.append((moved, kernel_seconds_of(rehearsed, 2), step_time(run, H100, gpus_per_node=8).kernels))
    experts = model_config.num_local_experts // 4 * 3 * model_config.hidden_size * model_config.intermediate_size
    anew, kept_ones = found
    # three of four times, fp32 read and bf16 written
    assert anew[0] - kept_ones[0] == 3 * experts * (4 + 2)
    assert anew[1] - kept_ones[1] == pytest.approx(anew[2] - kept_ones[2], rel=1e-6)


@pytest.mark.parametrize("bf16", tiered([True], slow=[False]))
def test_what_offloading_brings_back(bf16: bool) -> None:
    """To gather a layer, its shard is copied to the GPU first: here this is when most is held there."""
    sizes = tiny_mixtral(hidden_size=256, intermediate_size=8)
    few: dict[str, Any] = {"adapter": "lora", "lora_rank": 1, "max_seq_length": 4, "gradient_checkpointing": "full"}
    rehearsed, run = both(sizes, 2, ep_size=2, offload=True, bf16=bf16, **few)
    held = peak(run)
    assert held.when.startswith("gathering of layer")
    assert held.tensors == pytest.approx(rehearsed.memory.peak - rehearsed.memory.kinds.lasting, rel=0.005)


def test_what_a_stage_receives_ahead() -> None:
    """Two buffers of the last stage's input are a thirtieth of what it holds."""
    config = flags_of(
        ep_size=2, pp_size=2, gradient_accumulation_steps=4, max_seq_length=512, gradient_checkpointing="full"
    )
    sizes = tiny_mixtral(hidden_size=64, intermediate_size=8, num_hidden_layers=2)
    run = planned(config, sizes, 4, is_kept=False, trained=1 - 1 / 512)
    _, (pp_rank, held) = peaks(run)
    assert pp_rank == 1
    assert held.tensors == pytest.approx(rehearse(config, sizes, 4, 2).memory.peak, rel=0.005)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", [(3, {}), (1, {}), (8, {"ep_size": 4, "dense_shard": "hybrid"})], ids=str)
@pytest.mark.parametrize("optim", ["shampoo", "muon"])
def test_updates_of_matrices(optim: str, layout: tuple[int, dict[str, Any]]) -> None:
    """Of the rank that has most of them. Shampoo's blocks leave rests in both directions."""
    world_size, flags = layout
    settings = {"shampoo_block_size": 28, "shampoo_frequency": 5} if optim == "shampoo" else {}
    rehearsed, run = both(tiny_mixtral(num_hidden_layers=1), world_size, optim=optim, **settings, **flags)
    events = [event for event in rehearsed.recorder.events if event.phase == "optimizer step" and event.flops]
    assert sum(event.flops for event in events) == pytest.approx(
        sum(f * n for f, _, n in update_kernels(run)), rel=1e-6
    )
    assert {event.work.operator for event in events} == {work.operator for _, work, _ in update_kernels(run)}
    calls = sum(rehearsed.recorder.calls.values())
    assert step_time(run, H100, gpus_per_node=8).host == pytest.approx(H100.rates.call * calls, rel=0.15)
    assert peak(run).tensors == pytest.approx(rehearsed.memory.peak, rel=0.03)
    # MFU is of forward and backward
    assert sum(event.needed for event in rehearsed.recorder.events if event.phase == "optimizer step") == 0


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["shampoo", "muon"])
@pytest.mark.parametrize("world_size", [8, 24])
def test_updates_of_many_experts_are_launched_together(
    optim: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32 experts as of 128, where they fit into one stack; and of those that do not, which the planner counts."""
    calls = []
    for experts in (32, 128):
        rehearsed, _ = both(tiny_config("qwen3_moe", num_experts=experts), world_size, ep_size=8, optim=optim)
        calls.append(rehearsed.recorder.calls[None])
    assert calls[0] == calls[1] < 1000
    monkeypatch.setattr("expertmesh.training.config.optimizers.STACK_ELEMENTS", 10 * 32 * 32)
    rehearsed, run = both(tiny_config("qwen3_moe", num_experts=128), world_size, ep_size=8, optim=optim)
    assert rehearsed.recorder.calls[None] > calls[1]
    told = H100.rates.call * sum(rehearsed.recorder.calls.values())
    assert step_time(run, H100, gpus_per_node=8).host == pytest.approx(told, rel=0.05)


def kernel_seconds_of(rehearsed: Rehearsed, micro: int) -> float:
    return sum(part.seconds for part in parts_of(rehearsed, micro, H100))


def check_kernels_and_calls(rehearsed: Rehearsed, run: PlannedRun, micro: int) -> None:
    """Of the planner's seconds, that they are those of the kernels that the real code launches, and of its calls. In
    which order collectives go beside them, test_step_order verifies."""
    time, times = step_time(run, H100, gpus_per_node=8), times_of(rehearsed, micro)
    assert time.kernels == pytest.approx(kernel_seconds_of(rehearsed, micro), rel=0.02)
    calls = sum(times[number] * calls for number, calls in rehearsed.recorder.calls.items())
    assert time.host == pytest.approx(H100.rates.call * calls, rel=0.12)


@pytest.mark.release
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (16, {"ep_size": 4, "overlap_chunks": 2}),
        (8, {"ep_size": 8, "keep_expert_products": 2}),
        (8, {"ep_size": 8, "keep_expert_copies": True, "gradient_accumulation_steps": 2}),
        (16, {"ep_size": 8, "cp_size": 4}),
        (16, {"ep_size": 8, "expert_precision": "fp8", "gradient_accumulation_steps": 3}),
        (16, {"ep_size": 8, "tp_size": 4, "cp_size": 2, "per_device_train_batch_size": 4}),
    ],
    ids=["rows in two parts", "products kept", "copies kept", "shared rows", "fp8", "divided, shared rows"],
)
def test_memory_and_kernels_of_full_width(world_size: int, flags: dict[str, Any]) -> None:
    """At which kernels take longer than their launch. What the host does once in a run, a dry run counts too."""
    model_config, _ = read_config(str(CONFIGS / "mixtral-8x7b"))
    model_config.num_hidden_layers = 4
    config = flags_of(max_seq_length=4096, gradient_checkpointing="selective", **flags)
    run = planned(config, model_config, world_size, is_kept=False, trained=1 - 1 / 4096)
    rehearsed = rehearse(config, model_config, world_size)
    assert peak(run).tensors == pytest.approx(rehearsed.memory.peak, rel=0.01)
    check_kernels_and_calls(rehearsed, run, config.gradient_accumulation_steps or 1)
    assert (step_time(run, H100, gpus_per_node=8).gathers > 0) == ("tp_size" in flags)


@pytest.mark.release
@pytest.mark.parametrize(
    ("flags", "checkpointing"),
    [({"dispatch": "rank"}, "none"), ({}, "selective"), ({"overlap_chunks": 2, "dispatch_sums": "float32"}, "none")],
    ids=["rank", "node, by itself", "node in two chunks, sums in fp32"],
)
def test_memory_and_kernels_across_nodes(flags: dict[str, Any], checkpointing: str) -> None:
    """With many small experts on two nodes."""
    model_config, _ = read_config(str(CONFIGS / "qwen3-30b-a3b"))
    model_config.num_hidden_layers = 4
    settings: dict[str, Any] = {"ep_size": 16, "gradient_checkpointing": checkpointing, **flags}
    config = flags_of(max_seq_length=4096, per_device_train_batch_size=2, **settings)
    run = planned(config, model_config, 16, is_kept=False, trained=1 - 1 / 4096)
    rehearsed = rehearse(config, model_config, 16)
    assert peak(run).tensors == pytest.approx(rehearsed.memory.peak, rel=0.01)
    check_kernels_and_calls(rehearsed, run, 1)
    sent = {traffic.group for traffic in step_traffic(run) if traffic.what == "rows"}
    assert sent == ({"ep"} if flags.get("dispatch") == "rank" else {"ep across nodes", "ep inside node"})


@pytest.mark.release
@pytest.mark.parametrize(
    ("world_size", "flags", "most"),
    [
        (16, {"pp_size": 2, "pipeline_schedule": "interleaved", "pipeline_chunks": 2}, 1.01),
        # what waits for weight gradients is told by what their matmuls read and write
        (16, {"pp_size": 2, "pipeline_schedule": "zero-bubble"}, 1.1),
        (32, {"pp_size": 4, "gradient_checkpointing": "full"}, 1.01),
        (16, {"pp_size": 2, "tp_size": 2}, 1.01),
    ],
    ids=["interleaved", "zero-bubble", "4 stages", "divided"],
)
def test_memory_and_kernels_of_a_pipeline(world_size: int, flags: dict[str, Any], most: float) -> None:
    model_config, _ = read_config(str(CONFIGS / "mixtral-8x7b"))
    model_config.num_hidden_layers = 8
    settings = {"max_seq_length": 4096, "gradient_checkpointing": "selective", "ep_size": 8, **flags}
    config = flags_of(gradient_accumulation_steps=8, **settings)
    run = planned(config, model_config, world_size, is_kept=False, trained=1 - 1 / 4096)
    ranks = range(0, world_size, world_size // config.pp_size)
    rehearsed = [rehearse(config, model_config, world_size, rank) for rank in ranks]
    largest = max(each.memory.peak for each in rehearsed)
    assert 0.99 * largest <= peak(run).tensors <= most * largest
    kernels = max(kernel_seconds_of(each, 8) for each in rehearsed)
    assert step_time(run, H100, gpus_per_node=8).kernels == pytest.approx(kernels, rel=0.05)


@pytest.mark.release
def test_a_deep_stack_is_a_shallow_one_repeated() -> None:
    rehearsed, run = both(tiny_mixtral(num_hidden_layers=12), 16, ep_size=8, gradient_checkpointing="selective")
    assert len(run.measured.kinds) == 1
    assert peak(run).tensors == pytest.approx(rehearsed.memory.peak, rel=0.01)


@pytest.mark.release
def test_layers_whose_heads_differ_are_of_two_kinds() -> None:
    """A config with heads that differ by layer refuses to be asked for them without one."""
    model_config = tiny_config("gemma4_text", num_global_key_value_heads=1, attention_k_eq_v=True)
    assert model_config.is_heterogeneous
    rehearsed, run = both(model_config, 8, ep_size=4, gradient_checkpointing="selective")
    # in transformers 5.17 both layers with full attention differ
    assert 2 <= len(run.measured.kinds) <= model_config.num_hidden_layers
    assert peak(run).tensors == pytest.approx(rehearsed.memory.peak, rel=0.03)


@pytest.mark.slow
def test_bytes_sent_are_those_of_the_rehearsal() -> None:
    rehearsed, run = both(tiny_mixtral(), 16, ep_size=4, gradient_checkpointing="full")
    found: dict[str, float] = {}
    for event in rehearsed.recorder.events:
        if event.collective is not None:
            found[event.collective] = found.get(event.collective, 0) + event.sent
    for kind in ("all-gather", "reduce-scatter"):
        sent = sum(traffic.total for traffic in step_traffic(run) if traffic.kind == kind)
        assert sent == pytest.approx(found[kind])
    rows = sum(traffic.total for traffic in step_traffic(run) if traffic.what == "rows")
    assert rows == pytest.approx(found["all-to-all"])


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_exchanges_of_a_tensor_parallel_group(checkpointing: str) -> None:
    """A region begins with an all-gather and ends with a reduce-scatter, and its backward with the other: a GPU's, not
    what stands for it on a CPU. Its input is gathered once more, in backward or by recomputation. FSDP gathers what is
    divided among the ranks with one tp index."""
    flags = {"ep_size": 4, "tp_size": 2, "gradient_checkpointing": checkpointing, "loss_parallel": False}
    rehearsed, run = both(tiny_mixtral(), 8, **flags)
    layers, width = len(run.model.layers), tiny_mixtral().hidden_size
    events = [event for event in rehearsed.recorder.events if event.micro == 0 and event.collective is not None]
    of_tp = [event for event in events if rehearsed.groups[event.group] == "tp (activations)"]
    assert {event.ranks for event in of_tp} == {(0, 1)}
    assert all(event.gathers_activations and not event.is_sharding for event in of_tp)
    activations = [event for event in of_tp if event.sent == TOKENS * width * 2 / 2]
    kinds = [event.collective for event in activations]
    assert kinds.count("all-gather") == 3 * layers
    # the last product is not computed again
    assert 2 * layers <= kinds.count("reduce-scatter") <= 2 * layers + layers * (checkpointing == "full")
    # cosines and sines, and positions: once for all layers, and not again
    assert len(of_tp) - len(activations) == 3
    planned_bytes = sum(traffic.total for traffic in step_traffic(run) if traffic.group == "tp")
    assert planned_bytes == pytest.approx(sum(event.sent for event in of_tp))
    divided = [event for event in events if event.ranks == (0, 2, 4, 6)]
    assert sum(event.sent for event in divided) == pytest.approx(
        sum(traffic.total for traffic in step_traffic(run) if traffic.group == "dense of tp")
    )


@pytest.mark.release
def test_agreements_on_scales() -> None:
    """Where dense matmuls run in fp8: before o_proj's forward, and the backward of the three projections before it, a
    number for each token and for each element of the width that is not divided."""
    flags = {"ep_size": 4, "tp_size": 2, "loss_parallel": False, "dense_precision": "fp8"}
    config = tiny_mixtral(num_key_value_heads=4)
    rehearsed, run = both(config, 8, **flags)
    events = [event for event in rehearsed.recorder.events if event.micro == 0 and event.collective is not None]
    of_tp = [event for event in events if rehearsed.groups[event.group] == "tp (activations)"]
    agreements = [event for event in of_tp if event.collective == "all-reduce"]
    assert len(agreements) == 4 * len(run.model.layers)
    # two rounds, half of it each, as there are two ranks
    assert {event.sent for event in agreements} == {4 * (TOKENS + config.hidden_size)}
    planned_bytes = sum(traffic.total for traffic in step_traffic(run) if traffic.group == "tp")
    assert planned_bytes == pytest.approx(sum(event.sent for event in of_tp))
    assert peak(run).tensors == pytest.approx(rehearsed.memory.peak, rel=0.03)


@pytest.mark.slow
def test_activations_of_a_tensor_parallel_rank() -> None:
    """A rank has a quarter of the positions between regions, and a quarter of the heads in them; of what a region
    gathers it keeps a quarter. Its experts' weights in bf16 are none of that: they are as large. (The vocabulary is so
    large that most memory is in use before the backward, of which a plan does not tell the kinds apart.)"""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 512}
    model_config = tiny_mixtral(num_attention_heads=8, num_key_value_heads=4, **sizes)
    experts_here = model_config.num_local_experts // 4 * model_config.num_hidden_layers
    casts = 2 * experts_here * 3 * model_config.hidden_size * model_config.intermediate_size
    most = {}
    for tp_size in (1, 4):
        rehearsed, run = both(model_config, 4, ep_size=4, tp_size=tp_size, per_device_train_batch_size=4)
        kinds, planned_kinds = rehearsed.memory.kinds, peak(run).memory
        most[tp_size] = kinds.activations
        assert kinds.gathered >= casts
        assert planned_kinds.activations == pytest.approx(kinds.activations, rel=0.05)
        assert planned_kinds.gathered == pytest.approx(kinds.gathered, rel=0.01)
    assert most[4] < 0.27 * most[1]


def measure_of(**flags: Any) -> CachedMeasure:
    return CachedMeasure(flags_of(**flags), tiny_mixtral().to_dict(), tiny_mixtral, "cuda")


def workload_of(measure: CachedMeasure, **changes: Any) -> Workload:
    setting = setting_of(flags_of(), 8)
    return replace(setting.workload(measure.parameters), **changes)


def test_what_was_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure = measure_of()
    found: MeasuredModel = measure(workload_of(measure))
    measure.save()

    def never(*arguments: Any) -> None:
        raise AssertionError("measured a second time")

    monkeypatch.setattr("expertmesh.training.planning.rehearsal.measure.Measurer", never)
    again = measure_of()
    assert again.parameters == measure.parameters
    assert again(workload_of(again)) == found
    # what a workload says has no file of its own, nor has what says nothing of the model
    for flags in ({"ep_size": 2}, {"learning_rate": 1e-3, "max_steps": 7}, {"eval_ratio": 0.1, "save_steps": 3}):
        assert measure_of(**flags).file == measure.file
    # nor have two forms of one model
    file, source = find_config(str(CONFIGS / "mixtral-8x7b")), open_source(CONFIGS / "mixtral-8x7b")
    keys = [cached._key(flags_of(), said, "cuda") for said in (file.content, source.said)]
    assert keys[0] == keys[1]
    # what a figure may depend on has
    monkeypatch.setattr(cached, "PACKAGES", ("torch",))
    with pytest.raises(AssertionError, match="a second time"):
        measure_of()


def test_damaged_measurements_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure = measure_of()
    measure(workload_of(measure))
    measure.save()
    file = cast(Path, measure.file)
    kept, experts = file.read_text(), '"num_experts": '
    file.write_text(kept.replace(experts, experts + "1", 1))
    again = measure_of()
    assert again.parameters == measure.parameters, "a digit more was taken for the number of experts"
    assert not again.found
    file.write_text(kept)
    assert measure_of().found == measure.found
    unread = file.with_name("of-another-release.json")
    unread.write_text("{}")
    os.utime(unread, (0, 0))
    again(workload_of(again))
    again.save()
    assert file.exists()
    assert not unread.exists()


@dataclass
class _Noting(TrainConfig):
    """Notes which flags are read of it."""

    def __getattribute__(self, name: str) -> Any:
        if name in TrainConfig.__dataclass_fields__:
            NOTED.add(name)
        return super().__getattribute__(name)


NOTED: set[str] = set()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", ["not checkpointed", "hybrid", "LoRA beside nf4", "shared rows", "divided, and shared rows", "frozen"]
)
def test_flags_that_are_read_are_part_of_a_files_name(name: str) -> None:
    family, world_size, changes = SETTINGS[name]
    config = flags_of(**changes)
    noting = _Noting(**asdict(config))
    NOTED.clear()
    measurer = Measurer(build_rehearsed(noting, tiny_config(family), "cuda"), noting)
    measurer(setting_of(config, world_size).workload(measurer.parameters))
    assert NOTED
    assert NOTED <= cached.READ


@pytest.mark.slow
def test_a_rank_that_takes_its_part_of_what_is_complete() -> None:
    """Of sinks that are kept in fp32."""
    config = flags_of(ep_size=2, tp_size=2)
    measurer = Measurer(build_rehearsed(config, tiny_config("hy_v4"), "cuda"), config)
    assert measurer.tp is not None
    measurer(setting_of(config, 4).workload(measurer.parameters))


def test_what_is_measured_of_a_rank_that_divides_has_files_of_its_own() -> None:
    files = {measure_of(tp_size=size, loss_parallel=divides).file for size in (1, 2) for divides in (True, False)}
    assert len(files) == 4


@pytest.mark.sample(11)
@pytest.mark.parametrize("content", ["", "[]", "{}", '{"parameters": 1}'])
def test_a_broken_file_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure = measure_of()
    assert measure.file is not None
    measure.file.parent.mkdir(parents=True)
    measure.file.write_text(content)
    again = measure_of()
    again(workload_of(again))
    again.save()
    assert measure.file.read_text().startswith('{"parameters"')
    assert list(measure.file.parent.iterdir()) == [measure.file]


def test_what_cannot_be_computed_is_refused_each_time() -> None:
    measure = CachedMeasure(flags_of(), {}, tiny_mixtral, "cuda", is_kept=False)
    # as many elements as `grouped_mm` cannot count
    too_long = workload_of(measure, micro_batch=1, seq_length=2**26, rows_received=2**26, targets=2)
    for _ in range(2):
        with pytest.raises(ExpertMeshError, match="2\\^31 elements"):
            measure(too_long)

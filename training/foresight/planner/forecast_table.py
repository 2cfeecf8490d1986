"""Forecasts as people read them."""

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from expertmesh.moe.base.terminal import folded
from expertmesh.training.foresight.memory import Memory
from expertmesh.training.foresight.planner.columns import Column, print_table
from expertmesh.training.foresight.planner.hardware import Hardware, attained
from expertmesh.training.foresight.planner.measured import ModelParameters
from expertmesh.training.foresight.planner.search import VARIANTS, Cluster, Plan, Point
from expertmesh.training.foresight.planner.setting import Setting

GIB = 2**30


def print_plans(
    console: Console,
    name: str,
    model: ModelParameters,
    plans: Sequence[Plan],
    cluster: Cluster,
    top: int,
    global_batch: int | None = None,
    further: Sequence[str] = (),
    seconds: float | None = None,
) -> None:
    """The assumptions, the ranked table, the best plan's parts, and the line that starts it.

    Args:
        global_batch: sequences per step, if that was told.
        further: flags of `train_ep.py` that no setting says.
        seconds: that the search took.
    """

    def say(line: str, style: str = "") -> None:
        console.print(Text(folded(line), style))

    for line in assumptions(name, model, plans[0].setting, cluster, global_batch):
        say(line)
    print_table(console, ranked(plans[:top], cluster))
    fitting = sum(plan.fits for plan in plans)
    took = "" if seconds is None else f"; found in {seconds:.1f} s"
    say(f"{fitting} of {len(plans)} layouts fit; shown: {min(top, len(plans))}{took}")
    setting = plans[0].setting
    if global_batch is None and setting.accumulation == 1 and setting.world_size > cluster.gpus_per_node:
        say("pipelines are tried with --global-batch-size, or with 2 or more --gradient-accumulation-steps")
    say("")
    best = plans[0]
    say(f"the first: {summary(best, cluster.hardware)}")
    for line in parts(best):
        say(line)
    print_table(console, sent(best))
    if best.fits:
        say("\nrecommended", "bold green")
        # in one piece, to be copied
        console.print(Text(launch_line(name, best.setting, cluster.gpus_per_node, further)))
    else:
        say("\nnothing fits", "bold red")
        say(what_would_fit(best, cluster.memory))


def sweep_columns(points: Sequence[Point]) -> list[Column]:
    """One row per number of GPUs; per variant the best setting's tokens/s and, if there is space, what it is."""
    worlds = sorted({point.world_size for point in points})
    columns = [Column("GPUs", [f"{world:,}" for world in worlds])]
    for variant in VARIANTS:
        by_world = {point.world_size: point.plan for point in points if point.variant == variant}
        plans = [by_world.get(world) for world in worlds]
        settings = [plan.setting if plan is not None and plan.fits else None for plan in plans]
        columns.append(Column(variant.replace(" ", "\n", 2) + "\ntok/s", [_speed(plan) for plan in plans]))
        if variant != "FSDP only":
            columns.append(Column("ep", [str(s.ep_size) if s else "" for s in settings], spare=1))
        modes = [s.checkpointing if s else "" for s in settings]
        columns.append(Column("check-\npoint", modes, "checkpoint", spare=2, is_text=True))
    return columns


def _speed(plan: Plan | None) -> str:
    if plan is None:
        return "-"
    return f"{plan.tokens_per_second:,.0f}" if plan.fits else f"[red]{plan.memory.total / GIB:,.0f} GiB[/]"


def assumptions(
    name: str, model: ModelParameters, setting: Setting, cluster: Cluster, global_batch: int | None = None
) -> list[str]:
    hardware = cluster.hardware
    batch = f"{setting.accumulation} micro-batches" if global_batch is None else f"{global_batch:,} of them"
    return [
        f"{name}: {model.counts.total / 1e9:,.2f} B parameters, {model.counts.active / 1e9:,.2f} B active per token",
        f"{setting.world_size} GPUs, {cluster.gpus_per_node} per node, {cluster.memory / GIB:,.1f} GiB each",
        f"{hardware.name}: {attained(hardware)}",
        f"sequences of {setting.seq_length:,} tokens, {batch} per step, "
        f"{_dtype(setting)}, {setting.optimizer}; "
        f"the busiest expert has {setting.imbalance:.3g} x the mean load",
    ]


def _dtype(setting: Setting) -> str:
    if setting.bf16:
        return "bf16"
    return "fp32 with TF32 matmuls" if setting.tf32 else "fp32"


def ranked(plans: Sequence[Plan], cluster: Cluster) -> list[Column]:
    """One row per plan. Where space is short, the terms of memory go first: their sum stays."""
    settings, memories = [plan.setting for plan in plans], [plan.memory for plan in plans]

    def gib(values: Iterable[float]) -> list[str]:
        return [f"{n / GIB:.1f}" for n in values]

    def total(plan: Plan) -> str:
        share = plan.memory.total / cluster.memory
        colour = "red" if not plan.fits else "yellow" if share > 0.9 else "green"
        return f"[{colour}]{plan.memory.total / GIB:.1f}[/]"

    return [
        Column("fits", ["yes" if plan.fits else "no" for plan in plans], is_text=True),
        *(_pipeline_columns(settings) if any(s.pp_size > 1 for s in settings) else []),
        Column("dp", [str(s.dp_size) for s in settings]),
        Column("ep", [str(s.ep_size) for s in settings]),
        Column("dense", [s.dense_shard for s in settings], is_text=True),
        Column("check-\npoint", [s.checkpointing for s in settings], "checkpoint", is_text=True),
        Column("seqs", [str(s.micro_batch) for s in settings]),
        Column("state", gib(m.lasting for m in memories), spare=4),
        Column("activ.", gib(m.activations for m in memories), spare=3),
        Column("gathered", gib(m.gathered for m in memories), spare=5),
        Column("work-\ning", gib(m.working for m in memories), "working", spare=5),
        Column("slack", gib(m.slack for m in memories), spare=5),
        Column("total\nGiB", [total(plan) for plan in plans]),
        Column("GB/step\nin", [f"{plan.inside / 1e9:.1f}" for plan in plans], spare=2),
        Column("between", [f"{plan.between / 1e9:.1f}" for plan in plans], "GB/step between", spare=2),
        Column("s/step", [f"{plan.time.total:.2f}" for plan in plans], spare=1),
        Column("tok/s\n/GPU", [f"{plan.tokens_per_second:,.0f}" for plan in plans], "tok/s/GPU"),
    ]


def _pipeline_columns(settings: Sequence[Setting]) -> list[Column]:
    return [
        Column("pp", [str(s.pp_size) for s in settings]),
        Column("sche-\ndule", [s.schedule if s.pp_size > 1 else "" for s in settings], "schedule", 2, is_text=True),
        Column("chunks", [str(s.chunks) for s in settings], spare=1),
        Column("micro-\nbatches", [f"{s.accumulation:,}" for s in settings], "micro-batches", spare=1),
    ]


def summary(plan: Plan, hardware: Hardware) -> str:
    """Memory, time and throughput of a plan, in one line."""
    return (
        f"{plan.memory.total / GIB:.1f} GiB per GPU, {plan.tokens_per_second:,.0f} tokens/s per GPU, "
        f"{plan.share_of_peak(hardware):.1%} MFU"
    )


def parts(plan: Plan) -> list[str]:
    """The best plan in detail."""
    t = plan.time
    return [
        f"peak at {plan.when}: {memory_terms(plan.memory)}",
        f"step: {t.matrices:.2f} s matrices + {t.elementwise:.2f} elementwise + {t.all_to_alls:.2f} all-to-alls + "
        f"{t.exposed:.2f} by {t.sharding:.2f} of FSDP + {t.launching:.2f} waiting for the host + {t.update:.2f} update"
        + (f" + {t.bubble:.2f} waiting for other stages" if t.bubble else "")
        + f" = {t.total:.2f} s; the host calls operators for {t.host:.2f}",
    ]


def sent(plan: Plan) -> list[Column]:
    """What a rank sends in a step, one row per kind of collective."""
    told = [t for t in plan.traffic if t.total >= 1e5]
    return [
        Column("sent per rank", [t.kind for t in told], is_text=True),
        Column("of", [t.what for t in told], spare=1, is_text=True),
        Column("over", [t.group for t in told], is_text=True),
        Column("times\nper step", [f"{t.times:,}" for t in told], spare=2),
        Column("MB\neach", [f"{t.sent / 1e6:,.2f}" for t in told], spare=2),
        Column("GB\nper step", [f"{t.total / 1e9:,.2f}" for t in told]),
    ]


def memory_terms(memory: Memory) -> str:
    """The terms that are not zero, in GiB, or in MiB where all are small."""
    size, name = (GIB, "GiB") if memory.total >= GIB else (2**20, "MiB")
    terms = [f"{term} {n / size:,.2f}" for term, n in memory.terms().items() if n > 0]
    return f"{' + '.join(terms)} = {memory.total / size:,.2f} {name}"


def launch_line(name: str, setting: Setting, gpus_per_node: int, further: Sequence[str]) -> str:
    """A command that runs the setting, with `further` flags."""
    nodes = -(-setting.world_size // gpus_per_node)
    here = min(setting.world_size, gpus_per_node)
    across = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if nodes > 1 else ""
    flags: dict[str, Any] = {
        "model": name,
        "dataset": "data.jsonl",
        "max-seq-length": setting.seq_length,
        "packing": "",
        "ep-size": setting.ep_size,
        "dense-shard": setting.dense_shard,
        "per-device-train-batch-size": setting.micro_batch,
        "gradient-accumulation-steps": setting.accumulation,
        "gradient-checkpointing": setting.checkpointing,
        "optim": setting.optimizer,
    }
    if setting.cp_size > 1:
        flags["cp-size"] = setting.cp_size
    if setting.pp_size > 1:
        flags |= {"pp-size": setting.pp_size, "pipeline-schedule": setting.schedule, "pipeline-chunks": setting.chunks}
    if setting.stage_layers is not None:
        flags["pipeline-layers"] = ",".join(map(str, setting.stage_layers))
    if setting.overlap_chunks > 1:
        flags["overlap-chunks"] = setting.overlap_chunks
    if setting.dispatch != "auto" and setting.ep_size > 1:
        flags["dispatch"] = setting.dispatch
    if setting.keep_expert_products:
        flags["keep-expert-products"] = setting.keep_expert_products
    if setting.offload_activations:
        flags["offload-activations"] = ""
    given = " ".join(f"--{flag} {value}".rstrip() for flag, value in flags.items())
    precision = " --bf16" if setting.bf16 else " --tf32" if setting.tf32 else ""
    more = f" {shlex.join(further)}" if further else ""
    return f"torchrun {across}--nproc-per-node {here} train_ep.py {given}{precision}{more}"


def what_would_fit(plan: Plan, memory: float) -> str:
    """By how much a plan is too large, and what would shrink it."""
    over = plan.memory.total - memory
    lasting = plan.memory.lasting
    advice = "more GPUs, --optimizer adamw_torch_8bit or adamw_bf16, or shorter sequences"
    if lasting > memory:
        needed = -(-int(lasting * plan.setting.world_size) // int(memory))
        advice = f"at least {needed} GPUs, or --optimizer adamw_torch_8bit or adamw_bf16"
    return (
        f"even the smallest layout takes {plan.memory.total / GIB:,.1f} GiB, {over / GIB:,.1f} more than available; "
        f"use {advice}"
    )

"""Forecasts and dry runs as people read them: on a terminal, and in a pipe."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ...moe.util.terminal import folded
from ..config.train_config import TrainConfig, flags_of_config
from .columns import Column, open_console, print_table
from .coverage import not_modelled
from .imbalance import GivenRouting
from .memory import CONTEXT, FRAGMENTATION, LASTING, PEER, RING, Memory
from .planner.clock import StepTime
from .planner.hardware import GIB, Hardware, attained
from .planner.measured import ModelParameters
from .planner.search import Cluster, Plan
from .planner.setting import Setting
from .planner.traffic import Traffic

if TYPE_CHECKING:
    # of what a plan need not import, as torch
    from .rehearsal.rank_summary import Account, SentBytes


def _say(console: Console, line: str, style: str = "") -> None:
    console.print(Text(folded(line), style))


def print_plans(
    console: Console, lines: Sequence[str], plans: Sequence[Plan], cluster: Cluster, top: int, seconds: float
) -> None:
    """The assumptions, the ranked table, and the best plan's parts.

    Args:
        lines: the assumptions.
        seconds: that the search took.
    """
    for line in lines:
        _say(console, line)
    print_table(console, ranked(plans[:top], cluster))
    fitting = sum(plan.fits for plan in plans)
    _say(console, f"{fitting} of {len(plans)} layouts fit; shown: {min(top, len(plans))}; found in {seconds:.1f} s")
    best_by_tp: dict[int, Plan] = {}
    for plan in plans:
        best_by_tp.setdefault(plan.setting.tp_size, plan)
    for tp_size, plan in best_by_tp.items() if len(best_by_tp) > 1 else ():
        _say(console, f"best with tp {tp_size}, seqs {plan.setting.micro_batch}: {summary(plan, cluster.hardware)}")
    _say(console, "")
    best = plans[0]
    _say(console, f"the first: {summary(best, cluster.hardware)}")
    for line in parts(best):
        _say(console, line)
    shown = [t for t in best.traffic if t.total >= 1e5]
    print_table(console, _sent(shown, Column("of", [t.what for t in shown], spare=1, is_text=True)))


def assumptions(
    name: str, model: ModelParameters, config: TrainConfig, setting: Setting, cluster: Cluster, batch: str
) -> list[str]:
    """What plans have in common.

    Args:
        batch: sequences per step, in words.
    """
    hardware = cluster.hardware
    adapter = "" if config.adapter == "none" else f", {config.adapter} on {config.base_dtype}"
    return [
        f"{name}: {model.counts.total / 1e9:,.2f} B parameters, {model.counts.active / 1e9:,.2f} B active per token",
        f"{setting.world_size} GPUs, {cluster.gpus_per_node} per node, {cluster.memory / GIB:,.1f} GiB each",
        f"{hardware.name}: {attained(hardware)}",
        f"sequences of {setting.seq_length:,} tokens, all full{', packed' if config.packing else ''}; {batch}; "
        f"{_dtype(setting.bf16, setting.tf32)}, {setting.optimizer}{adapter}; "
        f"the busiest expert has {setting.imbalance:.3g} x the mean load",
    ]


def _dtype(bf16: bool, tf32: bool) -> str:
    return "bf16" if bf16 else "fp32 with TF32 matmuls" if tf32 else "fp32"


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
        *([Column("tp", [str(s.tp_size) for s in settings])] if any(s.tp_size > 1 for s in settings) else []),
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
    return [f"peak at {plan.when}: {memory_terms(plan.memory)}", _step(plan.time, digits=2)]


def _step(t: StepTime, digits: int) -> str:
    """What spends the time of a step, with so many digits of a second."""
    terms = {
        "matrices": t.matrices,
        "elementwise": t.elementwise,
        "all-to-alls": t.all_to_alls,
        **({"gathers of activations": t.gathers} if t.gathers else {}),
        f"by {t.sharding:.{digits}f} of FSDP": t.exposed,
        "waiting for the host": t.launching,
        "update": t.update,
    }
    if t.bubble:
        terms["waiting for other stages"] = t.bubble
    first, *others = (f"{seconds:.{digits}f}{' s' * (name == 'matrices')} {name}" for name, seconds in terms.items())
    total = f"{t.total:.{digits}f} s; the host calls operators for {t.host:.{digits}f}"
    return f"step: {' + '.join((first, *others))} = {total}"


def _sent(calls: "Sequence[Traffic] | Sequence[SentBytes]", *further: Column) -> list[Column]:
    """What a rank sends in a step, one row per kind of collective and group."""
    return [
        Column("sent per rank", [c.kind for c in calls], is_text=True),
        Column("over", [c.group for c in calls], is_text=True),
        *further,
        Column("times\nper step", [f"{c.times:,}" for c in calls], spare=2),
        Column("MB\neach", [f"{c.total / c.times / 1e6:,.2f}" for c in calls], spare=2),
        Column("GB\nper step", [f"{c.total / 1e9:,.2f}" for c in calls]),
    ]


def memory_terms(memory: Memory) -> str:
    """The terms that are not zero, in GiB, or in MiB where all are small."""
    size, name = (GIB, "GiB") if memory.total >= GIB else (2**20, "MiB")
    terms = [f"{term} {n / size:,.2f}" for term, n in memory.terms().items() if n > 0]
    return f"{' + '.join(terms)} = {memory.total / size:,.2f} {name}"


_ALWAYS = (
    "model", "dataset", "max_seq_length", "bf16", "ep_size", "dense_shard", "tp_size", "pp_size",
    "per_device_train_batch_size", "global_batch_size", "gradient_checkpointing", "optim",
)  # fmt: skip
"""Settings that a launch line names even where they are at their defaults: `plan` has others, or tries several."""


def launch_line(
    config: TrainConfig,
    world_size: int,
    gpus_per_node: int,
    file: Mapping[str, Any] | None = None,
    config_file: str | None = None,
) -> str:
    """A command that runs the configuration. Given to `plan`, its flags forecast the same.

    Args:
        file: settings that the YAML file gives which `config_file` names.
    """
    nodes = -(-world_size // gpus_per_node)
    here = min(world_size, gpus_per_node)
    across = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if nodes > 1 else ""
    always = list(_ALWAYS)
    if config.global_batch_size is None:
        always[always.index("global_batch_size")] = "gradient_accumulation_steps"
    words = [*([] if config_file is None else ["--config", config_file]), *flags_of_config(config, always, file)]
    return f"torchrun {across}--nproc-per-node {here} -m expertmesh.train_ep {shlex.join(words)}"


def print_account(
    account: "Account", config: TrainConfig, where: str, hardware: Hardware, given: GivenRouting, world_size: int
) -> None:
    """Whether it fits, memory by kind and by moment, collectives, the forecast, and what was assumed."""
    console = open_console()
    _say(console, _setting(account, config, where, hardware, world_size))
    fits, gib = account.fit, account.fit.total / GIB
    if fits.is_enough:
        _say(console, f"\nfits: {gib:,.1f} of {fits.card / GIB:,.1f} GiB", "bold green")
    else:
        _say(console, f"\ndoes not fit: {gib:,.1f} GiB, and the GPU has {fits.card / GIB:,.1f}", "bold red")
    _say(console, f"\nat the peak of the tensors, in the {account.memory.when}")
    print_table(console, _kinds(account))
    _say(console, "\npeak memory of tensors, by phase")
    print_table(console, _moments(account))
    if account.sent:
        _say(console, "\ncollectives per step")
        ranks = Column("ranks", [f"{each.ranks:,}" for each in account.sent])
        seconds = Column("ms", [f"{each.seconds * 1e3:,.1f}" for each in account.sent])
        print_table(console, [*_sent(account.sent, ranks), seconds])
    _say(console, "\nwhere the time goes")
    print_table(console, _parts(account))
    _say(console, _forecast(account))
    for line in _assumptions(account, config, hardware, given):
        _say(console, line)


def _setting(account: "Account", config: TrainConfig, where: str, hardware: Hardware, world_size: int) -> str:
    rehearsed, layers = account.layers
    pipeline = account.ledger.pipeline
    which = "one per kind" if pipeline is None else pipeline.told
    run = "" if rehearsed == layers else f", of which {rehearsed} run, {which}"
    adapter = "" if config.adapter == "none" else f", {config.adapter} on {config.base_dtype}"
    flags = [
        f"ep {config.ep_size}",
        f"dense {config.dense_shard}",
        _dtype(config.bf16, config.tf32),
        f"checkpointing {config.gradient_checkpointing}",
        config.optim + adapter,
        *(["packing"] if config.packing else []),
        *([f"cp {config.cp_size}"] if config.cp_size > 1 else []),
        *([f"tp {config.tp_size}"] if config.tp_size > 1 else []),
        *([f"pp {config.pp_size} {config.schedule_name}"] if config.pp_size > 1 else []),
        *(["offload"] if config.offload else []),
    ]
    return (
        f"{where}: {account.parameters / 1e9:,.1f} B parameters, {layers} layers{run}\n"
        f"rank {account.rank} of {world_size} on {hardware.name}; {', '.join(flags)}\n"
        f"{account.forwards} x {config.per_device_train_batch_size} x {config.max_seq_length:,} tokens per step and "
        + _sharing(config)
    )


def _sharing(config: TrainConfig) -> str:
    """What shares sequences."""
    if config.pp_size > 1:
        return "pipeline"
    if config.ranks_per_sequence == 1:
        return "rank"
    return "CP group" if config.tp_size == 1 else f"{config.ranks_per_sequence} ranks"


def _kinds(account: "Account") -> list[Column]:
    fits = account.fit
    terms = account.memory.kinds.terms()
    host = LASTING if fits.host else ()
    rows = [
        *((f"{term}, in host memory" if term in host else term, size) for term, size in terms.items() if size),
        ("= tensors on the GPU", fits.tensors),
        *((f"NCCL: {c.name}, {c.ranks} ranks", c.size) for c in fits.communicators),
        ("fragmentation", fits.fragmentation),
        ("CUDA's context", fits.context),
        ("= needed", fits.total),
    ]
    return [
        Column("memory", [name for name, _ in rows], is_text=True),
        Column("GiB", [f"{size / GIB:,.2f}" for _, size in rows]),
    ]


def _moments(account: "Account") -> list[Column]:
    return [
        Column("phase", [moment.phase for moment in account.moments], is_text=True),
        Column("peak in", [moment.where for moment in account.moments], is_text=True),
        Column("GiB", [f"{moment.peak / GIB:,.2f}" for moment in account.moments]),
    ]


def _parts(account: "Account") -> list[Column]:
    parts = [*account.ledger.parts, account.ledger.total]
    return [
        Column("part", [part.name for part in parts], is_text=True),
        Column("TFLOP", [f"{part.flops / 1e12:,.1f}" for part in parts]),
        Column("GB\nmoved", [f"{part.moved / 1e9:,.1f}" for part in parts]),
        Column("kernels", [f"{part.kernels:,.0f}" for part in parts], spare=1),
        Column("ms", [f"{part.seconds * 1e3:,.1f}" for part in parts]),
    ]


def _forecast(account: "Account") -> str:
    step = account.ledger
    bubble = "" if step.pipeline is None else f" (bubble of all ranks {step.pipeline.bubble:.1%})"
    return (
        f"\nforecast: {step.seconds:,.3f} s per step, {account.tokens / step.seconds:,.0f} tokens/s per GPU, "
        f"{account.mfu:.1%} MFU, {step.needed / 1e12:,.1f} TFLOP without recomputation\n"
        f"{_step(step.time, digits=3)}{bubble}"
    )


def _assumptions(account: "Account", config: TrainConfig, hardware: Hardware, given: GivenRouting) -> list[str]:
    routing = "every expert gets equally many tokens"
    if given.shares:
        most = max(given.shares) * config.ep_size
        routing = f"the most loaded rank gets {most:.2f} times the mean of a layer's tokens"
    lines = [
        f"assumed: {routing}; sequences are full" + (f", of {given.samples} samples each" if config.packing else ""),
        f"assumed: NCCL's buffers take {RING / 2**20:,.0f} MiB per communicator of all-gathers, reduce-scatters or "
        "all-reduces, and "
        f"{PEER / 2**20:,.0f} MiB per peer of one of all-to-alls; CUDA's context {CONTEXT / GIB:,.1f} GiB; "
        f"fragmentation {FRAGMENTATION:.0%} of temporary tensors",
        f"rates: {attained(hardware)}; {hardware.rates.launch * 1e6:g} us per launch, "
        f"{hardware.rates.call * 1e6:g} us of the host per operator, {hardware.rates.wait * 1e6:g} where it waits for "
        "the GPU",
    ]
    if config.offload:
        lines.append(f"--offload: {account.fit.host / GIB:,.1f} GiB of host memory per rank")
    return [*lines, *not_modelled(config, rehearsed=True)]

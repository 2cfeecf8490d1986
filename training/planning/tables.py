"""Forecasts and dry runs as people read them: on a terminal, and in a pipe."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ...moe.util.terminal import folded
from ...sharding.topology import ranks_per_equal_node
from ..config.train_config import SETTINGS, TrainConfig, flags_of_config, parse_config
from .columns import Column, open_console, print_table
from .coverage import assumed_code, not_modelled
from .imbalance import GivenRouting
from .memory import CONTEXT, FRAGMENTATION, PEER, RING, Memory
from .plan_flags import DATASET, OUTPUT_DIR
from .planner.account import Account, SentBytes
from .planner.clock import StepTime
from .planner.hardware import GIB, attained
from .planner.search import Plan


def _say(console: Console, line: str, style: str = "") -> None:
    console.print(Text(folded(line), style))


def print_plans(
    console: Console,
    plans: Sequence[Plan],
    number: int,
    batch: str,
    seconds: float,
    balanced: Plan | None,
    top: int,
    is_verbose: bool,
) -> None:
    """What is planned, whether it fits and what it costs, in a line each; then a table of the best plans with what its
    columns mean.

    Args:
        plans: best first. number: of layouts, most of which were estimated alone. batch: sequences per step, in words.
        seconds: that the search took. balanced: the first where all experts have as many tokens, if that is not what
            was planned. top: rows of the table.
        is_verbose: whether the table has all columns, and what follows it the assumptions, and the best plan's parts.
    """
    best, cluster = plans[0], plans[0].cluster
    config, counts = best.config, best.facts.counts
    _say(
        console,
        f"{config.model}: {counts.total / 1e9:,.2f} B parameters, {counts.active / 1e9:,.2f} B active per token; "
        f"{_trained(config)} in {_dtype(config)} with {config.optim}, sequences of {config.max_seq_length:,} "
        f"tokens{', packed' if config.packing else ''}",
    )
    gpus = f"{best.world_size:,} GPUs ({cluster.hardware.name}; {cluster.gpus_per_node} per node)"
    needed = f"{best.memory.total / GIB:,.1f} of {cluster.memory / GIB:,.1f} GiB per GPU"
    if best.fits:
        fits, takes = f"fits on {gpus}: the fastest layout needs {needed}", "takes"
    else:
        over = (best.memory.total - cluster.memory) / GIB
        fits = f"does not fit on {gpus}: the smallest layout needs {needed}, {over:,.1f} more than there is"
        takes = "would take"
    _say(console, f"{fits}; {len(plans)} of {number} layouts were dry-run, those that promised most by estimate")
    everywhere = f"{best.tokens_per_second * best.world_size:,.0f} tokens/s in all"
    _say(console, f"a step of {batch} {takes} {best.seconds:,.2f} s: {speed(best, balanced)}; {everywhere}\n")
    columns = _ranked(plans[:top])
    print_table(console, columns if is_verbose else [column for column in columns if column.meaning])
    _say(console, "")
    for column in columns:
        if column.meaning:
            _say(console, f"{column.called}: {column.meaning}")
    if not is_verbose:
        return
    _say(console, "")
    by_tp: dict[int, Plan] = {}
    for plan in plans:
        by_tp.setdefault(plan.config.tp_size, plan)
    for tp_size, plan in by_tp.items() if len(by_tp) > 1 else ():
        _say(console, f"best with --tp-size {tp_size}: {summary(plan)}")
    _say(console, "assumed: all sequences are full")
    _say(console, f"rates of {cluster.hardware.name}: {attained(cluster.hardware)}")
    _say(console, f"found in {seconds:.1f} s")
    _say(console, "\nthe first line of the table")
    _say(console, f"peak in the {best.account.memory.when}: {memory_terms(best.memory)}")
    _say(console, _step(best.account.time, digits=2))
    if best.account.sent:
        print_table(console, _sent(best.account.sent))


def _dtype(config: TrainConfig) -> str:
    return "bf16" if config.bf16 else "fp32 with TF32 matmuls" if config.tf32 else "fp32"


def _ranked(plans: Sequence[Plan]) -> list[Column]:
    """One row per plan. Those columns that have a meaning are always printed, the others where everything is. Where
    space is short, the terms of memory go first: their sum stays."""

    def column(heading: str, cell: Callable[[Plan], object], name: str = "", **more: Any) -> Column:
        return Column(heading, [str(cell(plan)) for plan in plans], name, **more)

    def gib(heading: str, term: str, spare: int, name: str = "") -> Column:
        return column(heading, lambda plan: f"{getattr(plan.memory, term) / GIB:.1f}", name, spare=spare)

    def total(plan: Plan) -> str:
        share = plan.memory.total / plan.cluster.memory
        colour = "red" if not plan.fits else "yellow" if share > 0.9 else "green"
        return f"[{colour}]{'~' * plan.is_estimate}{plan.memory.total / GIB:.1f}[/]"

    pipelines = [
        column(
            "pipeline\nstages",
            lambda plan: plan.config.pp_size,
            meaning="--pp-size: groups of GPUs with some of the layers each",
        ),
        column(
            "sche-\ndule",
            lambda plan: plan.config.schedule_name if plan.config.pp_size > 1 else "",
            "schedule",
            spare=2,
            is_text=True,
            meaning="--pipeline-schedule: the order of a step's micro-batches",
        ),
        column("chunks", lambda plan: plan.config.pipeline_chunks, spare=1),
        column("micro-\nbatches", lambda plan: f"{plan.account.forwards:,}", "micro-batches", spare=1),
    ]
    fits = column(
        "fits",
        lambda plan: "yes" if plan.fits else "no",
        spare=1,
        is_text=True,
        meaning="whether the memory of a GPU is enough",
    )
    tensor_parallel = column(
        "tensor\nparallel",
        lambda plan: plan.config.tp_size,
        meaning="--tp-size: GPUs that heads and dense MLPs are sharded over",
    )
    return [
        *([fits] if len({plan.fits for plan in plans}) > 1 else []),
        *(pipelines if any(plan.config.pp_size > 1 for plan in plans) else []),
        column(
            "data\nparallel",
            lambda plan: plan.topology.dp_size,
            spare=1,
            meaning="groups of GPUs with all experts each",
        ),
        column(
            "expert\nparallel",
            lambda plan: plan.config.ep_size,
            meaning="--ep-size: GPUs that a layer's experts are sharded over",
        ),
        *([tensor_parallel] if any(plan.config.tp_size > 1 for plan in plans) else []),
        column(
            "dense\nweights",
            lambda plan: plan.config.dense_shard,
            is_text=True,
            meaning="--dense-shard: those outside of experts, sharded over all GPUs (full), or over "
            "each expert-parallel group (hybrid)",
        ),
        column(
            "check-\npointing",
            lambda plan: plan.config.gradient_checkpointing,
            "checkpointing",
            is_text=True,
            meaning="--gradient-checkpointing: what backward recomputes instead of storing it",
        ),
        column(
            "micro-\nbatch",
            lambda plan: plan.config.per_device_train_batch_size,
            "micro-batch",
            meaning="--per-device-train-batch-size: sequences per micro-batch",
        ),
        gib("state", "lasting", 4),
        gib("activ.", "activations", 3),
        gib("gathered", "gathered", 5),
        gib("work-\ning", "working", 5, "working"),
        gib("slack", "slack", 5),
        column(
            "GiB\nper GPU",
            total,
            meaning="memory at the peak" + ("; ~: by estimate" if any(plan.is_estimate for plan in plans) else ""),
        ),
        column("GB/step\nin", lambda plan: f"{plan.inside / 1e9:.1f}", spare=2),
        column("between", lambda plan: f"{plan.between / 1e9:.1f}", "GB/step between", spare=2),
        column("s per\nstep", lambda plan: f"{plan.seconds:.2f}", spare=2),
        column(
            "tokens/s\nper GPU",
            lambda plan: f"{plan.tokens_per_second:,.0f}",
            meaning="by rates that others attained",
        ),
    ]


def summary(plan: Plan) -> str:
    """Memory, time and throughput of a plan, in one line."""
    return f"{plan.memory.total / GIB:.1f} GiB per GPU, {speed(plan)}"


def speed(plan: Plan, balanced: Plan | None = None) -> str:
    """Throughput of a plan; as a band where the same is known with balanced routing."""
    least, least_mfu = f"{plan.tokens_per_second:,.0f}", f"{plan.share_of_peak:.1%}"
    if balanced is None or balanced.tokens_per_second <= plan.tokens_per_second:
        return f"{least} tokens/s per GPU, {least_mfu} MFU"
    most, most_mfu = f"{balanced.tokens_per_second:,.0f}", f"{balanced.share_of_peak:.1%}"
    return f"{least} to {most} tokens/s per GPU, {least_mfu} to {most_mfu} MFU (natural to balanced routing)"


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


def _sent(calls: Sequence[SentBytes]) -> list[Column]:
    """What a rank sends in a step, one row per kind of collective and group."""
    return [
        Column("sent per rank", [c.kind for c in calls], is_text=True),
        Column("over", [c.group for c in calls], is_text=True),
        Column("ranks", [f"{c.ranks:,}" for c in calls], spare=1),
        Column("times\nper step", [f"{c.times:,}" for c in calls], spare=2),
        Column("MB\neach", [f"{c.total / c.times / 1e6:,.2f}" for c in calls], spare=2),
        Column("GB\nper step", [f"{c.total / 1e9:,.2f}" for c in calls]),
    ]


def memory_terms(memory: Memory) -> str:
    """The terms that are not zero, in GiB, or in MiB where all are small."""
    size, name = (GIB, "GiB") if memory.total >= GIB else (2**20, "MiB")
    terms = [f"{term} {n / size:,.2f}" for term, n in memory.terms().items() if n > 0]
    return f"{' + '.join(terms)} = {memory.total / size:,.2f} {name}"


HOST = "$HOST"
"""A shell variable in a launch line, beside `DATASET` and `OUTPUT_DIR`."""

_ALWAYS = (
    "model", "dataset", "output_dir", "max_seq_length", "bf16", "ep_size", "dense_shard", "tp_size", "pp_size",
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
    """A command that runs the configuration, with shell variables for what a plan does not know (`to_be_set`). Given to
    `plan`, its flags forecast the same.

    Args:
        file: settings that the YAML file gives which `config_file` names.
    """
    # torchrun starts as many ranks on each node
    here = ranks_per_equal_node(world_size, gpus_per_node)
    nodes = world_size // here
    across = f'--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint "{HOST}:29500" ' if nodes > 1 else ""
    always = list(_ALWAYS)
    if config.global_batch_size is None:
        always[always.index("global_batch_size")] = "gradient_accumulation_steps"
    if config.gradient_checkpointing == "selective":
        always.append("keep_expert_products")
    words = [*([] if config_file is None else ["--config", config_file]), *flags_of_config(config, always, file)]
    started = vars(parse_config(words))
    apart = [name for name in SETTINGS if started[name] != getattr(config, name)]
    assert not apart, f"the launch line starts another run than was planned: it differs in {apart}"
    quoted = " ".join(f'"{word}"' if word in (DATASET, OUTPUT_DIR) else shlex.quote(word) for word in words)
    return f"torchrun {across}--nproc-per-node {here} -m expertmesh.train_ep {quoted}"


def to_be_set(line: str) -> str:
    """What the shell variables of a launch line are to be, in words; empty where it has none."""
    meanings = {DATASET: "your data", OUTPUT_DIR: "where the run is to write", HOST: "the first node's name"}
    found = [f"{name.removeprefix('$')} ({meaning})" for name, meaning in meanings.items() if f'"{name}' in line]
    everywhere = ", on each node" if f'"{HOST}' in line else ""
    return f"set {', '.join(found)}{everywhere}" if found else ""


def print_account(plan: Plan, where: str, given: GivenRouting, balanced: Plan | None = None) -> None:
    """What was run, whether it fits and what a step costs, in a line each; memory by kind and by moment, collectives,
    parts, and what was assumed.

    Args:
        plan: of one rank. balanced: with balanced routing, if that is not what it is of.
    """
    console, config, account, fits = open_console(), plan.config, plan.account, plan.fit
    gib, card = fits.total / GIB, fits.card / GIB
    _say(console, _setting(plan, where))
    if fits.is_enough:
        _say(console, f"fits: {gib:,.1f} of {card:,.1f} GiB", "bold green")
    else:
        _say(console, f"does not fit: {gib:,.1f} GiB, and the GPU has {card:,.1f}", "bold red")
    tokens = f"{account.forwards} x {config.per_device_train_batch_size} x {config.max_seq_length:,} tokens"
    takes = "takes" if fits.is_enough else "would take"
    _say(console, f"a step of {tokens} per {_sharing(config)} {takes} {plan.seconds:,.2f} s: {speed(plan, balanced)}")
    _say(console, f"\nat the peak of the tensors, in the {account.memory.when}")
    print_table(console, _kinds(plan))
    _say(console, "\npeak memory of tensors, by phase")
    print_table(console, _moments(account))
    if account.sent:
        _say(console, "\ncollectives per step")
        print_table(console, _sent(account.sent))
    _say(console, f"\nparts of a step: {account.needed / 1e12:,.1f} TFLOP without recomputation")
    print_table(console, _parts(account))
    _say(console, "")
    assumed = assumed_code(plan.facts.looped, plan.facts.by_liger)
    for line in [_step(account.time, digits=3), *assumed, *_assumptions(plan, given)]:
        _say(console, line)


def _setting(plan: Plan, where: str) -> str:
    account, config = plan.account, plan.config
    here, layers = account.layers
    run = "" if here == layers else f", of which {here} here, {account.stages}"
    if account.run < here:
        run += f", by dry runs of {account.run} and more"
    flags = [
        f"ep {config.ep_size}",
        f"dense {config.dense_shard}",
        _dtype(config),
        f"checkpointing {config.gradient_checkpointing}",
        config.optim,
        *([] if config.adapter == "none" else [_trained(config)]),
        *(["packing"] if config.packing else []),
        *([f"cp {config.cp_size}"] if config.cp_size > 1 else []),
        *([f"tp {config.tp_size}"] if config.tp_size > 1 else []),
        *([f"pp {config.pp_size} {config.schedule_name}"] if config.pp_size > 1 else []),
        *(["offload"] if config.offload else ["offload experts"] if config.offload_experts else []),
    ]
    return (
        f"{where}: {account.parameters / 1e9:,.1f} B parameters, {layers} layers{run}; rank {account.rank} of "
        f"{plan.world_size} on {plan.cluster.hardware.name}; {', '.join(flags)}"
    )


def _trained(config: TrainConfig) -> str:
    """What is trained, in words."""
    base = "" if config.base_dtype == "auto" else f" on {config.base_dtype}"
    return "all weights" if config.adapter == "none" else f"{config.adapter}{base}"


def _sharing(config: TrainConfig) -> str:
    """What shares sequences."""
    if config.pp_size > 1:
        return "pipeline"
    if config.ranks_per_sequence == 1:
        return "rank"
    return "CP group" if config.tp_size == 1 else f"{config.ranks_per_sequence} ranks"


def _kinds(plan: Plan) -> list[Column]:
    fits, on_gpu = plan.fit, plan.memory.terms()
    rows = [
        *(
            (name, size)
            for term, whole in plan.account.memory.kinds.terms().items()
            if term != "slack"
            for name, size in ((term, on_gpu[term]), (f"{term}, in host memory", whole - on_gpu[term]))
            if size
        ),
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


def _moments(account: Account) -> list[Column]:
    return [
        Column("phase", [moment.phase for moment in account.moments], is_text=True),
        Column("peak in", [moment.where for moment in account.moments], is_text=True),
        Column("GiB", [f"{moment.peak / GIB:,.2f}" for moment in account.moments]),
    ]


def _parts(account: Account) -> list[Column]:
    names, parts = [*account.parts, "all"], [*account.parts.values(), account.total]
    return [
        Column("part", names, is_text=True),
        Column("TFLOP", [f"{part.flops / 1e12:,.1f}" for part in parts]),
        Column("GB\nmoved", [f"{part.moved / 1e9:,.1f}" for part in parts]),
        Column("kernels", [f"{part.kernels:,.0f}" for part in parts], spare=1),
        Column("ms", [f"{part.seconds * 1e3:,.1f}" for part in parts]),
    ]


def _assumptions(plan: Plan, given: GivenRouting) -> list[str]:
    config, hardware = plan.config, plan.cluster.hardware
    routing = "every expert gets equally many tokens"
    if shares := given.shares(plan.facts.num_experts, config.ep_size):
        most = max(shares) * config.ep_size
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
    if config.offload or config.offload_experts:
        flag = "--offload" if config.offload else "--offload-experts"
        lines.append(f"{flag}: {plan.fit.host / GIB:,.1f} GiB of host memory per rank")
    return [*lines, *not_modelled(config)]

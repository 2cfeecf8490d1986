"""Forecasts as people read them."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sharding.planner.memory import Memory
from sharding.planner.search import Cluster, Plan
from sharding.planner.setting import Setting
from sharding.planner.shapes import ModelShape

GIB = 2**30


def print_plans(
    console: Console, name: str, model: ModelShape, plans: Sequence[Plan], cluster: Cluster, top: int
) -> None:
    """The assumptions, the ranked table, the best plan's parts, and the line that starts it."""
    for line in assumptions(name, model, plans[0].setting, cluster):
        console.print(escape(line), highlight=False)
    console.print(ranked(plans[:top], cluster))
    fitting = sum(plan.fits for plan in plans)
    console.print(f"{fitting} of {len(plans)} settings fit; shown: {min(top, len(plans))}", highlight=False)
    best = plans[0]
    for line in parts(best):
        console.print(line, highlight=False)
    if best.fits:
        console.print("\n[bold green]recommended[/]", highlight=False)
        console.print(
            launch_line(name, best.setting, cluster.gpus_per_node), highlight=False, soft_wrap=True, markup=False
        )
    else:
        console.print(f"\n[bold red]nothing fits[/]: {escape(what_would_fit(best, cluster.memory))}", highlight=False)


def assumptions(name: str, model: ModelShape, setting: Setting, cluster: Cluster) -> list[str]:
    hardware = cluster.hardware
    return [
        f"{name}: {model.counts.total / 1e9:,.2f} B parameters, {model.counts.active / 1e9:,.2f} B active a token",
        f"{setting.world_size} GPUs, {cluster.gpus_per_node} a node, {cluster.memory / GIB:,.1f} GiB each",
        f"{hardware.name}, attained: "
        f"{hardware.device.matrix * hardware.matrix_share / 1e12:,.4g} TFLOP/s, "
        f"{hardware.device.memory_bandwidth * hardware.memory_share / 1e9:,.4g} GB/s memory, "
        f"{hardware.inside.bandwidth * hardware.link_share / 1e9:,.3g} GB/s inside and "
        f"{hardware.between.bandwidth * hardware.link_share / 1e9:,.3g} between nodes",
        f"rows of {setting.seq_length:,} tokens, {setting.accumulation} forwards a step, "
        f"{'bf16' if setting.bf16 else 'fp32'}, {setting.optimizer}; "
        f"the busiest expert has {setting.imbalance:g} x the mean",
    ]


def ranked(plans: Sequence[Plan], cluster: Cluster) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in (
        "",
        "dp",
        "ep",
        "dense",
        "checkpoint",
        "rows",
        "state",
        "activ.",
        "gathered",
        "rows+logits",
        "slack",
    ):
        table.add_column(heading, justify="left" if heading in ("", "dense", "checkpoint") else "right")
    for heading in ("total GiB", "GB/step in", "between", "s/step", "tok/s/GPU"):
        table.add_column(heading, justify="right")
    for plan in plans:
        s, m = plan.setting, plan.memory
        colour = "red" if not plan.fits else "yellow" if m.total > 0.9 * cluster.memory else "green"
        table.add_row(
            "fits" if plan.fits else "no",
            *(str(s.dp_size), str(s.ep_size), s.dense_shard, s.checkpointing, str(s.micro_batch)),
            *(f"{n / GIB:.1f}" for n in (m.lasting, m.activations, m.gathered, m.rows + m.logits, m.slack)),
            f"[{colour}]{m.total / GIB:.1f}[/]",
            *(f"{plan.inside / 1e9:.1f}", f"{plan.between / 1e9:.1f}"),
            *(f"{plan.time.total:.2f}", f"{plan.tokens_per_second:,.0f}"),
        )
    return table


def parts(plan: Plan) -> list[str]:
    """The best plan, opened up."""
    t = plan.time
    lines = [
        f"\npeak at {plan.when}: {memory_terms(plan.memory)}",
        f"step: {t.matrices:.2f} s matrices + {t.elementwise:.2f} elementwise + {t.all_to_alls:.2f} all-to-alls + "
        f"{t.exposed:.2f} of {t.sharding:.2f} sharding not hidden + {t.update:.2f} update = {t.total:.2f} s",
        "a rank sends, a step:",
    ]
    lines += [
        f"  {t.kind:<15} {t.what:<18} over {t.group:<4} {t.times:>6,} x {t.sent / 1e6:>10,.2f} MB "
        f"= {t.total / 1e9:>8,.2f} GB"
        for t in plan.traffic
        if t.total >= 1e5
    ]
    return lines


def memory_terms(memory: Memory) -> str:
    """The terms that are not zero, in GiB, or in MiB where all are small."""
    size, name = (GIB, "GiB") if memory.total >= GIB else (2**20, "MiB")
    terms = [f"{term} {n / size:,.2f}" for term, n in memory.terms().items() if n > 0]
    return f"{' + '.join(terms)} = {memory.total / size:,.2f} {name}"


def launch_line(name: str, setting: Setting, gpus_per_node: int) -> str:
    """A command that runs the setting."""
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
    given = " ".join(f"--{flag} {value}".rstrip() for flag, value in flags.items())
    return f"torchrun {across}--nproc-per-node {here} train_ep.py {given}{' --bf16' if setting.bf16 else ''}"


def what_would_fit(plan: Plan, memory: float) -> str:
    """Of a plan that is too large: by how much, and what would shrink it."""
    over = plan.memory.total - memory
    lasting = plan.memory.lasting
    advice = "more GPUs, --optimizer adamw_torch_8bit or adamw_bf16, or shorter rows"
    if lasting > memory:
        needed = -(-int(lasting * plan.setting.world_size) // int(memory))
        advice = f"at least {needed} GPUs, or --optimizer adamw_torch_8bit or adamw_bf16"
    return (
        f"even the smallest setting takes {plan.memory.total / GIB:,.1f} GiB, {over / GIB:,.1f} more than there are; "
        f"use {advice}"
    )

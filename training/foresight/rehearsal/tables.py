"""A dry run as people read it: at 80 columns, and in a pipe."""

from rich.text import Text

from expertmesh.moe.base.terminal import folded
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.foresight.memory import CONTEXT, FRAGMENTATION, LASTING, PEER, RING
from expertmesh.training.foresight.planner.columns import Column, open_console, print_table
from expertmesh.training.foresight.planner.hardware import Hardware, attained
from expertmesh.training.foresight.rehearsal.account import Account
from expertmesh.training.foresight.rehearsal.ledger import sums
from expertmesh.training.foresight.rehearsal.told import Told

GIB = 2**30


def print_account(
    account: Account, config: TrainConfig, where: str, hardware: Hardware, told: Told, world_size: int
) -> None:
    """Whether it fits, memory by kind and by moment, collectives, the forecast, and what was assumed."""
    console = open_console()

    def say(line: str, style: str = "") -> None:
        console.print(Text(folded(line), style))

    say(_setting(account, config, where, hardware, world_size))
    fits, gib = account.fit, account.fit.total / GIB
    if fits.is_enough:
        say(f"\nfits: {gib:,.1f} of {fits.card / GIB:,.1f} GiB", "bold green")
    else:
        say(f"\ndoes not fit: {gib:,.1f} GiB, and the GPU has {fits.card / GIB:,.1f}", "bold red")
    say(f"\nat the peak of the tensors, in the {account.memory.when}")
    print_table(console, _kinds(account))
    say("\npeak memory of tensors, by phase")
    print_table(console, _moments(account))
    if account.sent:
        say("\ncollectives per step")
        print_table(console, _sent(account))
    say("\nwhere the time goes")
    print_table(console, _parts(account))
    say(_forecast(account))
    for line in _assumptions(account, config, hardware, told):
        say(line)


def _setting(account: Account, config: TrainConfig, where: str, hardware: Hardware, world_size: int) -> str:
    rehearsed, layers = account.layers
    pipeline = account.ledger.pipeline
    which = "one per kind" if pipeline is None else pipeline.told
    run = "" if rehearsed == layers else f", of which {rehearsed} run, {which}"
    dtype = "bf16" if config.bf16 else "tf32" if config.tf32 else "fp32"
    adapter = "" if config.adapter == "none" else f", {config.adapter} on {config.base_dtype}"
    flags = [
        f"ep {config.ep_size}",
        f"dense {config.dense_shard}",
        dtype,
        f"checkpointing {config.gradient_checkpointing}",
        config.optim + adapter,
        *(["packing"] if config.packing else []),
        *([f"cp {config.cp_size}"] if config.cp_size > 1 else []),
        *([f"pp {config.pp_size} {config.schedule_name}"] if config.pp_size > 1 else []),
        *(["offload"] if config.offload else []),
    ]
    return (
        f"{where}: {account.parameters / 1e9:,.1f} B parameters, {layers} layers{run}\n"
        f"rank {account.rank} of {world_size} on {hardware.name}; {', '.join(flags)}\n"
        f"{account.forwards} x {config.per_device_train_batch_size} x {config.max_seq_length:,} tokens per step and "
        + ("pipeline" if config.pp_size > 1 else "rank" if config.cp_size == 1 else "CP group")
    )


def _kinds(account: Account) -> list[Column]:
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


def _moments(account: Account) -> list[Column]:
    return [
        Column("phase", [moment.phase for moment in account.moments], is_text=True),
        Column("peak in", [moment.where for moment in account.moments], is_text=True),
        Column("GiB", [f"{moment.peak / GIB:,.2f}" for moment in account.moments]),
    ]


def _sent(account: Account) -> list[Column]:
    sent = account.sent
    return [
        Column("group", [s.group for s in sent], is_text=True),
        Column("ranks", [f"{s.ranks:,}" for s in sent]),
        Column("operator", [s.operator for s in sent], is_text=True),
        Column("times", [f"{s.times:,}" for s in sent]),
        Column("MB\neach", [f"{s.sent / s.times / 1e6:,.2f}" for s in sent], spare=1),
        Column("GB", [f"{s.sent / 1e9:,.2f}" for s in sent]),
        Column("ms", [f"{s.seconds * 1e3:,.1f}" for s in sent]),
    ]


def _parts(account: Account) -> list[Column]:
    parts = [*account.ledger.parts, sums(account.ledger.parts)]
    return [
        Column("part", [part.name for part in parts], is_text=True),
        Column("TFLOP", [f"{part.flops / 1e12:,.1f}" for part in parts]),
        Column("GB\nmoved", [f"{part.moved / 1e9:,.1f}" for part in parts]),
        Column("GB\nminimum", [f"{part.enough / 1e9:,.1f}" for part in parts], spare=1),
        Column("kernels", [f"{part.kernels:,.0f}" for part in parts], spare=1),
        Column("ms", [f"{part.seconds * 1e3:,.1f}" for part in parts]),
    ]


def _forecast(account: Account) -> str:
    step = account.ledger
    waited = ""
    if step.pipeline is not None:
        waited = f", other stages {step.pipeline.waited:,.3f} (bubble of all ranks {step.pipeline.bubble:.1%})"
    return (
        f"\nforecast: {step.seconds:,.3f} s per step, {account.tokens / step.seconds:,.0f} tokens/s per GPU, "
        f"{account.mfu:.1%} MFU, {step.needed / 1e12:,.1f} TFLOP without recomputation. Of it "
        f"kernels {step.computing:,.3f} s, all-to-alls and all-reduces {step.all_to_alls:,.3f}, added by FSDP's "
        f"{step.sharding:,.3f} {step.exposed:,.3f}, waited for the host {step.launching:,.3f}{waited}; the host calls "
        f"operators for {step.host:,.3f} s"
    )


def _assumptions(account: Account, config: TrainConfig, hardware: Hardware, told: Told) -> list[str]:
    routing = "every expert gets equally many tokens"
    if told.shares:
        most = max(map(max, told.shares)) * config.ep_size
        routing = f"the most loaded rank gets {most:.2f} times the mean of a layer's tokens"
    lines = [
        f"assumed: {routing}; sequences are full" + (f", of {told.samples} samples each" if config.packing else ""),
        f"assumed: NCCL's buffers take {RING / 2**20:,.0f} MiB per communicator of all-gathers, reduce-scatters or "
        "all-reduces, and "
        f"{PEER / 2**20:,.0f} MiB per peer of one of all-to-alls; CUDA's context {CONTEXT / GIB:,.1f} GiB; "
        f"fragmentation {FRAGMENTATION:.0%} of temporary tensors",
        f"rates: {attained(hardware)}; {hardware.rates.launch * 1e6:g} us per launch, "
        f"{hardware.rates.call * 1e6:g} us of the host per operator, {hardware.rates.wait * 1e6:g} where it waits for "
        "the GPU",
    ]
    if config.offload:
        lines.append(
            f"--offload: {account.fit.host / GIB:,.1f} GiB of host memory per rank; the forecast leaves out copies "
            "to and from there, and assumes the optimizer step runs on the GPU"
        )
    if config.compile:
        lines.append("--compile: not modelled, the dry run is without it")
    return lines

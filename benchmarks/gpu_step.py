"""Training steps on one device, measured: `python -m benchmarks.gpu_step --model mixtral-8x7b`.

A model of published sizes, cut to `--layers` layers, by default to as many as fit the free memory by forecast, with
random weights that are never on a disk, assembled and sharded as `train_ep.py` does it, in a process group of one.
`--recipe configs/mixtral_8x7b.yaml` takes optimizer and checkpointing from there. `--free 78 94 139` prints what would
fit so many GiB, and ends. Printed: seconds a step (median), tokens/s, MFU, the loss, peak memory beside the planner's
forecast, seconds beside its forecast, how often the host waited for the device in a step, and from a profile of one
more step the share of the others in which no kernel ran, the longest times between two kernels, and which attention
ran.

On a CPU (`--use-cpu`) the same code runs; what only a GPU can tell is left out, and said to be. With `--as H200` there,
no step is computed: the figures are those of the forecast for that GPU.
"""

import argparse
import os
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from heapq import nlargest
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from expertmesh.sharding.runtime.allocator import let_segments_grow

if __name__ == "__main__":
    # before torch is loaded, as in train_ep.py
    let_segments_grow(os.environ)

import torch
import yaml
from transformers import CONFIG_MAPPING, AutoConfig

from benchmarks.arms import begin_peak, most_held, timed
from benchmarks.commands import command, parser_of, write_json
from benchmarks.plan_accuracy import NO_LOSSES, full_batch, shard_run
from benchmarks.rehearsed import PUBLISHED
from benchmarks.variants import balance_routing
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.hf_model.build import count_parameters
from expertmesh.moe.hf_model.counts import training_flops
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime.process import device_type, end_process_group, start_process_group
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.engine.assembly import assemble
from expertmesh.training.monitoring.meter import peak_tflops
from expertmesh.training.planning.planner.account import Account
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.costs import Cluster
from expertmesh.training.planning.planner.forecasts import Forecasts
from expertmesh.training.planning.planner.hardware import DEVICES, preset
from expertmesh.training.planning.rehearsal.building import ConfigAlone, DeviceType
from expertmesh.training.planning.this_machine import CPU, NETWORK, UNKNOWN_GPU, known_gpu
from expertmesh.training.steps.step import StepResult, train_step

ATTENTION = ("flash", "cudnn", "fmha", "efficient", "attention")
"""Parts of the names of kernels that attend."""
WAIT = "called a synchronizing CUDA operation"
"""What torch warns of then."""
NOT_OF_A_LONE_RANK = ("ep_size", "overlap_chunks", "packing")
"""Settings of a recipe that a step on one rank, of sequences that are all full, does without."""
LONGEST = 3
"""Times between kernels that are told."""


@dataclass
class Found:
    """What one setting took. forecast_seconds, forecast_mfu: of the very same step on this GPU, by a dry run; None on a
    CPU. too_large: layers that did not fit, against the forecast; 0: those that were to. Of a GPU alone: `waits` (by
    line of source), `idle_share`, `gaps`, `attention`, `busiest`."""

    setting: str
    seconds: list[float]
    tokens_per_second: float
    mfu: float | None
    losses: list[float]
    peak_bytes: float
    forecast_bytes: float
    forecast_seconds: float | None
    forecast_mfu: float | None
    moe_layers: int
    micro_batches: int
    too_large: int = 0
    is_dry: bool = False
    waits: dict[str, int] | None = None
    idle_share: float | None = None
    gaps: list[str] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)
    busiest: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        seconds = statistics.median(self.seconds)
        forecast = "" if self.forecast_seconds is None else f", forecast {self.forecast_seconds * 1e3:,.1f} ms"
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%} (forecast {self.forecast_mfu:.1%})"
        least, most = min(self.seconds) * 1e3, max(self.seconds) * 1e3
        of_forecast = self.peak_bytes / self.forecast_bytes
        found = [
            self.setting,
            f"step: {seconds * 1e3:,.1f} ms (median of {len(self.seconds)}, {least:,.1f} to {most:,.1f}){forecast}; "
            f"{self.tokens_per_second:,.0f} tokens/s{mfu}",
            f"loss: {' '.join(f'{loss:.4f}' for loss in self.losses)}",
            f"peak memory: {self.peak_bytes / 2**30:,.2f} GiB, forecast {self.forecast_bytes / 2**30:,.2f} GiB "
            f"({of_forecast:.3f} of it)",
        ]
        if self.waits is None:
            return [*found, "no GPU: waits of the host and idle times are not measured"]
        waits = "; ".join(f"{times} at {where}" for where, times in self.waits.items())
        layers = f"{self.micro_batches} micro-batches and {self.moe_layers} MoE layers"
        found.append(f"host waits: {sum(self.waits.values())} in a step with {layers} ({waits})")
        if self.is_dry:
            return [*found, "no step was computed: all figures are the forecast's"]
        return [
            *found,
            f"no kernel runs for {self.idle_share:.1%} of a step; longest: {'; '.join(self.gaps)}",
            f"attention: {', '.join(self.attention) or 'no kernel with such a name'}",
            f"most time in: {'; '.join(self.busiest)}",
        ]


@command
def main(argv: Sequence[str] | None = None) -> int:
    of_step = dict(layers=0, rows=2, seq_length=4096, steps=5, gradient_checkpointing=None)
    parser = parser_of(__doc__, **of_step, json=None)
    parser.add_argument("--model", default="mixtral-8x7b", help="a published config's name here, or a directory's path")
    parser.add_argument("--free", type=float, nargs="+", metavar="GIB", help="print how many layers fit this, and end")
    parser.add_argument("--recipe", type=Path, help="a file of configs/, for optimizer and checkpointing")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step (default: 8)")
    parser.add_argument("--optim")
    parser.add_argument("--tiny", action="store_true", help="the same family at widths that a CPU computes in seconds")
    parser.add_argument("--use-cpu", action="store_true", help="stay on the CPU where there is a GPU")
    parser.add_argument("--as", dest="gpu", metavar="GPU", help="with --use-cpu: the forecast of a step there (H200)")
    parser.add_argument("--too-large", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.gpu is not None and not arguments.use_cpu:
        raise ExpertMeshError("--as needs --use-cpu: no step is computed")
    if arguments.free:
        for free in arguments.free:
            print(f"{arguments.model}, {free:g} GiB free: {layers_that_fit(arguments, free * 2**30).words}")
        return 0
    try:
        found = measure(arguments) if arguments.gpu is None else dry_run(arguments)
    except torch.OutOfMemoryError as error:
        print(f"{arguments.layers} layers do not fit, against the forecast: {error}"[:500], flush=True)
        if arguments.layers < 2:
            raise
        # a figure of fewer layers is worth more than none; what this process holds ends with it
        fewer = ("--layers", str(arguments.layers - 1), "--too-large", str(arguments.layers))
        given = sys.argv[1:] if argv is None else argv
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu_step", *given, *fewer])
    print("\n".join(found.lines()), flush=True)
    write_json(arguments.json, asdict(found))
    return 0


def settings_of(arguments: argparse.Namespace, is_gpu: bool, layers: int) -> TrainConfig:
    """Those of a step of a model with so many layers.

    Raises:
        ExpertMeshError: there is no such recipe.
    """
    recipe = {"gradient_checkpointing": "selective", "optim": "adamw_torch_fused"}
    if arguments.recipe is not None:
        if not arguments.recipe.is_file():
            raise ExpertMeshError(f"--recipe {arguments.recipe}: no such file")
        recipe |= yaml.safe_load(arguments.recipe.read_text(encoding="utf-8"))
    given = {"gradient_checkpointing": arguments.gradient_checkpointing, "optim": arguments.optim}
    settings: dict[str, Any] = {name: value for name, value in recipe.items() if name not in NOT_OF_A_LONE_RANK}
    settings |= {name: value for name, value in given.items() if value is not None}
    if kept := settings.get("keep_expert_products", 0):  # in as large a share of the layers
        settings["keep_expert_products"] = kept * layers // sized(arguments, 0).num_hidden_layers
    settings |= dict(model="-", dataset=["-"], bf16=is_gpu, per_device_train_batch_size=arguments.rows)
    settings |= dict(max_seq_length=arguments.seq_length, gradient_accumulation_steps=arguments.micro_batches)
    return TrainConfig(**settings)


class Fit(NamedTuple):
    """As many decoder layers as fit on a GPU by forecast, that in words, and the forecast."""

    layers: int
    words: str
    account: Account


def layers_that_fit(arguments: argparse.Namespace, free_bytes: float, gpu: str = UNKNOWN_GPU) -> Fit:
    """As many decoder layers as fit, with what the driver and the allocator take.

    Each forecast takes seconds, of a card that may be lent for minutes: as layers mostly take alike, the next number
    tried is where a line through the last two meets what is free.

    Raises:
        ExpertMeshError: not one does.
    """
    accounts: dict[int, Account] = {}
    needed: dict[int, float] = {}

    def fits(layers: int) -> bool:
        config = settings_of(arguments, is_gpu=True, layers=layers)
        accounts[layers] = forecast(config, sized(arguments, layers), gpu)
        needed[layers] = accounts[layers].fit(free_bytes).total
        return needed[layers] <= free_bytes

    most = sized(arguments, arguments.layers).num_hidden_layers
    if not fits(1):
        raise ExpertMeshError(
            f"--model {arguments.model}: one layer needs {needed[1] / 2**30:.1f} GiB by forecast, and "
            f"{free_bytes / 2**30:.1f} are free; give --optim adamw_bf16, or fewer --rows"
        )
    fit, above, a_layer = 1, most + 1, 0.0
    while above - fit > 1:
        expected = fit + int((free_bytes - needed[fit]) / a_layer) if a_layer > 0 else 2
        if expected == fit:
            break
        tried = min(expected, above - 1)
        before, last = needed[fit], fit
        if fits(tried):
            fit = tried
        else:
            above = tried
        a_layer = (needed[tried] - before) / (tried - last)
    next_one = needed.get(fit + 1, needed[fit] + a_layer)
    more = ", all that there are" if fit == most else f", {fit + 1} would need {next_one / 2**30:.1f}"
    words = f"{fit} layers need {needed[fit] / 2**30:.1f} GiB by forecast{more}"
    return Fit(fit, words, accounts[fit])


def setting_in_words(arguments: argparse.Namespace, config: TrainConfig, model_config: Any) -> str:
    batch = f"{config.gradient_accumulation_steps} x {config.per_device_train_batch_size} x {config.max_seq_length}"
    return (
        f"{arguments.model}{' (tiny)' * arguments.tiny}, {model_config.num_hidden_layers} layers, {batch} tokens, "
        f"{'bf16' if config.bf16 else 'fp32'}, checkpointing {config.gradient_checkpointing}, {config.optim}"
    )


def planned(arguments: argparse.Namespace, gpu: str | None, free_bytes: float) -> tuple[TrainConfig, Any, Account]:
    """Settings, the model's config and the forecast of a step. On a GPU, and unless --layers says how many, of as many
    layers as fit, which `arguments` then have."""
    account = None
    if gpu is not None and not arguments.layers:
        arguments.layers, said, account = layers_that_fit(arguments, free_bytes, gpu)
        print(f"{free_bytes / 2**30:.1f} GiB free: {said}", flush=True)
    model_config = sized(arguments, arguments.layers)
    config = settings_of(arguments, gpu is not None, model_config.num_hidden_layers)
    return config, model_config, account or forecast(config, model_config, gpu)


def dry_run(arguments: argparse.Namespace) -> Found:
    """What a step takes on a GPU that is not here, by its forecast alone.

    Raises:
        ExpertMeshError: of this GPU no rates are known.
    """
    gpu = known_gpu(arguments.gpu.upper())
    if gpu not in arguments.gpu.upper():
        raise ExpertMeshError(f"--as {arguments.gpu}: there are forecasts of {', '.join(DEVICES)}")
    config, model_config, account = planned(arguments, gpu, DEVICES[gpu].memory)
    seconds, best = account.time.total, peak_tflops(gpu)
    mfu = None if best is None else account.needed / seconds / 1e12 / best
    tokens = arguments.micro_batches * arguments.rows * arguments.seq_length
    return Found(
        f"forecast of {setting_in_words(arguments, config, model_config)}; {gpu}",
        [seconds],
        tokens / seconds,
        mfu,
        [],
        account.memory.peak,
        account.memory.peak,
        seconds,
        mfu,
        model_config.num_hidden_layers,
        arguments.micro_batches,
        is_dry=True,
        waits={"the dry run": account.host_waits},
    )


def forecast(config: TrainConfig, model_config: Any, gpu: str | None) -> Account:
    """What a lone rank takes; on a CPU where no GPU is named."""
    device: DeviceType = "cpu" if gpu is None else "cuda"
    forecasts = Forecasts(model_config.to_dict(), lambda: model_config, device, is_kept=False)
    cluster = Cluster(CPU if gpu is None else preset(gpu, NETWORK), 8, 0.0)
    return forecasts.account(Asked(config, 1, cluster, device=device))


def sized(arguments: argparse.Namespace, layers: int) -> Any:
    """The model's config, with so many layers; 0: its own."""
    path = Path(arguments.model)
    model_config = AutoConfig.from_pretrained(path if path.is_dir() else PUBLISHED / arguments.model)
    if arguments.tiny:
        tiny = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_attention_heads=4)
        tiny |= dict(num_key_value_heads=2, head_dim=16, vocab_size=256)
        content = model_config.to_dict() | {name: n for name, n in tiny.items() if hasattr(model_config, name)}
        model_config = CONFIG_MAPPING[model_config.model_type].from_dict(content)
    if layers:
        model_config.num_hidden_layers = layers
    return model_config


def measure(arguments: argparse.Namespace) -> Found:
    """Run the steps and take all figures."""
    is_gpu = device_type(arguments.use_cpu) == "cuda"
    name = torch.cuda.get_device_name() if is_gpu else "CPU"
    gpu, free_bytes = (known_gpu(name), torch.cuda.mem_get_info()[0]) if is_gpu else (None, 0)
    # a dry run makes a process group of its own
    config, model_config, account = planned(arguments, gpu, free_bytes)
    ranks = start_process_group(arguments.use_cpu, timeout_seconds=600)
    device = ranks.device
    before = begin_peak(device)
    assembled = assemble(config, ConfigAlone(model_config), device.type)
    model = assembled.model
    optimizer, mesh = shard_run(config, model, 1, device)
    balance_routing(model)
    batch = full_batch(config, model_config.vocab_size, 0).to(device)

    def step() -> StepResult:
        return train_step(model, optimizer, [batch] * arguments.micro_batches, mesh, NO_LOSSES, 1.0)

    took = [timed(step, device)[0] for _ in range(2 + arguments.steps)]
    seconds, last = [one.seconds for one in took[2:]], took[-1].gave
    peak_bytes = float(most_held(device) - before)
    counts, median = count_parameters(model), statistics.median(seconds)
    flops = training_flops(counts, model_config.get_text_config(), last.tokens, last.targets, last.pairs)
    best = peak_tflops(name) if is_gpu else None
    forecast_seconds = account.time.total if is_gpu else None
    found = Found(
        f"{setting_in_words(arguments, config, model_config)}, {counts.total / 1e9:.2f} B parameters, experts by "
        f"{assembled.kernel.name}; {name}, torch {torch.__version__}",
        seconds,
        last.tokens / median,
        None if best is None else flops / median / 1e12 / best,
        [one.gave.loss for one in took],
        peak_bytes,
        # what tensors hold, as the allocator counts them: not the driver's part, nor fragmentation
        account.memory.peak,
        forecast_seconds,
        None if best is None or forecast_seconds is None else flops / forecast_seconds / 1e12 / best,
        len(moe_layers(model)),
        arguments.micro_batches,
        arguments.too_large,
    )
    if is_gpu:
        found.waits = waits_of(step)
        profile(step, found)
    end_process_group()
    return found


def waits_of(step: Any) -> dict[str, int]:
    """How often the host waits for a GPU in a step, by the line of source that has it wait."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    # torch says of the mode itself, once, that it does not see all of them
    waits = (each for each in told if WAIT in str(each.message) and Path(each.filename) != Path(__file__))
    return dict(Counter(f"{'/'.join(Path(each.filename).parts[-2:])}:{each.lineno}" for each in waits).most_common())


def profile(step: Any, found: Found) -> None:
    """What one step's kernels tell."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    events: Any = profiler.events()
    kernels = kernels_of(events)
    busy, found.gaps = busy_time(kernels)
    # steps are slower under the profiler, kernels are not
    found.idle_share = max(0.0, 1 - busy / 1e6 / statistics.median(found.seconds))
    names: dict[str, float] = {}
    for start, end, name in kernels:
        names[name] = names.get(name, 0.0) + end - start
    total = sum(names.values())
    found.busiest = [f"{name[:60]} {span / total:.0%}" for name, span in nlargest(6, names.items(), key=itemgetter(1))]
    found.attention = sorted({name[:80] for name in names if any(part in name.lower() for part in ATTENTION)})


def kernels_of(events: Iterable[Any]) -> list[tuple[float, float, str]]:
    """(start, end, name) of what ran on the GPU. torch's annotations, such as `Optimizer.step#AdamW.step`, are on its
    timeline too, and reach over the times between kernels."""
    return [
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation
        and event.time_range.end > event.time_range.start
    ]


def busy_time(kernels: list[tuple[float, float, str]]) -> tuple[float, list[str]]:
    """The time in which a kernel ran, and the longest times between kernels, in words.

    Args:
        kernels: (start, end, name) in microseconds, in any order, of streams that may overlap.
    """
    covered: list[tuple[float, float, str, str]] = []  # spans in which kernels run, with their first and last names
    for start, end, name in sorted(kernels):
        if covered and start <= covered[-1][1]:
            first, until, first_name, last_name = covered[-1]
            covered[-1] = (first, max(until, end), first_name, name if end > until else last_name)
        else:
            covered.append((start, end, name, name))
    gaps = [(b[0] - a[1], f"{a[3][:40]} -> {b[2][:40]}") for a, b in pairwise(covered)]
    longest = sorted(gaps, reverse=True)[:LONGEST]
    busy = sum(end - start for start, end, *_ in covered)
    return busy, [f"{gap / 1e3:.2f} ms, {between}" for gap, between in longest]


if __name__ == "__main__":
    sys.exit(main())

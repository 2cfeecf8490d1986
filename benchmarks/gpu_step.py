"""Training steps on one device, measured: `python -m benchmarks.gpu_step --model mixtral-8x7b`.

A model of published sizes, cut to `--layers` layers, by default to as many as fit the free memory by forecast, with
random weights that are never on a disk, assembled and sharded as `train_ep.py` does it, in a process group of one.
`--free 78 94 139` prints what would fit so many GiB, and ends. Printed: seconds a step (median), tokens/s, MFU, the
loss, peak memory beside the planner's forecast, seconds beside its forecast, how often the host waited for the device
in a step, and from a profile of one more step the share of the others in which no kernel ran, the longest times between
two kernels, and which attention ran.

On a CPU (`--use-cpu`) the same code runs; what only a GPU can tell is left out, and said to be.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from heapq import nlargest
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from expertmesh.sharding.runtime.allocator import let_segments_grow

if __name__ == "__main__":
    # before torch is loaded, as in train_ep.py
    let_segments_grow(os.environ)

import torch
from transformers import CONFIG_MAPPING, AutoConfig

from benchmarks.load_memory import resident, restart_peak
from benchmarks.plan_accuracy import balance_routing, full_batch, shard_run
from benchmarks.rehearsed import PUBLISHED
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.hf_model.build import count_parameters
from expertmesh.moe.hf_model.counts import training_flops
from expertmesh.moe.util.atomic_write import whole
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.sharding.runtime.process import device_type, end_process_group, start_process_group
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.engine.assembly import assemble
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.monitoring.meter import peak_tflops
from expertmesh.training.planning.planner.account import Account
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.costs import Cluster
from expertmesh.training.planning.planner.forecasts import Forecasts
from expertmesh.training.planning.planner.hardware import preset
from expertmesh.training.planning.rehearsal.building import ConfigAlone, DeviceType
from expertmesh.training.planning.this_machine import CPU, NETWORK, known_gpu
from expertmesh.training.steps.step import StepResult, train_step

NO_LOSSES = LossWeights(0.0, 0.0)
ATTENTION = ("flash", "cudnn", "fmha", "efficient", "attention")
"""Parts of the names of kernels that attend."""
WAIT = "called a synchronizing CUDA operation"
"""What torch warns of then."""
LONGEST = 3
"""Times between kernels that are told."""


@dataclass
class Found:
    """What one setting took. too_large: layers that did not fit, against the forecast; 0: those that were to. Of a GPU
    alone: `waits` (by line of source), `idle_share`, `gaps`, `attention`, `busiest`."""

    setting: str
    seconds: list[float]
    tokens_per_second: float
    mfu: float | None
    losses: list[float]
    peak_bytes: float
    forecast_bytes: float
    forecast_seconds: float | None
    moe_layers: int
    too_large: int = 0
    waits: dict[str, int] | None = None
    idle_share: float | None = None
    gaps: list[str] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)
    busiest: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        seconds = statistics.median(self.seconds)
        forecast = "" if self.forecast_seconds is None else f", forecast {self.forecast_seconds * 1e3:,.1f} ms"
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
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
        return [
            *found,
            f"host waits: {sum(self.waits.values())} in a step with {self.moe_layers} MoE layers ({waits})",
            f"no kernel runs for {self.idle_share:.1%} of a step; longest: {'; '.join(self.gaps)}",
            f"attention: {', '.join(self.attention) or 'no kernel with such a name'}",
            f"most time in: {'; '.join(self.busiest)}",
        ]


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mixtral-8x7b", help="a published config's name here, or a directory's path")
    parser.add_argument("--layers", type=int, default=0, help="decoder layers (default: as many as fit)")
    parser.add_argument(
        "--free", type=float, nargs="+", metavar="GIB", help="print how many layers fit so much memory, and end"
    )
    parser.add_argument("--rows", type=int, default=2, help="sequences")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5, help="timed, after two that are not")
    parser.add_argument("--gradient-checkpointing", choices=("none", "selective", "full"), default="selective")
    parser.add_argument("--optim", default="adamw_torch_fused")
    parser.add_argument("--tiny", action="store_true", help="the same family at widths that a CPU computes in seconds")
    parser.add_argument("--use-cpu", action="store_true", help="stay on the CPU where there is a GPU")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--too-large", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        if arguments.free:
            for free in arguments.free:
                print(f"{arguments.model}, {free:g} GiB free: {layers_that_fit(arguments, free * 2**30)[1]}")
            return 0
        found = measure(arguments)
    except torch.OutOfMemoryError as error:
        print(f"{arguments.layers} layers do not fit, against the forecast: {error}"[:500], flush=True)
        if arguments.layers < 2:
            raise
        # a figure of fewer layers is worth more than none; what this process holds ends with it
        fewer = ("--layers", str(arguments.layers - 1), "--too-large", str(arguments.layers))
        os.execv(
            sys.executable,
            [sys.executable, "-m", "benchmarks.gpu_step", *(sys.argv[1:] if argv is None else argv), *fewer],
        )
    except ExpertMeshError as error:
        print(f"benchmarks.gpu_step: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(found.lines()), flush=True)
    if arguments.json:
        with whole(arguments.json) as partial:
            partial.write_text(json.dumps(asdict(found), indent=1))
    return 0


def settings_of(arguments: argparse.Namespace, is_gpu: bool) -> TrainConfig:
    return TrainConfig(
        model="-",
        dataset=["-"],
        bf16=is_gpu,
        per_device_train_batch_size=arguments.rows,
        max_seq_length=arguments.seq_length,
        gradient_checkpointing=arguments.gradient_checkpointing,
        optim=arguments.optim,
    )


def layers_that_fit(arguments: argparse.Namespace, free_bytes: float) -> tuple[int, str]:
    """As many decoder layers as fit on a GPU by forecast, with what the driver and the allocator take, and that in
    words.

    Raises:
        ExpertMeshError: not one does.
    """
    config = settings_of(arguments, is_gpu=True)

    def needed(layers: int) -> float:
        return forecast(config, sized(arguments, layers)).fit(free_bytes).total

    fit, most = 0, sized(arguments, arguments.layers).num_hidden_layers
    found: dict[int, float] = {}
    above = most + 1
    while above - fit > 1:
        tried = (fit + above) // 2
        found[tried] = needed(tried)
        fit, above = (tried, above) if found[tried] <= free_bytes else (fit, tried)
    if fit == 0:
        raise ExpertMeshError(
            f"--model {arguments.model}: one layer needs {found[1] / 2**30:.1f} GiB by forecast, and "
            f"{free_bytes / 2**30:.1f} are free; give --optim adamw_bf16, or fewer --rows"
        )
    more = f", {above} would need {found[above] / 2**30:.1f}" if above in found else ", all that there are"
    return fit, f"{fit} layers need {found[fit] / 2**30:.1f} GiB by forecast{more}"


def forecast(config: TrainConfig, model_config: Any, gpu: str | None = known_gpu("")) -> Account:
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
    is_gpu, layers = device_type(arguments.use_cpu) == "cuda", arguments.layers
    if is_gpu and not layers:
        free, of_card = torch.cuda.mem_get_info()
        layers, said = layers_that_fit(arguments, free)
        print(f"{free / 2**30:.1f} of {of_card / 2**30:.1f} GiB are free: {said}", flush=True)
        arguments.layers = layers
    model_config, config = sized(arguments, layers), settings_of(arguments, is_gpu)
    name = torch.cuda.get_device_name() if is_gpu else "CPU"
    # a dry run makes a process group of its own
    account = forecast(config, model_config, known_gpu(name) if is_gpu else None)
    ranks = start_process_group(arguments.use_cpu, timeout_seconds=600)
    device = ranks.device
    if not is_gpu:
        restart_peak()
    before = resident("VmRSS")
    assembled = assemble(config, ConfigAlone(model_config), device.type)
    model = assembled.model
    optimizer, mesh = shard_run(config, model, 1, device)
    balance_routing(model)
    batch = full_batch(config, model_config.vocab_size, 0).to(device)
    figures: list[StepResult] = []

    def step() -> None:
        figures.append(train_step(model, optimizer, [batch], mesh, NO_LOSSES, 1.0))
        if is_gpu:
            torch.cuda.synchronize()

    for _ in range(2):
        step()
    seconds = []
    for _ in range(arguments.steps):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    peak_bytes = float(torch.cuda.max_memory_allocated()) if is_gpu else resident("VmHWM") - before
    counts, median = count_parameters(model), statistics.median(seconds)
    last = figures[-1]
    flops = training_flops(counts, model_config.get_text_config(), last.tokens, last.targets, last.pairs)
    best = peak_tflops(name) if is_gpu else None
    found = Found(
        f"{arguments.model}{' (tiny)' * arguments.tiny}, {model_config.num_hidden_layers} layers, "
        f"{counts.total / 1e9:.2f} B parameters, {arguments.rows} x {arguments.seq_length} tokens, "
        f"{'bf16' if is_gpu else 'fp32'}, checkpointing {arguments.gradient_checkpointing}, {arguments.optim}, experts "
        f"by {assembled.kernel.kernel.entry.name}; {name}, torch {torch.__version__}",
        seconds,
        last.tokens / median,
        None if best is None else flops / median / 1e12 / best,
        [result.loss for result in figures],
        peak_bytes,
        # what tensors hold, as the allocator counts them: not the driver's part, nor fragmentation
        account.memory.peak,
        account.time.total if is_gpu else None,
        len(moe_layers(model)),
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

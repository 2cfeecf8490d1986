"""What each tensor costs in a merge, an export and a conversion: `python -m benchmarks.conversion`.

A model with the names and numbers of Qwen3-30B-A3B's tensors (18,432 matrices of experts), each a thousandth as large,
with a training checkpoint and an adapter of it (36,864 tensors). Merges, exports and converts these, interleaved with
`cp -r` of the training checkpoint. --wider 4 has each matrix 16 times as large: what bytes cost, beside what tensors
do. Prints medians of what each takes, and of the ratio to `cp -r` of the same round; "start" is what the commands spend
before the first byte. Every file is in the page cache.
"""

import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.arms import MB, ratio, take_turns
from benchmarks.commands import command, parser_of, print_rows, settings_line, write_json

SETTLE_SECONDS = 5
COPY, START = "cp -r", "start"


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, layers=48, experts=128, rounds=3, json=None)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--directory", type=Path, help="on the disk to be measured")
    parser.add_argument("--wider", type=int, default=1, help="times as wide, in both directions")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        # in a process of its own: a child's peak memory, as the kernel counts it, begins with its parent's
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            what = pool.apply(make_many, (directory, arguments.layers, arguments.experts, arguments.wider))
        print(settings_line(arguments, what, "medians"))
        figures = measure(commands_of(directory, arguments.workers), arguments.rounds)
    print_figures(figures)
    write_json(arguments.json, figures)
    return 0


class Command(NamedTuple):
    """words: of a command that writes into `out`; None: nothing."""

    words: list[str]
    out: Path | None


def commands_of(directory: Path, workers: int) -> dict[str, Command]:
    """What is compared, in this order."""
    model, out = directory / "model", directory / "out"
    saved, adapter = directory / "run" / "step-00000000", directory / "adapter"

    def ours(*words: object) -> list[str]:
        return [sys.executable, "-m", "checkpoints", *map(str, words)]

    return {
        COPY: Command(["cp", "-r", str(saved), str(out)], out),
        "export": Command(ours("export", saved, out, "--workers", workers), out),
        "merge": Command(ours("merge", model, adapter, out, "--workers", workers), out),
        "convert": Command(ours("convert", model, out, "--ep-size", 8, "--workers", workers), out),
        START: Command(ours("inspect", model), None),
    }


class Took(NamedTuple):
    """seconds: of the clock; cpu: of all threads. peak_mb: resident. read, written: bytes, the former by the kernel's
    count."""

    seconds: float
    cpu: float
    peak_mb: float
    read: int
    written: int


def measure(commands: Mapping[str, Command], rounds: int) -> dict[str, dict[str, Any]]:
    """Medians over the rounds."""

    def turn(command: Command) -> Callable[[int], Took]:
        return lambda number: timed(command)

    took = take_turns({name: turn(command) for name, command in commands.items()}, rounds).found
    return {
        name: {
            **{figure: statistics.median(getattr(one, figure) for one in mine) for figure in Took._fields},
            "ratio_to_cp": ratio([one.seconds for one in mine], [one.seconds for one in took[COPY]]),
            "by_round": [round(one.seconds, 3) for one in mine],
        }
        for name, mine in took.items()
    }


def timed(command: Command) -> Took:
    # What earlier commands wrote must not be written back, or throttled, on this one's time. And a virtual machine
    # gives freed memory back to its host within seconds, and pays to get it again: let every variant pay alike.
    os.sync()
    time.sleep(SETTLE_SECONDS)
    begin = time.perf_counter()
    process = subprocess.Popen(command.words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    seconds = time.perf_counter() - begin
    read = Path(f"/proc/{process.pid}/io").read_text().splitlines()[0].removeprefix("rchar:")
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"{' '.join(command.words)} failed")
    written = 0 if command.out is None else size_of(command.out)
    if command.out is not None:
        shutil.rmtree(command.out)
    return Took(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / MB, int(read), written)


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def print_figures(figures: Mapping[str, dict[str, Any]]) -> None:
    started = figures[START]["seconds"]
    rows = []
    for name, f in figures.items():
        rows.append(
            {
                "": name,
                "seconds": f"{f['seconds']:.2f}",
                "CPU s": f"{f['cpu']:.2f}",
                "x cp -r": f"{f['ratio_to_cp']:.2f}",
                "GB/s": f"{f['written'] / 1e9 / f['seconds']:.2f}",
                "less start": "" if name in (COPY, START) else f"{f['written'] / 1e9 / (f['seconds'] - started):.2f}",
                "MB read": f"{f['read'] / MB:.0f}",
                "MB out": f"{f['written'] / MB:.0f}",
                "peak MB": f"{f['peak_mb']:.0f}",
                "seconds by round": ", ".join(map(str, f["by_round"])),
            }
        )
    print_rows(rows)


# ---- very many tensors ----

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD, VOCABULARY, RANK = 64, 24, 4, 2, 16, 4748, 2
"""Of the small model: Qwen3-30B-A3B's are 2,048, 768, 32, 4, 128 and 151,936."""


def make_many(directory: Path, layers: int, experts: int, wider: int) -> str:
    """A model, its training checkpoint and an adapter; what they are, in words. In bf16, the tensors as they are
    published: attention's beside those of each expert."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import expertmesh

    model, adapter, run = (directory / name for name in ("model", "adapter", "run"))
    for path in (adapter, run):
        path.mkdir()
    sizes: dict[str, Any] = dict(hidden_size=HIDDEN * wider, moe_intermediate_size=WIDTH * wider, head_dim=HEAD * wider)
    sizes |= dict(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, vocab_size=VOCABULARY)
    sizes |= dict(num_hidden_layers=layers, num_experts=experts, num_experts_per_tok=min(8, experts))
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).bfloat16().save_pretrained(model)
    pairs = {}
    with safe_open(model / "model.safetensors", "pt") as tensors:
        matrices = [name for name in tensors.keys() if ".experts." in name]  # noqa: SIM118, it is no mapping
        for name in matrices:
            rows, columns = tensors.get_slice(name).get_shape()
            of = f"base_model.model.{name.removesuffix('.weight')}"
            pairs[f"{of}.lora_A.weight"] = torch.randn(RANK, columns)
            pairs[f"{of}.lora_B.weight"] = torch.randn(rows, RANK)
    save_file(pairs, adapter / "adapter_model.safetensors", {"format": "pt"})
    fused = "experts.gate_up_proj"
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": []}
    said |= {"target_parameters": [fused, "experts.down_proj"], "peft_version": "0.21.2"}
    said |= {"rank_pattern": {fused: 2 * RANK}, "alpha_pattern": {fused: 4 * RANK}}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    engine = expertmesh.load(str(model), use_cpu=True)
    for parameter in (each for group in engine.optimizer.param_groups for each in group["params"]):
        # as after a step of AdamW
        engine.optimizer.state[parameter] = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
    engine.saves_to(run, None)
    assert engine.saver is not None
    engine.saver.save(engine.model, engine.optimizer, engine.progress({}, {}), copies=False)
    assert engine.saver.wait() is None
    of_each = ", ".join(
        f"{name} {size_of(path) / MB:,.0f} MB"
        for name, path in (("model", model), ("checkpoint", run), ("adapter", adapter))
    )
    return f"{layers} layers of {experts} experts, width {HIDDEN * wider}: {of_each}"


if __name__ == "__main__":
    sys.exit(main())

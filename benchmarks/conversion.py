"""Converting a checkpoint against copying it: `python -m benchmarks.conversion --gigabytes 4`.

Makes a random Mixtral checkpoint of at least that size; then, in interleaved rounds, copies it with `cp -r`, converts
it to EP shards, and exports these again. Prints the median throughput of each, the ratios to `cp -r` of the same round,
each command's peak resident memory, and how many bytes each rank reads of the shards at start-up against what its own
rows weigh there. Warm: every file is in the page cache. Cold: the cache is dropped before
each command (needs root; else left out).

With --tensors instead, what each tensor costs: a model with the names and numbers of Qwen3-30B-A3B's tensors (18,432
matrices of experts), each a thousandth as large, with a training checkpoint and an adapter of it (36,864 tensors).
Merges, exports and converts these, interleaved with `cp -r` of the training checkpoint; prints medians of seconds, CPU
seconds and bytes read. --wider 4 has each matrix 16 times as large: what bytes cost, beside what tensors do.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import expertmesh.checkpoints.ep_shards.manifest as manifest_module
import expertmesh.checkpoints.hf.headers as headers_module
from benchmarks.load_memory import make_checkpoint
from expertmesh.checkpoints.ep_shards.manifest import MANIFEST
from expertmesh.checkpoints.files.dtype_names import DTYPE_BYTES
from expertmesh.checkpoints.files.open_files import OpenFiles
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.checkpoints.load import shard_and_load
from expertmesh.moe.util.atomic_write import whole
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.sharding.mesh import build_mesh
from expertmesh.sharding.runtime.process import end_process_group, start_process_group
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology

VARIANTS = ("cp -r", "convert", "export", "start")

SETTLE_SECONDS = 5
IN_PYTHON = ("convert", "export")


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="least size of the checkpoint, 10^9 bytes")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--ep-size", type=int, default=4)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--caches", nargs="+", choices=["warm", "cold"], default=["warm", "cold"])
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    parser.add_argument("--tensors", action="store_true", help="measure what each of very many small tensors costs")
    parser.add_argument("--layers", type=int, default=48, help="with --tensors: of the model")
    parser.add_argument("--experts", type=int, default=128, help="with --tensors: of each layer")
    parser.add_argument("--wider", type=int, default=1, help="with --tensors: times as wide, in both directions")
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker is not None:
        return count_reads(arguments.worker, arguments.ep_size)
    figures: dict[str, Any]
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        if arguments.tensors:
            sizes = arguments.layers, arguments.experts, arguments.wider
            figures = measure_many(directory, sizes, arguments.workers, arguments.rounds)
            if arguments.json is not None:
                with whole(arguments.json) as partial:
                    partial.write_text(json.dumps(figures, indent=2))
            return 0
        # in a process of its own: a child's peak memory, as the kernel counts it, begins with its parent's
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            size = pool.apply(make_checkpoint, (directory / "model", arguments.gigabytes, arguments.dtype))
        print(
            f"checkpoint: {size / 1e9:.2f} GB {arguments.dtype}, ep {arguments.ep_size}, {arguments.workers} workers, "
            f"{os.cpu_count()} cores; {arguments.rounds} rounds, variants interleaved, medians"
        )
        figures = {}
        for cache in arguments.caches:
            if cache == "cold" and os.geteuid() != 0:
                print("cold: left out, dropping the page cache needs root")
                continue
            rounds = [
                one_round(directory, arguments.ep_size, arguments.workers, cache) for _ in range(arguments.rounds)
            ]
            figures[cache] = summarize(rounds, size)
            print_table(cache, figures[cache])
        figures["startup"] = startup_reads(directory, arguments.ep_size)
    if arguments.json is not None:
        with whole(arguments.json) as partial:
            partial.write_text(json.dumps(figures, indent=2))
    return 0


class Took(NamedTuple):
    """seconds: of the clock; cpu: of all threads. peak_mb: resident. read: bytes, by the kernel's count."""

    seconds: float
    peak_mb: float
    cpu: float
    read: int


def one_round(directory: Path, ep_size: int, workers: int, cache: str) -> dict[str, Took]:
    """What each variant takes, one after the other, each into a directory that is not there."""
    model, copy, shards, back = (directory / name for name in ("model", "copy", "shards", "back"))
    command = [sys.executable, "-m", "checkpoints"]
    commands = {
        "cp -r": ["cp", "-r", str(model), str(copy)],
        "convert": [*command, "convert", str(model), str(shards), "--ep-size", str(ep_size), "--workers", str(workers)],
        "export": [*command, "export", str(shards), str(back), "--workers", str(workers)],
        # what the two spend before the first byte: interpreter, imports, config, heads of the files
        "start": [*command, "inspect", str(model)],
    }
    outputs = {"cp -r": copy, "convert": shards, "export": back}
    times = {}
    for variant in VARIANTS:
        if variant in outputs:
            shutil.rmtree(outputs[variant], ignore_errors=True)
        times[variant] = timed(commands[variant], cache)
        # only what the next variant reads may fill the memory that the page cache has
        if variant != "convert" and variant in outputs:
            shutil.rmtree(outputs[variant])
    return times


def timed(command: list[str], cache: str) -> Took:
    # What earlier commands wrote must not be written back, or throttled, on this one's time. And a virtual machine
    # gives freed memory back to its host within seconds, and pays to get it again: let every variant pay alike.
    os.sync()
    time.sleep(SETTLE_SECONDS)
    if cache == "cold":
        Path("/proc/sys/vm/drop_caches").write_text("3")
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    seconds = time.perf_counter() - begin
    read = Path(f"/proc/{process.pid}/io").read_text().splitlines()[0].removeprefix("rchar:")
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"{' '.join(command)} failed")
    return Took(seconds, usage.ru_maxrss * 1024 / 1e6, usage.ru_utime + usage.ru_stime, int(read))


def summarize(rounds: list[dict[str, Took]], size: int) -> dict[str, Any]:
    return {
        variant: {
            "gb_per_second": size / 1e9 / statistics.median(r[variant][0] for r in rounds),
            "ratio_to_cp": statistics.median(r["cp -r"][0] / r[variant][0] for r in rounds),
            "ratio_without_start": statistics.median(
                r["cp -r"][0] / (r[variant][0] - r["start"][0] * (variant in IN_PYTHON)) for r in rounds
            ),
            "peak_mb": max(r[variant][1] for r in rounds),
            "seconds": [round(r[variant][0], 3) for r in rounds],
        }
        for variant in VARIANTS[:-1]
    } | {"start_seconds": [round(r["start"][0], 3) for r in rounds]}


def print_table(cache: str, figures: dict[str, Any]) -> None:
    print(f"{cache:8}{'GB/s':>8}{'x cp -r':>9}{'less start':>12}{'peak MB':>9}   seconds a round")
    for variant in VARIANTS[:-1]:
        f = figures[variant]
        ratios = f"{f['ratio_to_cp']:9.2f}{f['ratio_without_start']:12.2f}"
        print(f"{variant:8}{f['gb_per_second']:8.2f}{ratios}{f['peak_mb']:9.0f}   {f['seconds']}")
    print(f"seconds for the interpreter's start, imports and file headers: {figures['start_seconds']}")


# ---- very many tensors ----

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD, VOCABULARY, RANK = 64, 24, 4, 2, 16, 4748, 2
"""Of the small model: Qwen3-30B-A3B's are 2,048, 768, 32, 4, 128 and 151,936."""


def measure_many(directory: Path, sizes: tuple[int, int, int], workers: int, rounds: int) -> dict[str, Any]:
    """Make the model, its training checkpoint and its adapter, measure, and print a table; the figures.

    Args:
        sizes: layers, experts of each, and how many times as wide.
    """
    layers, experts, wider = sizes
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(make_many, (directory, *sizes))
    model, saved, adapter = directory / "model", directory / "run" / "step-00000000", directory / "adapter"
    commands = {
        "cp -r": ["cp", "-r", str(saved)],
        "export": ["export", str(saved)],
        "merge": ["merge", str(model), str(adapter)],
        "convert": ["convert", "--ep-size", "8", str(model)],
        "start": ["inspect", str(model)],
    }
    python = [sys.executable, "-m", "checkpoints"]
    took: list[dict[str, Took]] = []
    written: dict[str, int] = {}
    for _ in range(rounds):
        took.append({})
        for variant, words in commands.items():
            out = [] if variant == "start" else [str(directory / "out")]
            with_workers = ["--workers", str(workers)] * (variant not in ("cp -r", "start"))
            took[-1][variant] = timed([*([] if variant == "cp -r" else python), *words, *out, *with_workers], "warm")
            written[variant] = size_of(directory / "out")
            shutil.rmtree(directory / "out", ignore_errors=True)
    figures = {
        variant: {
            "seconds": statistics.median(r[variant].seconds for r in took),
            "cpu": statistics.median(r[variant].cpu for r in took),
            "ratio_to_cp": statistics.median(r[variant].seconds / r["cp -r"].seconds for r in took),
            "read": statistics.median(r[variant].read for r in took),
            "written": written[variant],
            "peak_mb": max(r[variant].peak_mb for r in took),
        }
        for variant in commands
    }
    print(
        f"{layers} layers of {experts} experts, width {HIDDEN * wider}: model {size_of(model) / 1e6:,.0f} MB, "
        f"training checkpoint {size_of(saved) / 1e6:,.0f} MB, adapter {size_of(adapter) / 1e6:,.0f} MB; {workers} "
        f"workers, {os.cpu_count()} cores; {rounds} rounds, variants interleaved, medians"
    )
    print(f"{'':8}{'seconds':>9}{'CPU s':>9}{'x cp -r':>9}{'MB read':>9}{'MB out':>9}{'peak MB':>9}")
    for variant, f in figures.items():
        of_bytes = f"{f['read'] / 1e6:9.0f}{f['written'] / 1e6:9.0f}{f['peak_mb']:9.0f}"
        print(f"{variant:8}{f['seconds']:9.2f}{f['cpu']:9.2f}{f['ratio_to_cp']:9.2f}{of_bytes}")
    return figures


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def make_many(directory: Path, layers: int, experts: int, wider: int) -> None:
    """In bf16, the tensors as they are published: attention's beside those of each expert."""
    import torch
    from safetensors.torch import save_file

    import expertmesh

    hidden, width, head = HIDDEN * wider, WIDTH * wider, HEAD * wider
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "hidden_size": hidden, "moe_intermediate_size": width, "intermediate_size": 3 * hidden, "head_dim": head,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": layers,
        "num_experts": experts, "num_experts_per_tok": min(8, experts), "norm_topk_prob": True, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "vocab_size": VOCABULARY, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_position_embeddings": 4096, "rope_theta": 1e6, "hidden_act": "silu", "eos_token_id": 2,
    }  # fmt: skip
    up, down = (width, hidden), (hidden, width)
    of_expert = {"gate_proj": up, "up_proj": up, "down_proj": down}
    of_layer = {
        "self_attn.q_proj": (HEADS * head, hidden), "self_attn.k_proj": (KV_HEADS * head, hidden),
        "self_attn.v_proj": (KV_HEADS * head, hidden), "self_attn.o_proj": (hidden, HEADS * head),
        "self_attn.q_norm": (head,), "self_attn.k_norm": (head,), "mlp.gate": (experts, hidden),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        **{f"mlp.experts.{n}.{name}": shape for n in range(experts) for name, shape in of_expert.items()},
    }  # fmt: skip
    shapes = {"model.embed_tokens": (VOCABULARY, hidden), "lm_head": (VOCABULARY, hidden), "model.norm": (hidden,)}
    shapes |= {f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in of_layer.items()}
    model, adapter, run = (directory / name for name in ("model", "adapter", "run"))
    for path in (model, adapter, run):
        path.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    tensors = {f"{name}.weight": (0.02 * torch.randn(shape)).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    pairs = {}
    for name, shape in shapes.items():
        if ".experts." in name:
            pairs[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, shape[1])
            pairs[f"base_model.model.{name}.lora_B.weight"] = torch.randn(shape[0], RANK)
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


def startup_reads(directory: Path, ep_size: int) -> list[dict[str, Any]]:
    """Start `ep_size` ranks on the shards; what each read of them, against what its rows weigh on disk."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ep_size)]
    command += ["-m", "benchmarks.conversion", "--worker", str(directory), "--ep-size", str(ep_size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=540, env=environment, stderr=subprocess.DEVNULL)
    figures = [json.loads((directory / f"reads-{rank}.json").read_text()) for rank in range(ep_size)]
    print("start-up from shards, per rank: bytes of its own tensors on disk, bytes read, ratio")
    for rank, f in enumerate(figures):
        print(f"{rank:4d}{f['needed'] / 1e6:12.2f} MB{f['read'] / 1e6:12.2f} MB{f['read'] / f['needed']:9.4f}")
    return figures


def count_reads(directory: Path, ep_size: int) -> int:
    """On each rank: load the shards as train_ep.py does, counting all rows, heads and manifests that are read."""
    read = 0
    fill, read_header = OpenFiles.fill, headers_module.read_header

    def counting_fill(self: OpenFiles, path: Path, buffer: memoryview, offset: int) -> None:
        nonlocal read
        read += len(buffer)
        fill(self, path, buffer, offset)

    def counting_header(file: Path) -> Any:
        nonlocal read
        with open(file, "rb") as stream:
            read += 8 + int.from_bytes(stream.read(8), "little")
        return read_header(file)

    OpenFiles.fill = counting_fill  # type: ignore[method-assign]
    headers_module.read_header = manifest_module.read_header = counting_header
    ranks = start_process_group(use_cpu=True, timeout_seconds=300)
    topology = Topology(ranks.world_size, ep_size)
    source = open_source(directory / "shards")
    model: Any = source.build()
    checkpoint = shard_and_load(model, source, build_mesh("cpu", topology), ranks.device)
    read += (directory / "shards" / MANIFEST).stat().st_size
    dtypes = checkpoint.parameter_dtypes
    needed = sum(local_tensor(p).numel() * DTYPE_BYTES[dtypes[name]] for name, p in model.named_parameters())
    (directory / f"reads-{ranks.rank}.json").write_text(json.dumps({"needed": needed, "read": read}))
    end_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

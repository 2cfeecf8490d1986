"""Converting a checkpoint against copying it: `python -m benchmarks.conversion --gigabytes 4`.

Makes a random Mixtral checkpoint of at least that size; then, in interleaved rounds, copies it with `cp -r`, converts
it to EP shards, and exports these again. Prints the median throughput of each, the ratios to `cp -r` of the same round,
each command's peak resident memory, and how many bytes each rank reads of the shards at start-up against what its own
rows weigh there. Warm: every file is in the page cache. Cold: the cache is dropped before
each command (needs root; else left out).
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
from typing import Any

import expertmesh.checkpoints.ep_shards.manifest as manifest_module
import expertmesh.checkpoints.hf.headers as headers_module
from benchmarks.load_memory import make_checkpoint
from expertmesh.checkpoints.ep_shards.manifest import MANIFEST
from expertmesh.checkpoints.files.dtype_names import DTYPE_BYTES
from expertmesh.checkpoints.hf.reader import SafetensorsReader
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
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker is not None:
        return count_reads(arguments.worker, arguments.ep_size)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        # in a process of its own: a child's peak memory, as the kernel counts it, begins with its parent's
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            size = pool.apply(make_checkpoint, (directory / "model", arguments.gigabytes, arguments.dtype))
        print(
            f"checkpoint: {size / 1e9:.2f} GB {arguments.dtype}, ep {arguments.ep_size}, {arguments.workers} workers, "
            f"{os.cpu_count()} cores; {arguments.rounds} rounds, variants interleaved, medians"
        )
        figures: dict[str, Any] = {}
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


def one_round(directory: Path, ep_size: int, workers: int, cache: str) -> dict[str, tuple[float, float]]:
    """(seconds, peak MB) of each variant, one after the other, each into a directory that is not there."""
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


def timed(command: list[str], cache: str) -> tuple[float, float]:
    # What earlier commands wrote must not be written back, or throttled, on this one's time. And a virtual machine
    # gives freed memory back to its host within seconds, and pays to get it again: let every variant pay alike.
    os.sync()
    time.sleep(SETTLE_SECONDS)
    if cache == "cold":
        Path("/proc/sys/vm/drop_caches").write_text("3")
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"{' '.join(command)} failed")
    return seconds, usage.ru_maxrss * 1024 / 1e6


def summarize(rounds: list[dict[str, tuple[float, float]]], size: int) -> dict[str, Any]:
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
    fill, read_header = SafetensorsReader._fill, headers_module.read_header

    def counting_fill(self: SafetensorsReader, file: Path, buffer: memoryview, offset: int) -> None:
        nonlocal read
        read += len(buffer)
        fill(self, file, buffer, offset)

    def counting_header(file: Path) -> Any:
        nonlocal read
        with open(file, "rb") as stream:
            read += 8 + int.from_bytes(stream.read(8), "little")
        return read_header(file)

    SafetensorsReader._fill = counting_fill  # type: ignore[method-assign]
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

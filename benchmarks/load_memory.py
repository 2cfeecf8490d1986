"""How much memory loading and exporting a checkpoint takes on each rank.

    python -m benchmarks.load_memory --ranks 4 --ep-size 4 --gigabytes 1.0

Makes a random Mixtral checkpoint of at least that size, then starts that many processes, which load and export it.
A rank's peak is the kernel's high-water mark of its resident memory (VmHWM), from the moment its imports and process
group are up. The bound held against it: 1.3 x the rank's shard + 200 MB. Exits with 1 when a rank exceeds it.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from benchmarks.arms import MB, as_rank, begin_peak, gathered, on_ranks, print_rows, resident, write_json
from expertmesh.checkpoints.files.file_layout import INDEX_NAME
from expertmesh.checkpoints.hf.export import export_model
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.checkpoints.load import shard_and_load
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.sharding.mesh import build_mesh
from expertmesh.sharding.runtime.process import start_process_group
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology

_BLOCK = 128


@ends_with_reader
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ep-size", type=int, default=4)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="least size of the checkpoint, 10^9 bytes")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "fp8"], default="float32")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    parser.add_argument("--worker", nargs=2, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return measure(Path(arguments.worker[0]), arguments.ep_size)
    with tempfile.TemporaryDirectory() as directory:
        size = make_checkpoint(Path(directory) / "model", arguments.gigabytes, arguments.dtype)
        print(
            f"checkpoint: {size / 1e9:.2f} GB {arguments.dtype}, parameters in float32; "
            f"{arguments.ranks} ranks, ep {arguments.ep_size}; one run"
        )
        figures = on_ranks("benchmarks.load_memory", sys.argv[1:], arguments.ranks, Path(directory))
    print_table(figures)
    write_json(arguments.json, figures)
    return 0 if all(f["within_bound"] for f in figures) else 1


def make_checkpoint(path: Path, gigabytes: float, dtype: str) -> int:
    """Save a random Mixtral of at least that many 10^9 bytes, one layer more at a time; its size in bytes.

    Args:
        dtype: float32, bfloat16, or fp8: the matrices of the layers in float8_e4m3, with a scale a block of 128 x 128.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = dict(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1792,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=8,
    )
    with torch.device("meta"):
        one, two = (MixtralForCausalLM(MixtralConfig(num_hidden_layers=n, **sizes)).num_parameters() for n in (1, 2))
    itemsize = {"float32": 4, "bfloat16": 2, "fp8": 1}[dtype]
    layers = max(1, -(-int(gigabytes * 10**9 / itemsize - one) // (two - one)) + 1)
    model: Any = MixtralForCausalLM(MixtralConfig(num_hidden_layers=layers, **sizes))
    model.to(torch.bfloat16 if dtype == "fp8" else getattr(torch, dtype))
    model.save_pretrained(path, max_shard_size="500MB")
    if dtype == "fp8":
        for file in path.glob("*.safetensors"):
            _encode(file)
        _index(path)
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}
        (path / "config.json").write_text(json.dumps(config))
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _encode(file: Path) -> None:
    """Rewrite a file with its layers' matrices in FP8."""
    tensors = load_file(file)
    for name, weight_OI in list(tensors.items()):
        if ".layers." in name and weight_OI.dim() == 2 and not any(size % _BLOCK for size in weight_OI.shape):
            blocks = weight_OI.float().unflatten(0, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK))
            scales = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            tensors[name], tensors[f"{name}_scale_inv"] = codes.reshape(weight_OI.shape), scales
    save_file(tensors, file, {"format": "pt"})


def _index(path: Path) -> None:
    """Write the index of a directory's files."""
    weight_map = {name: file.name for file in path.glob("*.safetensors") for name in load_file(file)}
    (path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def measure(directory: Path, ep_size: int) -> int:
    """On each rank: load, export, and leave what the kernel saw of every rank."""
    ranks = start_process_group(use_cpu=True, timeout_seconds=300)
    topology = Topology(ranks.world_size, ep_size)
    mesh = build_mesh("cpu", topology)
    source = open_source(directory / "model")
    model: Any = source.build()
    dist.barrier()
    start = begin_peak(ranks.device)

    begin = time.perf_counter()
    checkpoint = shard_and_load(model, source, mesh, ranks.device)
    load_seconds, load_peak = time.perf_counter() - begin, resident("VmHWM") - start

    # the second high-water mark includes the first, so export's bound is held by both together
    begin = time.perf_counter()
    export_model(model, checkpoint, topology, directory / "export", 500 * MB)
    export_seconds, export_peak = time.perf_counter() - begin, resident("VmHWM") - start

    shard = sum(local_tensor(p).numel() * p.element_size() for p in model.parameters())
    bound = 1.3 * shard + 200 * MB
    figures = {
        "rank": ranks.rank,
        "start_mb": start / MB,
        "shard_mb": shard / MB,
        "load_peak_mb": load_peak / MB,
        "export_peak_mb": export_peak / MB,
        "bound_mb": bound / MB,
        "within_bound": max(load_peak, export_peak) <= bound,
        "load_seconds": load_seconds,
        "export_seconds": export_seconds,
    }
    of_all = gathered(figures)
    if ranks.rank == 0:
        shutil.rmtree(directory / "export")
    return as_rank(directory, of_all)


def print_table(figures: list[dict[str, Any]]) -> None:
    """In MB; peaks are above the start."""
    names = {"start_mb": "at start", "shard_mb": "shard", "load_peak_mb": "load peak", "export_peak_mb": "export peak"}
    names |= {"bound_mb": "bound", "load_seconds": "load s", "export_seconds": "export s"}
    print_rows(
        [
            {"rank": f["rank"]}
            | {said: f"{f[name]:,.{int('seconds' in name)}f}" for name, said in names.items()}
            | {" ": "" if f["within_bound"] else "OVER THE BOUND"}
            for f in figures
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

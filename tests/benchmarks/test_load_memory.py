"""The memory bound of loading and exporting, on a checkpoint of at least 1 GB and 4 ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from benchmarks.arms import LEFT, MB, as_rank, begin_peak, gathered, resident, restart_peak
from expertmesh.checkpoints.files.file_layout import INDEX_NAME
from expertmesh.checkpoints.hf.export import export_model
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.checkpoints.load import shard_and_load
from expertmesh.sharding.mesh import build_mesh
from expertmesh.sharding.runtime.process import start_process_group
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from tests.distributed.pool import RankPool

_BLOCK = 128


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
    """On each rank: load, export, and leave what the kernel saw of every rank: the high-water mark of its resident
    memory, from the moment its imports and process group are up."""
    ranks = start_process_group(use_cpu=True, timeout_seconds=300)
    topology = Topology(ranks.world_size, ep_size)
    mesh = build_mesh("cpu", topology)
    source = open_source(directory / "model")
    model: Any = source.build()
    dist.barrier()
    start = begin_peak(ranks.device)

    checkpoint = shard_and_load(model, source, mesh, ranks.device)
    load_peak = resident("VmHWM") - start
    # the second high-water mark includes the first, so export's bound is held by both together
    export_model(model, checkpoint, topology, directory / "export", 500 * MB)
    export_peak = resident("VmHWM") - start

    shard = sum(local_tensor(p).numel() * p.element_size() for p in model.parameters())
    figures = {"shard_mb": shard / MB, "load_peak_mb": load_peak / MB, "export_peak_mb": export_peak / MB}
    of_all = gathered(figures)
    if ranks.rank == 0:
        shutil.rmtree(directory / "export")
    return as_rank(directory, of_all)


def measure_and_free(directory: Path, ep_size: int) -> None:
    measure(directory, ep_size)
    restart_peak()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "gigabytes", "ep_size"), [("float32", 1.0, 4), ("fp8", 0.25, 2)])
def test_no_rank_holds_much_more_than_its_shard(
    ranks: RankPool, tmp_path: Path, dtype: str, gigabytes: float, ep_size: int
) -> None:
    """Of a model of a billion bytes in fp32."""
    assert make_checkpoint(tmp_path / "model", gigabytes, dtype) >= gigabytes * 10**9
    ranks.run(measure_and_free, 4, tmp_path, ep_size, join_group=False, timeout=570)
    figures = json.loads((tmp_path / LEFT).read_text())
    assert len(figures) == 4
    assert sum(f["shard_mb"] for f in figures) >= 1000
    for f in figures:
        assert max(f["load_peak_mb"], f["export_peak_mb"]) <= 1.3 * f["shard_mb"] + 200

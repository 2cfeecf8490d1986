"""`Engine.tensors`: bit for bit what an export writes, without a copy of the model on any rank, and sent once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import expertmesh
from benchmarks.arms import begin_peak, resident, restart_peak
from benchmarks.traffic import CountTraffic
from expertmesh.checkpoints.hf.export import _PIECE_BYTES
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.api.server_weights import send_weights_of
from tests.distributed.pool import RankPool
from tests.encoded import save_fp8
from tests.families.configs import tiny_model
from tests.tiers import tiered
from tests.tiny import save_model, save_tokenizer

LORA: dict[str, Any] = dict(adapter="lora", lora_rank=4, base_dtype="float32")
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    # model, ranks, settings; "merged": what `merge` writes
    "ep 2": ("mixtral", 2, dict(ep_size=2)),
    "stacked, transposed and interleaved": ("gpt_oss", 2, dict(ep_size=2)),
    "stages": ("mixtral", 4, dict(ep_size=2, pp_size=2)),
    "replicas": ("mixtral", 4, dict(ep_size=2, dense_shard="hybrid")),
    "quantized anew": ("fp8", 2, dict(ep_size=2, export_encoding="source")),
    "adapters": ("mixtral", 2, dict(ep_size=2, **LORA)),
    "packed adapters": ("gpt_oss", 2, dict(ep_size=2, **LORA)),
    "merged": ("mixtral", 2, dict(ep_size=2, **LORA)),
    "merged, of a base in nf4": ("mixtral", 2, dict(ep_size=2, **LORA | {"base_dtype": "nf4"})),
    "merged, in another dtype": ("gpt_oss", 2, dict(ep_size=2, merge_dtype="bfloat16", **LORA)),
}
MB = 10**6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp(name) for name in ("mixtral", "gpt_oss", "fp8")}
    for name, path in paths.items():
        if name == "fp8":
            save_fp8(tiny_model("qwen3_moe", seed=1), path)
        else:
            tiny_model(name, seed=1).save_pretrained(path)
        save_tokenizer(path)
    return paths


def batch(engine: Any) -> dict[str, Tensor]:
    ids_BS = torch.randint(3, 250, (2, 12), generator=torch.Generator().manual_seed(engine.data_rank))
    return {"input_ids": ids_BS, "labels": ids_BS}


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, Tensor]:
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8)


def assert_same(found: dict[str, Tensor], written: dict[str, Tensor]) -> None:
    assert found.keys() == written.keys()
    for name, tensor in found.items():
        (*kind, own), (*other_kind, other) = bits(tensor), bits(written[name])
        assert kind == other_kind, name
        assert torch.equal(own, other), name


def compare(model: str, settings: dict[str, Any], out: Path, merge: bool) -> tuple[float, int]:
    """(bytes that this rank has sent, bytes of what was exported)"""
    engine = expertmesh.load(model, use_cpu=True, learning_rate=1e-2, **settings)
    stream = engine.tensors(merge=merge)
    before = {name: tensor.clone() for name, tensor in stream}
    engine.step(batch(engine))
    engine.export(out / "own")
    if merge:
        engine.merge(out / "own", out / "merged")
    written: dict[str, Tensor] = {}
    for file in (out / ("merged" if merge else "own")).glob("*.safetensors"):
        written.update(load_file(file))
    with CountTraffic() as traffic:
        found = dict(stream)
    if engine.ranks.rank == 0:
        assert_same(found, written)
        assert any(not torch.equal(bits(tensor)[2], bits(before[name])[2]) for name, tensor in found.items())
    else:
        assert all(tensor.is_meta for tensor in found.values())
    assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()] == stream.metadata()
    assert_same(dict(engine.tensors(merge=merge, all_ranks=True)), written)
    if not merge and settings.get("adapter") is None:
        with pytest.raises(ExpertMeshError, match="merge: the model has no adapter"):
            engine.tensors(merge=True)
    return sum(traffic.sent.values()), sum(tensor.nbytes for tensor in written.values())


@pytest.mark.parametrize("name", tiered(["ep 2"], slow=[*CASES][1:]))
def test_they_are_those_of_the_export(name: str, ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    """Also after a step; and no byte is sent twice."""
    model, world_size, settings = CASES[name]
    given = str(models[model]), settings, tmp_path, name.startswith("merged")
    sent, size = zip(*ranks.run(compare, world_size, *given), strict=True)
    assert 0 < sum(sent) <= 1.1 * size[0]


def added(model: str, settings: dict[str, Any], merge: bool) -> tuple[int, int]:
    """(bytes by which memory has grown at most while tensors came, and as each went again; those of the largest)"""
    engine = expertmesh.load(model, use_cpu=True, ep_size=2, **settings)
    largest, start = 0, begin_peak(engine.ranks.device)
    for _, tensor in (stream := iter(engine.tensors(merge=merge))):
        largest = max(largest, tensor.nbytes)
        del tensor
    del stream
    peak = resident("VmHWM") - start
    restart_peak()
    return peak, largest


@pytest.mark.slow
@pytest.mark.parametrize("merge", [False, True], ids=["full", "merged"])
def test_no_rank_holds_more_than_a_layer(merge: bool, ranks: RankPool, tmp_path: Path) -> None:
    """Of three layers of 168 MB with experts stacked, a rank holds half. Beside a tensor there are pieces of at most
    16 MiB: one on its way; where they are merged, the base's rows, the sum, and what is written of it. 8 MB are what
    the C library and gloo take."""
    sizes: dict[str, Any] = dict(
        hidden_size=1024, intermediate_size=768, num_local_experts=16, num_hidden_layers=3, head_dim=256
    )
    save_model(tmp_path, save_original_format=False, **sizes)
    layer = sum(tensor.nbytes for name, tensor in load_file(tmp_path / "model.safetensors").items() if ".1." in name)
    (peak, largest), (other, _) = ranks.run(added, 2, str(tmp_path), LORA if merge else {}, merge)
    assert largest == 16 * 2 * 768 * 1024 * 4
    assert peak <= largest + (3 if merge else 1) * _PIECE_BYTES + 8 * MB <= layer
    assert other <= 8 * MB, "its rows go out as they lie"


class Server:
    """What trl sends to: a client of a server's, or the model in a process of its own."""

    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.is_reset = False

    def update_named_params(self, metadata: Any, pairs: Any) -> None:
        self.load_weights(pairs)
        told = [
            (name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]) for name, tensor in self.loaded.items()
        ]
        assert told == metadata

    def load_weights(self, pairs: Any) -> None:
        self.loaded |= {name: tensor.clone() for name, tensor in pairs}

    def reset_prefix_cache(self) -> None:
        self.is_reset = True


def synced(model: str, mode: str, out: Path) -> None:
    engine = expertmesh.load(model, use_cpu=True, learning_rate=1e-2, ep_size=2)
    from trl.generation.vllm_generation import VLLMGeneration

    generation = VLLMGeneration.__new__(VLLMGeneration)  # whose own beginning needs vLLM
    server = Server()
    vars(generation).update(
        mode=mode, _weight_metadata=None, enable_sleep_mode=False, vllm_client=server, llm=Mock(),
        accelerator=SimpleNamespace(is_main_process=engine.ranks.rank == 0),
    )  # fmt: skip
    generation.llm.llm_engine.model_executor.driver_worker.model_runner.model = server
    send_weights_of(engine, generation)
    for step in range(2):
        engine.step(batch(engine))
        generation.sync_weights()
        engine.export(out / f"step-{step}")
        if mode == "colocate" or engine.ranks.rank == 0:
            assert_same(server.loaded, load_file(out / f"step-{step}" / "model.safetensors"))
    assert server.is_reset == (mode == "server" and engine.ranks.rank == 0)
    del generation._iter_named_params  # the class's own stays
    vars(generation).pop("_weight_metadata")
    with pytest.raises(ExpertMeshError, match="VLLMGeneration has no _weight_metadata, as trl"):
        send_weights_of(engine, generation)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_trl_sends_them(mode: str, ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    """By its own `VLLMGeneration.sync_weights`."""
    pytest.importorskip("trl.generation.vllm_generation")
    ranks.run(synced, 2, str(models["mixtral"]), mode, tmp_path)

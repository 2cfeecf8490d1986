"""HF checkpoint in, HF checkpoint out: the same bits, streamed, for every parallel layout."""

import json
import resource
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import _set_pg_timeout
from transformers import AutoTokenizer, MixtralForCausalLM

from expertmesh.checkpoints.files.dtypes import Array
from expertmesh.checkpoints.files.open_files import OpenFiles
from expertmesh.checkpoints.files.tensors import DiskTensor
from expertmesh.checkpoints.hf import export, untrained_tensors
from expertmesh.checkpoints.hf.export import export_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime.process import end_process_group, start_process_group
from expertmesh.sharding.state import ShardedParameter
from expertmesh.sharding.topology import Topology
from tests.distributed.pool import RankPool
from tests.distributed.reference import sharded_model
from tests.distributed.whole_runs import assert_same_bits, read
from tests.parity.case import Case, random_samples
from tests.tiers import tiered
from tests.tiny import save_model, save_tokenizer
from tests.untrained import add_tensors

CASE = Case(random_samples([8, 5]))


def round_trip(source: Path, out: Path, topology: Topology, max_shard_size: int = 5 * 10**9) -> None:
    model, _, checkpoint = sharded_model(source, topology, CASE)
    export_model(model, checkpoint, topology, out, max_shard_size)


ORIGINAL: dict[str, Any] = dict(save_original_format=True)
FUSED: dict[str, Any] = dict(save_original_format=False)
UNEVEN: dict[str, Any] = dict(vocab_size=321, num_local_experts=2, intermediate_size=25)
"""Row counts prime to the number of ranks: 321 vocabulary rows, 50 rows an expert."""
TIED: dict[str, Any] = dict(tie_word_embeddings=True)
ROUND_TRIPS = tiered(
    quick=[
        (Topology(4, 2), ORIGINAL, torch.float32, "50KB"),
        (Topology(2, 1, "hybrid"), FUSED, torch.bfloat16, "5GB"),
        (Topology(4, 2), UNEVEN, torch.float32, "5GB"),
        (Topology(2, 2), TIED, torch.float32, "5GB"),
    ],
    slow=[
        (Topology(1, 1), FUSED, torch.float32, "50KB"),
        (Topology(4, 4), ORIGINAL, torch.bfloat16, "5GB"),
        (Topology(4, 2, pp_size=2), ORIGINAL, torch.float32, "50KB"),
        (Topology(4, 1), UNEVEN, torch.float32, "5GB"),
    ],
    release=[
        (Topology(8, 2, "hybrid"), FUSED, torch.bfloat16, "50KB"),
        (Topology(4, 1, pp_size=4), FUSED | {"num_hidden_layers": 4}, torch.bfloat16, "5GB"),
        (Topology(8, 2), UNEVEN, torch.float32, "5GB"),
    ],
)


@pytest.mark.parametrize(("topology", "changes", "dtype", "max_shard_size"), ROUND_TRIPS, ids=str)
def test_round_trip_is_bit_exact(
    ranks: RankPool, tmp_path: Path, topology: Topology, changes: Any, dtype: torch.dtype, max_shard_size: str
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_model(source, dtype, max_shard_size, **changes)
    save_tokenizer(source)
    files = len(list(source.glob("*.safetensors")))
    assert files > 1 if max_shard_size == "50KB" else files == 1
    ranks.run(round_trip, topology.world_size, source, out, topology, 50_000 if files > 1 else 5 * 10**9)
    before, after = read(source), read(out)
    assert {tensor.dtype for tensor in after.values()} == {dtype}
    assert_same_bits(after, before)
    assert not out.with_name("out.incomplete").exists()
    for file in source.glob("*.json"):
        if "index" not in file.name:
            assert (out / file.name).read_bytes() == file.read_bytes()
    # the index is complete, and no file but the ones it names is there
    if files > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == before.keys()
        assert set(index["weight_map"].values()) == {file.name for file in out.glob("*.safetensors")}
    else:
        with safe_open(out / "model.safetensors", framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}, "as safetensors writes it"
    reloaded, expected = (MixtralForCausalLM.from_pretrained(path, dtype=dtype).state_dict() for path in (out, source))
    assert_same_bits(reloaded, expected)
    assert AutoTokenizer.from_pretrained(out)("say")["input_ids"]


def test_tied_embeddings_stored_twice(ranks: RankPool, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_model(source, **TIED)
    _rewrite(source, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()})
    ranks.run(round_trip, 2, source, out, Topology(2, 2))
    assert_same_bits(read(out), read(source))


def test_tied_embeddings_that_differ(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path, tie_word_embeddings=True)
    _rewrite(tmp_path, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] + 1})
    messages = ranks.run(load_error, 2, tmp_path, Topology(2, 2))
    assert all("lm_head.weight differs from model.embed_tokens.weight" in message for message in messages)


def load_error(path: Path, topology: Topology) -> str:
    return export_error(path, None, topology)


def export_error(source: Path, out: Path | None, topology: Topology) -> str:
    """Or that of loading, without a directory to export to."""
    try:
        if out is None:
            sharded_model(source, topology, CASE)
        else:
            round_trip(source, out, topology)
    except ExpertMeshError as error:
        return str(error)
    return "no error"


def _rewrite(path: Path, change: Any) -> None:
    from safetensors.torch import save_file

    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


EXPERT = "model.layers.1.block_sparse_moe.experts.5.w2.weight"


def _without(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != EXPERT}


def _with_nan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors[EXPERT][-1, -1] = float("nan")
    return tensors


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without, [EXPERT, "is missing"]),
        (lambda t: {**t, "model.extra.weight": torch.ones(2)}, ["model.extra.weight", "no place"]),
        (lambda t: {**t, EXPERT: t[EXPERT].t().contiguous()}, [EXPERT, "[48, 32]", "[32, 48]"]),
        (_with_nan, [EXPERT, "not finite"]),
        (lambda t: {**t, EXPERT: t[EXPERT].to(torch.int8)}, [EXPERT, "I8", "F32, BF16, F16"]),
    ],
    ids=["missing", "extra", "mis-shaped", "not finite", "int8"],
)
def test_bad_tensor_is_named_on_all_ranks(ranks: RankPool, tmp_path: Path, change: Any, said: list[str]) -> None:
    save_model(tmp_path)
    _rewrite(tmp_path, change)
    (message,) = set(ranks.run(load_error, 2, tmp_path, Topology(2, 2)))
    assert all(word in message for word in said), message


def test_export_that_fails_half_way(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    """A full disk, played by a limit on the size of a file: every rank learns of it, none waits for another, nothing
    is left behind, and what stood there before is untouched."""
    out = tmp_path / "hf"
    out.mkdir()
    (out / "earlier").write_text("precious")
    (message,) = set(ranks.run(export_error_with_file_limit, 4, tiny_model, out, Topology(4, 2), 20_000))
    assert "cannot be written" in message
    assert [path.name for path in tmp_path.rglob("*")] == ["hf", "earlier"]


def export_error_with_file_limit(source: Path, out: Path, topology: Topology, limit: int) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        return export_error(source, out, topology)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(("failing", "name"), [(0, "as_bytes"), (1, "view")])
def test_memory_that_ends_half_way(ranks: RankPool, tiny_model: Path, tmp_path: Path, failing: int, name: str) -> None:
    """On the rank that writes, or on one that sends: whatever one meets, no other waits for it."""
    told = ranks.run(_export_without_memory, 2, tiny_model, tmp_path / "hf", failing, name)
    problem = "MemoryError: none left"
    others = f"ExpertMeshError: rank {failing} failed: {problem}"
    assert told == [problem if rank == failing else others for rank in range(2)]
    assert not list(tmp_path.iterdir())


def _export_without_memory(source: Path, out: Path, failing: int, name: str) -> str:
    topology = Topology(2, 2)
    owner: Any = export if name == "as_bytes" else ShardedParameter
    model, _, checkpoint = sharded_model(source, topology, CASE)
    real, calls = getattr(owner, name), [0]

    def limited(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] > 3 and dist.get_rank() == failing:
            raise MemoryError("none left")
        return real(*given)

    with mock.patch.object(owner, name, limited):
        try:
            export_model(model, checkpoint, topology, out)
        except (MemoryError, ExpertMeshError) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.slow
def test_what_is_carried_over_may_take_longer_than_a_collective(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path / "source")
    add_tensors(tmp_path / "source", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    ranks.run(_export_slowly, 2, tmp_path / "source", tmp_path / "out", join_group=False)
    assert read(tmp_path / "out").keys() == read(tmp_path / "source").keys()


def _export_slowly(source: Path, out: Path) -> None:
    """Rank 0 takes twice as long to read what is carried over as a collective may."""
    group, topology = start_process_group(use_cpu=True, timeout_seconds=60), Topology(2, 2)
    model, _, checkpoint = sharded_model(source, topology, CASE)
    values = untrained_tensors.carried_values

    def slowly(tensor: DiskTensor, files: OpenFiles) -> Iterator[Array]:
        time.sleep(8)
        yield from values(tensor, files)

    untrained_tensors.carried_values = slowly
    _set_pg_timeout(timedelta(seconds=4))
    export_model(model, checkpoint, topology, out, patient=group)
    untrained_tensors.carried_values = values
    _set_pg_timeout(timedelta(seconds=60))
    end_process_group()

"""HF checkpoint in, HF checkpoint out: the same bits, streamed, for every parallel layout."""

import json
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import _set_pg_timeout
from transformers import AutoTokenizer, MixtralForCausalLM

from expertmesh.checkpoints.files.dtypes import Array
from expertmesh.checkpoints.hf.export import export_model
from expertmesh.checkpoints.hf.untrained_tensors import Carried
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime.process import end_process_group, start_process_group
from expertmesh.sharding.topology import Topology
from expertmesh.training.data.batch import collate
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, attention_mask, random_samples, sharded_model
from tests.tiny import relative_error, save_model, save_tokenizer
from tests.untrained import add_tensors

CASE = Case(random_samples([8, 5]))


def read(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def round_trip(source: Path, out: Path, topology: Topology, max_shard_size: int = 5 * 10**9) -> None:
    model, _, checkpoint = sharded_model(source, topology, CASE)
    export_model(model, checkpoint, topology, out, max_shard_size)


# of dtype, names and size of files each two together on every parallel layout, though not all three
@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("original", "dtype", "max_shard_size"),
    [
        (True, torch.float32, "50KB"),
        (True, torch.bfloat16, "5GB"),
        (False, torch.float32, "5GB"),
        (False, torch.bfloat16, "50KB"),
    ],
    ids=[
        "per-expert, fp32, many files",
        "per-expert, bf16, one file",
        "fused, fp32, one file",
        "fused, bf16, many files",
    ],
)
@pytest.mark.parametrize(
    "topology",
    [Topology(1, 1), Topology(2, 1, "hybrid"), Topology(4, 2), Topology(4, 4), Topology(8, 2, "hybrid")],
    ids=str,
)
def test_round_trip_is_bit_exact(
    ranks: RankPool, tmp_path: Path, topology: Topology, original: bool, dtype: torch.dtype, max_shard_size: str
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_model(source, dtype, max_shard_size, save_original_format=original)
    save_tokenizer(source)
    files = len(list(source.glob("*.safetensors")))
    assert files > 1 if max_shard_size == "50KB" else files == 1

    ranks.run(round_trip, topology.world_size, source, out, topology, 50_000 if files > 1 else 5 * 10**9)

    before, after = read(source), read(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == dtype, name
        assert torch.equal(after[name], tensor), name
    assert not out.with_name("out.incomplete").exists()
    for file in source.glob("*.json"):
        if "index" not in file.name:
            assert (out / file.name).read_bytes() == file.read_bytes()
    # the index is complete, and no file but the ones it names is there
    if files > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == before.keys()
        assert set(index["weight_map"].values()) == {file.name for file in out.glob("*.safetensors")}
    reloaded = MixtralForCausalLM.from_pretrained(out, dtype=dtype)
    expected = MixtralForCausalLM.from_pretrained(source, dtype=dtype)
    for (name, found), want in zip(reloaded.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(found, want), name
    assert AutoTokenizer.from_pretrained(out)("say")["input_ids"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("topology", [Topology(4, 2), Topology(4, 1), Topology(8, 2)], ids=str)
def test_rows_that_do_not_divide_evenly(ranks: RankPool, tmp_path: Path, topology: Topology) -> None:
    """Row counts prime to the number of ranks: 321 vocabulary rows, 50 rows an expert."""
    source, out = tmp_path / "source", tmp_path / "out"
    save_model(source, vocab_size=321, num_local_experts=2, intermediate_size=25)
    ranks.run(round_trip, topology.world_size, source, out, topology)
    before, after = read(source), read(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("stored_twice", [False, True])
def test_tied_embeddings(ranks: RankPool, tmp_path: Path, stored_twice: bool) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_model(source, tie_word_embeddings=True)
    if stored_twice:
        _rewrite(source, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()})
    ranks.run(round_trip, 2, source, out, Topology(2, 2))
    before, after = read(source), read(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_tied_embeddings_that_differ(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path, tie_word_embeddings=True)
    _rewrite(tmp_path, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] + 1})
    messages = ranks.run(load_error, 2, tmp_path, Topology(2, 2))
    assert all("lm_head.weight differs from model.embed_tokens.weight" in message for message in messages)


def logits(path: Path, topology: Topology) -> torch.Tensor:
    model, _, _ = sharded_model(path, topology, CASE)
    batch = collate([[sample] for sample in CASE.samples])
    with torch.no_grad():
        return model.eval()(input_ids=batch.tokens_BS, attention_mask=attention_mask(batch)).logits


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(4, 2)], ids=str)
def test_sharded_logits_equal_transformers(ranks: RankPool, tiny_model: Path, topology: Topology) -> None:
    """With the attention mask as HF's users pass it."""
    batch = collate([[sample] for sample in CASE.samples])
    model = MixtralForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        expected = model(input_ids=batch.tokens_BS, attention_mask=attention_mask(batch)).logits
    is_token_BS = attention_mask(batch).bool()
    for found in ranks.run(logits, topology.world_size, tiny_model, topology):
        assert relative_error(found[is_token_BS], expected[is_token_BS]) < 1e-5


def load_error(path: Path, topology: Topology) -> str:
    try:
        sharded_model(path, topology, CASE)
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
    messages = ranks.run(load_error, 4, tmp_path, Topology(4, 4))
    assert len(set(messages)) == 1
    assert all(word in messages[0] for word in said), messages[0]


def test_export_that_fails_half_way(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    """A full disk, played by a limit on the size of a file: every rank learns of it, none waits for another, nothing
    is left behind, and what stood there before is untouched."""
    out = tmp_path / "hf"
    out.mkdir()
    (out / "earlier").write_text("precious")
    messages = ranks.run(export_error_with_file_limit, 4, tiny_model, out, Topology(4, 2), 20_000)
    assert len(set(messages)) == 1
    assert "cannot be written" in messages[0]
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


def test_export_that_cannot_be_written(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    messages = ranks.run(export_error, 2, tiny_model, blocked / "hf", Topology(2, 2))
    assert len(set(messages)) == 1
    assert str(blocked) in messages[0]
    assert "cannot be written" in messages[0]


def export_error(source: Path, out: Path, topology: Topology) -> str:
    try:
        round_trip(source, out, topology)
    except ExpertMeshError as error:
        return str(error)
    return "no error"


def test_exported_file_is_as_safetensors_writes_it(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    ranks.run(round_trip, 1, tiny_model, tmp_path / "out", Topology(1, 1))
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_what_is_carried_over_may_take_longer_than_a_collective(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path / "source")
    add_tensors(tmp_path / "source", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    ranks.run(_export_slowly, 2, tmp_path / "source", tmp_path / "out", join_group=False)
    assert read(tmp_path / "out").keys() == read(tmp_path / "source").keys()


def _export_slowly(source: Path, out: Path) -> None:
    """Rank 0 takes twice as long to read what is carried over as a collective may."""
    group, topology = start_process_group(use_cpu=True, timeout_seconds=60), Topology(2, 2)
    model, _, checkpoint = sharded_model(source, topology, CASE)
    (carried,) = checkpoint.carried
    _set_pg_timeout(timedelta(seconds=4))
    export_model(model, replace(checkpoint, carried=[_Slow(**vars(carried))]), topology, out, patient=group)
    _set_pg_timeout(timedelta(seconds=60))
    end_process_group()


class _Slow(Carried):
    def values(self) -> Iterator[Array]:
        time.sleep(8)
        yield from super().values()

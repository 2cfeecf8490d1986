"""train_ep.py with a pipeline, whole: what it writes, what it exports, and what it refuses."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import yaml

from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.sharding.topology import Topology
from expertmesh.training.config.train_config import parse_config
from expertmesh.training.planning.rank_memory import recorded_pipeline
from expertmesh.training.step import train_step
from tests.checkpoints.test_encodings import SOURCES
from tests.distributed.pool import RankPool
from tests.distributed.test_checkpoints import load_error, read, round_trip
from tests.distributed.test_pipeline_state import LAYERS, logged, spread
from tests.distributed.test_resume import _said, flags, run, run_main
from tests.tiny import save_model, save_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deeper")
    save_model(path, **LAYERS)
    save_tokenizer(path)
    return path


@pytest.mark.release
@pytest.mark.parametrize("topology", [Topology(4, 2, pp_size=2), Topology(4, 1, pp_size=4)], ids=["2", "4"])
def test_exports_are_those_without_a_pipeline(ranks: RankPool, model: Path, tmp_path: Path, topology: Topology) -> None:
    """Byte for byte, from Hugging Face form and from EP shards, of which a damaged one is found on any stage."""
    shards = tmp_path / "shards"
    assert checkpoints_main(["convert", str(model), str(shards), "--ep-size", "2"]) == 0
    ranks.run(round_trip, 1, model, tmp_path / "alone", Topology(1, 1), 50_000)
    for name, source in (("hf", model), ("of shards", shards)):
        ranks.run(round_trip, topology.world_size, source, tmp_path / name, topology, 50_000)
        assert _bytes(tmp_path / name, "*.safetensors") == _bytes(tmp_path / "alone", "*.safetensors")
    for file in sorted(shards.glob("*.safetensors")):
        spoilt = tmp_path / "spoilt"
        shutil.copytree(shards, spoilt)
        content = bytearray((spoilt / file.name).read_bytes())
        content[-5] ^= 1
        (spoilt / file.name).write_bytes(content)
        messages = ranks.run(load_error, topology.world_size, spoilt, topology)
        assert all(f"{spoilt / file.name}: is damaged" in message for message in messages), messages
        shutil.rmtree(spoilt)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_quantized_sources(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Each stage reads, and dequantizes, its own layers."""
    SOURCES[name](tmp_path / "source")
    for out, topology in (("alone", Topology(1, 1)), ("stages", Topology(2, 1, pp_size=2))):
        ranks.run(round_trip, topology.world_size, tmp_path / "source", tmp_path / out, topology)
    assert _bytes(tmp_path / "stages", "*") == _bytes(tmp_path / "alone", "*")


def _bytes(directory: Path, pattern: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.glob(pattern) if file.is_file()}


@pytest.mark.release
def test_a_whole_run(ranks: RankPool, model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Trains, evaluates, saves and exports, as without a pipeline: tokens count once."""
    common = ["--eval-ratio", "0.1", "--eval-steps", "2", "--save-steps", "2", "--max-steps", "4"]
    common += ["--load-best-model-at-end"]
    found, expected = tmp_path / "stages", tmp_path / "alone"
    (told, *_) = ranks.run(_said, 4, [*flags(model, tiny_data, found), *spread(2, 1, 2), *common], join_group=False)
    run(ranks, 2, [*flags(model, tiny_data, expected), *spread(1, 1, 2), *common])
    assert (
        "4 ranks: pp 2 x dp 1 x ep 2, 4 experts per rank, dense shard full; "
        "global batch 12 sequences = 2 pipelines x 3 sequences x 2 micro-batches"
    ) in told
    # what was chosen is said and recorded, and binds no other run
    ((layers, schedule),) = re.findall(
        r"pipeline: 2 stages of (\d and \d) layers \(balanced by forecast seconds\); ([\w-]+) \(by forecast ", told
    )
    chosen = {"pipeline_schedule": schedule, "pipeline_layers": layers.replace(" and ", ",")}
    text = (found / "config.yaml").read_text()
    assert chosen.items() <= json.loads((found / "environment.json").read_text()).items()
    assert all(f"# chosen for this run: {name}: {value}\n" in text for name, value in chosen.items())
    assert {yaml.safe_load(text)[name] for name in chosen} == {None}
    again = ["--config", str(found / "config.yaml"), "--resume", "auto"]
    assert recorded_pipeline(parse_config(again), 4) == chosen
    # of other sizes it is another pipeline
    assert recorded_pipeline(parse_config([*again, "--pp-size", "4", "--ep-size", "1"]), 4) == {}
    assert recorded_pipeline(parse_config([*again, "--pipeline-chunks", "2"]), 4) == {}
    assert recorded_pipeline(parse_config(again), 8) == {}
    asked = parse_config([*again, "--pipeline-layers", "3,1"])
    assert recorded_pipeline(asked, 4) == {"pipeline_schedule": schedule}
    steps, steps_alone = ([line for line in logged(out) if "loss" in line] for out in (found, expected))
    for name in ("expert_tokens", "router_entropy"):
        assert np.array(steps[0][name]) == pytest.approx(np.array(steps_alone[0][name]), rel=1e-5), name
    for name in ("loss", "grad_norm", "tokens", "target_tokens"):
        assert [line[name] for line in steps] == pytest.approx([line[name] for line in steps_alone], rel=1e-5), name
    for name in ("eval_loss", "eval_target_tokens"):
        here, there = ([line[name] for line in logged(out) if name in line] for out in (found, expected))
        assert here == pytest.approx(there, rel=1e-5)
    for line in (line for line in logged(found) if "loss" in line):
        assert line["dropped_tokens"] == 0
    assert json.loads((found / "environment.json").read_text())["global_batch_size"] == 12
    assert "drawAll" in (found / "report.html").read_text()
    best = (found / "checkpoints" / "best").resolve()
    assert best.name == (expected / "checkpoints" / "best").resolve().name
    assert checkpoints_main(["verify", str(best), str(found / "hf")]) == 0
    assert checkpoints_main(["inspect", str(best), "--check"]) == 0
    assert checkpoints_main(["convert", str(best), str(tmp_path / "shards"), "--ep-size", "4"]) == 0
    assert checkpoints_main(["verify", str(tmp_path / "shards"), str(found / "hf")]) == 0


@pytest.mark.release
def test_adapters_are_merged(ranks: RankPool, model: Path, tiny_data: Path, tmp_path: Path) -> None:
    adapters = ["--adapter", "lora", "--lora-rank", "4", "--max-steps", "2", "--save-steps", "0", "--merge"]
    for out, layout, world_size in (("stages", spread(2, 1, 1), 2), ("alone", spread(1, 1, 1), 1)):
        run(ranks, world_size, [*flags(model, tiny_data, tmp_path / out), *layout, *adapters])
    for form in ("adapter", "hf"):
        found, expected = read(tmp_path / "stages" / form), read(tmp_path / "alone" / form)
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)


@pytest.mark.release
def test_damaged_and_unfinished_checkpoints(ranks: RankPool, model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """A file that a later stage wrote is damaged: it is named; what was left half-written is removed."""
    out = tmp_path / "run"
    argv = [*flags(model, tiny_data, out), *spread(2, 1, 1), "--save-steps", "1", "--max-steps", "2", "--no-export"]
    run(ranks, 2, argv)
    state = out / "checkpoints" / "step-00000002" / "state"
    assert {file.name for file in state.iterdir()} >= {"__0_0.distcp", "__1_0.distcp"}
    content = bytearray((state / "__1_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (state / "__1_0.distcp").write_bytes(content)
    (out / "checkpoints" / ".step-00000003-1.part").mkdir()
    told = run(ranks, 2, [*argv, "--resume", "auto", "--max-steps", "3"])
    assert "step-00000002/state/__1_0.distcp: is damaged" in told
    assert not list((out / "checkpoints").glob(".*"))
    assert [line["step"] for line in logged(out)] == [1, 2, 3]


@pytest.mark.release
def test_a_resumed_run_keeps_its_pipeline(ranks: RankPool, model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Also one that it would not choose; its config.yaml serves a run of another size."""
    out = tmp_path / "run"
    argv = [*flags(model, tiny_data, out), *spread(2, 1, 1), "--save-steps", "1", "--no-export"]
    run(ranks, 2, [*argv, "--max-steps", "1", "--pipeline-layers", "1,3", "--pipeline-schedule", "1f1b"])
    (told, *_) = ranks.run(_said, 2, [*argv, "--max-steps", "2", "--resume", "auto"], join_group=False)
    assert "2 stages of 1 and 3 layers (as before it was resumed); 1f1b (as before it was resumed)" in told
    other = ["--config", str(out / "config.yaml"), "--resume", "", "--output-dir", str(tmp_path / "other")]
    (told, *_) = ranks.run(_said, 4, [*other, "--pp-size", "4", "--max-steps", "1"], join_group=False)
    assert "pipeline: 4 stages of 1, 1, 1 and 1 layers (balanced by forecast seconds)" in told


BAD: dict[str, tuple[list[str], str]] = {
    "ranks": (["--pp-size", "3"], "--pp-size 3 does not divide the 2 ranks; use 1 or 2"),
    "experts": (["--pp-size", "2", "--ep-size", "2"], "--ep-size 2 does not divide 1 rank;"),
    "layers": (
        ["--pp-size", "2", "--pipeline-chunks", "3"],
        "--pp-size 2 --pipeline-chunks 3: 6 stages need as many decoder layers, and MixtralForCausalLM has 4",
    ),
    "counts": (["--pp-size", "2", "--pipeline-layers", "1,2"], "--pipeline-layers 1,2: has 2 stages with 3 layers"),
    "number": (["--pp-size", "2", "--pipeline-layers", "1,1,2"], "--pipeline-layers 1,1,2: has 3 stages with 4"),
    "text": (["--pp-size", "2", "--pipeline-layers", "2,x"], "--pipeline-layers 2,x: must be numbers"),
    "no pipeline": (["--pipeline-layers", "2,2"], "--pipeline-layers 2,2: there is no pipeline at --pp-size 1"),
    "1f1b": (
        ["--pp-size", "2", "--pipeline-chunks", "2", "--pipeline-schedule", "1f1b"],
        "--pipeline-schedule 1f1b: has one stage per rank, not --pipeline-chunks 2; use interleaved",
    ),
    "interleaved": (
        ["--pp-size", "2", "--pipeline-schedule", "interleaved", "--pipeline-chunks", "1"],
        "give it several by --pipeline-chunks 2",
    ),
    "zero": (["--pp-size", "0"], "--pp-size 0: must be 1 or more"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BAD)
def test_bad_input(ranks: RankPool, model: Path, tiny_data: Path, tmp_path: Path, name: str) -> None:
    """Every refusal names its flag, and ends all ranks."""
    more, said = BAD[name]
    results = ranks.run(run_main, 2, [*flags(model, tiny_data, tmp_path / "run"), *more], join_group=False)
    assert [code for code, _ in results] == [2, 2], results
    assert said in results[0][1]


@pytest.mark.release
def test_other_ranks_keep_the_pipeline(ranks: RankPool, model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Two ranks in place of four: pp 2, ep 1. The same run all the way."""
    whole, out = tmp_path / "whole", tmp_path / "elastic"
    steady = ["--lr-scheduler-type", "constant", "--warmup-steps", "0", "--pipeline-layers", "1,3"]
    argv = [*flags(model, tiny_data, out), *spread(2, 1, 2), *steady]
    run(ranks, 4, [*flags(model, tiny_data, whole), *spread(2, 1, 2), *steady, "--max-steps", "6", "--save-steps", "0"])
    for world_size, steps, told in (
        (4, 3, ""),
        (2, 6, "--ep-size 1 in place of 2"),
    ):
        elastic = ["--save-steps", "1", "--max-steps", str(steps), "--resume", "auto", "--elastic"]
        (said, *_) = ranks.run(_said, world_size, [*argv, *elastic], join_group=False)
        assert told in said
    ((code, said),) = ranks.run(run_main, 1, [*argv, "--resume", "auto", "--elastic"], join_group=False)
    assert code == 2
    assert "--pp-size 2 does not divide 1 rank; use 1" in said
    for name in ("loss", "grad_norm", "tokens"):
        assert [line[name] for line in logged(out)] == pytest.approx([line[name] for line in logged(whole)], rel=1e-5)


@pytest.mark.slow
def test_what_is_not_finite_is_named_where_it_came_about(
    ranks: RankPool, model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """In the stage where it did, not in those that were handed it; and what stands in for other stages is not."""
    argv = [*flags(model, tiny_data, tmp_path / "run"), *spread(2, 1, 1), "--detect-anomaly"]
    argv += ["--pipeline-layers", "2,2"]
    results = ranks.run(run_with_bad_layer, 2, argv, join_group=False)
    assert [code for code, _ in results] == [2, 2]
    assert (
        "first non-finite tensor: output of model.layers.1.post_attention_layernorm, in forward, on rank 0"
        in (results[0][1])
    )


def run_with_bad_layer(argv: list[str]) -> tuple[int, str]:
    """`run_main`, with infinity as the input of a norm of the first stage, in the first step's second micro-batch."""
    calls = 0

    def spoil(norm: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        nonlocal calls
        calls += 1
        return (inputs[0] * float("inf"),) if calls == 2 else inputs

    def step(model: Any, *arguments: Any, **named: Any) -> Any:
        if os.environ["RANK"] == "0" and calls == 0:
            model.model.layers[1].post_attention_layernorm.register_forward_pre_hook(spoil)
        return train_step(model, *arguments, **named)

    with mock.patch("expertmesh.training.engine.train_step", step):
        return run_main(argv)

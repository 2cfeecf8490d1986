"""Two nodes that read other files, or were started otherwise, are told so before anything is trained."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file, save_file

import expertmesh.training.run.output
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import ROOT, run_main
from tests.pictures import asked, data_url, drawn, save_seeing, write_lines
from tests.tiers import tiered
from tests.tiny import save_model, save_tokenizer

FLAGS = ["--model", "model", "--dataset", "data.jsonl", "--use-cpu", "--max-steps", "2", "--ep-size", "2"]
FLAGS += ["--per-device-train-batch-size", "4"]


def run_on_node(argv: list[list[str]], directory: Path, ranks_per_node: int) -> tuple[int, str]:
    """train_ep.py on this rank, in the directory of its node, as torchrun would start it there."""
    node, local_rank = divmod(int(os.environ["RANK"]), ranks_per_node)
    place = {"GROUP_RANK": str(node), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(ranks_per_node)}
    before = Path.cwd()
    os.chdir(directory / f"node-{node}")
    try:
        # what nodes do not share is not there after a second either
        with (
            mock.patch.dict(os.environ, place),
            mock.patch.object(expertmesh.training.run.output, "_SEEN_SECONDS", 1.0),
            mock.patch.object(expertmesh.training.run.output, "_NOT_NEEDED_SECONDS", 0.5),
        ):
            return run_main(argv[node])
    finally:
        os.chdir(before)


@pytest.fixture
def nodes(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> Path:
    """A directory for each of two nodes, with the same model and data."""
    for node in ("node-0", "node-1"):
        shutil.copytree(tiny_model, tmp_path / node / "model")
        shutil.copy(tiny_data, tmp_path / node / "data.jsonl")
    return tmp_path


@pytest.mark.slow
def test_nodes_with_files_of_their_own(ranks: RankPool, nodes: Path) -> None:
    """Alike in content, they train; the processes that tokenize may be more on one node."""
    shared = [*FLAGS, "--output-dir", str(nodes / "out")]
    results = ranks.run(run_on_node, 4, [shared, [*shared, "--dataset-num-proc", "2"]], nodes, 2, join_group=False)
    assert results == [(0, "")] * 4
    names = {"checkpoints", "config.yaml", "environment.json", "finished.json", "hf", "metrics.jsonl", "report.html"}
    assert {path.name for path in (nodes / "out").iterdir()} == names


def _another_weight(node: Path) -> None:
    """One router's, of which the header tells nothing."""
    tensors = load_file(node / "model" / "model.safetensors")
    tensors["model.layers.1.block_sparse_moe.gate.weight"] += 1
    save_file(tensors, node / "model" / "model.safetensors", metadata={"format": "pt"})


def _another_config(node: Path) -> None:
    config = json.loads((node / "model" / "config.json").read_text())
    (node / "model" / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 3}))


def _fewer_layers(node: Path) -> None:
    """Which is a model that could be trained."""
    shutil.rmtree(node / "model")
    save_model(node / "model", num_hidden_layers=1)
    save_tokenizer(node / "model")


def _data(change: Callable[[list[str]], list[str]]) -> Callable[[Path], Any]:
    def rewrite(node: Path) -> None:
        (node / "data.jsonl").write_text("\n".join(change((node / "data.jsonl").read_text().splitlines())))

    return rewrite


UNLIKE: dict[str, tuple[Callable[[Path], Any] | list[str], list[str]]] = {
    # of the second node: what is done to its files, or further flags; and what is said
    "weights": (_another_weight, ["--model", "model.safetensors: ", "samples "]),
    "config": (_another_config, ["--model", "config.json: num_experts_per_tok: 2;", "num_experts_per_tok: 3;"]),
    "layers": (_fewer_layers, ["--model", "config.json: num_hidden_layers: 2, model", "num_hidden_layers: 1, model"]),
    "no model": (lambda node: (node / "model").rename(node / "elsewhere"), ["no such directory"]),
    "data": (_data(lambda rows: [row.replace("x20", "y20") for row in rows]), ["--dataset", "tokens in order "]),
    "number of samples": (_data(lambda rows: rows[:-1]), ["--dataset", "samples 50,", "samples 49,"]),
    "order": (_data(lambda rows: rows[::-1]), ["--dataset", "the same samples in another order"]),
    "arrangement": (["--ep-size", "1"], ["--ep-size 2;", "--ep-size 1;"]),
    "what is trained on": (["--train-on", "all"], ['--train-on "assistant";', '--train-on "all";']),
    "number of steps": (["--max-steps", "3"], ["--max-steps 2;", "--max-steps 3;"]),
    "unknown flag": (["--ep-sise", "2"], ["unknown flag --ep-sise"]),
    "output directory": (["--output-dir", "out"], ["--output-dir", "is not shared", "--save-steps 0"]),
}


MET_FIRST = ["weights", "layers", "no model", "data", "arrangement", "output directory"]


@pytest.mark.parametrize("name", tiered(MET_FIRST, slow=[name for name in UNLIKE if name not in MET_FIRST]))
def test_unlike_nodes_are_named(ranks: RankPool, nodes: Path, name: str) -> None:
    """Every rank ends with 2, one line on each node names the thing and the nodes; nothing is written."""
    change, said = UNLIKE[name]
    shared = [*FLAGS, "--output-dir", str(nodes / "out")]
    if callable(change):
        change(nodes / "node-1")
    argv = [shared, shared if callable(change) else [*shared, *change]]
    results = ranks.run(run_on_node, 2, argv, nodes, 1, timeout=120, join_group=False)
    assert [code for code, _ in results] == [2, 2], results
    for _, errors in results:
        (line,) = (line for line in errors.splitlines() if "error:" in line)
        assert all(words in line for words in said), line
    # who met an error alone tells it as ever; the other node says where
    lone = name in ("no model", "unknown flag")
    assert "node 1 (" in results[0][1]
    assert lone or all("rank 0" in errors and "rank 1" in errors for _, errors in results), results
    assert not list(nodes.glob("out/*"))
    assert not list(nodes.glob("node-1/out"))


def test_nodes_with_unlike_image_processors(ranks: RankPool, tmp_path: Path) -> None:
    """Of which their samples say nothing."""
    for node in ("node-0", "node-1"):
        save_seeing(tmp_path / node / "model")
        write_lines(tmp_path / node / "data.jsonl", [asked("say", image=data_url(drawn(70, 40, 0)))] * 8)
    file = tmp_path / "node-1" / "model" / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_mean": [0.0, 0.0, 0.0]}))
    flags = [*FLAGS, "--images", "--output-dir", str(tmp_path / "out")]
    results = ranks.run(run_on_node, 2, [flags] * 2, tmp_path, 1, timeout=120, join_group=False)
    for code, errors in results:
        assert code == 2
        assert "the image processors of --model differ between nodes: on node 0 (" in errors
        assert "image_processor.image_mean: [0.0, 0.0, 0.0]" in errors


@pytest.mark.slow
def test_unshared_output_without_checkpoints(ranks: RankPool, nodes: Path) -> None:
    """All that is then written rank 0 writes."""
    argv = [[*FLAGS, "--output-dir", "out", "--save-steps", "0"]] * 2
    assert ranks.run(run_on_node, 2, argv, nodes, 1, join_group=False) == [(0, "")] * 2
    assert (nodes / "node-0" / "out" / "hf" / "model.safetensors").exists()
    assert not (nodes / "node-1" / "out").exists()


@pytest.mark.slow
def test_a_tensor_parallel_group_on_two_nodes(ranks: RankPool, nodes: Path) -> None:
    """Is refused on all ranks before weights are read, unless their links are said to be fast."""
    shared = [*FLAGS, "--output-dir", str(nodes / "out"), "--save-steps", "0", "--tp-size", "2"]
    for code, errors in ranks.run(run_on_node, 2, [shared] * 2, nodes, 1, join_group=False):
        (line,) = (line for line in errors.splitlines() if "error:" in line)
        assert code == 2
        for words in ("--tp-size 2: a group has node 0 (", "), rank 0 and node 1 (", "use --tp-size 1. "):
            assert words in line
    assert not list(nodes.glob("out/*"))
    fast = [*shared, "--ranks-per-node", "2"]
    assert ranks.run(run_on_node, 2, [fast] * 2, nodes, 1, join_group=False) == [(0, "")] * 2


@pytest.mark.slow
def test_two_torchruns_with_unlike_weights(nodes: Path) -> None:
    """As two machines start it: both end, and say the same."""
    save_model(nodes / "node-1" / "model", seed=1)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank"]
    script, out = str(ROOT / "train_ep.py"), str(nodes / "out")
    more: Any = dict(env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, stderr=subprocess.PIPE)
    processes = [
        subprocess.Popen([*launch, str(node), script, *FLAGS, "--output-dir", out], cwd=nodes / f"node-{node}", **more)
        for node in (0, 1)
    ]
    for process in processes:
        try:
            _, errors = process.communicate(timeout=300)
        finally:
            process.kill()
        assert process.returncode != 0
        # before torchrun's own lines and in the last of them
        assert errors.count("train_ep.py: error: the files of --model differ between nodes: ") == 2, errors
        assert "model.safetensors" in errors
        assert "exitcode  : 2" in errors

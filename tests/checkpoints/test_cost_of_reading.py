"""What is read of a checkpoint is read once, from files that are opened a few times, however many experts it has."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

import expertmesh
from expertmesh.checkpoints.adapters.adapter import Adapter
from expertmesh.checkpoints.adapters.initial import load_adapter
from expertmesh.checkpoints.hf.names import Names
from expertmesh.sharding.state import adapters_of, local_tensor
from expertmesh.training.model_setup.lora_targets import lora_of
from tests.checkpoints.commands import run
from tests.distributed.pool import RankPool
from tests.encoded import save_fp8
from tests.families.configs import tiny_model
from tests.tiny import save_tokenizer
from tests.untrained import save_deepseek

FEW, MANY = 8, 32
OPENS = 24
"""More than any command opens files of weights of these models, which have two or three."""
BESIDE = 60_000
"""Bytes of configs and tokenizers, at most."""


@dataclass
class Reads:
    """opens: of files of weights. num_bytes: that this process has read, of any file."""

    opens: int = 0
    num_bytes: int = 0


_counted: list[Reads] = []


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _counted and re.search(r"\.(safetensors|distcp)$", str(arguments[0])):
        _counted[-1].opens += not str(arguments[1] or "").startswith("w") and not (arguments[2] or 0) & os.O_WRONLY


@cache
def _listen() -> None:
    """Once a process, as a hook stays."""
    sys.addaudithook(_on_event)


def _num_bytes() -> int:
    with open("/proc/self/io") as file:
        return int(file.readline().removeprefix("rchar:"))


@contextmanager
def counted() -> Iterator[Reads]:
    """What is read meanwhile. The library of safetensors maps files, of which the kernel counts nothing: its opens are
    counted here, and that of a tensor's values it reads none is what `test_the_library_reads_headers_alone` says."""
    _listen()
    reads = Reads()
    original = safetensors.safe_open
    users = [m for m in list(sys.modules.values()) if getattr(m, "safe_open", None) is original]

    def opening(*given: Any, **named: Any) -> Any:
        reads.opens += 1
        return original(*given, **named)

    for module in users:
        vars(module)["safe_open"] = opening
    _counted.append(reads)
    before = _num_bytes()
    try:
        yield reads
    finally:
        reads.num_bytes = _num_bytes() - before
        _counted.remove(reads)
        for module in users:
            vars(module)["safe_open"] = original


def size_of(path: Path, pattern: str = "*.safetensors") -> int:
    return sum(file.stat().st_size for file in path.rglob(pattern))


def saved(path: Path, num_experts: int, **changes: Any) -> Path:
    model: Any = tiny_model("qwen3_moe", 0, num_experts=num_experts, **changes)
    model.save_pretrained(path, max_shard_size=f"{sum(p.nbytes for p in model.parameters()) * 3 // 5000}KB")
    save_tokenizer(path)
    return path


def _write_all(base: Path, out: Path) -> list[dict[str, Reads]]:
    """A training checkpoint of two ranks, adapters in both forms, and what each rank reads to begin as one of them."""
    engine = expertmesh.load(str(base), use_cpu=True, ep_size=2)
    engine.saves_to(out, None)
    assert engine.saver is not None
    engine.saver.save(engine.model, engine.optimizer, engine.progress({}, {}), copies=False)
    assert engine.saver.wait() is None
    found: dict[str, Reads] = {}
    for form in ("per-expert", "packed"):
        given: dict[str, Any] = {"use_cpu": True, "ep_size": 2, "adapter": "lora", "lora_rank": 4}
        engine = expertmesh.load(str(base), **given, adapter_format=form, lora_targets="all-linear")
        for part in adapters_of(engine.model).values():
            torch.nn.init.normal_(local_tensor(part.tensor))
        engine.export(out / form)
        adapter, lora = Adapter(out / form, Names(engine.model)), lora_of(engine.config)
        before = [local_tensor(part.tensor).clone() for part in adapters_of(engine.model).values()]
        with counted() as found[form]:
            load_adapter(engine.model, adapter, lora, engine.topology)
        after = [local_tensor(part.tensor) for part in adapters_of(engine.model).values()]
        assert all(map(torch.equal, before, after))
        found[f"own rows of {form}"] = Reads(0, sum(tensor.nbytes for tensor in after))
    return [found]


@dataclass
class Made:
    """root: has base, other files made of it, and what ranks wrote. ranks: what each of them read."""

    root: Path
    ranks: list[dict[str, Reads]]


@pytest.fixture(scope="module", params=[pytest.param(FEW, marks=pytest.mark.slow), MANY])
def made(request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp(f"experts-{request.param}")
    saved(root / "base", request.param)
    (root / "out").mkdir()
    read = [found for each in ranks.run(_write_all, 2, root / "base", root / "out") for found in each]
    run("convert", root / "base", root / "shards", "--ep-size", 2)
    (root / "fp8").mkdir()
    save_fp8(tiny_model("qwen3_moe", 0, num_experts=request.param), root / "fp8")
    save_tokenizer(root / "fp8")
    save_deepseek(root / "carrying", n_routed_experts=request.param)
    return Made(root, read)


CHECKPOINT = "out/step-00000000"
COMMANDS: dict[str, tuple[tuple[str, ...], Callable[[Path, int], int]]] = {
    # arguments in the root, and what is to be read where so much was written
    "HF to EP shards": (("convert", "base", "OUT", "--ep-size", "2"), lambda root, written: written),
    "HF to HF": (("export", "base", "OUT"), lambda root, written: written),
    "EP shards to HF": (("export", "shards", "OUT"), lambda root, written: written + size_of(root / "shards", "*")),
    "training checkpoint to HF": (
        ("export", CHECKPOINT, "OUT"),
        lambda root, written: written + size_of(root / CHECKPOINT, "*"),
    ),
    "verify": (
        ("verify", CHECKPOINT, "base"),
        lambda root, _: 2 * size_of(root / "base") + size_of(root / CHECKPOINT, "*"),
    ),
    "merge, per expert": (
        ("merge", "base", "out/per-expert", "OUT"),
        lambda root, written: written + 2 * size_of(root / "out/per-expert"),
    ),
    "merge, packed": (
        ("merge", "base", "out/packed", "OUT"),
        lambda root, written: written + 2 * size_of(root / "out/packed"),
    ),
    "verify adapters": (
        ("verify", "out/per-expert", "out/per-expert"),
        lambda root, _: 2 * size_of(root / "out/per-expert"),
    ),
    "codes to EP shards": (("convert", "fp8", "OUT", "--ep-size", "2"), lambda root, written: written),
    "codes, dequantized": (("export", "fp8", "OUT"), lambda root, _: size_of(root / "fp8")),
    # what is written, and to compare with it, what was there
    "codes, quantized again": (
        ("export", "fp8", "OUT", "--export-encoding", "source"),
        lambda root, written: 2 * written,
    ),
    "untrained to EP shards": (("convert", "carrying", "OUT", "--ep-size", "2"), lambda root, written: written),
    "untrained to HF": (("export", "carrying", "OUT"), lambda root, written: written),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_reads_each_byte_once(made: Made, name: str, tmp_path: Path) -> None:
    """And a checkpoint that has checksums once more, before anything is written; an adapter too."""
    arguments, expected = COMMANDS[name]
    out = tmp_path / "out"
    words = [
        str(out if word == "OUT" else made.root / word if (made.root / word).exists() else word) for word in arguments
    ]
    with counted() as reads:
        run(*words, *(["--workers", "1"] if "OUT" in arguments else []))
    tables = size_of(out, "*.json")
    assert reads.num_bytes <= 1.1 * expected(made.root, size_of(out)) + BESIDE + tables
    assert 0 < reads.opens <= OPENS


def test_a_merge_computes_in_its_workers_alone(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own threads, times the workers, would wait for one another: five times the CPU seconds of a merge."""
    monkeypatch.chdir(made.root)
    found: set[int] = set()
    double = torch.Tensor.double

    def counting(self: torch.Tensor) -> torch.Tensor:
        found.add(torch.get_num_threads())
        return double(self)

    monkeypatch.setattr(torch.Tensor, "double", counting)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run("merge", "base", "out/per-expert", tmp_path / "out", "--workers", "2")
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert (found, after) == ({1}, 3)


@pytest.mark.parametrize("form", ["per-expert", "packed"])
def test_a_rank_reads_its_own_rows_of_an_adapter(made: Made, form: str) -> None:
    """Of a packed one all of B, in whose rows experts alternate."""
    for found in made.ranks:
        whole = 0 if form == "per-expert" else size_of(made.root / "out" / form)
        assert found[form].num_bytes <= max(1.1 * found[f"own rows of {form}"].num_bytes, whole)
        assert 0 < found[form].opens <= 1
    written = size_of(made.root / "out" / form)
    assert form == "packed" or all(found[form].num_bytes < 0.6 * written for found in made.ranks)


def test_the_library_reads_headers_alone() -> None:
    """What it maps into memory, nobody counts."""
    root = Path(expertmesh.__file__).parent
    files = [file for part in root.iterdir() if part.is_dir() for file in part.rglob("*.py")]
    users = {file.relative_to(root).as_posix() for file in files if "safe_open" in file.read_text()}
    assert users == {"checkpoints/hf/headers.py"}

"""Files that a run reads are facts as settings are: a change of any is said, or seen in what nodes and a resumed run
compare, although everything is in the cache."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime.process import Ranks
from expertmesh.training.config.train_config import TrainConfig, parse_config
from expertmesh.training.start.consistency import compare_data, compare_models
from expertmesh.training.start.fingerprints import Facts
from expertmesh.training.start.inputs import make_prompts, open_model, read_inputs
from expertmesh.training.tasks.registry import task_of
from tests.distributed.pool import RankPool
from tests.pictures import TEMPLATE, asked, content_of, drawn, save_seeing, write_lines
from tests.tiers import tiered
from tests.tiny import save_model, save_tokenizer

Change = Callable[[Path], object]


def facts_of(config: TrainConfig) -> Facts:
    """What nodes compare before the first step, and a resumed run."""
    ranks = Ranks(0, 1, torch.device("cpu"), dist.HashStore())
    source, task = open_model(config), task_of(config)
    facts = compare_models(config, source, ranks)
    inputs = read_inputs(config, source, ranks, task.check)
    facts |= compare_data(inputs, make_prompts(config, inputs), 1, ranks)
    return facts | task.open(config, source, inputs, ranks)


def entry(name: str, value: Any) -> Change:
    """Another one in a JSON file."""
    return lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))


def words(old: str, new: str) -> Change:
    def change(file: Path) -> None:
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    return change


def weights(file: Path) -> None:
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + 1
    save_file(tensors, file, metadata={"format": "pt"})


def link(target: str) -> Change:
    def change(file: Path) -> None:
        file.unlink()
        file.symlink_to(file.parent / target)

    return change


def picture(seed: int) -> Change:
    return lambda file: file.write_bytes(content_of(drawn(70, 40, seed)))


def with_images(root: Path) -> Callable[[], TrainConfig]:
    """Settings in a file, data and an evaluation with images, one of them a link."""
    save_seeing(root / "model")
    for seed, name in enumerate(("first.png", "second.png", "eval.png")):
        (root / "data").mkdir(exist_ok=True)
        picture(seed)(root / "data" / name)
    (root / "data" / "link.png").symlink_to(root / "data" / "first.png")
    part = [{"type": "image", "path": "link.png"}, {"type": "text", "text": "say what"}]
    write_lines(root / "data" / "train.jsonl", [asked(part), asked("say", image="second.png")])
    write_lines(root / "data" / "eval.jsonl", [asked("say", image="eval.png")])
    places = {
        name: str(root / "data" / f"{file}.jsonl") for name, file in (("dataset", "train"), ("eval_dataset", "eval"))
    }
    said = {"model": str(root / "model"), "images": True, "max_seq_length": 256, "use_cpu": True, **places}
    (root / "run.yaml").write_text(json.dumps(said))
    return lambda: parse_config(["--config", str(root / "run.yaml"), "--output-dir", str(root.parent / "out")])


def taught(root: Path) -> Callable[[], TrainConfig]:
    """A tokenizer and a template of its own, a directory with a card, and a teacher."""
    for name in ("model", "teacher"):
        save_model(root / name)
    for name in ("teacher", "tokenizer"):
        save_tokenizer(root / name)
    (root / "template.jinja").write_text(TEMPLATE)
    for name in ("one", "two"):
        write_lines(root / "data" / f"{name}.jsonl", [asked("say what", f"hello {name}")])
    (root / "data" / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: one.jsonl\n---\n")
    places: dict[str, Any] = {name: str(root / name) for name in ("model", "teacher", "tokenizer")}
    return lambda: TrainConfig(
        **places, dataset=[str(root / "data")], chat_template=str(root / "template.jinja"), use_cpu=True
    )


def adapted(root: Path) -> Callable[[], TrainConfig]:
    """An adapter to begin with, and new tokens."""
    save_model(root / "model")
    save_tokenizer(root / "model")
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    save_file({"lora": torch.zeros(4)}, root / "adapter" / "adapter_model.safetensors")
    (root / "tokens.txt").write_text("<one>\n<two>\n")
    write_lines(root / "train.jsonl", [asked("say <one>", "hello <two>")])
    more: dict[str, Any] = {"adapter": "lora", "train_new_tokens": True, "use_cpu": True}
    return lambda: TrainConfig(
        model=str(root / "model"),
        dataset=[str(root / "train.jsonl")],
        init_adapter=str(root / "adapter"),
        add_tokens=[str(root / "tokens.txt")],
        **more,
    )


SAYS_NOTHING = ("generation_config.json",)
"""Files that a run copies, or that say how a model is used after it."""
MODEL: dict[str, Change] = {"model/config.json": entry("initializer_range", 0.5), "model/model.safetensors": weights}


def tokenizer_in(folder: str) -> dict[str, Change]:
    other = entry("normalizer", {"type": "Replace", "pattern": {"String": "s"}, "content": "t"})
    return {f"{folder}/tokenizer.json": other, f"{folder}/tokenizer_config.json": lambda file: file.write_text("{")}


RUNS: dict[str, tuple[Callable[[Path], Callable[[], TrainConfig]], dict[str, Change]]] = {
    "images": (
        with_images,
        MODEL
        | tokenizer_in("model")
        | {
            "model/preprocessor_config.json": entry("image_mean", [0.0, 0.0, 0.0]),
            "model/chat_template.jinja": words("<s>", "<s> "),
            "data/first.png": picture(7),
            "data/second.png": link("first.png"),
            "data/link.png": link("eval.png"),
            "data/eval.png": picture(8),
            "data/train.jsonl": words("say what", "say hello"),
            "data/eval.jsonl": words("say", "hello"),
            "run.yaml": entry("train_on", "all"),
        },
    ),
    "taught": (
        taught,
        MODEL
        | tokenizer_in("tokenizer")
        | tokenizer_in("teacher")
        | {
            "teacher/tokenizer.json": words('"</s>"', '"</t>"'),  # of which the teacher takes the vocabulary alone
            "teacher/config.json": entry("initializer_range", 0.5),
            "teacher/model.safetensors": weights,
            "template.jinja": words("<s>", "<s> "),
            "data/one.jsonl": words("say what", "say hello"),
            "data/README.md": words("one.jsonl", "two.jsonl"),
            "data/two.jsonl": words("say what", "say hello"),
        },
    ),
    "adapted": (
        adapted,
        MODEL
        | tokenizer_in("model")
        | {
            "adapter/adapter_config.json": entry("r", 3),
            "adapter/adapter_model.safetensors": weights,
            "tokens.txt": words("<one>", "<uno>"),
            "train.jsonl": words("say", "world"),
        },
    ),
}


_opened: list[set[str]] = []
"""Paths that Python opens, where they are recorded."""


def _note(event: str, arguments: Any) -> None:
    if event == "open" and _opened and isinstance(arguments[0], str):
        _opened[-1].add(arguments[0])


def walk(run: str, root: Path) -> tuple[set[str], dict[str, str]]:
    """(the files of a run that it opens, what is seen of the change of each: an error, or the facts that differ)."""
    make, changes = RUNS[run]
    config = make(root)
    sys.addaudithook(_note)
    _opened.append(set())
    before = facts_of(config())
    opened = _opened.pop()
    found = {}
    for name, change in changes.items():
        file = root / name
        content = file.read_bytes()
        change(file)
        try:
            after = facts_of(config())
        except ExpertMeshError as error:
            found[name] = str(error)
            file.write_bytes(content)
            continue
        differing = [of for of in before.keys() | after.keys() if before.get(of) != after.get(of)]
        found[name], before = ", ".join(sorted(differing)), after
    within = {Path(path) for path in opened if Path(path).is_relative_to(root)}
    return {str(path.relative_to(root)) for path in within if path.is_file()}, found


@pytest.mark.parametrize("run", tiered(["images"], ["taught", "adapted"]))
def test_a_change_of_any_file_is_seen(run: str, ranks: RankPool, tmp_path: Path) -> None:
    root = tmp_path / "read"
    root.mkdir()
    ((opened, found),) = ranks.run(walk, 1, run, root)
    there = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    named = {name for name in there | opened if Path(name).name not in SAYS_NOTHING}
    assert named == found.keys()
    assert [name for name, said in found.items() if not said] == []

"""The demo's tasks, what it makes of a model that answers too few of them, and what the root README shows of it."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks import demo
from expertmesh import train_ep
from tests.distributed.pool import RankPool
from tests.test_readmes import ROOT, blocks


def test_held_out_rows_are_not_trained_on(tmp_path: Path) -> None:
    held_out = demo.write_tasks(tmp_path / "train.jsonl", seed=0)
    trained = {json.loads(line)["prompt"] for line in (tmp_path / "train.jsonl").read_text().splitlines()}
    for name, rows in held_out.items():
        assert len(rows) == demo.HELD_OUT_ROWS, name
        assert trained.isdisjoint(prompt for prompt, _ in rows), name
    assert held_out != demo.write_tasks(tmp_path / "other.jsonl", seed=1)


def test_a_tasks_name_is_one_token(tmp_path: Path) -> None:
    demo.write_tasks(tmp_path / "train.jsonl", seed=0)
    demo.save_tokenizer(tmp_path / "tokenizer", tmp_path / "train.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for text, length in (("reverse abc\ncba", 8), ("07+35\n42", 8)):
        tokens = tokenizer(text)["input_ids"]
        assert len(tokens) == length
        assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize(("share", "code"), [(0.84, 1), (0.85, 0)])
def test_fails_where_one_task_is_not_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], share: float, code: int
) -> None:
    shares = dict.fromkeys(demo.TASKS, (1.0, "answer")) | {"sum": (share, "answer")}
    monkeypatch.setattr(demo, "make_inputs", lambda *_: {name: [("prompt", "answer")] for name in demo.TASKS})
    monkeypatch.setattr(demo, "train", lambda *_: None)
    monkeypatch.setattr(demo, "accuracy", lambda *_: shares)
    assert demo.main(["--output-dir", str(tmp_path / "out")]) == code
    assert ("right after training: 84% of 'sum'" in capsys.readouterr().err) == bool(code)


@pytest.mark.slow
def test_the_root_readmes_example(ranks: RankPool, tmp_path: Path) -> None:
    """Each line that it shows is one that the command prints, but for figures; in two steps in place of 400."""
    model, data, run = tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "run"
    demo.make_inputs(model, data, num_rows=2000)
    (shown,) = (block for block in blocks(ROOT / "README.md", "text") if block.startswith("model "))
    (command,) = (block for block in blocks(ROOT / "README.md", "sh") if "demo-run/model" in block)
    argv = command.replace("\\\n", " ").partition("train_ep.py")[2].replace("configs/", f"{ROOT}/configs/").split()
    argv = [word.replace("demo-run", str(tmp_path)) for word in argv]
    argv += ["--use-cpu", "--max-steps", "2", "--logging-steps", "1"]
    printed = ranks.run(_printed, 4, argv, join_group=False)[0].replace(str(tmp_path), "demo-run")
    assert run.is_dir()
    assert model.is_dir()
    assert {_without_figures(line) for line in shown.splitlines()} <= set(map(_without_figures, printed.splitlines()))


def _without_figures(line: str) -> str:
    """Without the widths of columns either, which depend on the figures."""
    return " ".join(re.sub(r"\d[\d,.]*(e[+-]?\d+)?k?", "#", line).split())


def _printed(argv: list[str]) -> str:
    """Standard output of train_ep.py on this rank."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert train_ep.main(argv) == 0
    return printed.getvalue()

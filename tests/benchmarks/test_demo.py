"""The demo's tasks, and what it makes of a model that answers too few of them."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks import demo


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
    monkeypatch.setattr("sys.argv", ["demo", "--output-dir", str(tmp_path / "out")])
    assert demo.main() == code
    assert ("right after training: 84% of 'sum'" in capsys.readouterr().err) == bool(code)

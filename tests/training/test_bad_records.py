"""Records that cannot be used: told together, or left out with --skip-bad-records; and lengths in --preview."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import parse_config
from expertmesh.training.data.chat import set_chat_template
from expertmesh.training.data.data_files import open_files
from expertmesh.training.data.labels import LABELLED_ANSWERS
from expertmesh.training.data.lengths import lines_of_lengths
from expertmesh.training.data.pairs import PAIRS
from expertmesh.training.data.preview import describe_origin, warnings_of
from expertmesh.training.data.record_kinds import CONVERSATIONS, PIECES, SPLIT_TURNS
from expertmesh.training.data.sample_cache import load_samples
from expertmesh.training.data.samples import Samples
from expertmesh.training.data.stream import Stream, StreamPosition, place_in
from expertmesh.training.data.tokenizing import DataOptions
from expertmesh.training.engine.model_card import tell_left_out
from expertmesh.training.start.inputs import data_options


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    set_chat_template(tokenizer, "mistral")
    return tokenizer


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def load(tokenizer: Any, file: Path, skipped: int = 0, **settings: Any) -> Samples:
    options = DataOptions(200, skip_bad_records=skipped, **settings)
    return load_samples("--dataset", [str(file)], tokenizer, options, 0)


def say(role: str, content: str = "a") -> dict[str, str]:
    return {"role": role, "content": content}


TALK = {"messages": [say("user"), say("assistant", "good")]}
JUDGED = {"messages": [say("judge"), say("assistant")]}
"""Which the template refuses."""
TEXTS = [{"text": "good"}, "{bad", {"text": "good"}, {"text": 3}, {"text": "good"}]
PAIR = {"prompt": "p", "chosen": "good", "rejected": "r"}
ANSWER = {"prompt": "p", "completion": "good", "label": True}
CASES: list[tuple[list[Any], dict[str, Any], list[str]]] = [
    (TEXTS, {}, ["line 2 is not valid JSON (", "line 4 text is 3, not text"]),
    (["{bad", *TEXTS[2:]], {}, ["line 1 is not valid JSON (", "line 3 text is 3, not text"]),
    (TEXTS, {"kind": PIECES, "truncation": "split"}, ["line 2 is not valid JSON (", "line 4 text is 3, not text"]),
    (
        [TALK, JUDGED, {"messages": []}, TALK, JUDGED],
        {"kind": SPLIT_TURNS},
        ["line 3 messages is [], not a list of messages"],
    ),
    (
        [TALK, JUDGED, JUDGED],
        {},
        ["line 2: the chat template refuses this", "line 3: the chat template refuses this"],
    ),
    (
        [PAIR, PAIR | {"chosen": 3}, PAIR, PAIR | {"chosen": [say("judge")], "rejected": [say("assistant")]}],
        {"kind": PAIRS},
        ["line 2 ", "line 4 "],
    ),
    ([ANSWER, ANSWER | {"label": "?"}, ANSWER | {"completion": 3}], {"kind": LABELLED_ANSWERS}, ["line 2 ", "line 3 "]),
    ([{"text": "good"}, {"text": "a" * 300}], {"truncation": "error"}, ["line 2: has 301 tokens"]),
]


@pytest.mark.parametrize(("case", "workers"), [*((case, 1) for case in range(len(CASES))), (0, 2), (4, 2)])
def test_they_are_told_together_or_left_out(tmp_path: Path, tokenizer: Any, case: int, workers: int) -> None:
    """Whatever the cache has of them already."""
    rows, settings, bad = CASES[case]
    settings = {"kind": CONVERSATIONS, "num_workers": workers, **settings}
    file = written(tmp_path / "data.jsonl", rows)
    with pytest.raises(ExpertMeshError) as raised:
        load(tokenizer, file, **settings)
    assert all(each in str(raised.value) for each in bad)
    assert (f"{len(bad)} of {len(rows)} records cannot be used" in str(raised.value)) == (len(bad) > 1)
    number = sum("good" not in json.dumps(row) or "judge" in json.dumps(row) or "?" in json.dumps(row) for row in rows)
    samples = load(tokenizer, file, skipped=number, **settings)
    (origin,) = samples.origins
    assert len(origin.bad) == number
    used = [tokenizer.decode(samples[at].tokens) for at in range(len(samples))]
    assert len(used) == len(rows) - number
    assert all("good" in text for text in used)
    assert f"{number} left out as they cannot be used" in describe_origin(origin)
    told = [line for line in warnings_of(origin, 200) if "left out, as it cannot be used" in line]
    assert len(told) == number
    with pytest.raises(ExpertMeshError, match="line "):
        load(tokenizer, file, **settings)
    if number > 1:
        with pytest.raises(ExpertMeshError, match="more than --skip-bad-records 1; the first"):
            load(tokenizer, file, skipped=1, **settings)


def test_the_first_ten_are_told(tmp_path: Path, tokenizer: Any) -> None:
    file = written(tmp_path / "data.jsonl", [{"text": "good"}] + ["{"] * 12)
    with pytest.raises(ExpertMeshError) as raised:
        load(tokenizer, file)
    said = str(raised.value)
    assert said.startswith(f"--dataset {file}: 12 of 13 records cannot be used; the first 10: line 2 is not valid JSON")
    assert ("line 11 is not" in said, "line 12 is not" in said) == (True, False)
    assert said.endswith("mend them, or leave them out with --skip-bad-records 12")
    (origin,) = load(tokenizer, file, skipped=12).origins
    assert warnings_of(origin, 200)[-1] == f"warning: {file}: 12 records are left out in all (--skip-bad-records)"


def test_a_format_that_no_record_has_is_told_at_once(tmp_path: Path, tokenizer: Any) -> None:
    """Without --skip-bad-records; with it, the first record that can be read says what the format is."""
    file = written(tmp_path / "data.jsonl", [{"q": "a"}, {"text": "good"}])
    with pytest.raises(ExpertMeshError, match="line 1 has the columns q; it needs one of"):
        load(tokenizer, file)
    assert [len(load(tokenizer, file, skipped=1)), load(tokenizer, file, skipped=1).origins[0].format] == [1, "text"]
    with pytest.raises(ExpertMeshError, match=r"line 1 .* nor has any other record a trained token"):
        load(tokenizer, written(tmp_path / "none.jsonl", [{"q": "a"}]), skipped=1)


def test_cells_of_a_table(tmp_path: Path, tokenizer: Any) -> None:
    (file := tmp_path / "data.csv").write_text("prompt,response\na,good\nb\nc,good\n")
    with pytest.raises(ExpertMeshError, match="line 3 has 1 cells, the first line names 2 columns"):
        load(tokenizer, file)
    assert len(load(tokenizer, file, skipped=1)) == 2


def test_bad_records_of_a_stream(tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """So many of each pass are left out, and told once; a resumed stream has the same batches, and counts on."""
    rows: list[Any] = [{"text": f"good {number}"} for number in range(12)]
    rows[3], rows[7] = "{", {"text": 1}
    file = written(tmp_path / "data.jsonl", rows)
    options = DataOptions(200, skip_bad_records=2)

    def stream(step: int = 0, begin: StreamPosition | None = None, allowed: int = 2) -> Stream:
        files = open_files("--dataset", str(file), "", "train")
        made = Stream("--dataset", files, tokenizer, replace(options, skip_bad_records=allowed), False, 3, 0)
        made.tells = True
        if begin is not None:
            made.begin_at(step, begin)
        return made

    def batch(of: Stream, step: int) -> list[list[int]]:
        return [rows[number][0].tokens for rows, number in of.batch(step, 2)]

    whole = stream()
    steps = [batch(whole, step) for step in range(12)]
    assert whole.left_out == 2
    told = capsys.readouterr().err
    assert (told.count("line 4 is not valid JSON"), told.count("line 8 text is 1")) == (1, 1)
    again = stream()
    for step in range(11):
        batch(again, step)
        if step % 3:
            continue
        place = place_in(json.loads(json.dumps(again.place(step + 1).state())))
        assert batch(stream(step + 1, place), step + 1) == steps[step + 1]
    few = stream(allowed=1)
    with pytest.raises(ExpertMeshError, match="line 8 text is 1, not text"):
        [batch(few, step) for step in range(5)]


def test_the_flag_reaches_the_data() -> None:
    config = parse_config(["--model", "m", "--dataset", "d", "--skip-bad-records", "3"])
    assert data_options(config).skip_bad_records == 3


def test_the_card_says_so() -> None:
    engine: Any = SimpleNamespace(results={})
    tell_left_out(engine, 0)
    assert engine.results == {}
    tell_left_out(engine, 1200)
    assert engine.results == {"left out": "1,200 records of the data that could not be used"}


def test_lengths_in_a_preview(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text": "a" * length} for length in (3, 5, 5, 6, 20, 90)] + [{"text": ""}]
    file = written(tmp_path / "data.jsonl", [*rows, "{"])
    options = DataOptions(16, skip_bad_records=1)
    samples = load_samples("--dataset", [str(file)], tokenizer, options, 0)
    assert (
        "\n".join(lines_of_lengths(samples.origins, 16))
        == f"""\
tokens of each data set:
  {file}: 136, of which 55 are kept; 80 (58.8%) are beyond --max-seq-length; 1 (0.7%) are of samples without a trained \
token; 1 records cannot be used

samples by their length in tokens, before any is cut:
                 1 to 1  {"█" * 13} 1
                 2 to 2   0
                 3 to 4  {"█" * 13} 1
                 5 to 8  {"█" * 40} 3
                9 to 16   0  <- --max-seq-length
               17 to 32  {"█" * 13} 1
               33 to 64   0
              65 to 128  {"█" * 13} 1

longest samples, in tokens:
           91  --dataset {file}: line 6
           21  --dataset {file}: line 5
            7  --dataset {file}: line 4
            6  --dataset {file}: line 2
            6  --dataset {file}: line 3
            4  --dataset {file}: line 1
            1  --dataset {file}: line 7

--truncation at 16 would keep of all tokens: right or left 41.2%, drop 17.6%, split 100.0%"""
    )

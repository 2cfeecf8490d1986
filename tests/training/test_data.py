"""Tokenising, batching, and the order of rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from moe import ExpertMeshError
from training import DataFormat, load_samples
from training.data import DataOrder, Sample, collate

FORMAT = DataFormat("prompt", "response", "{prompt}\\n", max_seq_length=64)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def load(file: Path, tokenizer: Any, **changes: Any) -> Any:
    return load_samples(str(file), tokenizer, replace(FORMAT, **changes))


@pytest.mark.parametrize("lines", [True, False], ids=["JSON lines", "one JSON list"])
def test_tokens_and_prompt_length(tmp_path: Path, tokenizer: Any, lines: bool) -> None:
    rows = [{"prompt": "ab", "response": "cde"}, {"prompt": "", "response": ""}]
    file = tmp_path / "data.json"
    file.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    first, second = load(file, tokenizer)
    assert tokenizer.decode(first.tokens) == "ab\ncde</s>"
    assert first.prompt_length == 3
    assert tokenizer.decode(second.tokens) == "\n</s>"


def test_truncation(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": p, "response": "ghi"}) for p in ("abcdef", "a", "")))
    samples = load(file, tokenizer, max_seq_length=4)
    assert [(len(s.tokens), s.prompt_length) for s in samples] == [(4, 4), (4, 2), (4, 1)]
    assert samples.num_cut == 3
    assert samples.num_without_target == 1
    with pytest.raises(ExpertMeshError, match="no row has a response token within --max-seq-length 2"):
        load(file, tokenizer, prompt_template="{prompt}{prompt}  ", max_seq_length=2)


def test_a_changed_file_is_read_anew(tmp_path: Path, tokenizer: Any) -> None:
    """The cache of `datasets` must not outlive what it was made from."""
    file = tmp_path / "data.jsonl"
    for response in ("cde", "fgh"):
        file.write_text(json.dumps({"prompt": "ab", "response": response}))
        assert tokenizer.decode(load(file, tokenizer)[0].tokens) == f"ab\n{response}</s>"


def test_malformed_json_list(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "data.json"
    file.write_text('[{"prompt": "a", "response": ')
    with pytest.raises(ExpertMeshError, match=r"the file is not valid JSON .*line 1 column 30"):
        load(file, tokenizer)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "a", "response": "b"}\n[1, 2]\n', "line 2 is no JSON object"),
        (b'\n{"prompt": "a", "response": "caf\xe9"}\n', "line 2 is not UTF-8 text"),
        (b" \n\n", "has no rows"),
        (b"[]", "has no rows"),
        (b"{}", "line 1 has no column 'prompt'"),
        (b'[{"prompt": "a", "response": "b"}, {"prompt": "a"}]', "row 2 has no column 'response'; found: prompt"),
        (b'{"prompt": "a", "response": 3}', "line 1: response is 3, not text"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_bad_data(tmp_path: Path, tokenizer: Any, content: bytes, said: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(content)
    with pytest.raises(ExpertMeshError, match=said):
        load(file, tokenizer)


@pytest.mark.parametrize("name", ["data[1].jsonl", "a b*.json"])
def test_text_that_looks_like_something_else(tmp_path: Path, tokenizer: Any, name: str) -> None:
    """Dates and numbers in quotes stay text, a byte order mark is no text, and a file's name is no pattern."""
    file = tmp_path / name
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "007", "response": "2024-01-01", "other": 1}\n')
    (sample,) = load(file, tokenizer)
    assert tokenizer.decode(sample.tokens) == "007\n2024-01-01</s>"


def test_targets_are_the_response_and_its_end() -> None:
    batch = collate([Sample([10, 11, 12, 13], prompt_length=2), Sample([20, 21], prompt_length=0), Sample([30, 31], 2)])
    assert batch.tokens_BS.tolist() == [[10, 11, 12, 13], [20, 21, 0, 0], [30, 31, 0, 0]]
    assert batch.is_token_BS is not None
    assert batch.is_token_BS.sum(dim=1).tolist() == [4, 2, 2]
    assert (batch.num_tokens, batch.num_targets) == (8, 3)
    assert batch.targets_BS.tolist() == [[-100, 12, 13, -100], [21, -100, -100, -100], [-100] * 4]


def test_no_sample_is_one_position_of_padding() -> None:
    batch = collate([])
    assert batch.tokens_BS.shape == (1, 1)
    assert batch.is_token_BS is not None
    assert not batch.is_token_BS.any()
    assert (batch.num_tokens, batch.num_targets) == (0, 0)


def test_no_padding_no_mask() -> None:
    assert collate([Sample([1, 2], 1), Sample([3, 4], 1)]).is_token_BS is None


def test_rows_of_a_step_do_not_depend_on_how_they_are_shared_out() -> None:
    shares = [(1, 12, 1), (1, 4, 3), (2, 6, 1), (4, 3, 1), (2, 2, 3), (4, 1, 3), (12, 1, 1)]
    orders = [DataOrder(50, world, per_device, accumulation, seed=7) for world, per_device, accumulation in shares]
    for step in range(11):  # into the third epoch; each ends in a short batch of 2 rows
        expected = sorted(orders[0].global_batch(step))
        for order in orders:
            forwards = [order.micro_batches(step, rank) for rank in range(order.world_size)]
            assert len({len(f) for f in forwards}) == 1, "ranks must make equally many forwards"
            assert sorted(row for rank in forwards for rows in rank for row in rows) == expected
            assert all(len(rows) <= order.per_device for rank in forwards for rows in rank)


def test_each_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    order = DataOrder(10, 1, 4, 1, seed=0)
    epochs = [[row for step in range(3 * e, 3 * e + 3) for row in order.global_batch(step)] for e in range(2)]
    assert all(sorted(rows) == list(range(10)) for rows in epochs)
    assert epochs[0] != epochs[1]
    assert DataOrder(10, 1, 4, 1, seed=1).global_batch(0) != order.global_batch(0)

"""Tokenising, batching, and the order of rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from moe import ExpertMeshError
from training import load_samples
from training.data import DataOrder, Sample, collate


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def load(file: Path, tokenizer: Any, **changes: Any) -> Any:
    settings = dict(
        prompt_column="prompt", response_column="response", prompt_template="{prompt}\\n", max_seq_length=64
    )
    return load_samples(str(file), tokenizer, **{**settings, **changes})


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
    file.write_text(json.dumps({"prompt": "abcdef", "response": "ghi"}))
    (sample,) = load(file, tokenizer, max_seq_length=4)
    assert len(sample.tokens) == sample.prompt_length == 4


def test_a_changed_file_is_read_anew(tmp_path: Path, tokenizer: Any) -> None:
    """The cache of `datasets` must not outlive what it was made from."""
    file = tmp_path / "data.jsonl"
    for response in ("cde", "fgh"):
        file.write_text(json.dumps({"prompt": "ab", "response": response}))
        assert tokenizer.decode(load(file, tokenizer)[0].tokens) == f"ab\n{response}</s>"


def test_malformed_json_list(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "data.json"
    file.write_text('[{"prompt": "a", "response": ')
    with pytest.raises(ExpertMeshError, match="cannot be read as JSON"):
        load(file, tokenizer)


def test_line_that_is_no_object(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n[1, 2]\n')
    with pytest.raises(ExpertMeshError, match="line 2 is no JSON object"):
        load(file, tokenizer)


def test_targets_are_the_response_and_its_end() -> None:
    batch = collate([Sample([10, 11, 12, 13], prompt_length=2), Sample([20, 21], prompt_length=0), Sample([30, 31], 2)])
    assert batch.tokens_BS.tolist() == [[10, 11, 12, 13], [20, 21, 0, 0], [30, 31, 0, 0]]
    assert batch.is_token_BS.sum(dim=1).tolist() == [4, 2, 2]
    assert batch.targets_BS.tolist() == [[-100, 12, 13, -100], [21, -100, -100, -100], [-100] * 4]


def test_no_sample_is_one_position_of_padding() -> None:
    batch = collate([])
    assert batch.tokens_BS.shape == (1, 1)
    assert not batch.is_token_BS.any()


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

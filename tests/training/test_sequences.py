"""First-fit-decreasing packing, the preview of what comes out of it, and the order of rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from expertmesh.training.data.chat import set_chat_template
from expertmesh.training.data.preview import print_preview
from expertmesh.training.data.sequences import DataOrder, make_rows, pack, wrap
from expertmesh.training.data.tokenizing import _line
from expertmesh.training.data.truncation import Tokenized, cut_to_length
from tests.training.test_data import load, write


def first_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Tokens of each row, by the definition: every sample into the first row with room, the longest first."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        row = next((r for r, used in enumerate(rows) if used + length <= capacity), len(rows))
        rows += [0] * (row == len(rows))
        rows[row] += length
    return rows


@pytest.mark.parametrize(("number", "capacity"), [(1, 7), (2, 10), (500, 100), (999, 64)])
def test_first_fit_decreasing(number: int, capacity: int) -> None:
    lengths = torch.randint(1, capacity + 1, (number,), generator=torch.Generator().manual_seed(number))
    rows = pack(lengths, capacity, seed=0)
    assert sorted(sample for row in rows for sample in row) == list(range(number))
    assert [int(lengths[row].sum()) for row in rows] == first_fit_decreasing(lengths.tolist(), capacity)


def test_packing() -> None:
    """Many short samples; an order that depends on the seed alone; a sample longer than a row is our mistake."""
    assert [len(row) for row in pack(torch.ones(100, dtype=torch.int64), 30, seed=0)] == [30, 30, 30, 10]
    lengths = torch.randint(1, 50, (300,), generator=torch.Generator().manual_seed(0))
    assert pack(lengths, 100, seed=1) == pack(lengths, 100, seed=1)
    assert pack(lengths, 100, seed=1) != pack(lengths, 100, seed=2)
    with pytest.raises(AssertionError):
        pack(torch.tensor([5, 11]), 10, seed=0)


@pytest.mark.parametrize("colour", [False, True])
def test_preview(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, colour: bool
) -> None:
    """Text as the model sees it, what is trained on apart from the rest, with colours and without."""
    if colour:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
    else:
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.delenv("FORCE_COLOR", raising=False)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    set_chat_template(tokenizer, "mistral")
    rows = [{"prompt": "[bold]hi", "response": "yo"}] * 3 + [{"prompt": "x" * 200, "response": "no"}]
    samples = load(tokenizer, write(tmp_path / "data.jsonl", rows))
    packed = make_rows(samples, True, 400, seed=0)
    print_preview(packed, DataOrder(len(packed), 1, 1, 1, seed=0), tokenizer, 400, number=1)
    shown = capsys.readouterr().out
    assert "[INST] [bold]hi [/INST]" in shown, "text of the data is no markup"
    assert shown.count("next sample") == 3
    assert "\x1b[1;32m yo</s>\x1b[0m" in shown if colour else "« yo</s>»" in shown
    tokens, targets = int(samples.lengths.sum()), int(samples.targets.sum())
    plain = "".join(part.partition("m")[2] if i else part for i, part in enumerate(shown.split("\x1b[")))
    assert f"{tokens:,}; longest sample {int(samples.lengths.max())}" in plain
    assert f"{targets:,} ({targets / tokens:.1%})" in plain
    assert "4 in 1 sequence\n" in plain
    assert "100.0% of all positions" in plain


def test_preview_shows_weights(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    set_chat_template(tokenizer, "mistral")
    asked = {"role": "user", "content": "hi"}
    rows = [{"messages": [asked, {"role": "assistant", "content": "yo", "weight": w}]} for w in (0.25, 1)]
    samples = load(tokenizer, write(tmp_path / "data.jsonl", rows))
    print_preview(make_rows(samples, True, 400, seed=0), DataOrder(1, 1, 1, 1, seed=0), tokenizer, 400)
    shown = capsys.readouterr().out
    assert "« yo</s>»×0.25\n" in shown
    assert "« yo</s>»\n" in shown
    assert "weighted     1 record: the loss is divided by the sum of weights" in shown


@pytest.mark.parametrize("num_rows", [40, 43])
@pytest.mark.parametrize("by_length", [False, True], ids=["random", "by length"])
def test_every_epoch_is_a_permutation_of_its_own(by_length: bool, num_rows: int) -> None:
    """A batch that is short comes last."""
    lengths = torch.arange(1, num_rows + 1) if by_length else None
    order, size = DataOrder(num_rows, 2, 2, 2, seed=3, lengths=lengths), -(-num_rows // 8)
    assert (order.global_batch_size, order.steps_per_epoch) == (8, size)
    epochs = [[order.global_batch(size * epoch + step) for step in range(size)] for epoch in range(3)]
    for batches in epochs:
        assert sorted(row for batch in batches for row in batch) == list(range(num_rows))
        assert [len(batch) for batch in batches[:-1]] == [8] * (size - 1)
    assert len({str(batches) for batches in epochs}) == 3
    assert DataOrder(num_rows, 2, 2, 2, seed=4, lengths=lengths).global_batch(1) != order.global_batch(1)


def test_rows_of_a_step_do_not_depend_on_how_they_are_shared_out() -> None:
    shares = [(1, 12, 1), (1, 4, 3), (2, 6, 1), (4, 3, 1), (2, 2, 3), (4, 1, 3), (12, 1, 1)]
    orders = [DataOrder(50, world, per_device, accumulation, seed=7) for world, per_device, accumulation in shares]
    for step in range(11):  # into the third epoch; each ends in a short batch of 2 rows
        expected = sorted(orders[0].global_batch(step))
        for order in orders:
            forwards = [order.micro_batches(step, rank) for rank in range(order.num_readers)]
            assert len({len(f) for f in forwards}) == 1, "ranks must make equally many forwards"
            assert sorted(row for rank in forwards for rows in rank for row in rows) == expected
            assert all(len(rows) <= order.per_device for rank in forwards for rows in rank)


@pytest.mark.parametrize("seed", range(4))
def test_group_by_length(seed: int) -> None:
    """Batches of like length, in random order, the longest sequence first; the same whatever the parallel layout."""
    lengths = torch.randint(1, 500, (1000,), generator=torch.Generator().manual_seed(0))
    order = DataOrder(1000, 4, 2, 1, seed=seed, lengths=lengths)
    batches = [lengths[order.global_batch(step)] for step in range(order.steps_per_epoch)]
    spread = torch.stack([batch.max() - batch.min() for batch in batches]).float().mean()
    assert spread < 20, "of rows chosen at random it would be near 390"
    for epoch in range(3):
        assert lengths[order.global_batch(epoch * order.steps_per_epoch)].max() == lengths.max()
    means = torch.stack([batch.float().mean() for batch in batches])
    assert 10 < (means[1:] < means[:-1]).sum() < 115, "in random order, not sorted"
    other = DataOrder(1000, 2, 2, 2, seed=seed, lengths=lengths)
    assert all(order.global_batch(step) == other.global_batch(step) for step in range(200))


@pytest.mark.parametrize("capacity", [2, 3, 7, 64])
def test_wrapped_texts_fill_every_sequence(capacity: int) -> None:
    """Each token is in one sequence, but for a last one that would be there alone; each but the first is predicted
    once."""
    lengths = torch.randint(2, 30, (200,), generator=torch.Generator().manual_seed(capacity))
    rows = wrap(lengths, capacity, seed=0)
    used = [sum(end - begin for _, begin, end in row) for row in rows]
    assert used[:-1] == [capacity] * (len(rows) - 1)
    assert 0 < used[-1] <= capacity
    pieces = sorted(piece for row in rows for piece in row)
    for text, length in enumerate(lengths.tolist()):
        own = [(begin, end) for number, begin, end in pieces if number == text]
        predicted = [at for begin, end in own for at in range(begin + 1, min(end + 1, length))]
        assert predicted == list(range(1, length))
        assert [begin for begin, _ in own] == [0, *(end for _, end in own[:-1])]
        assert own[-1][0] < length - 1, "the last token predicts nothing"
    assert wrap(lengths, capacity, seed=0) == rows != wrap(lengths, capacity, seed=1)


def test_targets_are_what_a_token_comes_before() -> None:
    """Nothing predicts the first token, and what is cut off is no target."""
    texts = [Tokenized([5, 6, 7], [True, False, True], {7}), Tokenized([5, 6, 7, 8], [True] * 4, {8})]
    lines = [_line(part, {7, 8}, False) for text in texts for part in cut_to_length(text, "right", 3)]
    assert [line["num_targets"] for line in lines] == [1, 2]
    assert [line["length"] for line in lines] == [3, 3]
    assert [line["is_cut"] for line in lines] == [False, True]
    assert [line["ends"] for line in lines] == [[7], []]

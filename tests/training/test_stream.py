"""`--streaming` without ranks: windows and batches, where they stand, and what is refused."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.chat import set_chat_template
from expertmesh.training.data.data_files import RowSource, open_files
from expertmesh.training.data.record_kinds import SPLIT_TURNS
from expertmesh.training.data.sample_cache import load_samples
from expertmesh.training.data.samples import Sample
from expertmesh.training.data.sequences import DataOrder
from expertmesh.training.data.stream import Stream, StreamPosition, place_in
from expertmesh.training.data.tokenizing import DataOptions
from expertmesh.training.start.inputs import _read_samples
from tests.tiers import tiered

RECORDS = (7, 5, 9)
"""Of each file."""
ALL = [f"r{file}-{number}" for file, count in enumerate(RECORDS) for number in range(count)]
UNTRAINED = "r1-2"


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def lay_out(path: Path) -> list[RowSource]:
    path.mkdir(exist_ok=True)
    for file, count in enumerate(RECORDS):
        names = [f"r{file}-{number}" for number in range(count)]
        rows = [{"text": "x" if name == UNTRAINED else f"{name}:{'y' * (int(name[-1]) * 3)}"} for name in names]
        (path / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_files("--dataset", str(path), "", "train")


def stream_of(path: Path, tokenizer: Any, size: int = 6, seed: int = 3, packing: bool = False) -> Stream:
    files = lay_out(path)
    assert [file.name for file in files] == [str(path / f"{number}.jsonl") for number in range(3)]
    tokenizer.eos_token = None
    return Stream("--dataset", files, tokenizer, DataOptions(40), packing, size, seed)


def names_of(tokenizer: Any, batch: Any) -> list[list[str]]:
    """The names of the records in each sequence of a batch."""

    def name(sample: Sample) -> str:
        text: str = tokenizer.decode(sample.tokens)
        return text.partition(":")[0]

    return [[name(sample) for sample in rows[number]] for rows, number in batch]


@pytest.mark.parametrize("packing", [False, True], ids=["", "packed"])
def test_every_record_once_an_epoch_and_from_any_step_on(tmp_path: Path, tokenizer: Any, packing: bool) -> None:
    stream = stream_of(tmp_path / "data", tokenizer, packing=packing)
    steps = [names_of(tokenizer, stream.batch(step, 4)) for step in range(16)]
    flat = list(itertools.chain(*itertools.chain(*steps)))
    each = len(ALL) - 1
    epochs = [flat[start : start + each] for start in range(0, 3 * each, each)]
    assert all(sorted(epoch) == sorted({*ALL} - {UNTRAINED}) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3, "each is another order"
    windows = ALL[:6]
    assert sorted(epochs[0][:6]) == windows != epochs[0][:6], "shuffled within a window of 6"
    if packing:
        assert max(map(len, itertools.chain(*steps))) > 1
    for step in (9, 15):
        later = stream_of(tmp_path / "data", tokenizer, packing=packing)
        later.begin_at(step, place_in(json.loads(json.dumps(stream.place(step).state()))))
        assert later.place(step) == stream.place(step), "saved again before a batch is made"
        assert [names_of(tokenizer, later.batch(at, 4)) for at in range(step, 16)] == steps[step:]
    other = stream_of(tmp_path / "data", tokenizer, packing=packing, seed=4)
    assert [names_of(tokenizer, other.batch(step, 4)) for step in range(5)] != steps[:5]


def test_turns_as_samples(tmp_path: Path, tokenizer: Any) -> None:
    """With --split-turns: each answer once an epoch, as from the cache, and from any step on."""
    set_chat_template(tokenizer, "mistral")
    files, options = lay_out(tmp_path / "data"), DataOptions(512, kind=SPLIT_TURNS)
    for number, file in enumerate(files):
        turns = [{"role": role, "content": f"{number}{at}"} for at in range(4) for role in ("user", "assistant")]
        Path(file.name).write_text("".join(json.dumps({"messages": turns[: 2 * n]}) + "\n" for n in (1, 4, 2)))

    def batches(begin: StreamPosition, step: int, last: int) -> tuple[list[Any], list[StreamPosition]]:
        opened = open_files("--dataset", str(tmp_path / "data"), "", "train")
        stream = Stream("--dataset", opened, tokenizer, options, packing=False, size=5, seed=3)
        stream.begin_at(step, begin)
        found, places = [], [begin]
        for at in range(step, last):
            found.append([rows[number][0].tokens for rows, number in stream.batch(at, 7)])
            places.append(stream.place(at + 1))
        return found, places

    steps, places = batches(StreamPosition(), 0, 9)
    kept = load_samples("--dataset", [str(tmp_path / "data")], tokenizer, options, 0)
    assert len(kept) == 21
    for epoch in range(3):
        seen = itertools.chain(*steps[3 * epoch : 3 * epoch + 3])
        assert sorted(seen) == sorted(sample.tokens for sample in kept)
    for step in (1, 3, 5, 8):
        assert batches(places[step], step, step + 1)[0] == [steps[step]]


def test_from_every_step_on(tmp_path: Path, tokenizer: Any) -> None:
    """Also where a window, a file or an epoch ends with a batch."""
    stream = stream_of(tmp_path / "data", tokenizer, size=5)
    places, steps = [StreamPosition()], []
    for step in range(9):
        steps.append(names_of(tokenizer, stream.batch(step, 5)))
        places.append(stream.place(step + 1))
    assert {place.file for place in places} == {0, 1, 2}
    assert {place.epoch for place in places} == {0, 1, 2}
    for step, place in enumerate(places[:-1]):
        later = stream_of(tmp_path / "data", tokenizer, size=5)
        later.begin_at(step, place)
        assert names_of(tokenizer, later.batch(step, 5)) == steps[step], step


@pytest.mark.parametrize("size", tiered([5, 100], slow=[1, 7, 21]))
def test_epochs_are_those_of_samples_in_the_cache(tmp_path: Path, tokenizer: Any, size: int) -> None:
    """Complete passes, step by step, also from a checkpoint on."""
    stream = stream_of(tmp_path / "data", tokenizer, size=size)
    order = DataOrder(num_rows=len(ALL) - 1, num_readers=1, per_device=5, accumulation=1, seed=0)
    for step in range(1, 9):
        stream.batch(step - 1, 5)
        assert stream.epoch(step) == math.floor(step / order.steps_per_epoch)
        if step not in (1, 4, 8):
            continue
        later = Stream("--dataset", stream.files, tokenizer, stream.options, packing=False, size=size, seed=3)
        later.begin_at(step, stream.place(step))
        later.batch(step, 5)
        assert later.epoch(step + 1) == math.floor((step + 1) / order.steps_per_epoch)


def test_what_cannot_be_streamed(tmp_path: Path, tokenizer: Any) -> None:
    stream = stream_of(tmp_path / "data", tokenizer)
    with pytest.raises(ExpertMeshError, match="the run to resume had its data in the cache"):
        place_in({"rows": 5, "seed": 0})
    (tmp_path / "data" / "1.jsonl").write_text('{"text": "ab"}\n{"text": 3}\n')
    files = open_files("--dataset", str(tmp_path / "data"), "", "train")
    late = Stream("--dataset", files, tokenizer, DataOptions(40), False, 3, 0)
    late.batch(0, 3)
    with pytest.raises(ExpertMeshError, match=r"1\.jsonl: line 2 text is 3, not text"):
        [late.batch(step, 3) for step in range(1, 3)]
    (tmp_path / "none.jsonl").write_text('{"text": "a"}\n' * 3)
    none = open_files("--dataset", str(tmp_path / "none.jsonl"), "", "train")
    with pytest.raises(ExpertMeshError, match="no record has a trained token within --max-seq-length 40"):
        Stream("--dataset", none, tokenizer, DataOptions(40), False, 2, 0)
    config = TrainConfig(model="m", dataset=["a.jsonl:0.5", "b.jsonl:0.5"], streaming=True, max_steps=1)
    with pytest.raises(ExpertMeshError, match="--streaming: reads one data set after the other; leave out the weights"):
        _read_samples(config, tokenizer)
    assert stream.facts["files"] == "3"
    assert int(stream.facts["bytes"].replace(",", "")) > 100


def test_a_hub_dataset_is_read_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As datasets streams it, here from files."""
    lay_out(tmp_path / "data")
    found: list[dict[str, Any]] = []
    of_files = datasets.load_dataset

    def load(name: str, config: Any, **settings: Any) -> Any:
        found.append({"name": name, "config": config, **settings})
        files = [str(tmp_path / "data" / f"{number}.jsonl") for number in range(3)]
        return of_files("json", data_files={"train": files}, split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load)
    parts = open_files("--dataset", "someone/big", "", "train")
    assert found == [{"name": "someone/big", "config": None, "split": "train", "streaming": True}]
    rows = [list(part.read()) for part in parts]
    assert [len(part) for part in rows] == list(RECORDS)
    assert rows[1][0] == ("--dataset someone/big: file 2: record 1", {"text": "r1-0:"})

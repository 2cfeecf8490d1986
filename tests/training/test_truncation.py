"""What is kept of texts longer than --max-seq-length, and what is told of the rest."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data import encoding
from expertmesh.training.data.chat import TrainOn, render, set_chat_template, tokenize
from expertmesh.training.data.data_files import open_files
from expertmesh.training.data.formats import Columns, Conversation
from expertmesh.training.data.pairs import PAIRS
from expertmesh.training.data.preview import describe_origin, warnings_of
from expertmesh.training.data.record_kinds import PIECES, SPLIT_TURNS
from expertmesh.training.data.sample_cache import load_samples
from expertmesh.training.data.samples import Samples, hold_out
from expertmesh.training.data.sequences import DataOrder, make_rows
from expertmesh.training.data.stream import Stream
from expertmesh.training.data.tokenizing import DataOptions
from expertmesh.training.data.truncation import (
    Calls,
    Tokenized,
    Truncation,
    kept_tokens,
    length_that_keeps,
    shortened,
    truncate,
)
from expertmesh.training.run.banner import data_line
from expertmesh.training.run.loop import order_facts
from expertmesh.training.start.inputs import Inputs, _read_samples, _without_effect, data_options

CALL = Calls(4, 6, 9)
"""An answer from token 4 on, whose call is of tokens 6 to 8."""


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    set_chat_template(tokenizer, "chatml")
    return tokenizer


def load(tokenizer: Any, path: Path, rows: list[Any], max_seq_length: int, **settings: Any) -> Samples:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if settings.get("truncation") == "split":
        settings["kind"] = PIECES
    return load_samples("--dataset", [str(path)], tokenizer, DataOptions(max_seq_length, **settings), 0)


@pytest.mark.parametrize(
    ("policy", "length", "most", "limit", "parts", "loses_call"),
    [
        *[(policy, 5, 5, None, [(0, 5)], False) for policy in ("right", "left", "drop", "split", "error")],
        ("right", 6, 5, None, [(0, 5)], False),
        ("right", 12, 6, None, [(0, 6)], False),
        ("right", 12, 7, None, [(0, 4)], True),
        ("right", 12, 8, None, [(0, 4)], True),
        ("right", 12, 9, None, [(0, 9)], False),
        ("right", 12, 10, 8, [(0, 4)], True),
        ("right", 12, 10, 3, [(0, 3)], False),
        ("left", 6, 5, None, [(1, 6)], False),
        ("left", 12, 6, None, [(6, 12)], False),
        ("left", 12, 5, None, [(9, 12)], True),
        ("left", 12, 4, None, [(9, 12)], True),
        ("left", 12, 3, None, [(9, 12)], False),
        ("drop", 6, 5, None, [], False),
        ("split", 6, 5, None, [(0, 5), (4, 6)], False),
        ("split", 9, 5, None, [(0, 5), (4, 9)], False),
        ("split", 10, 5, None, [(0, 5), (4, 9), (8, 10)], False),
        ("split", 3, 2, None, [(0, 2), (1, 3)], False),
    ],
)
def test_what_is_kept(
    policy: Truncation, length: int, most: int, limit: int | None, parts: list[Any], loses_call: bool
) -> None:
    text = Tokenized(range(length), [True] * length, calls=[CALL] if length == 12 else [])
    for given in (text, shortened(text, policy, most)):
        kept = truncate(given, policy, most, limit)
        assert (kept.parts, kept.loses_call) == (parts, loses_call)
        for begin, end in kept.parts:
            assert given.part(begin, end).tokens == list(range(begin, end))


@pytest.mark.parametrize("most", [2, 3, 7, 50])
def test_each_token_of_a_split_text_is_predicted_once(most: int) -> None:
    for length in range(1, 60):
        parts = truncate(Tokenized(range(length), [True] * length), "split", most).parts
        predicted = Counter(token for begin, end in parts for token in range(begin + 1, end))
        assert predicted == Counter(range(1, length))
        assert all(end - begin <= most for begin, end in parts)


def test_what_lengths_keep() -> None:
    """As by trying each --max-seq-length."""
    lengths = [(1, 3), (4, 2), (9, 1), (40, 1)]
    each = [length for length, number in lengths for _ in range(number)]
    for most in range(1, 50):
        assert (
            kept_tokens(lengths, "right", most) == kept_tokens(lengths, "left", most) == sum(min(n, most) for n in each)
        )
        assert kept_tokens(lengths, "drop", most) == sum(n for n in each if n <= most)
        assert kept_tokens(lengths, "split", most) == sum(each)
    for share in (0.0, 0.3, 0.5, 0.95, 0.99, 1.0):
        wanted = next(most for most in range(50) if kept_tokens(lengths, "right", most) >= share * sum(each))
        assert length_that_keeps(lengths, share) == wanted


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("wordy", [True, False])
def test_a_text_in_parts_has_the_tokens_of_the_text(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, special: bool, wordy: bool
) -> None:
    from tokenizers import processors

    specials = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=specials)
    text = " ".join(f"word{number}é\n" for number in range(300)) if wordy else "xyz" * 800
    whole = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    monkeypatch.setattr(encoding, "_PART", 200)
    monkeypatch.setattr(encoding, "_OVERLAP", 100)
    (found,) = encoding.encode_texts(tokenizer, [text], special)
    assert list(found.tokens) == whole["input_ids"]
    assert list(zip(found.begins, found.ends, strict=True)) == whole["offset_mapping"]
    monkeypatch.setattr(encoding, "_ALIKE", 1000)  # parts are then joined without knowing that both have the same
    (found,) = encoding.encode_texts(tokenizer, [text], special)
    assert tokenizer.decode(found.tokens) == tokenizer.decode(whole["input_ids"])


WRAPPING: dict[str, Any] = {"packing": "wrapped"}
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def test_split_text(tmp_path: Path, tokenizer: Any) -> None:
    """Each piece begins with the last token of the one before it; one EOS ends the last. Pieces of a text are held out
    together, and a stream has the same ones."""
    rows = [{"text": ALPHABET}, {"text": "short"}, {"text": "x" * 30}]
    samples = load(tokenizer, tmp_path / "data.jsonl", rows, 10, truncation="split")
    eos = tokenizer.eos_token
    assert [tokenizer.decode(sample.tokens) for sample in samples][:4] == [
        "abcdefghij", "jklmnopqrs", f"stuvwxyz{eos}", f"short{eos}",
    ]  # fmt: skip
    assert sum(samples.targets.tolist()) == sum(len(tokenizer(row["text"])["input_ids"]) for row in rows)
    assert samples.records.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    (origin,) = samples.origins
    assert (origin.split, origin.rows, origin.lost, origin.endless, origin.cut) == (3, 8, 0, 0, 0)
    assert "3 rows split into 8 samples" in describe_origin(origin)
    assert warnings_of(origin, 10) == []
    for part in hold_out(samples, 0.3, seed=1):
        texts = "".join(tokenizer.decode(sample.tokens) for sample in part)
        assert texts.count(eos) == len({*part.records.tolist()})
    files = open_files("--dataset", str(tmp_path / "data.jsonl"), "", "train")
    options = DataOptions(10, truncation="split", kind=PIECES)
    stream = Stream("--dataset", files, tokenizer, options, packing=False, size=2, seed=0)
    streamed = [rows[number][0].tokens for rows, number in stream.batch(0, 8)]
    assert sorted(streamed) == sorted(sample.tokens for sample in samples)


@pytest.mark.parametrize("max_seq_length", [5, 16, 300])
def test_wrapped_texts(tmp_path: Path, tokenizer: Any, max_seq_length: int) -> None:
    """From the table of the pieces of --truncation split, those of --packing wrapped; a stream has the same ones."""
    texts = [ALPHABET[:length] for length in (26, 3, 9, 1, 12, 5)]
    file, columns = tmp_path / "data.jsonl", Columns(weight="w")
    rows = [{"text": text, "w": 0.5} for text in texts]
    samples = load(tokenizer, file, rows, max_seq_length, truncation="split", columns=columns)
    wrapped = make_rows(samples, "wrapped", max_seq_length, seed=3)
    positions = sum(len(text) + 1 for text in texts)
    assert wrapped.lengths.tolist()[:-1] == [max_seq_length] * (len(wrapped) - 1)
    assert positions - len(wrapped) < int(wrapped.lengths.sum()) <= positions
    pieces = wrapped.samples
    assert [piece.length for piece in pieces] == pieces.lengths.tolist()
    assert [len(piece.tokens) - 1 for piece in pieces] == pieces.targets.tolist()
    assert [piece.weights for piece in pieces] == [[0.5] * len(piece.tokens) for piece in pieces]
    predicted = [token for at in range(len(wrapped)) for piece in wrapped[at] for token in piece.tokens[1:]]
    assert sorted(tokenizer.decode(predicted).split(tokenizer.eos_token)) == sorted(["", *(text[1:] for text in texts)])
    assert int(pieces.targets.sum()) == int(samples.targets.sum()) == positions - len(texts)
    (origin,) = pieces.origins
    assert (origin.rows, origin.split, origin.used, origin.lost) == (6, 0, 6, 0)
    files = open_files("--dataset", str(file), "", "train")
    options = DataOptions(max_seq_length, columns, truncation="split", kind=PIECES)
    stream = Stream("--dataset", files, tokenizer, options, packing="wrapped", size=6, seed=3)
    assert [list(stream.first.rows[at]) for at in range(len(wrapped))] == [wrapped[at] for at in range(len(wrapped))]
    line = data_line(Inputs(tokenizer, None, "", wrapped, None), DataOrder(len(wrapped), 1, 1, 1, 0))
    assert line.startswith(f"{len(pieces)} pieces packed into {len(wrapped)} sequence")
    assert line.endswith("; no token is lost")
    config = TrainConfig(model="m", dataset=[str(file)], **WRAPPING)
    assert order_facts(config, wrapped, DataOrder(len(wrapped), 1, 1, 1, 0))["packing"] == 2, "a resume is of the same"


@pytest.mark.parametrize("policy", ["right", "left", "drop", "split"])
def test_what_is_lost_is_told(tmp_path: Path, tokenizer: Any, policy: Truncation) -> None:
    """By data set, cached and streamed, packed or not; of what is left out, too."""
    rows = [{"text": "a" * 99}, {"text": "b" * 9}, {"text": "c" * 15}]
    file = tmp_path / "data.jsonl"
    samples = load(tokenizer, file, rows, 20, truncation=policy)
    (origin,) = samples.origins
    kept = {"right": 20 + 10 + 16, "left": 20 + 10 + 16, "drop": 10 + 16, "split": 126}[policy]
    assert (origin.tokens, origin.lost) == (126, 126 - kept)
    assert kept == kept_tokens(origin.lengths, policy, 20)
    assert origin.longest[0] == (100, f"--dataset {file}: line 1")
    files = open_files("--dataset", str(file), "", "train")
    options = DataOptions(20, truncation=policy, kind=PIECES if policy == "split" else SPLIT_TURNS)
    window = Stream("--dataset", files, tokenizer, options, packing=True, size=9, seed=0).first.rows.samples
    assert (window.origins[0].tokens, window.origins[0].lost) == (126, 126 - kept)
    lost = [line for line in warnings_of(origin, 20) if "are lost" in line]
    cut_or_not = {"right": "truncated at", "left": "truncated at", "drop": "left out at", "split": ""}[policy]
    assert len(lost) == bool(cut_or_not)
    share = f"{(126 - kept) / 126:.1%}"
    for line in lost:
        assert line == (
            f"warning: {file}: 1 of 3 samples are {cut_or_not} --max-seq-length 20: {126 - kept} tokens of 126 "
            f"({share}) are lost; the longest sample has 100 tokens, 94 would keep 95 % of all tokens, 99 99 %; "
            "--truncation split keeps all"
        )
    inputs = Inputs(tokenizer, None, "", make_rows(samples, True, 20, 0), None)
    line = data_line(inputs, DataOrder(len(samples), 1, 1, 1, 0))
    assert (f"{share} of all tokens are lost to --max-seq-length" in line) == bool(lost)
    config = TrainConfig(model="m", dataset=[str(file)], truncation=policy, max_seq_length=200, dataset_num_proc=1)
    assert data_options(config).truncation == policy
    told = _without_effect(config, _read_samples(config, tokenizer)[0], "")
    assert (f"--truncation {policy} has no effect" in told) == (policy != "right")


def test_a_small_loss_is_a_note(tmp_path: Path, tokenizer: Any) -> None:
    samples = load(tokenizer, tmp_path / "data.jsonl", [{"text": "a" * 21}] + [{"text": "b" * 9}] * 50, 20)
    assert [line.partition(":")[0] for line in warnings_of(samples.origins[0], 20)] == ["note"]


def test_lengths_of_pairs_are_those_of_their_sides(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "p", "chosen": "c" * 30, "rejected": "r"}, {"prompt": "p", "chosen": "c", "rejected": "d"}]
    for policy, used, lost in (("right", 2, 12), ("drop", 1, 35)):
        samples = load(tokenizer, tmp_path / "data.jsonl", rows, 20, truncation=policy, kind=PAIRS)
        (origin,) = samples.origins
        assert origin.lengths == ((3, 3), (32, 1))
        assert (len(samples), origin.tokens, origin.lost) == (used, 41, lost)


ARGUMENTS = {"query": "z" * 40}
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "I look", "tool_calls": [{"function": {"name": "f", "arguments": ARGUMENTS}}]},
    {"role": "tool", "content": "r"},
    {"role": "assistant", "content": "done"},
]


@pytest.mark.parametrize("train_on", ["assistant", "all", "last"])
@pytest.mark.parametrize("policy", ["right", "left"])
def test_no_part_of_a_call_is_trained_on(tokenizer: Any, policy: Truncation, train_on: TrainOn) -> None:
    """Wherever the cut falls, a call is trained on completely or not at all; text before it may be."""
    conversation = Conversation(CALLING, [None] * len(CALLING))
    (text,) = tokenize(tokenizer, [render(tokenizer, conversation, train_on)])
    whole = tokenizer.decode(text.tokens)
    call = whole[whole.index("<tool_call>") : whole.index("</tool_call>") + len("</tool_call>")]
    seen = Counter[str]()
    for most in range(2, text.length):
        kept = truncate(text, policy, most)
        ((begin, end),) = kept.parts
        part = text.part(begin, end)
        trained = "".join(
            tokenizer.decode([token]) if inside else "|"
            for token, inside in zip(part.tokens, part.is_trained, strict=True)
        )
        has_part = any(words in trained for words in ("tool_call>", "zz", '"name"', "arguments"))
        assert (call in trained) == has_part, (most, trained)
        seen[f"call {call in trained}, text {'look' in trained}, loses a call {kept.loses_call}"] += 1
    assert (len(seen) > 2) == (train_on != "last"), seen


def test_a_lost_call_is_told(tmp_path: Path, tokenizer: Any) -> None:
    more = [{"role": "assistant", "content": "first"}, *CALLING]
    samples = load(tokenizer, tmp_path / "data.jsonl", [{"messages": more}], 150)
    assert tokenizer.decode(samples[0].tokens).endswith("<|im_start|>assistant\n")
    (line,) = (line for line in warnings_of(samples.origins[0], 150) if "tool calls" in line)
    assert "1 of 1 record lose an answer whose tool calls do not end within --max-seq-length 150" in line


def test_what_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    cases: list[tuple[dict[str, Any], Truncation, str]] = [
        ({"messages": CALLING}, "split", "line 1 is a conversation, which .*; give --split-turns instead"),
        ({"prompt": "a", "completion": "b"}, "split", "line 1 is a prompt and its completion, which"),
        ({"text": "a" * 30}, "error", "line 1: has 31 tokens, more than --max-seq-length 20; raise that, mend"),
    ]  # fmt: skip
    for row, policy, said in cases:
        with pytest.raises(ExpertMeshError, match=said):
            load(tokenizer, tmp_path / "data.jsonl", [row], 20, truncation=policy)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"truncation": "split", "split_turns": True}, "is for plain text, and --split-turns for conversations"),
        ({"truncation": "split", "task": "dpo"}, "is for plain text, which --task dpo does not train on"),
        (WRAPPING | {"truncation": "left"}, "--packing wrapped: cuts texts; leave --truncation out"),
        (WRAPPING | {"split_turns": True}, "--packing wrapped: cuts plain text; leave --split-turns out"),
        (WRAPPING | {"task": "kto"}, "plain text, which --task kto does not train on; give --packing"),
        (WRAPPING | {"images": True}, "plain text; give --packing with --images"),
        (WRAPPING | {"teacher": "t"}, "samples; give --packing with --teacher"),
        (WRAPPING | {"loss_average": "sample"}, "samples; give --packing with --loss-average sample"),
        ({"truncation": "left", "images": True}, "--truncation left: does not work with --images"),
        ({"truncation": "left", "task": "kto"}, "--truncation left: does not work with --task kto"),
    ]
    for settings, said in refused:
        with pytest.raises(ExpertMeshError, match=said):
            TrainConfig(model="m", dataset=["d.jsonl"], **settings)
    weighted = TrainConfig(model="m", dataset=["a.jsonl:1", "b.jsonl:2"], **WRAPPING)
    with pytest.raises(ExpertMeshError, match="--packing wrapped: takes texts completely; leave out the weights"):
        _read_samples(weighted, tokenizer)

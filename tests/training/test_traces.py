"""Traces of agents in the forms in which other tools have them: what six families' templates make of each, and what of
it is trained on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expertmesh.training.data.chat import TrainOn, render, tokenize
from expertmesh.training.data.formats import Columns, Conversation, find_format, read_row
from expertmesh.training.data.preview import warnings_of
from expertmesh.training.data.sample_cache import load_samples
from expertmesh.training.data.samples import Samples
from expertmesh.training.data.tokenizing import DataOptions
from expertmesh.training.data.truncation import truncate
from tests.training.traces import (
    ASKED,
    DONE,
    ENOUGH,
    FAMILIES,
    FORMS,
    IDS,
    NAMES,
    RESULTS,
    SAID,
    SYSTEM,
    THOUGHT,
    TOOLS,
    WORDS,
    Row,
    answer,
    result,
    tokenizer_of,
    turn,
)  # fmt: skip


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any]:
    name: str = request.param
    return name, tokenizer_of(tmp_path, name)


REFUSALS = {
    # the one knows no thoughts, the other writes none in an answer without calls, be it the last
    ("DeepSeek-V3.1", "reasoning"): "leaves out the reasoning of message",
    ("Kimi-K2", "reasoning"): "leaves out the reasoning of message",
    # it writes the first call of a message alone, and no text beside a thought
    ("GPT-OSS", "calls"): "leaves out text or tool calls of message|Cannot pass both content and thinking",
    ("Kimi-K2", "ids"): "leaves out the name of a function that message . calls; if it writes the id",
}


def refusal(name: str, messages: list[Row]) -> str | None:
    """What a family's template cannot write of a conversation."""
    calls = [message.get("tool_calls", []) for message in messages]
    found = {
        "reasoning": "reasoning_content" in messages[-1],
        "calls": any(len(made) > 1 for made in calls),
        "ids": any("id" not in one for made in calls for one in made),
    }
    said = [said for (of, what), said in REFUSALS.items() if of == name and found[what]]
    return "|".join(said) or None


def read(row: Row) -> Conversation:
    found = read_row(row, find_format(row, Columns()), Columns())
    assert isinstance(found, Conversation)
    return found


def as_taken(messages: list[Row], name: str) -> list[Row]:
    """Messages as a family's template takes them: arguments as text, thoughts under another name."""
    changed = json.loads(json.dumps(messages))
    for message in changed:
        for one in message.get("tool_calls", []) if name == "DeepSeek-V3.1" else []:
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]
    return changed


def taken(name: str, tokenizer: Any) -> Iterator[tuple[str, Conversation, str]]:
    """The forms that a template can write, each with the text that transformers makes of the same in OpenAI's form."""
    for form, (row, messages) in FORMS.items():
        if refusal(name, messages) is None:
            told = dict(tools=TOOLS, tokenize=False)
            yield form, read(row), tokenizer.apply_chat_template(as_taken(messages, name), **told)


def test_each_form_is_written_as_the_same_conversation_in_openai_s(family: tuple[str, Any]) -> None:
    name, tokenizer = family
    found = {
        form: (render(tokenizer, conversation, "assistant").text, text)
        for form, conversation, text in taken(name, tokenizer)
    }
    assert found
    for form, (ours, theirs) in found.items():
        assert ours == theirs, form


def test_what_a_template_cannot_write_is_refused(family: tuple[str, Any]) -> None:
    name, tokenizer = family
    for row, messages in FORMS.values():
        said = refusal(name, messages)
        if said is not None:
            with pytest.raises(ValueError, match=said):
                render(tokenizer, read(row), "assistant")


PARTS: tuple[TrainOn, ...] = ("reasoning", "text", "calls")


def spans_by_part(tokenizer: Any, conversation: Conversation) -> dict[str, str]:
    """What of a conversation's text is trained on, by --train-on; what is not is left blank."""
    found: dict[str, str] = {}
    asked: tuple[TrainOn, ...] = ("assistant", "final", *PARTS)
    for train_on in asked:
        rendered = render(tokenizer, conversation, train_on)
        at = {i for begin, end in rendered.trained for i in range(begin, end)}
        found[train_on] = "".join(c if i in at else "\0" for i, c in enumerate(rendered.text))
    return found


def test_parts_of_answers(family: tuple[str, Any]) -> None:
    """Each word of an answer is in its part and in no other, and the parts are all of the answer."""
    name, tokenizer = family
    for form, conversation, text in taken(name, tokenizer):
        spans = spans_by_part(tokenizer, conversation)
        expected = {
            "reasoning": [THOUGHT, ENOUGH],
            "text": [SAID, DONE],
            "calls": [f"functions.{one}:" if name == "Kimi-K2" else one for one in NAMES] + [*WORDS],
        }
        answers = [message for message in conversation.messages if message["role"] == "assistant"]
        own = json.dumps([answers, IDS], ensure_ascii=False)
        for of, words in expected.items():
            for word in words:
                if word in own and word in text:
                    where = {train_on for train_on, kept in spans.items() if word in kept}
                    kept_by = {of, "assistant"} | ({"final"} if of != "reasoning" else set())
                    assert where - kept_by == set(), (form, word, where)
                    is_called = of != "calls" or any(word in json.dumps(one.get("tool_calls", [])) for one in answers)
                    assert where == kept_by or not is_called, (form, word, where)
        for given in (ASKED, SYSTEM, *RESULTS):
            assert not any(given in kept for kept in spans.values()), (form, given)
        covered = [sum(spans[of][i] != "\0" for of in PARTS) for i in range(len(text))]
        assert max(covered) == 1, form
        for i, number in enumerate(covered):
            assert not number or spans["assistant"][i] != "\0", form
        left = "".join(c if c != "\0" and not n else " " for c, n in zip(spans["assistant"], covered, strict=True))
        # the header of an answer without a thought is part of none
        assert set(left.split()) <= ({"<|channel|>final<|message|>"} if name == "GPT-OSS" else set()), form


def load(tokenizer: Any, directory: Path, rows: list[Row], **settings: Any) -> Samples:
    file = directory / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return load_samples("--dataset", [str(file)], tokenizer, DataOptions(settings.pop("most", 4096), **settings), 0)


LATER = [turn("user", "And one more?"), answer("No", "None left")]


def test_reasoning_that_a_template_drops_is_told(family: tuple[str, Any], tmp_path: Path) -> None:
    """Of earlier turns, as the family does; and where the template keeps all of it, nothing is told."""
    name, tokenizer = family
    earlier = [turn("user", ASKED), answer(SAID, THOUGHT, 1), result(0), answer(DONE, ENOUGH)]
    if name == "GPT-OSS":
        earlier[1] = answer("", THOUGHT, 1)
    rows = [{"messages": each, "tools": TOOLS} for each in (earlier + LATER, LATER, earlier)]
    if (name, "reasoning") in REFUSALS:
        for row in rows:
            row["messages"] = [*row["messages"][:-1], {**row["messages"][-1], "reasoning_content": ""}]
    lines = "\n".join(warnings_of(load(tokenizer, tmp_path, rows).origins[0], 4096))
    texts = [render(tokenizer, read(row), "reasoning").text for row in rows]
    assert THOUGHT not in texts[0]
    # some drop the thought of a call as soon as there is an answer without one
    number = 1 if THOUGHT in texts[2] else 2
    assert f"note: {tmp_path / 'data.jsonl'}: {number} of 3 records have earlier answers whose reasoning the" in lines
    assert not warnings_of(load(tokenizer, tmp_path, [rows[1]]).origins[0], 4096)


def test_a_weight_of_a_turn_and_a_part_of_it_go_together(tmp_path: Path) -> None:
    """OpenAI's weight 0 leaves a turn out, whichever part is asked for."""
    tokenizer = tokenizer_of(tmp_path, "Qwen3")
    turns = [turn("user", ASKED), answer(SAID, "", 1) | {"weight": 0}, result(0), answer("", "", 2) | {"weight": 1}]
    for train_on, expected in (("calls", "buy"), ("text", "")):
        (sample,) = load(tokenizer, tmp_path, [{"messages": [*turns, *LATER], "tools": TOOLS}], train_on=train_on)
        trained = tokenizer.decode([t for t, inside in zip(sample.tokens, sample.is_trained, strict=True) if inside])
        assert expected in trained
        assert SAID not in trained


@pytest.mark.parametrize("train_on", ["assistant", "final", "calls", "text"])
@pytest.mark.parametrize("policy", ["right", "left"])
def test_a_call_is_trained_on_completely_or_not_at_all(tmp_path: Path, train_on: Any, policy: Any) -> None:
    """Wherever it is cut; and where it is not a target, nothing more is left out than is too long."""
    # a word of the answer that stands in the call, too
    row = {"messages": [turn("user", ASKED), answer("tool", THOUGHT, 2)], "tools": TOOLS}
    tokenizer, conversation = tokenizer_of(tmp_path, "Qwen3"), read(row)
    (calls,) = tokenize(tokenizer, [render(tokenizer, conversation, "calls")])
    inside = {at for at, is_trained in enumerate(calls.is_trained) if is_trained}
    (text,) = tokenize(tokenizer, [render(tokenizer, conversation, train_on)])
    cut = 0
    for most in range(1, text.length):
        kept = truncate(text, policy, most)
        ((begin, end),) = kept.parts
        targets = {at for at in range(begin, end) if text.is_trained[at]} & inside
        assert targets in (set(), inside), (most, begin, end)
        assert end - begin == most or kept.loses_call
        cut += kept.loses_call
    assert cut == (0 if train_on == "text" else len(inside) - 1)


def test_reasoning_in_a_text_with_calls_and_what_ends_it(tmp_path: Path) -> None:
    """It is a key of its own, for templates that look for none in texts; what ends a thought ends no answer."""
    thoughts = [message.get("reasoning_content") for message in read(FORMS["Hermes"][0]).messages]
    assert thoughts == [None, THOUGHT, None, None, ENOUGH]
    conversation = read({"messages": [turn("user", ASKED), answer(DONE, ENOUGH)]})
    tokenizer = tokenizer_of(tmp_path, "GPT-OSS")
    assert not render(tokenizer, conversation, "reasoning").ends
    assert render(tokenizer, conversation, "text").ends == {"<|return|>"}

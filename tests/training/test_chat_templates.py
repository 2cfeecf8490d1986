"""Chat templates, built-in and shaped like published ones: the text, and exactly what of it is trained on."""

import itertools
import json
import random
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import trl
from tokenizers import AddedToken
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.data import chat as spans
from expertmesh.training.data.chat import render, set_chat_template
from expertmesh.training.data.formats import Columns, Conversation, find_format, read_row
from expertmesh.training.data.preview import warnings_of
from expertmesh.training.data.record_kinds import SPLIT_TURNS
from expertmesh.training.data.sample_cache import load_samples
from expertmesh.training.data.templates import BUILT_IN, NO_LONGER, at_date, built_in_template, reads_clock
from expertmesh.training.data.tokenizing import DataOptions
from expertmesh.training.data.turns import Written
from tests.tiny import save_tokenizer

# special tokens of the published tokenizers; those that are left out (<think>, <tool_call>) are none there either
SPECIAL = {
    "chatml": ["<|im_end|>", "<|im_start|>"],
    "harmony": ["<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "glm": ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    "mistral": ["</s>"],
    "olmoe": ["<|endoftext|>"],
    "gemma": ["<turn|>", "<|turn>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"]
    + ["<|tool_response>", "<tool_response|>"],
}
# not special, but in the vocabulary
ADDED = {"deepseek": ["<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]}


def tokenizer_like(directory: Path, family: str, template: str = "") -> Any:
    """With a family's special tokens, of which the first ends generation, and a template of its own if one is given."""
    save_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL[family]])
    tokenizer.add_tokens(ADDED.get(family, []))
    tokenizer.eos_token = SPECIAL[family][0]
    if family in ("chatml", "harmony", "glm"):
        tokenizer.bos_token = None
    tokenizer.chat_template = template or None
    return tokenizer


# Shaped like templates that published tokenizers bring, written anew, with what makes them awkward.

# Qwen3: thoughts of earlier turns dropped, an empty one written where the last answer has none, thoughts also taken out
# of the content, results of tools merged into one turn of the user's.
QWEN = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}
    {{- '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') }}
    {{- tools | tojson }}{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content, thought = m.content, m.reasoning_content or '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\n' if content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
# Qwen3-Thinking: the words that ask for an answer open its thought.
QWEN_THINKING = QWEN.replace(
    "'<|im_start|>assistant\n' }}{% endif %}", "'<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# DeepSeek-R1: all thoughts dropped from content, those beside it unknown, one opened by the words that ask for an
# answer; arguments put between other text, which takes strings alone; what opens results depends on the call before.
DEEPSEEK_R1 = """\
{%- set ns = namespace(tool=false, first_output=true, system='') %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.tool = false %}
        {{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>' }}
        {%- set ns.tool, ns.first_output = false, true %}
        {{- (m.content or '') + '<｜tool▁calls▁begin｜>' }}
        {%- for call in m.tool_calls %}
            {{- ('' if loop.first else '\n') + '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' }}
            {{- call.function.name + '\n```json\n' + call.function.arguments + '\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'assistant' %}
        {{- ('<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>') + m.content.split('</think>')[-1] }}
        {{- '<｜end▁of▁sentence｜>' }}
        {%- set ns.tool = false %}
    {%- elif m.role == 'tool' %}
        {%- set ns.tool = true %}
        {{- '<｜tool▁outputs▁begin｜>' if ns.first_output else '\n' }}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
        {%- set ns.first_output = false %}
    {%- endif %}
{%- endfor %}
{%- if ns.tool %}{{- '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{% endif %}
"""
# GLM-4.5: nothing closes a turn, and an empty thought stands where there is none; contents are stripped.
GLM = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\n' + (tools | tojson) }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- if loop.index0 > ns.last and m.reasoning_content %}
            {{- '\n<think>' + m.reasoning_content.strip() + '</think>' }}
        {%- else %}
            {{- '\n<think></think>' }}
        {%- endif %}
        {{- '\n' + m.content.strip() if m.content.strip() }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<tool_call>' + call.function.name + '\n' }}
            {%- for k, v in call.function.arguments.items() %}
                {{- '<arg_key>' + k + '</arg_key>\n<arg_value>' }}{{- v | tojson }}{{- '</arg_value>\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '<|observation|>' if loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- else %}
        {{- '<|' + m.role + '|>\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
"""
# GPT-OSS: thoughts under a name of their own, dropped wherever an answer follows; one call a message, and results that
# are refused without one; the end of the last answer is not that of others.
GPT_OSS = """\
{{- '<|start|>system<|message|>date<|end|>' }}
{%- if messages[0].role == 'system' %}
    {{- '<|start|>developer<|message|># Instructions\n\n' + messages[0].content + '<|end|>' }}
{%- endif %}
{%- set ns = namespace(call=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- set later = namespace(answer=false) %}
        {%- for other in messages[loop.index:] %}
            {%- if other.role == 'assistant' and not other.tool_calls %}{% set later.answer = true %}{% endif %}
        {%- endfor %}
        {%- if m.content and m.thinking %}{{- raise_exception('content and thinking beside a call') }}{% endif %}
        {%- if m.content %}
            {{- '<|start|>assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
        {%- elif m.thinking and not later.answer %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {%- set ns.call = m.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + ns.call + '<|channel|>commentary json<|message|>' }}
        {{- m.tool_calls[0].function.arguments | tojson }}{{- '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {%- if loop.last and m.thinking and not add_generation_prompt %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
        {%- set ns.call = none %}
    {%- elif m.role == 'tool' %}
        {%- if ns.call is none %}{{- raise_exception('a result without a call') }}{% endif %}
        {{- '<|start|>functions.' + ns.call + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson }}{{- '<|end|>' }}
    {%- elif m.role == 'user' %}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""
# Mistral: the system prompt and the tools stand at the last question; without a call two answers in a row are refused.
MISTRAL = """\
{%- set ns = namespace(questions=true, last=-1, system='') %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}{% endif %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != ns.questions %}{{- raise_exception('roles must alternate') }}{% endif %}
        {%- set ns.questions = not ns.questions %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if loop.index0 == ns.last %}
            {%- if tools %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
            {{- '[INST] ' + ns.system + m.content + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + m.content + '[/INST]' }}
        {%- endif %}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content.strip() + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

# Gemma 4: results of tools stand in the turn that calls these, before its text, and the answer goes on in that turn.
GEMMA_4 = """\
{%- set ns = namespace(last=-1, answered=false, before='') %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- if tools %}{{- '<|turn>system\n<|tool>' + (tools | tojson) + '<tool|><turn|>\n' }}{% endif %}
{%- for m in messages %}
    {%- if m.role != 'tool' %}
        {%- if m.role != 'assistant' or ns.before != 'assistant' %}
            {{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
        {%- endif %}
        {%- if m.reasoning_content and loop.index0 > ns.last %}
            {{- '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '<|tool_call>call:' + call.function.name + (call.function.arguments | tojson) + '<tool_call|>' }}
        {%- endfor %}
        {%- set ns.answered = false %}
        {%- for later in messages[loop.index:] if m.tool_calls %}
            {%- if later.role != 'tool' %}{% break %}{% endif %}
            {{- '<|tool_response>response:' + later.content + '<tool_response|>' }}
            {%- set ns.answered = true %}
        {%- endfor %}
        {{- m.content or '' }}
        {%- if not ns.answered %}{{- '<|tool_response>' if m.tool_calls else '<turn|>\n' }}{% endif %}
        {%- set ns.before = m.role %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<|turn>model\n' }}{% endif %}
"""

OWN = {
    "Qwen3": ("chatml", QWEN),
    "Qwen3-Thinking": ("chatml", QWEN_THINKING),
    "DeepSeek-R1": ("deepseek", DEEPSEEK_R1),
    "GLM-4.5": ("glm", GLM),
    "GPT-OSS": ("harmony", GPT_OSS),
    "Mixtral-8x22B": ("mistral", MISTRAL),
    "Gemma 4": ("gemma", GEMMA_4),
}
NO_TOOLS = ("DeepSeek-R1", "GPT-OSS")


def call(**arguments: Any) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, thought: str | None = None, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": list(calls) or None}


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


# Words repeat from message to message, so that none is found by its words.
CONVERSATIONS = {
    "turns": [user("yo"), assistant("yo"), user("yo"), assistant("yo")],
    "thoughts": [
        {"role": "system", "content": "yo"},
        user("yo"),
        assistant("yo", "yo?"),
        user("yo"),
        assistant("yo", "yo?"),
    ],
    "an empty answer": [user("yo"), assistant("", "hm")],
    "calls in an earlier turn": [
        user("1?"),
        assistant(None, None, call(a=1)),
        result("1"),
        assistant(None, None, call()),
        result("1"),
        assistant("1"),
        user("1?"),
        assistant("1"),
    ],
    "calls with thoughts": [
        user("1?"),
        assistant("so", "hm", call(a=1), call(a=2)),
        result("1"),
        result("2"),
        assistant("", "hm", call(a=3)),
        result("3"),
        assistant("3", "hm"),
    ],
    "calls last": [user("1?"), assistant("", "hm", call(a=1))],
}


def rendered(tokenizer: Any, row: dict[str, Any], train_on: Any) -> tuple[str, list[bool]]:
    """The text, and for each of its characters whether it is trained on."""
    conversation = read_row(row, find_format(row, Columns()), Columns())
    assert isinstance(conversation, Conversation)
    found = render(tokenizer, conversation, train_on)
    return found.text, [any(begin <= at < end for begin, end in found.trained) for at in range(len(found.text))]


def shown(text: str, is_trained: list[bool]) -> str:
    """The text with « and » around what is trained on."""
    marked = "".join(
        ("«" if now and not before else "»" if before and not now else "") + character
        for character, now, before in zip(text, is_trained, [False, *is_trained], strict=False)
    )
    return marked + ("»" if is_trained and is_trained[-1] else "")


def sections() -> dict[tuple[str, str], str]:
    """What chat_templates.txt has for a template and a conversation.

    « and » stand around what --train-on assistant trains on, ‹ and › around what --train-on final does; @TOOL@ is TOOL.
    """
    content = Path(__file__).with_name("chat_templates.txt").read_text(encoding="utf-8")
    found = {}
    for section in content.split("==== ")[1:]:
        heading, _, text = section.partition("\n")
        template, _, conversation = heading.partition(" / ")
        found[template, conversation] = text.removesuffix("\n").replace("@TOOL@", json.dumps(TOOL))
    return found


EXPECTED = sections()


def with_template(directory: Path, name: str) -> Any:
    """A tokenizer with a template of its own, or with a built-in one."""
    if name in OWN:
        return tokenizer_like(directory, *OWN[name])
    tokenizer = tokenizer_like(directory, name)
    set_chat_template(tokenizer, name)
    return tokenizer


def row_of(conversation: str, name: str) -> dict[str, Any]:
    """For a template; to some no tools can be told, though they write calls."""
    tools = {"tools": [TOOL]} if "call" in conversation and name not in NO_TOOLS else {}
    return {"messages": CONVERSATIONS[conversation], **tools}


PUBLISHED = sorted(path.stem for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))


def published_text(name: str) -> str:
    """A template that trl brings."""
    return (Path(trl.__file__).parent / f"chat_templates/{name}.jinja").read_text(encoding="utf-8")


def test_all_are_expected() -> None:
    assert set(EXPECTED) == {(name, conversation) for name in (*BUILT_IN, *OWN) for conversation in CONVERSATIONS}


@pytest.mark.parametrize("name", [*BUILT_IN, *OWN])
def test_what_is_trained_on(tmp_path: Path, name: str) -> None:
    tokenizer = with_template(tmp_path, name)
    for conversation, train_on in itertools.product(CONVERSATIONS, ["all", "assistant", "last", "final"]):
        row, expected = row_of(conversation, name), EXPECTED[name, conversation]
        if expected.startswith("refused: "):
            with pytest.raises(ValueError) as raised:  # noqa: PT011 - the whole message is compared
                rendered(tokenizer, row, train_on)
            assert str(raised.value) == expected.removeprefix("refused: ")
            continue
        for mark in "«»" if train_on == "final" else "‹›":
            expected = expected.replace(mark, "")
        expected = expected.replace("‹", "«").replace("›", "»").replace("«»", "")
        if train_on == "last":
            before, _, last = expected.rpartition("«")
            expected = before.replace("«", "").replace("»", "") + "«" + last
        if train_on == "all":
            expected = "«" + expected.replace("«", "").replace("»", "") + "»"
        assert shown(*rendered(tokenizer, row, train_on)) == expected, (conversation, train_on)


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_asks_for_an_answer_comes_before_it(tmp_path: Path, name: str) -> None:
    """As the built-in templates write it when text is generated, and when the answer is already registered."""
    tokenizer = with_template(tmp_path, name)
    for conversation in CONVERSATIONS:
        expected = EXPECTED[name, conversation]
        if not expected.startswith("refused"):
            messages, tools = CONVERSATIONS[conversation][:-1], row_of(conversation, name).get("tools")
            asking = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
            assert asking == "".join(c for c in expected.rpartition("«")[0] if c not in "«»‹›")


@pytest.mark.parametrize("name", ["GPT-OSS", "chatml", "Qwen3-Thinking", "GLM-4.5"])
def test_tokens(tmp_path: Path, name: str) -> None:
    """The tokens that are trained on are those of the characters that are."""
    tokenizer, conversation = with_template(tmp_path, name), "calls in an earlier turn"
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(row_of(conversation, name)))
    for train_on in ("assistant", "final"):
        options = DataOptions(max_seq_length=4096, train_on=train_on, num_workers=1)
        (sample,) = load_samples("--dataset", [str(file)], tokenizer, options, 0)
        text, is_trained = rendered(tokenizer, row_of(conversation, name), train_on)
        trained = [token for token, inside in zip(sample.tokens, sample.is_trained, strict=True) if inside]
        assert tokenizer.decode(sample.tokens) == text
        assert tokenizer.decode(trained) == "".join(c for c, inside in zip(text, is_trained, strict=True) if inside)


INLINE = assistant("<think>\nhm\n</think>\n\nyo")


def random_conversation(
    seed: int,
    says: Callable[[], str],
    name: str,
    number: int,
    kinds: str = "thoughts and tools",
    has_blanks: bool = False,
) -> list[dict[str, Any]]:
    """At least so many turns with what a template takes: tools and reasoning, and text beside calls. With blanks there
    are also empty messages, several calls, questions that come before the answer, and answers in a row."""
    chance = random.Random(seed)
    has_reasoning = "thoughts" in kinds and takes(name, "thoughts")
    has_tools = "tools" in kinds and takes(name, "calls in an earlier turn")
    has_text = name != "Mixtral-8x22B"  # which leaves text beside calls out

    def perhaps(share: float) -> str:
        return says() if not has_blanks or chance.random() < share else ""

    def thinks() -> str | None:
        return says() if has_reasoning and chance.random() < 0.45 else None

    turns = [{"role": "system", "content": says()}] if chance.random() < 0.5 else []
    while len(turns) < number:
        turns.append(user(perhaps(0.95)))
        for _ in range(chance.choice([0, 1, 1, 2, 6] if has_blanks else [0, 0, 1, 2]) if has_tools else 0):
            thought, together = thinks(), chance.choice([1, 1, 1, 2] if has_blanks else [1])
            calls = [call(**{says(): says()} if chance.random() < 0.8 else {}) for _ in range(together)]
            content = says() if not thought and has_text and chance.random() < 0.4 else ""
            turns += [assistant(content, thought, *calls), *(result(perhaps(0.9)) for _ in calls)]
        if has_blanks and turns[-1]["role"] == "tool" and chance.random() < 0.1:
            continue
        turns.append(assistant(perhaps(0.95), thinks()))
        if has_blanks and chance.random() < 0.1:
            turns.append(assistant(says()) | dict(train=False))
    return turns


def takes(name: str, conversation: str) -> bool:
    return not EXPECTED[name, conversation].startswith("refused")


@pytest.mark.parametrize("name", [*BUILT_IN, *OWN])
def test_found_by_their_place_and_not_by_their_words(tmp_path: Path, name: str) -> None:
    """What is trained on stays the same when every message says the same, be that a word of the template's."""
    tokenizer = with_template(tmp_path, name)
    for seed, word in enumerate(["assistant", "<|im_end|>"] * 2):
        words = map(f"word{{:0{len(word) - 4}}}".format, itertools.count())
        rows = [
            {"messages": random_conversation(seed, says, name, 1 + seed)}
            for says in (words.__next__, itertools.repeat(word).__next__)
        ]
        said = {turn["content"] for turn in rows[0]["messages"] if turn["role"] != "assistant"}
        for train_on in ("assistant", "final"):
            apart, alike = (rendered(tokenizer, row, train_on) for row in rows)
            assert apart[1] == alike[1], shown(*apart) + shown(*alike)
            assert not any(w in "".join(c for c, t in zip(*apart, strict=True) if t) for w in said)


def spans_or_refusal(tokenizer: Any, row: dict[str, Any], train_on: str) -> Any:
    try:
        return rendered(tokenizer, row, train_on)
    except ValueError:
        return None


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [*BUILT_IN, *OWN])
def test_few_renderings_find_what_many_do(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans that are taken over from messages of the same kind are those that each message shows by itself, of words
    with blanks at their ends, and thoughts in the content, too."""
    tokenizer, take_over = with_template(tmp_path, name), Mock(side_effect=spans._take_over)
    monkeypatch.setattr(spans, "_take_over", take_over)
    monkeypatch.setattr(spans, "_FEW", 2)
    for seed, kinds in enumerate(["", "thoughts", "tools", "thoughts and tools"]):
        chance = random.Random(seed)

        def says(chance: random.Random = chance) -> str:
            word = chance.choice(["yo", "</think>", "{{ x }}", "so\n\nso", "«", '"a": "b"'])
            return chance.choice(["", "", "", " ", "\n"]) + word + chance.choice(["", "", "", " ", "\n"])

        row = {"messages": random_conversation(seed, says, name, 24, kinds, has_blanks=True)}
        for train_on in ("assistant", "final", "all"):
            found = spans_or_refusal(tokenizer, row, train_on)
            with monkeypatch.context() as one_by_one:
                one_by_one.setattr(spans, "_FEW", 1000)
                assert found == spans_or_refusal(tokenizer, row, train_on)
    assert take_over.called


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [*BUILT_IN, *OWN])
def test_renderings_do_not_grow_with_the_conversation(tmp_path: Path, name: str) -> None:
    tokenizer, counts = with_template(tmp_path, name), []
    for turns in (6, 18):
        pair = [user("yo"), assistant("yo")]
        if takes(name, "calls in an earlier turn"):
            # one leaves text beside calls out; text that results come before is looked for call by call
            beside = "" if name in ("Mixtral-8x22B", "Gemma 4") else "so"
            for text in ("", beside):
                pair[1:1] = [assistant(text, None, call(a=1)), result("1")]
        with patch.object(Written, "write", autospec=True, side_effect=Written.write) as write:
            _, is_trained = rendered(tokenizer, {"messages": pair * turns}, "assistant")
        assert sum(now and not before for now, before in itertools.pairwise(reversed(is_trained))) >= turns - 1
        counts.append(write.call_count)
    assert counts[0] == counts[1] < 90


def test_arguments_of_the_template(tmp_path: Path) -> None:
    """A record may tell the template more, as trl has it, as JSON too; but not another template, say."""
    template = "{% for m in messages %}{{ m.content + (tail or '') + eos_token }}{% endfor %}"
    tokenizer = tokenizer_like(tmp_path, "mistral", template)
    for told in ({"tail": "!"}, '{"tail": "!"}'):
        row = {"messages": [user("a"), assistant("b")], "chat_template_kwargs": told}
        assert shown(*rendered(tokenizer, row, "assistant")) == "a!</s>«b!</s>»"
    for name in ("chat_template", "continue_final_message", "tokenize"):
        row = {"messages": [user("a"), assistant("b")], "chat_template_kwargs": {name: "{{ messages }}"}}
        with pytest.raises(ValueError, match=f"chat_template_kwargs has {name}, not a variable of a chat template"):
            rendered(tokenizer, row, "assistant")


READ_CLOCK = ["clock", *(name for name in PUBLISHED if "strftime_now" in published_text(name))]


@pytest.mark.parametrize("name", READ_CLOCK)
def test_a_date_for_the_clock(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' own clock shows it on that day."""
    own = "{{ strftime_now(form) }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = tokenizer_like(tmp_path, "mistral", own) if name == "clock" else published(tmp_path, name)
    assert reads_clock(tokenizer)
    turns = [user("a"), {"role": "assistant", "content": "b"}]
    for day in (datetime(2024, 2, 29), datetime(2031, 1, 2)):
        date = day.date().isoformat()
        forms = ["%d %b %Y", "%-d.%-m.%y", "100%% %A", "%%d", "%H:%M:%S %p", "%j%U%%%B"] if name == "clock" else [""]
        for form in forms:
            told = {"form": form} if form else {}
            ours = tokenizer.apply_chat_template(turns, tokenize=False, **told, **at_date(tokenizer, date))
            with monkeypatch.context() as patch:
                patch.setattr(chat_template_utils, "datetime", Mock(now=lambda: day))  # noqa: B023
                assert ours == tokenizer.apply_chat_template(turns, tokenize=False, **told)
    row = {"messages": turns}
    read = read_row(row, find_format(row, Columns()), Columns())
    if name != "clock" and isinstance(read, Conversation):
        assert render(tokenizer, read, "assistant", "2024-02-29").text != render(tokenizer, read, "all").text


def test_names_of_reasoning(tmp_path: Path) -> None:
    """Data and templates have several; any goes with any, also where transformers does not pass it on under all."""
    tokenizers = {name: with_template(tmp_path, name) for name in ("GPT-OSS", "GLM-4.5", "chatml")}
    for (name, tokenizer), given in itertools.product(
        tokenizers.items(), ("reasoning_content", "thinking", "reasoning")
    ):
        row = {"messages": [*CONVERSATIONS["thoughts"][:-1], {"role": "assistant", "content": "yo", given: "yo?"}]}
        text = shown(*rendered(tokenizer, row, "assistant"))
        assert text == EXPECTED[name, "thoughts"].replace("‹", "").replace("›", "")
    twice = {"role": "assistant", "content": "yo", "reasoning": "hm", "thinking": "hm"}
    assert "<think>\nhm\n" in rendered(tokenizer, {"messages": [user("yo"), twice]}, "last")[0]
    for changes, said in (
        ({"reasoning": "so"}, "message 2 has reasoning under thinking and reasoning, and they differ"),
        ({"thinking": 3}, "message 2: thinking is 3, not text"),
    ):
        with pytest.raises(ValueError, match=said):
            rendered(tokenizer, {"messages": [user("yo"), {**twice, **changes}]}, "last")
    turns = [user("a"), {"role": "assistant", "content": "b", "reasoning_content": "r"}]
    answer = Written(tokenizer, Conversation(turns, [None] * 2)).messages[1]
    assert answer["thinking"] == answer["reasoning_content"] == "r"


SPECIAL_TOKENS = re.compile(
    r"<\|[^|<>{}\s]+\|?>|<[a-z_]+\|>|<｜[^<>]+?｜>|<(?:start|end)_of_[a-z]+>|\[/?[A-Z_]{3,}\]|</s>"
)
END_TOKENS = ["<|im_end|>", "<turn|>", "<end_of_turn>", "<|eot_id|>", "<|return|>", "<|end|>", "<|eot|>"]
END_TOKENS += ["<｜end▁of▁sentence｜>"]
NO_TEXT_AS_CONTENT = ("idefics3", "llava_next", "smolvlm")


def published(directory: Path, name: str) -> Any:
    """A tokenizer with a template that trl brings, and the special tokens that this one writes."""
    template = published_text(name)
    tokenizer = tokenizer_like(directory, "mistral", template)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in sorted({*SPECIAL_TOKENS.findall(template)})])
    tokenizer.eos_token = next((token for token in END_TOKENS if token in tokenizer.get_vocab()), "</s>")
    return tokenizer


SAID = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "1"}
# The system prompt stands in the last question, so that no earlier text begins a later one.
MOVED = """\
{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join %}
{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '[user]' + (system if m == last else '') + m.content + eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- '[assistant](says)' + ('<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '') }}
        {{- m.content + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}{% endif %}
"""
PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
# each leaves something out
KNOWN_ROLES = PLAIN.replace("{{", "{% if m.role in ('system', 'user', 'assistant') %}{{").replace("}}", "}}{% endif %}")
FIRST_CALL = PLAIN.replace("eos_token }}", "(m.tool_calls[0] | tojson if m.tool_calls else '') + eos_token }}")
TEXT_OR_CALLS = PLAIN.replace("m.content", "(m.tool_calls | tojson if m.tool_calls else m.content)")
LAST_THOUGHT = PLAIN.replace("m.content", "m.content.split('</think>')[-1]")
LEAVES_OUT_EMPTY = PLAIN.replace("{{", "{% if m.content %}{{").replace("}}", "}}{% endif %}")
NO_MARKS = GPT_OSS.replace("<|", "[").replace("|>", "]")
REASONING_LAST = PLAIN.replace("+ eos_token", "+ (m.reasoning_content or '') + eos_token")
LAST_TEXT = PLAIN.replace("m.content", "(m.content if loop.last or not m.tool_calls else '') + CALLS")
LAST_TEXT = LAST_TEXT.replace("CALLS", "(m.tool_calls | tojson if m.tool_calls else '')")
REFUSES_ROLES = KNOWN_ROLES.replace("{% endif %}", "{% else %}{{ raise_exception('no such role') }}{% endif %}")
BRIEF = [{"role": "developer", "content": "so"}, user("a"), assistant("b")]
CRITIC = {"role": "critic", "content": "2"}
SYSTEM_LAST = [user("o"), {"role": "system", "content": "s"}, assistant("a", "r"), user("u"), assistant("b"), user("c")]
CHAIN = [user("1?"), assistant("", None, call(a=1)), SAID, assistant("", None, call(a=1)), SAID, assistant("yo")]


def tokenizer_of(directory: Path, which: str) -> Any:
    """With a built-in template, one of OWN, one of trl's, or this one."""
    if which in OWN or which in BUILT_IN:
        return with_template(directory, which)
    return published(directory, which) if which in PUBLISHED else tokenizer_like(directory, "mistral", which)


@pytest.mark.parametrize(
    ("which", "turns", "train_on", "expected"),
    [
        # thoughts within the content
        ("Qwen3", [user("yo"), INLINE], "final", "assistant\n<think>\nhm\n</think>\n\n«yo<|im_end|>»\n"),
        ("chatml", [user("yo"), INLINE], "final", "assistant\n<think>\nhm\n</think>\n\n«yo<|im_end|>»\n"),
        (
            "chatml", [user("a"), assistant("a </think>", "b </think> c")], "final",
            "c\n</think>\n\n«a </think><|im_end|>»\n",
        ),
        # of an earlier turn, where they are rightly left out; and behind the words, where they are no end of these
        (
            "chatml", [user("yo"), assistant("yo", "hm"), user("so")], "last",
            "assistant\n«yo<|im_end|>»\n<|im_start|>user\nso<|im_end|>\n",
        ),
        (REASONING_LAST, [user("a"), assistant("b", "hm")], "assistant", "user: a</s>«assistant: bhm</s>»"),
        # where a system prompt is moved behind the answer, what asks for an answer is looked for in the text: a header,
        # or the beginning of a thought
        (
            MOVED, SYSTEM_LAST, "assistant",
            "[user]o</s>[assistant]«(says)<think>r</think>a</s>»[user]u</s>[assistant]«(says)b</s>»[user]sc</s>",
        ),
        (
            MOVED.replace("[assistant]' }}", "[assistant](says)<think>' }}"), SYSTEM_LAST, "assistant",
            "[user]o</s>[assistant](says)<think>«r</think>a</s>»[user]u</s>[assistant](says)«b</s>»[user]sc</s>",
        ),
        # what a prompt for an answer holds has no loss: the thought within the words begins as the prompt ends
        (
            "deepseek_r1_distill_training", [user("1?"), INLINE], "assistant",
            "<think>\n«hm\n</think>\n\nyo<｜end▁of▁sentence｜>»",
        ),
        (
            "nemotron_3_nano", [user("1?"), INLINE], "assistant",
            "assistant\n<think>\n«hm\n</think>\n\nyo<|im_end|>»\n",
        ),
        # behind results nothing asks, and the model writes the header itself, be that of another call or of its answer
        (
            "diffusion_gemma", CHAIN, "assistant",
            '{value:<|"|>1<|"|>}<tool_response|>«<|turn>model\n<|tool_call>call:add{a:1}<tool_call|><|tool_response>»'
            'response:add{value:<|"|>1<|"|>}<tool_response|>«<|turn>model\nyo<turn|>»\n',
        ),
        # an answer at the beginning, and one after another
        (
            "GLM-4.5", [assistant("yo"), assistant("yo"), user("so"), assistant("yo")], "assistant",
            "[gMASK]<sop><|assistant|>\n<think></think>\n«yo<|assistant|>»\n<think></think>\n«yo<|user|>»\nso"
            "<|assistant|>\n<think></think>\n«yo»",
        ),
        # an empty thought is trained on if the record itself has it, and not if the template makes it of another
        ("Qwen3", [user("a"), assistant("<think>\n\n</think>\n\nb")], "last", "«<think>\n\n</think>\n\nb<|im_end|>»\n"),
        ("Qwen3", [user("a"), assistant("b", " ")], "last", "assistant\n<think>\n \n</think>\n\n«b<|im_end|>»\n"),
        ("glm4moe", [user("a"), INLINE, user("b")], "last", "<|assistant|>\n<think></think>\n«yo<|user|>»\nb"),
        # words of the template's own in the place of a thought
        (
            MOVED.replace(" if m.reasoning_content else ''", " if m.reasoning_content else '<think>no</think>'"),
            [user("a"), assistant("b")], "last", "[user]a</s>[assistant](says)<think>no</think>«b</s>»",
        ),
        # a template that knows no thoughts, and always writes that there is none
        (
            PLAIN.replace("m.content", "('<think>\\n</think>' if m.role == 'assistant' else '') + m.content"),
            [user("a"), assistant("b")], "last", "user: a</s>assistant: <think>\n</think>«b</s>»",
        ),
        # a developer's message is the system's where there is no such role
        (KNOWN_ROLES, BRIEF, "assistant", "system: so</s>user: a</s>«assistant: b</s>»"),
        (REFUSES_ROLES, BRIEF, "assistant", "system: so</s>user: a</s>«assistant: b</s>»"),
        (PLAIN, BRIEF, "assistant", "developer: so</s>user: a</s>«assistant: b</s>»"),
    ],
)  # fmt: skip
def test_texts(tmp_path: Path, which: str, turns: list[dict[str, Any]], train_on: str, expected: str) -> None:
    row = {"messages": turns, **({"tools": [TOOL]} if turns is CHAIN else {})}
    assert shown(*rendered(tokenizer_of(tmp_path, which), row, train_on)).endswith(expected)


@pytest.mark.parametrize(
    ("which", "turns", "said"),
    [
        # else the model would be trained on something else than the conversation says, without a word
        (PLAIN, [user("1?"), assistant("", None, call(a=1))], "leaves out text or tool calls of message 2"),
        (FIRST_CALL, [user("1?"), assistant("", None, call(a=1), call(a=2))], "leaves out text or tool calls of"),
        (TEXT_OR_CALLS, [user("1?"), assistant("so", None, call(a=1))], "leaves out text or tool calls of message 2"),
        (KNOWN_ROLES, [user("1?"), assistant("1"), CRITIC], "leaves out .* role is 'critic'; .*or"),
        (KNOWN_ROLES, [user("1?"), assistant("1"), result("2"), assistant("3")], "leaves out .* role is 'tool'; use"),
        (LAST_THOUGHT, [user("1?"), INLINE], "leaves out the reasoning of message 2"),
        (PLAIN.replace("m.content", "''"), [user("1?"), assistant("2")], "leaves out message 1, whose role is 'user'"),
        (PLAIN, [user("1?"), assistant("1")], "leaves out the tools of this conversation"),
        (LEAVES_OUT_EMPTY, [user("a"), assistant(""), user("b"), assistant("c")], "cannot find message 2 in the chat"),
        (REASONING_LAST, [user("a"), assistant("b", "hm")], "cannot find where the reasoning of message 2 ends"),
        # a template that refuses results without a call, and writes no special token behind it
        (
            NO_MARKS, [user("1?"), assistant("", None, call(a=1)), result("1"), assistant("1"), user("1")],
            "cannot find where the tool calls of message 2 end",
        ),
    ],
)  # fmt: skip
def test_conversations_that_a_template_cannot_write(
    tmp_path: Path, which: str, turns: list[dict[str, Any]], said: str
) -> None:
    row = {"messages": turns, **({"tools": [TOOL]} if "the tools" in said else {})}
    with pytest.raises(ValueError, match=said):
        rendered(tokenizer_of(tmp_path, which), row, "final")


def test_text_of_calls_that_is_left_out_of_history_alone(tmp_path: Path) -> None:
    """As GPT-OSS' template does, which takes it for reasoning: it is left out when the model is used, too."""
    row = {"messages": [user("1?"), assistant("so", None, call(a=1)), result("1"), assistant("1")]}
    assert "so" not in rendered(tokenizer_of(tmp_path, LAST_TEXT), row, "assistant")[0]


@pytest.mark.parametrize("name", ["qwen3_instruct_2507", "qwen3"])
def test_tools_are_written_as_the_published_template_does(tmp_path: Path, name: str) -> None:
    """To the letter: a model that was trained on the one meets the other when it is served."""
    theirs, ours = published(tmp_path, name), with_template(tmp_path, "chatml")
    system = {"role": "system", "content": "so"}
    chain = [user("1?"), assistant("", None, call(a=1), call(a="é")), result("1"), result("2")]
    chain += [assistant("so", None, call()), result("3")]
    for turns in (chain, [system, *chain], [system, user("1?")], chain[:1], [*chain, assistant("3"), user("1?")]):
        told = dict(tools=[TOOL, {"name": "é"}], tokenize=False, add_generation_prompt=True)
        assert ours.apply_chat_template(turns, **told) == theirs.apply_chat_template(turns, **told)


FIRST = (
    "cohere2", "deepseekv3", "gemma3", "glm4moe", "gptoss", "llama3", "nemotron_3_nano", "phi3", "qwen2_5", "qwen3",
)  # fmt: skip
"""Between them, all that is particular to one of those that trl brings, but for what Gemma 4's templates do."""
EARLIER = ("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "lfm2_2_5", "lfm2_v2", "qwen3_5_nothink", "qwen3_6")
"""Others of which are nearly the same."""


PROMPTED = {
    "\n",
    "<think>\n",
    "<think></think>",
    "\n<think></think>\n",
    "<think>\n\n</think>\n\n",
    "<|start|>assistant",
    "<|end|>",
}
PROMPTED.add("<｜Assistant｜>")


def by_tier(names: list[str]) -> list[Any]:
    marks = {
        name: () if name in FIRST else pytest.mark.release if name in EARLIER else pytest.mark.slow for name in names
    }
    return [pytest.param(name, marks=marks[name]) for name in names]


@pytest.mark.parametrize("name", by_tier([name for name in PUBLISHED if not name.endswith("_training")]))
def test_published_templates(tmp_path: Path, name: str) -> None:
    """Those that trl brings: no word of others has a loss, every word of the answers' has one, or the record is
    refused."""
    tokenizer, taken = published(tmp_path, name), 0
    calls = [call(a=1), call(a=2) | {"id": "call00002"}]
    results = [SAID | {"tool_call_id": one["id"], "content": "other"} for one in calls]
    for number, text in ((0, ""), (1, ""), (1, "mine"), (2, "mine")):
        turns = [assistant(text, None, *calls[:number]), *results[:number]] if number else []
        messages = [user("other"), assistant("mine"), user("other"), *turns, assistant("mine")]
        for train_on in ("assistant", "final"):
            row = {"messages": messages, **({"tools": [TOOL]} if turns else {})}
            found = spans_or_refusal(tokenizer, row, train_on)
            if found is not None:
                taken += 1
                context = "".join(character for character, inside in zip(*found, strict=True) if not inside)
                assert "mine" not in context, shown(*found)
                assert context.count("other") == found[0].count("other"), shown(*found)
    assert taken > 0 or name in NO_TEXT_AS_CONTENT


TAKE_TEXT = [name for name in PUBLISHED if name.removesuffix("_training") not in NO_TEXT_AS_CONTENT]
HEADERS = {"", "<|channel|>final<|message|>", "to=user<|message|>", "assistant:"}
"""What is trained on before answers of some templates: the model is to choose them."""


def test_a_tokenizer_may_have_several_templates(tmp_path: Path) -> None:
    """By name, of which transformers takes `default`."""
    row = {"messages": [user("yo"), assistant("well")]}
    found = []
    for is_named in (False, True):
        tokenizer = tokenizer_of(tmp_path / str(is_named), "Qwen3")
        if is_named:
            tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ messages }}"}
        found.append(shown(*spans_or_refusal(tokenizer, row, "assistant")))
    assert found[0] == found[1]
    assert found[0].endswith("«well<|im_end|>»\n")


@pytest.mark.parametrize("name", [*BUILT_IN, *OWN, *by_tier(TAKE_TEXT)])
@pytest.mark.parametrize("turns", [2, 6])
def test_what_no_record_wrote_has_no_loss(tmp_path: Path, name: str, turns: int) -> None:
    """But for the end of a turn, and such headers: be there no thoughts, or thoughts that the template leaves out of
    earlier turns."""
    tokenizer = tokenizer_of(tmp_path, name)
    for thought in (None, "wise") if name not in BUILT_IN or takes(name, "thoughts") else (None,):
        words = [f"said{at}" for at in range(turns)]
        pairs = [[user(f"asked{at}"), assistant(words[at], thought)] for at in range(turns)]
        row = {"messages": [*itertools.chain(*pairs)]}
        found = spans_or_refusal(tokenizer, row, "assistant")
        if found is None:
            assert thought
            continue
        runs = [part.partition("»")[0] for part in shown(*found).split("«")[1:]]
        assert [word for word, run in zip(words, runs, strict=True) if word in run] == words
        for word, run in zip(words, runs, strict=True):
            before, _, behind = run.partition(word)
            assert "wise" in before or before.strip() in HEADERS, run
            assert not SPECIAL_TOKENS.sub("", behind).strip(), run


THINKING = ["chatml", "Qwen3", "Qwen3-Thinking", "GLM-4.5", "GPT-OSS", "Gemma 4"]
OF_TRL = ["glm4moe", "gptoss", "qwen3", "qwen3_5_think", "nemotron_3_nano", "lfm2_2_5"]


@pytest.mark.parametrize("name", [*THINKING, *by_tier(OF_TRL)])
@pytest.mark.parametrize("train_on", ["assistant", "final"])
def test_every_thought_has_a_sample(tmp_path: Path, name: str, train_on: Any) -> None:
    """With --split-turns: each sample is what the template writes of a conversation that ends there, trained on that
    answer and, unless --train-on final says otherwise, on its thought, behind what asks for it."""
    tokenizer, numbers = tokenizer_of(tmp_path, name), range(4)
    pairs = [[user(f"asked{at}"), assistant(f"said{at}", f"wise{at}")] for at in numbers]
    pairs[2][1]["train"] = False
    row = {"messages": [*itertools.chain(*pairs), user("thanks")]}
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    options = DataOptions(4096, train_on=train_on, kind=SPLIT_TURNS)
    samples = load_samples("--dataset", [str(tmp_path / "data.jsonl")], tokenizer, options, 0)
    assert len(samples) == 3
    for sample, at in zip(samples, (0, 1, 3), strict=True):
        turns = [{key: value for key, value in turn.items() if value} for turn in itertools.chain(*pairs[: at + 1])]
        text = tokenizer.apply_chat_template(
            [{**turn, "thinking": turn.get("reasoning_content")} for turn in turns], tokenize=False
        )
        assert tokenizer.decode(sample.tokens) == text
        trained = [token for token, inside in zip(sample.tokens, sample.is_trained, strict=True) if inside]
        found = tokenizer.decode(trained)
        assert re.findall(r"said\d", found) == [f"said{at}"]
        assert re.findall(r"wise\d", found) == ([f"wise{at}"] if train_on == "assistant" else [])
        if train_on == "assistant" and name != "GPT-OSS":
            asking = tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
            context = tokenizer.decode(sample.tokens[: sample.is_trained.index(True)])
            assert context == asking


def test_what_only_the_template_may_have_written_is_told(tmp_path: Path) -> None:
    """Text before an answer that is there without a thought alone may be a form of the answer, or not."""
    empty = "(m.reasoning_content or '(none)') + m.content if m.role == 'assistant' else m.content"
    tokenizer = tokenizer_of(tmp_path, PLAIN.replace("m.content", f"({empty})"))
    rows = [{"messages": [user("a"), assistant("b", thought)]} for thought in (None, "hm", None)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    samples = load_samples("--dataset", [str(tmp_path / "data.jsonl")], tokenizer, DataOptions(512), 0)
    (line,) = warnings_of(samples.origins[0], 512)
    assert "2 of 3 records have text before an answer that only the chat template wrote" in line
    assert line.endswith("line 1")


@pytest.mark.parametrize(
    "name", by_tier([name for name in PUBLISHED if f"{name}_training" in PUBLISHED and name not in NO_TEXT_AS_CONTENT])
)
def test_what_trl_trains_on(tmp_path: Path, name: str) -> None:
    """Its templates with markers: it trains on the same, but for what a prompt for an answer holds, for empty thoughts,
    and for what follows the token that ends an answer."""
    tokenizer, others = published(tmp_path, f"{name}_training"), list[tuple[bool, bool, str]]()
    for conversation, turns in CONVERSATIONS.items():
        row = {"messages": turns, **({"tools": [TOOL]} if "call" in conversation else {})}
        found = spans_or_refusal(tokenizer, row, "assistant")
        if found is None:
            continue
        read = read_row(row, find_format(row, Columns()), Columns())
        assert isinstance(read, Conversation)
        told = dict(tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True)
        theirs = tokenizer.apply_chat_template(Written(tokenizer, read).messages, **told)
        tokens = tokenizer(found[0], add_special_tokens=False, return_offsets_mapping=True)
        assert tokens["input_ids"] == theirs["input_ids"]
        pairs = zip(tokens["offset_mapping"], theirs["assistant_masks"], strict=True)
        marked = [(any(found[1][begin:end]), bool(inside), found[0][begin:end]) for (begin, end), inside in pairs]
        runs = itertools.groupby(marked, key=lambda token: token[:2])
        others += [(*kind, "".join(text for *_, text in run)) for kind, run in runs]
    assert {text for ours, theirs, text in others if theirs and not ours} <= PROMPTED
    assert {text for ours, theirs, text in others if ours and not theirs} <= {"<|tool_response>", "<|turn>model\n"}
    assert any(ours and theirs for ours, theirs, _ in others)


def test_which_is_taken_by_the_vocabulary(tmp_path: Path) -> None:
    """OLMoE's roles are plain text, which shows in no vocabulary."""
    for family in BUILT_IN:
        tokenizer, name = tokenizer_like(tmp_path / family, family), "mistral" if family == "olmoe" else family
        assert set_chat_template(tokenizer, "") == f"built-in {name} (the tokenizer has none)"
        assert tokenizer.chat_template == built_in_template(name)
        assert set_chat_template(tokenizer, "") == "the tokenizer's own"
    names = r"neither a built-in template \(mistral, chatml, olmoe\) nor a readable file"
    (tmp_path / "bad.jinja").write_text("{% for")
    (tmp_path / "own.jinja").write_text(PLAIN)
    assert set_chat_template(tokenizer, str(tmp_path / "own.jinja")) == str(tmp_path / "own.jinja")
    gone = [(name, f"{name}: is no longer built in; leave it out if the tokenizer has a") for name in NO_LONGER]
    for asked, said in (("mistrall", names), (str(tmp_path / "bad.jinja"), r"bad\.jinja: cannot be used"), *gone):
        with pytest.raises(ExpertMeshError, match=said):
            set_chat_template(tokenizer, asked)


def test_a_format_without_tools_refuses_them(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(row_of("calls in an earlier turn", "olmoe")))
    with pytest.raises(ExpertMeshError, match=r"data.jsonl: line 1: the chat template refuses .* has no tools"):
        load_samples("--dataset", [str(tmp_path / "data.jsonl")], with_template(tmp_path, "olmoe"), DataOptions(512), 0)

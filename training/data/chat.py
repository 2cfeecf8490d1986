"""From a conversation to tokens, and which of them are trained on, through the tokenizer's chat template."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moe import ExpertMeshError
from training.data.formats import Conversation
from training.data.limits import bounded, check_template

TrainOn = Literal["all", "assistant", "last"]

# As Mixtral-8x7B-Instruct-v0.1 has it; a system prompt stands at the head of the first question.
_MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system = ns.system + message['content'] + '\n\n' %}
    {%- elif message['role'] == 'assistant' %}
        {%- if ns.system %}
            {{- ' [INST] ' + ns.system.strip() + ' [/INST]' }}
            {%- set ns.system = '' %}
        {%- endif %}
        {%- if message['tool_calls'] %}
            {{- ' [TOOL_CALLS] ' + (message['tool_calls'] | tojson) }}
        {%- endif %}
        {%- if message['content'] %}
            {{- ' ' + message['content'] }}
        {%- endif %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- ' [TOOL_RESULTS] ' + message['content'] + ' [/TOOL_RESULTS]' }}
    {%- elif message['role'] == 'user' %}
        {%- if tools and loop.index0 <= 1 %}
            {{- ' [AVAILABLE_TOOLS] ' + (tools | tojson) + ' [/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- ' [INST] ' + ns.system + message['content'] + ' [/INST]' }}
        {%- set ns.system = '' %}
    {%- else %}
        {{- raise_exception('the template knows the roles system, user, assistant and tool, not ' + message['role']) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.system %}
    {{- ' [INST] ' + ns.system.strip() + ' [/INST]' }}
{%- endif %}
"""

# Where <|im_end|> is not the token that ends generation, that one follows it.
_CHATML = """\
{{- bos_token if bos_token and bos_token != '<|im_start|>' and bos_token != eos_token else '' }}
{%- if tools %}
    {{- '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' }}
    {%- if message['reasoning_content'] %}
        {{- '<think>\n' + message['reasoning_content'] + '\n</think>\n\n' }}
    {%- endif %}
    {{- message['content'] }}
    {%- if message['tool_calls'] %}
        {{- '<tool_call>' + (message['tool_calls'] | tojson) + '</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>' }}
    {%- if message['role'] == 'assistant' and eos_token and eos_token != '<|im_end|>' %}
        {{- eos_token }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# begins and ends with a character for private use, so that it shares neither end with what it stands for
_OTHER_WORDS = "\ue000other words\ue000"

TEMPLATES = {"mistral": _MISTRAL, "chatml": _CHATML}


def set_chat_template(tokenizer: Any, wanted: str) -> str:
    """Give the tokenizer the template asked for; without a wish, its own, else a built-in one.

    Args:
        tokenizer: changed in place, so that it is saved with what the model was trained on.
        wanted: a built-in name, the path of a Jinja file, or "".

    Returns:
        Which template it is, in words.

    Raises:
        ExpertMeshError: there is no such template, or it is no Jinja.
    """
    if not wanted and tokenizer.chat_template:
        try:
            check_template(tokenizer.chat_template)
        except ValueError as error:
            raise ExpertMeshError(
                f"the tokenizer's chat template cannot be used: {error}; give a --chat-template"
            ) from error
        return "the tokenizer's own"
    if not wanted:
        name = "chatml" if "<|im_start|>" in tokenizer.get_vocab() else "mistral"
        tokenizer.chat_template = TEMPLATES[name]
        return f"built-in {name} (the tokenizer has none)"
    if wanted in TEMPLATES:
        tokenizer.chat_template = TEMPLATES[wanted]
        return f"built-in {wanted}"
    try:
        if not Path(wanted).is_file():
            raise FileNotFoundError("no such file")
        tokenizer.chat_template = Path(wanted).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ExpertMeshError(
            f"--chat-template {wanted}: neither a built-in one ({', '.join(TEMPLATES)}) nor a readable file: {error}"
        ) from error
    try:
        check_template(tokenizer.chat_template)
        with bounded():
            _render(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None, False)
    except Exception as error:
        raise ExpertMeshError(f"--chat-template {wanted}: cannot be used: {error}") from error
    return wanted


@dataclass(frozen=True)
class Rendered:
    """A conversation's text, and the (begin, end) of its characters that are trained on."""

    text: str
    trained: list[tuple[int, int]]


def render(tokenizer: Any, conversation: Conversation, train_on: TrainOn) -> Rendered:
    """The conversation in the tokenizer's chat template.

    Raises:
        ValueError: the template refuses the conversation, changes a message so that it cannot be found again, or takes
            too long or too much memory.
    """
    try:
        with bounded():
            rendered = _rendered(tokenizer, conversation, train_on)
    except (TimeoutError, MemoryError) as error:
        raise ValueError(f"the chat template takes too much for this conversation: {error or 'memory'}") from error
    if re.search("[\ud800-\udfff]", rendered.text):
        raise ValueError("the chat template writes a lone surrogate, which is no character")
    return rendered


def _rendered(tokenizer: Any, conversation: Conversation, train_on: TrainOn) -> Rendered:
    try:
        text = _render(tokenizer, conversation.messages, conversation.tools, False)
    except Exception as error:
        raise ValueError(f"the chat template refuses this conversation: {error}") from error
    wanted = trained_messages(conversation, train_on)
    _check_reasoning(conversation, text, wanted)
    if train_on == "all":
        left_out = [i for i, is_trained in enumerate(wanted) if not is_trained]
        return Rendered(text, _complement(_spans(tokenizer, conversation, text, left_out), len(text)))
    return Rendered(
        text, _spans(tokenizer, conversation, text, [i for i, is_trained in enumerate(wanted) if is_trained])
    )


def _check_reasoning(conversation: Conversation, text: str, wanted: list[bool]) -> None:
    """Templates rightly drop the thoughts of earlier turns. One that drops those of the last answer as well, if that is
    trained on, would have the model answer without them."""
    answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if answers and wanted[answers[-1]]:
        reasoning = conversation.messages[answers[-1]].get("reasoning_content")
        if isinstance(reasoning, str) and reasoning.strip() not in text:
            raise ValueError(
                f"the chat template leaves out the reasoning of message {answers[-1] + 1}; use another --chat-template"
            )


def trained_messages(conversation: Conversation, train_on: TrainOn) -> list[bool]:
    """Which messages are trained on: as the data say, else as `train_on` does."""
    assistants = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if train_on == "all":
        default = set(range(len(conversation.messages)))
    else:
        default = set(assistants if train_on == "assistant" else assistants[-1:])
    return [i in default if said is None else said for i, said in enumerate(conversation.is_trained)]


def beginning(tokenizer: Any, text: str, max_length: int) -> str:
    """The text; of one far longer than `max_length` tokens, a part that has more than so many: a token takes hundreds
    of bytes while a text is tokenised, and what is beyond is cut off later. Tokens near the part's end may be others
    than those of the whole, so that it ends well behind."""
    length = max(64 * max_length, 2**16)
    while length < len(text) and len(tokenizer(text[:length], add_special_tokens=False)["input_ids"]) < max_length + 64:
        length *= 4
    return text[:length]


def tokenize(tokenizer: Any, rendered: Sequence[Rendered], max_length: int) -> list[tuple[list[int], list[bool]]]:
    """Tokens of each text (of its `beginning`), and whether each is trained on. Nothing is added: templates write the
    special tokens.

    A token belongs where its last character does, so one that begins in a question's closing bracket and ends in the
    answer is part of the answer.
    """
    if not rendered:
        return []
    texts = [beginning(tokenizer, r.text, max_length) for r in rendered]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    return [
        (tokens, _inside(offsets, r.trained))
        for tokens, offsets, r in zip(encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True)
    ]


def _inside(offsets: Iterable[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    inside, at = [], 0
    for begin, end in offsets:
        while at < len(spans) and spans[at][1] < end:
            at += 1
        inside.append(begin < end and at < len(spans) and spans[at][0] < end)
    return inside


def _render(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)


def _spans(tokenizer: Any, conversation: Conversation, text: str, wanted: list[int]) -> list[tuple[int, int]]:
    """Where in `text` the wanted messages stand; of an assistant's, only what the model itself is to write."""
    spans: list[tuple[int, int]] = []
    for begin, end in sorted(_span(tokenizer, conversation, text, index) for index in wanted):
        if spans and begin < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((begin, end))
    return spans


def _span(tokenizer: Any, conversation: Conversation, text: str, index: int) -> tuple[int, int]:
    """What the message adds to the text of those before it, if its own words are in there; templates that do not write
    left to right (a system prompt goes into the last question, thoughts of earlier turns are dropped) leave its words
    and the special token that ends them."""
    begin, end = _own_words(tokenizer, conversation, text, index)
    added = _added(tokenizer, conversation, text, index)
    if added is not None and added[0] <= begin and end <= added[1]:
        return added
    if begin == end:
        raise ValueError(
            f"it cannot be told which tokens of the chat template's text are those of message {index + 1}, which has "
            "no words of its own; use another --chat-template"
        )
    ends = [len(token) for token in tokenizer.all_special_tokens if text.startswith(token, end)]
    return begin, end + max(ends, default=0)


def _added(tokenizer: Any, conversation: Conversation, text: str, index: int) -> tuple[int, int] | None:
    """What the message adds to the text of those before it; None where the template does not write left to right."""
    messages, tools = conversation.messages, conversation.tools
    answers = messages[index]["role"] == "assistant"
    try:
        before = _render(tokenizer, messages[:index], tools, answers) if index > 0 else ""
        through = _render(tokenizer, messages[: index + 1], tools, False)
    except Exception:
        return None
    if not (text.startswith(through) and through.startswith(before)):
        return None
    # a line break after the end of a turn is the template's, not the model's
    return len(before), len(before) + len(through[len(before) :].rstrip())


def _own_words(tokenizer: Any, conversation: Conversation, text: str, index: int) -> tuple[int, int]:
    """Where the text changes when the message says something else: its content, or its tool calls."""
    messages = list(conversation.messages)
    kept = {key: value for key, value in messages[index].items() if key != "tool_calls"}
    messages[index] = {**kept, "content": _OTHER_WORDS}
    try:
        other = _render(tokenizer, messages, conversation.tools, False)
    except Exception as error:
        raise ValueError(f"the chat template refuses this conversation without its tool call: {error}") from error
    begin = _common_length(text, other)
    most = min(len(text), len(other)) - begin
    end = len(text) - min(_common_length(text[::-1], other[::-1]), most)
    if _OTHER_WORDS not in other:
        raise ValueError(f"the chat template leaves out message {index + 1}; use another --chat-template")
    return begin, end


def _common_length(a: str, b: str) -> int:
    """Length of the longest beginning that both have."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _complement(spans: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """What lies between the spans."""
    edges = [0, *(edge for span in spans for edge in span), length]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]

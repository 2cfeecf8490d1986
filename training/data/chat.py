"""From a conversation to tokens, and which of them are trained on, through the tokenizer's chat template.

Where the messages of a long conversation stand in its text is found in a number of renderings that does not grow with
it. What a template writes around a message depends on what kind of message it is and which kinds stand beside it, so it
is found out once for each kind (see `Written`), at the first and at the last such message, and taken for the others
where the same text stands there. Where the words beside them are is found by rendering the conversation with others.
"""

import itertools
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...moe.util.errors import ExpertMeshError
from .encoding import Encoded, encode_texts
from .formats import Conversation
from .pictures import IMAGE
from .templates import BUILT_IN, CHATML_TOKEN, NO_LONGER, built_in_template
from .truncation import Calls, Tokenized
from .turns import Written, with_reasoning, writes_empty_thought

TrainOn = Literal["all", "assistant", "last", "final", "reasoning", "text", "calls"]

Span = tuple[int, int]
"""(begin, end) of characters in a text."""

Part = Literal["turn", "own", "final", "reasoning", "text", "calls"]
"""Of an assistant's message: all that stands in its turn; what the record asks for; that without the reasoning; and
what that is made of. The text ends where its calls begin, and what ends the turn belongs to the last of them."""
_PARTS: dict[TrainOn, Part] = {"final": "final", "reasoning": "reasoning", "text": "text", "calls": "calls"}
"""What --train-on may ask of an answer in place of all that the record asks for."""

DROPS_REASONING = (
    "have earlier answers whose reasoning the chat template leaves out, as when the model is used: it is not trained "
    "on; --split-turns makes a sample of each answer, with its reasoning"
)
"""What is told of such records, behind their number."""
_MARK = "\ue001{}\ue001"
_MARK_PATTERN = re.compile("\ue001([0-9]+)\ue001")
# so many messages of a kind are looked at one by one
_FEW = 3

_SMALL_TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def read_template(wanted: str) -> str:
    """The template of --chat-template: a built-in one, or a file's.

    Raises:
        ExpertMeshError: there is no such template.
    """
    if wanted in BUILT_IN:
        return built_in_template(wanted)
    if wanted in NO_LONGER:
        raise ExpertMeshError(
            f"--chat-template {wanted}: is no longer built in; leave it out if the tokenizer has a template, else "
            "give a file. An earlier run has its own in OUTPUT_DIR/hf and in OUTPUT_DIR/checkpoints/step-*/model: "
            "chat_template.jinja"
        )
    try:
        if not Path(wanted).is_file():
            raise FileNotFoundError("no such file")
        return Path(wanted).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ExpertMeshError(
            f"--chat-template {wanted}: neither a built-in template ({', '.join(BUILT_IN)}) nor a "
            f"readable file: {error}; leave it out: the tokenizer's own is used"
        ) from error


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
        return "the tokenizer's own"
    if not wanted:
        name = "chatml" if CHATML_TOKEN in tokenizer.get_vocab() else "mistral"
        tokenizer.chat_template = built_in_template(name)
        return f"built-in {name} (the tokenizer has none)"
    tokenizer.chat_template = read_template(wanted)
    if wanted in BUILT_IN:
        return f"built-in {wanted}"
    try:
        text = tokenizer.apply_chat_template(_SMALL_TALK, tokenize=False)
    except Exception as error:
        raise ExpertMeshError(f"--chat-template {wanted}: cannot be used: {error}") from error
    bos = tokenizer.bos_token
    if bos and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id and not text.lstrip().startswith(bos):
        return f"{wanted} (without the {bos} that the tokenizer puts before plain text)"
    return wanted


@dataclass(frozen=True)
class Rendered:
    """A conversation's text, the (begin, end) of its characters that are trained on, the special tokens that end the
    answers among them, and the parts with another weight than 1, in order. is_unexplained: whether there may be text
    among them that only the template wrote (see `Written`). calls: of each answer with tool calls that is trained on,
    where it begins, where its calls do, at the latest behind its own text, and where both end. drops_reasoning: whether
    the template leaves out the reasoning of an answer that is trained on."""

    text: str
    trained: list[tuple[int, int]]
    ends: frozenset[str] = frozenset()
    weights: Sequence[tuple[Span, float]] = ()
    is_unexplained: bool = False
    calls: Sequence[tuple[int, int, int]] = ()
    drops_reasoning: bool = False


def render(tokenizer: Any, conversation: Conversation, train_on: TrainOn, date: str = "") -> Rendered:
    """The conversation in the tokenizer's chat template.

    Args:
        date: see `Written`.

    Raises:
        ValueError: the template refuses the conversation, leaves out a part of it, or changes a message so that it
            cannot be found again.
    """
    written = Written(tokenizer, conversation, date)
    if re.search("[\ud800-\udfff]", written.text):
        raise ValueError("the chat template writes a lone surrogate, not a character")
    written.check_complete()
    wanted = trained_messages(conversation, train_on)
    _check_reasoning(written, wanted)
    weights = {i: own for i, own in enumerate(conversation.is_trained) if type(own) is float}
    answers = [i for i, is_trained in enumerate(wanted) if is_trained and written.messages[i]["role"] == "assistant"]
    calling = [i for i in answers if written.messages[i].get("tool_calls")]
    drops = bool(written.lost_reasoning & {*answers})
    if train_on == "all":
        left_out = find_spans(written, [i for i, is_trained in enumerate(wanted) if not is_trained], "turn")
        trained = _complement(_merged(itertools.chain(*left_out.values())), len(written.text))
        last = [(0, len(written.text))] if answers[-1:] == [len(wanted) - 1] else []
        of_weights = find_spans(written, list(weights), "turn")
        calls = _calls(written, find_spans(written, calling, "turn"))
        weighed = _weighed(of_weights, weights)
        return Rendered(written.text, trained, _ends(written, last), weighed, calls=calls, drops_reasoning=drops)
    part = _PARTS.get(train_on, "own")
    spans = find_parts(written, [i for i, is_trained in enumerate(wanted) if is_trained], part)
    ends = _ends(written, [span for answer in _ending(answers, calling, part) for span in spans[answer]])
    trained = _merged(itertools.chain(*spans.values()))
    calls = [] if part in ("reasoning", "text") else _calls(written, {i: spans[i] for i in calling}, part)
    return Rendered(written.text, trained, ends, _weighed(spans, weights), written.is_unexplained, calls, drops)


def _ending(answers: list[int], calling: list[int], part: Part) -> list[int]:
    """The answers whose end belongs to a part of them."""
    if part == "text":
        return [answer for answer in answers if answer not in calling]
    return [] if part == "reasoning" else answers


def find_parts(written: Written, indices: Sequence[int], part: Part) -> dict[int, list[Span]]:
    """As `find_spans`, of any part.

    Raises:
        ValueError: as `find_spans`; or an answer's text cannot be told from its calls.
    """
    if part not in ("reasoning", "text", "calls"):
        return find_spans(written, indices, part)
    found = find_spans(written, indices, "final")
    answers = [i for i in indices if written.messages[i]["role"] == "assistant"]
    if part == "reasoning":
        thinking = [i for i in answers if i not in written.lost_reasoning and _thinks(written.messages[i])]
        complete = find_spans(written, thinking, "own")
        # its end where nothing follows it
        ends = {i: found[i][0][0] if found[i] else complete[i][-1][1] for i in thinking if complete[i]}
        return found | {i: [] for i in answers} | {i: [(complete[i][0][0], end)] for i, end in ends.items()}
    return found | {i: _text_or_calls(written, i, found[i], part) for i in answers}


def _thinks(message: dict[str, Any]) -> bool:
    return bool(_words_of(message).strip()) or "</think>" in message["content"]


def _text_or_calls(written: Written, index: int, spans: list[Span], part: Part) -> list[Span]:
    """One of both parts of an answer, of which they are all that it has beside reasoning."""
    message = written.messages[index]
    if not message.get("tool_calls") or not spans:
        return spans if part == "text" else []
    content = message["content"] if _words_of(message) else message["content"].rpartition("</think>")[2]
    said, (begin, end), behind = content.strip(), spans[0], spans[1:]
    if not said:
        return [] if part == "text" else spans
    if written.text.startswith(said, begin):
        border = begin + len(said)
    else:
        at, border = written.text_span(index)
        if behind and at >= behind[0][0]:  # it stands behind the results of its calls
            return behind if part == "text" else [(begin, end)]
    if not (begin < border <= end and written.text.find(_names(message)[0], border, end) >= 0):
        raise ValueError(
            f"cannot tell the text of message {index + 1} from its tool calls in the chat template's text; use another "
            "--chat-template, or another --train-on"
        )
    return [(begin, border)] if part == "text" else [(border, end), *behind]


def _calls(written: Written, spans: Mapping[int, list[Span]], part: Part = "turn") -> list[tuple[int, int, int]]:
    """See `Rendered`. What stands between an answer's own words and the name of the function that it calls first is
    part of the call.

    Args:
        part: of the answers, that the spans are.
    """
    found = []
    for index, (begin, end) in ((index, parts[0]) for index, parts in spans.items() if parts):
        message, at = written.messages[index], begin
        inside = {"calls": (), "final": (message["content"],)}.get(part, (_words_of(message), message["content"]))
        for words in filter(None, map(str.strip, inside)):
            where = written.text.find(words, at, end)
            at = at if where < 0 else where + len(words)
        is_before = written.text.find(_names(message)[0], at, end) >= 0
        found.append((begin, at if is_before else begin, end))
    return found


def _weighed(spans: Mapping[int, list[Span]], weights: Mapping[int, float]) -> list[tuple[Span, float]]:
    return sorted((part, weight) for index, weight in weights.items() for part in spans[index])


def _ends(written: Written, spans: Iterable[tuple[int, int]]) -> frozenset[str]:
    return frozenset(token for span in spans if (token := written.closing_token(span)))


def answer_ends(tokenizer: Any) -> set[int]:
    """Tokens with which a tokenizer ends answers: EOS, and what its chat template writes behind them."""
    ends = {tokenizer.eos_token_id} - {None}
    if tokenizer.chat_template is not None:
        # a template that refuses small talk ends no answer that could be found out
        with suppress(ValueError):
            tokens = render(tokenizer, Conversation(_SMALL_TALK, [None, None]), "assistant").ends
            ends |= set(tokenizer.convert_tokens_to_ids(sorted(tokens)))
    return ends


def _check_reasoning(written: Written, wanted: list[bool]) -> None:
    """Refuse a template that drops the reasoning of the last answer if that is trained on: the model would learn to
    answer without reasoning. To drop that of earlier turns is right."""
    roles = [message["role"] for message in written.messages]
    last = max((i for i, role in enumerate(roles) if role == "assistant"), default=None)
    if last is None or not wanted[last] or "user" in roles[last:]:
        return
    if written.leaves_out_reasoning(last):
        raise ValueError(
            f"the chat template leaves out the reasoning of message {last + 1}; use another --chat-template"
        )


def trained_messages(conversation: Conversation, train_on: TrainOn) -> list[bool]:
    """Which messages are trained on: as the data say, else as `train_on` does."""
    assistants = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if train_on == "all":
        default = set(range(len(conversation.messages)))
    else:
        default = set(assistants[-1:] if train_on == "last" else assistants)
    return [i in default if own is None else bool(own) for i, own in enumerate(conversation.is_trained)]


def split_turns(conversation: Conversation, train_on: TrainOn) -> list[Conversation]:
    """A conversation for each answer that is trained on, which ends with it and in which no earlier answer is: so it is
    written, with its thought, as when the model is used. Another message that is trained on is so before the next such
    answer."""
    wanted = trained_messages(conversation, train_on)
    messages, is_trained = conversation.messages, conversation.is_trained
    ends = [i + 1 for i, message in enumerate(messages) if wanted[i] and message["role"] == "assistant"]
    if not ends or any(wanted[ends[-1] :]):
        ends.append(len(messages))
    conversations = [
        replace(conversation, messages=messages[:end], is_trained=[False] * begin + is_trained[begin:end])
        for begin, end in itertools.pairwise([0, *ends])
    ]
    if not conversation.images:
        return conversations
    numbers = [sum(message["content"].count(IMAGE) for message in each.messages) for each in conversations]
    return [
        replace(each, images=conversation.images[:number]) for each, number in zip(conversations, numbers, strict=True)
    ]


def tokenize(tokenizer: Any, rendered: Sequence[Rendered]) -> Iterator[Tokenized]:
    """Tokens of each text. Nothing is added: templates write the special tokens.

    A token belongs where its last character does, so one that begins in a question's closing bracket and ends in the
    answer is part of the answer.
    """
    for encoded, r in zip(encode_texts(tokenizer, [r.text for r in rendered]), rendered, strict=True):
        trained = [at is not None for at in _places(encoded, r.trained)]
        places = _places(encoded, [part for part, _ in r.weights]) if r.weights else []
        weights = [1.0 if at is None else r.weights[at][1] for at in places]
        calls = [Calls(*(bisect_right(encoded.ends, character) for character in one)) for one in r.calls]
        ends = set(tokenizer.convert_tokens_to_ids(sorted(r.ends)))
        yield Tokenized(encoded.tokens, trained, ends, weights, calls)


def _places(encoded: Encoded, spans: Sequence[Span]) -> list[int | None]:
    """The number of the span in which each token is; None: in none."""
    places, at = [], 0
    for begin, end in zip(encoded.begins, encoded.ends, strict=True):
        while at < len(spans) and spans[at][1] < end:
            at += 1
        places.append(at if begin < end and at < len(spans) and spans[at][0] < end else None)
    return places


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, those that overlap as one."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _complement(spans: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """What lies between the spans."""
    edges = [0, *(edge for span in spans for edge in span), length]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


class _Words(NamedTuple):
    """Where a message's content, or an assistant's reasoning, stands."""

    message: int
    begin: int
    end: int


def find_spans(written: Written, indices: Sequence[int], part: Part) -> dict[int, list[Span]]:
    """(begin, end) of each message in the text, as `Written.span`; of assistants' the part wanted, and in several where
    results of tools stand between (see `Written.without_results`).

    Raises:
        ValueError: as these do.
    """
    messages, kinds = written.messages, defaultdict(list)
    last_question = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for index in indices:
        if messages[index]["role"] == "assistant":
            kinds[index > last_question, *_kind(messages, index)].append(index)
    many = [alike for alike in kinds.values() if len(alike) > _FEW]
    words = _find_words(written) if many else []
    spans: dict[int, list[Span]] = {}
    for alike in many:
        gaps = {index: gap for index in alike if (gap := _gap(words, index, part == "final"))}
        if len(gaps) > _FEW:
            spans.update(_take_over(written, gaps, part))
    return {index: spans[index] if index in spans else _spans(written, index, part) for index in indices}


def _spans(written: Written, index: int, part: Part) -> list[Span]:
    if written.messages[index]["role"] != "assistant":
        return [written.span(index)]
    find = {"turn": written.span, "own": written.own_span, "final": written.final_span}[part]
    return written.without_results(index, find(index))


def _take_over(written: Written, gaps: dict[int, Span], part: Part) -> dict[int, list[Span]]:
    """Spans of messages of one kind, from the gaps they stand in: those that the first and the last one tell. What is
    written in parts is not taken over."""
    spans = {index: _spans(written, index, part) for index in (min(gaps), max(gaps))}
    around = {_around(written.text, gaps[index], of_one) for index, of_one in spans.items()}
    surroundings = next(iter(around))
    if len(around) > 1 or surroundings is None:
        by_name: dict[tuple[str, ...], dict[int, Span]] = defaultdict(dict)
        for index, gap in gaps.items():  # what stands around a call may have its name
            by_name[tuple(_names(written.messages[index]))][index] = gap
        for alike in by_name.values():
            if len(by_name) > 1 and len(alike) > _FEW:
                spans.update(_take_over(written, alike, part))
        return spans
    before, after = surroundings
    for index, (start, stop) in gaps.items():
        begin, end = start + len(before), stop - len(after)
        is_there = written.text.startswith(before, start, stop) and written.text.endswith(after, start, stop)
        if is_there and begin <= end and _holds(written.text[begin:end], written.messages[index]):
            spans.setdefault(index, [(begin, end)])
    return spans


def _around(text: str, gap: Span, spans: list[Span]) -> tuple[str, str] | None:
    """What stands in a gap before the message and behind it; None if it stands otherwise."""
    if len(spans) != 1 or not gap[0] <= spans[0][0] <= spans[0][1] <= gap[1]:
        return None
    return text[gap[0] : spans[0][0]], text[spans[0][1] : gap[1]]


def _holds(text: str, message: dict[str, Any]) -> bool:
    """Whether the message's words are in the text, as far as that is easily told."""
    content = message["content"].strip()
    return all(name in text for name in _names(message)) and ("think>" in content or content in text)


def _names(message: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls") or []]


def _kind(messages: list[dict[str, Any]], index: int) -> tuple[Hashable, ...]:
    """What a template may go by when it writes a message, but for where the last question stands."""
    content = messages[index]["content"]
    thinks = "<think>" in content, content.startswith("<think>"), "</think>" in content
    edges = content[:1].isspace(), content[-1:].isspace(), *thinks, writes_empty_thought(messages[index])
    following = next((message["role"] for message in messages[index + 1 :] if message["role"] != "tool"), None)
    return (
        *edges,
        following,
        *(_shape(messages[i]) if 0 <= i < len(messages) else None for i in (index - 1, index, index + 1)),
    )


def _shape(message: dict[str, Any]) -> Hashable:
    calls = message.get("tool_calls") or []
    kinds = tuple(type(call["function"]["arguments"]) for call in calls[:1])
    keys = frozenset(key for key, value in message.items() if value)
    return message["role"], keys, bool(message["content"].strip()), min(len(calls), 2), kinds


def _gap(words: list[_Words], index: int, final: bool) -> Span | None:
    """From the end of the words before an assistant's message (or, if `final`, of its own reasoning) to the beginning
    of those behind it; None if these are not those of the messages beside it."""
    behind = next((at for at, one in enumerate(words) if one.message == index + 1), 0)
    before = [one for one in words[max(behind - 2, 0) : behind] if final or one.message != index]
    if not before or before[-1].message not in (index - 1, index):
        return None
    return before[-1].end, words[behind].begin


def _find_words(written: Written) -> list[_Words]:
    """The words of `_words_of` in the order of the text; none if they cannot be told.

    With marks in place of all of them, the text shows what stands between; with marks in place of every second one, the
    others' words stand between what is known by then. All must add up to the text.
    """
    marked = [i for i, message in enumerate(written.messages) if _words_of(message).strip()]
    if not marked or _MARK_PATTERN.search(written.text):
        return []
    try:
        frame = _MARK_PATTERN.split(_write_marked(written, set(marked)))
        order = [int(index) for index in frame[1::2]]
        texts = [_MARK_PATTERN.split(_write_marked(written, set(marked) - set(order[kept::2]))) for kept in (0, 1)]
    except Exception:  # it refuses other words, and is asked message by message
        return []
    words, at = [], 0
    for place, index in enumerate(order):
        before, after = frame[2 * place], frame[2 * place + 2]
        parts = texts[place % 2][::2]
        # the marks before and behind these words are those of the other half
        part = parts[(place + 1) // 2] if (place + 1) // 2 < len(parts) else ""
        if not (part.startswith(before) and part.endswith(after) and len(before) + len(after) <= len(part)):
            return []
        begin = at + len(before)
        end = begin + len(part) - len(before) - len(after)
        if written.text[at:end] != part[: len(part) - len(after)]:
            return []
        words.append(_Words(index, begin, end))
        at = end
    is_whole = len(set(order)) == len(order) and written.text[at:] == frame[-1]
    return words if is_whole else []


def _words_of(message: dict[str, Any]) -> str:
    """Questions, results, system prompts and reasoning."""
    if message["role"] != "assistant":
        return message["content"]
    reasoning = message.get("reasoning_content")
    return reasoning if isinstance(reasoning, str) else ""


def _write_marked(written: Written, indices: set[int]) -> str:
    """The text with marks in place of messages' words."""
    messages = []
    for index, message in enumerate(written.messages):
        mark = _MARK.format(index)
        if index not in indices:
            messages.append(message)
        elif message["role"] == "assistant":
            messages.append(with_reasoning(message, mark))
        else:
            messages.append({**message, "content": mark})
    return written.write(messages)

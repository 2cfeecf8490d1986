"""A conversation as a chat template writes it, and where in that text each message stands.

Templates say what to write, not what they have written, so it is found out by asking again: with other words in a
message, without what comes after it, with the generation prompt.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

from .formats import Conversation
from .pictures import IMAGE
from .templates import at_date

# begins and ends with a character for private use, so that it shares neither end with what it stands for
_OTHER_WORDS = "\ue000other words\ue000"
_MARK = "\ue001{}\ue001"
# as templates mark a thought, where there is none
_NOTHING_MARKED = re.compile(r"([<\[])([^<>\[\]/]+)([>\]])\s*\1/\2\3$")
_OTHER_THOUGHT = "\ue000other thought\ue000"
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
# what a template that leaves it out cannot be used for
_NEEDED = ("content", "call")
# templates' names for a message's reasoning
_REASONING = ("reasoning_content", "thinking")


class _TurnWords(NamedTuple):
    """Where a message's own words are; `is_found` if all around them stays when they are others."""

    begin: int
    end: int
    is_found: bool


class Written:
    """A conversation's text.

    Args:
        date: that the template writes as today's; empty: today's.

    Attributes:
        text: as the template writes it, without a generation prompt.
        messages: as the template gets them: reasoning under each of its names, and the arguments of tool calls as text
            if it takes no objects.
        lost_reasoning: numbers of messages whose reasoning the template leaves out, once `check_complete` has looked.
        is_unexplained: whether `own_span` met text before an answer that the template writes before no thought, and
            that no record wrote: it cannot tell whether the model is to write it.

    Raises:
        ValueError: the template refuses the conversation.
    """

    def __init__(self, tokenizer: Any, conversation: Conversation, date: str = ""):
        self._tokenizer, self._date = tokenizer, date
        self._tools, self._arguments = conversation.tools, conversation.arguments or {}
        self._has_images = bool(conversation.images)
        _check_variables(tokenizer, self._arguments)
        self._known_words: dict[tuple[int, bool], _TurnWords] = {}
        self.is_unexplained = False
        self.lost_reasoning: frozenset[int] = frozenset()
        self.messages, self.text = self._written(
            [with_reasoning(message, message.get(_REASONING[0])) for message in conversation.messages]
        )

    def _written(self, given: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """The messages in the first form that the template takes: as they are; with the arguments of tool calls as
        text; and each of these with `system` in place of a role `developer` that the template does not know."""
        forms = [given]
        if any(message.get("tool_calls") for message in given):
            forms.append([_with_arguments(message, _as_text) for message in given])
        developers = [index for index, message in enumerate(given) if message["role"] == "developer"]
        if developers:
            forms += [[{**m, "role": "system"} if m["role"] == "developer" else m for m in form] for form in forms]
        refusal: Exception | None = None
        taken: tuple[list[dict[str, Any]], str] | None = None
        for messages in forms:
            try:
                text = self.write(messages)
            except Exception as error:
                refusal = refusal or error
                continue
            taken = messages, text
            if not any(messages[index]["role"] == "developer" for index in self._left_out(*taken) & {*developers}):
                break
        if taken is None:
            raise ValueError(f"the chat template refuses this conversation: {refusal}") from refusal
        return taken

    def check_complete(self) -> None:
        """Refuse a template that leaves out words, a tool call or the tools; of reasoning see `lost_reasoning`.

        Raises:
            ValueError: it does so, of whichever message.
        """
        lacking = self._lacking(self.messages, self.text)
        self.lost_reasoning = frozenset(index for index, what in lacking if what == "reasoning")
        for index in sorted({index for index, what in lacking if what in _NEEDED}):
            message = self.messages[index]
            if message["role"] != "assistant":
                another = "" if message["role"] in ("system", "user", "tool") else ", or another role"
                raise ValueError(
                    f"the chat template leaves out message {index + 1}, whose role is {message['role']!r}; use another "
                    f"--chat-template{another}"
                )
            if self._is_left_out_last(index):
                what = "text or tool calls" if message.get("tool_calls") else "text"
                raise ValueError(
                    f"the chat template leaves out {what} of message {index + 1}; use another --chat-template"
                )
        nameless = min((index for index, what in lacking if what == "name"), default=None)
        if nameless is not None:
            raise ValueError(
                f"the chat template leaves out the name of a function that message {nameless + 1} calls; if it writes "
                "the id of the call in its place, give an id with the name, such as functions.NAME:0; else use another "
                "--chat-template"
            )
        if self._tools and self._write(self.messages, tools=None) == self.text:
            raise ValueError(
                "the chat template leaves out the tools of this conversation; use another --chat-template, or leave "
                "them out of the data"
            )

    def _is_left_out_last(self, index: int) -> bool:
        """Whether a message is left out even where the conversation ends with it. What a template leaves out of earlier
        turns alone, as it does reasoning, it leaves out when the model is used, too."""
        through = self.messages[: index + 1]
        try:
            return index in self._left_out(through, self.write(through))
        except Exception:  # it refuses a conversation that ends there
            return True

    def _left_out(self, messages: list[dict[str, Any]], text: str) -> set[int]:
        """Messages of which the template does not write the content or a tool call.

        Args:
            text: as it writes these messages.
        """
        return {index for index, what in self._lacking(messages, text) if what in _NEEDED}

    def _lacking(self, messages: list[dict[str, Any]], text: str) -> set[tuple[int, str]]:
        """What the template does not write, each with the number of its message: "content", "call", the "name" of a
        function, "reasoning".

        Args:
            text: as it writes these messages.
        """
        marked, marks = [], list[tuple[int, str, str]]()
        for index, message in enumerate(messages):
            message, own = _marked(message, str(index))
            marks += [(index, what, mark) for what, mark in own]
            marked.append(message)
        try:
            text = self.write(marked)
        except Exception:  # it refuses other words: are its own there?
            said = [
                message["content"].split(IMAGE) if self._has_images else [message["content"]] for message in messages
            ]
            return {(i, "content") for i, parts in enumerate(said) if any(part.strip() not in text for part in parts)}
        # JSON may have the marks escaped
        return {(index, what) for index, what, mark in marks if mark not in text and json.dumps(mark)[1:-1] not in text}

    def span(self, index: int) -> tuple[int, int]:
        """(begin, end) of the message; of an assistant's, what the model itself is to write, with the special token
        that ends it.

        It is what the message adds to the text of those before it, if its own words are in there. Templates that do
        not write left to right (a system prompt goes into the last question, thoughts of earlier turns are dropped)
        leave what follows the generation prompt.

        Raises:
            ValueError: the message, or its tool calls, are not in the text or cannot be told from others.
        """
        words, answer = self._words(index), self._words(index, keeps_reasoning=True)
        added = self._added(index)
        if added is not None and added[0] <= answer.begin and answer.end <= added[1]:
            return added
        if words.begin == words.end and not words.is_found:
            raise ValueError(
                f"cannot find message {index + 1} in the chat template's text, because it has no text of "
                "its own; use another --chat-template"
            )
        begin, end = self._opening(index, max(words.begin, answer.begin)), self._closing(index, words.end)
        return words.begin if begin is None else min(begin, end), end

    def own_span(self, index: int) -> tuple[int, int]:
        """The part of an assistant's `span` that the record asks for: without the empty thought that some templates put
        before an answer that has none, or whose thought they leave out. It is empty if there is nothing between the
        texts that the template writes before and behind thoughts; where the record has no thought, any is the
        template's own.

        Raises:
            ValueError: as `span`.
        """
        begin, end = self.span(index)
        begin_of_words = min(max(begin, self._words(index, keeps_reasoning=True).begin), end)
        lead = self.text[begin:begin_of_words].strip()
        if not lead or writes_empty_thought(self.messages[index]):
            return begin, end
        # a template by name may be one of several
        template = json.dumps(self._tokenizer.chat_template)
        before, after = _thought_frame(self._tokenizer, template, json.dumps(self._arguments))
        thought = self.messages[index].get(_REASONING[0])
        may_think = thought or "</think>" in self.messages[index]["content"]
        is_closed = after and lead.endswith(after)
        is_empty = is_closed and before.endswith(lead.removesuffix(after).rstrip())
        if is_empty or (is_closed and not may_think) or _NOTHING_MARKED.search(lead):
            return begin_of_words, end
        header = lead[: len(lead) - _common_length(lead[::-1], after[::-1])].strip()
        self.is_unexplained |= header not in before and not (isinstance(thought, str) and thought.strip() in lead)
        return begin, end

    def final_span(self, index: int) -> tuple[int, int]:
        """The part of an assistant's `span` that follows the reasoning: from the first word of the answer or the tool
        call.

        Raises:
            ValueError: as `span`; or the reasoning cannot be told from the answer.
        """
        begin, end = self.span(index)
        begin = max(begin, self._words(index, keeps_reasoning=True).begin)
        message = self.messages[index]
        if not message.get(_REASONING[0]) and "</think>" in message["content"]:  # data may have it in the answer itself
            for mark in re.compile(r"</think>\s*").finditer(self.text, begin, end):
                begin = mark.end()
        changed = self._with_other_reasoning(index)
        if changed != self.text and begin < len(self.text) - _common_length(self.text[::-1], changed[::-1]):
            raise ValueError(
                f"cannot find where the reasoning of message {index + 1} ends in the chat template's "
                "text; use another --chat-template, or another --train-on"
            )
        return begin, end

    def without_results(self, index: int, span: tuple[int, int]) -> list[tuple[int, int]]:
        """The parts of an assistant's `span` that the model is to write: some templates put the results of its tools
        into the turn that calls these, before or behind the text of that turn.

        Raises:
            ValueError: the template refuses other results, or it cannot be told where they are.
        """
        stop = index + 1
        while stop < len(self.messages) and self.messages[stop]["role"] not in ("system", "user", "assistant"):
            stop += 1
        if stop == index + 1:
            return [span]
        results = [{**message, "content": _OTHER_WORDS} for message in self.messages[index + 1 : stop]]
        changed = self._with(index, self.messages[index], stop, results)
        begin_of_words = _common_length(self.text, changed)
        if begin_of_words >= span[1]:
            return [span]
        end_of_words = len(self.text) - _common_length(self.text[::-1], changed[::-1])
        begin_of_text, _ = self.text_span(index)
        is_behind = begin_of_text >= end_of_words
        # up to where the text is the same without results, and with other words in the place of what follows them
        call = {**self.messages[index], "content": _OTHER_WORDS} if is_behind else self.messages[index]
        call_end, later = 0, [{**message, "content": _OTHER_WORDS} for message in self.messages[stop:]]
        for following in (later, []):
            try:
                without = self.write([*self.messages[:index], call, *following])
            except Exception:  # it refuses calls without results there
                continue
            call_end = max(call_end, _common_length(self.text, without))
        if call_end <= span[0]:
            call_end = self._end_of_call(index, self._end_of_arguments(index))
        parts = [(span[0], min(self._closing(index, min(call_end, begin_of_words)), begin_of_words))]
        if is_behind:
            parts.append((begin_of_text, span[1]))
        return [(begin, end) for begin, end in parts if begin < end]

    def leaves_out_reasoning(self, index: int) -> bool:
        """Whether the message has reasoning that the text has not."""
        message = self.messages[index]
        reasoning = message.get(_REASONING[0])
        if reasoning:
            return (
                isinstance(reasoning, str)
                and bool(reasoning.strip())
                and self._with_other_reasoning(index) == self.text
            )
        thought = _THOUGHT.match(message["content"])  # data may have it in the answer
        if thought is None or not thought[1].strip():
            return False
        content = message["content"][: thought.start(1)] + _OTHER_WORDS + message["content"][thought.end(1) :]
        return self._with(index, {**message, "content": content}, index + 1) == self.text

    def write(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """Other messages in the template, perhaps with a generation prompt."""
        return self._write(messages, self._tools, prompt)

    def _write(self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool = False) -> str:
        written: str = self._tokenizer.apply_chat_template(
            list(map(_in_parts, messages)) if self._has_images else messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=prompt,
            **at_date(self._tokenizer, self._date, tools),
            **self._arguments,
        )
        return written

    def _with(self, index: int, message: dict[str, Any], following: int, between: Sequence[dict[str, Any]] = ()) -> str:
        """The text with another message at `index`, after it those `between`, and then those from `following` on.

        Raises:
            ValueError: the template refuses it.
        """
        try:
            return self.write([*self.messages[:index], message, *between, *self.messages[following:]])
        except Exception as error:
            raise ValueError(
                f"the chat template refuses this conversation with other text in message {index + 1}, so "
                f"the message cannot be found: {error}"
            ) from error

    def _with_other_reasoning(self, index: int) -> str:
        message = self.messages[index]
        if not message.get(_REASONING[0]):
            return self.text
        return self._with(index, with_reasoning(message, _OTHER_WORDS), index + 1)

    def _words(self, index: int, keeps_reasoning: bool = False) -> _TurnWords:
        """Where the text changes when the message says something else in place of its content, its tool calls and,
        unless that is kept, its reasoning."""
        key = index, keeps_reasoning or not self.messages[index].get(_REASONING[0])
        if key not in self._known_words:
            self._known_words[key] = self._find_words(*key)
        return self._known_words[key]

    def _find_words(self, index: int, keeps_reasoning: bool) -> _TurnWords:
        message = self.messages[index]
        left_out = ("tool_calls", *(() if keeps_reasoning else _REASONING))
        other = {key: value for key, value in message.items() if key not in left_out} | {"content": _OTHER_WORDS}
        end_of_arguments = self._end_of_arguments(index) if message.get("tool_calls") else None
        try:
            changed = self._with(index, other, index + 1)
        except ValueError:
            if end_of_arguments is None:
                raise
        else:
            before, found, _ = changed.partition(_OTHER_WORDS)
            if not found:
                raise ValueError(f"the chat template leaves out message {index + 1}; use another --chat-template")
            after = changed.rpartition(_OTHER_WORDS)[2]
            begin = _common_length(self.text, changed)
            if self.text.endswith(after):
                end = len(self.text) - len(after)
                return _TurnWords(min(begin, end), end, self.text[:begin].rstrip() == before.rstrip())
            if end_of_arguments is None:
                most = min(len(self.text), len(changed)) - begin
                return _TurnWords(
                    begin, len(self.text) - min(_common_length(self.text[::-1], changed[::-1]), most), False
                )
        # the results that follow are nothing without the call: where it begins shows in a turn that ends with it
        following = next(
            (i for i in range(index + 1, len(self.messages)) if self.messages[i]["role"] == "user"), len(self.messages)
        )
        begin = _common_length(self.text, self._with(index, other, following))
        end = max(self._end_of_call(index, end_of_arguments), self.text_span(index)[1])
        return _TurnWords(min(begin, end_of_arguments), end, True)

    def text_span(self, index: int) -> tuple[int, int]:
        """(begin, end) of a message's content alone, beside which there may be calls; (0, 0) where it is blank."""
        message = self.messages[index]
        if not message["content"].strip():
            return 0, 0
        changed = self._with(index, {**message, "content": _OTHER_WORDS}, index + 1)
        if changed == self.text:
            return 0, 0
        begin = _common_length(self.text, changed)
        return begin, max(begin, len(self.text) - _common_length(self.text[::-1], changed[::-1]))

    def _end_of_arguments(self, index: int) -> int:
        """Where the text stays as it is when the message's tool calls have other arguments."""
        changed = self._with(index, _with_arguments(self.messages[index], _others), index + 1)
        if changed == self.text:
            raise ValueError(
                f"the chat template leaves out the tool calls of message {index + 1}; use another --chat-template"
            )
        return len(self.text) - _common_length(self.text[::-1], changed[::-1])

    def _end_of_call(self, index: int, end_of_arguments: int) -> int:
        """Before the next special token: what is between is a bracket or a mark that is none."""
        token = self._special_token.search(self.text, end_of_arguments)
        if token is None:
            raise ValueError(
                f"cannot find where the tool calls of message {index + 1} end in the chat template's "
                "text: no special token follows; use another --chat-template"
            )
        return token.start()

    def _added(self, index: int) -> tuple[int, int] | None:
        """What the message adds to the text of those before it; None if the template does not write left to right."""
        answers = self.messages[index]["role"] == "assistant"
        if answers and index == 0:  # there is nothing before it to ask for an answer
            return None
        try:
            before = self.write(self.messages[:index], answers) if index > 0 else ""
            through = self.write(self.messages[: index + 1])
        except Exception:
            return None
        if not (self.text.startswith(through) and through.startswith(before)):
            return None
        # a line break after the end of a turn is the template's, not the model's
        end = len(before) + len(through[len(before) :].rstrip())
        if answers and not self._last_tokens(through):
            end = self._closing(index, end)
        return len(before), end

    def _opening(self, index: int, words_begin: int) -> int | None:
        """Where an assistant begins to write: behind the generation prompt, if that stands before its words. A header
        or a thought may come between; words that begin with a thought may begin with the prompt's last ones."""
        if index == 0 or self.messages[index]["role"] != "assistant":
            return None
        try:
            before, asking = (self.write(self.messages[:index], prompt) for prompt in (False, True))
        except Exception:
            return None
        prompt = asking.removeprefix(before)
        earliest = self._end_of_words_before(index, words_begin)
        if not prompt:  # it goes on where the text stands, as behind the results of tools
            return len(asking) if self.text.startswith(asking) and earliest <= len(asking) <= words_begin else None
        if prompt == asking:
            return None
        at = self.text.find(prompt, earliest, words_begin + len(prompt) - 1)
        return None if at < 0 else at + len(prompt)

    def _end_of_words_before(self, index: int, begin: int) -> int:
        """The end of the nearest earlier message whose words stand before `begin`."""
        for earlier in reversed(range(index)):
            try:
                end = self._words(earlier).end
            except ValueError:  # it is left out
                continue
            if end <= begin:
                return end
        return 0

    def _closing(self, index: int, end: int) -> int:
        """Behind the special tokens at `end` that end the message.

        An answer is trained on with those that end it when it is the last: where the history has others in their place,
        the model is not to write these. In formats that end no turn the token that opens the next one does.
        """
        token = self._special_token.match(self.text, end)
        try:
            answers = self.messages[index]["role"] == "assistant"
            own = self._last_tokens(self.write(self.messages[: index + 1])) if answers else []
        except Exception:
            own = []
        if not own:
            return end if token is None else token.end()
        closings = ("".join(own[at:]) for at in range(len(own)))
        return end + next((len(closing) for closing in closings if self.text.startswith(closing, end)), 0)

    def closing_token(self, span: tuple[int, int]) -> str:
        """The special token with which a span ends, but for white space; empty if there is none."""
        text = self.text[span[0] : span[1]].rstrip()
        return next((token for token in self._special_tokens if text.endswith(token)), "")

    def _last_tokens(self, text: str) -> list[str]:
        """The special tokens with which the text ends."""
        text = text.rstrip()
        found: list[str] = []
        while token := next((token for token in self._special_tokens if text.endswith(token)), ""):
            found.insert(0, token)
            text = text.removesuffix(token)
        return found

    @cached_property
    def _special_tokens(self) -> list[str]:
        """Longest first."""
        added = (token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special)
        return sorted({*self._tokenizer.all_special_tokens, *added}, key=len, reverse=True)

    @cached_property
    def _special_token(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._special_tokens)) or "(?!)")


def _marked(message: dict[str, Any], number: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """A message with marks in place of what it says, and what each stands for."""
    marks: list[tuple[str, str]] = []

    def mark(what: str, more: str = "") -> str:
        marks.append((what, _MARK.format(f"{number}{more}")))
        return marks[-1][1]

    thought = _THOUGHT.match(message["content"])
    if isinstance(reasoning := message.get(_REASONING[0]), str) and reasoning.strip():
        message = with_reasoning(message, mark("reasoning", ".r"))
    elif thought is not None and thought[1].strip():
        inside = f"<think>\n{mark('reasoning', '.r')}\n</think>\n\n{mark('content')}"
        return {**message, "content": inside}, marks
    if message["content"].strip():
        message = {**message, "content": mark("content")}
    calls = message.get("tool_calls") or []
    if not calls:
        return message, marks
    message = _with_arguments(message, partial(_next_others, (mark("call", f".{at}") for at in range(len(calls)))))
    named = [
        # an id that has the name may stand for it
        call
        if call["function"]["name"] in str(call.get("id"))
        else {**call, "function": {**call["function"], "name": mark("name", f".{at}n")}}
        for at, call in enumerate(message["tool_calls"])
    ]
    return {**message, "tool_calls": named}, marks


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates take it: one with images as a list of parts."""
    if IMAGE not in message["content"]:
        return message
    parts: list[dict[str, str]] = []
    for number, text in enumerate(message["content"].split(IMAGE)):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return {**message, "content": parts}


def writes_empty_thought(message: dict[str, Any]) -> bool:
    """Whether a message itself begins with one."""
    return re.match(r"\s*<think>\s*</think>", message["content"]) is not None


@lru_cache(maxsize=8)
def _thought_frame(tokenizer: Any, template: str, arguments: str) -> tuple[str, str]:
    """What a template writes before a thought, and between it and the answer, without blanks at their ends; nothing if
    it writes no thoughts.

    Args:
        template: the tokenizer's, which may be changed in place, as JSON.
        arguments: what else it is told, as JSON.
    """
    question = {"role": "user", "content": "a"}
    answer = {"role": "assistant", "content": _OTHER_WORDS}
    in_content = {**answer, "content": f"<think>{_OTHER_THOUGHT}</think>{_OTHER_WORDS}"}
    for message in (with_reasoning(answer, _OTHER_THOUGHT), in_content):
        try:
            text = tokenizer.apply_chat_template([question, message], tokenize=False, **json.loads(arguments))
        except Exception:  # it refuses small talk
            continue
        before, _, behind = text.partition(_OTHER_THOUGHT)
        after, found, _ = behind.partition(_OTHER_WORDS)
        if found:
            return before.rstrip(), after.strip()
    return "", ""


def _check_variables(tokenizer: Any, arguments: dict[str, Any]) -> None:
    """A record tells the template more, and not transformers what to do: to render another template, say.

    Raises:
        ValueError: one of them is no variable of the template.
    """
    own = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"documents"} if arguments else set()
    if name := next((name for name in arguments if name in own), None):
        raise ValueError(f"chat_template_kwargs has {name}, not a variable of a chat template; leave it out")


def with_reasoning(message: dict[str, Any], reasoning: Any) -> dict[str, Any]:
    return {**message, **dict.fromkeys(_REASONING, reasoning)} if reasoning else message


def _with_arguments(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls changed by a function."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _others(arguments: Any, words: str = _OTHER_WORDS) -> Any:
    others = {words: words}
    return _as_text(others) if isinstance(arguments, str) else others


def _next_others(words: Iterator[str], arguments: Any) -> Any:
    return _others(arguments, next(words))


def _common_length(a: str, b: str) -> int:
    """Length of the longest beginning that both have, found by halves."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low

"""A conversation as a chat template writes it, and where in that text each message stands.

Templates say what to write, not what they have written, so it is found out by asking again: with other words in a
message, without what comes after it, with the generation prompt.
"""

import inspect
import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

from expertmesh.training.data.formats import Conversation
from expertmesh.training.data.limits import TooMuch

# begins and ends with a character for private use, so that it shares neither end with what it stands for
_OTHER_WORDS = "\ue000other words\ue000"
# templates' names for a message's reasoning
_REASONING = ("reasoning_content", "thinking")


class _TurnWords(NamedTuple):
    """Where a message's own words are; `is_found` if all around them stays when they are others."""

    begin: int
    end: int
    is_found: bool


class Written:
    """A conversation's text.

    Attributes:
        text: as the template writes it, without a generation prompt.
        messages: as the template gets them: reasoning under each of its names, and the arguments of tool calls as text
            if it takes no objects.

    Raises:
        ValueError: the template refuses the conversation.
    """

    def __init__(self, tokenizer: Any, conversation: Conversation):
        self._tokenizer = tokenizer
        self._tools, self._arguments = conversation.tools, conversation.arguments or {}
        _check_variables(tokenizer, self._arguments)
        self._known_words: dict[tuple[int, bool], _TurnWords] = {}
        self.messages = [with_reasoning(message, message.get(_REASONING[0])) for message in conversation.messages]
        try:
            self.text = self.write(self.messages)
        except Exception as error:
            refused = ValueError(f"the chat template refuses this conversation: {error}")
            if not any(message.get("tool_calls") for message in self.messages):
                raise refused from error
            self.messages = [_with_arguments(message, _as_text) for message in self.messages]
            try:
                self.text = self.write(self.messages)
            except Exception:
                raise refused from error

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
                f"it cannot be told which tokens of the chat template's text are those of message {index + 1}, which "
                "has no words of its own; use another --chat-template"
            )
        begin = self._opening(index, max(words.begin, answer.begin))
        return words.begin if begin is None else begin, self._closing(index, words.end)

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
                f"it cannot be told where the reasoning of message {index + 1} ends in the chat template's text; use "
                "another --chat-template, or another --train-on"
            )
        return begin, end

    def leaves_out_reasoning(self, index: int) -> bool:
        """Whether the message has reasoning that the text has not."""
        reasoning = self.messages[index].get(_REASONING[0])
        return isinstance(reasoning, str) and bool(reasoning.strip()) and self._with_other_reasoning(index) == self.text

    def write(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """Other messages in the template, perhaps with a generation prompt."""
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=self._tools, tokenize=False, add_generation_prompt=prompt, **self._arguments
            )
        except MemoryError as error:
            raise TooMuch("1 GiB of memory") from error

    def _with(self, index: int, message: dict[str, Any], following: int) -> str:
        """The text with another message at `index` and after it those from `following` on.

        Raises:
            ValueError: the template refuses it.
        """
        try:
            return self.write([*self.messages[:index], message, *self.messages[following:]])
        except Exception as error:
            raise ValueError(
                f"the chat template refuses this conversation with other words in message {index + 1}, so that it "
                f"cannot be told where these stand: {error}"
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
        return _TurnWords(min(begin, end_of_arguments), self._end_of_call(index, end_of_arguments), True)

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
                f"it cannot be told where the tool calls of message {index + 1} end in the chat template's text: no "
                "special token follows; use another --chat-template"
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
        or a thought may come between."""
        if index == 0 or self.messages[index]["role"] != "assistant":
            return None
        try:
            before, asking = (self.write(self.messages[:index], prompt) for prompt in (False, True))
        except Exception:
            return None
        prompt = asking.removeprefix(before)
        if not prompt or prompt == asking:
            return None
        at = self.text.find(prompt, self._end_of_words_before(index, words_begin), words_begin)
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


def _check_variables(tokenizer: Any, arguments: dict[str, Any]) -> None:
    """A record tells the template more, and not transformers what to do: to render another template, say.

    Raises:
        ValueError: one of them is no variable of the template.
    """
    own = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"documents"} if arguments else set()
    if name := next((name for name in arguments if name in own), None):
        raise ValueError(f"chat_template_kwargs has {name}, which is no variable of a chat template; leave it out")


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


def _others(arguments: Any) -> Any:
    others = {_OTHER_WORDS: _OTHER_WORDS}
    return _as_text(others) if isinstance(arguments, str) else others


def _common_length(a: str, b: str) -> int:
    """Length of the longest beginning that both have, found by halves."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low

"""From a conversation to tokens, and which of them are trained on, through the tokenizer's chat template."""

import itertools
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...moe.util.errors import ExpertMeshError
from .formats import Conversation
from .message_spans import find_spans
from .templates import TEMPLATES, template_for
from .turns import Written

TrainOn = Literal["all", "assistant", "last", "final"]

_SMALL_TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


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
        name = template_for(tokenizer.get_vocab())
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
        text = tokenizer.apply_chat_template(_SMALL_TALK, tokenize=False)
    except Exception as error:
        raise ExpertMeshError(f"--chat-template {wanted}: cannot be used: {error}") from error
    bos = tokenizer.bos_token
    if bos and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id and not text.lstrip().startswith(bos):
        return f"{wanted} (writes no {bos}, which the tokenizer puts before plain text)"
    return wanted


@dataclass(frozen=True)
class Rendered:
    """A conversation's text, the (begin, end) of its characters that are trained on, and the special tokens that end
    the answers among them."""

    text: str
    trained: list[tuple[int, int]]
    ends: frozenset[str] = frozenset()


def render(tokenizer: Any, conversation: Conversation, train_on: TrainOn) -> Rendered:
    """The conversation in the tokenizer's chat template.

    Raises:
        ValueError: the template refuses the conversation, leaves out a part of it, or changes a message so that it
            cannot be found again.
    """
    written = Written(tokenizer, conversation)
    if re.search("[\ud800-\udfff]", written.text):
        raise ValueError("the chat template writes a lone surrogate, which is no character")
    written.check_complete()
    wanted = trained_messages(conversation, train_on)
    _check_reasoning(written, wanted)
    answers = [i for i, is_trained in enumerate(wanted) if is_trained and written.messages[i]["role"] == "assistant"]
    if train_on == "all":
        left_out = find_spans(written, [i for i, is_trained in enumerate(wanted) if not is_trained], final=False)
        trained = _complement(_merged(itertools.chain(*left_out.values())), len(written.text))
        last = [(0, len(written.text))] if answers[-1:] == [len(wanted) - 1] else []
        return Rendered(written.text, trained, _ends(written, last))
    spans = find_spans(written, [i for i, is_trained in enumerate(wanted) if is_trained], final=train_on == "final")
    ends = _ends(written, [part for answer in answers for part in spans[answer]])
    return Rendered(written.text, _merged(itertools.chain(*spans.values())), ends)


def _ends(written: Written, spans: Iterable[tuple[int, int]]) -> frozenset[str]:
    return frozenset(token for span in spans if (token := written.closing_token(span)))


def answer_ends(tokenizer: Any) -> set[int]:
    """Tokens with which a tokenizer ends answers: EOS, and what its chat template writes behind them."""
    ends = {tokenizer.eos_token_id} - {None}
    if tokenizer.chat_template is not None:
        # a template that refuses small talk ends no answer that could be found out
        with suppress(ValueError):
            found = render(tokenizer, Conversation(_SMALL_TALK, [None, None]), "assistant").ends
            ends |= set(tokenizer.convert_tokens_to_ids(sorted(found)))
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
    return [i in default if said is None else said for i, said in enumerate(conversation.is_trained)]


def beginning(tokenizer: Any, text: str, max_length: int) -> str:
    """The text; of one far longer than `max_length` tokens, a part that has more than so many: a token takes hundreds
    of bytes while a text is tokenised, and what is beyond is cut off later. Tokens near the part's end may be others
    than those of the full text, so that it ends well behind."""
    length = max(64 * max_length, 2**16)
    while length < len(text) and len(tokenizer(text[:length], add_special_tokens=False)["input_ids"]) < max_length + 64:
        length *= 4
    return text[:length]


def tokenize(
    tokenizer: Any, rendered: Sequence[Rendered], max_length: int
) -> list[tuple[list[int], list[bool], set[int]]]:
    """Tokens of each text (of its `beginning`), whether each is trained on, and those that end answers. Nothing is
    added: templates write the special tokens.

    A token belongs where its last character does, so one that begins in a question's closing bracket and ends in the
    answer is part of the answer.
    """
    if not rendered:
        return []
    texts = [beginning(tokenizer, r.text, max_length) for r in rendered]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    return [
        (tokens, _inside(offsets, r.trained), set(tokenizer.convert_tokens_to_ids(sorted(r.ends))))
        for tokens, offsets, r in zip(encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True)
    ]


def _inside(offsets: Iterable[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    inside, at = [], 0
    for begin, end in offsets:
        while at < len(spans) and spans[at][1] < end:
            at += 1
        inside.append(begin < end and at < len(spans) and spans[at][0] < end)
    return inside


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

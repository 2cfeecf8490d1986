"""From records to tokens: what each of them says, as its columns have it, and the samples that this becomes, as a
table."""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...moe.util.errors import ExpertMeshError
from .chat import Rendered, TrainOn, render, tokenize, trained_messages
from .data_files import PlacedRow, RowError, RowPlace, RowSource, SampleBy
from .encoding import encode_texts
from .formats import Columns, Conversation, PlainText
from .image_files import identity, kept_file, record_of
from .pictures import COLUMNS, MORE_COLUMNS, ImageProcessor, Picture, check_unread
from .record_kinds import CONVERSATIONS, RECORD, RecordKind, Said
from .truncation import Calls, Tokenized, Truncation, cut_to_length, shortened

_SURROGATE = re.compile(r"\\ud[89a-f]")
_OF_ROWS = ("place", "format", "is_plain", "told", "bad", "content")
"""Columns of records that are read, which those of their tokens do not have."""


@dataclass(frozen=True)
class DataOptions:
    """How records become tokens.

    columns: where they are not the usual ones. prompt_template: if not empty, a question is written into it in place
    of {prompt} and the answer follows, without a chat template; backslash and n stand for a line break.
    train_on: which turns have a loss. max_seq_length: of longer samples, `truncation` says what is kept. hub_config,
    split: of a hub data set. num_workers: processes that tokenise; None chooses by the number of records. sample_by:
    what is a record of a .txt. template_date: see `Written`. kind: what a record is. images: the processor; None:
    records with images are refused. fetches: whether they are taken from the web. skip_bad_records: so many that
    cannot be used are left out.
    """

    max_seq_length: int
    columns: Columns = field(default_factory=Columns)
    prompt_template: str = ""
    train_on: TrainOn = "assistant"
    hub_config: str = ""
    split: str = "train"
    num_workers: int | None = None
    sample_by: SampleBy = "line"
    template_date: str = ""
    kind: RecordKind = CONVERSATIONS
    images: ImageProcessor | None = None
    fetches: bool = False
    truncation: Truncation = "right"
    skip_bad_records: int = 0


def records_of(source: RowSource, flag: str, options: DataOptions) -> Iterator[dict[str, Any]]:
    """Entries of records in a form that no schema can spoil: their place, their format, and what they say, as JSON: a
    list of one, or of the two of a pair."""
    reading, number = _Reading(options), -1
    for number, (place, row) in enumerate(_read(source, flag)):
        try:
            entries = list(reading.entries(place, row))
        except RowError as error:
            is_unknown = reading.format is None and not (options.skip_bad_records or isinstance(row, RowError))
            # nothing is known of how the others are written; or what is wrong with an image may be mended beside the
            # data, so that the cache must not keep it
            if is_unknown or options.images is not None:
                raise ExpertMeshError(f"{place} {error}") from error
            nothing = json.dumps([vars(PlainText(""))] * options.kind.sequences)
            entries = [_BAD | options.kind.blank | {"bad": f" {error}", "content": nothing}]
        for entry in entries:
            yield {"place": place, **({RECORD: number} if RECORD in options.kind.numbers else {}), **entry}
    if number < 0:
        raise ExpertMeshError(f"{flag} {source.name}: has no records")


_BAD = {"format": "", "is_plain": True, "told": ""}
"""Of a record that cannot be used."""


class _Reading:
    """What records say, as their columns have it, one after the other.

    Attributes:
        format: of the records; None before there is one that has any.
    """

    def __init__(self, options: DataOptions):
        self.options = options
        self.format: Any = None
        self.is_plain: bool | None = None

    def entries(self, place: RowPlace, row: Any) -> Iterator[dict[str, Any]]:
        """The entries of a record.

        Raises:
            RowError: it cannot be used.
        """
        kind, columns = self.options.kind, _columns_read(self.options)
        if isinstance(row, RowError):
            raise row
        try:
            known = self.format or kind.find_format(row, columns)
            self.format = known
            read = kind.read(row, known, columns, self.options.train_on)
            if self.options.images is not None:
                _check_images(row, [each for together, _ in read for each in together], columns)
            for together, more in read:
                yield {"format": known.name, "bad": "", **self._written(place, together), **more}
        except TypeError as error:
            raise RowError(str(error)) from error
        except OSError as error:  # of what a record names; what is written tells by itself what is wrong
            raise RowError(f"names what cannot be read: {error}") from error
        except RecursionError as error:
            raise RowError("is nested too deeply") from error

    def _written(self, place: RowPlace, together: Sequence[Said]) -> dict[str, Any]:
        """What is said in one entry, as JSON."""
        is_plain = isinstance(together[0], PlainText) if self.is_plain is None else self.is_plain
        if any(is_plain != isinstance(each, PlainText) for each in together):
            here, before = ("messages", "plain text") if is_plain else ("plain text", "messages")
            raise RowError(f"has {here}, but the records before it have {before}; put them into separate files")
        said = [replace(_with_files(each, place.folder, self.options), told=()) for each in together]
        content = json.dumps(list(map(vars, said)))
        # JSON can write half of a surrogate pair, which is no character and has no token
        if _SURROGATE.search(content) and not _is_text(json.loads(content)):
            raise RowError("has a lone surrogate, so its text was cut or damaged")
        self.is_plain = is_plain
        told = dict.fromkeys(itertools.chain(*(each.told for each in together)))
        return {"is_plain": is_plain, "told": "\n".join(told), "content": content}


def _columns_read(options: DataOptions) -> Columns:
    """Also those in which images are looked for where they are trained on."""
    return options.columns if options.images is None else replace(options.columns, images=(*COLUMNS, *MORE_COLUMNS))


def _check_images(row: Any, said: Sequence[Conversation | PlainText], columns: Columns) -> None:
    """
    Raises:
        RowError: a record seems to have images, and they were not read.
    """
    talks = [each for each in said if isinstance(each, Conversation)]
    texts = (message["content"] for each in talks for message in each.messages)
    check_unread(row, texts, sum(len(each.images) for each in talks), columns.images, [*vars(columns).values()])


def _with_files(said: Conversation | PlainText, folder: Path, options: DataOptions) -> Conversation | PlainText:
    """With the files of its images."""
    if isinstance(said, PlainText) or not said.images:
        return said
    if options.images is None:
        raise RowError("has images; give --images to train on them, or leave them out")
    return replace(said, images=[kept_file(each, folder, options.fetches) for each in said.images])


def _read(source: RowSource, flag: str) -> Iterator[PlacedRow]:
    try:
        yield from source.read()
    except OSError as error:
        raise ExpertMeshError(f"{flag} {source.name}: cannot be read: {error}") from error


def _is_text(value: Any) -> bool:
    """Whether all strings in what JSON can hold are Unicode text."""
    if isinstance(value, dict):
        return all(map(_is_text, value)) and all(map(_is_text, value.values()))
    if isinstance(value, list):
        return all(map(_is_text, value))
    return not (isinstance(value, str) and re.search("[\ud800-\udfff]", value))


class _Entry(NamedTuple):
    """What one text says, as JSON has it, and where; bad: why its record cannot be used, if it cannot."""

    place: str
    bad: str
    is_plain: bool
    said: dict[str, Any]


def table_maker(
    tokenizer: Any, options: DataOptions
) -> Callable[[dict[str, list[Any]], list[int]], dict[str, list[Any]]]:
    """What makes a table of samples of some records, given with their numbers."""
    ends = special_ids(tokenizer)

    def make_table(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        contents = list(map(json.loads, batch["content"]))
        records = zip(batch["place"], batch["bad"], batch["is_plain"], contents, strict=True)
        entries = [_Entry(place, bad, is_plain, said) for place, bad, is_plain, both in records for said in both]
        lines = [
            [_line(part, ends, options.images is not None) for part in parts]
            for parts in _samples_of(tokenizer, options, entries)
        ]
        table = {name: [line[name] for of_text in lines for line in of_text] for name in lines[0][0]}
        further: dict[str, list[Any]] = {name: batch[name] for name in batch if name not in _OF_ROWS} | {"row": numbers}
        if options.truncation == "split":  # each piece of a text is an entry
            numbers = [at for at, of_text in enumerate(lines) for _ in of_text]
            further = {name: [values[at] for at in numbers] for name, values in further.items()}
        row = further.pop("row")
        return options.kind.tabulated(table | further, contents) | {"row": row}

    return make_table


def _samples_of(tokenizer: Any, options: DataOptions, entries: Sequence[_Entry]) -> Iterator[list[Tokenized]]:
    """The samples of each entry's text. What a chat template has written is tokenized together."""
    begun: list[Tokenized | Rendered] = []
    for entry in entries:
        try:
            begun.append(_begun(tokenizer, options, entry))
        except ValueError as error:
            begun.append(_unusable(entry, options, error))
    templated = tokenize(tokenizer, [each for each in begun if isinstance(each, Rendered)])
    for entry, each in zip(entries, begun, strict=True):
        text = next(templated) if isinstance(each, Rendered) else each
        text = replace(
            _weighed(text, entry.said["weight"]),
            is_empty=not entry.bad and _says_nothing(entry.is_plain, entry.said, options),
            is_unexplained=isinstance(each, Rendered) and each.is_unexplained,
            drops_reasoning=isinstance(each, Rendered) and each.drops_reasoning,
        )
        try:
            if options.images is not None:
                text = _with_tokens_of_images(text, entry.said.get("images", ()), options.images)
            samples = cut_to_length(text, options.truncation, options.max_seq_length)
        except ValueError as error:
            samples = [_unusable(entry, options, error)]
        yield samples


def _unusable(entry: _Entry, options: DataOptions, error: ValueError) -> Tokenized:
    """What stands for a text that cannot be used.

    Raises:
        ExpertMeshError: with images (see `records_of`).
    """
    if options.images is not None:
        raise ExpertMeshError(f"{entry.place}: {error}") from error
    return Tokenized((), (), bad=f": {error}")


def _begun(tokenizer: Any, options: DataOptions, entry: _Entry) -> Tokenized | Rendered:
    """A text's tokens, or what a chat template writes of it.

    Raises:
        ValueError: the record does not fit the template, or has other images than places for them.
    """
    if entry.bad:
        return Tokenized((), (), bad=entry.bad)
    is_plain, said = entry.is_plain, entry.said
    if options.prompt_template and not (is_plain and said["prompt"] is None):
        text = _in_prompt_template(tokenizer, is_plain, said, options)
    elif is_plain:
        text = _plain_tokens(tokenizer, PlainText(**said), options)
    else:
        found = render(tokenizer, Conversation(**said), options.train_on, options.template_date)
        if options.images is not None:
            options.images.check(found.text, len(said["images"]))
        return found
    return shortened(text, options.truncation, options.max_seq_length)


def _line(part: Tokenized, ends: set[int], sees_images: bool) -> dict[str, Any]:
    """A sample as a line of the table.

    Args:
        ends: tokens that can end an answer.
    """
    taught = {token for token, inside in zip(part.tokens[1:], part.is_trained[1:], strict=True) if inside}
    line = {
        "tokens": part.tokens,
        "is_trained": part.is_trained,
        "weights": part.weights,
        "ends": sorted(taught & {*part.ends}),
        "length": len(part.tokens),
        # nothing comes before the first token, so nothing can predict it
        "num_targets": sum(part.is_trained[1:]),
        "full_length": part.length if part.is_first else 0,
        "full_lengths": [part.length] if part.is_first and part.length else [],
        "lost": part.lost,
        "is_cut": not part.is_dropped and part.lost > 0,
        "is_dropped": part.is_dropped,
        "is_endless": part.is_last and not part.lost and not taught & ends,
        "loses_call": part.loses_call,
        "is_empty": part.is_empty,
        "is_unexplained": part.is_unexplained,
        "drops_reasoning": part.drops_reasoning,
        "bad": part.bad,
    }
    if sees_images:
        line["images"] = part.image_records
        line["image_edges"] = [edge for each in part.images for edge in (each.begin, each.end)]
        line["loses_images"] = not part.is_dropped and len(part.images) < len(part.image_records)
    return line


def _weighed(text: Tokenized, of_record: float) -> Tokenized:
    """With the record's weight."""
    if of_record == 0:
        return replace(text, is_trained=[False] * len(text.tokens), weights=(), calls=())
    if of_record == 1:
        return text
    return replace(text, weights=[of_record * w for w in text.weights or [1.0] * len(text.tokens)])


def _says_nothing(is_plain: bool, said: dict[str, Any], options: DataOptions) -> bool:
    """Whether an answer that is trained on is blank."""
    if is_plain:
        return not said["text"].strip()
    conversation = Conversation(**said)
    for message, is_trained in zip(
        conversation.messages, trained_messages(conversation, options.train_on), strict=True
    ):
        # reasoning may stand in the answer itself
        answer = message["content"].rpartition("</think>")[2].strip() or message.get("tool_calls")
        if is_trained and message["role"] == "assistant" and not answer:
            return True
    return False


def special_ids(tokenizer: Any) -> set[int]:
    """Tokens that can end an answer: all special ones but that which begins a text."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    begins = set() if tokenizer.bos_token_id == tokenizer.eos_token_id else {tokenizer.bos_token_id}
    return (added | set(tokenizer.all_special_ids)) - begins


def _plain_tokens(tokenizer: Any, said: PlainText, options: DataOptions) -> Tokenized:
    """Text as it stands, between the special tokens that the tokenizer puts around it, and one that ends it.

    Of a prompt and a completion, which are one text, the completion alone is trained on, as in trl.
    """
    prompt = said.prompt or ""
    tokens, ends = _encode(tokenizer, prompt + said.text)
    tokens = _with_end(tokenizer, tokens)
    trains_all = options.train_on == "all" or said.prompt is None
    # a token belongs where its last character does, and those behind the text to its end
    inside = [trains_all or end > len(prompt) for end in ends]
    return Tokenized(tokens, inside + [True] * (len(tokens) - len(inside)), _eos(tokenizer))


def _in_prompt_template(tokenizer: Any, is_plain: bool, said: dict[str, Any], options: DataOptions) -> Tokenized:
    """A question in the template and its answer, each trained on as its message or else --train-on says."""
    is_trained: list[bool | float | None] = [None, None] if is_plain else said["is_trained"]
    pair = (said["prompt"], said["text"]) if is_plain else Conversation(**said).as_prompt_and_response
    if pair is None:
        beside = ": it has tools, which need a chat template" if said["tools"] else ""
        raise ValueError(f"--prompt-template takes one prompt and its response; this record has more{beside}")
    question, answer = pair
    prompt = prompt_tokens(tokenizer, options.prompt_template, question)
    (encoded,) = encode_texts(tokenizer, [answer])
    response = _with_end(tokenizer, list(encoded.tokens))
    on_prompt = is_trained[0] if is_trained[0] is not None else options.train_on == "all"
    inside = [bool(on_prompt)] * len(prompt) + [is_trained[1] is not False] * len(response)
    of_prompt, of_response = ([own if type(own) is float else 1.0] for own in is_trained)
    weights = of_prompt * len(prompt) + of_response * len(response) if of_prompt + of_response != [1.0, 1.0] else []
    return Tokenized(prompt + response, inside, _eos(tokenizer), weights)


def prompt_tokens(tokenizer: Any, template: str, prompt: str) -> list[int]:
    """The template with the prompt in the place of {prompt}, and the special tokens that usually precede a text."""
    tokens, _ = _encode(tokenizer, template.replace("\\n", "\n").replace("{prompt}", prompt))
    return tokens[:-1] if tokens[-1:] == [tokenizer.eos_token_id] else tokens


def _encode(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Tokens of a text, with the special ones that the tokenizer adds, and where in the text each ends: those that are
    added behind it do so beyond its end. A text that begins with BOS or ends with EOS gets no second one."""
    (encoded,) = encode_texts(tokenizer, [text], special=True)
    tokens = list(encoded.tokens)
    own = [at for at, (begin, end) in enumerate(zip(*encoded[1:], strict=True)) if begin < end] or [len(tokens)]
    ends = [end if at <= own[-1] else len(text) + 1 for at, end in enumerate(encoded.ends)]
    first = 1 if own[0] == 1 and tokens[:2] == [tokenizer.bos_token_id] * 2 else 0
    last = -1 if own[-1] == len(tokens) - 2 and tokens[-2:] == [tokenizer.eos_token_id] * 2 else None
    return tokens[first:last], ends[first:last]


def _eos(tokenizer: Any) -> set[int]:
    return set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}


def _with_end(tokenizer: Any, tokens: list[int]) -> list[int]:
    end = tokenizer.eos_token_id
    return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


def _with_tokens_of_images(text: Tokenized, paths: Sequence[str], processor: ImageProcessor) -> Tokenized:
    """With the tokens that stand for each image in place of the one that a template writes. None of them is trained on.

    Raises:
        ValueError: the text has other images than places for them.
    """
    places = [at for at, token in enumerate(text.tokens) if token == processor.token]
    if not paths and places:
        raise ValueError(f"has {processor.placeholder} in its text, which stands for an image; leave it out")
    if other := next((token for token in text.tokens if token in processor.others), None):
        name, said = processor.others[other], processor.processor.tokenizer.convert_ids_to_tokens(other)
        raise ValueError(f"has {said} in its text, the {name} of the model: only images are supported; leave it out")
    pictures: list[Picture] = []
    records: list[str] = []
    made, trained, weighed, at = list[int](), list[bool](), list[float](), 0
    for place, path in zip(places, paths, strict=False):
        begin = len(made) + place - at
        known_by = identity(path)  # before it is read: what changes meanwhile is another the next time
        digest, own = processor.tokens(path)
        records.append(record_of(path, digest, known_by))
        made += [*text.tokens[at:place], *own]
        trained += [*text.is_trained[at:place], *[False] * len(own)]
        weighed += [*text.weights[at:place], *[1.0] * len(own) * bool(text.weights)]
        pictures.append(Picture(path, digest, begin, len(made)))
        at = place + 1

    def moved(token: int) -> int:
        return token + sum(
            each.end - each.begin - 1 for place, each in zip(places, pictures, strict=False) if place < token
        )

    return replace(
        text,
        tokens=made + [*text.tokens[at:]],
        is_trained=trained + [*text.is_trained[at:]],
        weights=weighed + [*text.weights[at:]],
        calls=[Calls(*map(moved, calls)) for calls in text.calls],
        length=len(made) + len(text.tokens) - at,
        images=pictures,
        image_records=records,
    )

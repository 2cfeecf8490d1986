"""Tokenised samples: read, rendered and tokenised once, then kept in the cache of `datasets`."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe import ExpertMeshError
from training.data.chat import TrainOn, beginning, render, tokenize
from training.data.files import DatasetSpec, RowSource, SampleBy, open_rows, parse_datasets
from training.data.formats import Columns, Conversation, Format, RowError, find_format, read_row

# raise it when the same input gives other tokens, so that what an older version has cached is not taken
_VERSION = 3
# one process tokenises this many rows in less time than it takes to start more
_ROWS_A_WORKER = 5_000
_SURROGATE = re.compile(r"\\ud[89a-f]")
_BATCH_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Sample:
    """tokens, and for each whether it is trained on, that is, whether it is a target of the token before it."""

    tokens: list[int]
    is_trained: list[bool]

    @classmethod
    def of_prompt(cls, tokens: list[int], prompt_length: int) -> "Sample":
        """A prompt, on which there is no loss, and what follows it."""
        return cls(tokens, [position >= prompt_length for position in range(len(tokens))])


@dataclass(frozen=True)
class DataOptions:
    """How rows become tokens.

    columns: where they are not the usual ones. prompt_template: if not empty, a question is written into it in place
    of {prompt} and the answer follows, without a chat template; backslash and n stand for a line break.
    train_on: which turns have a loss. max_seq_length: what exceeds it is cut off. hub_config, split: of a hub data
    set. num_workers: processes that tokenise; None chooses by the number of rows. sample_by: what is a row of a .txt.
    """

    max_seq_length: int
    columns: Columns = field(default_factory=Columns)
    prompt_template: str = ""
    train_on: TrainOn = "assistant"
    hub_config: str = ""
    split: str = "train"
    num_workers: int | None = None
    sample_by: SampleBy = "line"


@dataclass(frozen=True)
class Origin:
    """What became of one data set: its rows, those with nothing to learn (left out), those cut, those then used."""

    name: str
    format: str
    rows: int
    without_target: int
    cut: int
    used: int


class Samples(Sequence[Sample]):
    """Tokenised samples of one or several data sets, in a fixed order.

    Attributes:
        lengths: tokens of each, int64.
        targets: trained tokens of each, int64.
        is_cut: 1 for those that lost their end to max_seq_length, int64.
        origins: where they come from.
    """

    def __init__(self, dataset: Any, origins: list[Origin]):
        self.dataset = dataset
        self.origins = origins
        self.lengths = _column(dataset, "length")
        self.targets = _column(dataset, "num_targets")
        self.is_cut = _column(dataset, "is_cut")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        row = self.dataset[int(index)]
        return Sample(row["tokens"], row["is_trained"])

    def select(self, indices: Sequence[int], origins: list[Origin] | None = None) -> "Samples":
        """Those at `indices`, in that order."""
        return Samples(self.dataset.select(indices), self.origins if origins is None else origins)


def _column(dataset: Any, name: str) -> Tensor:
    values = dataset.with_format("numpy")[name][:]
    return torch.tensor(values, dtype=torch.int64)


def load_samples(flag: str, entries: list[str], tokenizer: Any, options: DataOptions, seed: int) -> Samples:
    """Read and tokenise data sets, and mix them if they have weights.

    Args:
        flag: that named them, for messages.
        entries: paths or hub ids, each perhaps with `:weight`.
        tokenizer: a fast one, its chat template set (see `set_chat_template`).
        options: how rows become tokens.
        seed: of the choice of rows where weights leave some out.

    Raises:
        ExpertMeshError: a data set is missing, empty or malformed (with the line), a row has none of the known formats
            or does not fit the chat template, or nothing is left to learn.
    """
    if not tokenizer.is_fast:
        raise ExpertMeshError(f"{flag}: the tokenizer is a slow one, which cannot tell where its tokens stand")
    specs = parse_datasets(flag, entries)
    parts = [
        _tokenised(
            open_rows(flag, spec.name, options.hub_config, options.split, options.sample_by), flag, tokenizer, options
        )
        for spec in specs
    ]
    return _mix(flag, specs, parts, seed)


def hold_out(samples: Samples, ratio: float, seed: int) -> tuple[Samples, Samples]:
    """(to train on, to evaluate on): a random `ratio` of the samples, at least one, is held out.

    Raises:
        ExpertMeshError: nothing would be left to train on.
    """
    number = max(round(len(samples) * ratio), 1)
    if number >= len(samples):
        raise ExpertMeshError(f"--eval-ratio {ratio}: holds out all {len(samples)} samples; none is left to train on")
    order = _shuffled(len(samples), seed)
    return samples.select(sorted(order[number:])), samples.select(sorted(order[:number]))


def _mix(flag: str, specs: list[DatasetSpec], parts: list[Samples], seed: int) -> Samples:
    """All of every data set; or, with weights, as many of each as makes up its share, the scarcest one used whole."""
    import datasets

    if specs[0].weight is not None:
        scale = min(len(part) / (spec.weight or 1) for spec, part in zip(specs, parts, strict=True))
        counts = [max(round(scale * (spec.weight or 1)), 1) for spec in specs]
        parts = [
            _take(part, min(n, len(part)), seed + i) for i, (part, n) in enumerate(zip(parts, counts, strict=True))
        ]
    origins = [origin for part in parts for origin in part.origins]
    return Samples(datasets.concatenate_datasets([part.dataset for part in parts]), origins)


def _take(part: Samples, number: int, seed: int) -> Samples:
    (origin,) = part.origins
    chosen = sorted(_shuffled(len(part), seed)[:number])
    return part.select(chosen, [Origin(**{**vars(origin), "used": number})])


def _shuffled(number: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(number, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def _tokenised(source: RowSource, flag: str, tokenizer: Any, options: DataOptions) -> Samples:
    """One data set, without the samples that have nothing to learn."""
    from datasets import Dataset

    try:
        rows = Dataset.from_generator(
            _records,
            gen_kwargs={"source": source, "flag": flag, "columns": options.columns},
            fingerprint=_fingerprint(source.version, asdict(options.columns)),
        )
    except Exception as error:
        raise _own_error(error) from None
    settings = {**asdict(options), "num_workers": None, "hub_config": None, "split": None}
    backend = tokenizer.backend_tokenizer.to_str()
    specials = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template]
    try:
        tokens = rows.map(
            _tokenize_batch(tokenizer, options),
            batched=True,
            batch_size=_batch_size(rows),
            remove_columns=rows.column_names,
            num_proc=_workers(len(rows), options.num_workers),
            new_fingerprint=_fingerprint(rows._fingerprint, settings, backend, specials),
            desc=f"tokenising {source.name}",
        )
    except Exception as error:
        raise _own_error(error) from None
    targets, is_cut = _column(tokens, "num_targets"), _column(tokens, "is_cut")
    learnable = targets.nonzero().flatten().tolist()
    if not learnable:
        raise ExpertMeshError(
            f"{flag} {source.name}: no row has a token to learn within --max-seq-length {options.max_seq_length}"
        )
    origin = Origin(
        source.name,
        rows[0]["format"],
        rows=len(rows),
        without_target=len(rows) - len(learnable),
        cut=int(is_cut.sum()),
        used=len(learnable),
    )
    return Samples(tokens if len(learnable) == len(tokens) else tokens.select(learnable), [origin])


def _fingerprint(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([_VERSION, *parts]).encode()).hexdigest()[:32]


def _own_error(error: BaseException) -> BaseException:
    """`datasets` wraps what a generator or a worker raises."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ExpertMeshError):
        cause = cause.__cause__
    return cause or error


def _batch_size(rows: Any) -> int:
    """Rows that are tokenised together: fewer where they are long."""
    return min(max(_BATCH_BYTES * len(rows) // max(rows.data.nbytes, 1), 1), 500)


def _workers(num_rows: int, wanted: int | None) -> int | None:
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    number = wanted if wanted is not None else min(most, num_rows // _ROWS_A_WORKER, 16)
    return number if number > 1 else None


def _records(source: RowSource, flag: str, columns: Columns) -> Iterator[dict[str, str]]:
    """Rows in a form that no schema can spoil: their place, their format, and what they say, as JSON."""
    found: Format | None = None
    for place, row in source.read():
        try:
            found = found or find_format(row, columns)
            said = read_row(row, found, columns)
            content = json.dumps(said if isinstance(said, str) else asdict(said))
        except (RowError, TypeError) as error:
            raise ExpertMeshError(f"{place} {error}") from error
        except RecursionError as error:
            raise ExpertMeshError(f"{place} is nested too deeply") from error
        # JSON can write half of a surrogate pair, which is no character and has no token
        if _SURROGATE.search(content) and not _is_text(json.loads(content)):
            raise ExpertMeshError(f"{place} has a lone surrogate, which is no character: its text was cut or damaged")
        yield {"place": place, "format": found.name, "content": content}
    if found is None:
        raise ExpertMeshError(f"{flag} {source.name}: has no rows")


def _is_text(value: Any) -> bool:
    """Whether all strings in what JSON can hold are Unicode text."""
    if isinstance(value, dict):
        return all(map(_is_text, value)) and all(map(_is_text, value.values()))
    if isinstance(value, list):
        return all(map(_is_text, value))
    return not (isinstance(value, str) and re.search("[\ud800-\udfff]", value))


def _tokenize_batch(tokenizer: Any, options: DataOptions) -> Callable[[dict[str, list[Any]]], dict[str, list[Any]]]:
    longest = options.max_seq_length

    def as_tokens(place: str, said: Any) -> tuple[list[int], list[bool]] | None:
        """What needs no chat template; None for what does."""
        if isinstance(said, str):
            tokens = _with_end(tokenizer, tokenizer(beginning(tokenizer, said, longest))["input_ids"])
            return tokens, [True] * len(tokens)
        if not options.prompt_template:
            return None
        pair = Conversation(**said).as_prompt_and_response
        if pair is None:
            raise ExpertMeshError(f"{place}: --prompt-template is for one question and its answer; this row has more")
        question, answer = (beginning(tokenizer, text, longest) for text in pair)
        prompt = prompt_tokens(tokenizer, options.prompt_template, question)
        response = _with_end(tokenizer, tokenizer(answer, add_special_tokens=False)["input_ids"])
        return prompt + response, [options.train_on == "all"] * len(prompt) + [True] * len(response)

    def tokenize_batch(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        results: list[tuple[list[int], list[bool]] | None] = []
        rendered = []
        for place, content in zip(batch["place"], batch["content"], strict=True):
            said = json.loads(content)
            results.append(as_tokens(place, said))
            if results[-1] is None:
                try:
                    rendered.append(render(tokenizer, Conversation(**said), options.train_on))
                except ValueError as error:
                    raise ExpertMeshError(f"{place}: {error}") from error
        templated = iter(tokenize(tokenizer, rendered, longest))
        return _table([result or next(templated) for result in results], longest)

    return tokenize_batch


def prompt_tokens(tokenizer: Any, template: str, prompt: str) -> list[int]:
    """The template with the prompt in the place of {prompt}, and the special tokens that usually precede a text."""
    text = template.replace("\\n", "\n").replace("{prompt}", prompt)
    tokens: list[int] = tokenizer(text)["input_ids"]
    return tokens[:-1] if tokens[-1:] == [tokenizer.eos_token_id] else tokens


def _with_end(tokenizer: Any, tokens: list[int]) -> list[int]:
    end = tokenizer.eos_token_id
    return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


def _table(results: list[tuple[list[int], list[bool]]], max_length: int) -> dict[str, list[Any]]:
    table: dict[str, list[Any]] = {"tokens": [], "is_trained": [], "length": [], "num_targets": [], "is_cut": []}
    for tokens, is_trained in results:
        kept, trained = tokens[:max_length], is_trained[:max_length]
        table["tokens"].append(kept)
        table["is_trained"].append(trained)
        table["length"].append(len(kept))
        # nothing comes before the first token, so nothing can predict it
        table["num_targets"].append(sum(trained[1:]))
        table["is_cut"].append(len(kept) < len(tokens))
    return table

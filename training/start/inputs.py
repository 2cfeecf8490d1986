"""What a run reads before it starts: tokenizer, sequences to train on, sequences to evaluate on."""

import datetime
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...checkpoints.hf.hub import resolve_model
from ...checkpoints.hf.source import ModelSource, open_source
from ...moe.util.errors import ExpertMeshError
from ...moe.util.process_place import process_place
from ...moe.util.terminal import folded
from ...sharding.runtime.process import Ranks, raise_together
from ..config.flags import default_of
from ..config.train_config import SETTINGS, TrainConfig, as_flag
from ..data.chat import set_chat_template
from ..data.data_files import RowSource, named_parts, open_files, parse_datasets
from ..data.formats import Columns
from ..data.pictures import COLUMNS, MORE_COLUMNS, PLACES, ImageProcessor
from ..data.record_kinds import RecordKind
from ..data.sample_cache import check_fast, load_samples
from ..data.samples import Sample, Samples, hold_out
from ..data.sequences import Rows, make_rows
from ..data.stream import Stream
from ..data.templates import at_date, reads_clock
from ..data.tokenizing import DataOptions, prompt_tokens
from ..data.truncation import WRAPPED
from .questions import Questions, read_questions

_NUM_PROMPTS = 3
_NAMED = 10
"""Of many tokens so many are named."""


@dataclass(frozen=True)
class Inputs:
    """template: which chat template the data are written in, in words. training, evaluation: None where there is none.

    stream: what the data to train on are read from while they are, of which `training` is then the first window.
    template_date: the date that the template writes as today's; empty: it reads no clock.
    saved_tokenizer: the tokenizer to be saved with the model, where it is not the source's own.
    images: what reads the images of samples; None: they have none. questions: see `read_questions`.
    """

    tokenizer: Any
    saved_tokenizer: Any
    template: str
    training: Rows | None
    evaluation: Rows | None
    stream: Stream | None = None
    template_date: str = ""
    images: ImageProcessor | None = None
    questions: Questions | None = None


Check = Callable[[TrainConfig, Samples, Samples | None], object]
"""Raises where the samples to train on, or to evaluate on, are none that a task can learn from."""


def read_inputs(config: TrainConfig, source: ModelSource, ranks: Ranks, check: Check, began: str = "") -> Inputs:
    """Rank 0 goes first and fills the cache that the others then read, however long it takes; then the first rank of
    each further node, whose cache may be another. All ranks call it together.

    Args:
        check: by the task.
        began: on rank 0, the date that chat templates wrote when the run began; empty: it begins today.
    """
    import datasets

    if ranks.rank > 0:
        datasets.disable_progress_bars()
    inputs = Inputs(None, None, "", None, None)
    date: list[Any] = [config.template_date or began or datetime.date.today().isoformat()]
    dist.broadcast_object_list(date, src=0)
    mine = 0 if ranks.rank == 0 else 1 if process_place().local_rank == 0 else 2
    for turn in range(3):
        with raise_together(patient=ranks):
            if turn == mine:
                inputs = _read(config, source, check, date[0], tells=ranks.rank == 0, checks=mine < 2)
    return inputs


def _read(config: TrainConfig, source: ModelSource, check: Check, date: str, tells: bool, checks: bool) -> Inputs:
    if not (config.tokenizer or config.dataset):
        return Inputs(None, None, "", None, None)
    tokenizer = load_tokenizer(config.tokenizer or str(source.path), source, config.add_tokens)
    images = ImageProcessor(str(source.path), source.config) if config.images and config.dataset else None
    if images is not None and config.tokenizer:
        images.check_tokenizer(tokenizer, config.tokenizer)
    if images is not None and images.processor.chat_template:
        tokenizer.chat_template = images.processor.chat_template
    own_template = tokenizer.chat_template
    template = "none" if config.prompt_template else set_chat_template(tokenizer, config.chat_template)
    given = [("--dataset", config.dataset), ("--eval-dataset", config.eval_dataset)]
    has_own = any(spec.chat_template for flag, entries in given if entries for spec in parse_datasets(flag, entries))
    if has_own and config.prompt_template:
        raise ExpertMeshError(
            "--prompt-template: takes no chat template, but a data set has one; leave one of them out"
        )
    date = date if not config.prompt_template and (has_own or reads_clock(tokenizer)) else ""
    if not config.dataset:
        saved = tokenizer if config.has_own_tokenizer else None
        return Inputs(tokenizer, saved, template, None, None, template_date=date)
    dated = replace(config, template_date=date)
    training, evaluation, stream = _read_samples(dated, tokenizer, checks, images)
    check(config, training, evaluation)
    positions = getattr(source.text_config, "max_position_embeddings", None)
    questions = read_questions(config, tokenizer, data_options(dated), checks, positions)
    if images is not None and (unseen := _without_images(training, evaluation)):
        if stream is None:
            raise ExpertMeshError(f"--images: {unseen}; leave --images out to train on text")
        if tells:
            first = f"of the first {config.shuffle_buffer:,} records"
            print(folded(f"warning: --images: {first}, {unseen}"), file=sys.stderr, flush=True)
    if stream is not None:
        stream.tells = tells
    if not config.chat_template and all(origin.is_plain for origin in training.origins):
        template, tokenizer.chat_template, date = "none", own_template, ""
    if tells and (unused := _without_effect(config, training, date)):
        print(folded(f"note: {unused}"), file=sys.stderr, flush=True)
    if tells and (unseen := _unseen(config, tokenizer, training, evaluation)):
        print(folded(f"warning: {unseen}"), file=sys.stderr, flush=True)
    saved = tokenizer if config.has_own_tokenizer or tokenizer.chat_template != own_template else None
    rows = stream.first.rows if stream else make_rows(training, config.packing, config.max_seq_length, config.seed)
    held_out = None if evaluation is None else make_rows(evaluation, False, config.max_seq_length, config.seed)
    return Inputs(tokenizer, saved, template, rows, held_out, stream, date, images, questions)


def data_options(config: TrainConfig, images: ImageProcessor | None = None) -> DataOptions:
    """How --dataset's records become tokens."""
    columns = Columns(
        config.prompt_column,
        config.response_column,
        config.messages_column,
        config.text_column,
        config.system_column,
        config.weight_column,
    )
    return DataOptions(
        config.max_seq_length,
        columns,
        config.prompt_template,
        config.train_on,
        config.dataset_config,
        config.dataset_split,
        config.dataset_num_proc,
        config.sample_by,
        config.template_date,
        _kind_of_records(config),
        images,
        config.prepare_only,
        "split" if config.splits_texts else config.truncation,
        config.skip_bad_records,
    )


def _kind_of_records(config: TrainConfig) -> RecordKind:
    records = config.task_entry.records
    if config.splits_texts:
        return records.in_pieces or records
    return (config.split_turns and records.by_turns) or records


def _read_samples(
    config: TrainConfig, tokenizer: Any, checks: bool = True, images: ImageProcessor | None = None
) -> tuple[Samples, Samples | None, Stream | None]:
    options = data_options(config, images)
    _check_names_of_parts(config)
    _check_weights(config)
    stream = _stream(config, tokenizer, options) if config.streaming else None
    if stream is not None:
        samples = stream.first.rows.samples
    else:
        repeats = config.stopping_strategy == "all_exhausted"
        samples = load_samples("--dataset", config.dataset, tokenizer, options, config.seed, checks, repeats)
    if config.eval_ratio > 0:
        return *hold_out(samples, config.eval_ratio, config.seed), stream
    if config.eval_dataset:
        options = replace(options, split=config.eval_dataset_split)
        flag, entries = "--eval-dataset", config.eval_dataset
        return samples, load_samples(flag, entries, tokenizer, options, config.seed, checks), stream
    return samples, None, stream


def _check_weights(config: TrainConfig) -> None:
    """
    Raises:
        ExpertMeshError: a data set has one, and is not taken in samples.
    """
    if all(spec.weight is None for spec in parse_datasets("--dataset", config.dataset)):
        return
    if config.streaming:
        raise ExpertMeshError("--streaming: reads one data set after the other; leave out the weights of --dataset")
    if config.packing == WRAPPED:
        raise ExpertMeshError("--packing wrapped: takes texts completely; leave out the weights of --dataset")


def _stream(config: TrainConfig, tokenizer: Any, options: DataOptions) -> Stream:
    check_fast("--dataset", tokenizer)
    files: list[RowSource] = []
    for spec in parse_datasets("--dataset", config.dataset):
        if spec.chat_template or spec.system:
            raise ExpertMeshError(
                f"--streaming: {spec.name} has a chat template or a system message of its own, but one stream is made "
                "of all data sets; leave them out"
            )
        split = spec.split or options.split
        files += open_files("--dataset", spec.name, options.hub_config, split, options.sample_by)
    size, seed = config.shuffle_buffer, config.seed
    return Stream("--dataset", files, tokenizer, options, config.packing, size, seed)


def _without_effect(config: TrainConfig, training: Samples, date: str) -> str:
    """What was said of data that are of another kind, in words; empty: nothing."""
    specs = parse_datasets("--dataset", config.dataset)
    names = [Path(spec.name) for spec in specs]
    told = []
    if all(origin.format == "text" for origin in training.origins):
        plain = "has no effect on plain text, where every token is trained"
        if config.train_on not in ("assistant", "all"):
            told.append(f"--train-on {config.train_on} {plain}")
        if config.prompt_template and not config.generate_steps:
            told.append(f"--prompt-template {plain}")
    elif config.train_on not in ("assistant", "all") and all(origin.is_plain for origin in training.origins):
        told.append(f"--train-on {config.train_on} has no effect without a chat template: each answer is trained on")
    if config.stopping_strategy != "first_exhausted" and specs[0].weight is None:
        told.append(f"--stopping-strategy {config.stopping_strategy} has no effect without weights of data sets")
    if config.split_turns and all(origin.rows == origin.split for origin in training.origins):
        told.append("--split-turns has no effect: no record has several answers that are trained on")
    is_longer = any(origin.lost or origin.split not in (0, origin.rows) for origin in training.origins)
    if config.truncation != "right" and not is_longer:
        told.append(f"--truncation {config.truncation} has no effect: nothing is longer than --max-seq-length")
    if config.template_date and not date:
        told.append(f"--template-date {config.template_date} has no effect: no chat template reads the clock")
    if config.sample_by != "line" and not any(path.is_dir() or path.suffix == ".txt" for path in names):
        told.append(f"--sample-by {config.sample_by} has no effect without a .txt file")
    return "; ".join(told)


def _without_images(training: Samples, evaluation: Samples | None) -> str:
    """That there is no image to train or evaluate on, in words; empty: there are some."""
    both = [each for each in (training, evaluation) if each is not None]
    if any(samples.num_images for samples in both):
        return ""
    origins = [origin for samples in both for origin in samples.origins]
    if cut := next((origin.images_cut for origin in origins if origin.images_cut), None):
        return f"no image ends within --max-seq-length, the first that does not: {cut.first}"
    return f"no record has an image ({PLACES}: {', '.join((*COLUMNS, *MORE_COLUMNS))})"


def _unseen(config: TrainConfig, tokenizer: Any, training: Samples, evaluation: Samples | None) -> str:
    """The tokens of --add-tokens that no record contains, in words; empty: none."""
    added = {token: tokenizer.convert_tokens_to_ids(token) for token in added_tokens(config)}
    seen = set[int]()
    for samples in (training, evaluation) if added else ():
        if samples is not None:
            seen |= samples.token_ids
    unseen = [token for token, number in added.items() if number not in seen]
    if not unseen:
        return ""
    names = ", ".join(unseen[:_NAMED]) + (", ..." if len(unseen) > _NAMED else "")
    where = f"of the first {config.shuffle_buffer:,} " if config.streaming else ""
    return f"--add-tokens: no record {where}contains {names} ({len(unseen):,} of {len(added):,} tokens)"


def _check_names_of_parts(config: TrainConfig) -> None:
    """
    Raises:
        ExpertMeshError: a split or configuration is named, and none of the data have any.
    """
    training, evaluation = ("--dataset", config.dataset), ("--eval-dataset", config.eval_dataset)
    questions = ("--eval-generate", config.eval_generate)
    for name, part, of in (
        ("dataset_split", "split", [training]),
        ("eval_dataset_split", "split", [evaluation, questions]),
        ("dataset_config", "config", [training, evaluation, questions]),
    ):
        given = getattr(config, name)
        # datasets calls data without splits so
        if given == default_of(SETTINGS[name]) or (part, given) == ("split", "train"):
            continue
        specs = [(flag, spec) for flag, entries in of if entries for spec in parse_datasets(flag, entries)]
        data = [named_parts(flag, spec.name, config.dataset_config) for flag, spec in specs]
        if data and not any(part in parts for _, parts in data):
            kinds = " and ".join(dict.fromkeys(kind for kind, _ in data))
            raise ExpertMeshError(
                f"{as_flag(name, given)}: the data are {kinds} without a {part} to name; leave it out"
            )


def open_model(config: TrainConfig, weights: bool = True) -> ModelSource:
    """The model of a run as its settings change it: by what is known of it before its weights.

    Args:
        weights: whether they are to be there, too; what is read from their headers is not known without.

    Raises:
        ExpertMeshError: there is no such model, or it is not what the settings ask for.
    """
    source = with_token_rows(config, open_source(resolve_model(config.model, weights=weights), config.rope))
    if config.images:
        source = source.seeing_images() if weights else replace(source, images=True)
    return source.training_mtp() if weights and config.train_mtp > 0 else source


def with_token_rows(config: TrainConfig, source: ModelSource) -> ModelSource:
    """The same model, with as many tokens as the run's tokenizer where these are more than the model has rows for.

    Raises:
        ExpertMeshError: there is no tokenizer, or a file of --add-tokens cannot be read.
    """
    if not (config.add_tokens or config.resize_vocab):
        return source
    ids = set(_tokenizer(config.tokenizer or str(source.path), config.add_tokens).get_vocab().values())
    try:
        known = set(_tokenizer(str(source.path)).get_vocab().values())
    except ExpertMeshError:  # the model comes without one
        known = set(range(source.text_config.vocab_size))
    if config.train_new_tokens and not ids - known:
        raise ExpertMeshError("--train-new-tokens: the model's own tokenizer has all tokens; leave it out")
    size = max(ids) + 1
    grown = size if size > source.text_config.vocab_size else None
    return replace(source, vocab_size=grown, new_tokens=tuple(sorted(ids - known)))


def load_tokenizer(where: str, source: ModelSource, added: Sequence[str] = ()) -> Any:
    """The tokenizer in a directory, with tokens of --add-tokens; its ids must fit the model's vocabulary.

    Raises:
        ExpertMeshError: there is none, or it has more tokens than the model.
    """
    tokenizer = _tokenizer(where, added)
    remedy = "; --resize-vocab gives the model rows for them"
    if (highest := max(tokenizer.get_vocab().values(), default=-1)) >= source.text_config.vocab_size:
        raise ExpertMeshError(
            f"{where}: the tokenizer has a token {highest}, the model only {source.text_config.vocab_size}, from 0 on"
            + remedy
        )
    if len(tokenizer) > source.text_config.vocab_size:
        raise ExpertMeshError(
            f"{where}: the tokenizer has {len(tokenizer)} tokens, the model only {source.text_config.vocab_size}"
            + remedy
        )
    return tokenizer


def _tokenizer(where: str, added: Sequence[str] = ()) -> Any:
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        tokenizer("a")  # a damaged one may fail only when it is used
        tokenizer.get_vocab()
    except BaseException as error:
        # the Rust library panics at some damaged files, which is no Exception and has no class that can be imported
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        is_unread = (Path(where) / "tokenizer.model").is_file() and find_spec("sentencepiece") is None
        remedy = "install sentencepiece, which reads tokenizer.model, or " if is_unread else ""
        raise ExpertMeshError(f"{where}: has no tokenizer; {remedy}give one with --tokenizer ({error})") from error
    for entry in added:
        # found in texts as they are, which every file that a tokenizer is read from can say; one that was added before
        # stays as it is, special or not
        new = [token for token in _tokens_in(entry) if token not in tokenizer.added_tokens_encoder]
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in new])
    return tokenizer


def added_tokens(config: TrainConfig) -> list[str]:
    """Those of --add-tokens.

    Raises:
        ExpertMeshError: a file of them cannot be read.
    """
    return [token for entry in config.add_tokens for token in _tokens_in(entry)]


def _tokens_in(entry: str) -> list[str]:
    """Those of an entry of --add-tokens: a file, or their names.

    Raises:
        ExpertMeshError: the file cannot be read.
    """
    if not Path(entry).is_file():
        return list(filter(None, entry.split(",")))
    try:
        return [line for line in Path(entry).read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise ExpertMeshError(f"--add-tokens {entry}: cannot be read: {error}") from error


@dataclass(frozen=True)
class Prompts:
    """What the model is asked while it trains: texts, their tokens, the answers that the data have (None for questions
    of the user's own), and the tokenizer that decodes its sample generations."""

    texts: list[str]
    tokens: list[list[int]]
    references: list[str | None]
    tokenizer: Any


def make_prompts(config: TrainConfig, inputs: Inputs) -> Prompts | None:
    """The prompts of --generate-prompts as questions of a user; else the beginnings, up to the first trained token, of
    a few held-out samples, or of training samples where none are held out. None: nothing is to be generated."""
    if config.generate_steps == 0:
        return None
    if config.generate_prompts:
        date = inputs.template_date
        tokens = [question_tokens(config, inputs.tokenizer, prompt, date) for prompt in config.generate_prompts]
        texts = list(map(inputs.tokenizer.decode, tokens))  # as the model sees them, with the template's tokens
        return Prompts(texts, tokens, [None] * len(tokens), inputs.tokenizer)
    rows = inputs.evaluation or inputs.training
    assert rows is not None
    samples = [rows.samples[index] for index in range(min(_NUM_PROMPTS, len(rows.samples)))]
    tokens = [_beginning(sample) for sample in samples]
    references = [_answer(sample, len(begun)) for sample, begun in zip(samples, tokens, strict=True)]
    texts, answers = (list(map(inputs.tokenizer.decode, of_all)) for of_all in (tokens, references))
    return Prompts(texts, tokens, answers, inputs.tokenizer)


def question_tokens(config: TrainConfig, tokenizer: Any, question: str, date: str = "") -> list[int]:
    """A question as the model is to see it before it answers, with this date as today's."""
    if config.prompt_template:
        return prompt_tokens(tokenizer, config.prompt_template, question)
    if tokenizer.chat_template is None:
        return prompt_tokens(tokenizer, "{prompt}", question)
    message = {"role": "user", "content": question}
    try:
        clock = at_date(tokenizer, date)
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True, **clock)
    except Exception as error:
        raise ExpertMeshError(f"--generate-prompts: the chat template refuses {question!r:.80}: {error}") from error
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def _beginning(sample: Sample) -> list[int]:
    """The sample up to its first trained token; of one that is trained on from the start, its first few words."""
    first = next(i for i, is_trained in enumerate(sample.is_trained) if is_trained and i > 0)
    return sample.tokens[: first if first > 1 else min(max(len(sample.tokens) // 4, 1), 32)]


def _answer(sample: Sample, begin: int) -> list[int]:
    """What follows the sample's beginning, as far as it is trained on."""
    end = next((i for i in range(begin, len(sample.tokens)) if not sample.is_trained[i]), len(sample.tokens))
    return sample.tokens[begin:end]

"""What --eval-generate asks the model while it trains: prompts, the answers that are expected, and how they are
scored."""

import importlib
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...moe.util.errors import ExpertMeshError
from ..config.train_config import TrainConfig, as_flag
from ..data.record_kinds import CONVERSATIONS
from ..data.sample_cache import load_samples
from ..data.samples import Sample, Samples
from ..data.tokenizing import DataOptions
from ..steps.scores import Extracted, Score, calls_in, checked, exact, same_calls

_FLAG = "--eval-generate"


@dataclass(frozen=True)
class Questions:
    """samples: a prompt and its answer each. prompts: their tokens; texts: with special tokens, as the model sees them.
    expected: the answers, without special tokens. longest: tokens of the longest one, with the one that ends it."""

    samples: Samples
    prompts: list[list[int]]
    texts: list[str]
    expected: list[str]
    longest: int
    score: Score
    tokenizer: Any

    def score_of(self, answers: Sequence[Sequence[int]]) -> float:
        """The mean score of answers, in tokens, to all prompts.

        Raises:
            Exception: what a function of the user's own raises; ValueError: it gave no finite number.
        """
        said = self.tokenizer.batch_decode([list(answer) for answer in answers], skip_special_tokens=True)
        every = zip(self.texts, said, self.expected, strict=True)
        return statistics.fmean(checked(self.score(*one)) for one in every)

    def shown(self, answers: Sequence[Sequence[int]], number: int) -> list[dict[str, str]]:
        """The first answers, as they are logged."""
        texts = map(self.tokenizer.decode, answers[:number])
        some = zip(self.texts, texts, self.expected, strict=False)
        return [{"prompt": prompt, "text": text, "reference": expected} for prompt, text, expected in some]


def read_questions(
    config: TrainConfig, tokenizer: Any, options: DataOptions, checks: bool, positions: int | None = None
) -> Questions | None:
    """Read --eval-generate; None: it is not given.

    Args:
        options, checks: as of the data to train on.
        positions: that the model has; None: as many as are asked for.

    Raises:
        ExpertMeshError: a file cannot be read, a record has no answer or is too long, the function of --eval-score
            cannot be had or fails, or no expected answer could score.
    """
    if not config.eval_generate:
        return None
    score = _score(config)
    how = replace(
        options,
        split=config.eval_dataset_split,
        train_on="last",
        kind=CONVERSATIONS,
        images=None,
        truncation="error",
        skip_bad_records=0,
    )
    samples = load_samples(_FLAG, config.eval_generate, tokenizer, how, config.seed, checks)
    for origin in samples.origins:
        if missing := origin.untrained or origin.empty:
            raise ExpertMeshError(f"{missing.first}: has no answer to be expected; complete or delete the record")
    every = [_cut(samples[number], number, samples) for number in range(len(samples))]
    prompts, answers = ([pair[side] for pair in every] for side in (0, 1))
    questions = Questions(
        samples,
        prompts,
        list(map(tokenizer.decode, prompts)),
        tokenizer.batch_decode(answers, skip_special_tokens=True),
        max(map(len, answers)),
        score,
        tokenizer,
    )
    _check_lengths(config, questions, positions)
    _check(config, questions)
    return questions


def _cut(sample: Sample, number: int, samples: Samples) -> tuple[list[int], list[int]]:
    """(what comes before a sample's last answer; that answer)."""
    end = max(at for at, is_trained in enumerate(sample.is_trained) if is_trained) + 1
    begin = max((at for at in range(end) if not sample.is_trained[at]), default=-1) + 1
    if begin <= (samples.origins[int(samples.sources[number])].format == "text"):
        raise ExpertMeshError(
            f"{_FLAG}: record {number + 1:,} has nothing before its answer to be asked; give a prompt and a response, "
            "or messages"
        )
    return sample.tokens[:begin], sample.tokens[begin:end]


def _check_lengths(config: TrainConfig, questions: Questions, positions: int | None) -> None:
    """
    Raises:
        ExpertMeshError: a prompt would lose its beginning (see `generate`).
    """
    longest = max(questions.prompts, key=len)
    if positions is not None and len(longest) + config.generate_max_new_tokens > positions:
        number = questions.prompts.index(longest) + 1
        raise ExpertMeshError(
            f"{_FLAG}: record {number:,} has a prompt of {len(longest):,} tokens, and --generate-max-new-tokens "
            f"{config.generate_max_new_tokens} more are beyond the model's {positions:,} positions; shorten one of them"
        )


def _check(config: TrainConfig, questions: Questions) -> None:
    """
    Raises:
        ExpertMeshError: see `read_questions`.
    """
    score, expected = questions.score, questions.expected
    if isinstance(score, Extracted):
        for number, text in enumerate(expected, 1):
            if score.find(text) is None:
                raise ExpertMeshError(
                    f"--eval-extract {score.pattern!r}: finds nothing in the answer that record {number:,} of {_FLAG} "
                    f"expects, {text.strip()[-80:]!r}; give a pattern that does, or leave it out to compare all of them"
                )
    elif score is same_calls and not any(map(calls_in, expected)):
        raise ExpertMeshError(
            f"--eval-score calls: no answer that {_FLAG} expects has a tool call as JSON, such as record 1's, "
            f"{expected[0].strip()[:80]!r}; give a function, as module:name, that reads this template's calls"
        )
    elif score is not exact:
        try:
            checked(score(questions.texts[0], expected[0], expected[0]))
        except Exception as error:
            raise ExpertMeshError(
                f"{as_flag('eval_score', config.eval_score)}: fails on the answer that record 1 expects: "
                f"{type(error).__name__}: {error}; it is called with a prompt, an answer and the expected answer, and "
                "must return a number"
            ) from error


def _score(config: TrainConfig) -> Score:
    """
    Raises:
        ExpertMeshError: there is no such function.
    """
    if config.eval_extract:
        return Extracted(config.eval_extract)
    if config.eval_score in _NAMED:
        return _NAMED[config.eval_score]
    module, _, name = config.eval_score.partition(":")
    flag = as_flag("eval_score", config.eval_score)
    if os.getcwd() not in sys.path:  # as with `python -m`, but behind all else
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ExpertMeshError(f"{flag}: cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ExpertMeshError(f"{flag}: is a {type(function).__name__}, not a function")
    score: Score = function
    return score


_NAMED: dict[str, Score] = {"exact": exact, "calls": same_calls}

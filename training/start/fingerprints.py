"""What all depends on that is kept for a later run, or that a run resumes: each key, said once.

A key has two parts: settings, by what each moves (`moves` beside the fields of `TrainConfig`), in the one form that all
spellings of a value share; and facts of what was read, so that a file counts by its content and not by its name.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...checkpoints.hf.json_files import well_formed
from ...moe.util.errors import ExpertMeshError
from ..config.moves import Moves
from ..config.train_config import DEFAULTS, MOVES, NEEDS, SETTINGS, TrainConfig, read_by

Facts = dict[str, dict[str, str]]
"""Facts of what a run has read, each by name: of "model", "data" and, where there are any, "evaluation data",
"teacher", "adapter" (that of --init-adapter), "tokens" (those that the run adds), "image processor" and QUESTIONS."""
QUESTIONS = "questions"
"""Those of --eval-generate."""
_OF_DATA = ("data", "evaluation data")


def names_content(name: str) -> bool:
    """Whether a setting's value says where something is read, so that it counts by what is there."""
    return SETTINGS[name].metadata.get("scope") == "input" or name == "add_tokens"


def settings_that_move(what: Moves) -> list[str]:
    """Settings that move any of these."""
    return [name for name, moves in MOVES.items() if moves & what]


_FORMS: dict[str, Callable[[TrainConfig], Any]] = {
    "rope_scaling": lambda config: None if config.rope is None else _plain(config.rope.as_json()),
    "base_dtype": lambda config: (
        config.base_dtype if config.base_dtype != "auto" else "bfloat16" if config.holds_base_in_bf16 else "float32"
    ),
    "max_shard_size": lambda config: config.shard_bytes,
}
"""The one form of values that have several."""


def meaning(config: TrainConfig, name: str) -> Any:
    """A setting's value in the form that all its spellings share: its default where it has no effect; of what is read,
    whether it is given."""
    value = getattr(config, name)
    if names_content(name):
        return bool(value)
    if not all(needs.met(config) for needs in NEEDS[name]):
        return DEFAULTS[name]
    if name in _FORMS:
        return _FORMS[name](config)
    # of names that are listed no order means anything
    return sorted({*value}) if isinstance(value, list) else value


def _plain(table: Any) -> Any:
    """JSON in which 2 is 2.0."""
    return json.loads(json.dumps(table), parse_int=float)


def reference_key(config: TrainConfig, facts: Facts) -> str:
    """Of the log-probabilities of preference data by the model before its first step."""
    # whether there are mismatched answers, and where they are cut off
    mismatched = config.max_seq_length if config.estimates_divergence else 0
    moved_by = settings_that_move(Moves.MODEL | Moves.PRECISION)
    return _digest(config, moved_by, facts, ("model", "adapter", "tokens", *_OF_DATA), mismatched)


def teacher_key(config: TrainConfig, facts: Facts) -> str:
    """Of a teacher's predictions of the data, which have the run's precision where the teacher reads it."""
    precision = [name for name in settings_that_move(Moves.PRECISION) if name in read_by("teacher")]
    return _digest(config, settings_that_move(Moves.TEACHER) + precision, facts, ("teacher", *_OF_DATA))


def _digest(config: TrainConfig, moved_by: Iterable[str], facts: Facts, of: Iterable[str], more: Any = None) -> str:
    settings = {name: meaning(config, name) for name in moved_by if not names_content(name)}
    # what earlier releases have kept stays known
    later = [
        name for name, value in settings.items() if "is_later" in SETTINGS[name].metadata and value == DEFAULTS[name]
    ]
    for name in later:
        del settings[name]
    key = [settings, {name: facts.get(name, {}) for name in of}, more]
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def recorded_config(settings: Mapping[str, Any], path: Path) -> TrainConfig:
    """The configuration that a run recorded in `path`; what its release did not know is at its default.

    Raises:
        ExpertMeshError: they are no settings of a run.
    """
    with well_formed(path):
        try:
            known = {name: settings[name] for name in SETTINGS if name in settings}
            if known.get("global_batch_size") is not None:
                known.pop("gradient_accumulation_steps", None)  # an earlier release recorded 1 where nobody gave any
            return TrainConfig(**known)
        except ExpertMeshError as error:
            raise ExpertMeshError(f"{path}: was written with settings that this release refuses: {error}") from error


def changed_settings(there: TrainConfig, here: TrainConfig, what: Moves) -> list[str]:
    """Settings that move any of these and do not mean the same, of a run and of another."""
    return [
        name
        for name in settings_that_move(what)
        if getattr(there, name) != getattr(here, name) and meaning(there, name) != meaning(here, name)
    ]


def exports_alike(settings: Mapping[str, Any], config: TrainConfig, path: Path) -> bool:
    """Whether an export of this run contains what that of a run does which recorded its settings in `path`: what an
    earlier release did not record is taken for another."""
    there, moving = recorded_config(settings, path), settings_that_move(Moves.EXPORT)
    places = [name for name in moving if SETTINGS[name].metadata.get("scope") == "input"]
    return (
        {*moving} <= settings.keys()
        and all(settings[name] == getattr(config, name) for name in places)
        and not changed_settings(there, config, Moves.EXPORT)
    )

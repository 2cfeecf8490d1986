"""`expertmesh.load`: a model on its ranks, for a training loop of one's own or transformers' Trainer."""

import inspect
from collections.abc import Collection
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any

from ...moe.util.errors import ExpertMeshError, warn_user
from ...moe.util.terminal import folded_to
from ...sharding.runtime.agreement import check_alike
from ...sharding.runtime.process import join_process_group, raise_together
from ...sharding.runtime.watchdog import collectives_limit
from ..config.flags import default_of, group_of
from ..config.tasks import SFT
from ..config.train_config import DEFAULTS, SETTINGS, TrainConfig, make_config, read_by
from ..data.truncation import WRAPPED
from ..engine.engine import Engine, start_engine
from ..start.consistency import start_facts
from ..start.process import prepare_process
from ..start.resume import Resumed, find_resume

_SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio")
"""Settings that mean something once it is known how many steps there are."""


def load(model: str | Path | TrainConfig, **settings: Any) -> Engine:
    """Load a mixture-of-experts model, shard it over the ranks, and return an engine that trains it.

    Call it in a single process, such as a notebook's, or on every rank under torchrun. If there is no process group
    yet, it joins one. With `max_steps` the learning rate follows its schedule; without, it stays constant. With
    `resume`, the path of a training checkpoint or "auto", the engine resumes from there.

    Example:
        engine = expertmesh.load("DIR", ep_size=1, learning_rate=1e-5, max_steps=500)

    Args:
        model: directory of a Hugging Face checkpoint, or a hub id; or a `TrainConfig` with all settings, whose names
            and types editors and type checkers know.
        settings: the flags of `train_ep.py` with underscores in their names. `config` is a YAML file of more settings.
            Settings that only the loop of `train_ep.py` reads, such as `save_steps`, raise a warning here.

    Raises:
        ExpertMeshError: on all ranks, if a setting is invalid, or the model cannot be read or trained with them.
    """
    given = _settings_of(model, settings)
    config = make_config(given)
    if config.task != SFT.name:
        of_trl = (
            f", put TrainerMixin before trl's {config.task.upper()}Trainer" if config.task_entry.has_reference else ""
        )
        raise ExpertMeshError(
            f"task={config.task!r}: only train_ep.py trains on it, whose loss needs its data; use it{of_trl}, or give "
            "engine.step a loss of your own"
        )
    if config.teacher:
        raise ExpertMeshError(
            f"teacher={config.teacher!r}: only train_ep.py learns from a teacher, whose predictions it computes "
            "from its data; use it, or give engine.step a loss of your own"
        )
    if config.packing == WRAPPED:
        raise ExpertMeshError("packing='wrapped': only train_ep.py cuts texts, those of its data; give packing=True")
    for line in _without_effect(config, given):
        warn_user(line)
    prepare_process(config)
    ranks = join_process_group(config.use_cpu, collectives_limit(config.ddp_timeout))
    check_alike(
        ranks, "settings or software", start_facts(config), "load with the same settings and software on all ranks"
    )
    for line in config.without_effect_on(ranks.device.type):
        warn_user(line)
    engine = start_engine(config, ranks, warn_user)
    if config.tokenizer:
        with raise_together():
            _ = engine.tokenizer  # one that is not there is better told of now than at the export
    config = engine.config
    resume_from: Path | None = None
    if config.resume:
        directory = Path(config.output_dir) / "checkpoints"
        resume_from = find_resume(config.resume, directory, engine.tell, ranks)
    if resume_from is not None and config.router_aux_loss_coef is None:
        with raise_together():
            if (weight := Resumed.read(resume_from).balance) not in (None, engine.balance.weights.balance):
                engine.weigh_balance(weight, f"of {resume_from}")
                engine.tell(f"router_aux_loss_coef: {weight:g}, as {resume_from} had it")
    engine.open(resume_from, config.ddp_timeout)
    engine.plan_exports()  # what an export would refuse is better told of now
    engine.place(resume_from, config.ddp_timeout)
    if config.max_steps >= 0:
        engine.schedule(config.max_steps)
    if resume_from is not None:
        engine.load_state(resume_from)
    return engine


def _settings_of(model: str | Path | TrainConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """What was given, by the names of the settings."""
    if not isinstance(model, TrainConfig):
        return {"model": str(model), **settings}
    if settings:
        raise ExpertMeshError(f"{', '.join(settings)}: set what the TrainConfig has, which is given, too")
    return {name: value for name in SETTINGS if (value := getattr(model, name)) != DEFAULTS[name] or name == "model"}


def _without_effect(config: TrainConfig, given: Collection[str]) -> list[str]:
    """What was given and changes nothing here, in words. A YAML file may have settings of train_ep.py's loop too."""
    of_loop = SETTINGS.keys() - read_by("load")
    names = [
        name
        for name, setting in SETTINGS.items()
        if name in of_loop and {name, *setting.metadata.get("aliases", ())} & {*given}
    ]
    own = [name for name in names if name not in read_by("Trainer")]
    lines = [f"{', '.join(own)}: only train_ep.py reads this; it has no effect in your own loop or Trainer"] * bool(own)
    lines += [
        f"{name}: only train_ep.py and Trainer read this; it has no effect in your own loop"
        for name in names
        if name not in own
    ]
    of_schedule = [name for name in _SCHEDULE if getattr(config, name) != default_of(SETTINGS[name])]
    if config.max_steps < 0 and of_schedule:
        said = ", ".join(f"{name}={getattr(config, name)!r}" for name in of_schedule)
        lines.append(
            f"{said}: the learning rate stays constant until engine.schedule, or max_steps, says for how many steps"
        )
    engine_alone = replace(config, **{name: default_of(SETTINGS[name]) for name in of_loop})
    vars(engine_alone).update(asked=config.asked - of_loop)
    return [*lines, *config.overridden, *engine_alone.without_effect]


def _signature() -> inspect.Signature:
    """With every setting and its default, for what completes names in notebooks and for `help`."""
    model = inspect.signature(load).parameters["model"]
    config = inspect.Parameter("config", model.KEYWORD_ONLY, annotation=str | Path, default=None)
    settings = [
        inspect.Parameter(name, model.KEYWORD_ONLY, annotation=setting.type, default=_or_none(setting.default))
        for name, setting in SETTINGS.items()
        if name != "model"
    ]
    return inspect.Signature([model, config, *settings], return_annotation=Engine)


def _help() -> str:
    """The docstring, and below it what each setting does, by group."""
    lines = [inspect.cleandoc(load.__doc__ or "")]
    groups: dict[str, list[str]] = {}
    for setting in SETTINGS.values():
        if setting.name != "model":
            said = setting.metadata["help"]
            groups.setdefault(group_of(TrainConfig, setting.name), []).append(
                f"    {setting.name}: {said() if callable(said) else said}"
            )
    for title, settings in groups.items():
        lines += ["", f"{title}:", *(folded_to(line, 100) for line in settings)]
    return "\n".join(lines)


def _or_none(default: Any) -> Any:
    """Of lists, which are empty or are chosen by the model."""
    return None if default is MISSING else default


vars(load)["__signature__"] = _signature()
load.__doc__ = _help()

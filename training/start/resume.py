"""Resume from a training checkpoint: which one, and whether the run that resumes it is the run that wrote it.

Every way to resume comes here before it reads a weight: `--resume` of train_ep.py, `expertmesh.load(resume=...)`,
`Engine.resume`, and a Trainer's `train(resume_from_checkpoint=...)`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...checkpoints.files.directories import finish_replacement_of_missing, write_errors
from ...checkpoints.fingerprint import explain_model
from ...checkpoints.hf.json_files import well_formed
from ...checkpoints.training_state.marker import read_marker, step_of, whole_checkpoints
from ...checkpoints.training_state.resuming import find_checkpoint
from ...moe.util.errors import ExpertMeshError
from ...moe.util.parser import flag_of
from ...sharding.runtime.agreement import differences
from ...sharding.runtime.process import Ranks, raise_together
from ..config.moves import Moves
from ..config.optimizers import OPTIMIZERS
from ..config.train_config import TrainConfig, as_flag
from ..data.digest import explain_samples
from .fingerprints import QUESTIONS, Facts, changed_settings, recorded_config

_PROCESSOR = "image processor"
Tell = Callable[[str], object]
"""Takes a line for the user, with "warning: " before it where it is one."""


def find_resume(resume: str, directory: Path, tell: Tell, ranks: Ranks) -> Path | None:
    """The checkpoint to resume from, complete and undamaged; None where there is none yet. All ranks call it together.

    Args:
        resume: the path of one; or that of a directory of them, or "auto" for `directory`: the newest undamaged one
            there.
        tell: is told of those that are skipped.

    Raises:
        ExpertMeshError: on all ranks, when the one named is incomplete or damaged, or all that "auto" could take are.
    """
    found, skipped = find_checkpoint(*_newest_of(resume, directory), ranks)
    for line in skipped:
        tell(f"warning: {line}")
    return found


def _newest_of(resume: str, directory: Path) -> tuple[str, Path]:
    """`--resume` as `find_checkpoint` takes it: a directory of checkpoints is "auto" for that directory."""
    return ("auto", Path(resume)) if resume != "auto" and whole_checkpoints(Path(resume)) else (resume, directory)


@dataclass(frozen=True)
class Resumed:
    """The training checkpoint that a run resumes, and its `marker` (see `read_marker`): what a run keeps of the one
    that wrote it where its own settings leave that open."""

    path: Path
    marker: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Resumed":
        """
        Raises:
            ExpertMeshError: its checkpoint.json is missing or damaged.
        """
        return cls(path, read_marker(path))

    @property
    def template_date(self) -> str:
        """The date that chat templates wrote; empty: none did."""
        return str(self.marker["settings"].get("template_date", ""))

    @property
    def sequences_per_step(self) -> int | None:
        """The global batch; None where a loop of one's own made the batches."""
        rows: int | None = self.marker["order"].get("global_batch_size")
        return rows

    @property
    def balance(self) -> float | None:
        """The weight of the balancing loss that a setting, or a Trainer, gave."""
        return recorded_config(self.marker["settings"], self.path).router_aux_loss_coef


def read_resumed(config: TrainConfig) -> Resumed | None:
    """The checkpoint that `--resume` means, by its checkpoint.json alone: before `find_resume` has read its files. One
    rank calls it.

    Returns:
        None where there is none yet, or none can be read, which `find_resume` tells.
    """
    if not config.resume:
        return None
    resume, directory = _newest_of(config.resume, Path(config.output_dir) / "checkpoints")
    if resume != "auto":
        with write_errors(Path(resume)):
            finish_replacement_of_missing(Path(resume))
    for path in whole_checkpoints(directory) if resume == "auto" else [Path(resume)]:
        with suppress(ExpertMeshError):
            return Resumed.read(path)
    return None


def how_it_goes_on(output_dir: Path) -> str:
    """What becomes of a run in a directory that ends before its end, in words."""
    saved = whole_checkpoints(output_dir / "checkpoints")
    return f"--resume auto resumes from step {step_of(saved[0])}" if saved else "nothing was saved, so it begins anew"


def check_resume(
    path: Path, config: TrainConfig, facts: Facts, ranks: Ranks, tell: Tell, balance: float | None = None
) -> Facts:
    """Compare settings, model and data with those of the run that wrote a checkpoint. All ranks call it together.

    Args:
        facts: of what this run has read, on rank 0; data that it has not read are not compared.
        tell: is told of what is not as it was, and permitted by --allow-changed, or cannot be compared.
        balance: the weight of the balancing loss of this model where no setting says it; None: unknown.

    Returns:
        The same with those of an adapter that is there no more, as a resumed run does not need it.

    Raises:
        ExpertMeshError: on all ranks, when its state means nothing to these settings; or the model, the data or what is
            minimised is another, and --allow-changed does not name it.
    """
    with raise_together():
        if ranks.rank == 0:
            marker = read_marker(path)
            compare_run(path, marker["facts"], marker["settings"], config, facts, tell, balance)
            if config.init_adapter and "adapter" in marker["facts"]:
                return {"adapter": marker["facts"]["adapter"], **facts}
    return facts


def compare_run(
    path: Path,
    there: Facts,
    settings: dict[str, Any],
    config: TrainConfig,
    here: Facts,
    tell: Tell,
    balance: float | None = None,
) -> None:
    """As `check_resume`, of facts and settings that were read from `path`, on one rank."""
    with well_formed(path):
        # where there are none nothing is recorded, and a run that is resumed need not read its adapter
        there, here = ({"adapter": {}, "tokens": {}, _PROCESSOR: {}} | facts for facts in (there, here))
        if config.init_adapter and not here["adapter"]:
            here["adapter"] = there["adapter"]
        began, config = (
            replace(each, router_aux_loss_coef=balance) if each.router_aux_loss_coef is None else each
            for each in (recorded_config(settings, path), config)
        )
        of_adapter, of_tokens = began.init_adapter, began.add_tokens or began.resize_vocab
        of_images = began.images and "images" in there.get("data", {}) and here[_PROCESSOR]
        for name, was_given in (("adapter", of_adapter), ("tokens", of_tokens), (_PROCESSOR, of_images)):
            if was_given and not there[name]:
                tell(f"warning: {path}: an earlier release saved no record of {name}, so they are not compared")
                there[name] = here[name]
        found = [
            _compared(name, there[name], here[name], began, config)
            for name in there
            if name in here and there[name] != here[name]
        ]
    found += [_Difference(line) for line in changed_state(began, config)]
    if changed := changed_settings(began, config, Moves.OBJECTIVE):
        said = _both(began, config, changed)
        found.append(_Difference(f"{said}, so it would minimise something else", "objective", "objective", said))
    _refuse(found, path, config.allow_changed)
    for each in found:
        tell(f"warning: resuming with a different {each.of} (--allow-changed): {each.told}")
    if "data" in here and "data" not in there:
        tell(f"warning: {path}: was saved from Python without a record of its data, so the data are not compared")


class _Difference(NamedTuple):
    """What the run that is resumed had otherwise.

    refused: in words, where it may not be. allowed_by: the name with which --allow-changed permits it; empty: none, and
    `refused` says what to do. of, told: what differs and how, once it is permitted.
    """

    refused: str
    allowed_by: str = ""
    of: str = ""
    told: str = ""


def _refuse(found: Sequence[_Difference], path: Path, allowed: Sequence[str]) -> None:
    """
    Raises:
        ExpertMeshError: some are not permitted; it says all that is to be done.
    """
    refused = [each for each in found if not (each.allowed_by and each.allowed_by in allowed)]
    lines = [each.refused for each in refused if not each.allowed_by]
    if permitted := [each for each in refused if each.allowed_by]:
        names = dict.fromkeys([*allowed, *(each.allowed_by for each in permitted)])
        anyway = f"use the same, or resume anyway with --allow-changed {' '.join(names)}"
        lines.append("; ".join([*(each.refused for each in permitted), anyway]))
    if lines:
        raise ExpertMeshError(f"--resume {path}: {'; '.join(lines)}")


def _both(there: TrainConfig, here: TrainConfig, names: list[str]) -> str:
    """What both runs have of some settings, in words."""
    said = [", ".join(_told(config, name) for name in names) for config in (there, here)]
    return f"that run had {said[0]}, this one has {said[1]}"


def _told(config: TrainConfig, name: str) -> str:
    value = getattr(config, name)
    return f"no {flag_of(name)}" if value is False or value in (None, "", []) else as_flag(name, value)


def _compared(
    name: str, there: Mapping[str, str], here: Mapping[str, str], began: TrainConfig, config: TrainConfig
) -> _Difference:
    """What differs in facts of this name."""
    said = differences([there, here], ["in that run", "now"])
    if name == "tokens":  # embedding, head and the optimizer's state have rows for them
        return _Difference(f"has other new tokens: {said}; take the same --add-tokens")
    if name == _PROCESSOR:
        return _Difference(f"is of another {name} (it began with {began.model}'s): {said}", "data", name, said)
    is_model = name in ("model", "teacher", "adapter")
    if hint := (explain_model if is_model else explain_samples)(there, here):
        said = f"{hint}: {said}"
    if not is_model and began.template_date != config.template_date:
        dates = [each or "no recorded date" for each in (began.template_date, config.template_date)]
        said = f"its chat template wrote {dates[0]}, now {dates[1]} (--template-date sets it): {said}"
    if not is_model:
        changed = changed_settings(began, config, Moves.SAMPLES)
        if changed := [each for each in changed if each != "template_date"]:
            said = f"{_both(began, config, changed)}: {said}"
    origin = getattr(began, "init_adapter" if name == "adapter" else name if is_model else "dataset") or "none"
    if name == "evaluation data":  # held out of the other where it has no data set of its own
        origin = began.eval_dataset or origin
    if name == QUESTIONS:
        origin = began.eval_generate
    other = f"another {name}" if is_model else f"other {name}"
    return _Difference(f"is of {other} (it began with {origin}): {said}", "model" if is_model else "data", name, said)


def check_data_order(there: Mapping[str, int], here: Mapping[str, int], config: TrainConfig, path: Path) -> None:
    """The batches to come must be those that would have come.

    Args:
        there, here: what decides which tokens each step sees, of the run that wrote `path` and of this one.

    Raises:
        ExpertMeshError: they differ.
    """
    may_change = ("rows", "tokens") if "data" in config.allow_changed else ()
    for name, value in there.items():
        # beside these there is where a stream stands
        if here.get(name, value) != value and name not in may_change:
            raise ExpertMeshError(
                f"--resume {path}: that run had {name.replace('_', ' ')} {value}, this one has "
                f"{here[name]}; other batches would make it another run"
                + (f"; --global-batch-size {value} keeps it" if name == "global_batch_size" else "")
            )


def changed_state(there: TrainConfig, config: TrainConfig) -> list[str]:
    """Why the state of a run means nothing to another, in words: one optimizer's means nothing to another, to another
    adapter, or to what was frozen; and weights trained with one RoPE scaling are not meant for another.

    Args:
        there: what a checkpoint was saved with (see `recorded_config`).
    """
    # what is read by an optimizer alone means to its state what its entry says
    heeded = {name for entry in OPTIMIZERS.entries() for name in entry.heeds}
    changed = [name for name in changed_settings(there, config, Moves.STATE) if name not in heeded]
    if bool(there.train_mtp) == bool(config.train_mtp):  # its layer is trained, with whatever weight
        changed = [name for name in changed if name != "train_mtp"]
    said = [f"{_both(there, config, changed)}; take the same"] if changed else []
    of_state = config.optimizer_entry.state_settings
    if there.optim != config.optim:
        return said
    return said + [
        f"that run had {own.flag} {saved.value}, this one has {own.value}{own.origin}; use {own.flag} {saved.value}"
        for saved, own in zip(of_state(vars(there)), of_state(vars(config)), strict=True)
        if saved.value != own.value
    ]

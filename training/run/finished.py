"""The record of a run that has come to its end, by which the same command, started again, finds nothing left to do."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...checkpoints.files.checksums import check_seal, seal
from ...checkpoints.files.directories import write_errors
from ...checkpoints.training_state.marker import whole_checkpoints
from ...checkpoints.training_state.saving import checkpoint_name
from ...moe.util.atomic_write import sync, whole
from ...moe.util.errors import ExpertMeshError
from ...moe.util.telling import telling
from ...sharding.runtime.process import Ranks, raise_together
from ..config.train_config import TrainConfig
from ..report.page import REPORT, write_report
from ..start.fingerprints import Facts, exports_alike
from ..start.resume import Resumed, Tell, check_data_order, compare_run
from ..steps.evaluate import Best

FILE = "finished.json"
EXPORTS = ("hf", "adapter")
ANNOUNCED = "finished.json.announced"
"""What is to become FILE once all exports are there: killed in between, a run has come to its end all the same."""


@dataclass(frozen=True)
class Finished:
    """step: the last one that was made, fewer than num_steps after an early stop. holds: what is exported, in words.

    settings, facts, order: of the run, as its training checkpoints record them.
    """

    step: int
    num_steps: int
    holds: str
    settings: dict[str, Any]
    facts: Facts
    order: dict[str, int]

    def announce(self, output_dir: Path) -> None:
        """Before the exports are written: say of what run they are. Not where there are any, which may be others."""
        exports = _exports(self.settings)
        if exports and not any((output_dir / name).exists() for name in exports):
            self._write(output_dir / ANNOUNCED)

    def write(self, output_dir: Path) -> None:
        """Record it, now that all exports are there."""
        if (output_dir / ANNOUNCED).exists():
            (output_dir / ANNOUNCED).replace(output_dir / FILE)
            sync(output_dir)
        else:
            self._write(output_dir / FILE)

    def _write(self, path: Path) -> None:
        with whole(path, durable=True) as partial:
            partial.write_text(json.dumps(seal(asdict(self)), indent=1), encoding="utf-8")


def exports_of(config: TrainConfig) -> list[str]:
    """Directories in --output-dir that a run exports to."""
    return _exports(asdict(config))


def _exports(settings: Mapping[str, Any]) -> list[str]:
    if not settings.get("export"):
        return []
    adapts = settings.get("adapter") != "none"
    return ["hf"] * (not adapts or bool(settings.get("merge"))) + ["adapter"] * adapts


def read_finished(output_dir: Path) -> Finished | None:
    """The record; None where no run has come to its end, or it cannot be read. One that was killed before it could
    write its record has come to its end where all that it announced is there."""
    if (done := _read(output_dir / FILE)) is not None:
        return done
    announced = _read(output_dir / ANNOUNCED)
    is_there = announced is not None and all((output_dir / name).exists() for name in _exports(announced.settings))
    return announced if is_there else None


def _read(path: Path) -> Finished | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        check_seal(found, path)
        del found["checksum"]
        kinds = {"step": int, "num_steps": int, "holds": str, "settings": dict, "facts": dict, "order": dict}
        return Finished(**found) if all(isinstance(found[name], kinds[name]) for name in kinds) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ExpertMeshError):
        return None


def recorded_date(config: TrainConfig, resumed: Resumed | None) -> str:
    """The date that chat templates wrote in the run that is to be resumed; empty: none, or there is no such run."""
    if resumed is not None:
        return resumed.template_date
    done = read_finished(Path(config.output_dir)) if config.resume == "auto" else None
    return "" if done is None else str(done.settings.get("template_date", ""))


def forget_finished(output_dir: Path) -> None:
    """Delete the record, as the run goes on."""
    for name in (FILE, ANNOUNCED):
        (output_dir / name).unlink(missing_ok=True)


def find_finished(
    config: TrainConfig,
    output_dir: Path,
    num_steps: int,
    facts: Facts,
    order: dict[str, int],
    ranks: Ranks,
    tell: Tell,
) -> str | None:
    """Whether `--resume auto` finds that all is done; what to say then. All ranks call it together.

    Where more is asked for than was done, the run goes on from its training checkpoints.

    Args:
        facts, order: of this run (see `check_resume` and `check_data_order`).
        tell: is told of what is not as it was.

    Raises:
        ExpertMeshError: on all ranks, when the run that has finished is another one; or more is asked for, and it left
            nothing to go on from.
    """
    answer: list[str | None] = [None]
    with raise_together(), write_errors(output_dir):
        if ranks.rank == 0 and (done := read_finished(output_dir)) is not None:
            answer = [_find(done, config, output_dir, num_steps, facts, order, tell)]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def complete_report(output_dir: Path, tell: Tell) -> None:
    """Write the report.html of a run that was killed after it had recorded its end and before its report said so;
    nothing where it does.

    Args:
        tell: is told if it is written, or cannot be.
    """
    report = output_dir / REPORT
    recorded = next(path for name in (FILE, ANNOUNCED) if (path := output_dir / name).exists())
    if report.exists() and report.stat().st_mtime_ns >= recorded.stat().st_mtime_ns:
        return
    with telling("report.html was not written", tell):  # what counts is there
        write_report(output_dir, "finished")
        tell(f"{report} is written now; the run was killed before it was")


def _find(
    done: Finished,
    config: TrainConfig,
    output_dir: Path,
    num_steps: int,
    facts: Facts,
    order: dict[str, int],
    tell: Tell,
) -> str | None:
    exports, earlier = exports_of(config), [name for name in EXPORTS if (output_dir / name).exists()]
    are_there = set(exports) <= set(earlier)
    is_alike = not exports or exports_alike(done.settings, config, output_dir / FILE)
    if are_there and is_alike and (num_steps == done.num_steps or num_steps <= done.step):
        file = output_dir / FILE
        compare_run(file, done.facts, done.settings, config, facts, tell)
        check_data_order(done.order, order, config, file)
        beyond = f", beyond the {num_steps} steps asked for now" if num_steps < done.step else ""
        return f"already finished at step {done.step}{beyond}; nothing is trained or written; {done.holds}"
    if earlier and not whole_checkpoints(output_dir / "checkpoints"):
        if not config.overwrite_output_dir:
            raise ExpertMeshError(
                f"--resume auto: {output_dir}: the run there finished at step {done.step} and left no "
                f"training checkpoint to resume from: {way_to_merge(config, output_dir)}choose another "
                "--output-dir, or replace it with --overwrite-output-dir"
            )
        forget_finished(output_dir)
    return None


def way_to_merge(config: TrainConfig, output_dir: Path) -> str:
    """What to do where `--resume auto` finds an adapter without the model that is to be made of it; empty elsewhere."""
    hf, adapter = output_dir / "hf", output_dir / "adapter"
    if config.resume != "auto" or not config.merge or not adapter.exists() or hf.exists():
        return ""
    return f"make the missing model with `expertmesh-checkpoints merge {config.model} {adapter} {hf}`, "


def way_to_export(output_dir: Path) -> str:
    """How to export what was trained, where its export has failed."""
    saved = whole_checkpoints(output_dir / "checkpoints")
    if not saved:
        return "no training checkpoint was saved (--save-steps), so the trained weights are lost"
    return (
        f"the weights are kept in {saved[0]}: once that is mended, the same command with --resume auto exports them, "
        f"or `expertmesh-checkpoints export {saved[0]} DIR` writes the model elsewhere"
    )


def held_line(output_dir: Path, config: TrainConfig, step: int, best: Best, took_best: bool) -> str:
    """Whose weights a finished run has exported, and how to get the others, in a line.

    Args:
        step: the last one.
        took_best: whether the weights of the best evaluation were taken at the end.
    """
    exports = [str(output_dir / name) for name in exports_of(config)]
    if not exports:
        return "nothing was exported (--no-export)"
    what = f"{' and '.join(exports)} {'have' if len(exports) > 1 else 'has'} the weights"
    if best.step == 0:
        return f"{what} of the last step, {step}"
    of_last, of_best = f"of the last step, {step}", f"of the best evaluation (step {best.step}, {best})"
    if best.step == step:
        return f"{what} {of_last}, and {of_best}"
    held, other, number = (of_best, of_last, step) if took_best else (of_last, of_best, best.step)
    saved = output_dir / "checkpoints" / (checkpoint_name(step) if took_best else "best")
    ways = [] if took_best else ["--load-best-model-at-end exports them at the end of a run"]
    if saved.exists() and config.adapter != "none":
        ways.insert(0, f"--resume {saved} --max-steps {number} exports them")
    elif saved.exists():
        ways.insert(0, f"`expertmesh-checkpoints export {saved} DIR` exports them")
    return f"{what} {held}, not those {other}: {'; '.join(ways) or 'they were not saved'}"

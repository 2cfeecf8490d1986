"""Saves training checkpoints while a run continues (see `checkpoints.training_state`)."""

import functools
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ...moe.util.atomic_write import PARTIAL, place_link, sync, whole
from ...moe.util.errors import ExpertMeshError
from ...sharding.runtime.process import raise_together
from ...sharding.runtime.watchdog import NO_LIMIT_SECONDS, SAVERS
from ...sharding.state import changing_state, local_tensor
from ..ep_shards.manifest import export_table
from ..files.checksums import seal
from ..files.directories import finish_replacement, replace_directory, temporary_beside
from ..files.kept import file_entry
from ..hf.checkpoint import Checkpoint
from ..hf.side_files import plan_side_files
from ..model_card import write_card
from .marker import FORMAT, MARKER, VERSION, carried_record, step_of, whole_checkpoints
from .state_table import brief

BEST = "best"
_CUT_SHORT = "unexpected pos"
"""What torch says of a write that came to less than it was to, as on a full disk; the system's own error is lost."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    step: steps made, with those whose update was skipped. tokens: seen, without padding. scheduler: the learning rate
    scheduler's state. order: what decides the order of the data, to be compared on resume. settings: the run's resolved
    configuration. best: the lowest evaluation loss so far, the "step" it was at, and what else the loop remembers of
    it; empty before the first. owed: what is due after this step, by its key in metrics.jsonl, and was cut by a signal.
    """

    step: int
    tokens: int
    scheduler: dict[str, Any]
    order: dict[str, int]
    settings: dict[str, Any]
    best: dict[str, Any] = field(default_factory=dict)
    owed: list[str] = field(default_factory=list)


class Saver:
    """Saves training checkpoints into a directory, one at a time, in the background.

    Args:
        directory: holds them all.
        origin: what the model was loaded from; its side files and its table of exported tensors go along.
        tokenizer: whose files lie there in place of the origin's own, if not None.
        limit: how many complete ones to keep; None keeps all.
        base: what to say of the model beside which adapters alone are saved; None where all of it is.
        facts: what the run has read, to be compared on resume: digests by name, of its model and of its data.
        card: makes the card of the model as it is.
    """

    def __init__(
        self,
        directory: Path,
        origin: Checkpoint,
        tokenizer: Any,
        limit: int | None,
        base: dict[str, str] | None,
        facts: dict[str, dict[str, str]],
        card: Callable[[], str] = str,
    ) -> None:
        self.directory = directory
        self.origin = origin
        self.tokenizer = tokenizer
        self.limit = limit
        self.base = base
        self.facts = facts
        self.card = card
        self.carried: dict[str, Any] | None = None
        self.transposed: list[str] = []
        with raise_together():
            if dist.get_rank() == 0:
                plan_side_files(origin.source, tokenizer)  # what cannot go along is better told of now
                self.carried = carried_record(origin) if base is None else None
        # of its own, so that the background thread's collectives do not mix with training's
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=NO_LIMIT_SECONDS), group_desc=SAVERS)
        self.stager: DefaultStager | None = None
        self.copying: Future[None] | None = None
        self.thread: threading.Thread | None = None
        # on rank 0: the directory of the checkpoint under way, and who may give it its name, or delete it
        self.partial: Path | None = None
        self.naming = threading.Lock()
        self.problem: str | None = None
        self.broken: Exception | None = None

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, copies: bool = True) -> None:
        """Begin a checkpoint. All ranks call it together, each after `wait`, which tells how it ended.

        Args:
            copies: whether all tensors are copied to host memory first: they may change once `wait_for_copies` has
                returned. Else one is copied at a time, as it is written, and none may change before `wait` has
                returned.
        """
        assert self.thread is None, "save without waiting for the one before"
        partial, self.problem = self._make_directory(progress.step)
        if partial is None:
            return
        self.transposed = sorted(name for name, part in changing_state(model).items() if part.transposed)
        state = {**training_state(model, optimizer), **_rng_state()}
        # Each rank syncs what it writes, which rank 0, on another node, cannot. Copying ahead, the thread that writes
        # would ask for its current GPU: the node's first, not this rank's, in any thread that does not set it; and so
        # make a context of gigabytes there.
        writer = FileSystemWriter(partial / "state", sync_files=True, per_thread_copy_ahead=0)
        if copies:
            response: Any = dcp.async_save(
                state, storage_writer=writer, async_stager=self._make_stager(), process_group=self.group
            )
            self.copying, written = response.staging_completion, response.upload_completion.result
        else:
            written = functools.partial(_write, state, writer, self.group, _current_gpu())
        arguments = (written, partial, progress)
        self.thread = threading.Thread(target=self._finish_or_break, args=arguments, daemon=True)
        self.thread.start()

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """On a GPU, once the optimizer has its state: begin to pin the memory that checkpoints are copied into, in the
        thread that copies. Else the first one would, which takes 10 to 40 seconds for 35 GB (read, not measured), and
        the next update would wait for it. What this copies is of no moment."""
        if self.stager is None and _is_on_gpu() and optimizer.state:
            self._make_stager().stage(training_state(model, optimizer))

    def bytes_to_copy(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Bytes that the copies of a checkpoint take of the host's memory for this rank, once the optimizer has its
        state: on a GPU from the first one to the end of the run."""
        return sum(local_tensor(tensor).nbytes for tensor in training_state(model, optimizer).values())

    def wait_for_copies(self) -> None:
        """Wait until the tensors of the checkpoint under way have been copied, or could not be, which `wait` will
        tell."""
        if self.copying is not None:
            wait_for_futures([self.copying])
            self.copying = None

    def _make_stager(self) -> DefaultStager:
        """What copies each tensor once, in a thread of its own. On a GPU into pinned memory, which is kept for the next
        checkpoint: it is slow to come by. The copies begin when the device has done what it was told so far."""
        is_gpu = _is_on_gpu()
        if self.stager is None:
            self.stager = _Stager(
                StagingOptions(
                    use_pinned_memory=is_gpu,
                    use_shared_memory=False,
                    use_async_staging=True,
                    use_non_blocking_copy=is_gpu,
                )
            )
        if is_gpu:
            torch.cuda.synchronize()
        return self.stager

    def _drop_copies(self) -> None:
        """What was copied is on disk, or will never be."""
        if self.stager is not None and not _is_on_gpu():
            self.stager.close()
            self.stager = None

    def wait(self) -> str | None:
        """Wait until the checkpoint under way is complete; what went wrong with it, the same on all ranks, or None.

        Raises:
            RuntimeError: another rank is gone, so that this one could not find out.
        """
        if self.thread is not None:
            self.wait_for_copies()
            self.thread.join()
            self.thread = None
            self._drop_copies()
        if self.broken is not None:
            raise self.broken
        problem, self.problem = self.problem, None
        return problem

    def abandon(self) -> None:
        """Delete what there is of the checkpoint under way, since the process is about to end."""
        self.naming.acquire()  # and never released: it must not get its name half deleted
        for _ in range(10):  # files may still be written into it
            if self.partial is not None and self.partial.exists():
                shutil.rmtree(self.partial, ignore_errors=True)

    def _make_directory(self, step: int) -> tuple[Path | None, str | None]:
        """(a temporary directory with the side files, None), or (None, what went wrong); the same on all ranks."""
        made: list[str | None] = [None, None]
        if dist.get_rank() == 0:
            try:
                self.directory.mkdir(exist_ok=True)  # not its parents: a run's directory that is gone must be told
                self.partial = partial = temporary_beside(self.directory / checkpoint_name(step))
                made[0] = str(partial)
                (partial / "model").mkdir()
                plan_side_files(self.origin.source, self.tokenizer).write(partial / "model")
                write_card(self.card(), *[partial / "model"] * 2)
            except (OSError, ExpertMeshError) as error:
                if made[0] is not None:
                    shutil.rmtree(made[0], ignore_errors=True)
                made = [None, f"checkpoint of step {step}: {brief(error)}"]
        dist.broadcast_object_list(made, src=0)
        path, problem = made
        return (None if path is None else Path(path)), problem

    def _finish_or_break(self, write: Callable[[], object], partial: Path, progress: Progress) -> None:
        try:
            self._finish(write, partial, progress)
        except Exception as error:
            self.broken = error

    def _finish(self, write: Callable[[], object], partial: Path, progress: Progress) -> None:
        """In the thread of every rank: write the bytes, or wait for those who do, add up checksums, and let rank 0 put
        the name on it."""
        rank = dist.get_rank()
        sums: dict[str, Any] = {}
        problem: str | None = None
        try:
            write()
            mine = list((partial / "state").glob(f"__{rank}_*"))
            if rank == 0:
                mine += [partial / "state" / ".metadata"]
                mine += [file for file in (partial / "model").rglob("*") if file.is_file()]
            sums = {str(file.relative_to(partial)): file_entry(file) for file in mine}
        except BaseException as error:
            problem = self._told(error, progress.step)
        shares: list[tuple[dict[str, Any], str | None]] = [({}, None)] * dist.get_world_size()
        dist.all_gather_object(shares, (sums, problem), group=self.group)
        problem = next((p for _, p in shares if p is not None), None)
        outcome = [problem]
        if rank == 0 and problem is None:
            try:
                files = {name: entry for share, _ in shares for name, entry in share.items()}
                with self.naming:
                    self._complete(partial, progress, files)
            except BaseException as error:
                outcome = [brief(error)]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[0] is not None:
            self.problem = f"checkpoint of step {progress.step}: {outcome[0]} ({_room(self.directory)})"
            dist.barrier(group=self.group)
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)

    def _told(self, error: BaseException, step: int) -> str:
        """Why tensors were not written, in a line."""
        text = brief(error)
        if _CUT_SHORT not in text:
            return text
        rank = min(getattr(error, "failures", None) or [dist.get_rank()])
        file = self.directory / checkpoint_name(step) / "state" / f"__{rank}_0.distcp"
        return f"{file}: cannot be written to its end: the disk is full, or a quota or limit is reached"

    def _complete(self, partial: Path, progress: Progress, files: dict[str, Any]) -> None:
        table = {
            "format": FORMAT,
            "version": VERSION,
            "world_size": dist.get_world_size(),
            **vars(progress),
            "exported": export_table(self.origin.exported),
            "transposed": self.transposed,
            "base": self.base,
            "carried": self.carried,
            "facts": self.facts,
            "files": dict(sorted(files.items())),
        }
        with whole(partial / MARKER) as marker:
            marker.write_text(json.dumps(seal(table), indent=1), encoding="utf-8")
        final = self.directory / checkpoint_name(progress.step)
        replace_directory(partial, final)  # of an earlier attempt at the same step, or a damaged one, if there is one
        surplus: list[Path] = []
        if progress.best.get("step") == progress.step:
            before = (self.directory / BEST).resolve() if (self.directory / BEST).exists() else final
            place_link(self.directory / BEST, Path(final.name))
            if before.name != final.name and self._is_for_best_alone(before, progress):
                surplus = [self.directory / before.name]
        elif (self.directory / BEST).resolve() == final.resolve():
            # an earlier attempt had its best evaluation at this step, with other weights
            (self.directory / BEST).unlink()
        later = self.later_than(progress.step)
        if self.limit is not None:
            others = [path for path in whole_checkpoints(self.directory) if path not in later + surplus]
            surplus += others[self.limit :]
        best = (self.directory / BEST).resolve()
        for old in dict.fromkeys(surplus + later):
            if old.resolve() != best:
                _discard(old)

    def _is_for_best_alone(self, path: Path, progress: Progress) -> bool:
        """Whether a complete checkpoint here, once the best, was saved for that alone: between two that --save-steps
        asks for."""
        every = progress.settings["save_steps"]
        is_here = path.parent == self.directory.resolve() and (path / MARKER).is_file()
        return is_here and every > 0 and step_of(path) % every != 0

    def later_than(self, step: int) -> list[Path]:
        """Checkpoints of an attempt that got beyond `step`, newest first. A run that has gone back to `step` deletes
        them when it saves its first: else `--resume auto` would resume from what it has given up."""
        return [path for path in whole_checkpoints(self.directory) if step_of(path) > step]

    def restore_best(self, resumed_from: Path, best: dict[str, Any]) -> bool:
        """After a resume: let the link to the best checkpoint be what it was at that point. All ranks call it together.

        Returns:
            Whether the checkpoint of the best evaluation is still there, beside this run's own or where it came from.
        """
        name = checkpoint_name(best["step"]) if best else ""
        places = [self.directory / name, resumed_from.resolve().parent / name]
        found = next((place for place in places if best and (place / MARKER).is_file()), None)
        there = [found is not None]
        with raise_together():
            if dist.get_rank() == 0:
                self.directory.mkdir(exist_ok=True)
                if found is None:
                    (self.directory / BEST).unlink(missing_ok=True)
                else:
                    place_link(self.directory / BEST, Path(name) if found == places[0] else found)
        dist.broadcast_object_list(there, src=0)
        return there[0]


class _Stager(DefaultStager):
    """torch 2.11's closes what copies tensors after each checkpoint, whereupon it can copy nothing more. This one does
    so when it is closed itself."""

    def _stage(self, state_dict: Any, **settings: Any) -> Any:
        copier = self._state_dict_stager
        vars(copier)["close"] = lambda: None  # of this one object, for this call
        try:
            return super()._stage(state_dict, **settings)
        finally:
            del vars(copier)["close"]


def _write(state: dict[str, Any], writer: FileSystemWriter, group: Any, gpu: int | None) -> None:
    """Write all tensors from where they are; in a thread, whose current GPU is not this rank's by itself."""
    if gpu is not None:
        torch.cuda.set_device(gpu)
    dcp.save(state, storage_writer=writer, process_group=group)


def _current_gpu() -> int | None:
    """This thread's, once it has done what it was told so far; None without one."""
    if not _is_on_gpu():
        return None
    torch.cuda.synchronize()
    return torch.cuda.current_device()


def _is_on_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _room(directory: Path) -> str:
    try:
        return f"{directory} has {shutil.disk_usage(directory).free / 1e6:,.1f} MB free"
    except OSError as error:
        return f"{directory}: {error.strerror}"


def _discard(path: Path) -> None:
    """Delete a checkpoint, taking its name away first: killed half-way, or after a crash of the machine, it must not
    look like a damaged one."""
    away = temporary_beside(path)
    path.rename(away / path.name)
    sync(path.parent)
    shutil.rmtree(away)


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer state that are here under flat names, sharing memory with what they name."""
    state: dict[str, Tensor] = {}
    for name, part in changing_state(model).items():
        if not part.is_here:
            continue
        state[f"model.{name}"] = part.tensor.detach()
        for key, value in optimizer.state.get(part.tensor, {}).items():
            state[f"optimizer.{name}.{key}"] = value
    return state


def _rng_state() -> dict[str, Tensor]:
    rank = dist.get_rank()
    state = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return state


def sweep(directory: Path) -> list[str]:
    """Finish what a killed run had begun to replace, and delete what it left half-written.

    Returns:
        The names of what is skipped for want of a marker.
    """
    for begun in directory.glob(f".step-*-*{PARTIAL}"):
        finish_replacement(directory / begun.name.removeprefix(".").rpartition("-")[0])
    for partial in directory.glob(".step-*"):
        shutil.rmtree(partial, ignore_errors=True)
    (directory / (BEST + PARTIAL)).unlink(missing_ok=True)
    return sorted(path.name for path in directory.glob("step-*") if not (path / MARKER).is_file())

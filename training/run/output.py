"""The output directory: one run's at a time, seen by all ranks, and cleared of an earlier run's results if so asked."""

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...checkpoints.files.directories import finish_replacement, write_errors
from ...checkpoints.files.lock import DirectoryLock
from ...checkpoints.training_state.marker import is_checkpoint_entry
from ...moe.util.atomic_write import PARTIAL
from ...moe.util.errors import ExpertMeshError
from ...moe.util.parser import flag_of
from ...sharding.runtime.process import Ranks, raise_together
from ...sharding.runtime.watchdog import STUCK
from ...sharding.torchrun import node_name, nodes_of
from ..config.train_config import TrainConfig
from ..data.data_files import places_read
from ..environment import FILE as ENVIRONMENT
from ..monitoring.trackers import TRACKERS
from ..report.profiles import PROFILES
from ..start.process import check_directory
from ..tasks.reference_logprobs import FILE as REFERENCE
from ..tasks.reference_logprobs import RECORD as REFERENCE_RECORD
from ..tasks.teacher import DIRECTORY as TEACHER
from .finished import ANNOUNCED, EXPORTS, exports_of, forget_finished, read_finished, way_to_merge
from .finished import FILE as FINISHED

CHECKPOINTS = "checkpoints"
_DIRECTORIES = ("hf", "adapter", PROFILES, TRACKERS, TEACHER)
_FILES = ("metrics.jsonl", "config.yaml", ENVIRONMENT, "report.html", FINISHED, ANNOUNCED, REFERENCE, REFERENCE_RECORD)
_SEEN_SECONDS, _NOT_NEEDED_SECONDS = 20.0, 5.0
"""A file system of a network may take a while to show on one node what another has written. Less is waited where a run
can do without."""


@contextmanager
def output_directory(config: TrainConfig, ranks: Ranks) -> Iterator[Path]:
    """Make --output-dir and hold it for this run; all ranks call it together, and none but rank 0 holds the lock.

    Raises:
        ExpertMeshError: on all ranks, when it cannot be written, holds another run's results that are not to be
            replaced, or something that this run is to read and would delete; when another run is at work in it; or
            when a node does not see it that has to.
    """
    output_dir = Path(config.output_dir)
    lock = DirectoryLock(output_dir)
    try:
        with raise_together(patient=ranks), write_errors(output_dir):
            if ranks.rank == 0:
                check_directory(output_dir)
                _check_taken(config, output_dir)
                _check_read(config, output_dir)
                output_dir.mkdir(parents=True, exist_ok=True)
                lock.acquire()
                if config.resume == "auto":
                    for name in EXPORTS:
                        # a kill may have come when the export was complete and had not its name yet
                        finish_replacement(output_dir / name)
                _check_taken(config, output_dir)  # another run may have ended while this one waited
        _check_shared(config, output_dir, ranks)
        yield output_dir
    finally:
        lock.release()


def clear_output(config: TrainConfig, output_dir: Path) -> None:
    """Delete all that an earlier run has written, where this one begins anew; files that no run writes stay.

    hf/, adapter/, profile/, trackers/, teacher/, stuck/ and each training checkpoint are a run's own, with all that is
    in them.
    """
    forget_finished(output_dir)  # also where it goes on: it is no longer at its end
    if _goes_on(config, output_dir):
        return
    for path in _written(output_dir):
        if config.teacher and path.name == TEACHER:  # this run's by now
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    with suppress(OSError):  # it holds what no run has written, or is not there
        (output_dir / CHECKPOINTS).rmdir()


def replaced(config: TrainConfig, output_dir: Path) -> list[Path]:
    """What of an earlier run does not stay beside what this one writes: all or, where it goes on, its training
    checkpoints, which are among this run's."""
    if _goes_on(config, output_dir):
        return [path for path in (output_dir / CHECKPOINTS).glob("*") if is_checkpoint_entry(path)]
    return _written(output_dir)


def _written(output_dir: Path) -> list[Path]:
    """What runs have written into the directory, half-written things too."""
    found = [path for name in (*_DIRECTORIES, STUCK) if (path := output_dir / name).is_dir() or path.is_symlink()]
    found += [path for name in _FILES if (path := output_dir / name).is_file() or path.is_symlink()]
    for name in _DIRECTORIES:
        found += output_dir.glob(f".{name}-*{PARTIAL}")
    for name in _FILES:
        found += [*output_dir.glob(f"{name}{PARTIAL}"), *output_dir.glob(f"{name}.*{PARTIAL}")]
    found += [path for path in (output_dir / CHECKPOINTS).glob("*") if is_checkpoint_entry(path)]
    return found


def _results(output_dir: Path) -> list[str]:
    """Names of what is there of an earlier run, but for its checkpoints."""
    return [name for name in _DIRECTORIES + _FILES if os.path.lexists(output_dir / name)]


def _goes_on(config: TrainConfig, output_dir: Path) -> bool:
    """Whether the run resumes the one that the output directory holds, be it finished, or may begin it anew: killed
    before its first checkpoint, it has exported nothing."""
    directory = output_dir / CHECKPOINTS
    if config.resume == "auto":
        has_exported = any((output_dir / name).exists() for name in EXPORTS)
        return any(directory.glob("step-*")) or read_finished(output_dir) is not None or not has_exported
    # one that is not there is told where it is looked for
    path = Path(config.resume or directory)
    return bool(config.resume) and (path.resolve().is_relative_to(directory.resolve()) or not path.exists())


def _check_taken(config: TrainConfig, output_dir: Path) -> None:
    if config.overwrite_output_dir or _goes_on(config, output_dir):
        return
    # of checkpoints/ also what no run of this program has called so
    taken = _results(output_dir) + sorted(path.name for path in (output_dir / CHECKPOINTS).glob("*"))
    if taken:
        resume = "" if config.resume == "auto" else "resume with --resume auto, "
        without = ", and no training checkpoint to resume from" if config.resume == "auto" else ""
        raise ExpertMeshError(
            f"--output-dir {output_dir}: already contains {', '.join(taken[:8])}{without}; "
            f"{way_to_merge(config, output_dir)}choose another, {resume}or replace them with --overwrite-output-dir"
        )


def _check_read(config: TrainConfig, output_dir: Path) -> None:
    """Nothing that the run is to read may be among what it deletes or replaces."""
    own = [output_dir / name for name in exports_of(config)]
    own += [] if _goes_on(config, output_dir) else _written(output_dir)
    for setting in fields(config):
        if setting.metadata.get("scope") != "input":
            continue
        flag = flag_of(setting.name)
        for name in places_read(flag, getattr(config, setting.name)):
            path = Path(name).resolve()
            for mine in (path.resolve() for path in own):
                if name != "auto" and path.is_relative_to(mine):
                    raise ExpertMeshError(
                        f"{flag} {name}: this run reads it, and would delete or replace {mine}; move it, or "
                        "choose another --output-dir"
                    )


def _check_shared(config: TrainConfig, output_dir: Path, ranks: Ranks) -> None:
    """Rank 0 leaves a marker that every rank must see, wherever ranks write or read what others do."""
    needed = config.save_steps > 0 or bool(config.resume)
    name = [f".seen-{uuid.uuid4().hex}{PARTIAL}"]
    dist.broadcast_object_list(name, src=0)
    marker = output_dir / name[0]
    with raise_together(), write_errors(output_dir):
        if ranks.rank == 0:
            for stale in output_dir.glob(f".seen-*{PARTIAL}"):
                stale.unlink(missing_ok=True)
            marker.touch()
    gathered: list[Any] = [None] * ranks.world_size
    sees = _sees(marker, _SEEN_SECONDS if needed else _NOT_NEEDED_SECONDS)
    dist.all_gather_object(gathered, (sees, node_name(), str(output_dir.resolve())))
    if ranks.rank == 0:
        marker.unlink(missing_ok=True)
    seen, nodes, places = zip(*gathered, strict=True)
    blind = [rank for rank in range(ranks.world_size) if not seen[rank]]
    if not blind:
        return
    said = (
        f"--output-dir {output_dir}: is not shared: files that rank 0 on {nodes[0]} writes to "
        f"{places[0]} do not appear on {nodes_of(blind, nodes)} in {places[blind[0]]}"
    )
    if needed:
        raise ExpertMeshError(
            f"{said}; all ranks write training checkpoints, so give a directory that all nodes share, "
            "or --save-steps 0 to train without checkpoints (only rank 0 writes the export)"
        )
    if ranks.rank == 0:
        print(f"{said}; files of rank 0 are only there", flush=True)


def _sees(marker: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not marker.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
        for directory in (marker.parent.parent, marker.parent):
            # to open a directory has NFS ask the server what is new in it
            with suppress(OSError):
                os.close(os.open(directory, os.O_RDONLY))
    return True

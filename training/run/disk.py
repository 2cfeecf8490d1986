"""Whether the disk has room for what a run is going to write: its training checkpoints, and its exports."""

import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...moe.util.errors import ExpertMeshError
from ...sharding.runtime.process import Ranks, raise_together
from ...sharding.torchrun import node_name
from ..config.train_config import TrainConfig
from .output import CHECKPOINTS, replaced


def disk_lines(
    config: TrainConfig, output_dir: Path, checkpoint: int, exports: Mapping[str, int], num_steps: int, ranks: Ranks
) -> list[str]:
    """What will lie on the disk at once and what is free, in a line for each file system, with a warning where not all
    fits. All ranks call it together.

    Args:
        checkpoint: bytes of a training checkpoint. exports: bytes of each, by its directory in --output-dir.

    Raises:
        ExpertMeshError: on all ranks, where the exports alone do not fit, or a checkpoint whose failure is to stop the
            run does not.
    """
    number = checkpoints_at_once(config, num_steps)
    place = output_dir / CHECKPOINTS
    seen: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(seen, (free_bytes(place), node_name()) if number else None)
    lines: list[str] = []
    with raise_together():
        if ranks.rank == 0:
            nodes = [each for each in seen if each is not None and each[0] is not None]
            lines = _lines(config, output_dir, number, checkpoint, exports, num_steps, min(nodes, default=None))
    return lines


def checkpoints_at_once(config: TrainConfig, num_steps: int) -> int:
    """The most training checkpoints that a run has at a time: those that it keeps, the one that is being written, and
    that of the best evaluation."""
    if not config.save_steps or not num_steps:
        return 0
    made = math.ceil(num_steps / config.save_steps)
    kept = made if config.save_total_limit is None else min(made, config.save_total_limit + 1)
    return kept + config.evaluates


def free_bytes(path: Path) -> int | None:
    """Bytes that may be written where `path` is or will be; None where the file system does not say."""
    with suppress(OSError):  # of which is told where something is written
        found = os.statvfs(_nearest(path))
        return found.f_bavail * found.f_frsize if found.f_blocks else None
    return None


def _nearest(path: Path) -> Path:
    """The directory that there is on the way to it; a link is followed."""
    place = Path(os.path.realpath(path))
    return next(each for each in (place, *place.parents) if each.is_dir())


def _lines(
    config: TrainConfig,
    output_dir: Path,
    number: int,
    checkpoint: int,
    exports: Mapping[str, int],
    num_steps: int,
    least: tuple[int, str] | None,
) -> list[str]:
    """
    Args:
        number: of training checkpoints at once.
        least: the fewest bytes that a node finds free for checkpoints, and that node.
    """
    needs = {name: ("export" if name == "hf" else "adapter", size) for name, size in exports.items()}
    if number:
        said = f"{number:,} checkpoints of {_size(checkpoint)}" if number > 1 else "a checkpoint"
        needs = {CHECKPOINTS: (said, number * checkpoint), **needs}
    by_system: dict[int, list[str]] = {}
    for name in needs:
        by_system.setdefault(os.stat(_nearest(output_dir / name)).st_dev, []).append(name)
    deleted, lines = list(replaced(config, output_dir)), list[str]()
    for names in by_system.values():
        place = output_dir if len(by_system) == 1 else output_dir / names[0]
        free = free_bytes(place)
        if free is None:
            continue
        node = ""
        if CHECKPOINTS in names and least is not None and least[0] < free and least[1] != node_name():
            free, node = least[0], f" on {least[1]}"
        system = os.stat(_nearest(place)).st_dev
        room = free + _bytes_of(path for path in deleted if os.lstat(path).st_dev == system)
        where = f"{place}{node}"
        _check(config, where, room, checkpoint, {name: exports[name] for name in names if name in exports}, num_steps)
        total = sum(needs[name][1] for name in names)
        said = " + ".join(
            f"{what} of {_size(size)}" if name != CHECKPOINTS or number == 1 else what
            for name, (what, size) in needs.items()
            if name in names
        )
        together = f" = {_size(total)}" if len(names) > 1 or number > 1 else ""
        lines.append(f"disk    {said}{together} in {where}, {_size(room)} free")
        if total > room:
            lines.append(_warning(config, where, room, number, checkpoint, total))
    return lines


def _check(
    config: TrainConfig, where: str, room: int, checkpoint: int, exports: Mapping[str, int], num_steps: int
) -> None:
    """
    Raises:
        ExpertMeshError: what is sure to be written does not fit.
    """
    if (needed := sum(exports.values())) > room:
        raise ExpertMeshError(
            f"--output-dir {where}: the export takes {_size(needed)}, and {_size(room)} are free; free some, give "
            "another --output-dir, or --no-export with --save-steps, and export a training checkpoint to another disk"
        )
    stops = config.on_save_error == "stop" and 0 < config.save_steps <= num_steps
    if stops and checkpoint > room:
        raise ExpertMeshError(
            f"--output-dir {where}: a training checkpoint takes {_size(checkpoint)}, and {_size(room)} are free; free "
            "some, give another --output-dir, --save-steps 0 to train without checkpoints, or --on-save-error continue"
        )


def _warning(config: TrainConfig, where: str, room: int, number: int, checkpoint: int, total: int) -> str:
    fitting = (room - total + number * checkpoint) // checkpoint - 1 - config.evaluates if number else 0
    fewer = f"--save-total-limit {fitting} keeps as few as fit" if fitting > 0 else "--save-steps 0 saves none"
    return (
        f"warning: --output-dir {where}: checkpoints and export take {_size(total)} together, and {_size(room)} are "
        f"free; {fewer}, or free some before the disk is full"
    )


def _bytes_of(paths: Iterable[Path]) -> int:
    """Of files and of all that directories hold; not of what links lead to."""
    files = (file for path in paths for file in ([path] if path.is_symlink() else [path, *path.rglob("*")]))
    return sum(os.lstat(file).st_size for file in files if file.is_file() and not file.is_symlink())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:,.1f} MB"

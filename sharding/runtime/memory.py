"""What a process may hold and holds: the memory that is free on its host, under each limit that the kernel sets, and
what of it the process takes, on a GPU or a host."""

import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from ...moe.util.process_place import process_place

_LIMITS = (
    # cgroup v2, where exceeding `high` all but stops a process
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    # v1
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of a limit and of what is used of it, and the field of memory.stat that counts page cache."""
_MOUNTED = {"cgroup": "sys/fs/cgroup/memory", "cgroup2": "sys/fs/cgroup"}
"""Where file systems of cgroups usually are mounted: v1's of memory, and v2's."""
_OF_PROCESS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))


def available_memory(device: torch.device, before: float) -> float:
    """Bytes that this rank may hold: on a GPU all of its memory; on a host what is free there (or under the limits of
    the process's cgroups), divided among the node's ranks, or what its own limits leave, and what it holds already."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return before + min(free_on_host() / process_place().ranks_here, free_of_process())


def resident() -> float:
    """Bytes that this process holds in memory; where the system does not say, the most it ever held."""
    try:
        return float(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()
    except OSError:
        return _most_resident()


def _most_resident() -> float:
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def most_held(device: torch.device) -> float:
    """The most bytes that this rank has held since it started: on a GPU what torch has allocated there, else the
    process's resident memory."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else _most_resident()


def measured_peak(device: torch.device) -> float:
    """The largest `most_held` of all ranks, which call it together."""
    largest = torch.tensor(most_held(device), dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def free_on_host(root: Path = Path("/")) -> float:
    """Bytes that are free on this host, or under a limit of the process's cgroup or of one that this is in; infinity
    where nothing is told. root: of the files that the kernel reports in."""
    return min((*_free_in_all(root), *_free_in_cgroups(root)), default=float("inf"))


def free_of_process(root: Path = Path("/")) -> float:
    """Bytes that this process may still take by its own limits (`ulimit -v`, `-d`); infinity without any."""
    used = _fields(root / "proc/self/status")
    limits = [(resource.getrlimit(limit)[0], used.get(name)) for limit, name in _OF_PROCESS]
    free = [most - have for most, have in limits if most != resource.RLIM_INFINITY and have is not None]
    return min(free, default=float("inf"))


def _free_in_all(root: Path) -> Iterable[float]:
    available = _fields(root / "proc/meminfo").get("MemAvailable")
    return [] if available is None else [available]


def _fields(file: Path) -> dict[str, float]:
    """Bytes by name, of lines such as "MemAvailable:  1024 kB"."""
    pairs = (line.split(":", 1) for line in _lines(file) if line.endswith(" kB"))
    return {name: float(size.removesuffix(" kB")) * 1024 for name, size in pairs}


def _free_in_cgroups(root: Path) -> Iterator[float]:
    """Under each limit there is. Page cache counts as free: it gives way."""
    for directory in _cgroups(root):
        for limit, used, cache in _LIMITS:
            try:
                most, current = ((directory / name).read_text(encoding="utf-8").strip() for name in (limit, used))
                stat = (directory / "memory.stat").read_text(encoding="utf-8").split()
                if most != "max":
                    yield max(0.0, float(most) - float(current) + float(stat[stat.index(cache) + 1]))
            except (OSError, ValueError):
                continue


def _cgroups(root: Path) -> Iterator[Path]:
    """The directories of this process's cgroups that count memory, each before the one that it is in."""
    for kind, path in _paths(root):
        for mounted, point in _mounts(root, kind):
            inside = Path(path)
            # in a container the file system begins at its cgroup, or the path does; and may be of another namespace
            inside = inside.relative_to(mounted) if inside.is_relative_to(mounted) else Path()
            directory = point / ("" if ".." in inside.parts else str(inside).lstrip("/"))
            yield from (directory, *(parent for parent in directory.parents if parent.is_relative_to(point)))


def _paths(root: Path) -> Iterator[tuple[str, str]]:
    """(kind of file system, path) of this process's cgroups; the root's where the kernel does not say."""
    for line in _lines(root / "proc/self/cgroup") or ["0::/", "1:memory:/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            yield "cgroup" if controllers else "cgroup2", path


def _mounts(root: Path, kind: str) -> list[tuple[str, Path]]:
    """(cgroup that is mounted, where) of each file system of a kind."""
    found = []
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, system = (words.split() for words in line.partition(" - "))
        if len(mount) > 4 and len(system) > 2 and system[0] == kind:
            of_memory = kind == "cgroup2" or "memory" in system[2].split(",")
            found += [(mount[3], root / mount[4].lstrip("/"))] if of_memory else []
    return found or [("/", root / _MOUNTED[kind])]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []

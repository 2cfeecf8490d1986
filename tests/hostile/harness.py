"""Runs broken and hostile input through the product, in a monitored process of its own.

A case is one input, read by the function that reads it for users. It must end in a right result or in an
`ExpertMeshError` that names what is wrong. Any other exception is a failure, and so are: memory beyond a bound, a case
that takes longer than a bound, anything opened outside of the directories given, and anything written at all where
nothing is to be written.
"""

import ctypes
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime.process import start_process_group
from tests.distributed.pool import PRELOAD

MULTIPLIER = int(os.environ.get("HOSTILE_CASES", "1"))
"""So many times the usual number of cases are generated: HOSTILE_CASES=10 pytest tests/hostile."""

SEED = os.environ.get("HOSTILE_SEED")
"""Other cases than the usual ones: HOSTILE_SEED=1 pytest tests/hostile."""

SECONDS_A_CASE = 60
"""Of CPU; of wall time ten times as much, however busy the machine is."""
HEADROOM = 2**30
"""Bytes of address space that a case may take beside what the process has at its start."""

_WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
_RELATIVE = ("os.remove", "os.mkdir", "os.rmdir", "os.chmod")
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect")

Campaign = Callable[..., None]


@dataclass(frozen=True)
class Refused:
    """The product refused a case; `message` is what it said."""

    message: str


class Watch:
    """Runs cases in the worker, and sees what each opens, writes and starts.

    Attributes:
        directory: an empty one, for the cases' files; the working directory. Code that a case makes the product run
            puts a file named canary there.
        num_cases, num_refused: so far.
    """

    def __init__(self, directory: Path, now: Any, began: Any):
        self.directory = directory
        self.num_cases = self.num_refused = 0
        self.violations: list[str] = []
        self.forbidden: list[str] = []
        # the second is where what is seen of models is kept
        self.writable: list[str] = ["/dev/null", os.path.realpath(os.environ["XDG_CACHE_HOME"])]
        self._now, self._began = now, began
        self._active = False
        sys.addaudithook(self._audit)

    def forbid(self, outside: Path) -> None:
        """Nothing in there may be opened, by whatever name."""
        self.forbidden.append(os.path.realpath(outside))

    def attempt(self, case: str, call: Callable[[], Any], *names: str) -> Any:
        """Run a case, which is named `case` if it fails: what `call` returned, or `Refused` with one of the `names`.

        Raises:
            AssertionError: it ended in another way.
        """
        self.num_cases += 1
        self._now.value = case.encode(errors="backslashreplace")[: len(self._now) - 1]
        self._began[:] = time.monotonic(), time.process_time()
        self.violations.clear()
        self._active = True
        result: Any
        try:
            result = call()
        except ExpertMeshError as error:
            result = Refused(str(error))
        except BaseException as error:
            raise AssertionError(f"{case}: ended in {type(error).__name__}: {error}") from error
        finally:
            self._active = False
        assert not self.violations, f"{case}: {self.violations}"
        assert not (self.directory / "canary").exists(), f"{case}: ran code"
        if isinstance(result, Refused):
            self.num_refused += 1
            assert result.message.strip(), f"{case}: an error without a message"
            assert not names or any(name in result.message for name in names), (
                f"{case}: none of {names} in: {result.message}"
            )
        return result

    def refuse(self, case: str, call: Callable[[], Any], *names: str) -> str:
        """As `attempt`, for a case that must not end in a result; the message."""
        result = self.attempt(case, call, *names)
        assert isinstance(result, Refused), f"{case}: was taken, and gave {result!r:.200}"
        return result.message

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event in _STARTS:
            self.violations.append(f"{event} {arguments!r:.200}")
        elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            writes = bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if _inside(path, self.forbidden) or (writes and not _inside(path, self.writable)):
                self.violations.append(f"opened {path}{' for writing' * writes}")
        elif event in _WRITES:
            # shutil.rmtree names files by the descriptor of their directory
            descriptor = arguments[-1] if event in _RELATIVE and arguments[-1] >= 0 else None
            folder = os.getcwd() if descriptor is None else os.readlink(f"/proc/self/fd/{descriptor}")
            path = os.path.realpath(os.path.join(folder, os.fsdecode(arguments[0])))
            if not _inside(path, self.writable):
                self.violations.append(f"{event} {path}")


def _inside(path: str, directories: list[str]) -> bool:
    return any(path == directory or path.startswith(directory + "/") for directory in directories)


def run_campaign(campaign: Campaign, directory: Path, *args: Any) -> tuple[int, int]:
    """Run `campaign(watch, *args)` in a fresh process under limits; (number of cases, how many were refused).

    Args:
        campaign: importable by name.
        directory: the only place it may write to, outside of cases; and where it works.

    Raises:
        AssertionError: a case failed, hung, or brought the process down; it is named.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    now, began = context.RawArray(ctypes.c_char, 2000), context.RawArray(ctypes.c_double, [time.monotonic(), 0])
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, campaign, directory, now, began, args), daemon=True)
    process.start()
    theirs.close()
    try:
        while not ours.poll(0.5):
            seconds, of_cpu = time.monotonic() - began[0], _cpu_seconds(process.pid) - began[1]
            case = now.value.decode(errors="replace")
            assert max(seconds / 10, of_cpu) < SECONDS_A_CASE, f"not finished after {of_cpu:.0f} s of CPU: {case}"
        problem, num_cases, num_refused, seconds = ours.recv()
    except EOFError:
        process.join()
        case = now.value.decode(errors="replace")
        raise AssertionError(f"the process ended with exit code {process.exitcode} in: {case}") from None
    finally:
        process.kill()
        process.join()
    assert problem is None, problem
    print(f"{num_cases:,} cases, {num_refused:,} refused, {seconds:.1f} s of CPU")
    return num_cases, num_refused


def _cpu_seconds(process: int | None) -> float:
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def without_process_group() -> Iterator[None]:
    """Within it a campaign's process has none, for what makes its own."""
    dist.destroy_process_group()
    try:
        yield
    finally:
        start_process_group(use_cpu=True, timeout_seconds=60)


def _work(pipe: Connection, campaign: Campaign, directory: Path, now: Any, began: Any, args: tuple[Any, ...]) -> None:
    import datasets
    import torch

    os.chdir(directory)
    (directory / "cache").mkdir()
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    tempfile.tempdir = str(directory / "cache")
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    start_process_group(use_cpu=True, timeout_seconds=60)
    watch = Watch(directory, now, began)
    problem = None
    with memory_limit():
        try:
            campaign(watch, *args)
        except BaseException:
            problem = traceback.format_exc()
    pipe.send((problem, watch.num_cases, watch.num_refused, time.process_time()))
    pipe.close()


@contextmanager
def memory_limit() -> Iterator[None]:
    """Let the process have HEADROOM more address space than it has now, and no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + HEADROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(num_cases: int, strategy: SearchStrategy[Any], body: Callable[[Any], None]) -> None:
    """Call `body` with so many examples; the same ones each time, so that what fails here fails everywhere."""
    run = given(strategy)(body)
    if SEED:
        run = seed(SEED)(run)
    settings(
        max_examples=num_cases * MULTIPLIER,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )(run)()

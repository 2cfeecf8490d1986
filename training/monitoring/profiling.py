"""Where the time and memory of chosen steps go, on chosen ranks, by the parts of a step (--profile).

torch's profiler knows operators and kernels. While a profiled step runs, each operator is called within a range that
bears the name of its part, so that the trace shows parts, and the profiler's own averages have a row for each.
"""

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from ...moe.torch_private import _RecordFunctionFast
from ...moe.util.atomic_write import PARTIAL, whole
from ...moe.util.errors import ExpertMeshError
from ...moe.util.telling import telling
from ...sharding.runtime.process import Ranks
from ...sharding.state import has_dtensor
from ..config.train_config import TrainConfig
from ..report.profiles import BETWEEN, PROFILES
from .attribution import Parts

_STEP = "step "
"""What the name of the range around a step begins with."""
_MOST_MEMORY_EVENTS = 1_000_000
"""Allocations that a memory snapshot tells of, the latest."""


class StepProfiler:
    """Profiles the steps that --profile names. Use as a context manager around the loop; an error that leaves it drops
    what was not written yet.

    All ranks make one and call its methods alike. Steps that are not profiled cost nothing; nothing that is computed
    changes. What cannot be profiled or written is said, and the run continues.

    Args:
        parts: makes what knows the part that is being run, for the steps that are profiled.
        say: is told, on every rank alike, what is profiled and where it went.
    """

    def __init__(
        self,
        config: TrainConfig,
        parts: Callable[[], Parts],
        ranks: Ranks,
        output_dir: Path,
        say: Callable[[str], object],
    ):
        self.stretches = config.profiled_steps
        on_all = config.profile_ranks == ["all"]
        self.where = "all ranks" if on_all else f"rank {' and '.join(config.profile_ranks)}"
        self.is_profiled = on_all or ranks.rank in _numbers(config)
        self.rank, self.device = ranks.rank, ranks.device
        self.directory = output_dir / PROFILES
        self.parts = parts
        self.say = say
        self.done: list[int] = []
        self.recording: _Recording | None = None
        self.problem = ""

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.recording is not None:
            with telling():  # of a device that has failed, say, which is told already
                self.recording.stop()
            self.recording = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """To be held around a step, the `step`-th of the run."""
        stretch = next((stretch for stretch in self.stretches if step in stretch), None)
        if stretch is None:
            yield
            return
        if not self.done:
            self._begin(range(step, stretch.stop))
        self.done.append(step)
        with ExitStack() as around:
            if self.recording is not None:
                with self._without_profile():
                    around.enter_context(self.recording.step(step))
            yield

    def _begin(self, steps: range) -> None:
        self.say(f"profiling {steps_in_words(steps)} on {self.where}")
        if self.is_profiled:
            with self._without_profile():
                self.recording = _Recording(self.parts(), self.device)

    @contextmanager
    def _without_profile(self) -> Iterator[None]:
        with telling() as failed:
            yield
        self.problem = "".join(failed) or self.problem

    @property
    def is_due(self) -> bool:
        """Whether the latest step was the last of its stretch."""
        return bool(self.done) and any(self.done[-1] == stretch[-1] for stretch in self.stretches)

    def finish(self) -> None:
        """Write what has been profiled since the last call, if anything. All ranks wait for one another."""
        if not self.done:
            return
        written = ""
        if self.recording is not None:
            recording, self.recording = self.recording, None
            with self._without_profile():
                if self.problem:
                    recording.stop()
                else:
                    written = self._write(recording)
        gathered = [("", "")] * dist.get_world_size()
        dist.all_gather_object(gathered, (written, self.problem))
        steps = steps_in_words(self.done)
        for rank, (_, problem) in enumerate(gathered):
            if problem:
                self.say(f"warning: rank {rank} has no profile of {steps}: {problem}")
        if lines := [line for line, _ in gathered if line]:
            more = f"; one more per profiled rank, {len(lines)} in all" if len(lines) > 1 else ""
            self.say(f"profiled {steps}: {lines[0]}{more}")
        self.done, self.problem = [], ""

    def _write(self, recording: "_Recording") -> str:
        """The files of this rank; what to say of them."""
        name = f"rank-{self.rank}.{steps_in_words(self.done).replace(' ', '-')}"
        # made while memory is still recorded, which the snapshot is of
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self.device.type == "cuda":
                with whole(self.directory / f"{name}.memory.pickle") as partial:
                    torch.cuda.memory._dump_snapshot(str(partial))
        finally:
            recording.stop()
        wall, costs = costs_of(recording.profiler, recording.mode.names, self.device.type)
        record = {
            "rank": self.rank,
            "steps": self.done,
            "device": self.device.type,
            "wall_seconds": wall,
            "parts": {part: asdict(cost) for part, cost in costs.items()},
        }
        with whole(self.directory / f"{name}.trace.json.gz") as partial:
            _write_trace(recording.profiler, partial)
        with whole(self.directory / f"{name}.json") as partial:
            partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        kinds = "trace.json.gz and json; torch takes memory snapshots only on GPUs"
        if self.device.type == "cuda":
            kinds = "trace.json.gz, memory.pickle and json"
        most = ", ".join(f"{part} {cost.seconds / wall:.0%}" for part, cost in list(costs.items())[:3])
        return f"rank {self.rank} {most}, in {self.directory / name}.* ({kinds})"


def check_profile(config: TrainConfig, num_steps: int, world_size: int) -> None:
    """
    Raises:
        ExpertMeshError: a step or a rank that --profile and --profile-ranks name will not be.
    """
    if not config.profile:
        return
    if (last := config.profiled_steps[-1][-1]) > num_steps:
        raise ExpertMeshError(
            f"--profile {','.join(config.profile)}: there is no step {last:,}: the run has {num_steps:,}"
        )
    # a run that came back with fewer ranks is to continue
    if config.profile_ranks != ["all"] and not config.elastic and max(_numbers(config)) >= world_size:
        raise ExpertMeshError(f"--profile-ranks {' '.join(config.profile_ranks)}: the ranks are 0 to {world_size - 1}")


def _numbers(config: TrainConfig) -> list[int]:
    return [int(rank) for rank in config.profile_ranks]


def steps_in_words(steps: Sequence[int]) -> str:
    """Consecutive steps in words: "step 5", or "steps 5-7"."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"


class _Recording:
    """torch's profiler at work, until `stop`."""

    def __init__(self, parts: Parts, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.mode = _Ranges(parts)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.on_cuda
        self.profiler = profile(activities=activities, profile_memory=True, acc_events=True)
        self.profiler.start()
        self.is_running = True
        if self.on_cuda:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_MEMORY_EVENTS)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        with record_function(_STEP + str(step)), self.mode, self._triton():
            yield
            if self.on_cuda:
                torch.cuda.synchronize()  # what is under way belongs to this step

    @contextmanager
    def _triton(self) -> Iterator[None]:
        """Within it, Triton kernels, which are no operators, have ranges too."""
        if not (self.on_cuda and find_spec("triton")):
            yield
            return
        from triton.runtime.jit import JITFunction

        launch, mode = JITFunction.run, self.mode

        def run(*args: Any, **kwargs: Any) -> Any:
            with mode.range():
                return launch(*args, **kwargs)

        JITFunction.run = run  # type: ignore[method-assign]
        try:
            yield
        finally:
            JITFunction.run = launch  # type: ignore[method-assign]

    def stop(self) -> None:
        """Nothing the second time."""
        if self.is_running:
            self.is_running = False
            if self.on_cuda:
                torch.cuda.memory._record_memory_history(enabled=None)
            self.profiler.stop()


class _Ranges(TorchDispatchMode):
    """Within it each operator is called in a range of the profiler that is named as its part.

    names: those that there were.
    """

    def __init__(self, parts: Parts):
        super().__init__()
        self.parts = parts
        self.names: set[str] = set()

    def range(self) -> Any:
        """For what the caller's caller is about to call."""
        name = "other"
        with telling():
            name = self.parts.here().part or name
        self.names.add(name)
        # unlike `record_function` it counts as an operator, to which kernels are ascribed
        return _RecordFunctionFast(name)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_dtensor(types):
            return NotImplemented  # what it does with its local tensor comes here by itself
        with self.range():
            return operator(*args, **(kwargs or {}))


@dataclass
class Cost:
    """Cost of a part, over all profiled steps.

    seconds: of its operators on a CPU, of their kernels on a GPU. calls: of operators and Triton kernels.
    allocated_bytes: that operators allocated and did not free themselves.
    """

    seconds: float = 0.0
    calls: int = 0
    allocated_bytes: int = 0


def costs_of(profiler: Any, names: set[str], device_type: str) -> tuple[float, dict[str, Cost]]:
    """What the steps in a stopped profiler's record took.

    Args:
        names: of the ranges that are parts.
        device_type: whose time and memory are asked for.

    Returns:
        Seconds of the steps, and the parts, that with the most time first. The last of them, `BETWEEN`, is time in
        which no operator ran, or on a GPU no kernel.
    """
    wall, costs = 0.0, {}
    for averages in profiler.key_averages():
        if averages.device_type != DeviceType.CPU:
            continue
        if averages.key.startswith(_STEP):
            wall += averages.cpu_time_total / 1e6
        elif averages.key in names:
            seconds, allocated = averages.cpu_time_total, averages.cpu_memory_usage
            if device_type != "cpu":
                seconds, allocated = averages.device_time_total, averages.device_memory_usage
            costs[averages.key] = Cost(seconds / 1e6, averages.count, max(allocated, 0))
    between = Cost(max(0.0, wall - sum(cost.seconds for cost in costs.values())))
    ordered = dict(sorted(costs.items(), key=lambda entry: -entry[1].seconds))
    return wall, ordered | {BETWEEN: between}


def _write_trace(profiler: Any, path: Path) -> None:
    """As Chrome's trace viewer and Perfetto read it, without the host's name.

    Raises:
        OSError: it cannot be written completely.
    """
    plain = path.with_name(f"{path.name.removesuffix(PARTIAL)}.plain{PARTIAL}")
    try:
        profiler.export_chrome_trace(str(plain))
        last = b""
        with plain.open("rb") as lines, gzip.open(path, "wb", compresslevel=5) as packed:
            for line in lines:
                last = line.strip() or last
                if not line.lstrip().startswith(b'"host_name":'):
                    packed.write(line)
        # torch says nothing of a disk that is full
        if not last.endswith(b"}"):
            raise OSError(f"{plain}: was cut off; is the disk full?")
    finally:
        # beside it torch leaves what it could not write completely
        for left in (plain, plain.with_name(f"{plain.name}.tmp")):
            with suppress(OSError):
                left.unlink(missing_ok=True)

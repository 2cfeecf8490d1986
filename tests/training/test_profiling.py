"""--profile without ranks: what is ascribed to which part, and what is refused."""

import gzip
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.monitoring.attribution import StepPlace
from expertmesh.training.monitoring.profiling import (
    Cost,
    StepProfiler,
    _Recording,
    _write_trace,
    check_profile,
    costs_of,
    steps_in_words,
)
from expertmesh.training.report.profiles import BETWEEN


class Told:
    """Parts that the test names."""

    def __init__(self) -> None:
        self.part: str | None = None

    def here(self) -> StepPlace:
        return StepPlace(self.part, None)


def recorded(run: Any, *, device: str = "cpu") -> tuple[_Recording, float, dict[str, Cost]]:
    """`run(told)` as step 3, told what part it is in by what it sets `told.part` to."""
    told: Any = Told()
    recording = _Recording(told, torch.device(device))
    try:
        with recording.step(3):
            run(told)
    finally:
        recording.stop()
    return recording, *costs_of(recording.profiler, recording.mode.names, device)


def two_parts(told: Told, device: str = "cpu") -> None:
    """A product of 256 x 256 fp32 numbers that stays, and sums that do not."""
    told.part = "products"
    x = torch.ones(256, 256, device=device)
    kept = x @ x
    told.part = "sums"
    for _ in range(3):
        (kept + x).sum()
    told.part = None
    torch.empty(0, device=device)


def test_calls_and_bytes_of_each_part() -> None:
    _, wall, costs = recorded(two_parts)
    matrix = 256 * 256 * 4
    assert {name: cost.calls for name, cost in costs.items()} == {"products": 2, "sums": 6, "other": 1, BETWEEN: 0}
    assert costs["products"].allocated_bytes == 2 * matrix
    assert costs["sums"].allocated_bytes == 3 * (matrix + 4)
    assert list(costs)[-1] == BETWEEN
    assert all(cost.seconds > 0 for name, cost in costs.items())
    assert sum(cost.seconds for cost in costs.values()) == pytest.approx(wall)


@torch.library.custom_op("profiling_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x + x


def test_an_operator_of_operators_is_one_call() -> None:
    """As our all-to-all is: what it does itself, waiting included, is its part's."""

    def run(told: Told) -> None:
        told.part = "ours"
        twice(torch.ones(256))

    recording, wall, costs = recorded(run)
    assert "aten::add" in {event.name for event in recording.profiler.events()}
    assert (costs["ours"].calls, costs["ours"].allocated_bytes) == (2, 2 * 256 * 4)
    assert costs["ours"].seconds <= wall


def test_the_trace_has_ranges_within_operators_of_autograd(tmp_path: Path) -> None:
    """The parts' names, the step's, and operators; and not the name of the host."""

    def run(told: Told) -> None:
        told.part = "linear"
        nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()

    recording, _, _ = recorded(run)
    path = tmp_path / "trace.json.gz.part"
    _write_trace(recording.profiler, path)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    assert {"linear", "step 3", "aten::addmm", "AddmmBackward0"} <= {
        event.get("name") for event in trace["traceEvents"]
    }
    assert "host_name" not in trace
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_trace_that_is_cut_off_is_none(tmp_path: Path) -> None:
    class Full:
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text('{\n"traceEvents": [\n{"ph": ')

    with pytest.raises(OSError, match="was cut off; is the disk full"):
        _write_trace(Full(), tmp_path / "trace.json.gz.part")
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json.gz.part"]


def test_what_torch_leaves_on_a_full_disk(tmp_path: Path) -> None:
    """It writes beside the name that it was given, and says nothing."""

    class Full:
        def export_chrome_trace(self, path: str) -> None:
            Path(f"{path}.tmp").write_text("{")

    with pytest.raises(OSError, match="No such file"):
        _write_trace(Full(), tmp_path / "trace.json.gz.part")
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_stretch(tmp_path: Path) -> None:
    check_files_of_a_stretch(tmp_path, "cpu", ["json", "trace.json.gz"])


def check_files_of_a_stretch(tmp_path: Path, device: str, kinds: list[str]) -> None:
    said: list[str] = []
    told: Any = Told()
    ranks: Any = mock.Mock(rank=2, world_size=4, device=torch.device(device))
    profiler = StepProfiler(config("5-9", profile_ranks=["all"]), lambda: told, ranks, tmp_path / "out", said.append)
    with profiler:
        for step in (6, 7):
            with profiler.step(step):
                two_parts(told, device)
        with profiler.step(12):
            told.part = "nothing of ours"
            torch.ones(3)
        assert not profiler.is_due
        assert profiler.recording is not None
        line = profiler._write(profiler.recording)
    assert said == ["profiling steps 6-9 on all ranks"]
    assert line.startswith("rank 2 ")
    assert ("memory.pickle" in line) == (device == "cuda")
    directory = tmp_path / "out" / "profile"
    assert sorted(file.name for file in directory.iterdir()) == [f"rank-2.steps-6-7.{kind}" for kind in kinds]
    profile = json.loads((directory / "rank-2.steps-6-7.json").read_text())
    assert (profile["rank"], profile["steps"], profile["device"]) == (2, [6, 7], device)
    assert profile["parts"].keys() == {"products", "sums", "other", BETWEEN}
    assert profile["parts"]["sums"]["calls"] == 12


def test_an_error_drops_what_was_not_written(tmp_path: Path) -> None:
    """And leaves torch's profiler to the next."""
    ranks: Any = mock.Mock(rank=0, world_size=1, device=torch.device("cpu"))
    told: Any = Told()
    profiler = StepProfiler(config("1-2"), lambda: told, ranks, tmp_path, lambda line: None)

    def loop() -> None:
        with profiler:
            with profiler.step(1):
                torch.ones(3)
            with profiler.step(2):
                raise ExpertMeshError("not finite")

    with pytest.raises(ExpertMeshError):
        loop()
    assert profiler.recording is None
    assert list(tmp_path.iterdir()) == []
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert recorded(two_parts)[2]["products"].calls == 2


def test_steps_in_words() -> None:
    assert [steps_in_words(steps) for steps in ([5], [5, 6, 7], range(2, 4))] == ["step 5", "steps 5-7", "steps 2-3"]


def config(*steps: str, **settings: Any) -> TrainConfig:
    return TrainConfig(model="m", dataset=["d"], profile=list(steps), **settings)


def test_steps_and_ranks_that_will_not_be() -> None:
    check_profile(config("5-7"), num_steps=7, world_size=1)
    check_profile(config("5", profile_ranks=["all"]), num_steps=7, world_size=4)
    check_profile(config(), num_steps=0, world_size=1)
    with pytest.raises(ExpertMeshError, match="--profile 2,5-8: there is no step 8: the run has 7"):
        check_profile(config("2", "5-8"), num_steps=7, world_size=1)
    with pytest.raises(ExpertMeshError, match="--profile-ranks 0 4: the ranks are 0 to 3"):
        check_profile(config("5", profile_ranks=["0", "4"]), num_steps=7, world_size=4)
    # nobody is there to correct the flags of a run that comes back by itself
    check_profile(config("5", profile_ranks=["4"], resume="auto", elastic=True), num_steps=7, world_size=4)


def test_triton_kernels_have_ranges() -> None:
    """They are no operators; the launcher itself is replaced here, as there is no GPU to launch them."""
    jit = pytest.importorskip("triton.runtime.jit")
    launched = []

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool) -> None:
        launched.append((kernel, args, grid, warmup))

    def run(told: Told) -> None:
        told.part = "permute, combine"
        jit.JITFunction.run("kernel", 1, 2, grid=(3,), warmup=False)

    with mock.patch.object(jit.JITFunction, "run", launch):
        told: Any = Told()
        recording = _Recording(told, torch.device("cpu"))
        recording.on_cuda = True
        with recording._triton():
            run(told)
        recording.on_cuda = False
        recording.stop()
        assert jit.JITFunction.run is launch
    assert launched == [("kernel", (1, 2), (3,), False)]
    assert recording.mode.names == {"permute, combine"}
    assert "permute, combine" in {event.name for event in recording.profiler.events()}

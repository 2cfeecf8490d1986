"""What a checkpoint takes while it is saved: contexts on GPUs, and host memory."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import expertmesh
from expertmesh.checkpoints.training_state.marker import whole_checkpoints
from expertmesh.checkpoints.training_state.saving import Progress, Saver
from expertmesh.training.monitoring.log import RunLog
from expertmesh.training.run import loop
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import Runs, Told, batch_of_12, tell
from tests.gpus import two_gpus
from tests.tiers import tiered


def _gpus_of_a_save(model: Path, out: Path, copies: bool) -> set[tuple[str, int]]:
    """Those that threads used, by the thread's name. The second GPU is this rank's."""
    engine = expertmesh.load(str(model), use_cpu=True)
    engine.saves_to(out, None)
    out.mkdir(parents=True)
    assert engine.saver is not None
    cpu = torch.Tensor.cpu

    with two_gpus(mine=1) as gpus:

        def moved(tensor: torch.Tensor, *given: Any, **settings: Any) -> torch.Tensor:
            gpus.use()
            return cpu(tensor, *given, **settings)

        # tensors that were copied before are in host memory, and moving them there takes no GPU
        with (
            mock.patch.object(torch.Tensor, "cpu", cpu if copies else moved),
            mock.patch.object(torch.cuda, "is_initialized", return_value=not copies),
        ):
            engine.saver.save(engine.model, engine.optimizer, engine.progress({}, {}), copies=copies)
            assert engine.saver.wait() is None
        used = gpus.used
    assert whole_checkpoints(out)
    return used


@pytest.mark.parametrize("copies", [True, False])
def test_a_save_makes_no_context_on_another_ranks_gpu(
    ranks: RankPool, tiny_model: Path, tmp_path: Path, copies: bool
) -> None:
    """Each thread's current GPU is the node's first until it sets it."""
    if copies and torch.backends.cuda.is_built() and not torch.cuda.is_available():
        pytest.skip("a torch for CUDA makes a stream to copy on, which takes a GPU")
    (used,) = ranks.run(_gpus_of_a_save, 1, tiny_model, tmp_path / "out", copies)
    assert {gpu for _, gpu in used} <= {1}, used
    assert copies or len({thread for thread, _ in used}) == 2, "tensors are read in the thread that writes"


def with_memory(argv: list[str], megabytes: int) -> Told:
    """A run that finds so much host memory; its errors are its log, too."""
    lines: list[str] = []
    with (
        mock.patch.object(loop, "free_on_host", return_value=megabytes * 2.0**20),
        mock.patch.object(RunLog, "line", lambda log, text: lines.append(text)),
    ):
        code, printed, errors = tell(argv)
    return code, printed, errors + "\n".join(lines)


@pytest.mark.parametrize(("megabytes", "more"), tiered([(1, "")], slow=[(1024, ""), (1, "--no-async-save")]))
def test_copies_that_do_not_fit_into_host_memory(runs: Runs, megabytes: int, more: str) -> None:
    ended = runs(2, f"{batch_of_12(2)} --max-steps 2 --save-steps 2 {more}", call=with_memory, given=[megabytes])
    size = sum(file.stat().st_size for file in (ended.checkpoint(2) / "state").glob("*.distcp"))
    assert 1 < size / 2**20 < 1024
    warned = re.findall("([0-9.]+) MiB of host memory available, and its ranks copy ([0-9.]+) MiB there", ended.errors)
    assert len(warned) == (megabytes == 1 and not more) == ended.errors.count("--no-async-save needs no copies")
    for free, copied in warned:
        assert float(free) == 1.0
        # files have names and shapes beside the tensors
        assert 0.8 * size < float(copied) * 2**20 < size


def _problem_of_one(directory: Path, failing: int) -> str:
    """What a save tells, of which a rank could not write its part."""
    saver: Any = Saver.__new__(Saver)
    saver.directory, saver.group, saver.problem = directory, None, None

    def write() -> None:
        if dist.get_rank() == failing:
            raise OSError("the disk is gone")

    saver._finish(write, directory / "partial", Progress(3, 0, {}, {}, {}, {}))
    told: str = saver.problem
    return told


def test_what_one_rank_could_not_write_is_told_by_all(ranks: RankPool, tmp_path: Path) -> None:
    for failing in range(2):
        (tmp_path / "partial" / "state").mkdir(parents=True)
        (tmp_path / "partial" / "state" / ".metadata").touch()
        for told in ranks.run(_problem_of_one, 2, tmp_path, failing):
            assert told.startswith("checkpoint of step 3: ")
            assert "the disk is gone" in told
        assert not list(tmp_path.iterdir())

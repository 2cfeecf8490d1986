"""configs/launch/slurm.sbatch under Slurm itself: how jobs end, and which go on."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.slurm import NODES, Job, Slurm, missing
from tests.distributed.whole_runs import lines
from tests.processes import processes
from tests.tiers import tiered

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

STEPS = 60
SLOW = """
import os, sys, time
from expertmesh import train_ep
from expertmesh.sharding.runtime.preemption import StopRequest, end_before_start

with StopRequest(end_before_start):  # as soon as train_ep.py has it
    from expertmesh.training.engine import engine

step = engine.train_step

def train_step(*given, **more):
    # the first time, so that a test can do things to it
    if "SLURM_RESTART_COUNT" not in os.environ:
        time.sleep(float(os.environ["PAUSE"]))
    return step(*given, **more)

engine.train_step = train_step
sys.exit(train_ep.main())
"""
"""The checkout's train_ep.py."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm") / "at") as started:
        yield started


class Run:
    """Of 60 steps, with a checkpoint after each five, on two nodes with one rank each."""

    def __init__(self, slurm: Slurm, directory: Path, model: Path, data: Path):
        self.slurm, self.directory, self.out = slurm, directory, directory / "out"
        settings = {
            "model": str(model), "dataset": str(data), "output_dir": str(self.out), "use_cpu": True, "ep_size": 2,
            "max_steps": STEPS, "save_steps": 5, "save_total_limit": 2, "logging_steps": 5,
        }  # fmt: skip
        (directory / "run.yaml").write_text(yaml.safe_dump(settings))
        (directory / "train_ep.py").write_text(SLOW)

    def submit(self, options: str = "--time 30", *flags: str, **environment: str) -> Job:
        environment = {"PAUSE": "0.5", **environment}
        return Job(self.slurm, self.directory, options, [str(self.directory / "run.yaml"), *flags], **environment)

    @property
    def saved(self) -> list[int]:
        found = (self.out / "checkpoints").glob("step-*/checkpoint.json")
        return sorted(int(file.parent.name.removeprefix("step-")) for file in found)

    def wait_for_a_checkpoint(self) -> None:
        self.slurm.wait("a checkpoint", lambda: self.saved)

    def check_complete(self, job: Job) -> None:
        """It went on where the first job had saved last, and came to its end."""
        assert job.ends()["JobState"] == "COMPLETED", job.said
        assert job.facts["Restarts"] == "1"
        assert job.said.count("resumed from ") == 1, job.said
        assert lines(self.out)[-1]["step"] == STEPS
        assert (self.out / "hf" / "model.safetensors").exists()


@pytest.fixture
def run(slurm: Slurm, tmp_path: Path, tiny_model: Path, tiny_data: Path) -> Run:
    return Run(slurm, tmp_path, tiny_model, tiny_data)


def ranks_on(node: str) -> list[int]:
    """Process ids of ranks of a node, by the number that Slurm has given it."""
    of_node = f"SLURM_NODEID={NODES.index(node)}"
    return [
        each.number
        for each in processes()
        if each.words[0].endswith("python") and "train_ep.py" in each.words[1] and of_node in each.settings
    ]


@pytest.mark.release
def test_at_its_time_limit(run: Run) -> None:
    job = run.submit("--time 2 --signal USR1@20", PAUSE="2")
    job.begin_again()
    run.check_complete(job)


@pytest.mark.release
def test_a_limit_that_leaves_no_time(run: Run) -> None:
    """The signal comes before there is anything to save."""
    job = run.submit("--time 1 --signal USR1@60")
    assert (job.ends()["JobState"], job.facts["ExitCode"], job.facts["Restarts"]) == ("FAILED", "75:0", "0"), job.said
    assert "ended with 75, and no checkpoint was saved in this job, so it is not requeued" in job.said


@pytest.mark.release
def test_no_more_often_than_asked(run: Run) -> None:
    job = run.submit(MAX_REQUEUES="0")
    run.wait_for_a_checkpoint()
    run.slurm.told(f"scancel --signal USR1 {job.number}")
    assert (job.ends()["JobState"], job.facts["ExitCode"]) == ("FAILED", "75:0"), job.said
    assert "requeued 0 times (MAX_REQUEUES); submit it again, and it resumes" in job.said


@pytest.mark.parametrize("node", tiered(slow=NODES[1:], release=NODES[:1]))
def test_a_rank_that_is_killed(run: Run, node: str) -> None:
    """As by the kernel where memory ends."""
    job = run.submit()
    run.wait_for_a_checkpoint()
    (rank,) = ranks_on(node)
    os.kill(rank, signal.SIGKILL)
    job.begin_again()
    run.check_complete(job)


@pytest.mark.release
def test_a_node_that_is_lost(run: Run) -> None:
    job = run.submit()
    run.wait_for_a_checkpoint()
    run.slurm.lose(NODES[1])
    run.slurm.wait("a lost node", lambda: job.facts["JobState"] != "RUNNING")
    run.slurm.start_node(NODES[1])
    # not sooner than Slurm itself begins it: a node that comes back is first told to end what it had
    job.wait_for_requeue()
    run.check_complete(job)


@pytest.mark.release
@pytest.mark.parametrize("mistake", ["--weight-column w --task dpo", "--model /nowhere/at/all"])
def test_a_mistake(run: Run, mistake: str) -> None:
    """One that the script finds, and one that ranks find."""
    job = run.submit("--time 30", *mistake.split())
    assert (job.ends()["JobState"], job.facts["ExitCode"], job.facts["Restarts"]) == ("FAILED", "2:0", "0"), job.said
    assert f"train_ep.py: error: {mistake.split()[0]}" in job.said


@pytest.mark.release
def test_cancelled(run: Run) -> None:
    """It saves the step that it is in, and is not requeued."""
    job = run.submit()
    run.wait_for_a_checkpoint()
    run.slurm.told(f"scancel {job.number}")
    assert (job.ends()["JobState"], job.facts["Restarts"]) == ("CANCELLED", "0"), job.said
    run.slurm.wait("the last checkpoint", lambda: "stopped by a signal; --resume auto resumes from here" in job.said)
    assert run.saved[-1] == lines(run.out)[-1]["step"]

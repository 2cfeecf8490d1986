"""A Slurm of one's own: a controller and two nodes, all on this machine, for as long as a test needs it.

The nodes are called 127.0.0.2 and 127.0.0.3, names that lead to this machine without an entry in a file of hosts.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.distributed.whole_runs import ROOT
from tests.processes import free_ports

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "unshare")
NODES = ("127.0.0.2", "127.0.0.3")
SETTINGS = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldPidFile={at}/slurmctld.pid
SlurmctldLogFile={at}/slurmctld.log
StateSaveLocation={at}/state
SlurmdPidFile={at}/slurmd-%n.pid
SlurmdLogFile={at}/slurmd-%n.log
SlurmdSpoolDir={at}/spool-%n
SlurmUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=30
KillWait=10
NodeName={nodes[0]} NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=2
NodeName={nodes[1]} NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""slurm.conf: without Munge and cgroups, which ask more of a machine. A node that does not answer is lost soon."""


def missing() -> str:
    """Why there can be no Slurm here; empty where there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"needs {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client"
    return "" if os.geteuid() == 0 else "needs root, as which slurmd runs"


class Slurm:
    """To be used as a context, which ends it with all that runs under it.

    Args:
        at: a directory for what it writes.
    """

    def __init__(self, at: Path):
        self.at = at
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(at / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / ".package"),
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Slurm":
        (self.at / "state").mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        settings = SETTINGS.format(at=self.at, host=host, ports=free_ports(3), nodes=NODES)
        (self.at / "slurm.conf").write_text(settings)
        try:
            self._start("controller", "slurmctld", "-D")
            for node in NODES:
                self.start_node(node)
            self.wait("two idle nodes", lambda: self.told("sinfo -h -o %t-%D") == "idle-2")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for name in list(self.running):
            self.lose(name)

    def start_node(self, name: str) -> None:
        # with processes of its own, which end with it
        self._start(name, "unshare", "--pid", "--mount-proc", "--kill-child", "slurmd", "-D", "-N", name)

    def lose(self, name: str) -> None:
        """A node, as if its power were cut: with all that runs on it."""
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def _start(self, name: str, *command: str) -> None:
        with (self.at / f"{name}.out").open("ab") as said:
            self.running[name] = subprocess.Popen(command, stdout=said, stderr=said, env=self.environment)

    def told(self, command: str) -> str:
        """What a command of Slurm's says."""
        done = subprocess.run(command.split(), env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    def wait(self, what: str, happens: Callable[[], object], seconds: float = 120.0) -> None:
        """Until it happens.

        Raises:
            AssertionError: it does not within so many seconds; with what the controller said last.
        """
        end = time.monotonic() + seconds
        while not happens():
            if time.monotonic() > end:
                said = [path.read_text(errors="replace")[-1500:] for path in sorted(self.at.glob("*.log"))]
                raise AssertionError(f"waited {seconds:.0f} s for {what}", *said)
            time.sleep(0.3)


class Job:
    """One that slurm.sbatch makes, on both nodes with a rank each.

    Args:
        checkout: the directory that it is submitted from, whose train_ep.py it runs.
        options: of sbatch. words: of the script.
    """

    def __init__(self, slurm: Slurm, checkout: Path, options: str, words: list[str], **environment: str):
        self.slurm, self.output = slurm, checkout / "slurm.out"
        command = f"sbatch --parsable --chdir {checkout} --output {self.output} --nodes 2 --ntasks-per-node 1"
        command += f" --gpus-per-node 0 {options} {ROOT / 'configs/launch/slurm.sbatch'}"
        done = subprocess.run(
            [*command.split(), *words],
            env=slurm.environment | environment,
            cwd=checkout,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()

    @property
    def facts(self) -> dict[str, str]:
        """By the names that Slurm has for them: JobState, ExitCode, Restarts."""
        words = self.slurm.told(f"scontrol show job {self.number}").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def is_over(self) -> bool:
        return self.facts["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def wait_for_requeue(self) -> None:
        self.slurm.wait("a job that is requeued", lambda: self.facts["Restarts"] == "1" or self.is_over())
        assert not self.is_over(), self.said

    def begin_again(self) -> None:
        """Once it has been requeued, without the two minutes that Slurm leaves a job to rest."""
        self.wait_for_requeue()
        self.slurm.wait("its place in the queue", lambda: self.facts["JobState"] == "PENDING")
        # sooner, it would meet signals that were sent to what it was before
        self.slurm.told(f"scontrol update JobId={self.number} StartTime=now+20seconds")

    def ends(self) -> dict[str, str]:
        self.slurm.wait("the end of a job", self.is_over, seconds=360.0)
        return self.facts

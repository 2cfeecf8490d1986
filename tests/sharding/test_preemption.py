"""Signals that ask to stop: what is marked, what ends at once, and what a process does from its first moment on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expertmesh.sharding.runtime.preemption import SIGNALS, Stopped, StopRequest, boundary, is_leaving, leave
from expertmesh.sharding.torchrun import STOPPED

ROOT = Path(__file__).parents[2]


def receive(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_the_innermost_request_answers() -> None:
    """One that marks keeps the outer one from ending the work, which then does so at its next boundary."""
    before = [signal.getsignal(number) for number in SIGNALS]
    boundary()  # of nobody who handles signals
    with StopRequest(leave):
        with StopRequest() as stop:
            receive(signal.SIGUSR1)
            boundary()
            assert stop.is_asked()
            assert not is_leaving()
        assert not is_leaving(), "no signal came since, and what is here may come to its end"
        with pytest.raises(Stopped):
            boundary()
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_alone_ends_the_work(number: int) -> None:
    """What is done on the way out is not cut too. Libraries take it for Ctrl-C."""
    done = []

    def work() -> None:
        try:
            receive(number)
        finally:
            receive(number)
            done.append("cleaned up")

    with StopRequest(leave):
        with pytest.raises(KeyboardInterrupt):
            work()
        assert is_leaving()
    assert done == ["cleaned up"]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_forked_worker_ends_by_the_signal(number: int) -> None:
    with StopRequest(leave):
        begun, tells = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(tells, b"!")
                time.sleep(60)
            finally:
                os._exit(1)
        assert os.read(begun, 1) == b"!"
        os.kill(child, number)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number


FIRST_MOMENT = """
import sys, time
from expertmesh import {module}

slow = {{"yaml", "numpy", "torch"}} & {{*sys.modules}}
assert not slow, slow

def work(argv):
    print("begun", flush=True)
    # a signal just before a long sleep begins would be answered at its end
    for _ in range(600):
        time.sleep(0.1)

{module}._main = work
{module}.script()
"""


@pytest.mark.parametrize("module", ["train_ep", "launch"])
@pytest.mark.parametrize("number", SIGNALS)
def test_signals_are_answered_from_the_first_moment(module: str, number: int) -> None:
    """Before anything that takes time is imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".package")}
    command = [sys.executable, "-c", FIRST_MOMENT.format(module=module)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "begun\n"
        run.send_signal(number)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == STOPPED
    assert errors == "stopped by a signal before the run began; nothing was done (exit code 75)\n"

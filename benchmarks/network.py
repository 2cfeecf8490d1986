"""Two nodes on one machine: two network namespaces of Linux with a link between them, to be cut or slowed."""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from types import TracebackType

from benchmarks import runs


def can_make_networks() -> bool:
    """Whether this process may make network namespaces, and has the tools."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    name = f"em-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    return subprocess.run(["ip", "netns", "del", name], capture_output=True).returncode == 0


class Network:
    """Use as a context manager. The namespaces, and whatever still runs in them, are gone at its end."""

    address = "10.77.0.1"
    """Of node 0."""

    def __init__(self) -> None:
        self.names = [f"em{os.getpid()}-{number}" for number in range(2)]

    def interface(self, number: int) -> str:
        """The link's end at a node."""
        return f"emlink{number}"

    def inside(self, number: int, command: list[str]) -> list[str]:
        """The command, to be run on a node."""
        return ["ip", "netns", "exec", self.names[number], *command]

    def start(self, ranks: int, flags: Sequence[str], *program: str, **variables: str) -> list[runs.Process]:
        """A run under torchrun, half of whose ranks are on each node.

        Args:
            program: in the place of train_ep.py.
        """
        place = ("--nnodes", "2", "--master-addr", self.address, "--master-port", "29534", "--monitor-interval", "0.1")
        nodes = []
        for number in range(2):
            words = runs.words_of(ranks // 2, flags, (*place, "--node-rank", str(number)), *program)
            of_node = {**variables, "GLOO_SOCKET_IFNAME": self.interface(number)}
            nodes.append(runs.start(self.inside(number, words), **of_node))
        return nodes

    def __enter__(self) -> "Network":
        for name in self.names:
            _run("ip", "netns", "add", name)
        _run(
            "ip", "link", "add", self.interface(0), "netns", self.names[0],
            "type", "veth", "peer", "name", self.interface(1), "netns", self.names[1],
        )  # fmt: skip
        for number, name in enumerate(self.names):
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", self.interface(number))
            _run("ip", "-n", name, "link", "set", self.interface(number), "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self.names:
            for pid in _run("ip", "netns", "pids", name).split():
                os.kill(int(pid), signal.SIGKILL)
            _run("ip", "netns", "del", name)

    def cut(self) -> None:
        """Nothing comes through any more, no end of a connection either."""
        _run("ip", "-n", self.names[0], "link", "set", self.interface(0), "down")

    def slow(self, megabits: float) -> None:
        """What either node sends goes through at so many megabits a second."""
        for number in range(2):
            shaped = ["tc", "qdisc", "add", "dev", self.interface(number), "root", "tbf", "rate", f"{megabits:g}mbit"]
            _run(*self.inside(number, shaped), "burst", "32k", "latency", "400ms")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout

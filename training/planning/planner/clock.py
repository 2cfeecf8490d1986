"""The time on a rank's streams: kernels, collectives that run beside them, and the host that calls all of them.

While a collective runs beside kernels, both are slower than alone: NCCL's blocks take multiprocessors that kernels
count on, and memory bandwidth. By how much, `rates.json` says.
"""

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from ...model_setup.rates import Rates
from .costs import Sums

SHARDING = "FSDP"
"""The stream of FSDP's collectives."""
ROUNDING = 1e-12
"""Share of a collective below which nothing is left of it."""


@dataclass
class StepTime(Sums):
    """Seconds of one step of one rank, by what spends them.

    Attributes:
        matrices: kernels with matmuls. elementwise: all others.
        all_to_alls: waited for, or by which kernels beside them take longer; and sums over all ranks.
        sharding: all-gathers, reduce-scatters and all-reduces in all, alone.
        exposed: what these add to a step: waited for, or by which kernels beside them take longer.
        update: kernels of clipping and the optimizer's step; in a forecast the host's calls for these, where they take
            longer, and kernels that round weights once a step.
        host: what the host takes to call all operators; launching: the part of it that kernels wait for.
        bubble: waited for other stages of a pipeline.
        gathers: all-gathers and reduce-scatters of activations in tensor-parallel groups, all of them waited for.
    """

    matrices: float = 0.0
    elementwise: float = 0.0
    all_to_alls: float = 0.0
    sharding: float = 0.0
    exposed: float = 0.0
    update: float = 0.0
    host: float = 0.0
    launching: float = 0.0
    bubble: float = 0.0
    gathers: float = 0.0

    @property
    def kernels(self) -> float:
        return self.matrices + self.elementwise + self.update

    @property
    def total(self) -> float:
        return self.kernels + self.all_to_alls + self.gathers + self.exposed + self.launching + self.bubble


@dataclass(eq=False)
class Transfer:
    """A collective that runs beside kernels. seconds: that it takes alone, of which `left` are left."""

    seconds: float
    left: float


class Clock:
    """The time on a rank's streams. now: of the kernels' stream. spent: of that, by what it was spent on."""

    def __init__(self, rates: Rates):
        self.rates, self.now, self.spent = rates, 0.0, StepTime()
        self._called = 0.0
        self._streams: dict[Hashable, deque[Transfer]] = defaultdict(deque)
        self._sent: dict[Hashable, deque[Transfer]] = defaultdict(deque)

    def call(self, seconds: float) -> None:
        """Have the host call operators, as soon as it has called those before."""
        self._called += seconds
        self.spent.host += seconds

    def launch(self) -> None:
        """Let kernels wait until the host has called all that it was told to."""
        idle = self._called - self.now
        if idle > 0.0:
            self._pass(idle, 1.0)
            self.spent.launching += idle

    def read(self) -> None:
        """Have the host wait for all kernels before it calls the next operator."""
        self._called = max(self._called, self.now) + self.rates.wait

    def kernel(self, seconds: float, kind: Literal["matrices", "elementwise", "update"] = "elementwise") -> None:
        """Compute for so many seconds alone."""
        setattr(self.spent, kind, getattr(self.spent, kind) + seconds)
        left = seconds
        while left > 0.0 and (soonest := self._soonest()) is not None:
            # of the collective's own time, at the speed that it has beside kernels
            until, is_sharding = soonest / self.rates.collective_beside, bool(self._streams[SHARDING])
            until = min(until, left / self.rates.compute_beside)
            done = until * self.rates.compute_beside
            left = 0.0 if done >= left * (1 - ROUNDING) else left - done
            self._pass(until, self.rates.collective_beside)
            if is_sharding:
                self.spent.exposed += until - done
            else:
                self.spent.all_to_alls += until - done
        if left > 0.0:
            self._pass(left, 1.0)

    def wait(self, seconds: float) -> None:
        """Add a collective that kernels wait for at once."""
        self._pass(seconds, 1.0)
        self.spent.all_to_alls += seconds

    def gather(self, seconds: float) -> None:
        """Add an all-gather or reduce-scatter of activations, which kernels wait for at once."""
        self._pass(seconds, 1.0)
        self.spent.gathers += seconds

    def send(self, ranks: Hashable, seconds: float) -> None:
        """Queue an all-to-all that overlaps with kernels, behind earlier ones among these ranks."""
        self._sent[ranks].append(self._queue(ranks, seconds))

    def arrive(self, ranks: Hashable) -> float:
        """Wait for the oldest of these not yet waited for; returns for how long."""
        waited = self._until(ranks, self._sent[ranks].popleft())
        self.spent.all_to_alls += waited
        return waited

    def shard(self, seconds: float) -> Transfer:
        """Queue one of FSDP's collectives behind earlier ones."""
        self.spent.sharding += seconds
        return self._queue(SHARDING, seconds)

    def until(self, transfer: Transfer) -> None:
        """Let kernels wait for one of FSDP's collectives."""
        self.spent.exposed += self._until(SHARDING, transfer)

    def end(self) -> None:
        """Wait until all is done."""
        if self._streams[SHARDING]:
            self.until(self._streams[SHARDING][-1])
        self.launch()

    def _queue(self, stream: Hashable, seconds: float) -> Transfer:
        transfer = Transfer(seconds, seconds)
        if seconds > 0.0:
            self._streams[stream].append(transfer)
        return transfer

    def _until(self, stream: Hashable, transfer: Transfer) -> float:
        begun, queue = self.now, self._streams[stream]
        while transfer in queue:
            self._pass(queue[0].left, 1.0)
        return self.now - begun

    def _soonest(self) -> float | None:
        """Seconds, alone, until the next collective under way is done."""
        return min((queue[0].left for queue in self._streams.values() if queue), default=None)

    def _pass(self, seconds: float, speed: float) -> None:
        """Let time go by, in which collectives run at a share of their speed."""
        for queue in self._streams.values():
            left = seconds * speed
            while queue and left > 0.0:
                first = queue[0]
                step = min(left, first.left)
                left -= step
                first.left -= step
                if first.left <= ROUNDING * first.seconds:
                    queue.popleft()
        self.now += seconds

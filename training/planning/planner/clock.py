"""The time on a rank's streams: kernels, collectives that run beside them, and the host that calls all of them.

While a collective runs beside kernels, both are slower than alone: NCCL's blocks take multiprocessors that kernels
count on, and memory bandwidth. By how much, `rates.json` says.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields

from ...model_setup.rates import Rates
from .sums import Sums

SHARDING = "FSDP"
"""The stream of FSDP's collectives."""
ROUNDING = 1e-12
"""Share of a collective below which nothing is left of it."""


@dataclass(eq=False)
class Transfer:
    """A collective that runs beside kernels.

    Attributes:
        seconds: that it takes alone, of which `left` are left.
        start, end: when it begins and ends; as long as that is not known, when it was queued.
    """

    seconds: float
    start: float
    end: float
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.seconds


class Clock:
    """The time on a rank's streams.

    Attributes:
        now: time of the kernels' stream. computing: the part of it for kernels, alone; matrices, update: of that, those
            with matmuls, and those of clipping and the optimizer. waiting: for all-to-alls and sums: waited for, or by
            which kernels beside them took longer. gathering: for activations of a tensor-parallel group, with which
            nothing overlaps. launching: for the host.
        sharding: seconds of FSDP's collectives, alone. exposed: the part of `now` for them, as of all-to-alls.
    """

    def __init__(self, rates: Rates):
        self.rates = rates
        self.now = self.computing = self.matrices = self.update = 0.0
        self.waiting = self.launching = self.sharding = self.exposed = self.gathering = 0.0
        self._called = 0.0
        self._streams: dict[Hashable, deque[Transfer]] = defaultdict(deque)
        self._sent: dict[Hashable, deque[Transfer]] = defaultdict(deque)

    def call(self, seconds: float) -> None:
        """Have the host call operators, as soon as it has called those before."""
        self._called += seconds

    def launch(self) -> None:
        """Let kernels wait until the host has called all that it was told to."""
        idle = self._called - self.now
        if idle > 0.0:
            self._pass(idle, 1.0)
            self.launching += idle

    def read(self) -> None:
        """Have the host wait for all kernels before it calls the next operator."""
        self._called = max(self._called, self.now) + self.rates.wait

    def kernel(self, seconds: float, matrices: float = 0.0, update: float = 0.0) -> None:
        """Compute for so many seconds alone; matrices, update: of these."""
        self.computing += seconds
        self.matrices += matrices
        self.update += update
        slowed, left = 0.0, seconds
        while left > 0.0 and (soonest := self._soonest()) is not None:
            # of the collective's own time, at the speed that it has beside kernels
            until, is_sharding = soonest / self.rates.collective_beside, bool(self._streams[SHARDING])
            until = min(until, left / self.rates.compute_beside)
            done = until * self.rates.compute_beside
            left = 0.0 if done >= left * (1 - ROUNDING) else left - done
            self._pass(until, self.rates.collective_beside)
            slowed += 0.0 if is_sharding else until - done
            self.exposed += until - done if is_sharding else 0.0
        self.waiting += slowed
        if left > 0.0:
            self._pass(left, 1.0)

    def wait(self, seconds: float) -> None:
        """Add a collective that kernels wait for at once."""
        self._pass(seconds, 1.0)
        self.waiting += seconds

    def gather(self, seconds: float) -> None:
        """Add an all-gather or reduce-scatter of activations, which kernels wait for at once."""
        self._pass(seconds, 1.0)
        self.gathering += seconds

    def send(self, ranks: Hashable, seconds: float) -> Transfer:
        """Queue an all-to-all that overlaps with kernels, behind earlier ones among these ranks."""
        transfer = self._queue(ranks, seconds)
        self._sent[ranks].append(transfer)
        return transfer

    def arrive(self, ranks: Hashable) -> float:
        """Wait for the oldest of these not yet waited for; returns for how long."""
        waited = self._until(ranks, self._sent[ranks].popleft())
        self.waiting += waited
        return waited

    def shard(self, seconds: float) -> Transfer:
        """Queue one of FSDP's collectives behind earlier ones."""
        self.sharding += seconds
        return self._queue(SHARDING, seconds)

    def until(self, transfer: Transfer) -> None:
        """Let kernels wait for one of FSDP's collectives."""
        self.exposed += self._until(SHARDING, transfer)

    def end(self) -> None:
        """Wait until all is done."""
        if self._streams[SHARDING]:
            self.until(self._streams[SHARDING][-1])
        self.launch()

    def _queue(self, stream: Hashable, seconds: float) -> Transfer:
        transfer = Transfer(seconds, self.now, self.now)
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
            at, left = self.now, seconds * speed
            while queue and left > 0.0:
                first = queue[0]
                if first.left == first.seconds:
                    first.start = at
                step = min(left, first.left)
                at, left = at + step / speed, left - step
                first.left -= step
                first.end = at
                if first.left <= ROUNDING * first.seconds:
                    queue.popleft()
        self.now += seconds


@dataclass(frozen=True)
class StepTime(Sums):
    """Seconds of one step of one rank, by what spends them.

    Attributes:
        matrices: kernels with matmuls.
        elementwise: all others.
        all_to_alls: waited for, or by which kernels beside them take longer; and sums over all ranks.
        sharding: all-gathers, reduce-scatters and all-reduces in all, alone.
        exposed: what these add to a step: waited for, or by which kernels beside them take longer.
        update: kernels of clipping and the optimizer's step; in a forecast the host's calls for these, where they take
            longer, and kernels that round weights once a step.
        host: what the host takes to call all operators; launching: the part of it that kernels wait for.
        bubble: waited for other stages of a pipeline.
        gathers: all-gathers and reduce-scatters of activations in tensor-parallel groups, all of them waited for.
    """

    matrices: float
    elementwise: float
    all_to_alls: float
    sharding: float
    exposed: float
    update: float
    host: float
    launching: float
    bubble: float = 0.0
    gathers: float = 0.0

    @staticmethod
    def none() -> "StepTime":
        return StepTime(*(0.0 for _ in fields(StepTime)))

    @staticmethod
    def of(clocks: Sequence[tuple[int, Clock]], host: float) -> "StepTime":
        """clocks: at the end of parts of a step, with how often each comes. host: seconds of all its calls."""
        return StepTime(
            sum(often * clock.matrices for often, clock in clocks),
            sum(often * (clock.computing - clock.matrices - clock.update) for often, clock in clocks),
            sum(often * clock.waiting for often, clock in clocks),
            sum(often * clock.sharding for often, clock in clocks),
            sum(often * clock.exposed for often, clock in clocks),
            sum(often * clock.update for often, clock in clocks),
            host,
            sum(often * clock.launching for often, clock in clocks),
            gathers=sum(often * clock.gathering for often, clock in clocks),
        )

    @property
    def kernels(self) -> float:
        return self.matrices + self.elementwise + self.update

    @property
    def total(self) -> float:
        return self.kernels + self.all_to_alls + self.gathers + self.exposed + self.launching + self.bubble

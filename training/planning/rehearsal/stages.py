"""A rank's part of a pipeline: which micro-batches of a step to run, and how long it waits for other stages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from ....sharding.pipeline.pipeline import Pipeline
from ....sharding.pipeline.schedule import Action, ScheduleName, make_schedule
from ....sharding.pipeline.timeline import Costs, simulate

ALIKE = 2
"""So many micro-batches are run where there is no pipeline: all after the first are alike."""


def micro_batches_to_run(pipeline: Pipeline | None, micro_batches: int) -> int:
    """How many of a step's micro-batches show all that it does: in a pipeline a round more than those with which every
    rank holds as much at once as with all of them."""
    few = min(micro_batches, ALIKE)
    if pipeline is None:
        return few

    def most(number: int) -> list[tuple[tuple[int, int], ...]]:
        return list(map(_most_held, make_schedule(pipeline.schedule, pipeline.stages.pp_size, pipeline.chunks, number)))

    of_all = most(micro_batches)
    least = next(number for number in range(few, micro_batches + 1) if most(number) == of_all)
    return min(least + pipeline.stages.pp_size, micro_batches)


def _most_held(actions: Sequence[Action]) -> tuple[tuple[int, int], ...]:
    """What a rank holds at the most, in micro-batches of a stage, until all of its stages have gradients, and then: how
    many in all, and how many of these wait for their weight gradients."""
    stages, has_gradients = {action.stage for action in actions}, set[int]()
    has_weights = any(action.kind == "weights" for action in actions)
    in_flight = queued = 0
    most, later = [(0, 0)], [(0, 0)]
    for action in actions:
        if action.kind == "forward":
            in_flight += 1
        elif action.kind == "weights":
            queued, in_flight = queued - 1, in_flight - 1
        else:
            has_gradients.add(action.stage)
            queued, in_flight = (queued + 1, in_flight) if has_weights else (queued, in_flight - 1)
        (later if has_gradients == stages else most).append((in_flight, queued))
    return tuple((max(n for n, _ in held), max(q for _, q in held)) for held in (most, later))


@dataclass(frozen=True)
class StageSeconds:
    """What a stage takes for one micro-batch. weights: of weight gradients that are computed later than others; send:
    of the output's way to the next stage, or of its gradient's to the one before."""

    forward: float
    backward: float
    weights: float
    send: float


def slowest_of_stages(by_rank: Iterable[Mapping[int, StageSeconds]]) -> dict[int, StageSeconds]:
    """Each stage's seconds where several of its ranks were run: of each figure the largest, as the ranks of a stage
    exchange tokens with one another and wait for the slowest."""
    slowest: dict[int, StageSeconds] = {}
    for stages in by_rank:
        for number, seconds in stages.items():
            known = slowest.get(number, seconds)
            slowest[number] = StageSeconds(*map(max, astuple(known), astuple(seconds)))
    return slowest


@dataclass(frozen=True)
class PipelinePart:
    """A rank's part of a pipeline.

    Attributes:
        index: the rank's pp index.
        layers: its decoder layers, as (first, last) of each of its stages.
        stages: what its stages take.
        waited: seconds of a step in which it waits for other stages.
        bubble: the mean over all ranks, as a share of the time from the first forward to the last backward.
    """

    schedule: ScheduleName
    pp_size: int
    chunks: int
    micro_batches: int
    index: int
    layers: Sequence[tuple[int, int]]
    stages: Mapping[int, StageSeconds]
    waited: float = 0.0
    bubble: float = 0.0

    @staticmethod
    def of(pipeline: Pipeline, micro_batches: int, stages: Mapping[int, StageSeconds]) -> "PipelinePart":
        """The part of a rank whose stages were run."""
        layers = [(part[0], part[-1]) for part in (pipeline.stages.layers[stage] for stage in pipeline.stages.here)]
        figures = (pipeline.schedule, pipeline.stages.pp_size, pipeline.chunks, micro_batches, pipeline.groups.index)
        return PipelinePart(*figures, layers, stages).among(stages)

    def among(self, stages: Mapping[int, StageSeconds]) -> "PipelinePart":
        """The same where these stages were run; others take as long as their mean."""
        mean = [sum(figures) / len(stages) for figures in zip(*map(astuple, stages.values()), strict=True)]
        all_stages = [stages.get(stage, StageSeconds(*mean)) for stage in range(self.pp_size * self.chunks)]
        costs = Costs(
            [stage.forward for stage in all_stages],
            [stage.backward for stage in all_stages],
            [stage.weights for stage in all_stages],
            max(stage.send for stage in all_stages),
        )
        found = simulate(make_schedule(self.schedule, self.pp_size, self.chunks, self.micro_batches), costs)
        return replace(self, waited=found.seconds * found.idle[self.index], bubble=found.bubble)

    @property
    def told(self) -> str:
        """Its stages and their layers, in words."""
        own = (
            f"stage {self.index + 1 + self.pp_size * chunk} (layers {first} to {last})"
            for chunk, (first, last) in enumerate(self.layers)
        )
        return f"{', '.join(own)} of {self.pp_size * self.chunks}"

"""How uneven routing is, as `--imbalance` says it: a number, what a run has logged, or else what is natural. With it
goes what else of a step depends on its data, and is given to a dry run instead."""

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...moe.util.errors import ExpertMeshError
from ..config.train_config import TrainConfig
from ..metrics import METRICS
from ..model_setup.rates import natural_imbalance, rank_imbalance

MOST_LINE = 64 * 2**20
"""Bytes of a line of metrics.jsonl."""


def add_imbalance_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--imbalance",
        metavar="X|FILE",
        help="load of the busiest expert over the mean, or a run's metrics.jsonl that has it (default: that of natural "
        "routing; 1: even)",
    )
    parser.add_argument(
        "--image-tokens",
        metavar="N",
        type=int,
        help="with --images: each sample has an image of so many tokens (default: none has an image)",
    )


def read_image_tokens(given: int | None, config: TrainConfig) -> int:
    """Tokens of each sample's image; 0: there are none.

    Raises:
        ExpertMeshError: there cannot be such images.
    """
    if given is not None and given < 1:
        raise ExpertMeshError(f"--image-tokens {given}: must be 1 or more")
    if given is not None and not config.images:
        raise ExpertMeshError("--image-tokens: there are no images without --images; add it")
    return given or 0


def read_imbalance(given: str | None) -> float | None:
    """The load of the busiest expert over the mean; None: natural.

    Raises:
        ExpertMeshError: it is below 1, or neither a number nor a file that has it.
    """
    if given is None:
        return None
    try:
        busiest = float(given)
    except ValueError:
        return _logged(Path(given))
    if not 1 <= busiest < float("inf"):
        raise ExpertMeshError(f"--imbalance {given}: must be 1 (the mean) or more")
    return busiest


def imbalance_of(busiest: float | None, num_experts: int) -> float:
    """What was given, or what is natural.

    Raises:
        ExpertMeshError: it is more than so many experts can have.
    """
    if busiest is not None and busiest > num_experts:
        raise ExpertMeshError(
            f"--imbalance {busiest:g}: the busiest of {num_experts} experts has at most {num_experts} times the mean"
        )
    return natural_imbalance(num_experts) if busiest is None else busiest


def _logged(file: Path) -> float:
    """From the last line with a metric that has it; of several, from that which METRICS has last."""
    sources = [metric for metric in METRICS if metric.imbalance is not None]
    try:
        with file.open(encoding="utf-8") as lines:
            records = [json.loads(line) for line in iter(partial(lines.readline, MOST_LINE), "")]
    except (OSError, ValueError, RecursionError) as error:
        raise ExpertMeshError(f"--imbalance {file}: is not a readable metrics.jsonl: {error}") from error
    names = {metric.name for metric in sources}
    found = [record for record in records if isinstance(record, dict) and record.keys() & names]
    try:
        last = found[-1]
        values = [metric.imbalance(last[metric.name]) for metric in sources if metric.imbalance and metric.name in last]
        busiest = next(filter(None, reversed(values)))
    except (IndexError, TypeError, ValueError, ZeroDivisionError, StopIteration) as error:
        raise ExpertMeshError(
            f"--imbalance {file}: no line has {' or '.join(sorted(names))}; give a number, or metrics.jsonl of a run"
        ) from error
    return max(1.0, busiest)


@dataclass(frozen=True)
class GivenRouting:
    """samples: packed into one sequence, with `packing`, all equally long. busiest: the load of the busiest expert over
    the mean, None for what is natural. loaded: the ep rank that has it. trained: the fraction of all tokens that have a
    loss; None: all but the first of each sample, and images' tokens. image_tokens: of each sample's one image; 0: there
    are none."""

    samples: int = 8
    busiest: float | None = 1.0
    loaded: int = 0
    trained: float | None = None
    image_tokens: int = 0

    def shares(self, num_experts: int, ep_size: int) -> tuple[float, ...]:
        """The fraction of all routed tokens that goes to each ep rank: to the most loaded one at most all, and the rest
        equally to the others. None where all are equal."""
        busiest = imbalance_of(self.busiest, num_experts)
        imbalance = rank_imbalance(busiest, num_experts, ep_size)
        if imbalance == 1:
            return ()
        most = min(imbalance / ep_size, 1.0)
        return tuple(most if rank == self.loaded else (1 - most) / (ep_size - 1) for rank in range(ep_size))


EVEN = GivenRouting()
"""Every ep rank gets as many rows."""

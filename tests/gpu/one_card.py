"""Runs of train_ep.py whose ranks share one card, and how they are compared."""

import os
from pathlib import Path

import pytest

from tests.distributed.whole_runs import Ended, Runs, Told, read, tell
from tests.tiny import relative_error

THREE_STEPS = (
    "--max-steps 3 --per-device-train-batch-size 2 --global-batch-size 12 --router-aux-loss-coef 0.02 "
    "--router-z-loss-coef 0.01 --max-seq-length 64 --learning-rate 0.1 --adam-epsilon 1"
)
"""With an epsilon so large that updates are nearly gradients, with another rate."""

SECONDS = 90.0
"""That a run on a card may take, what it compiles included: `benchmarks.first_gpu` gives a file two or three
minutes."""


def tell_on(argv: list[str], device: str) -> Told:
    """train_ep.py on this rank. NCCL takes several ranks on one GPU if each seems to have a host of its own."""
    if device == "cuda":
        os.environ.update(NCCL_HOSTID=str(os.getpid()), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        argv = [flag for flag in argv if flag != "--use-cpu"]
    return tell(argv)


def run_on(device: str, runs: Runs, world_size: int, flags: str, out: str | Path) -> Ended:
    """On a card a run that hangs, or after which its processes can no longer use the card, costs no other test its
    time or its result."""
    seconds = SECONDS if device == "cuda" else 600.0
    try:
        return runs(world_size, f"{THREE_STEPS} {flags}", out, call=tell_on, given=[device], seconds=seconds)
    except AssertionError:
        if device == "cuda":
            runs.ranks.close()
        raise


def assert_near(found: Ended, expected: Ended, model: Path, tolerance: float, of_weights: float | None = None) -> None:
    """Losses and gradient norms of each step, and what training has changed in each weight."""
    assert found.values("tokens") == expected.values("tokens")
    for name in ("loss", "grad_norm"):
        values, wanted = found.values(name), expected.values(name)
        assert values == pytest.approx(wanted, rel=tolerance), (name, values, wanted)
    before, weights, others = read(model), found.weights, expected.weights
    assert weights.keys() == others.keys()
    most = tolerance if of_weights is None else of_weights
    changes = {name: others[name] - tensor for name, tensor in before.items()}
    # of what hardly changes the last digits of the weights are seen
    floor = 1e-2 * max(float(change.norm()) for change in changes.values())
    errors = {name: relative_error(weights[name] - before[name], changes[name], floor) for name in before}
    assert max(errors.values()) <= most, {name: error for name, error in errors.items() if error > most}

"""What looks at a step, in a pipeline: --detect-anomaly, --on-nonfinite and --profile, where most of a model's tensors
are on other ranks and stand-ins for them are NaN."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from expertmesh.sharding.topology import Topology
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.monitoring.anomaly import AnomalyDetector
from expertmesh.training.steps.step import compute_gradients
from tests.distributed.pool import RankPool
from tests.distributed.reference import my_batches, sharded_model
from tests.distributed.test_nonfinite import FOUND, Poison, applied, tell_poisoned
from tests.distributed.test_profiling import files_of, names_in, profile_of
from tests.distributed.whole_runs import Runs, batch_of_12
from tests.parity.case import Case, hf_model, random_samples

TOPOLOGY = Topology(4, 2, pp_size=2)
INTERLEAVED = {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}
CASES: dict[str, tuple[dict[str, Any], list[tuple[str, int, int]]]] = {
    # what is spoilt, of which layer, on which rank
    "1f1b": (
        dict(settings={"pipeline_layers": "2,2"}),
        [("output", 1, 1), ("output", 3, 2), ("gradient", 0, 0), ("gradient", 2, 3), ("parameter", 2, 2)],
    ),
    # ranks 0 and 1 have the layers 0 and 2
    "interleaved": (
        dict(settings=INTERLEAVED, gradient_checkpointing="full"),
        [("output", 1, 3), ("output", 2, 0), ("gradient", 2, 1), ("gradient", 3, 2)],
    ),
}


def experts(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_first_is_found_over_all_stages(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """In the stage where it came about, not in those that were handed it."""
    settings, spoilt = CASES[name]
    samples = random_samples([9 + (5 * i) % 12 for i in range(16)])
    case = Case(samples, accumulation=4, changes={"num_hidden_layers": 4}, **settings)
    hf_model(case, seed=1).save_pretrained(tmp_path)
    expected = [f"{FOUND[what].replace('layers.1', f'layers.{layer}')}, on rank {rank}" for what, layer, rank in spoilt]
    finite = "every gradient is finite, but not the sum of their squares"
    told = ranks.run(_firsts, TOPOLOGY.world_size, tmp_path, case, spoilt)
    assert told == [[finite, *(f"first non-finite tensor: {said}" for said in expected)]] * 4


def _firsts(path: Path, case: Case, spoilt: list[tuple[str, int, int]]) -> list[str]:
    """What is found without poison, then with each."""
    model, *_ = sharded_model(path, TOPOLOGY, case)
    detector = AnomalyDetector(model.train())
    rank, found = dist.get_rank(), []
    for what, layer, at in (("", 0, -1), *spoilt):
        detector.forget()
        model.zero_grad()
        poison = Poison(what, experts(layer) + (".mlp.w1" if what == "parameter" else ""), at, frozenset())
        with applied(poison, model) if at == rank else nullcontext():
            compute_gradients(model, my_batches(case, TOPOLOGY, rank), LossWeights(0.05, 0.01))
        found.append(detector.first_nonfinite())
    return found


@pytest.mark.release
def test_a_step_is_skipped_on_all_stages(runs: Runs) -> None:
    """And profiled on all."""
    flags = (
        f"{batch_of_12(2, accumulation=3)} --pp-size 2 --ep-size 2 --max-steps 3 --save-steps 0 --no-export "
        "--detect-anomaly --on-nonfinite skip --profile 3 --profile-ranks all"
    )
    # of layer 0, on the first stage
    ended = runs(4, flags, call=tell_poisoned, given=[Poison("gradient", experts(0), 1, frozenset({1}))])
    assert "warning: step 2 is skipped" in ended.errors
    assert f"gradient of the output of {experts(0)}, in backward, on rank 1" in ended.errors
    assert [line.get("skipped_steps", 0) for line in ended.lines()] == [0, 1, 0]
    assert names_in(ended.out) == files_of(*(f"rank-{rank}.step-3" for rank in range(4)))
    for rank in range(4):
        parts = profile_of(ended.out, f"rank-{rank}.step-3")["parts"]
        assert {"expert GEMMs", "attention", "dispatch", "router", "pipeline", "FSDP", "optimizer step"} <= parts.keys()
        assert ("embedding" in parts) == (rank < 2)
        assert ("LM head, loss" in parts) == (rank >= 2)
        known = sum(figures["calls"] for figures in parts.values())
        assert parts.get("other", {"calls": 0})["calls"] < 0.1 * known

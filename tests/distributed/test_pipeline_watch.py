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
from expertmesh.training.step import compute_gradients
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, hf_model, my_batches, random_samples, sharded_model
from tests.distributed.test_nonfinite import Poison, applied, metrics, run_poisoned
from tests.distributed.test_profiling import files_of, names_in, profile_of
from tests.distributed.test_resume import flags, shares

TOPOLOGY = Topology(4, 2, pp_size=2)
CASES: dict[str, dict[str, Any]] = {
    "1f1b": dict(settings={"pipeline_layers": "2,2"}),
    # rank 0 and 1 have the layers 0 and 2
    "interleaved": dict(
        settings={"pipeline_schedule": "interleaved", "pipeline_chunks": 2}, gradient_checkpointing="full"
    ),
}


def experts(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts"


def poison(what: str, layer: int, rank: int) -> Poison:
    name = experts(layer) + (".mlp.w1" if what == "parameter" else "")
    return Poison(what, name, rank, frozenset())


SPOILT: dict[str, list[tuple[Poison, str]]] = {
    "1f1b": [
        (poison("output", 1, 1), f"output of {experts(1)}, in forward, on rank 1"),
        (poison("output", 3, 2), f"output of {experts(3)}, in forward, on rank 2"),
        (poison("gradient", 0, 0), f"gradient of the output of {experts(0)}, in backward, on rank 0"),
        (poison("gradient", 2, 3), f"gradient of the output of {experts(2)}, in backward, on rank 3"),
        (poison("parameter", 2, 2), f"parameter {experts(2)}.mlp.w1, before the step, on rank 2"),
    ],
    "interleaved": [
        (poison("output", 1, 3), f"output of {experts(1)}, in forward, on rank 3"),
        (poison("output", 2, 0), f"output of {experts(2)}, in forward, on rank 0"),
        (poison("gradient", 2, 1), f"gradient of the output of {experts(2)}, in backward, on rank 1"),
        (poison("gradient", 3, 2), f"gradient of the output of {experts(3)}, in backward, on rank 2"),
    ],
}


@pytest.mark.release
@pytest.mark.parametrize("name", CASES)
def test_the_first_is_found_over_all_stages(ranks: RankPool, tmp_path: Path, name: str) -> None:
    samples = random_samples([9 + (5 * i) % 12 for i in range(16)])
    case = Case(samples, accumulation=4, changes={"num_hidden_layers": 4}, **CASES[name])
    hf_model(case, seed=1).save_pretrained(tmp_path)
    poisons = [poison for poison, _ in SPOILT[name]]
    told = ranks.run(_firsts, TOPOLOGY.world_size, tmp_path, case, poisons)
    finite = "every tensor is finite: the gradients are, but not the sum of their squares"
    assert told == [[finite, *(f"first non-finite tensor: {said}" for _, said in SPOILT[name])]] * 4


def _firsts(path: Path, case: Case, poisons: list[Poison]) -> list[str]:
    """What is found without poison, then with each."""
    model, *_ = sharded_model(path, TOPOLOGY, case)
    detector = AnomalyDetector(model.train())
    rank, found = dist.get_rank(), []
    for poison in (None, *poisons):
        detector.forget()
        model.zero_grad()
        with applied(poison, model) if poison is not None and poison.rank == rank else nullcontext():
            compute_gradients(model, my_batches(case, TOPOLOGY, rank), LossWeights(0.05, 0.01))
        found.append(detector.first_nonfinite())
    return found


@pytest.mark.release
def test_a_step_is_skipped_on_all_stages(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """And profiled on all."""
    argv = flags(tiny_model, tiny_data, tmp_path, *shares(2, accumulation=3), "--pp-size", "2", "--ep-size", "2")
    argv += ["--max-steps", "3", "--save-steps", "0", "--no-export", "--detect-anomaly", "--on-nonfinite", "skip"]
    argv += ["--profile", "3", "--profile-ranks", "all"]
    # of layer 0, on the first stage
    spoilt = Poison("gradient", experts(0), 1, frozenset({1}))
    results = ranks.run(run_poisoned, 4, argv, spoilt, join_group=False)
    assert [code for code, _ in results] == [0] * 4, results
    assert "warning: step 2 is skipped" in results[0][1]
    assert f"gradient of the output of {experts(0)}, in backward, on rank 1" in results[0][1]
    assert [line.get("skipped_steps", 0) for line in metrics(tmp_path)] == [0, 1, 0]
    assert names_in(tmp_path) == files_of(*(f"rank-{rank}.step-3" for rank in range(4)))
    for rank in range(4):
        parts = profile_of(tmp_path, f"rank-{rank}.step-3")["parts"]
        assert {"expert GEMMs", "attention", "dispatch", "router", "pipeline", "FSDP", "optimizer step"} <= parts.keys()
        assert ("embedding" in parts) == (rank < 2)
        assert ("LM head, loss" in parts) == (rank >= 2)
        known = sum(figures["calls"] for figures in parts.values())
        assert parts.get("other", {"calls": 0})["calls"] < 0.1 * known

"""Steps of two stages, by their own functions: what each rank is given, and in which order it computes."""

import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from expertmesh.sharding.topology import Topology
from expertmesh.training.data.batch import collate
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.steps.evaluate import inference
from expertmesh.training.steps.micro_batch import count_step
from expertmesh.training.steps.pipelined import pipelined_gradients, pipelined_heads
from tests.distributed.pool import RankPool
from tests.distributed.reference import sharded_model
from tests.parity.case import Case, random_samples
from tests.rounding import assert_near, near
from tests.tiny import save_model

SAMPLES = random_samples([9, 4, 7])


def both(path: Path) -> tuple[list[torch.Tensor], float, list[str]]:
    """Log-probabilities of the micro-batches' targets; the loss, of which this rank has its part; what it did."""
    case = Case([], settings={"pipeline_schedule": "1f1b"})
    model, *_ = sharded_model(path, Topology(2, 1, pp_size=2), case)
    batches = [collate([[sample]]) for sample in SAMPLES]
    with inference(model):
        heads = pipelined_heads(model, batches, by_token=True)
    done: list[str] = []
    losses, _ = pipelined_gradients(model, batches, count_step(model, batches), LossWeights(0.0, 0.0), done.append)
    assert any(p.grad is not None for p in model.parameters())
    actions = [line for line in done if re.fullmatch(r"stage \d of 2, \w+ of micro-batch \d", line)]
    return heads, float(losses[0]), actions


def test_two_stages(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path)
    (none, nothing, first), (heads, loss, last) = ranks.run(both, 2, tmp_path)
    assert (none, nothing) == ([], 0.0), "the last stage is elsewhere"
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = []
    for sample in SAMPLES:
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[0, :-1]
        nll = F.cross_entropy(logits, torch.tensor(sample.tokens[1:]), reduction="none")
        expected.append(-nll[torch.tensor(sample.is_trained[1:])])
    assert_near(tuple(heads), tuple(expected))
    assert loss == near(-float(torch.cat(expected).mean()))
    # one forward, one backward: the first stage is a micro-batch ahead of the last
    assert first == [f"stage 1 of 2, {kind} of micro-batch {n}" for kind, n in (
        ("forward", 1), ("forward", 2), ("backward", 1), ("forward", 3), ("backward", 2), ("backward", 3),
    )]  # fmt: skip
    assert last == [f"stage 2 of 2, {kind} of micro-batch {n}" for n in (1, 2, 3) for kind in ("forward", "backward")]

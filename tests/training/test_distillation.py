"""The loss against a teacher, against torch's own over the vocabulary and a plain loop."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertmesh.training.tasks.distillation import distillation_objective, with_rest
from expertmesh.training.tasks.teacher import TEACHER
from tests.rounding import assert_near

N, V = 5, 9


def logprobs(seed: int) -> torch.Tensor:
    return torch.randn(N, V, generator=torch.Generator().manual_seed(seed)).log_softmax(dim=1)


def test_with_all_but_one_token_it_is_the_divergence_over_the_vocabulary() -> None:
    """The token that is left is the only one of "all others"."""
    student_NV, teacher_NV = logprobs(0), logprobs(1)
    # one less what the others add up to: what is left of 1, relatively
    assert_near(with_rest(teacher_NV[:, :-1]), teacher_NV)
    config: Any = SimpleNamespace(teacher="any", teacher_weight=1.0)
    objective = distillation_objective(config)
    assert objective is not None
    batch: Any = {TEACHER: teacher_NV[:, :-1]}
    total, *_ = objective.loss(torch.cat([student_NV[:, :1], student_NV[:, :-1]], dim=1), batch)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=teacher_NV), torch.distributions.Categorical(logits=student_NV)
    ).sum()
    assert_near(total, expected)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_against_a_loop(weight: float) -> None:
    student_NV, teacher_NV = logprobs(2), logprobs(3)
    top_NK, targets_N = teacher_NV.topk(3).indices, torch.arange(N)
    config: Any = SimpleNamespace(teacher="any", teacher_weight=weight)
    objective = distillation_objective(config)
    assert objective is not None
    picked = torch.cat([student_NV[range(N), targets_N][:, None], student_NV.gather(1, top_NK)], dim=1)
    batch: Any = {TEACHER: teacher_NV.gather(1, top_NK)}
    total, divergence, cross_entropy = (float(value) for value in objective.loss(picked, batch))
    kl = nll = 0.0
    for n in range(N):
        ours, theirs = student_NV[n].double().exp(), teacher_NV[n].double().exp()
        nll -= math.log(ours[targets_N[n]])
        outcomes = [(float(theirs[v]), float(ours[v])) for v in top_NK[n].tolist()]
        outcomes.append((1 - sum(p for p, _ in outcomes), 1 - sum(q for _, q in outcomes)))
        kl += sum(p * math.log(p / q) for p, q in outcomes)
    assert divergence == pytest.approx(kl, rel=1e-4)
    assert cross_entropy == pytest.approx(nll, rel=1e-4)
    assert total == pytest.approx(weight * kl + (1 - weight) * nll, rel=1e-4)

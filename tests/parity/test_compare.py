"""The comparison sees every difference, and no reference that is kept is one of something else."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import kept
from tests.parity.case import Case, Figures, hf_model, random_samples
from tests.parity.compare import Tolerance, assert_same, first_difference

A, B = torch.tensor([3.0, 4.0]), torch.tensor([1e-4, 0.0])
ROUTING = {"router_entropy": [1.0], "expert_tokens": [[3, 1]], "dropped_tokens": 0}
WANTED = Figures(
    [2.0, 1.0], [5.0, 4.0], [1.0, 1.0], [0.5, 0.5], {"a": A, "b": B}, {"a": A, "b": B}, {"c": A}, routing=ROUTING
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"losses": [2.1, 1.0]}, "step 1, losses"),
        ({"losses": [math.nan, 1.0]}, "step 1, losses"),
        ({"losses": [2.0, math.nan]}, "step 2, losses"),
        ({"grad_norms": [5.0, 4.1]}, "step 2, grad_norms"),
        ({"balances": [1.0, 1.1]}, "step 2, balances"),
        ({"zs": [0.6, 0.5]}, "step 1, zs"),
        ({"grads": {"a": A}}, "grads: b is in one of them alone"),
        ({"grads": {"a": A, "b": 1.01 * B}}, "grads: b is off"),
        ({"grads": {"a": A, "b": B * math.nan}}, "grads: b is off"),
        ({"grads": {"a": A.double(), "b": B}}, r"grads: \['a'\] have another dtype"),
        ({"weights": {"a": A + 1e-3, "b": B}}, "weights: a is off"),
        ({"weights": {"a": A, "b": B, "more": A}}, "weights: more is in one of them alone"),
        ({"buffers": {"c": A + 1e-3}}, "buffers: c is off"),
        ({"routing": ROUTING | {"expert_tokens": [[2, 2]]}}, "routing"),
        ({"routing": ROUTING | {"router_entropy": [math.nan]}}, "routing"),
        ({"routing": ROUTING | {"dropped_tokens": 1}}, "routing"),
    ],
    ids=str,
)
def test_a_difference_is_seen(change: dict[str, Any], said: str) -> None:
    assert first_difference(WANTED, WANTED) is None
    with pytest.raises(AssertionError, match=said):
        assert_same(replace(WANTED, **change), WANTED)


def test_what_is_allowed() -> None:
    cancelled = replace(WANTED, grads={"a": A, "b": 1.01 * B})
    assert first_difference(cancelled, WANTED, Tolerance(cancelled=0.1)) is None
    noisy = replace(WANTED, grads={"a": A * (1 + 1.5e-5), "b": B})
    assert first_difference(noisy, WANTED) is not None
    assert first_difference(noisy, WANTED, Tolerance(noisy="a")) is None
    unreached = replace(WANTED, grads=WANTED.grads | {"more": torch.zeros(2)})
    assert first_difference(unreached, WANTED) is not None
    assert first_difference(unreached, WANTED, Tolerance(may_lack=True)) is None
    for other in (1.0 + 1e-7, 2.0):
        near = replace(WANTED, losses=[2.0 * other, 1.0])
        with pytest.raises(AssertionError, match="losses"):
            assert_same(near, WANTED, bits="all")


def test_a_reference_is_kept_by_all_that_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "DIRECTORY", tmp_path)
    case = Case(random_samples([5, 3]), steps=1)
    first = kept.expected(case)
    assert_same(kept.expected(replace(case, kernel="torch-grouped", settings={"overlap_chunks": 2})), first, bits="all")
    assert len(list(tmp_path.iterdir())) == 1
    others: list[tuple[Case, dict[str, Any]]] = [
        (replace(case, samples=random_samples([5, 4])), {}),
        (replace(case, z=0.01), {}),
        (replace(case, steps=2), {}),
        (replace(case, settings={"optim": "muon"}), {}),
        (replace(case, changes={"num_experts_per_tok": 1}), {}),
        (case, {"seed": 1}),
    ]
    for other, changes in others:
        kept.expected(other, hf_model(other, **changes))
    assert len(list(tmp_path.iterdir())) == 1 + len(others)

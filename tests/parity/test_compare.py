"""The comparison sees every difference, and no reference that is kept is one of something else."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import kept, reference
from tests.parity.case import Case, Figures, hf_model, random_samples
from tests.parity.compare import Tolerance, assert_same, first_difference
from tests.parity.rows import EXACT, Row
from tests.parity.table import ROWS
from tests.rounding import OtherOrder, norm_of

A, B = torch.tensor([3.0, 4.0]), torch.tensor([1e-3, 0.0])
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
    cancelled = replace(WANTED, grads={"a": A, "b": B + 5e-7})
    assert first_difference(cancelled, WANTED) is None
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


CANCELLING = ("no target, on 2 ep 2", "one target, on 4 ep 4")
"""Of queries and keys next to nothing is left."""
ORDERED = [row for row in ROWS if row.against is None and row.case.family == "mixtral" and row.allowed == EXACT]
FEW = [row for row in ROWS if row.name in CANCELLING]


def answer(row: Row, seed: int, nudged: bool = False, case: Case | None = None) -> Figures:
    """Of transformers' class, its hidden units in an order of that seed."""
    model = hf_model(row.case)
    # of which Shampoo's factors are
    block = row.case.settings.get("shampoo_block_size") if row.case.settings.get("optim") == "shampoo" else None
    order = OtherOrder(model, seed, nudged, block)
    found = reference.answer(model, reference.question(case or row.case))
    return Figures(**found | {what: order.undone(found[what]) for what in ("grads", "weights")})


def of_rows(quick: int) -> list[Any]:
    """The rows that differ in what transformers is asked; some of them in `make test`, a sixth in `make test-rest`."""
    rows = list({f"{reference.question(row.case)} {row.case.changes}": row for row in (*FEW, *ORDERED)}.values())
    marks = [() if i < quick else pytest.mark.release if i % 6 else pytest.mark.slow for i in range(len(rows))]
    return [pytest.param(row, id=row.name, marks=mark) for row, mark in zip(rows, marks, strict=True)]


@pytest.mark.parametrize("nudged", [False, True], ids=["another order", "another place"])
@pytest.mark.parametrize("row", of_rows(quick=3))
def test_rounding_is_allowed(row: Row, nudged: bool) -> None:
    """Both sides are another processor's: the same sums in other orders."""
    for seed in range(4):
        found, wanted = answer(row, seed, nudged), answer(row, 100 + seed)
        assert first_difference(found, wanted, row.allowed) is None, seed


@pytest.mark.parametrize("row", of_rows(quick=3))
def test_a_fault_is_no_rounding(row: Row) -> None:
    """By a thousandth, or of one expert, or of one token; each beside rounding."""
    found, wanted = answer(row, 0), answer(row, 100)
    whole = norm_of(wanted.grads)
    faults = {}
    for what in ("losses", "grad_norms", *(["balances", "zs"] if row.case.balance and row.case.z else [])):
        figures: dict[str, Any] = {what: [figure * 1.001 for figure in getattr(found, what)]}
        if not all(map(math.isnan, figures[what])):
            faults[f"{what} by a thousandth"] = replace(found, **figures)
    for name, grad in wanted.grads.items():
        if float(grad.norm()) > 1e-3 * whole:
            faults[f"{name} by a thousandth"] = replace(found, grads=found.grads | {name: found.grads[name] * 1.001})
        for expert in range(len(grad)) if ".experts." in name else ():
            if grad[expert].any():
                for times in (0, 2):
                    changed = found.grads[name].clone()
                    changed[expert] *= times
                    label = f"{name}, expert {expert} {times} times"
                    faults[label] = replace(found, grads=found.grads | {name: changed})
    trained = [(i, j) for i, each in enumerate(row.case.samples) for j, is_one in enumerate(each.is_trained) if is_one]
    for i, j in [each for each in trained if each[1]][:1]:
        samples = list(row.case.samples)
        flags = [is_one and place != j for place, is_one in enumerate(samples[i].is_trained)]
        samples[i] = replace(samples[i], is_trained=flags)
        faults["a token"] = answer(row, 0, case=replace(row.case, samples=samples))
    assert len(faults) > 10
    unseen = [what for what, faulty in faults.items() if first_difference(faulty, wanted, row.allowed) is None]
    assert unseen == []


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
    # which no library reads, and no environment of these tests has
    monkeypatch.setenv("MKL_OF_A_TEST", "1")
    kept.expected(case)
    assert len(list(tmp_path.iterdir())) == 2 + len(others)

"""Tensor parallelism over what a trial with a few tokens, and the families' tiny models, do not show. test_families.py
has every family that transformers has a plan for."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import RankPool
from tests.families.configs import tiny_model
from tests.families.test_families import (
    SAMPLES,
    TOLERANCE,
    TP,
    Layout,
    compare,
    figures_on_ranks,
    gradients_in_double,
    gradients_of,
)
from tests.parity.case import Case, random_samples
from tests.tiers import tiered

LONG, MANY = random_samples([128, 128], vocabulary=290), random_samples([32] * 16, vocabulary=290)
CASES: dict[str, tuple[Case, str]] = {
    # of more tokens than the model was tried with when it was divided
    "windows as wide as a rank's positions": (
        Case(LONG, family="mimo_v2_flash", changes={"sliding_window": 64}),
        "auto",
    ),
    # under a mask that sdpa needs not, and has not, in the short sequences that the model is tried with
    "as many sequences as a rank's positions": (Case(MANY, changes={"sliding_window": 20}), "sdpa"),
    # by default it is tied to the head, and so not divided
    "an embedding that scales what it looks up": (
        Case(SAMPLES, family="gemma4_text", changes={"tie_word_embeddings": False}),
        "auto",
    ),
}


@pytest.mark.parametrize("name", tiered([*CASES][-1:], slow=[*CASES][:-1]))
def test_equals_one_process(ranks: RankPool, tmp_path: Path, name: str) -> None:
    case, attention = CASES[name]
    theirs: Any = tiny_model(case.family, seed=1, **case.changes)
    theirs.save_pretrained(tmp_path)
    loss, grads = gradients_of(theirs, case)
    in_double = cache(lambda: gradients_in_double(tiny_model(case.family, seed=1, **case.changes), case))
    layouts = [Layout(TP, packing, attention) for packing in ((False, True) if attention == "auto" else (False,))]
    found = ranks.run(figures_on_ranks, 2, tmp_path, layouts, case, tmp_path)[0]
    for (_, our_loss, our_grads, divided), layout in zip(found, layouts, strict=True):
        assert our_loss == pytest.approx(loss, rel=TOLERANCE), layout
        compare(our_grads, grads, str(layout), in_double=in_double)
        assert divided

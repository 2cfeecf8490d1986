"""Published models made small, with settings of their own but for the sizes: loss and gradients in several parallel
layouts are those of transformers in one process."""

from functools import cache
from pathlib import Path

import pytest
from transformers import AutoConfig

from expertmesh.moe.hf_model.families import families_with_plan
from expertmesh.sharding.topology import Topology
from tests.distributed.pool import RankPool
from tests.families.configs import random_model, skip_if_older, tiny_like
from tests.families.test_families import (
    CP,
    SAMPLES,
    TOLERANCE,
    TP,
    Layout,
    compare,
    figures_on_ranks,
    gradients_in_double,
    gradients_of,
)
from tests.parity.case import Case
from tests.published.models import CONFIGS, MODELS

LAYOUTS = [Layout(topology) for topology in (Topology(2, 2), CP, TP, Topology(2, 1, pp_size=2))]
TOLERANCES = {"nemotron-3-nano": 1e-4, "nemotron-3-ultra": 1e-4}
"""They keep all of their 52 and 108 layers here. Gradients of Mamba's D, sums over all tokens, are up to 6e-5 off in
fp32."""


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", MODELS)
def test_gradients(ranks: RankPool, tmp_path: Path, name: str) -> None:
    skip_if_older("has not all of these families")
    config = tiny_like(AutoConfig.from_pretrained(CONFIGS / name))
    theirs = random_model(config, seed=1)
    theirs.save_pretrained(tmp_path)
    case = Case(SAMPLES)
    loss, grads = gradients_of(theirs, case)
    in_double = cache(lambda: gradients_in_double(random_model(config, seed=1), case))
    layouts = [one for one in LAYOUTS if one.topology != TP or config.model_type in families_with_plan()]
    found = ranks.run(figures_on_ranks, 2, tmp_path, layouts, case, tmp_path)[0]
    for (_, our_loss, our_grads, _), layout in zip(found, layouts, strict=True):
        assert our_loss == pytest.approx(loss, rel=TOLERANCE), layout
        compare(our_grads, grads, str(layout), TOLERANCES.get(name, TOLERANCE), in_double)

"""Every recipe of configs/ rehearsed at its model's full size, on as many GPUs as it says: it runs, and it fits."""

import re

import pytest
from transformers import CONFIG_MAPPING

from sharding.planner.hardware import preset
from tests.test_configs import PUBLISHED, RECIPES, config_of, text_of
from training.rehearsal.account import account_of
from training.rehearsal.world import rehearse


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_and_fits(name: str) -> None:
    model_type, sizes = PUBLISHED[name]
    config, hardware = config_of(name), preset("H100", "infiniband-ndr")
    gpus = int(re.findall(r"positions a step on (\d+) GPUs", text_of(name))[0])
    rehearsed = rehearse(config, CONFIG_MAPPING[model_type](**sizes), gpus, rank=gpus - 1)
    account = account_of(rehearsed, config, hardware, gpus, gpus_per_node=8, rank=gpus - 1)
    layers_run, layers = account.layers
    assert layers_run <= 11 < layers
    assert account.fit.is_enough, account.fit
    assert account.ledger.needed > 6 * rehearsed.counts.active * account.tokens * 0.9

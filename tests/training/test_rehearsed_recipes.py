"""A recipe of configs/ for each family, rehearsed with a few of its layers at full width, on the GPUs that it names."""

import re
from dataclasses import replace

import pytest
from transformers import CONFIG_MAPPING

from sharding.planner.hardware import preset
from tests.test_configs import PUBLISHED, RECIPES, config_of, text_of
from training.rehearsal.account import account_of
from training.rehearsal.world import rehearse

LAYERS = {"deepseek_v3": 4, "qwen3_next": 4}
"""Of a family's model, with one of each kind; of others two."""
ONE_OF_A_FAMILY = {PUBLISHED[name][0]: name for name in RECIPES}.values()


@pytest.mark.parametrize("name", ONE_OF_A_FAMILY)
def test_a_recipe_runs(name: str) -> None:
    model_type, sizes = PUBLISHED[name]
    config, hardware = config_of(name), preset("H100", "infiniband-ndr")
    config = replace(config, keep_expert_products=min(config.keep_expert_products, 1))
    gpus = int(re.findall(r"positions a step on (\d+) GPUs", text_of(name))[0])
    model_config = CONFIG_MAPPING[model_type](**sizes | {"num_hidden_layers": LAYERS.get(model_type, 2)})
    rehearsed = rehearse(config, model_config, gpus, rank=gpus - 1)
    account = account_of(rehearsed, config, hardware, gpus, gpus_per_node=8, rank=gpus - 1)
    # the embedding is looked up, not multiplied with
    multiplied = rehearsed.counts.active - sizes["vocab_size"] * sizes["hidden_size"]
    assert account.ledger.needed > 6 * multiplied * account.tokens * 0.9

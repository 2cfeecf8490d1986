"""Dry runs of every recipe of configs/ at full size, on the published config.json of its model and the GPUs that it
names."""

import json
from dataclasses import replace

import pytest

from expertmesh.moe.hf_model.build import count_parameters
from expertmesh.training.planning.cluster_commands import main
from expertmesh.training.planning.planner.peak_memory import fullest
from expertmesh.training.planning.rehearsal.run_setting import planned
from tests.test_configs import (
    RECIPES,
    ROOT,
    config_of,
    forecast_in,
    gpus_of,
    model_of,
    published,
    settled,
    text_of,
)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_and_fits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, model, gpus = config_of(name), model_of(name), gpus_of(name)
    flags = ["--config", str(ROOT / "configs" / f"{name}.yaml"), "--model", str(published(name)), "--gpus", str(gpus)]
    if config.pp_size > 1:
        run = planned(config, model.config, gpus, imbalance=None)
        chosen = replace(run, setting=settled(config, run))
        flags += ["--rank", str(fullest(chosen).pp_rank * gpus // config.pp_size)]
    assert main(["rehearse", *flags, "--json"]) == 0
    (account,) = json.loads(capsys.readouterr().out)
    counts = count_parameters(model)
    assert account["fits"]
    assert account["parameters"] == counts.total
    assert account["layers"][1] == model.config.num_hidden_layers
    tokens = config.per_device_train_batch_size * account["forwards"] * config.max_seq_length // config.pp_size
    assert account["forwards"] == config.gradient_accumulation_steps
    # the embedding is looked up, not multiplied with
    multiplied = counts.active - model.get_input_embeddings().weight.numel()
    assert account["needed"] > 6 * multiplied * tokens
    stated = forecast_in(text_of(name))
    assert account["needed_bytes"] / 2**30 == pytest.approx(stated.memory, rel=0.01)
    assert account["tokens_per_second"] == pytest.approx(stated.speed, rel=0.01)

"""Dry runs of every recipe of configs/ at full size, on the published config.json of its model and the GPUs that it
names."""

import json
import re

import pytest

from expertmesh.moe.hf_model.build import count_parameters
from expertmesh.training.cluster.commands import main
from tests.test_configs import (
    RECIPES,
    ROOT,
    config_of,
    forecast_in,
    gpus_of,
    image_tokens,
    model_of,
    planned_recipe,
    published,
    text_of,
)
from tests.tiers import tiered

MEMORY = re.compile(
    r"# Memory per GPU, of \d+: ([\d.]+) GB of frozen weights, ([\d.]+) GB of adapters, their gradients and"
)


PIPELINES = [name for name in RECIPES if config_of(name).pp_size > 1]
"""Their stages are rehearsed one after the other, which takes minutes."""


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", tiered(slow=[name for name in RECIPES if name not in PIPELINES], release=PIPELINES))
def test_a_recipe_runs_and_fits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, model, gpus = config_of(name), model_of(name), gpus_of(name)
    flags = ["--config", str(ROOT / "configs" / f"{name}.yaml"), "--model", str(published(name)), "--gpus", str(gpus)]
    if config.packing:
        # as the head states it: sequences are one sample each
        flags += ["--samples-per-row", "1"]
    if config.images:
        flags += ["--image-tokens", str(image_tokens(name))]
    if config.pp_size > 1:
        flags += ["--rank", str(planned_recipe(name, gpus)[0].account.rank)]
    assert main(["rehearse", *flags, "--json"]) == 0
    (account,) = json.loads(capsys.readouterr().out)
    counts = count_parameters(model)
    assert account["fits"]
    if config.adapter == "lora":
        assert account["parameters"] > counts.total
        check_adapters(text_of(name), account["memory"]["kinds"])
    else:
        assert account["parameters"] == counts.total
    assert account["layers"][1] == model.config.get_text_config().num_hidden_layers
    tokens = config.per_device_train_batch_size * account["forwards"] * config.max_seq_length // config.pp_size
    assert account["forwards"] == (config.gradient_accumulation_steps or 1)
    # the embedding is looked up, not multiplied with
    multiplied = counts.active - model.get_input_embeddings().weight.numel()
    # frozen matrices have no gradients
    assert account["needed"] > (4 if config.adapter == "lora" else 6) * multiplied * tokens
    stated = forecast_in(text_of(name))
    assert account["needed_bytes"] / 2**30 == pytest.approx(stated.memory, rel=0.01)
    assert account["tokens_per_second"] == pytest.approx(stated.speed, rel=0.01)


def check_adapters(text: str, held: dict[str, float]) -> None:
    """What the head states of memory that a rank holds all the time."""
    ((frozen, adapters),) = MEMORY.findall(text)
    trained = held["parameters"] + held["gradients"] + held["optimizer"]
    assert (frozen, adapters) == (f"{held['frozen'] / 1e9:.1f}", f"{trained / 1e9:.1f}")

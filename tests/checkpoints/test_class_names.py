"""What modules are called in the class that config.json names: transformers' own, of the same configs."""

from typing import Any

import pytest
import torch
import transformers

from expertmesh.checkpoints.hf.class_names import ClassNames, class_names, whole_model
from expertmesh.moe.hf_model.build import build_model
from tests.families.configs import tiny_config


def test_names_there_and_back() -> None:
    names = ClassNames(None, (("model", "model.language_model"), ("lm_head", "lm_head")))
    assert names.there("model.layers.0") == "model.language_model.layers.0"
    assert names.here("model.language_model.layers.0") == "model.layers.0"
    assert names.there("model.language_model.layers.0") == "model.language_model.layers.0", "is there already"
    assert names.there("modelling.x") == "modelling.x"
    assert names.here("model.visual.merger") == "model.visual.merger"
    assert names.there("lm_head.weight") == names.here("lm_head.weight") == "lm_head.weight"


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_language_model_alone_is_its_own_class(family: str) -> None:
    config = tiny_config(family)
    assert whole_model(config) is None
    assert class_names(build_model(config, "eager"), config) == ClassNames()


def test_a_language_model_beside_a_vision_tower() -> None:
    """Each of its parameters has the shape of the one that transformers' whole class has under the name found."""
    config: Any = tiny_config("qwen3_5_moe")
    with torch.device("meta"):
        whole = transformers.AutoModelForImageTextToText.from_config(config)
    config.architectures = [type(whole).__name__]
    assert type(whole_model(config)) is type(whole)
    # as transformers has the part that is trained, and not in our layout of experts
    with torch.device("meta"):
        part = transformers.AutoModelForCausalLM.from_config(config.get_text_config())
    names = class_names(build_model(config, "eager"), config)
    shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
    assert "visual" in " ".join(shapes)
    found = {names.there(name): parameter.shape for name, parameter in part.named_parameters()}
    assert found.items() <= shapes.items()
    assert [name for name in shapes.keys() - found.keys() if "visual" not in name] == []
    assert {names.here(name) for name in found} == {name for name, _ in part.named_parameters()}


def test_a_class_that_transformers_has_not_is_the_one_trained() -> None:
    config = tiny_config("mixtral")
    config.architectures = ["NobodysForCausalLM"]
    assert whole_model(config) is None

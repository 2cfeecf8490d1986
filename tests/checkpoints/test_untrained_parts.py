"""What a config.json claims beside what is trained: what is left of it builds transformers' class of that alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from expertmesh.checkpoints.hf.untrained_parts import language_model_alone, missing_predictors, without_predictors
from expertmesh.moe.hf_model.build import model_class
from tests.families.configs import tiny_config


def test_the_text_part_is_left_of_a_model_with_several() -> None:
    config: Any = tiny_config("qwen3_5_moe")
    raw = config.to_dict() | {"dtype": "bfloat16", "tie_word_embeddings": False}
    raw["text_config"].pop("dtype")  # as config.json has it, where the whole says it
    found = language_model_alone(raw, config)
    assert not {"vision_config", "text_config"} & found.keys()
    assert found["dtype"] == "bfloat16"
    built = transformers.AutoConfig.for_model(**found)
    with torch.device("meta"):
        mine = transformers.AutoModelForCausalLM.from_config(built)
        theirs = transformers.AutoModelForCausalLM.from_config(config.get_text_config())
    assert [type(mine).__name__] == found["architectures"]
    assert type(mine) is type(theirs) is model_class(config)
    assert {n: p.shape for n, p in mine.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ({"num_nextn_predict_layers": 2}, {"num_nextn_predict_layers": 0}),
        ({"mtp_num_layers": 1, "mtp_width": 3}, {"mtp_num_layers": 0, "mtp_width": 3}),
        ({"num_mtp_modules": 3, "use_mtp": True}, {"num_mtp_modules": 0, "use_mtp": False}),
        ({"text": {"num_mtp_heads": 1}, "nextn": 4}, {"text": {"num_mtp_heads": 0}, "nextn": 4}),
        ({"num_hidden_layers": 5}, {"num_hidden_layers": 5}),
    ],
)
def test_layers_for_multi_token_prediction(said: dict[str, Any], left: dict[str, Any]) -> None:
    """Counts become 0, and what says whether there are any, false."""
    config = tiny_config("mixtral")
    raw = config.to_dict()
    assert without_predictors(raw | said) == raw | left
    assert language_model_alone(raw | said, config) == raw | said, "it is one, which may have them"


def checkpoint(trains_it: bool = False) -> Any:
    """Of whose tensors those of layer 5 are no part of what transformers computes."""
    return SimpleNamespace(
        source=SimpleNamespace(mtp=object() if trains_it else None),
        names=SimpleNamespace(is_computed=lambda name: "layers.5." not in name),
    )


def test_layers_of_which_there_is_no_tensor() -> None:
    raw = {"num_nextn_predict_layers": 1, "text_config": {"use_mtp": True}, "hidden_size": 4}
    claimed = "num_nextn_predict_layers 1, use_mtp True"
    assert missing_predictors(raw, checkpoint(), ["model.rotary"]) == claimed
    assert missing_predictors(raw, checkpoint(), ["model.rotary", "model.layers.5.eh_proj"]) == ""
    assert missing_predictors(raw, checkpoint(trains_it=True), []) == ""

"""What a config.json claims beside what is trained: what is left of it builds transformers' class of that alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from expertmesh.checkpoints.hf.untrained_parts import missing_predictors, without_missing_predictors, without_untrained
from expertmesh.moe.hf_model.build import model_class
from tests.families.configs import tiny_config


def test_the_text_part_is_left_of_a_model_with_several() -> None:
    config: Any = tiny_config("qwen3_5_moe")
    raw = config.to_dict() | {"dtype": "bfloat16", "tie_word_embeddings": False}
    raw["text_config"].pop("dtype")  # as config.json has it, where the whole says it
    found = without_untrained(raw, config)
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
    """Counts become 0, and what says whether there are any, false; but where one is trained."""
    config = tiny_config("mixtral")
    raw = config.to_dict()
    assert without_untrained(raw | said, config) == raw | left
    assert without_untrained(raw | said, config, keeps_predictors=True) == raw | said


def checkpoint(carried: list[str], trains_it: bool = False) -> Any:
    """Of whose tensors those of layer 5 are no part of what transformers computes."""
    return SimpleNamespace(
        carried=[SimpleNamespace(name=name) for name in carried],
        source=SimpleNamespace(mtp=object() if trains_it else None),
        names=SimpleNamespace(is_computed=lambda name: "layers.5." not in name),
        drops_untrained=False,
    )


def test_layers_of_which_there_is_no_tensor_are_no_longer_claimed() -> None:
    raw = {"num_nextn_predict_layers": 1, "text_config": {"use_mtp": True}, "hidden_size": 4}
    nowhere = checkpoint(["visual.patch"])
    assert missing_predictors(raw, nowhere) == "num_nextn_predict_layers 1, use_mtp True"
    found, told = without_missing_predictors(raw, nowhere)
    assert found == {"num_nextn_predict_layers": 0, "text_config": {"use_mtp": False}, "hidden_size": 4}
    assert told[0].startswith("config.json no longer has num_nextn_predict_layers 1, use_mtp True: ")
    for is_there in (checkpoint(["model.layers.5.eh_proj"]), checkpoint([], trains_it=True)):
        assert without_missing_predictors(raw, is_there) == (raw, [])

"""What is known of a family without transformers: its settings, and its parameters' names, shapes and order."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, MixtralConfig

from checkpoints import open_source, parameter_shapes
from moe import KERNEL_NAMES, KERNELS, ExpertMeshError, build_model
from moe.families import MIXTRAL, check_config, read_settings
from tests.tiny import save_model

SIZES: dict[str, Any] = dict(
    hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    num_local_experts=3, num_experts_per_tok=2, vocab_size=50,
)  # fmt: skip


def test_defaults_are_those_of_transformers() -> None:
    config = MixtralConfig()
    left_to_transformers = ("rope_parameters",)  # it fills them in
    for name, value in MIXTRAL.defaults.items():
        if name not in left_to_transformers:
            assert getattr(config, name) == value, name
    assert config.attribute_map == dict(MIXTRAL.renamed)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"head_dim": 20}, {"num_key_value_heads": 4}],
    ids=str,
)
def test_parameters_are_those_of_the_model(tmp_path: Path, changes: dict[str, Any]) -> None:
    save_model(tmp_path, **{**SIZES, **changes})
    source = open_source(tmp_path)
    model = build_model(MIXTRAL, source.config, KERNELS["loop"])
    of_model = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert list(parameter_shapes(source).items()) == of_model


def test_another_name_for_a_setting() -> None:
    settings = read_settings(MIXTRAL, {"num_experts": 5})
    assert settings.num_local_experts == 5 == AutoConfig.for_model("mixtral", num_experts=5).num_local_experts


@pytest.mark.parametrize(("name", "value"), [("tie_word_embeddings", "no"), ("rope_parameters", [1])])
def test_settings_of_another_type(name: str, value: Any) -> None:
    settings = SimpleNamespace(**{**vars(read_settings(MIXTRAL, SIZES)), name: value})
    with pytest.raises(ExpertMeshError, match=f"here: {name} is "):
        check_config(MIXTRAL, settings, "here")


def test_kernel_names() -> None:
    assert tuple(KERNELS) == KERNEL_NAMES

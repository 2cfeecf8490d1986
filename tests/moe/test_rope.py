"""What --rope-scaling asks for, and what it makes of a config, without a model."""

import json
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from expertmesh.moe.hf_model.rope import advised_scaling, read_rope_scaling, rope_change, with_rope_scaling
from expertmesh.moe.util.errors import ExpertMeshError
from tests.families.configs import tiny_config


def parameters(config: PreTrainedConfig, text: str) -> tuple[dict[str, Any], int]:
    """(rope_parameters, max_position_embeddings) of a config with a scaling."""
    scaled = with_rope_scaling(config, read_rope_scaling(text)).get_text_config()
    return scaled.rope_parameters, scaled.max_position_embeddings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("yarn", "--rope-scaling yarn: the factor must be a number of at least 1, as in yarn:4"),
        ("yarn:x", "the factor must be a number of at least 1"),
        ("yarn:-4", "the factor must be a number of at least 1"),
        ("linear:0.5", "factor is 0.5; it must be a number of at least 1"),
        ("ntk:4", "rope_type is 'ntk'; it must be one of linear, dynamic, yarn"),
        ("longrope:4", "longrope takes more than a factor: give JSON with factor, short_factor, long_factor"),
        ("{", "--rope-scaling: is not a JSON object"),
        ("{}", "rope_type is None"),
        ('{"factor": 4}', "rope_type is None"),
        ('{"rope_type": "yarn"}', "yarn needs factor"),
        ('{"rope_type": "yarn", "factor": true}', "factor is True; it must be a number of at least 1"),
        ('{"rope_type": "yarn", "factor": Infinity}', "factor is inf; it must be a number of at least 1"),
        ('{"rope_type": "yarn", "factor": null}', "factor is None"),
        ('{"rope_type": "yarn", "factor": 4, "beta_fst": 32}', "yarn has no beta_fst; it has factor, original_max_pos"),
        (
            '{"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0.5}',
            "must be an integer of at least 1",
        ),
        (
            '{"rope_type": "longrope", "factor": 4, "short_factor": 1, "long_factor": [2]}',
            "must be a list of positive numbers",
        ),
        ('{"full_attention": {"rope_type": "x"}}', "--rope-scaling: full_attention: rope_type is 'x'"),
    ],
)
def test_mistakes(text: str, said: str) -> None:
    with pytest.raises(ExpertMeshError) as error:
        read_rope_scaling(text)
    assert said in str(error.value)


def test_short_and_long_forms_are_the_same() -> None:
    scaling = read_rope_scaling("yarn:4")
    assert scaling == read_rope_scaling('{"rope_type": "yarn", "factor": 4}')
    assert scaling == read_rope_scaling('{"type": "yarn", "factor": 4.0}')
    assert read_rope_scaling(json.dumps(scaling.as_json())) == scaling
    by_kind = read_rope_scaling('{"full_attention": {"rope_type": "linear", "factor": 2}}')
    assert read_rope_scaling(json.dumps(by_kind.as_json())) == by_kind


def test_what_is_asked_for_is_added_to_what_is_there() -> None:
    base = tiny_config("glm4_moe")
    kept = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    assert parameters(base, "linear:2") == ({**kept, "rope_type": "linear", "factor": 2.0}, 512)
    yarn = {**kept, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert parameters(base, "yarn:4") == (yarn, 1024)
    # transformers counts the positions that a dynamic one begins from by max_position_embeddings
    assert parameters(base, "dynamic:2") == ({**kept, "rope_type": "dynamic", "factor": 2.0}, 256)
    given = '{"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 128, "rope_theta": 5000.0}'
    assert parameters(base, given)[0]["rope_theta"] == 5000
    assert parameters(base, given)[1] == 256
    assert base.max_position_embeddings == 256, "the config itself was changed"


def test_what_is_scaled_already_is_scaled_anew() -> None:
    """From the positions that the model had at first; what its type is told besides stays, unless it changes."""
    model = tiny_config("gpt_oss", max_position_embeddings=131072)
    change = rope_change(model, read_rope_scaling("yarn:64"))
    assert change.lines == (
        "rope: yarn by 64 of 4,096 positions instead of yarn by 32 of 4,096 positions; "
        "max_position_embeddings becomes 262,144, of 131,072",
    )
    assert change.parameters == {**model.rope_parameters, "factor": 64.0}
    assert change.parameters["truncate"] is False
    assert parameters(model, "linear:48") == ({"rope_type": "linear", "factor": 48.0, "rope_theta": 150000.0}, 196608)
    twice = tiny_config("mixtral")
    for _ in range(2):
        twice = with_rope_scaling(twice, read_rope_scaling("linear:2"))
    assert twice.max_position_embeddings == 512


@pytest.mark.parametrize("text", ["yarn:2", "yarn:31", "linear:4", "dynamic:2"])
def test_a_model_is_not_shrunk(text: str) -> None:
    """A factor for its positions of today would count from those that it had at first."""
    model = tiny_config("gpt_oss", max_position_embeddings=131072)
    with pytest.raises(ExpertMeshError) as error:
        with_rope_scaling(model, read_rope_scaling(text))
    said = str(error.value)
    assert "of the 131,072 positions that this model has by yarn by 32 of 4,096 positions" in said
    assert "give 33 or more" in said


@pytest.mark.parametrize(
    ("family", "changes", "stretched", "length", "advised"),
    [
        ("mixtral", {}, None, 257, "yarn:2"),
        ("mixtral", {}, "linear:2", 1000, "yarn:4"),
        ("mixtral", {}, "yarn:2", 1000, "yarn:4"),
        ("gpt_oss", {"max_position_embeddings": 131072}, None, 131073, "yarn:33"),
        ("gemma4", {}, None, 600, "proportional:3"),
        ("mellum", {}, None, 600, "yarn:3"),
        ("jamba", {}, None, 600, None),
    ],
)
def test_what_is_advised_is_enough(
    family: str, changes: dict[str, Any], stretched: str | None, length: int, advised: str | None
) -> None:
    config = tiny_config(family, **changes)
    if stretched is not None:
        config = with_rope_scaling(config, read_rope_scaling(stretched))
    assert advised_scaling(config, length) == advised
    if advised is not None:
        assert parameters(config, advised)[1] >= length


def test_a_factor_of_attention_goes_with_its_own_scaling() -> None:
    first = '{"rope_type": "yarn", "factor": 8, "attention_factor": 1.5, "beta_fast": 16}'
    scaled = with_rope_scaling(tiny_config("mixtral"), read_rope_scaling(first))
    again = parameters(scaled, "yarn:16")[0]
    assert again["beta_fast"] == 16
    assert "attention_factor" not in again


def test_kinds_of_layers() -> None:
    mellum = tiny_config("mellum")
    found, positions = parameters(mellum, "yarn:4")
    assert found["sliding_attention"] == mellum.rope_parameters["sliding_attention"]
    assert found["full_attention"]["rope_type"] == "yarn"
    assert found["full_attention"]["rope_theta"] == 500000.0
    assert positions == 1024
    found, _ = parameters(mellum, '{"sliding_attention": {"rope_type": "linear", "factor": 2}}')
    assert found["full_attention"] == mellum.rope_parameters["full_attention"]
    assert found["sliding_attention"]["factor"] == 2


@pytest.mark.parametrize(
    ("family", "text", "said"),
    [
        ("jamba", "yarn:4", "--rope-scaling: jamba has no rotary embedding to scale"),
        ("gemma4", "yarn:4", "of full_attention of this model is of type proportional, .*; use proportional:N"),
        ("mixtral", "proportional:4", "of type default, which cannot become proportional"),
        ("beam", "yarn:4", "several kinds|layers of kind full_attention of this model have no rotary embedding"),
        ("deepseek_v4", "yarn:4", "several kinds, main, compress; give JSON with a table for each"),
        ("mellum", '{"other": {"rope_type": "yarn", "factor": 4}}', "no layers of kind other; it has full_attention"),
        ("mixtral", '{"other": {"rope_type": "yarn", "factor": 4}}', "all layers of this model have one rotary"),
        ("phimoe", "yarn:4", "transformers refuses the config: .*short_mscale"),
    ],
)
def test_what_cannot_be(family: str, text: str, said: str) -> None:
    with pytest.raises(ExpertMeshError, match=f"(?s){said}"):
        with_rope_scaling(tiny_config(family), read_rope_scaling(text))


def test_config_files_old_and_new(tmp_path: Any) -> None:
    """Where a file has `rope_theta` and `rope_scaling`, as before transformers 5, it still has; it reads the same."""
    new = tiny_config("qwen3_moe").to_dict()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    for raw in (new, old):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        change = rope_change(AutoConfig.from_pretrained(tmp_path), read_rope_scaling("yarn:4"))
        written = change.apply(raw)
        (tmp_path / "config.json").write_text(json.dumps(written))
        read = AutoConfig.from_pretrained(tmp_path)
        assert read.rope_parameters == change.parameters
        # 256 is twice the 128 that it had at first
        assert read.max_position_embeddings == (512 if raw is old else 1024)
        assert ("rope_scaling" in written) == (raw is old)
        assert ("rope_parameters" in written) == (raw is new)
        assert read.rope_parameters["rope_theta"] == (77.0 if raw is old else 10000.0)

"""Families whose language model lies beside towers for images and sound: all are found, the towers hold no memory, and
what is not supported is refused by its reason."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.experts.model_facts import facts_of
from expertmesh.moe.experts.model_layers import decoder_layers, moe_layers
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.hf_model.families import causal_families
from expertmesh.moe.util.errors import ExpertMeshError
from tests.families.configs import tiny_config, tiny_model
from tests.families.test_families import FAMILIES
from tests.rounding import assert_near
from tests.tiny import loaded

BESIDE = [family for family in FAMILIES if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
"""Families without a class for text alone."""
COUNTS = re.compile(r"(moe_)?num_(local_)?experts|n_routed_experts|num_experts_per_tok")


@pytest.mark.slow
def test_every_class_with_experts_is_found() -> None:
    """By the settings of its default config, and not by its code: none is passed over in silence."""
    known, passed_over = set(causal_families()), []
    for model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        try:
            text: PreTrainedConfig = CONFIG_MAPPING[model_type]().get_text_config()
        except (ImportError, ValueError):
            continue
        counts = [value for name, value in text.to_dict().items() if COUNTS.fullmatch(name)]
        has_experts = any(isinstance(value, int) and value > 1 for value in counts)
        if has_experts and model_type not in known | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys():
            passed_over.append(model_type)
    for model_type in passed_over:  # Llama 4's experts, say
        with pytest.raises(ExpertMeshError, match=r"does not mark the class|no mixture-of-experts layer"):
            build_model(CONFIG_MAPPING[model_type]())


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", BESIDE)
def test_towers_hold_no_memory(family: str) -> None:
    """All that text passes is trained, with its names in the complete class, and nothing else."""
    config = tiny_config(family)
    whole = tiny_model(family, seed=1)
    model = build_model(config, "eager")
    tokens_BS = torch.arange(3, 19).view(2, 8)
    whole(input_ids=tokens_BS, use_cache=False).logits.sum().backward()
    met = {name for name, parameter in whole.named_parameters() if parameter.grad is not None}
    assert met
    left_out = {name for names in facts_of(model).left_out.values() for name in names}
    assert met.isdisjoint(left_out)
    ours = set(model.state_dict())
    assert left_out.isdisjoint(ours)
    experts = re.compile(r".*\.experts\.\w+(\.\w+)?")
    rest = whole.state_dict().keys() - ours - left_out
    assert all(experts.fullmatch(name) for name in rest), rest
    assert len(moe_layers(model)) <= len(decoder_layers(model))


def test_same_logits_as_the_complete_class() -> None:
    """On text, where positions are of three kinds that are then all the same."""
    theirs: Any = tiny_model("qwen3_vl_moe", seed=1).eval()
    ours = loaded(build_model(theirs.config, "eager"), theirs).eval()
    tokens_BS = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        want = theirs(input_ids=tokens_BS, use_cache=False).logits
        assert_near(ours(input_ids=tokens_BS, use_cache=False).logits, want)


def test_wrappers_of_any_language_model(tmp_path: Path) -> None:
    """A class for images has the language model that its config names: Mistral Small 4 is mistral3 with a mistral4."""
    config_class: Any = CONFIG_MAPPING["mistral3"]
    config = config_class(text_config=tiny_config("mistral4"), vision_config=tiny_config("mistral3").vision_config)
    torch.manual_seed(0)
    theirs: Any = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    theirs.save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    assert list(facts_of(source.names.model).left_out) == ["model.vision_tower", "model.multi_modal_projector"]
    assert checkpoints_main(["convert", str(tmp_path / "hf"), str(tmp_path / "shards"), "--ep-size", "2"]) == 0
    assert checkpoints_main(["export", str(tmp_path / "shards"), str(tmp_path / "back")]) == 0
    written, original = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "hf"))
    assert written.keys() == original.keys()
    assert all(torch.equal(tensor, original[name]) for name, tensor in written.items())


def test_a_towers_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a tower lacks is told; it cannot be dropped where transformers has no class for the language model alone."""
    tiny_model("qwen3_vl_moe", seed=1).save_pretrained(tmp_path)
    assert (
        checkpoints_main(["convert", str(tmp_path), str(tmp_path / "out"), "--ep-size", "2", "--drop-untrained"]) == 2
    )
    said = "--drop-untrained: transformers has no class for just the language model of a qwen3_vl_moe"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert checkpoints_main(["inspect", str(tmp_path), "--check"]) == 0
    assert "not trained, copied unchanged" in capsys.readouterr().out
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "patch_embed" in name)
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, file, metadata={"format": "pt"})
    assert checkpoints_main(["inspect", str(tmp_path), "--check"]) == 1
    assert "lacks 1 tensors" in capsys.readouterr().out


def test_a_class_without_a_loss_of_next_tokens_is_refused() -> None:
    if "diffusion_gemma" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no such class")
    said = "DiffusionGemmaForBlockDiffusion .* does not predict next tokens"
    said += "|cannot build a model of type diffusion_gemma"  # 5.17 has no tower for it
    with pytest.raises(ExpertMeshError, match=said):
        build_model(tiny_config("diffusion_gemma"))

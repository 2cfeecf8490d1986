"""Every causal MoE family's loss where its config.json turns the balancing loss on: that of transformers' own class, on
text and, where images are trained on, on these too."""

from pathlib import Path
from typing import Any

import pytest
import torch

import expertmesh
from tests.families.configs import TEXT_IDS, auto_class, has_auxiliary_loss, random_model, tiny_config
from tests.families.test_families import FAMILIES
from tests.images import FAMILIES as SEEING
from tests.images import collated, image_class, image_config, sample
from tests.rounding import near
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("leaving_group")
COEFFICIENT = 0.5


def balanced(config: Any) -> Any:
    """As a config.json may have it. Experts are chosen by their logits alone: by groups, by a table, or by a correction
    bias as well, transformers would count other experts than those that are chosen."""
    text = config.get_text_config()
    text.output_router_logits = True
    if has_auxiliary_loss(config):
        text.router_aux_loss_coef = COEFFICIENT
    if hasattr(text, "n_group"):
        text.n_group = text.topk_group = 1
    if kinds := getattr(text, "mlp_layer_types", None):
        text.mlp_layer_types = ["moe" if kind == "hash_moe" else kind for kind in kinds]
    return config


def compare(model: Any, inputs: dict[str, Any], path: Path, **settings: Any) -> None:
    for name, bias in model.state_dict(keep_vars=True).items():
        if "correction_bias" in name:
            bias.data.zero_()
    model.save_pretrained(path)
    with torch.no_grad():
        wanted = model(**inputs, use_cache=False).loss
        without = model(**inputs, use_cache=False, output_router_logits=False).loss
    engine = expertmesh.load(str(path), use_cpu=True, attn_implementation="eager", **settings)
    weight, found = engine.balance.weights.balance, engine.forward_backward([inputs])
    assert bool(wanted != without) == has_auxiliary_loss(model.config) == (weight == COEFFICIENT)
    assert found.loss + weight * found.balance_loss == near(float(wanted))


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_on_text(family: str, tmp_path: Path) -> None:
    config = balanced(tiny_config(family))
    ids = torch.randint(3, TEXT_IDS, (2, 24), generator=torch.Generator().manual_seed(1))
    compare(random_model(config, seed=1, auto=auto_class(config)), {"input_ids": ids, "labels": ids}, tmp_path)


@pytest.mark.parametrize("seeing", tiered(["qwen3_vl_moe"], [name for name in SEEING if name != "qwen3_vl_moe"]))
def test_on_images(seeing: str, tmp_path: Path) -> None:
    config = balanced(image_config(seeing))
    model = random_model(config, seed=0, auto=image_class(config))
    inputs = collated(model, [[sample(model, 4, (2, 3), 5, seed=0)], [sample(model, 2, (1, 3), 7, seed=1)]])
    assert inputs is not None
    # which are no targets, though collators may have them so
    inputs["labels"][inputs["input_ids"] == config.image_token_id] = -100
    compare(model, inputs, tmp_path, images=True)

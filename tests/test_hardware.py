"""The table of recipes and GPUs in docs/how-to/choose-a-layout.md: their numbers, and on how many a forecast fits."""

import re
from dataclasses import replace

import pytest

from expertmesh.training.planning.imbalance import GivenRouting
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.costs import Cluster
from expertmesh.training.planning.planner.forecasts import Forecasts
from expertmesh.training.planning.planner.model_config import find_config
from tests.test_configs import FULL, H100, LORA, ROOT, config_of, gpus_of, image_tokens, published

ROW = re.compile(
    r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \|$",
    re.MULTILINE,
)
PAGE = (ROOT / "docs" / "how-to" / "choose-a-layout.md").read_text(encoding="utf-8")
TABLE = {name: tuple(map(int, gpus)) for name, *gpus in ROW.findall(PAGE)}


def test_every_recipe_has_a_row() -> None:
    """The first column is the recipe's own number of GPUs, the last that of the recipe for LoRA."""
    assert {name: (first, last) for name, (first, _, last) in TABLE.items()} == {
        name: (gpus_of(name), gpus_of(name + LORA)) for name in FULL
    }


@pytest.mark.release
@pytest.mark.parametrize("name", FULL)
def test_adapters_fit(name: str) -> None:
    """Beside a base in bf16. (That a recipe fits: `test_configs`.) On half as many GPUs they do not, where that is
    asked: a forecast that accepted everything would not do."""
    _, gpus, _ = TABLE[name]
    assert fits(name, gpus)
    assert name != "glm_4_5_air" or not fits(name, gpus // 2)


def fits(name: str, gpus: int) -> bool:
    """Whether one sequence of the recipe's length per GPU does, with full checkpointing."""
    config = replace(
        config_of(name),
        ep_size=min(8, gpus),
        pp_size=1,
        gradient_checkpointing="full",
        keep_expert_products=0,
        overlap_chunks=1,
        per_device_train_batch_size=1,
        optim="adamw_torch_fused",
        adapter="lora",
        train_vision=[],
    )
    file = find_config(str(published(name)))
    card = H100.device.memory
    asked = Asked(config, gpus, Cluster(H100, 8, card), routing=GivenRouting(1, None, image_tokens=image_tokens(name)))
    return Forecasts(file.content, file.load).account(asked).fit(card).is_enough

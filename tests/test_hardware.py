"""The root README's table of models and GPUs: recipes' numbers, and on how many the planner's forecast fits."""

import re
from dataclasses import replace

import pytest

from expertmesh.training.model_setup.rates import natural_imbalance
from expertmesh.training.planning.planner.model_config import find_config
from expertmesh.training.planning.planner.search import Cluster, forecast
from expertmesh.training.planning.rehearsal.cached import CachedMeasure
from expertmesh.training.planning.rehearsal.run_setting import setting_of
from tests.test_configs import FULL, H100, LORA, ROOT, config_of, gpus_of, published

ROW = re.compile(
    r"^\| \[`(\w+)`\]\(configs/\1\.yaml\), \[LoRA\]\(configs/\1_lora\.yaml\) \| (\d+) \| (\d+) \| (\d+) \|$",
    re.MULTILINE,
)
TABLE = {name: tuple(map(int, gpus)) for name, *gpus in ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))}


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
    )
    file = find_config(str(published(name)))
    measure = CachedMeasure(config, file.content, file.load, "cuda")
    setting = setting_of(config, gpus, imbalance=natural_imbalance(measure.parameters.num_experts))
    return forecast(measure, setting, Cluster(H100, 8, H100.device.memory)).fits

"""Where a model's forward can be cut into stages: a layer that uses another's output forbids it, with its name."""

from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.moe.experts.model_layers import decoder_layers
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.dataflow import Survey
from expertmesh.sharding.pipeline.balance import crossing, cut_stages
from expertmesh.sharding.pipeline.survey import survey
from tests.images import image_config
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def skipping() -> Survey:
    """Of a Mixtral of four layers, where layer 2 also adds what layer 0 gave."""
    model = build_model(tiny_config(num_hidden_layers=4), "eager")
    layers: Any = decoder_layers(model)
    gave: list[Tensor] = []

    def keep(layer: Any, args: Any, output: Tensor) -> None:
        gave[:] = [output]

    def add(layer: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return args[0] + gave[0], *args[1:]

    layers[0].register_forward_hook(keep)
    layers[2].register_forward_pre_hook(add)
    return survey(model, torch.float32)


def test_a_layer_that_uses_an_earlier_one(skipping: Survey) -> None:
    assert skipping.skips == {(0, 2)}
    assert [crossing(skipping.skips, cut) for cut in range(3)] == [None, (0, 2), None]
    assert cut_stages(skipping, 3, 1, None) == (range(0, 1), range(1, 3), range(3, 4))


def test_layers_to_whose_results_images_add() -> None:
    """The stage that has the images ends behind the layer after them."""
    config = image_config("qwen3_vl_moe", num_hidden_layers=4)
    assert len(config.vision_config.deepstack_visual_indexes) == 2
    found = survey(build_model(config, "eager", images=True), torch.float32)
    assert [crossing(found.skips, cut) is None for cut in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("pp_size", "chunks", "counts", "said"),
    [
        (
            2,
            1,
            [2, 2],
            "--pipeline-layers 2,2: no stage can end with layer 1: the output of layer 0 is used in layer 2",
        ),
        (4, 1, None, "--pp-size 4: {} can have at most 3 stages: the output of layer 0 is used in layer 2, "),
        (2, 2, None, "--pp-size 2 --pipeline-chunks 2: {} can have at most 3 stages: "),
        (5, 1, None, "--pp-size 5: 5 stages need 5 decoder layers or more; {} has 4; use at most"),
    ],
)
def test_refused(skipping: Survey, pp_size: int, chunks: int, counts: list[int] | None, said: str) -> None:
    with pytest.raises(ExpertMeshError) as raised:
        cut_stages(skipping, pp_size, chunks, counts)
    assert str(raised.value).startswith(said.format("MixtralForCausalLM"))

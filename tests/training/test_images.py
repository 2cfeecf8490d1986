"""Batches with images: what is taken out of them, and what is refused, each by a line that names it."""

import re
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.hf_model.image_costs import image_of
from expertmesh.moe.hf_model.images import GRID, image_features, images_of, parameters_by_part
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.collectives.context_parallel import CPGroup
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import IGNORED, BatchMaker, batch_of
from expertmesh.training.data.images import ImageReader, Images
from expertmesh.training.model_setup.freezing import freeze, freeze_images, images_line
from expertmesh.training.model_setup.lora_targets import adapt
from tests.families.configs import skip_if_older, tiny_config
from tests.images import BOTH_WAYS, GRIDS, collated, image_config, image_model, is_vision, sample
from tests.tiers import tiered
from tests.tiny import loaded


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(image_config("qwen3_vl_moe"), images=True)


@pytest.fixture
def given(model: Any) -> dict[str, Any]:
    """Two sequences, of which the first has two images, and the second none."""
    rows = [[sample(model, 3, (2, 2), 2, (1, 3), 4, seed=0)], [sample(model, 6, seed=1)]]
    batch = collated(model, rows)
    assert batch is not None
    return batch


def test_image_tokens_are_no_targets_and_a_rank_gets_its_rows(model: Any, given: dict[str, Any]) -> None:
    reader, token = ImageReader(model), model.config.image_token_id
    whole = batch_of(given, packing=False, maker=BatchMaker(images=reader))
    assert whole.images is not None
    assert whole.images.rows_N is None
    assert (given["labels"] == token).any()
    assert not (whole.targets_BS == token).any()
    assert (whole.targets_BS != IGNORED).sum() == 3 + 2 + 4 + 6 - 2  # but for the first of each sample
    assert whole.images.positions_3BL is not None
    parts = [
        batch_of(given, packing=False, maker=BatchMaker(images=reader), cp_group=CPGroup(2, index, None))
        for index in range(2)
    ]
    found = [part.images for part in parts if part.images is not None and part.images.rows_N is not None]
    assert torch.cat([part.rows_N for part in found if part.rows_N is not None]).tolist() == list(range(7))
    both = torch.cat([part.positions_3BL for part in found if part.positions_3BL is not None], dim=-1)
    assert torch.equal(both[..., : whole.images.positions_3BL.shape[-1]], whole.images.positions_3BL)


def cut(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, **{name: batch[name][:, :6] for name in ("input_ids", "labels", "attention_mask")}}


def without(name: str) -> Any:
    return lambda batch: {other: value for other, value in batch.items() if other != name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut, r"2 images, and image tokens of 1"),
        (without("pixel_values"), r"image_grid_thw and no pixel_values"),
        (without("image_grid_thw"), r"pixel_values and no image_grid_thw"),
        (lambda batch: without("image_grid_thw")(without("pixel_values")(batch)), r"0 images, and image tokens of 2"),
        (
            lambda batch: {**batch, "image_grid_thw": batch["image_grid_thw"].flip(0)},
            r"images of \[4, 3\] tokens, which are not as many",
        ),
        (lambda batch: {**batch, "pixel_values": batch["pixel_values"][1:]}, r"27 patches in pixel_values, and 28"),
        (lambda batch: {**batch, "pixel_values": [["a"]]}, r"pixel_values of a batch is not a tensor"),
        (
            lambda batch: {**batch, "pixel_values_videos": torch.zeros(1)},
            r"pixel_values_videos, which would be ignored",
        ),
        (lambda batch: {**batch, "input_ids": batch["input_ids"].clone().fill_(301)}, r"301, the video_token_id"),
    ],
)
def test_what_is_refused(change: Any, said: str, model: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ExpertMeshError, match=said):
        batch_of(change(given), packing=False, maker=BatchMaker(images=ImageReader(model)))


def test_pixels_for_a_model_of_text_alone(given: dict[str, Any]) -> None:
    with pytest.raises(ExpertMeshError, match=r"pixel_values.* would be ignored.* images=True"):
        batch_of(given, packing=False)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("mixtral", r"MixtralForCausalLM has no get_image_features"),
        ("aria", r"takes pixel_values, pixel_mask, vision_feature_layer for images"),
        ("ernie4_5_vl_moe", r"has experts that no text passes \(.*vision_moe.experts\)"),
        ("dots3_note", r"has experts that no text passes \(model.vision_tower"),
        ("gemma4", r"has no vision tower"),
    ],
)
def test_families_that_are_refused(family: str, said: str) -> None:
    if family == "aria":
        skip_if_older("cannot have its experts replaced")
    with pytest.raises(ExpertMeshError, match=f"--images: .*{said}.*leave --images out"):
        build_model(tiny_config(family), images=True)


def test_what_is_trained(model: Any) -> None:
    parts = parameters_by_part(model)
    assert parts["tower"]
    assert parts["projector"]
    facts = images_of(model)
    assert facts is not None
    assert len(parts["tower"]) + len(parts["projector"]) == len(list(model.get_submodule(facts.paths[0]).parameters()))
    freeze_images(model, ["projector"])
    assert "frozen, projector" in (line := images_line(model))
    assert line.endswith("trained")
    assert not any(p.requires_grad for p in parts["tower"])
    assert all(p.requires_grad for p in parts["projector"])


def test_freezing_beside_a_trained_tower() -> None:
    """What is meant for the language model stays out of the tower; what takes all of a part that --train-vision names
    contradicts it; and what is said to be trained has gradients."""

    def frozen(*entries: str) -> tuple[set[str], str]:
        freeze_images(model := build_model(image_config("qwen3_vl_moe"), images=True), ["tower", "projector"])
        freeze(model, list(entries))
        return {name for name, p in model.named_parameters() if not p.requires_grad}, images_line(model)

    for entry in ("attention", "norms", "embeddings", "norm", "attn"):
        names, line = frozen(entry)
        assert names
        assert not any(map(is_vision, names)), entry
        assert line.count("trained") == 2
        assert "M trained" not in line
    names, line = frozen(r"visual\.blocks\.[01]\.")
    assert names
    assert all(name.startswith(("model.visual.blocks.0.", "model.visual.blocks.1.")) for name in names)
    assert re.search(r"tower \(0\.1 M parameters\) 0\.\d M trained, projector \(0\.\d M parameters\) trained$", line), (
        line
    )
    for entry, part in ((r"visual\.", "tower"), (r"visual\.merger|deepstack", "projector")):
        with pytest.raises(ExpertMeshError, match=rf"--freeze .* freezes all that --train-vision {part} is to train"):
            frozen(entry)


def test_ep_shards_carry_the_tower_over(tmp_path: Path) -> None:
    """To the byte; a run that is to see images is told to take the model that they were made of."""
    image_model("qwen3_vl_moe").save_pretrained(tmp_path / "hf")
    paths = [str(tmp_path / name) for name in ("hf", "shards", "back")]
    assert checkpoints_main(["convert", *paths[:2], "--ep-size", "2"]) == 0
    assert checkpoints_main(["verify", *paths[:2]]) == 0
    assert checkpoints_main(["export", *paths[1:]]) == 0
    written, original = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "hf"))
    assert any(map(is_vision, written))
    assert written.keys() == original.keys()
    assert all(torch.equal(tensor, original[name]) for name, tensor in written.items())
    with pytest.raises(ExpertMeshError, match=r"--images: .*shards is not in Hugging Face form, and EP shards only"):
        open_source(tmp_path / "shards").seeing_images()


def test_what_names_the_tower() -> None:
    config = partial(TrainConfig, model="m", images=True, adapter="lora")
    seeing = build_model(image_config("qwen3_vl_moe"), images=True)
    for targets, of_images, of_text in (
        (["vision"], True, False),
        (["attention"], False, True),
        (["all-linear"], True, True),
    ):
        adapt(model := deepcopy(seeing), config(lora_targets=targets))
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert any(map(is_vision, trained)) == of_images
        assert any(not is_vision(name) for name in trained) == of_text
    adapt(model := deepcopy(seeing), config(lora_targets=["attention"], modules_to_save=["norms"]))
    whole = {name for name, p in model.named_parameters() if p.requires_grad and "norm" in name}
    assert whole
    assert not any(map(is_vision, whole))
    with pytest.raises(ExpertMeshError, match=r"--freeze vision: it is frozen unless --train-vision names it"):
        freeze(seeing, ["vision"])
    with pytest.raises(ExpertMeshError, match=r"--lora-targets vision: there is no vision tower without --images"):
        adapt(build_model(image_config("qwen3_vl_moe")), config(images=False, lora_targets=["vision"]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"task": "dpo"},
            r"--images: is not for pairs of answers .*, which --task dpo reads",
        ),
        ({"teacher": "t"}, r"--images: does not work with --teacher"),
        ({"prompt_template": "{prompt}"}, r"--images: does not work with --prompt-template"),
        ({"generate_steps": 5}, r"--images: samples are generated from texts alone"),
        ({"train_vision": ["eyes"]}, r"--train-vision eyes: give tower or projector"),
        ({"images": False, "train_vision": ["tower"]}, r"--train-vision: there is no vision tower without --images"),
        ({"train_vision": ["tower"], "adapter": "lora"}, r"--adapter lora freezes everything but the adapters"),
        ({"train_mtp": 0.1}, r"--images: does not work with --train-mtp"),
        ({"rope_scaling": "yarn:2"}, r"--images: does not work with --rope-scaling"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ExpertMeshError, match=said):
        TrainConfig(**{"model": "m", "dataset": ["d"], "images": True, **settings})


@pytest.mark.parametrize("family", tiered(["qwen3_vl_moe", BOTH_WAYS], GRIDS[1:]))
def test_features_are_placed_without_a_mask_to_the_bit(family: str) -> None:
    """As by the family's own code, which asks its mask where image tokens are; and so are gradients."""
    theirs = image_model(family)
    model = loaded(build_model(theirs.config, images=True), theirs)
    given = collated(model, [[sample(model, 3, (2, 2), 2, (1, 3), 4, seed=0)]])
    assert given is not None
    reader = ImageReader(model)
    arguments = {"input_ids": given["input_ids"], **reader.arguments(given), "use_cache": False}
    images = batch_of(given, packing=False, maker=BatchMaker(images=reader)).images
    found = []
    for placed in (None, images):
        model.zero_grad()
        with Forward(images=placed):
            logits = model(**arguments).logits
        logits.square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"logits": logits.detach(), **gradients})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("family", tiered(["qwen3_vl_moe", "muse_spark"], GRIDS[1:-1]))
def test_a_tower_asks_no_device_for_sizes(family: str) -> None:
    """Features are found on a device whose values nothing can read: it stands for a GPU, which the host would wait
    for."""
    model = build_model(image_config(family), images=True).to("meta")
    found = image_of(model, 6)
    sizes = found[GRID]
    of_meta: Any = {name: value.to("meta") for name, value in found.items()}
    images = Images(of_meta, sizes, 6, torch.arange(6), None, None, None)
    with Forward(images=images):
        features = image_features(model, of_meta)
    assert [x.shape[:-1].numel() for x in features if x.is_meta] == [6] * len(features)
    on_device = replace(images, sizes=of_meta[GRID])
    with Forward(images=on_device), pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        image_features(model, of_meta)

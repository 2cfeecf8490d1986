"""Model cards: as the hub's own library reads them, as PEFT writes them, and whose they are."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model

import expertmesh
from expertmesh.checkpoints.model_card import CARD, Training, merged_card, model_card, write_card
from expertmesh.training.api.hf_trainer import _move_into
from tests.checkpoints.commands import run
from tests.tiny import save_tokenizer, tiny_mixtral

BASE = "org/base"
TRAINING = Training(BASE, is_on_hub=True, tags=["sft"], datasets=["org/data"], rows={"steps": "3"}, code="torchrun x")
LICENCES = [
    ("license: apache-2.0", {"license": "apache-2.0"}),
    ("license: other\nlicense_name: own\nlicense_link: LICENSE", dict(license="other", license_name="own")),
    ("license: [mit, x]", {}),
    ("tags: [a]", {}),
]


def loaded(text: str) -> Any:
    return ModelCard(text, ignore_metadata_errors=False)


@pytest.mark.parametrize(("said", "expected"), LICENCES)
def test_header(tmp_path: Path, said: str, expected: dict[str, str]) -> None:
    (tmp_path / CARD).write_text(f"---\n{said}\n---\n# Base\n")
    card = loaded(model_card(TRAINING, tmp_path, is_adapter=False))
    found = card.data.to_dict()
    assert {name: found[name] for name in found if name in ("license", "license_name")} == expected
    assert (found["base_model"], found["datasets"], found["library_name"]) == (BASE, ["org/data"], "transformers")
    assert found["tags"] == ["expertmesh", "sft"]
    assert "| steps | 3 |" in card.text
    assert "torchrun x" in card.text
    on_disk = loaded(model_card(replace(TRAINING, is_on_hub=False), tmp_path, is_adapter=True)).data
    assert on_disk.base_model is None, "the hub refuses a path"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"---\n",
        b"---\na: [\n---\n",
        b"---\n- 1\n---\n",
        b"---\nlicense: \xff\n---\n",
        b"---\n" + b"[" * 1_000 + b"\n---\n",
        b"---\nlicense: mit\n---\n" + b"x" * 2**20,
    ],
)
def test_a_card_that_cannot_be_read_names_no_licence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CARD).write_bytes(content)
    assert loaded(model_card(TRAINING, tmp_path, is_adapter=False)).data.license is None
    assert merged_card(tmp_path) == ""


@pytest.mark.parametrize(
    ("content", "tag"),
    [
        ('{"architectures": ["Qwen3VLMoeForConditionalGeneration"]}', "image-text-to-text"),
        ('{"architectures": ["Qwen3MoeForCausalLM"]}', "text-generation"),
        ('{"architectures": [[]]}', "text-generation"),
        ('{"architectures": 3}', "text-generation"),
        ("{", "text-generation"),
    ],
)
def test_what_a_model_is_for(tmp_path: Path, content: str, tag: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert loaded(model_card(TRAINING, tmp_path, is_adapter=False)).data.pipeline_tag == tag


def test_an_adapters_is_as_pefts(tmp_path: Path) -> None:
    model = tiny_mixtral()
    model.name_or_path = model.config._name_or_path = BASE
    theirs = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    theirs.save_pretrained(str(tmp_path))
    expected, found = (
        card.data.to_dict()
        for card in (ModelCard.load(tmp_path / CARD), loaded(model_card(TRAINING, tmp_path / "none", is_adapter=True)))
    )
    both = expected.keys() & found.keys()
    assert {"base_model", "library_name", "pipeline_tag", "tags"} <= both
    assert {name: expected[name] for name in both - {"tags"}} == {name: found[name] for name in both - {"tags"}}
    assert set(expected["tags"]) == set(found["tags"]) - {"expertmesh", "sft"}
    merged = loaded(merged_card(tmp_path)).data.to_dict()
    assert (merged["library_name"], merged["tags"]) == ("transformers", ["transformers"])


def test_whose_it_is(tmp_path: Path) -> None:
    """One that somebody else wrote, or completed, stays; an earlier one of ours would be wrong by now."""
    out, place = tmp_path / "out", tmp_path / "place"
    out.mkdir()
    place.mkdir()
    text = model_card(TRAINING, out, is_adapter=False)
    assert write_card(text, place, out) == []
    assert (place / CARD).read_text() == text
    (out / CARD).write_text(text.replace("| steps | 3 |", "| steps | 2 |"))
    assert write_card(text, place, out) == []
    assert (place / CARD).read_text() == text
    (out / CARD).write_text("mine")
    assert write_card(text, place, out) == [f"{out / CARD}: kept as it was"]
    assert (place / CARD).read_text() == (out / CARD).read_text() == "mine"


def test_trainers_keep_it_too(tmp_path: Path) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    for path in (made, out):
        path.mkdir()
        (path / CARD).write_text(f"of {path.name}")
    (made / "config.json").write_text("{}")
    _move_into(made, out)
    assert {path.name: path.read_text() for path in out.iterdir()} == {CARD: "of out", "config.json": "{}"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    tiny_mixtral().save_pretrained(path)
    save_tokenizer(path)
    (path / CARD).write_text("---\nlicense: mit\n---\n")
    (path / "LICENSE").write_text("mine")
    return path


@pytest.fixture
def process() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_of_an_engine(model: Path, tmp_path: Path, adapter: str) -> None:
    """Of an export, of the export of a training checkpoint, and of a merged adapter: the same training."""
    settings: dict[str, Any] = {} if adapter == "none" else dict(adapter="lora", base_dtype="float32")
    engine = expertmesh.load(str(model), use_cpu=True, learning_rate=1e-3, **settings)
    tokens = engine.tokenizer(["some text to learn"], return_tensors="pt")
    figures = engine.step({**tokens, "labels": tokens["input_ids"]})
    out, made = tmp_path / "out", tmp_path / "made"
    engine.export(out)
    card = ModelCard.load(out / CARD)
    assert (card.data.license, card.data.base_model) == ("mit", None)
    assert card.data.library_name == ("transformers" if adapter == "none" else "peft")
    assert f"| loss | {figures.loss:.4f} at step 1 |" in card.text
    assert str(tmp_path) not in card.content, "a path of this machine"
    assert (out / "LICENSE").read_text() == "mine"
    if adapter == "none":
        run("export", engine.save(tmp_path / "saved"), made)
    else:
        engine.merge(out, made)
    assert ModelCard.load(made / CARD).text == card.text
    assert ModelCard.load(made / CARD).data.library_name == "transformers"
    engine.step({**tokens, "labels": tokens["input_ids"]})
    (out / CARD).write_text("mine")
    assert f"{out / CARD}: kept as it was" in engine.export(out, overwrite=True)
    assert (out / CARD).read_text() == "mine"

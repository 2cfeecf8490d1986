"""An export that sees images, with its processor: in transformers' AutoProcessor, and in vLLM."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.commands import change_tensors
from tests.pictures import asked, content_of, drawn, save_seeing, theirs, write_lines
from tests.real.conftest import kept_packages

pytestmark = pytest.mark.release

TEXT = "<s>user\n<|vision_start|><|image_pad|><|vision_end|>say hello</s><s>assistant\n"
SIZE = (70, 40)
TOKENS = 12


@pytest.fixture(scope="module")
def torchvision(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As PYTHONPATH. Its compiled operators may be those of another torch, and cannot be loaded then: it is imported
    without them, as processors need none."""
    packages = kept_packages("torchvision", "--no-deps", "torchvision==0.28.0")
    (at_start := tmp_path_factory.mktemp("at-start")).joinpath("sitecustomize.py").write_text(_OPERATORS)
    return os.pathsep.join(map(str, [at_start, packages]))


_OPERATORS = """
import torch
library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""Their names, which torchvision asks for, in every process that Python starts."""


def python(program: Path, code: str, *words: object, **variables: str) -> Any:
    """What a script prints last."""
    command = [str(program), "-c", code, *map(str, words)]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(command, env=kept | variables, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and, trained for two steps on images with tower and projector, its export."""
    path = tmp_path_factory.mktemp("seeing")
    # vLLM's attention for CPUs takes heads of 32, not of 16
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
    save_seeing(base := path / "base", head_dim=32, rope_parameters=sections)
    file = base / "config.json"
    config = json.loads(file.read_text())
    # which published ones say, and vLLM reads
    config["text_config"]["norm_topk_prob"] = True
    file.write_text(json.dumps(config))
    # published ones have experts' matrices the other way round, which transformers finds out by their shapes
    change_tensors(
        base / "model.safetensors",
        lambda tensors: tensors.update(
            {name: tensor.transpose(1, 2) for name, tensor in tensors.items() if ".experts." in name}
        ),
    )
    (path / "1.png").write_bytes(content_of(drawn(*SIZE, 1)))
    row = asked([{"type": "image", "path": "1.png"}, {"type": "text", "text": "say"}])
    data = write_lines(path / "data.jsonl", [row] * 8)
    command = [
        *(sys.executable, "-m", "expertmesh.train_ep", "--model", base, "--dataset", data, "--images", "--use-cpu"),
        *("--train-vision", "tower", "projector", "--max-steps", 2, "--learning-rate", "1e-2"),
        *("--output-dir", path / "run"),
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return base, path / "run" / "hf"


_IN_TRANSFORMERS = """
import json, sys
import torchvision
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
directory, image, text, number = sys.argv[1:]
processor = AutoProcessor.from_pretrained(directory)
inputs = processor(text=[text], images=[Image.open(image)], return_tensors="pt")
model = AutoModelForImageTextToText.from_pretrained(directory, dtype="float32").eval()
# greedy, and not ended by any token
model.generation_config.eos_token_id = None
made = model.generate(**inputs, do_sample=False, max_new_tokens=int(number))
print(json.dumps({
    "class": type(processor).__name__,
    "pixels": inputs["pixel_values"].tolist(), "grid": inputs["image_grid_thw"].tolist(),
    "ids": inputs["input_ids"][0].tolist(), "made": made[0, inputs["input_ids"].shape[1]:].tolist(),
}))
"""


@pytest.fixture(scope="module")
def image(exported: tuple[Path, Path]) -> Path:
    file = exported[0].parent / "asked.png"
    file.write_bytes(content_of(drawn(*SIZE, 7)))
    return file


@pytest.fixture(scope="module")
def in_transformers(exported: tuple[Path, Path], image: Path, torchvision: str) -> dict[str, Any]:
    """What it makes of base and export, by AutoProcessor."""
    found: dict[str, Any] = {}
    for name, directory in zip(("base", "export"), exported, strict=True):
        words = (directory, image, TEXT, TOKENS)
        paths = {"PYTHONPATH": torchvision, "HF_HUB_OFFLINE": "1"}
        found[name] = python(Path(sys.executable), _IN_TRANSFORMERS, *words, **paths)
    return found


def test_the_processor_is_the_bases(exported: tuple[Path, Path], image: Path, in_transformers: dict[str, Any]) -> None:
    """By AutoProcessor, with torchvision: the same class, tokens and pixels, but another answer."""
    from PIL import Image

    base, export = in_transformers["base"], in_transformers["export"]
    for name in ("class", "ids", "pixels", "grid"):
        assert export[name] == base[name], name
    assert export["class"] == "Qwen3VLProcessor"
    assert export["made"] != base["made"]
    ours = theirs(exported[1])(text=[TEXT], images=[Image.open(image)])
    assert [list(map(int, ids)) for ids in ours["input_ids"]] == [export["ids"]]


_IN_VLLM = """
import json, sys
from PIL import Image
from vllm import LLM, SamplingParams
directory, image, text, number = sys.argv[1:]
model = LLM(
    directory, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=2,
    limit_mm_per_prompt={"image": 1, "video": 0},
)
asked = {"prompt": text, "multi_modal_data": {"image": Image.open(image)}}
how = SamplingParams(temperature=0, max_tokens=int(number), ignore_eos=True, detokenize=False)
(done,) = model.generate([asked], how)
print(json.dumps({"ids": list(done.prompt_token_ids), "made": list(done.outputs[0].token_ids)}))
"""


def test_answers_in_vllm(
    exported: tuple[Path, Path],
    image: Path,
    in_transformers: dict[str, Any],
    torchvision: str,
    vllm_python: Path,
    vllm_variables: Mapping[str, str],
) -> None:
    """The likeliest tokens are those of transformers, for a text with an image."""
    words = (exported[1], image, TEXT, TOKENS)
    said = python(vllm_python, _IN_VLLM, *words, **vllm_variables, PYTHONPATH=torchvision)
    expected = in_transformers["export"]
    assert said["ids"] == expected["ids"]
    assert said["made"] == expected["made"]

"""A family's own processor, small, and data with images for it."""

import base64
import io
import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoTokenizer, Qwen3VLProcessor
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from expertmesh.moe.hf_model.images import image_token
from tests.families.configs import skip_if_older
from tests.images import image_model
from tests.tiny import save_tokenizer

PATCH = 16
TEMPLATE = (
    "{%- for message in messages -%}{{ '<s>' + message.role + '\\n' }}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{ '</s>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<s>assistant\\n' }}{%- endif -%}"
)
TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_end|>", "<|vision_start|>")
"""In the order of their ids in the tiny config of qwen3_vl_moe, from 300 on."""


def save_processor(path: Path) -> None:
    """Beside a tiny qwen3_vl_moe."""
    if find_spec("torchvision") is None:
        skip_if_older("reads images with torchvision alone")
    save_tokenizer(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([f"<{number}>" for number in range(len(tokenizer), 300)], special_tokens=True)
    tokenizer.add_tokens(list(TOKENS), special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    images = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=2, temporal_patch_size=2, min_pixels=32 * 32, max_pixels=128 * 128
    )
    images.save_pretrained(path)


def pil_class_of(config: Any) -> Any:
    """Of a family's image processors that which does without torchvision; None: it has none."""
    kinds: Any = IMAGE_PROCESSOR_MAPPING.get(type(config), None)
    if kinds is not None:
        return kinds.get("pil")
    return {"qwen3_vl_moe": Qwen2VLImageProcessorPil, "glm4v_moe": Glm4vImageProcessorPil}[config.model_type]


def save_processor_of(path: Path, config: Any) -> Any:
    """The parts of a family's processor, with the tiny tokenizer; returns the processor that transformers makes of
    them."""
    save_tokenizer(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([f"<{number}>" for number in range(len(tokenizer), 330)], special_tokens=True)
    names = {"image": image_token(config), "boi": 290, "eoi": 291, "audio": 292, "boa": 293, "eoa": 294}
    token = f"<{names['image']}>"
    tokenizer.chat_template = re.sub(r"<\|vision_start\|><\|image_pad\|><\|vision_end\|>", f" {token} ", TEMPLATE)
    tokenizer.save_pretrained(path)
    file = path / "tokenizer_config.json"
    named = {f"{name}_token": f"<{number}>" for name, number in names.items()}
    file.write_text(json.dumps({**json.loads(file.read_text()), "extra_special_tokens": named, "pad_token": "<289>"}))
    tower, kind = config.vision_config, pil_class_of(config)
    said = {"merge_size": getattr(tower, "spatial_merge_size", None) or getattr(tower, "merge_size", None)}
    said |= {name: getattr(tower, name, None) for name in ("patch_size", "temporal_patch_size", "pooling_kernel_size")}
    images = kind(**{name: value for name, value in said.items() if value is not None and hasattr(kind, name)})
    images.save_pretrained(path)
    whole: Any = PROCESSOR_MAPPING[type(config)]
    own: Any = type(whole.__name__, (whole,), {"check_argument_for_proper_class": lambda *of: None})
    parts = {"tokenizer": AutoTokenizer.from_pretrained(path), "image_processor": images}
    template = parts["tokenizer"].chat_template
    return own(**{name: parts.get(name) for name in whole.get_attributes()}, chat_template=template)


class Processor(Qwen3VLProcessor):
    """transformers' own, without its part for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return None


def theirs(path: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(path)
    return Processor(Qwen2VLImageProcessorPil.from_pretrained(path), tokenizer, chat_template=tokenizer.chat_template)


def save_seeing(path: Path, **changes: Any) -> Any:
    """A tiny model with a tower, and its processor; transformers' own class of it."""
    model = image_model("qwen3_vl_moe", **changes)
    model.save_pretrained(path)
    save_processor(path)
    return model


def drawn(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def content_of(image: Image.Image, kind: str = "PNG") -> bytes:
    """As a file."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(content_of(image)).decode()


def write_lines(file: Path, rows: Sequence[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def asked(content: Any, answer: str = "world", **beside: Any) -> dict[str, Any]:
    """A record of one question and its answer."""
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}], **beside}


SIZES = [(70, 40), (33, 33), (64, 96), (40, 40), (100, 30)]
# a conversation as transformers' templates take it, and its images
Plain = tuple[list[dict[str, Any]], list[Image.Image]]


def written(folder: Path) -> tuple[Path, list[Plain]]:
    """Eight records, each in another form, and what they say."""
    images = [drawn(*size, seed) for seed, size in enumerate(SIZES)]
    for number, image in enumerate(images):
        (folder / "photos").mkdir(parents=True, exist_ok=True)
        (folder / "photos" / f"{number}.png").write_bytes(content_of(image))
    encoded = base64.b64encode(content_of(images[3])).decode()
    text = [{"type": "text", "text": "say what"}]
    rows = [
        asked([{"type": "image", "path": "photos/0.png"}, *text]),
        asked([*text, {"type": "image_url", "image_url": {"url": data_url(images[1])}}], "hello"),
        asked("say hello"),
        asked("<image>say<image>what", "two", images=["photos/2.png", str(folder / "photos" / "0.png")]),
        asked([{"type": "image"}, *text], images=[{"path": "photos/4.png"}]),
        asked([{"type": "image", "base64": encoded}, *text], "experts"),
        asked("say", "w", image=(folder / "photos" / "1.png").as_uri()),
        asked("hello", "the world of experts"),
    ]
    part: dict[str, Any] = {"type": "image"}
    said: list[tuple[list[Any], str, list[int]]] = [
        ([part, *text], "world", [0]),
        ([*text, part], "hello", [1]),
        ([{"type": "text", "text": "say hello"}], "world", []),
        ([part, {"type": "text", "text": "say"}, part, {"type": "text", "text": "what"}], "two", [2, 0]),
        ([part, *text], "world", [4]),
        ([part, *text], "experts", [3]),
        ([part, {"type": "text", "text": "say"}], "w", [1]),
        ([{"type": "text", "text": "hello"}], "the world of experts", []),
    ]
    plain: list[Plain] = [
        ([{"role": "user", "content": parts}, {"role": "assistant", "content": answer}], [images[n] for n in numbers])
        for parts, answer, numbers in said
    ]
    return write_lines(folder / "train.jsonl", rows), plain

"""Small models with parts that are not trained: a vision tower, layers for multi-token prediction."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5_moe import Qwen3_5MoeForConditionalGeneration

from tests.families.configs import tiny_config
from tests.tiny import save_tokenizer

VISION, PREDICTOR = "model.visual.", "mtp."
SIDE_FILES = {
    "processor_config.json": "{}",
    "preprocessor_config.json": '{"image_processor_type": "Qwen2VLImageProcessor"}',
    "video_preprocessor_config.json": "{}",
    "chat_template.json": '{"chat_template": ""}',
    "chat_template.jinja": "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}",
    "additional_chat_templates/tools.jinja": "{{ messages }}",
    "modeling_own.py": "raise SystemExit('code of a model directory was run')",
    "tekken.json": "{}",
    "tiktoken.model": "IQ== 0",
    "LICENSE": "Apache-2.0",
    "generation_config.json": '{"eos_token_id": 2}',
}
"""By name, what lies beside the weights and goes along."""


def save_multimodal(path: Path, max_shard_size: str = "100KB") -> dict[str, Tensor]:
    """Save a model that sees, with layers for multi-token prediction, in bf16, and files beside it.

    Returns:
        The tensors that are not trained.
    """
    torch.manual_seed(0)
    config: Any = tiny_config("qwen3_5_moe", mtp_num_hidden_layers=1)
    config.vision_config.depth = 1
    config.vision_config.out_hidden_size = config.text_config.hidden_size
    model: Any = Qwen3_5MoeForConditionalGeneration(config)
    model.to(torch.bfloat16)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    raw = json.loads((path / "config.json").read_text())
    raw["auto_map"] = {"AutoModel": "modeling_own.Own"}
    (path / "config.json").write_text(json.dumps(raw))
    hidden = config.text_config.hidden_size
    predictor = {
        f"{PREDICTOR}fc.weight": torch.randn(hidden, 2 * hidden),
        f"{PREDICTOR}norm.weight": torch.randn(hidden),
        f"{PREDICTOR}layers.0.mlp.experts.gate_up_proj": torch.randn(8, 48, hidden),
        f"{PREDICTOR}layers.0.mlp.experts.1.down_proj.weight": torch.randn(hidden, 24, dtype=torch.float64),
    }
    predictor = {
        name: tensor.bfloat16() if tensor.dtype == torch.float32 else tensor for name, tensor in predictor.items()
    }
    add_tensors(path, predictor)
    save_tokenizer(path)
    for name, content in SIDE_FILES.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content)
    return {name: t for name, t in read(path).items() if name.startswith((VISION, PREDICTOR))}


def save_deepseek(path: Path, **changes: Any) -> dict[str, Tensor]:
    """Save a DeepSeek-V3 whose layer beyond the last is for multi-token prediction.

    Returns:
        The tensors that are not trained.
    """
    torch.manual_seed(0)
    config: Any = tiny_config("deepseek_v3", **changes)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    tensors, last = load_file(path / "model.safetensors"), config.num_hidden_layers
    beyond = {
        name.replace(f"layers.{last - 1}.", f"layers.{last}."): tensor + 1
        for name, tensor in tensors.items()
        if f"layers.{last - 1}." in name
    }
    prefix, hidden = f"model.layers.{last}", config.hidden_size
    beyond[f"{prefix}.eh_proj.weight"] = torch.randn(hidden, 2 * hidden)
    beyond[f"{prefix}.embed_tokens.weight"] = torch.randn(config.vocab_size, hidden)
    beyond[f"{prefix}.shared_head.head.weight"] = torch.randn(config.vocab_size, hidden)
    add_tensors(path, beyond)
    save_tokenizer(path)
    return beyond


def add_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Add tensors to a saved model: to its only file, or as a file of its own beside the index."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        file = path / "model.safetensors"
        save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
        return
    save_file(tensors, path / "extra.safetensors", metadata={"format": "pt"})
    table = json.loads(index.read_text())
    table["weight_map"] |= dict.fromkeys(tensors, "extra.safetensors")
    index.write_text(json.dumps(table))


def read(path: Path) -> dict[str, Tensor]:
    """All tensors in a directory."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every tensor of `expected` is among those found, with its dtype and bits."""
    for name, tensor in expected.items():
        assert name in found, name
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name

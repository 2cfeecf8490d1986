"""What is not trained comes out of a run bit for bit, whatever it is held and computed in."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import train
from tests.tiny import save_tokenizer, tiny_mixtral


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tensors in three dtypes, some of which have more digits than others."""
    path = tmp_path_factory.mktemp("mixed")
    tiny_mixtral().save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if ".layers.1." in name:
            tensors[name] = tensors[name].to(torch.bfloat16 if "norm" in name or "experts" in name else torch.float16)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(path)
    return path


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("frozen", [["experts"], ["router", "embeddings", "norms", "attention"]], ids=" ".join)
@pytest.mark.parametrize(
    "flags",
    [
        ["--optim", "adamw_bf16"],
        ["--optim", "adamw_bf16", "--bf16"],
        ["--optim", "adamw_torch_8bit", "--bf16"],
        ["--optim", "muon", "--bf16"],
        ["--optim", "shampoo", "--shampoo-start", "1"],
    ],
    ids=" ".join,
)
def test_frozen_tensors_keep_their_bits(
    ranks: RankPool, model: Path, tiny_data: Path, tmp_path: Path, flags: list[str], frozen: list[str]
) -> None:
    settings = [*flags, "--freeze", *frozen, "--weight-decay", "0.1", "--ep-size", "2", "--save-steps", "0"]
    before, after = load_file(model / "model.safetensors"), train(ranks, 2, model, tiny_data, tmp_path, *settings)
    names = {
        "experts": ".experts.",
        "router": ".gate.",
        "embeddings": "embed_tokens",
        "norms": "norm",
        "attention": "attn",
    }
    is_frozen = {name: any(names[group] in name for group in frozen) for name in before}
    assert {True, False} == set(is_frozen.values())
    assert all(after[name].dtype == tensor.dtype for name, tensor in before.items())
    assert [name for name, tensor in before.items() if is_frozen[name] and not torch.equal(after[name], tensor)] == []
    assert any(not is_frozen[name] and not torch.equal(after[name], tensor) for name, tensor in before.items())

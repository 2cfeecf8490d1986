"""What is damaged, small and of every form, and how the product reads it."""

import contextlib
import io
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import torch
from safetensors.torch import load_file, save_file

from expertmesh.checkpoints.__main__ import main
from expertmesh.checkpoints.adapters.adapter import CONFIG, WEIGHTS, Adapter
from expertmesh.checkpoints.adapters.peft_format import adapter_config, lora_names
from expertmesh.checkpoints.ep_shards.manifest import check_all_bytes
from expertmesh.checkpoints.files.dtypes import as_tensor
from expertmesh.checkpoints.hf.names import Names
from expertmesh.checkpoints.inspection import describe, describe_model, read_heads
from expertmesh.checkpoints.load import load_model
from expertmesh.checkpoints.opening import open_any
from expertmesh.checkpoints.training_state.marker import MARKER
from expertmesh.checkpoints.training_state.resuming import find_checkpoint
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.hf_model.tensor_plan import regions_of
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.parallelize.parallelize import materialize
from expertmesh.sharding.topology import Topology
from expertmesh.training.cluster.commands import main as plan_main
from expertmesh.training.config.train_config import TrainConfig, parse_config
from expertmesh.training.data.chat import set_chat_template
from expertmesh.training.data.data_files import open_rows
from expertmesh.training.data.sample_cache import load_samples
from expertmesh.training.data.tokenizing import DataOptions, records_of
from expertmesh.training.planning.planner import forecasts
from expertmesh.training.planning.planner.hardware import preset, save_measured
from expertmesh.training.start.inputs import load_tokenizer
from tests.encoded import save_fp8, save_mxfp4
from tests.families.configs import tiny_model
from tests.hostile.harness import without_process_group
from tests.tiny import save_model, save_tokenizer
from tests.untrained import add_tensors

SMALL: dict[str, Any] = dict(
    hidden_size=8, intermediate_size=4, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    num_local_experts=2, vocab_size=10,
)  # fmt: skip
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
"""They have what Mixtral has not: shared experts, groups, correction biases, dense layers, kinds of layers, tensors
with biases that are interleaved and transposed."""

UNTRAINED = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
Tensors = dict[str, torch.Tensor]


def save_shards(path: Path) -> None:
    save_model(path.parent / "hf", **SMALL)
    add_tensors(path.parent / "hf", UNTRAINED)
    assert main(["convert", str(path.parent / "hf"), str(path), "--ep-size", "2", "--max-shard-size", "1KB"]) == 0


def save_adapter(path: Path) -> None:
    """Of a projection and of every expert, one tensor each; the base beside it."""
    save_model(path / "base", **SMALL)
    tensors: Tensors = {}
    for name, weight in load_file(path / "base" / "model.safetensors").items():
        if "q_proj" in name or ".experts." in name:
            a, b = lora_names(name.removesuffix(".weight"))
            tensors[a], tensors[b] = torch.randn(2, weight.shape[1]), torch.randn(weight.shape[0], 2)
    save_file(tensors, path / WEIGHTS)
    layout = moe_layers(open_any(path / "base").names.model)[0].mlp.layout
    modules, experts = ["model.layers.0.self_attn.q_proj"], {"model.layers.0.mlp.experts": layout}
    config = adapter_config(base_model="m", rank=2, alpha=4.0, modules=modules, experts=experts)
    (path / CONFIG).write_text(json.dumps(config))


def _save_family(family: str, path: Path) -> None:
    tiny_model(family, seed=0).save_pretrained(path)


def save_data(path: Path) -> None:
    save_tokenizer(path / "tokenizer")
    rows = {"prompt": ["a"] * 50, "response": ["b"] * 50}
    pyarrow.parquet.write_table(pyarrow.table(rows), path / "data.parquet")
    (path / "data.jsonl").write_text('{"prompt": "say", "response": "yes"}\n')
    (path / "data.json").write_text('[{"prompt": "say", "response": "yes"}]')
    (path / "data.csv").write_text("prompt,response\nsay,yes\n")
    (path / "data.txt").write_text("say yes\n")
    (path / "template.jinja").write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")


def save_settings(path: Path) -> None:
    """What a run, and what `plan`, is given."""
    save_model(path, **SMALL)
    save_measured(preset("H100", "infiniband-ndr"), path / "rates.json")
    TrainConfig(model="m", dataset=["d"]).save(path / "config.yaml")


GPT_OSS: dict[str, Any] = {"intermediate_size": 32, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
ORIGINS: dict[str, Callable[[Path], object]] = {
    "model": lambda path: save_model(path, **SMALL),
    "in parts": lambda path: save_model(path, max_shard_size="1KB", **SMALL),
    "shards": save_shards,
    "adapter": save_adapter,
    "fp8": lambda path: save_fp8(tiny_model("deepseek_v3", seed=0, num_hidden_layers=2), path),
    "mxfp4": lambda path: save_mxfp4(tiny_model("gpt_oss", seed=0, **GPT_OSS), path),
    "data": save_data,
    "settings": save_settings,
    **{family: partial(_save_family, family) for family in FAMILIES},
}
"""By name, what saves it; `conftest.py` has one more, "trained"."""


def loaded_model(path: Path) -> Any:
    """The model in a directory of Hugging Face form or EP shards, loaded as for training on one rank."""
    checkpoint = open_any(path)
    model = checkpoint.source.build()
    materialize(model, torch.device("cpu"))
    load_model(model, checkpoint, Topology(1, 1))
    return model


def loaded(path: Path) -> Tensors:
    """Its parameters; those of a training checkpoint as an export reads them."""
    if not (path / MARKER).exists():
        return {name: parameter.detach() for name, parameter in loaded_model(path).named_parameters()}
    checkpoint = open_any(path)
    reader = checkpoint.reader()
    found = {}
    for name, shape in checkpoint.names.parameters.items():
        rows = reader.rows(name, range(shape[0]))
        assert rows is not None
        found[name] = as_tensor(*rows).clone()
        assert found[name].shape == shape
    reader.close()
    return found


def described(path: Path) -> Tensors:
    """What is in a checkpoint, after `inspect` has told it and every byte was held against the checksums."""
    assert list(describe(path, read_heads(path), True))
    assert list(describe_model(open_any(path)))
    check_all_bytes(path)
    return loaded(path)


def resumed(path: Path) -> Tensors:
    assert find_checkpoint(str(path), path.parent) == (path, [])
    return described(path)


def computed(path: Path) -> tuple[Any, torch.Tensor]:
    """How its matrices may be divided, and logits of a few tokens."""
    model = loaded_model(path).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(7)[None] % model.config.vocab_size).logits
    return regions_of(model), logits


def pairs(path: Path) -> dict[str, Any]:
    """Every pair of an adapter, and what its product is multiplied by."""
    found = Adapter(path, names_of(path / "base"))
    return {name: (found.pair(name), found.beside[name].scale) for name in sorted(found.beside)}


@cache
def names_of(base: Path) -> Names:
    return open_any(base).names


def run_config(path: Path) -> TrainConfig:
    return parse_config(["--config", str(path / "config.yaml")])


def planned(path: Path) -> str:
    argv = ["plan", "--model", str(path), "--gpus", "2", "--micro-batch", "1", "--json"]
    errors, output = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(output),
        without_process_group(),
        # no process may be started
        mock.patch.object(forecasts, "cores", return_value=1),
    ):
        # the cache lies outside of what may be written
        code = plan_main([*argv, "--calibrate", str(path / "rates.json"), "--no-cache"])
    if code == 2:
        raise ExpertMeshError(errors.getvalue())
    return output.getvalue()


def tokenizer_of(path: Path) -> Any:
    return load_tokenizer(str(path), SimpleNamespace(text_config=SimpleNamespace(vocab_size=320)))  # type: ignore[arg-type]


def tokens(path: Path) -> list[int]:
    tokenizer = tokenizer_of(path / "tokenizer")
    set_chat_template(tokenizer, "")
    return list(tokenizer("say hello", add_special_tokens=False)["input_ids"])


_OPTIONS = DataOptions(max_seq_length=64, num_workers=1)
_kept_tokenizer = cache(tokenizer_of)


def samples(name: str) -> Callable[[Path], list[Any]]:
    """Of a file of data, through all that a run does with one."""

    def read(path: Path) -> list[Any]:
        tokenizer = _kept_tokenizer(path / "tokenizer")
        set_chat_template(tokenizer, "")
        found = load_samples("--dataset", [str(path / name)], tokenizer, _OPTIONS, 0)
        return [found[index] for index in range(len(found))]

    return read


def records(path: Path) -> list[dict[str, str]]:
    """Of a file of rows, up to what the tokenizer gets."""
    return list(records_of(open_rows("--dataset", str(path / "data.jsonl"), "", "train"), "--dataset", DataOptions(64)))


def given_template(path: Path) -> None:
    set_chat_template(tokenizer_of(path / "tokenizer"), str(path / "template.jinja"))


def own_template(path: Path) -> Any:
    """The tokenizer's own template, which is first used on the data."""
    tokenizer = tokenizer_of(path / "tokenizer")
    tokenizer.chat_template = (path / "template.jinja").read_text(errors="replace")
    return load_samples("--dataset", [str(path / "data.jsonl")], tokenizer, _OPTIONS, 0)


def in_file(path: Path) -> Tensors:
    """What safetensors itself finds in the one file of "model", under the names of our parameters."""
    tensors = load_file(path / "model.safetensors")
    block = "model.layers.0.block_sparse_moe"
    found = {name: tensor for name, tensor in tensors.items() if block not in name}
    experts = [[tensors[f"{block}.experts.{n}.{w}.weight"] for n in range(2)] for w in ("w1", "w3", "w2")]
    ours = {"w1": experts[0], "v1": experts[1], "w2": [down.t() for down in experts[2]]}
    found |= {f"model.layers.0.mlp.experts.mlp.{name}": torch.cat(parts) for name, parts in ours.items()}
    found["model.layers.0.mlp.gate.weight"] = tensors[f"{block}.gate.weight"]
    rowwise = "model.layers.0.self_attn.o_proj.weight"
    found[rowwise] = tensors[rowwise].t()
    return {name: tensor.float() for name, tensor in found.items()}


def same_bits(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and torch.equal(a[name].contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8))
        for name in a
    )

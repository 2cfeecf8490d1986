"""Quantized frozen weights under FSDP's mixed precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from expertmesh.checkpoints.ep_shards.manifest import MANIFEST, open_checkpoint
from expertmesh.checkpoints.hf.names import Names
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.checkpoints.load import check_form, check_mxfp4
from expertmesh.moe.experts.bf16_copies import local_part
from expertmesh.moe.experts.lora import store_frozen
from expertmesh.moe.linear.quantized import SCALES, Kind, Storage, quantize, storages_of
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.topology import Topology
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.engine.assembly import assemble
from expertmesh.training.steps.micro_batch import token_loss_sum
from tests.distributed.pool import RankPool
from tests.distributed.reference import in_our_layout, my_batches, sharded_model
from tests.encoded import save_mxfp4
from tests.families.configs import tiny_model
from tests.parity.case import Case, hf_model, random_samples

SAMPLES = random_samples([9 + (5 * i) % 12 for i in range(8)])


def gathered(path: Path, topology: Topology, case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """Codes and scales, as bytes, that modules have on this rank while they compute, by name of the weight."""
    model, _, _ = sharded_model(path, topology, case)
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def remember(path: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            for name in storages_of(module):
                parts = (module.get_parameter(name), module.get_parameter(name + SCALES))
                codes, scales = (local_part(part.detach()).view(torch.uint8).clone() for part in parts)
                seen[f"{path}.{name}"] = codes, scales

        return hook

    for path_of, module in model.named_modules():
        if storages_of(module):
            module.register_forward_pre_hook(remember(path_of))
    batch = my_batches(case, topology, torch.distributed.get_rank())[0]
    token_loss_sum(model, batch)
    return seen


@pytest.mark.parametrize(
    ("topology", "kind", "dtype"),
    [
        (Topology(1, 1), "nf4", torch.float32),
        (Topology(2, 1), "nf4", torch.bfloat16),
        (Topology(2, 1), "fp8", torch.float32),
        (Topology(2, 2), "fp8", torch.bfloat16),
    ],
    ids=str,
)
def test_codes_are_never_cast(
    ranks: RankPool, tmp_path: Path, topology: Topology, kind: Kind, dtype: torch.dtype
) -> None:
    """Codes and scales arrive byte for byte, those that are no number of any float too."""
    settings = {"adapter": "lora", "lora_rank": 4, "base_dtype": kind}
    case = Case(samples=SAMPLES, settings=settings, compute_dtype=dtype, changes={"intermediate_size": 80})
    theirs = hf_model(case)
    theirs.save_pretrained(tmp_path)
    found = ranks.run(gathered, topology.world_size, tmp_path, topology, case)[0]
    weights = in_our_layout(theirs, "data")
    assert sum(".mlp.experts." in name for name in found) == 3 * len(theirs.model.layers)
    assert any("q_proj" in name for name in found)
    for name, parts in found.items():
        expected = quantize(weights[name], Storage(kind, weights[name].shape[1]))
        for part, whole in zip(parts, expected, strict=True):
            assert torch.equal(part, whole[: len(part)]), name
            assert len(part) == len(whole) // (topology.ep_size if ".mlp.experts." in name else 1)


@pytest.mark.parametrize("topology", [Topology(2, 2), pytest.param(Topology(2, 1), marks=pytest.mark.slow)], ids=str)
def test_mxfp4_is_held_as_published(ranks: RankPool, tmp_path: Path, topology: Topology) -> None:
    """Of experts alone, with the bytes of the checkpoint, but for scales of 92 and not 90 bytes per row, say."""
    settings = {"adapter": "lora", "lora_rank": 4, "base_dtype": "mxfp4"}
    changes = {"intermediate_size": 64}
    case = Case(SAMPLES, settings=settings, compute_dtype=torch.bfloat16, family="gpt_oss", changes=changes)
    save_mxfp4(hf_model(case), tmp_path)
    published = load_file(tmp_path / "model.safetensors")
    found = ranks.run(gathered, topology.world_size, tmp_path, topology, case)[0]
    assert len(found) == 3 * sum(name.endswith("down_proj_blocks") for name in published)
    for name, parts in found.items():
        path, _, own = name.rpartition(".mlp.")
        tensor = f"{path}.down_proj" if own == "w2" else f"{path}.gate_up_proj"
        for part, kind in zip(parts, ("blocks", "scales"), strict=True):
            whole = published[f"{tensor}_{kind}"]
            if own != "w2":
                whole = whole[:, 0 if own == "w1" else 1 :: 2]
            mine = whole[: len(whole) // topology.ep_size].flatten(0, 1).flatten(1)
            assert torch.equal(part[:, : mine.shape[1]], mine), name
            assert 0 <= part.shape[1] - mine.shape[1] < 4


def test_what_is_not_in_mxfp4_is_refused(tmp_path: Path) -> None:
    """Before a weight is read."""
    theirs: Any = tiny_model("gpt_oss", seed=1, intermediate_size=64)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    config = TrainConfig(model="m", dataset=["d"], adapter="lora", base_dtype="mxfp4")
    with pytest.raises(ExpertMeshError, match=r"mxfp4: .* config.json says of no quantized tensors; --base-dtype nf4"):
        assemble(config, source, "cpu")
    model = source.build("eager").requires_grad_(False)
    store_frozen(model, "mxfp4")
    with pytest.raises(ExpertMeshError, match=r"--base-dtype mxfp4: .* has model.layers.* as BF16; --base-dtype nf4"):
        check_mxfp4(model, open_checkpoint(source, Names(model)))
    (tmp_path / MANIFEST).touch()
    with pytest.raises(ExpertMeshError, match=r"--base-dtype mxfp4: .* has EP shards: give the model in Hugging Face"):
        check_form(model, source)

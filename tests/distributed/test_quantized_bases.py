"""Quantized frozen weights under FSDP's mixed precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.moe.experts.bf16_copies import local_part
from expertmesh.moe.linear.quantized import SCALES, Kind, Storage, quantize, storages_of
from expertmesh.sharding.topology import Topology
from expertmesh.training.micro_batch import token_loss_sum
from tests.distributed.pool import RankPool
from tests.distributed.reference import in_our_layout, my_batches, sharded_model
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

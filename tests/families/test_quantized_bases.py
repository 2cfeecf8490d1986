"""LoRA beside quantized weights, of every family, against its own class computing with the dequantized numbers."""

from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from expertmesh.sharding.topology import Topology
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, hf_model, ours, random_samples
from tests.families.lora import reference
from tests.families.test_families import CANCELLED, FAMILIES, TOLERANCE
from tests.tiers import REPRESENTATIVES
from tests.tiny import relative_error

SAMPLES = random_samples([9 + (5 * i) % 12 for i in range(8)], vocabulary=290)
TOPOLOGIES = {"fp8": Topology(2, 2), "nf4": Topology(1, 1)}


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *product(REPRESENTATIVES, TOPOLOGIES),
        *zip([family for family in FAMILIES if family not in REPRESENTATIVES], cycle(TOPOLOGIES), strict=False),
    ],
)
def test_family(ranks: RankPool, tmp_path: Path, family: str, kind: str) -> None:
    """Loss, and the gradient of each adapter, on every linear layer and all experts. Which matrices are quantized goes
    by the family, and not by the kind; how, by the kind alone: of most families one is tested."""
    topology = TOPOLOGIES[kind]
    settings: dict[str, Any] = {"adapter": "lora", "lora_rank": 2, "base_dtype": kind, "lora_targets": [".", "experts"]}
    case = Case(SAMPLES, family=family, settings=settings, steps=1)
    hf_model(case, seed=1).save_pretrained(tmp_path)
    expected = reference(case)
    found = ranks.run(ours, topology.world_size, tmp_path, topology, case)[0]
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    # what no rank's sequences reach has zeros, until the ranks agree that it has no gradient
    assert expected.grads.keys() == {name for name, grad in found.grads.items() if name in expected.grads or grad.any()}
    floor = CANCELLED * expected.grad_norms[0]
    errors = {name: relative_error(found.grads[name], grad, floor) for name, grad in expected.grads.items()}
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    assert not wrong, wrong

"""Every causal MoE family under tensor parallelism: loss and gradients where transformers' plan divides its attention,
one clear error where it does not."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from expertmesh.moe import ExpertMeshError, build_model
from expertmesh.moe.model.families import families_with_plan
from expertmesh.sharding import Topology
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.step import compute_gradients
from expertmesh.training.tensor_parallel import apply_tensor_parallel
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, in_full, my_batches, sharded_model
from tests.families.configs import tiny_config, tiny_model
from tests.families.test_families import FAMILIES, SAMPLES, TOLERANCE, TOLERANCES, compare, gradients_of

PLANNED = [family for family in FAMILIES if family in families_with_plan()]
TP_2 = Topology(2, 2, tp_size=2)


def test_most_families_have_a_plan() -> None:
    assert len(PLANNED) >= 30


@pytest.mark.quick(4)
@pytest.mark.parametrize("family", PLANNED)
def test_gradients(ranks: RankPool, tmp_path: Path, family: str) -> None:
    case = Case(SAMPLES, family=family, changes=two_heads(family))
    theirs: Any = tiny_model(family, seed=1, **case.changes)
    theirs.save_pretrained(tmp_path)
    loss, grads = gradients_of(theirs, case)
    found = ranks.run(_divided, 2, tmp_path, case)
    divided, our_loss, our_grads = found[0]
    assert our_loss == pytest.approx(loss, rel=TOLERANCE)
    compare(our_grads, grads, "tp 2", TOLERANCES.get(family, TOLERANCE))
    assert divided, "what is divided must be, on every rank"
    assert all(rows == whole // 2 for rows, whole in divided.values()), divided


def two_heads(family: str) -> dict[str, Any]:
    """Changes to the tiny config by which two ranks can divide key and value heads."""
    config = tiny_config(family).get_text_config()
    is_odd = getattr(config, "num_key_value_heads", 2) % 2 if family not in ("dots3_note",) else False
    return {"num_key_value_heads": 2} if is_odd else {}


def _divided(path: Path, case: Case) -> tuple[dict[str, tuple[int, int]], float, dict[str, Any]]:
    model, mesh, _ = sharded_model(path, TP_2, case)
    model.train()
    result = compute_gradients(model, my_batches(case, TP_2, dist.get_rank(), mesh.cp_group), LossWeights(0.0, 0.0))
    parameters = dict(model.named_parameters())
    rows = {name: (len(parameters[name].to_local()), len(parameters[name])) for name in model.divided}
    return rows, result.loss, in_full({name: p.grad for name, p in parameters.items() if p.grad is not None})


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in PLANNED])
def test_refused_without_a_plan(family: str) -> None:
    with pytest.raises(ExpertMeshError, match="--tp-size 2: transformers has no plan"):
        apply_tensor_parallel(build_model(tiny_config(family)), 2)

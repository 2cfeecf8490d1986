"""Every causal MoE family under tensor parallelism: loss and gradients where transformers' plan divides its attention,
one clear error where it does not."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.hf_model.families import families_with_plan
from expertmesh.moe.hf_model.family_exceptions import UNDIVIDED
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.topology import Topology
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.step import compute_gradients
from expertmesh.training.tensor_parallel import apply_tensor_parallel
from tests.distributed.pool import RankPool
from tests.distributed.reference import (
    Case,
    hf_model,
    in_full,
    my_batches,
    of_packed,
    ours,
    random_samples,
    reference,
    sharded_model,
)
from tests.families.configs import skip_if_older, tiny_config, tiny_model
from tests.families.test_families import FAMILIES, SAMPLES, TOLERANCE, TOLERANCES, compare, gradients_of
from tests.families.test_packing import REFUSED, few_choices
from tests.families.test_parity import CANCELLED, WEIGHT_TOLERANCE, has_auxiliary_loss
from tests.families.test_parity import SAMPLES as TRAINING_SAMPLES
from tests.families.test_parity import compare as compare_training
from tests.families.test_pipeline import four_layers

PLANNED = [family for family in FAMILIES if family in families_with_plan()]
TP_2 = Topology(2, 2, tp_size=2)


def test_most_families_have_a_plan() -> None:
    assert len(PLANNED) >= 30


@pytest.mark.slow
@pytest.mark.sample(12)
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


# in rows of two samples and more, of positions that two ranks do not divide between samples
PACKED = random_samples([13, 4, 5, 16, 11], vocabulary=290)
UNLIKE = {"qwen3_5_moe": 5e-5}
"""Gradients of its A_log, a sum over all tokens for each head, are 5e-6 off in one process, packed, too."""


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("family", [family for family in PLANNED if family not in REFUSED])
def test_packed(ranks: RankPool, tmp_path: Path, family: str) -> None:
    """Also where attention runs sample by sample, and the ranks of a CP group have each some of the sequences."""
    skip_if_older("may refuse packed samples of some families")
    case = Case(PACKED, family=family, changes=two_heads(family), attention="auto", settings={"packing": True})
    theirs: Any = tiny_model(family, seed=1, **case.changes)
    theirs.save_pretrained(tmp_path)
    loss, grads = gradients_of(theirs, case)
    few_heads = family == "dots3_note"  # in some of its layers
    for topology in (TP_2, *(() if few_heads else [Topology(4, 2, tp_size=2, cp_size=2)])):
        our_loss, our_grads = ranks.run(of_packed, topology.world_size, tmp_path, topology, case)[0]
        assert our_loss == pytest.approx(loss, rel=TOLERANCE)
        compare(our_grads, grads, str(topology), UNLIKE.get(family) or TOLERANCES.get(family, TOLERANCE))


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("family", [family for family in PLANNED if few_choices(family) and family not in REFUSED])
@pytest.mark.parametrize("packing", [False, True])
def test_layers_that_choose_tokens(ranks: RankPool, tmp_path: Path, family: str, packing: bool) -> None:
    """Fewer than sequences have."""
    skip_if_older("may refuse packed samples of some families")
    changes = two_heads(family) | few_choices(family)
    case = Case(PACKED, family=family, changes=changes, attention="auto", settings={"packing": packing})
    theirs: Any = tiny_model(family, seed=1, **changes)
    theirs.save_pretrained(tmp_path)
    loss, grads = gradients_of(theirs, case)
    if packing:
        our_loss, our_grads = ranks.run(of_packed, 2, tmp_path, TP_2, case)[0]
    else:
        _, our_loss, our_grads = ranks.run(_divided, 2, tmp_path, case)[0]
    assert our_loss == pytest.approx(loss, rel=TOLERANCE)
    compare(our_grads, grads, "tp 2", TOLERANCES.get(family, TOLERANCE))


@pytest.mark.parametrize("packing", [False, True])
def test_windows_as_wide_as_a_ranks_positions(ranks: RankPool, tmp_path: Path, packing: bool) -> None:
    """Of more tokens than the model was tried with when it was divided."""
    samples = random_samples([128, 128], vocabulary=290)
    changes = {"sliding_window": 64}
    case = Case(samples, family="mimo_v2_flash", changes=changes, attention="auto", settings={"packing": packing})
    _compare_divided(ranks, tmp_path, case)


@pytest.mark.slow
def test_as_many_sequences_as_a_ranks_positions(ranks: RankPool, tmp_path: Path) -> None:
    """Under a mask that sdpa needs not, and has not, in the short sequences that the model is tried with."""
    changes = {"sliding_window": 20}
    case = Case(random_samples([32] * 16, vocabulary=290), changes=changes, attention="sdpa")
    _compare_divided(ranks, tmp_path, case)


def _compare_divided(ranks: RankPool, path: Path, case: Case) -> None:
    """Loss and gradients of two tensor-parallel ranks with those of one process."""
    theirs: Any = tiny_model(case.family, seed=1, **case.changes)
    theirs.save_pretrained(path)
    loss, grads = gradients_of(theirs, case)
    _, our_loss, our_grads = ranks.run(_divided, 2, path, case)[0]
    assert our_loss == pytest.approx(loss, rel=TOLERANCE)
    compare(our_grads, grads, "tp 2", TOLERANCE)


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


LAYOUTS: dict[str, tuple[Topology, dict[str, Any]]] = {
    "tp 2": (TP_2, dict(gradient_checkpointing="selective", kernel="torch-grouped")),
    "tp 4": (Topology(4, 4, tp_size=4), dict(gradient_checkpointing="full")),
    "tp 2 x ep 2, hybrid": (Topology(4, 2, "hybrid", tp_size=2), dict(accumulation=2)),
    "tp 2 x cp 2": (Topology(4, 4, cp_size=2, tp_size=2), dict(gradient_checkpointing="full")),
    "tp 2 x pp 2 x ep 2": (Topology(8, 2, pp_size=2, tp_size=2), dict(accumulation=2)),
}
TRAINED = [
    *("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "minimax_m2"),
    # latent attention; layers that are not divided, beside attention that is
    *("deepseek_v2", "qwen3_next"),
]


@pytest.mark.slow
@pytest.mark.sample(7)
@pytest.mark.parametrize(("family", "layout"), product(TRAINED, LAYOUTS))
def test_training(ranks: RankPool, tmp_path: Path, family: str, layout: str) -> None:
    """Losses, gradients and, after two clipped updates by AdamW, weights, as in one process."""
    topology, settings = LAYOUTS[layout]
    # the balancing loss is of one micro-batch, and how these are made depends on the layout; transformers' takes the
    # experts of the highest logits for those that were chosen, which are others where a bias has a part in it
    is_plain = family != "minimax_m2" and "accumulation" not in settings
    balance = 0.05 if has_auxiliary_loss(family) and is_plain else 0.0
    changes = heads(family) | (four_layers(family) if topology.pp_size > 1 else {})
    case = Case(TRAINING_SAMPLES, family=family, steps=2, changes=changes, balance=balance, **settings)
    hf_model(case, seed=1).save_pretrained(tmp_path)
    want = reference(case, seed=1)
    found = ranks.run(ours, topology.world_size, tmp_path, topology, case)[0]
    assert found.losses == pytest.approx(want.losses, rel=TOLERANCE)
    assert found.grad_norms == pytest.approx(want.grad_norms, rel=TOLERANCE)
    assert found.balance_loss == pytest.approx(want.balance_loss, rel=TOLERANCE)
    compare_training(found.grads, want.grads, CANCELLED * want.grad_norms[0])
    compare_training(found.weights, want.weights, 0.0, WEIGHT_TOLERANCE)


def heads(family: str) -> dict[str, Any]:
    """Changes to the tiny config by which four ranks can divide all heads."""
    config = tiny_config(family).get_text_config()
    return {} if hasattr(config, "kv_lora_rank") else {"num_key_value_heads": 4}


@pytest.mark.sample(13)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in PLANNED])
def test_refused_without_a_plan(family: str) -> None:
    said = "the attention of .* cannot be divided" if family in UNDIVIDED else "transformers has no plan"
    with pytest.raises(ExpertMeshError, match=f"--tp-size 2: {said}"):
        apply_tensor_parallel(build_model(tiny_config(family)), 2)

"""Models that see images: loss, every gradient of text and tower and weights after steps are the same with every
parallel layout as by transformers' own classes in one process (tests/images.py), ranks without any image included."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import expertmesh
from tests.distributed.pool import RankPool
from tests.distributed.reference import in_full
from tests.images import FAMILIES, ImageSample, answer, collated, image_model, is_vision, samples_of
from tests.parity.kept import in_our_layout
from tests.rounding import OTHER_ORDER, gradient_errors, near
from tests.tiers import tiered

BOTH = ["tower", "projector"]
STEPS = dict(learning_rate=1e-3, weight_decay=0.0, max_grad_norm=0.0)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2 ep 2": (2, dict(ep_size=2)),
    "4 ep 2": (4, dict(ep_size=2)),
    "4 ep 2 hybrid": (4, dict(ep_size=2, dense_shard="hybrid")),
    "1 packed": (1, dict(packing=True)),
    "2 cp 2": (2, dict(cp_size=2)),
    "2 tp 2": (2, dict(tp_size=2)),
    "4 ep 2 cp 2 packed": (4, dict(ep_size=2, cp_size=2, packing=True)),
    "4 ep 2 pp 2": (4, dict(ep_size=2, pp_size=2)),
    "2 full": (2, dict(ep_size=2, gradient_checkpointing="full")),
    "2 selective": (2, dict(ep_size=2, gradient_checkpointing="selective")),
}
NOT_DIVIDED = ("minimax_m3_vl",)
"""Families whose attention tensor parallelism does not divide."""


def rows_of(engine: Any, samples: Sequence[ImageSample], without: str) -> list[list[list[ImageSample]]]:
    """This rank's micro-batches: the first ranks have the samples with images, others have some without any."""
    mine = list(samples[engine.data_rank :: engine.data_size])
    if engine.config.packing:
        return [[mine[: len(mine) // 2]], [mine[len(mine) // 2 :]]]
    return [[[sample] for sample in mine[:1]], [[sample] for sample in mine[1:]]]


def ours(path: Path, settings: dict[str, Any], samples: Sequence[ImageSample], steps: int = 0) -> Any:
    """(loss, gradients, weights after some steps, its first lines)"""
    settings = {"router_aux_loss_coef": 0.0, "train_vision": BOTH, **STEPS, **settings}
    engine = expertmesh.load(str(path), use_cpu=True, cpu_matmul="onednn", images=True, **settings)
    batches = [collated(engine.model, rows) for rows in rows_of(engine, samples, "")]
    before = engine.evaluate(batches)
    result = engine.forward_backward(batches)
    assert before.loss == near(result.loss)
    grads = in_full({name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None})
    engine.optimizer.zero_grad()
    for _ in range(steps):
        engine.step(batches)
    weights = in_full(dict(engine.model.named_parameters())) if steps else {}
    return result, grads, weights, engine.trained


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[Path, Any]] = {}

    def model_of(family: str) -> tuple[Path, Any]:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family) / "model", image_model(family)
            made[family][1].save_pretrained(made[family][0])
        return made[family]

    return model_of


def assert_gradients(found: dict[str, Tensor], model: Any, theirs: dict[str, Tensor]) -> None:
    wanted = in_our_layout(model.config, theirs, images=True)
    # indexers get no gradient, or zeros, as of tokens that are all chosen
    unreached = {name: found[name] for name in found.keys() - wanted.keys()}
    assert all(not grad.any() for grad in unreached.values()), unreached.keys()
    errors = gradient_errors({name: found[name] for name in wanted}, wanted)
    assert max(errors.values()) <= OTHER_ORDER, sorted(errors.items(), key=lambda each: -each[1])[:5]
    assert any(is_vision(name) for name in wanted)


QUICK = [("qwen3_vl_moe", "4 ep 2")]
SLOW = [
    (family, layout)
    for family in FAMILIES
    for layout in LAYOUTS
    if (family, layout) not in QUICK and not (family in NOT_DIVIDED and "tp 2" in layout)
]


@pytest.mark.parametrize(("family", "layout"), tiered(QUICK, SLOW))
def test_with_any_layout(family: str, layout: str, ranks: RankPool, models: Any) -> None:
    path, model = models(family)
    samples = samples_of(model)
    wanted = answer(model, samples)
    world_size, settings = LAYOUTS[layout]
    found = ranks.run(ours, world_size, path, settings, samples)
    assert all(result.loss == near(wanted.loss) for result, *_ in found)
    assert_gradients(found[0][1], model, wanted.grads)

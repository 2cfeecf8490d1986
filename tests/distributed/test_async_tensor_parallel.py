"""--async-tp by stand-ins for torch's operators: the same figures, and which matmuls run beside which exchange."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.moe import ExpertMeshError
from expertmesh.sharding import Topology, TPGroup
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.overlapped_regions import check_async
from expertmesh.training.step import compute_gradients
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, in_full, my_batches, random_samples, sharded_model
from tests.families.configs import TEXT_IDS, tiny_model
from tests.tiny import relative_error

SAMPLES = random_samples([9 + (5 * i) % 12 for i in range(8)], vocabulary=TEXT_IDS)
TP_2 = Topology(2, 2, tp_size=2)
FORWARD, BACKWARD = ["gather x3", "scatter"], ["gather x1", "scatter"]
"""Mixtral's attention: three projections of what is gathered, one whose results are scattered. In backward the gradient
of the latter is gathered, and one matmul for the three gives what is scattered."""


class StandIns:
    """In parts, as torch's operators work: of one rank's positions at a time."""

    def __init__(self, group: TPGroup):
        self.group, self.calls = group, list[str]()

    def gather_multiply(self, x: Tensor, weights_KN: Sequence[Tensor], dim: int) -> tuple[Tensor, list[Tensor]]:
        self.calls.append(f"gather x{len(weights_KN)}")
        parts = self.group.all_gather(x, dim).chunk(self.group.size, dim)
        products = [torch.cat([part @ weight_KN for part in parts], dim) for weight_KN in weights_KN]
        return torch.cat(parts, dim), products

    def multiply_scatter(self, x: Tensor, weight_KN: Tensor, dim: int) -> Tensor:
        self.calls.append("scatter")
        parts = [part @ weight_KN for part in x.chunk(self.group.size, dim)]
        return self.group.sum_scatter(torch.cat(parts, dim), dim)


@pytest.mark.quick(1)
# projections by way of low ranks, which every rank computes alike; MLPs that are divided too
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2", "qwen2_moe"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_same_in_parts(ranks: RankPool, tmp_path: Path, family: str, checkpointing: Any) -> None:
    tiny_model(family, seed=1).save_pretrained(tmp_path)
    case = Case(SAMPLES, family=family, gradient_checkpointing=checkpointing)
    (loss, grads, none), (our_loss, our_grads, calls) = ranks.run(_figures, 2, tmp_path, case)[0]
    assert our_loss == pytest.approx(loss, rel=1e-6)
    assert max(relative_error(our_grads[name], grad, 1e-3) for name, grad in grads.items()) < 1e-5
    assert not none
    assert calls, "never silently inactive"
    if family == "mixtral":
        again = FORWARD if checkpointing == "full" else []
        assert calls == 3 * FORWARD + 3 * (again + BACKWARD)


def _figures(path: Path, case: Case) -> list[tuple[float, dict[str, Tensor], list[str]]]:
    figures = []
    for is_async in (False, True):
        model, mesh, _ = sharded_model(path, TP_2, case)
        model.train()
        group = mesh.cp_group.tp
        stand_ins = StandIns(group)
        if is_async:
            model.tensor_parallel.operators = stand_ins
        batches = my_batches(case, TP_2, dist.get_rank(), mesh.cp_group)
        result = compute_gradients(model, batches, LossWeights(0.0, 0.0))
        grads = in_full({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        figures.append((result.loss, grads, stand_ins.calls))
    return figures


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_refused_without_a_gpu() -> None:
    with pytest.raises(ExpertMeshError, match="--async-tp: exchanges beside GEMMs go by NVLink"):
        check_async("cpu")

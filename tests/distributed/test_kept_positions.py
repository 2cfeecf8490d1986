"""What a region has gathered is not kept for backward, but gathered once more, where it is needed: no bit changes."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.sharding.collectives.tensor_parallel import TPGroup
from expertmesh.sharding.topology import Topology
from expertmesh.training import tensor_parallel
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.step import compute_gradients
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, in_full, my_batches, random_samples, sharded_model
from tests.families.configs import TEXT_IDS, tiny_model

SAMPLES = random_samples([9 + (5 * i) % 12 for i in range(8)], vocabulary=TEXT_IDS)
TP_2 = Topology(2, 2, tp_size=2)
LORA = {"adapter": "lora"}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "settings", "checkpointing", "more"),
    [
        ("mixtral", {}, "none", 1),
        # recomputation gathers it
        ("mixtral", {}, "full", 0),
        ("mixtral", {}, "selective", 0),
        # no weight needs it
        ("mixtral", {"freeze": ["attention"]}, "none", 0),
        ("mixtral", LORA, "none", 1),
        ("mixtral", LORA | {"base_dtype": "nf4"}, "none", 1),
        # once for layers that are divided and projections that every rank computes alike; MLPs are regions too
        ("deepseek_v2", {}, "none", 1),
    ],
    ids=str,
)
def test_gathered_once_more(
    ranks: RankPool, tmp_path: Path, family: str, settings: dict[str, Any], checkpointing: Any, more: int
) -> None:
    tiny_model(family, seed=1).save_pretrained(tmp_path)
    case = Case(SAMPLES, family=family, settings=settings, gradient_checkpointing=checkpointing)
    for kept, ours in ranks.run(_figures, 2, tmp_path, case):
        (loss, grads, gathers, _), (our_loss, our_grads, our_gathers, regions) = kept, ours
        assert our_loss == loss
        assert grads.keys() == our_grads.keys()
        assert all(torch.equal(our_grads[name], grad) for name, grad in grads.items())
        assert our_gathers - gathers == more * regions


def _figures(path: Path, case: Case) -> list[tuple[float, dict[str, Tensor], int, int]]:
    """With all positions kept, and without: loss, gradients, all-gathers, and how many regions have run."""
    figures = []
    for is_kept in (True, False):
        model, mesh, _ = sharded_model(path, TP_2, case)
        model.train()
        all_gather, sizes = TPGroup.all_gather, list[int]()

        def counting(group: TPGroup, x: Tensor, dim: int, plain: Any = all_gather, sizes: Any = sizes) -> Tensor:
            sizes.append(x.numel())
            gathered: Tensor = plain(group, x, dim)
            return gathered

        batches = my_batches(case, TP_2, dist.get_rank(), mesh.cp_group)
        with mock.patch.object(TPGroup, "all_gather", counting), ExitStack() as stack:
            if is_kept:
                stack.enter_context(mock.patch.object(tensor_parallel, "is_kept_otherwise", return_value=True))
            result = compute_gradients(model, batches, LossWeights(0.0, 0.0))
        grads = in_full({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        regions = len(model.tensor_parallel.regions) * len(batches)
        figures.append((result.loss, grads, len(sizes), regions))
    return figures

"""Which balancing acts, where it comes from, and what a bias's update is."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.experts.router_stats import Routing
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.loss.balance import BiasUpdate, choose_balance
from tests.distributed.pool import RankPool
from tests.families.configs import tiny_config


def balance(family: str, changes: dict[str, Any] | None = None, **settings: Any) -> Any:
    config = tiny_config(family, **(changes or {}))
    return choose_balance(TrainConfig(model="m", dataset=["d"], **settings), build_model(config), config)


@pytest.mark.parametrize(
    ("family", "changes", "settings", "line"),
    [
        ("mixtral", {}, {}, "routers: balancing loss 0 (config.json does not set output_router_logits)"),
        (
            "mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.001}, {},
            "routers: balancing loss 0.001 (config.json, which sets output_router_logits)",
        ),
        (
            "mixtral", {"output_router_logits": True}, {"router_aux_loss_coef": 0.0},
            "routers: balancing loss 0 (--router-aux-loss-coef)",
        ),
        (
            "qwen3_moe", {},
            {"router_aux_loss_coef": 0.01, "router_aux_loss_per_layer": True, "router_z_loss_coef": 0.001},
            "routers: balancing loss 0.01 (--router-aux-loss-coef), each layer separately, z-loss 0.001",
        ),
        ("deepseek_v3", {}, {}, "routers: balancing loss 0 (DeepseekV3ForCausalLM has none), router bias constant"),
        (
            "deepseek_v3", {}, {"router_bias_update_rate": 0.001},
            "routers: balancing loss 0 (DeepseekV3ForCausalLM has none), router bias changes by 0.001 per step",
        ),
    ],
)  # fmt: skip
def test_first_line(family: str, changes: dict[str, Any], settings: dict[str, Any], line: str) -> None:
    assert balance(family, changes, **settings).line() == line


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        (
            "deepseek_v3",
            {"router_aux_loss_coef": 0.01},
            "has no balancing loss; --router-bias-update-rate 0.001 balances",
        ),
        ("deepseek_v2", {"router_aux_loss_coef": 0.01}, "has no balancing loss; leave it out"),
        (
            "mixtral",
            {"router_bias_update_rate": 0.001},
            "no correction bias; use --router-aux-loss-coef instead",
        ),
        ("zaya", {"router_z_loss_coef": 0.01}, "--router-z-loss-coef: the routers of zaya give no logit"),
        ("mixtral", {"router_bias_update_rate": -1.0}, r"--router-bias-update-rate -1\.0: must be 0 or more"),
    ],
)
def test_what_a_family_has_not_got_is_refused(family: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ExpertMeshError, match=said):
        balance(family, **settings)


def _updated(counts: list[list[list[int]]]) -> list[list[float]]:
    """Biases of zero after one step, in which each rank has its own part of the counts."""
    model = build_model(tiny_config("deepseek_v3"))
    counts_LE = torch.tensor(counts[dist.get_rank()])
    BiasUpdate(model, 0.5).step(Routing(counts_LE, torch.zeros(2), torch.zeros(2)))
    return [model.get_buffer(layer.correction_bias).tolist() for layer in moe_layers(model)]


def test_bias_follows_the_load_of_all_ranks(ranks: RankPool) -> None:
    """Up for less than the mean of a layer, down for more, still at the mean; ranks by themselves would say else."""
    first = [[9, 0, 3, 4, 4, 4, 4, 4], [0, 0, 0, 0, 0, 0, 0, 8]]
    second = [[0, 9, 5, 4, 4, 4, 4, 2], [1, 1, 1, 1, 1, 1, 1, 0]]
    found = ranks.run(_updated, 2, [first, second])
    assert found[0] == found[1]
    assert found[0] == [[-0.5, -0.5, 0, 0, 0, 0, 0, 0.5], [0.5] * 7 + [-0.5]]

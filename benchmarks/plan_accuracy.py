"""How right the planner is: `python -m benchmarks.plan_accuracy`.

Measured: settings of small random models on this machine's CPU, each on ranks of their own that are started afresh.
The peak is VmHWM, the most that a rank's process ever held resident, less what it held before its model was built and
after a warm-up step of a one-layer model, so that libraries have made their buffers. Memory that is freed goes straight
back (MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ of glibc are 64 KiB): malloc keeps what it likes otherwise, and
the last column says how much that was. Bytes are counted at the collectives of one step. Every expert gets equally many
tokens, as the forecast assumes.
"""

from dataclasses import replace
from typing import Any

import torch

from moe import KERNELS, build_model, family_of, moe_blocks
from moe.router import Router, Routing, count_experts
from sharding import (
    Mesh,
    build_mesh,
    local_tensor,
    materialize,
    parallelize,
)
from sharding.planner.setting import Setting
from training import TrainConfig, attach_loss_head
from training.data import Batch, Sample, collate
from training.optimizer import build_optimizer
from training.step import LossWeights

NO_LOSSES = LossWeights(0.0, 0.0)


def balance_routing(model: Any) -> None:
    """Have token t choose experts t·K, t·K + 1, ... in place of the router's, all of which then get equally many."""

    def chosen_in_turn(router: Router, inputs: Any, routing: Routing) -> Routing:
        num_choices = routing.experts_TK.numel()
        device = routing.experts_TK.device
        experts_TK = (torch.arange(num_choices, device=device) % router.num_experts).view_as(routing.experts_TK)
        stats = replace(routing.stats, counts_E=count_experts(experts_TK, router.num_experts))
        return replace(routing, experts_TK=experts_TK, stats=stats)

    for block in moe_blocks(model):
        block.router.register_forward_hook(chosen_in_turn)


def full_batch(setting: Setting, vocabulary: int, seed: int) -> Batch:
    """Random tokens that fill every row; all but the first of a row are learned."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, vocabulary, (setting.micro_batch, setting.seq_length), generator=generator)
    return collate([[Sample.of_prompt(row.tolist(), 0)] for row in rows])


def build_run(config: Any, setting: Setting, device: torch.device) -> tuple[Any, torch.optim.Optimizer, Mesh]:
    """A random model with balanced routing on the ranks of the process group, its optimizer, and the mesh."""
    dtype = torch.bfloat16 if setting.bf16 else torch.float32
    model: Any = build_model(family_of(config.model_type, "config"), config, KERNELS[setting.expert_kernel])
    attach_loss_head(model, "chunked")
    if setting.optimizer == "adamw_bf16":
        model.to(torch.bfloat16)
    mesh = build_mesh(device.type, setting.topology)
    parallelize(model, mesh, dtype, setting.checkpointing == "full")
    materialize(model, device)
    for parameter in model.parameters():
        torch.nn.init.normal_(local_tensor(parameter.detach()), std=0.02)
    balance_routing(model)
    flags = TrainConfig(
        model="-",
        dataset=["-"],
        learning_rate=1e-5,
        optim=setting.optimizer,
        bf16=setting.bf16,  # type: ignore[arg-type]
    )
    return model, build_optimizer(model.train(), flags, mesh), mesh

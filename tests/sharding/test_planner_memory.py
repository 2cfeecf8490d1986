"""What the planner says that a rank holds, against real runs on CPUs."""

from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.plan_accuracy import NO_LOSSES, balance_routing, build_run, full_batch
from expertmesh.moe.experts.model_layers import decoder_layers, moe_layers
from expertmesh.sharding.parallelize.recompute import checkpoint_layers
from expertmesh.sharding.state import local_tensor
from expertmesh.training.micro_batch import token_loss_sum
from expertmesh.training.planning.memory import CONTEXT, RING, Memory
from expertmesh.training.planning.planner import peak_memory
from expertmesh.training.planning.planner.peak_memory import peak
from expertmesh.training.planning.planner.step_order import ROOT, Name
from expertmesh.training.planning.rehearsal.building import build_rehearsed
from expertmesh.training.step import compute_gradients, train_step
from tests.distributed.pool import RankPool
from tests.sharding.planned import ODD_SIZES, allocated, flags_of, tiny_run
from tests.tiny import in_memory, tiny_config

BIG = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}
CPU = torch.device("cpu")


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of all storages, each once."""
    there = [t.untyped_storage() for t in tensors if t is not None and not t.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in there}.values())


def measure_lasting(world_size: int, flags: dict[str, Any], sizes: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state on this rank after a step."""
    config, model_config = flags_of(**flags), tiny_config(**sizes)
    model, optimizer, mesh = build_run(config, model_config, world_size, CPU)
    batch = full_batch(config, model_config.vocab_size, dist.get_rank(), mesh.cp_group)
    train_step(model, optimizer, [batch], mesh, NO_LOSSES, 1.0)
    parameters = list(model.parameters())
    state = [t for p in parameters if p in optimizer.state for t in optimizer.state[p].values() if t.dim() > 0]
    return (
        storage_bytes(local_tensor(p.detach()) for p in parameters),
        storage_bytes(local_tensor(p.grad) for p in parameters if p.grad is not None),
        sum(local_tensor(t).nbytes for t in state),
    )


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("world_size", "flags", "sizes"),
    [
        (4, {"ep_size": 2}, {}),
        (4, {"ep_size": 2}, ODD_SIZES),
        (4, {"ep_size": 4, "dense_shard": "hybrid"}, ODD_SIZES),
        (2, {"optim": "adamw_bf16"}, {}),
        (2, {"ep_size": 2, "optim": "adamw_torch_8bit"}, {"hidden_size": 256}),
        (2, {"ep_size": 2, "adapter": "lora"}, ODD_SIZES),
        (2, {"adapter": "lora", "base_dtype": "nf4"}, {}),
        (2, {"ep_size": 2, "freeze": ("experts",)}, {}),
        (4, {"ep_size": 2, "tp_size": 2}, ODD_SIZES | {"num_key_value_heads": 2}),
        (4, {"ep_size": 4, "tp_size": 2, "dense_shard": "hybrid"}, ODD_SIZES | {"num_key_value_heads": 2}),
    ],
    ids=["ep2", "odd-sizes", "hybrid", "bf16-state", "8-bit-state", "lora", "nf4", "frozen", "tp", "tp-hybrid"],
)
def test_what_lasts(ranks: RankPool, world_size: int, flags: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Rank 0 holds the most of every parameter."""
    found = ranks.run(measure_lasting, world_size, world_size, flags, sizes)[0]
    units = tiny_run(world_size, flags, sizes).units.values()
    expected = sum(u.stored for u in units), sum(u.gradient for u in units), sum(u.state for u in units)
    assert found == expected


def measure_gathered(flags: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Bytes of a layer's, its experts' and the root's parameters, while each layer's experts compute."""
    config, model_config = flags_of(**flags), tiny_config(**ODD_SIZES)
    model, _, _ = build_run(config, model_config, 4, CPU)
    found = []
    layer_of = {experts.mlp: layer for layer in decoder_layers(model) for experts in moe_layers(layer)}

    def look(experts: Any, *_: Any) -> None:
        layer = layer_of[experts]
        own = {id(p) for p in experts.parameters()}
        inside = {id(p) for each in layer_of.values() for p in each.parameters()}
        found.append(
            (
                storage_bytes(p.detach() for p in layer.parameters() if id(p) not in own),
                storage_bytes(local_tensor(p.detach()) for p in experts.parameters()),
                storage_bytes(p.detach() for p in model.parameters() if id(p) not in inside),
            )
        )

    for experts in layer_of:
        experts.register_forward_pre_hook(look)
    compute_gradients(model, [full_batch(config, model_config.vocab_size, dist.get_rank())], NO_LOSSES)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("flags", [{"ep_size": 2}, {"ep_size": 2, "bf16": True}], ids=["fp32", "bf16"])
def test_gathered_parameters(ranks: RankPool, flags: dict[str, Any]) -> None:
    units = tiny_run(4, flags, ODD_SIZES).units
    expected = tuple(units[name].gathered for name in (Name("layer", 0), Name("experts", 0), ROOT))
    for found in ranks.run(measure_gathered, 4, flags):
        assert found == [expected] * 2


def plain_model(flags: dict[str, Any]) -> Any:
    """The model of one process, without FSDP."""
    config = flags_of(**flags)
    model = in_memory(build_rehearsed(config, tiny_config(**BIG), "cpu"))
    checkpoint_layers(model, config.gradient_checkpointing)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    balance_routing(model)
    return model.train()


@pytest.mark.sample(3)
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_activations(mode: str) -> None:
    """What is allocated once forward is done: what layers keep, and what is around them."""
    flags = {"max_seq_length": 128, "gradient_checkpointing": mode}
    model = plain_model(flags)
    batch = full_batch(flags_of(**flags), 2048, seed=0)
    # held, so that nothing of it is freed under the measurement's eyes
    before = token_loss_sum(model, batch)
    # the routing statistics are let go of before backward
    _, kept, _ = allocated(lambda: token_loss_sum(model, batch))
    assert before.requires_grad
    measured = tiny_run(1, flags, BIG).measured
    assert kept == pytest.approx(2 * measured.kinds[0].kept + measured.around.after[-1].end, rel=0.03)


def test_terms_add_up() -> None:
    most = peak(tiny_run(4, {"ep_size": 2}))
    assert most.memory.total == sum(most.memory.terms().values()) == pytest.approx(most.tensors)
    assert Memory(parameters=1, gradients=2, optimizer=3, working=4).lasting == 6


def test_a_gpu_needs_more_than_its_tensors() -> None:
    run = tiny_run(4, {"ep_size": 2, "bf16": True}, device="cuda")
    assert peak(run).memory.total > peak(run).tensors + CONTEXT + 2 * RING


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_bf16"])
def test_sums_over_replicas_wait_for_the_end_of_backward(optim: str) -> None:
    """FSDP keeps them, in fp32, beside gradients of another dtype; gradients in fp32 are these sums themselves."""
    flags = {"ep_size": 2, "dense_shard": "hybrid", "optim": optim, "bf16": True}
    run, waiting = tiny_run(4, flags, device="cuda"), [0.0]
    add = peak_memory._Rank._sum

    def noted(self: Any, *given: Any) -> None:
        add(self, *given)
        waiting.append(self.summed)

    with mock.patch.object(peak_memory._Rank, "_sum", noted):
        peak(run)
    of_replicas = sum(4 * unit.trained for unit in run.units.values() if unit.replicas > 1)
    assert max(waiting) == (of_replicas if optim == "adamw_bf16" else 0)
    assert of_replicas > 0

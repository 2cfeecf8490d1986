"""What the planner says that a rank holds, against real runs on CPUs."""

import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.plan_accuracy import NO_LOSSES, build_run, full_batch
from benchmarks.variants import balance_routing
from expertmesh.sharding.parallelize.recompute import checkpoint_layers
from expertmesh.sharding.state import local_tensor
from expertmesh.training.planning.memory import CONTEXT, RING, Memory
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.rehearsal.building import build_rehearsed
from expertmesh.training.planning.rehearsal.engine import account_of
from expertmesh.training.steps.micro_batch import token_loss_sum
from expertmesh.training.steps.step import train_step
from tests.distributed.pool import RankPool
from tests.sharding.planned import ODD_SIZES, allocated, cluster_of, flags_of, tiny_account, tiny_forecasts
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
    in_state = (t for p in parameters for t in optimizer.state.get(p, {}).values())
    state = [t for t in in_state if isinstance(t, Tensor)]
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
    """Parameters, gradients and optimizer state of a rank."""
    found = ranks.run(measure_lasting, world_size, world_size, flags, sizes)[0]
    memory = tiny_account(world_size, flags, sizes).memory
    # a gradient is as large as its parameter; the peak may be where there is none yet
    assert found == (memory.parameters, memory.trained, memory.state)


def plain_model(flags: dict[str, Any], layers: int) -> Any:
    """The model of one process, without FSDP."""
    config = flags_of(**flags)
    model = in_memory(build_rehearsed(config, tiny_config(**BIG, num_hidden_layers=layers), "cpu"))
    checkpoint_layers(model, config.gradient_checkpointing)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    balance_routing(model)
    return model.train()


@pytest.mark.sample(3)
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_activations(mode: str) -> None:
    """What two layers more keep from forward to backward."""
    flags = {"max_seq_length": 128, "gradient_checkpointing": mode}
    kept = []
    for layers in (2, 4):
        model = plain_model(flags, layers)
        batch = full_batch(flags_of(**flags), 2048, seed=0)
        # held, so that nothing of it is freed under the measurement's eyes
        before = token_loss_sum(model, batch)
        gc.collect()
        kept.append(allocated(lambda: token_loss_sum(model, batch))[1])  # noqa: B023, called at once
        assert before.requires_grad
    # routing statistics, of 256 tokens and 8 experts, are let go of before backward
    statistics = 2 * 256 * 8 * 4
    expected = 2 * tiny_account(1, flags, BIG).layer_costs["0"].kept
    assert kept[1] - kept[0] == pytest.approx(expected, rel=0.03, abs=statistics)


def test_terms_add_up() -> None:
    most = tiny_account(4, {"ep_size": 2}).memory
    assert most.kinds.total == sum(most.kinds.terms().values()) == most.peak
    assert Memory(parameters=1, gradients=2, optimizer=3, working=4).lasting == 6


def test_a_gpu_needs_more_than_its_tensors() -> None:
    account = tiny_account(4, {"ep_size": 2, "bf16": True}, device="cuda")
    assert account.fit(8e10).total > account.memory.peak + CONTEXT + 2 * RING


def test_a_dry_run_of_a_pipeline_has_its_update() -> None:
    """In one whose counts come out as none the step would be skipped."""
    account = tiny_account(2, {"pp_size": 2, "gradient_accumulation_steps": 2}, device="cuda")
    assert account.memory.state == pytest.approx(2 * account.memory.trained, rel=0.01)
    assert account.time.update > 0


@pytest.mark.slow
def test_what_settings_keep_and_what_they_move_to_the_host() -> None:
    """Inputs of checkpointed layers leave the card; kept products of experts do not."""

    def kept(**flags: Any) -> float:
        settings = {"gradient_checkpointing": "selective", "bf16": True, "max_seq_length": 128, **flags}
        return tiny_account(2, settings, BIG, "cuda").memory.kinds.activations

    assert kept(keep_expert_products=2) > kept() > kept(offload_activations=True)


@pytest.mark.slow
def test_kept_products_of_a_short_model_are_those_of_the_complete_one() -> None:
    """Of its last layers: more than a short model has, and of some that are like no others."""
    layers = BIG | {"num_hidden_layers": 24}
    for number in (3, 12):
        flags = {"gradient_checkpointing": "selective", "bf16": True, "keep_expert_products": number}
        forecasts, asked = tiny_forecasts(layers, "cuda"), Asked(flags_of(**flags), 2, cluster_of())
        settled = forecasts.settled(asked)
        every = account_of(settled, tiny_config(**layers), forecasts.facts(settled.config), every_layer=True)
        short = forecasts.account(asked)
        assert short.run < every.run == 24
        assert short.memory.peak == pytest.approx(every.memory.peak, rel=1e-3)
        assert short.total.flops == pytest.approx(every.total.flops)


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_bf16"])
def test_gradients_of_earlier_micro_batches_are_gradients(optim: str) -> None:
    """Whether later ones are added to them in place or replace them: of that a pipeline's share is taken."""
    flags = {"optim": optim, "bf16": True, "gradient_accumulation_steps": 2}
    memory = tiny_account(2, flags, BIG, "cuda").memory
    assert memory.kinds.gradients == memory.trained

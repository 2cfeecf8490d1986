"""An update that is queued before the host knows the step's figures, as on a GPU, against one that waits for them."""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import expertmesh.training.steps.step
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.loss.balance import BiasUpdate, LossWeights
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.rehearsal.world import rehearse
from expertmesh.training.steps.step import (
    Gradients,
    StepResult,
    StepSums,
    _queue_step,
    squares_and_lacking,
    train_step,
)
from tests.distributed.pool import RankPool
from tests.distributed.reference import config_of, my_batches, sharded_model, train_config
from tests.distributed.test_nonfinite import EXPERTS, Poison, tell_poisoned
from tests.distributed.whole_runs import (
    SIX_STEPS,
    Runs,
    Told,
    assert_equal_weights,
    assert_same_bits,
    batch_of_12,
    tell,
)
from tests.families.configs import tiny_config
from tests.parity.case import Case, hf_model, random_samples
from tests.rounding import near
from tests.tiers import tiered
from tests.training.dry_runs import CLUSTER

COMMON = f"{SIX_STEPS} {batch_of_12(2)} --ep-size 2 --on-nonfinite skip --save-steps 0 --router-aux-loss-coef 0.01"
POISON = Poison("gradient", EXPERTS, 1, frozenset({0, 3}))


def queueing(argv: list[str], poison: Poison | None = None, lacks: bool = False) -> Told:
    """A run that takes the path of GPUs. lacks: a rank says in each step that it lacks gradients."""
    queued: list[bool] = []

    def queue_step(*args: Any) -> bool:
        queued.append(_queue_step(*args))
        return queued[-1]

    def lacking(*args: Any) -> torch.Tensor:
        return squares_and_lacking(*args) - torch.tensor([0.0, 1.0 if lacks else 0.0])

    with (
        mock.patch.object(expertmesh.training.steps.step, "computes_on_cpu", return_value=False),
        mock.patch.object(expertmesh.training.steps.step, "_queue_step", queue_step),
        mock.patch.object(expertmesh.training.steps.step, "squares_and_lacking", lacking),
    ):
        found = tell(argv) if poison is None else tell_poisoned(argv, poison)
    assert queued == [True] * 6
    return found


def test_a_step_that_is_skipped_on_the_device_leaves_no_trace(runs: Runs) -> None:
    """Gradients are divided by 1, so that all bits are alike."""
    flags = f"{COMMON} --max-grad-norm 0"
    expected = runs(2, flags, "waiting", call=tell_poisoned, given=[POISON])
    found = runs(2, flags, "queued", call=queueing, given=[POISON])
    assert [line.get("skipped_steps", 0) for line in found.lines()] == [1, 0, 0, 1, 0, 0]
    assert found.values("loss") == expected.values("loss")
    assert_same_bits(found.weights, expected.weights)


@pytest.mark.parametrize("spoilt", [None, 0, 1, 2, 3, 4])
def test_the_device_skips_what_the_host_calls_not_finite(spoilt: int | None) -> None:
    """Losses and the norm; a figure of a loss of one's own, number 3 here, is for reading alone."""
    sums = torch.tensor([2.0, 0.1, 0.2, 0.9, 4.0, 0.0, 0.0], dtype=torch.float64)
    if spoilt is not None:
        sums[spoilt] = torch.nan
    skipped: list[float] = []
    optimizer = mock.Mock(param_groups=[{"params": [torch.zeros(1)]}])
    optimizer.queue_step = lambda scale, is_skipped: skipped.append(float(is_skipped))
    with mock.patch.object(expertmesh.training.steps.step, "computes_on_cpu", return_value=False):
        assert _queue_step(optimizer, sums, 1.0)
    loss, balance, z, _, square, _, _ = sums.tolist()
    result = StepResult(loss, balance, z, math.sqrt(square), 1, 1, (), mock.Mock())
    assert skipped == [float(not result.is_finite)] == [float(spoilt in (0, 1, 2, 4))]


def test_the_host_waits_for_the_norm_and_not_for_the_update() -> None:
    """In the order of a device's queue, a wait lasts until what was queued before the event that it is for."""
    queue: list[str] = []
    event = mock.Mock(record=lambda: queue.append("event"), synchronize=lambda: queue.append("wait"))
    optimizer = mock.Mock(param_groups=[{"params": [torch.zeros(1)]}])
    optimizer.queue_step = lambda scale, is_skipped: queue.append("update")
    sums = torch.tensor([2.0, 0.1, 0.2, 4.0, 0.0, 0.0], dtype=torch.float64)
    gradients = mock.Mock(counts=mock.Mock(counted=1.0), result=lambda losses, *_: mock.Mock(losses=losses))
    with (
        mock.patch.object(torch.cpu, "Event", return_value=event),
        mock.patch.multiple(
            expertmesh.training.steps.step,
            computes_on_cpu=mock.Mock(return_value=False),
            step_gradients=mock.Mock(return_value=gradients),
            squares_and_lacking=mock.Mock(),
            moe_layers=mock.Mock(return_value=[]),
        ),
        mock.patch.object(StepSums, "packed", return_value=sums),
        mock.patch.object(dist, "all_reduce"),
    ):
        weights = LossWeights(0.05, 0.0, False)
        result: Any = train_step(mock.Mock(), optimizer, [mock.Mock()], mock.Mock(), weights, 1.0)
    assert queue == ["event", "update", "wait"]
    assert result.losses.loss == 2.0


STATES: dict[str, tuple[Topology, dict[str, Any]]] = {
    "queued, 8 bit, bias": (Topology(2, 2), {"optim": "adamw_torch_8bit", "router_bias_update_rate": 0.01}),
    "8 bit, bias": (Topology(2, 2), {"optim": "adamw_torch_8bit", "router_bias_update_rate": 0.01}),
    "queued, bias": (Topology(2, 2), {"router_bias_update_rate": 0.01}),
    "queued, bf16": (Topology(2, 2), {"optim": "adamw_bf16", "bf16": True}),
    "bf16": (Topology(2, 2), {"optim": "adamw_bf16", "bf16": True}),
    "queued, muon, pp": (Topology(2, 1, pp_size=2), {"optim": "muon"}),
    "muon, pp": (Topology(2, 1, pp_size=2), {"optim": "muon"}),
    "shampoo": (Topology(2, 2), {"optim": "shampoo", "shampoo_start": 1, "shampoo_frequency": 1}),
    "LoRA, pp": (Topology(2, 1, pp_size=2), {"adapter": "lora", "optim": "adamw_torch_8bit"}),
    "offload": (Topology(2, 2), {"offload": True}),
}


def _states(path: Path, topology: Topology, case: Case, is_queued: bool) -> list[dict[str, torch.Tensor]]:
    """All that a rank trains, and the optimizer's state of it: after a step, after one that is skipped, and after
    another."""
    model, mesh, _ = sharded_model(path, topology, case)
    config = config_of(case, topology)
    optimizer = build_optimizer(model.train(), config, mesh)
    rate = config.router_bias_update_rate
    bias_update = BiasUpdate(model, rate) if rate else None
    batches = my_batches(case, topology, dist.get_rank(), mesh.cp_group)
    step_gradients = expertmesh.training.steps.step.step_gradients

    def spoilt(*given: Any) -> Gradients:
        found = step_gradients(*given)
        if dist.get_rank() == topology.world_size - 1:
            gradient = next(p.grad for p in model.parameters() if p.grad is not None and local_tensor(p.grad).numel())
            local_tensor(gradient).view(-1)[0] = torch.inf
        return found

    found = []
    for calls in (step_gradients, spoilt, step_gradients):
        with (
            mock.patch.object(expertmesh.training.steps.step, "step_gradients", calls),
            mock.patch.object(expertmesh.training.steps.step, "computes_on_cpu", return_value=not is_queued),
        ):
            result = train_step(model, optimizer, batches, mesh, LossWeights(0.05, 0.0, False), 1.0, bias_update)
        assert result.is_finite == (calls is step_gradients)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, parameter in model.named_parameters():
            tensors |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
        found.append({name: local_tensor(t.detach()).clone() for name, t in tensors.items() if not t.is_meta})
    return found


@pytest.mark.parametrize("name", tiered([*STATES][:1], release=[*STATES][1:]))
def test_a_skipped_step_moves_no_bit(ranks: RankPool, tmp_path: Path, name: str) -> None:
    topology, settings = STATES[name]
    samples = random_samples([9 + (5 * i) % 12 for i in range(16)])
    changes = {"num_hidden_layers": 4} if topology.pp_size > 1 else {}
    case = Case(samples, balance=0.05, accumulation=2, settings=settings, changes=changes)
    hf_model(case).save_pretrained(tmp_path)
    for first, second, third in ranks.run(_states, 2, tmp_path, topology, case, name.startswith("queued")):
        assert first.keys() == second.keys()
        moved = [key for key in first if not torch.equal(first[key], second[key])]
        assert not moved
        assert any(not torch.equal(first[key], third[key]) for key in first)


@pytest.mark.parametrize("optim", tiered(["muon"], slow=["adamw_torch_fused", "adamw_torch_8bit"]))
def test_queued_steps_of_all_meshes_are_steps(ranks: RankPool, tiny_model: Path, optim: str) -> None:
    """Gradients are divided by a power of two, so that no bit depends on when; one parameter has none at first."""
    for found in ranks.run(_queued_and_not, 2, tiny_model, optim):
        for name, (queued, plain) in found.items():
            assert torch.equal(queued, plain), name


def _queued_and_not(path: Path, optim: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """This rank's parts of parameters and of their state after steps that are queued, two of which are skipped, and
    after the others."""
    settings = {"optim": optim, "learning_rate": 1e-3}
    found: list[dict[str, torch.Tensor]] = []
    for is_queued in (True, False):
        model, mesh, _ = sharded_model(path, Topology(2, 2), Case([], settings=settings))
        optimizer: Any = build_optimizer(model, train_config(**settings), mesh)
        torch.manual_seed(dist.get_rank())
        for step, is_skipped in enumerate((True, False, True, False)):
            for name, parameter in model.named_parameters():
                parameter.grad = torch.zeros_like(parameter)
                local_tensor(parameter.grad).normal_().mul_(4.0 if is_queued else 1.0)
                if is_skipped:
                    local_tensor(parameter.grad).view(-1)[:1] = torch.nan
                if step < 2 and "k_proj" in name:
                    parameter.grad = None
            if is_queued:
                optimizer.queue_step(torch.tensor(4.0), torch.tensor(float(is_skipped)))
            elif not is_skipped:
                optimizer.step()
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            tensors[name] = parameter.detach()
            tensors |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
        found.append({name: local_tensor(tensor) for name, tensor in tensors.items()})
    queued, plain = found
    assert queued.keys() == plain.keys()
    return {name: (queued[name], plain[name]) for name in plain}


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch_8bit", "muon"])
def test_gradients_are_scaled_on_the_device(runs: Runs, optim: str) -> None:
    flags = f"{COMMON} --optim {optim}"
    expected, found = runs(2, flags, "waiting"), runs(2, flags, "queued", call=queueing)
    assert min(found.values("grad_norm")) > 1.0, "nothing was clipped"
    assert found.values("grad_norm") == near(expected.values("grad_norm"))
    assert_equal_weights(found.weights, expected.weights)


@pytest.mark.slow
def test_where_gradients_are_lacking_the_update_comes_after_they_are_agreed_on(runs: Runs) -> None:
    expected = runs(2, COMMON, "waiting")
    assert_same_bits(runs(2, COMMON, "lacking", call=queueing_lacking).weights, expected.weights)


def queueing_lacking(argv: list[str]) -> Told:
    return queueing(argv, lacks=True)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("mixtral", {"router_aux_loss_coef": 0.02, "gradient_accumulation_steps": 2}),
        ("mixtral", {"cp_size": 2, "optim": "adamw_torch_8bit"}),
        ("mixtral", {"dispatch": "rank", "gradient_checkpointing": "selective"}),
        ("olmoe", {"tp_size": 2, "adapter": "lora"}),
        ("mixtral", {"optim": "muon"}),
    ],
)
def test_the_host_waits_once_a_step_and_once_a_moe_layer(family: str, more: dict[str, Any]) -> None:
    """Of several micro-batches a dry run has one."""
    layers = 2
    common: dict[str, Any] = {"bf16": True, "ep_size": 4, "per_device_train_batch_size": 1, "max_seq_length": 64}
    config = TrainConfig(model="-", dataset=["-"], **common, **more)
    found = rehearse(Asked(config, 8, CLUSTER), tiny_config(family, num_hidden_layers=layers))
    assert found.recorder.waits == 1 + layers

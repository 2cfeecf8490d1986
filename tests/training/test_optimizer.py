"""Low-bit AdamW and Muon's iteration against torch and torchao; every learning rate schedule, whole and resumed."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.trainer_utils import SchedulerType

from expertmesh.checkpoints.training_state.saving import Progress
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.optimizers import block_size
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.optim import low_bit as low_bit_module
from expertmesh.training.optim.low_bit import (
    AdamW8bit,
    AdamWBf16,
    Update,
    _AdamW,
    dynamic_map,
    position_bits,
    random_bits,
    round_to_bf16,
)
from expertmesh.training.optim.muon import newton_schulz
from expertmesh.training.optim.schedule import (
    build_scheduler,
    check_schedule,
    num_warmup_steps,
    resume_scheduler,
    step_scheduler,
)
from tests.rounding import OTHER_ORDER, near
from tests.tiny import relative_error

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}


# Optimizers


def gradients(size: tuple[int, ...], count: int, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * 0.1**step for step in range(count)]


def trained(optimizer: torch.optim.Optimizer, parameter: Tensor, grads: list[Tensor]) -> Tensor:
    for grad in grads:
        parameter.grad = grad.to(parameter.dtype)
        optimizer.step()
    return parameter.detach()


BOTH = (torch.optim.AdamW, AdamW8bit)


def changes(kind: Any, start: Tensor, grads: list[Tensor], weight_decay: float) -> Tensor:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = kind([{"params": [parameter], "weight_decay": weight_decay}], **SETTINGS)
    return trained(optimizer, parameter, grads) - start


@pytest.mark.parametrize("size", [(6, 60), (37,)])
def test_adamw_without_blocks_is_torchs(size: tuple[int, ...]) -> None:
    """Rows that are no multiple of a block keep fp32 state."""
    start = torch.randn(size)
    expected, found = (changes(kind, start, gradients(size, 5), 0.1) for kind in BOTH)
    assert relative_error(found, expected) < OTHER_ORDER


@pytest.mark.parametrize(
    ("signed", "total", "squares", "entries"),
    [
        (True, 1.0, 48.59583767, {0: -0.99296874, 1: -0.97890627, 64: -0.09859375, 127: 0.0, 128: 5.5e-7, 255: 1.0}),
        (False, 75.10526324, 48.5974521, {0: 0.0, 1: 3.3e-7, 64: 0.01210938, 128: 0.11054687, 255: 1.0}),
    ],
)
def test_8bit_map_is_torchaos(signed: bool, total: float, squares: float, entries: dict[int, float]) -> None:
    """Figures read from torchao 0.18."""
    values = dynamic_map(signed, torch.device("cpu"))[0].double()
    assert len(values) == 256
    magnitudes = float(values.abs().sum())
    assert float(values.sum()) == near(total, magnitudes)
    assert float(values.square().sum()) == near(squares)
    assert {i: float(values[i]) for i in entries} == pytest.approx(entries, rel=1e-6, abs=1e-8), "no sums, but as read"


def test_8bit_adamw_is_torchaos() -> None:
    """torchao's own step, uncompiled, with its own 8-bit state, where it is installed: the same codes and weights."""
    pytest.importorskip("torchao")
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    start, grads = torch.randn(16, 512), gradients((16, 512), 5)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = AdamW8bit([{"params": [parameter], "weight_decay": 0.1}], **SETTINGS)
    trained(optimizer, parameter, grads)
    expected, step = start.clone(), torch.tensor(0.0)
    mean, square = OptimState8bit.zeros(start.shape, True), OptimState8bit.zeros(start.shape, False)
    for grad in grads:
        step += 1
        single_param_adam(
            expected, grad, step, mean, square, None, torch.tensor(1e-3), 0.9, 0.999, 0.1, 1e-8, True, False
        )
    assert relative_error(parameter.detach() - start, expected - start) < 1e-4
    for name, moment in (("exp_avg", mean), ("exp_avg_sq", square)):
        assert torch.equal(dynamic_map(moment.signed, torch.device("cpu"))[0], moment.qmap)
        # fp32 noise takes a value at a border to the other side now and then
        assert (optimizer.state[parameter][f"{name}_codes"] != moment.codes).float().mean() < 1e-3
        assert relative_error(optimizer.state[parameter][f"{name}_scales"].flatten(), moment.scale) < OTHER_ORDER


def test_block_sizes() -> None:
    """Block sizes of GPT-OSS's rows, Qwen1.5-MoE's, a small multiple of 256, and what has no block: a prime, an
    expert's vector."""
    shapes = [(4, 2880), (4, 1408), (4, 512), (4, 64), (4, 63), (4, 257), (2880,), (4, 256, 256)]
    assert [block_size(torch.Size(shape)) for shape in shapes] == [240, 176, 256, 64, None, None, None, None]


def low_bit(kind: str, parameters: list[torch.Tensor]) -> Any:
    groups: list[dict[str, Any]] = [{"params": parameters, "weight_decay": 0.1}]
    if kind == "8bit":
        return AdamW8bit(groups, **SETTINGS)
    rows = {parameter: (number, range(len(parameter))) for number, parameter in enumerate(parameters)}
    return AdamWBf16(groups, **SETTINGS, rows=rows, seed=3)


def trained_together(kind: str, steps: int) -> list[torch.Tensor]:
    """Parameters, the later of which have had fewer updates, and their state."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    sizes = [(4, 64), (4, 64), (65,), (4, 64), (65,)]
    parameters: list[torch.Tensor] = [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]
    together = low_bit(kind, parameters)
    for step in range(steps):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.randn_like(parameter) if step >= number else None
        together.step()
    assert [int(together.state[p]["step"]) for p in parameters] == [max(0, steps - n) for n in range(5)]
    state = [tensor for parameter in parameters for tensor in together.state[parameter].values()]
    return [*parameters, *state]


@pytest.mark.parametrize("kind", ["8bit", "bf16"])
def test_parameters_are_updated_together_as_one_by_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trained_together(kind, 7)

    def one_by_one(self: Any, stacks: list[list[torch.Tensor]], group: dict[str, Any]) -> list[Update]:
        updates = []
        for (parameter,) in stacks:
            self.state[parameter]["step"] += 1
            step = self.state[parameter]["step"].double()
            (beta1, beta2), lr = group["betas"], group["lr"]
            of_mean_P, of_square_P = ((1 - beta**step).float().view(1) for beta in (beta1, beta2))
            updates.append(Update(1 - beta1, 1 - beta2, of_mean_P, of_square_P, lr, 1 - lr * 0.1, group["eps"]))
        return updates

    monkeypatch.setattr(low_bit_module, "alike_size", lambda elements, number: 1)
    monkeypatch.setattr(_AdamW, "_updates", one_by_one)
    for ours, theirs in zip(found, trained_together(kind, 7), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["8bit", "bf16"])
def test_a_queued_step_divides_gradients_and_can_be_skipped(kind: str) -> None:
    """By a power of two, so that no bit depends on when; where it is skipped none moves."""
    torch.manual_seed(0)
    dtype, sizes = torch.bfloat16 if kind == "bf16" else torch.float32, [(4, 64), (4, 64), (65,)]
    start = [torch.randn(size).to(dtype) for size in sizes]
    queued, plain = ([torch.nn.Parameter(each.clone()) for each in start] for _ in range(2))
    of_queued, of_plain = low_bit(kind, [*queued]), low_bit(kind, [*plain])
    for is_skipped in (True, False, False, True, False):
        grads = [torch.randn_like(each) for each in start]
        for parameter, grad in zip(queued, grads, strict=True):
            parameter.grad = grad * (torch.nan if is_skipped else 4)
        of_queued.queue_step(torch.tensor(4.0), torch.tensor(float(is_skipped)))
        if not is_skipped:
            for parameter, grad in zip(plain, grads, strict=True):
                parameter.grad = grad
            of_plain.step()
        for ours, theirs in zip(queued, plain, strict=True):
            assert torch.equal(ours, theirs)
            assert all(torch.equal(of_queued.state[ours][name], x) for name, x in of_plain.state[theirs].items())


@pytest.mark.parametrize("kind", ["8bit", "bf16"])
def test_parameters_of_one_shape_take_a_few_operators(kind: str) -> None:
    """As many for 40 as for two."""

    class Calls(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += not operator.is_view
            return operator(*args, **(kwargs or {}))

    numbers = []
    for size in (2, 40):
        parameters: list[torch.Tensor] = [torch.nn.Parameter(torch.randn(2, 64)) for _ in range(size)]
        optimizer = low_bit(kind, parameters)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        with Calls() as calls:
            optimizer.step()
        numbers.append(calls.number)
    assert numbers[0] == numbers[1] > 0


def test_8bit_adamw_stays_near_fp32() -> None:
    start = torch.randn(16, 256)
    expected, found = (changes(kind, start, gradients((16, 256), 1) * 20, 0.0) for kind in BOTH)
    assert relative_error(found, expected) < 0.15


def bf16_adamw(parameter: Tensor, lr: float) -> AdamWBf16:
    groups = [{"params": [parameter], "weight_decay": 0.0}]
    return AdamWBf16(groups, lr, (0.9, 0.999), 1e-8, rows={parameter: (0, range(len(parameter)))}, seed=1)


def test_bf16_adamw_makes_updates_below_the_last_place() -> None:
    """100 updates of 1e-5 to weights of 1, where bf16 has steps of 4e-3 and 8e-3, are 1e-3 in the mean."""
    parameter = torch.nn.Parameter(torch.ones(500, 40, dtype=torch.bfloat16))
    weights = trained(bf16_adamw(parameter, lr=1e-5), parameter, [torch.ones(500, 40)] * 100)
    assert float(1 - weights.double().mean()) == pytest.approx(1e-3, rel=0.1)


def test_bf16_second_moment_falls() -> None:
    """Gradients become a tenth: rounded to nearest, the second moment would stay where it was."""
    size = (50, 40)
    parameter = torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16))
    optimizer = bf16_adamw(parameter, lr=1e-4)
    trained(optimizer, parameter, [torch.full(size, 1.0)])
    optimizer.state[parameter]["exp_avg_sq"].fill_(1.0)
    trained(optimizer, parameter, [torch.full(size, 0.1)] * 400)
    expected = 0.999**400 + 0.01 * (1 - 0.999**400)
    assert float(optimizer.state[parameter]["exp_avg_sq"].double().mean()) == pytest.approx(expected, rel=0.02)


def test_stochastic_rounding() -> None:
    """Every possible set of random bits gives one of the two neighbours, and their mean is the value."""
    bits = torch.arange(2**16, dtype=torch.int32)
    for value in (1.001, -1.001, 3.1e-20, 0.0, -2.0):
        x = torch.full((2**16,), value)
        rounded = round_to_bf16(x, bits).double()
        exact = float(x[0].double())
        assert float(rounded.mean()) == pytest.approx(exact, rel=1e-7)
        assert rounded.unique().numel() == (1 if exact in (0.0, -2.0) else 2)


def test_random_bits_depend_on_the_position_alone() -> None:
    key, like = torch.tensor(77, dtype=torch.int32), torch.empty(1000, 64)

    def bits(key: Tensor, start: int, like: Tensor) -> Tensor:
        return position_bits(key.view(1), torch.tensor([start], dtype=torch.int32), like.unsqueeze(0))[0]

    whole = bits(key, 0, like)
    parts = [bits(key, start, like[start:stop]) for start, stop in ((0, 333), (333, 333), (333, 1000))]
    assert torch.equal(torch.cat(parts), whole)
    # each half of the bits is uniform: mean 1/2, and hardly any value twice in 2^32
    for half in (whole & 0xFFFF, (whole >> 16) & 0xFFFF):
        assert float(half.double().mean()) / 2**16 == pytest.approx(0.5, abs=0.01)
    assert whole.unique().numel() > 0.99 * whole.numel()
    assert float((whole == bits(key + 1, 0, like)).float().mean()) < 1e-3


def test_roundings_of_bf16_adamw_have_nothing_to_do_with_one_another() -> None:
    """Those of weights, of first and second moments, of one step and the next, of a row or column and the next, and of
    two parameters. By the same bits, a weight would be rounded away from zero where its second moment is."""
    torch.manual_seed(0)
    size, steps = (300, 128), 2
    parameters: list[torch.Tensor] = [torch.nn.Parameter(torch.randn(size).bfloat16()) for _ in range(2)]
    for parameter in parameters:
        parameter.grad_dtype = torch.float32  # else errors of first moments are as regular as values in bf16
    optimizer = low_bit("bf16", parameters)
    errors: dict[tuple[str, int | str, int], Tensor] = {}
    (beta1, beta2), lr = SETTINGS["betas"], SETTINGS["lr"]
    for step in range(1, steps + 1):
        old = [
            {"weight": p.detach().double(), **{n: t.double() for n, t in optimizer.state[p].items()}}
            for p in parameters
        ]
        for parameter in parameters:
            parameter.grad = torch.randn(size)
        optimizer.step()
        for number, (parameter, before) in enumerate(zip(parameters, old, strict=True)):
            assert parameter.grad is not None
            grad, now = parameter.grad.double(), {"weight": parameter.detach(), **optimizer.state[parameter]}
            exact = {
                "exp_avg": beta1 * before.get("exp_avg", 0) + (1 - beta1) * grad,
                "exp_avg_sq": beta2 * before.get("exp_avg_sq", 0) + (1 - beta2) * grad**2,
            }
            root = (exact["exp_avg_sq"] / (1 - beta2**step)).sqrt() + SETTINGS["eps"]
            exact["weight"] = before["weight"] * (1 - lr * 0.1) - lr * exact["exp_avg"] / (1 - beta1**step) / root
            for name, value in exact.items():
                place = 2.0 ** (value.abs().log2().floor() - 7)
                errors[name, number, step] = (now[name].double() - value) / place * value.sign()
    for name in ("weight", "exp_avg_sq"):
        error = errors[name, 0, 1]
        errors |= {(name, "next row", 1): error.roll(1, 0), (name, "next column", 1): error.roll(1, 1)}
    names, rows = list(errors), torch.stack([error.flatten() for error in errors.values()])
    correlations = torch.corrcoef(rows).fill_diagonal_(0).abs()
    worst = divmod(int(correlations.argmax()), len(names))
    assert correlations.max() < 5 / rows.shape[1] ** 0.5, [names[each] for each in worst]
    assert abs(float(rows[names.index(("weight", 0, 1))].mean())) < 0.02
    assert rows.std(dim=1).min() > 0.2, "something was rounded"


@pytest.mark.parametrize("number", [0, 2**31, 2**32 - 1])
def test_rounding_is_the_same_for_any_part_of_a_parameter(number: int) -> None:
    """Whichever of 2^32 numbers its name has, and on whichever rank a row lies."""
    start, grads = torch.randn(8, 16).bfloat16(), gradients((8, 16), 3)

    def rounded(rows: range) -> Tensor:
        parameter = torch.nn.Parameter(start[rows.start : rows.stop].clone())
        groups = [{"params": [parameter], "weight_decay": 0.0}]
        optimizer = AdamWBf16(groups, 1e-3, (0.9, 0.999), 1e-8, rows={parameter: (number, rows)}, seed=1)
        return trained(optimizer, parameter, [grad[rows.start : rows.stop] for grad in grads])

    assert torch.equal(torch.cat([rounded(range(3)), rounded(range(3, 8))]), rounded(range(8)))


def test_random_bits_are_lowbias32() -> None:
    def in_c(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    inputs = [0, 1, 2**31 - 1, 2**31, 0xDEADBEEF, 2**32 - 1]
    found = random_bits(torch.tensor(inputs, dtype=torch.uint32).view(torch.int32))
    assert found.view(torch.uint32).tolist() == [in_c(x) for x in inputs]


@pytest.mark.parametrize("size", [(24, 16), (16, 24), (16, 16)])
def test_newton_schulz_is_torchs(size: tuple[int, int]) -> None:
    """To the bit in bf16, where torch.optim.Muon works; in fp32 the singular values come near 1."""
    parameter = torch.nn.Parameter(torch.zeros(size))
    parameter.grad = torch.randn(size, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw")
    optimizer.step()
    found = newton_schulz(parameter.grad.bfloat16()[None])[0]
    assert torch.equal(torch.zeros(size).add_(found, alpha=-0.2 * max(size) ** 0.5), parameter.detach())
    singular = torch.linalg.svdvals(newton_schulz(parameter.grad[None])[0])
    assert 0.6 < float(singular.min()) < float(singular.max()) < 1.3


# Schedules

STEPS, SAVED_AT = 20, 7
KWARGS: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 5},
    "reduce_lr_on_plateau": {"patience": 1, "factor": 0.5},
    "greedy": {"patience": 1, "factor": 0.5, "min_lr": 1e-5, "smooth": True, "window_size": 3},
}
EVAL_LOSSES = [2.0, 1.5, 1.5, 1.6, None, 1.7, None, 1.6, 1.8, 1.9, 1.2, 1.1, 1.0, 0.9, 0.8, 2.0, 2.0, 2.0, 2.0, 2.0]
COLD = ("constant", "reduce_lr_on_plateau", "greedy")
"""Schedules without a warm-up."""


def config_of(name: str, **settings: Any) -> TrainConfig:
    arguments = settings.pop("lr_scheduler_kwargs", json.dumps(KWARGS.get(name, {})))
    given = {"warmup_steps": 0 if name in COLD else 3, **settings}
    return TrainConfig(model="m", dataset=["d"], lr_scheduler_type=name, lr_scheduler_kwargs=arguments, **given)


def new_optimizer(config: TrainConfig) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    return torch.optim.AdamW(groups, lr=config.learning_rate)


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, first: int, last: int) -> list[float]:
    """The learning rate of each step from `first` to `last`."""
    used = []
    for step in range(first, last):
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        used.append(float(optimizer.param_groups[1]["lr"]))
        optimizer.step()
        step_scheduler(scheduler, EVAL_LOSSES[step])
    return used


def whole_rates(config: TrainConfig) -> list[float]:
    optimizer = new_optimizer(config)
    return rates(optimizer, build_scheduler(optimizer, config, STEPS), 0, STEPS)


def resumed_rates(saved: TrainConfig, config: TrainConfig) -> list[float]:
    """Learning rates of the steps after a run under `saved` has been saved and a new one under `config` has resumed
    it."""
    optimizer = new_optimizer(saved)
    scheduler = build_scheduler(optimizer, saved, STEPS)
    rates(optimizer, scheduler, 0, SAVED_AT)
    state = json.loads(json.dumps(scheduler.state_dict()))
    optimizer = new_optimizer(config)
    scheduler = build_scheduler(optimizer, config, STEPS)
    resume_scheduler(optimizer, scheduler, config, Progress(SAVED_AT, 0, state, {}, vars(saved)))
    return rates(optimizer, scheduler, SAVED_AT, STEPS)


@pytest.mark.parametrize("name", [name.value for name in SchedulerType])
def test_every_schedule_resumes(name: str) -> None:
    config = config_of(name, learning_rate=1e-2)
    check_schedule(config, STEPS, evaluates=True)
    whole = whole_rates(config)
    assert (len(set(whole)) > 1) == (name != "constant")
    assert resumed_rates(config, config) == whole[SAVED_AT:]
    # flags win: the peak is the new run's (KWARGS' absolute bounds are not reached here)
    doubled = config_of(name, learning_rate=2e-2)
    assert resumed_rates(config, doubled) == pytest.approx(whole_rates(doubled)[SAVED_AT:])


def test_another_schedule_takes_over() -> None:
    linear, plateau = config_of("linear"), config_of("reduce_lr_on_plateau")
    assert resumed_rates(linear, plateau)[0] == plateau.learning_rate
    assert resumed_rates(plateau, linear) == whole_rates(linear)[SAVED_AT:]


def test_warm_up() -> None:
    for steps, ratio, expected in ((7, 0, 7), (0.25, 0, 25), (0, 0.031, 4)):
        assert num_warmup_steps(config_of("linear", warmup_steps=steps, warmup_ratio=ratio), 100) == expected


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("cosine_with_min_lr", '{"min_l": 1e-6}', "does not take 'min_l'; it takes num_cycles, min_lr, min_lr_rate"),
        ("cosine_with_min_lr", "", "One of min_lr or min_lr_rate should be set"),
        ("constant", '{"min_lr": 1e-6}', "constant does not take 'min_lr'; it takes none"),
        ("reduce_lr_on_plateau", '{"patients": 1}', "does not take 'patients'; it takes mode, factor, patience"),
        ("warmup_stable_decay", '{"num_decay_steps": 5, "decay_type": "steep"}', "Unknown decay type: steep"),
        ("warmup_stable_decay", "", "missing 1 required positional argument: 'num_decay_steps'"),
        ("linear", "{min_lr", "--lr-scheduler-kwargs {min_lr: is not JSON"),
        ("linear", "3", "is not a JSON object; write it like"),
        ("reduce_lr_on_plateau", None, "follows the evaluation loss, but this run does not evaluate"),
        ("greedy", None, "follows the evaluation loss, but this run does not evaluate"),
    ],
)
def test_bad_schedules(name: str, arguments: str | None, said: str) -> None:
    config = config_of(name) if arguments is None else config_of(name, lr_scheduler_kwargs=arguments)
    with pytest.raises(ExpertMeshError) as raised:
        check_schedule(config, STEPS, evaluates=arguments is not None)
    assert said in str(raised.value)

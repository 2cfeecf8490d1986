"""Updates of low-bit AdamW and of matrices compiled against the same by torch's operators, by inductor on a CPU."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from expertmesh.moe.torch_private import counters
from expertmesh.training.optim import low_bit, updates
from expertmesh.training.optim.low_bit import AdamW8bit, AdamWBf16
from expertmesh.training.optim.matrices import change_weight
from expertmesh.training.optim.muon import take_gradient

EXACT: dict[str, Any] = {"lr": 2.0**-10, "betas": (0.75, 0.5), "eps": 1e-8}
"""Powers of two: whether a product and a sum are rounded once, as by torch's operators, makes no difference."""
USUAL: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
PARAMETERS: dict[str, list[tuple[int, ...]]] = {
    "8bit": [(6, 512), (3, 2880), (0, 256), (256, 256), (6, 100), (37,), (3, 2, 5)],
    "bf16": [(9, 520), (20, 24), (700,), (5, 2, 3), (0, 16)],
}
"""Rows that are blocks, of 256 or fewer values, and that are not."""
MATRICES = [(6, 512), (64, 64), (48, 40), (1, 96), (700, 33)]


def updated(
    kind: str, start: Tensor, grads: list[Tensor], settings: dict[str, Any], compiles: bool, number: int = 1
) -> dict[str, Any]:
    """Weights and state of so many parameters after steps, each at a learning rate of its own."""
    parameters = [torch.nn.Parameter(start.roll(each)) for each in range(number)]
    for parameter in parameters:
        # as FSDP does where it reduces in another dtype than the parameter's
        parameter.grad_dtype = grads[0].dtype
    groups: list[dict[str, Any]] = [{"params": parameters, "weight_decay": 0.25}]
    optimizer: Any = AdamW8bit(groups, **settings)
    if kind == "bf16":
        rows: Any = {
            parameter: (2**31 + 7 * each, range(5 * each, 5 * each + len(start)))
            for each, parameter in enumerate(parameters)
        }
        optimizer = AdamWBf16(groups, **settings, rows=rows, seed=2**31 + 5)
    with (
        mock.patch.object(low_bit, "takes_triton", return_value=compiles),
        mock.patch.object(updates, "takes_triton", return_value=compiles),
    ):
        for step, grad in enumerate(grads):
            for each, parameter in enumerate(parameters):
                parameter.grad = grad.roll(each)
            optimizer.param_groups[0]["lr"] = settings["lr"] * 2.0**-step
            if compiles:  # as on a card
                optimizer.queue_step(torch.ones((), device=start.device), torch.zeros((), device=start.device))
            else:
                optimizer.step()
    found: dict[str, Tensor] = {}
    for each, parameter in enumerate(parameters):
        state = {"weight": parameter.detach(), **optimizer.state[parameter]}
        found |= {f"{name} {each}": tensor for name, tensor in state.items()}
    return found


def both(
    kind: str, size: tuple[int, ...], settings: dict[str, Any], device: str, number: int = 1
) -> tuple[dict[str, Any], ...]:
    """Compiled, and by torch's operators; of gradients of all magnitudes, and one of zeros."""
    generator, dtype = torch.Generator().manual_seed(5), torch.bfloat16 if kind == "bf16" else torch.float32
    start, *grads = (torch.randn(size, generator=generator) * scale for scale in (1.0, 0.0, 0.1, 1.0, 10.0))
    given = start.to(device, dtype), [grad.to(device, dtype) for grad in grads]
    return updated(kind, *given, settings, True, number), updated(kind, *given, settings, False, number)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the same")
@pytest.mark.parametrize("kind", PARAMETERS)
def test_state_is_that_of_torchs_operators(kind: str) -> None:
    """To the bit, the rounding's random numbers too; weights to the last one, as a compiled root or quotient may be one
    off. Neither another size nor another learning rate takes another graph without end, and none is broken off."""
    torch.compiler.reset()
    before = dict(counters["stats"])
    for size, number in [*((size, 1) for size in PARAMETERS[kind]), *((size, 3) for size in PARAMETERS[kind][:3])]:
        found, expected = both(kind, size, EXACT, "cpu", number)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            if not name.startswith("weight"):
                assert torch.equal(found[name], tensor), (size, name)
            elif kind == "8bit":
                torch.testing.assert_close(found[name], tensor, rtol=3e-7, atol=1e-6)
            else:
                # which rounding makes a bf16 weight's last place now and then
                assert int((found[name] != tensor).sum()) <= tensor.numel() / 100
                torch.testing.assert_close(found[name], tensor, rtol=2**-7, atol=1e-6)
    assert counters["stats"]["unique_graphs"] - before.get("unique_graphs", 0) <= 10
    assert not counters["graph_break"]
    found, expected = both(kind, PARAMETERS[kind][0], USUAL, "cpu")
    check_usual(found, expected)


def both_of_matrices(
    size: tuple[int, int], divisor: float | None, is_skipped: bool, device: str
) -> tuple[dict[str, Tensor], ...]:
    """The same of a matrix's momentum, Nesterov's, and weights, the first half of whose columns are a block.

    Args:
        divisor: of the gradients of a step that is queued; None: it is not.
    """
    queued = (None, None) if divisor is None else (divisor, float(is_skipped))
    found = []
    for compiles in (True, False):
        generator = torch.Generator().manual_seed(5)
        weight_RD, grad_RD, momentum_RD = (torch.randn(size, generator=generator).to(device) for _ in range(3))
        nesterov_RD = torch.empty(size, dtype=torch.bfloat16, device=device)
        of_queued = [each if each is None else torch.tensor(each, device=device) for each in queued]
        if is_skipped:
            grad_RD[0, 0] = torch.nan
        with mock.patch.object(updates, "takes_triton", return_value=compiles):
            take_gradient(momentum_RD, grad_RD, nesterov_RD, *of_queued)
            numbers = updates.numbers_beside(weight_RD, (1 - 2**-7, 0.01))
            block_RD, change_RD = weight_RD[:, : size[1] // 2], grad_RD[:, : size[1] // 2].bfloat16().contiguous()
            change_weight(block_RD, change_RD, *numbers, of_queued[1])
        found.append({"momentum": momentum_RD, "nesterov": nesterov_RD, "weight": weight_RD, "gradient": grad_RD})
    return tuple(found)


def check_matrices(device: str) -> None:
    """Steps that are queued, that are not, and that are skipped."""
    for size in MATRICES:
        for divisor in (None, 3.0):
            check_usual(*both_of_matrices(size, divisor, False, device))
        first, skipped = (both_of_matrices(size, 3.0, is_skipped, device)[0] for is_skipped in (False, True))
        generator = torch.Generator().manual_seed(5)
        weight_RD, _, momentum_RD = (torch.randn(size, generator=generator).to(device) for _ in range(3))
        assert torch.equal(skipped["weight"], weight_RD)
        assert torch.equal(skipped["momentum"], momentum_RD)
        assert not torch.equal(first["weight"], weight_RD)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the same")
def test_matrices_are_updated_as_by_torchs_operators() -> None:
    """Neither another size nor another learning rate takes another graph without end, and none is broken off."""
    torch.compiler.reset()
    before = dict(counters["stats"])
    check_matrices("cpu")
    assert counters["stats"]["unique_graphs"] - before.get("unique_graphs", 0) <= 12
    assert not counters["graph_break"]


def check_usual(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """A moment's last place takes a value at a border across now and then."""
    for name, tensor in expected.items():
        if tensor.dtype in (torch.uint8, torch.bfloat16):
            assert (found[name] != tensor).float().mean() < 1e-2, name
        else:
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_block_that_is_not_finite() -> None:
    """Its scale is NaN: nothing hides it. Its neighbours are untouched."""
    grad = torch.ones(1, 512)
    grad[0, 3] = torch.nan
    state = updated("8bit", torch.ones(1, 512), [grad], EXACT, compiles=False)
    assert state["exp_avg_scales 0"].isnan().tolist() == [[True, False]]

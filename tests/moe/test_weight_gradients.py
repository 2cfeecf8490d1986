"""Gradients of experts' weights that backward leaves for later, of one layer: the bits of those that it computes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.kernels.fp8 import FP8
from expertmesh.moe.kernels.weight_gradients import WeightGradients
from tests.interpreter import interpreted, prepare_megablocks
from tests.moe.test_experts import EXPERTS, KINDS, TOP_K, WIDTH, D, adapted, experts_of
from tests.moe.test_kernels import CPU_KERNELS
from tests.tiers import two_diagonals
from tests.tiny import tiny_block

BF16 = torch.bfloat16
ORDERS = ("F1 F2 B1 B2 W1 W2", "F1 B1 F2 B2 W1 W2", "F1 F2 B1 W1 B2 W2")
COMPUTED = [("loop", torch.float32), ("torch-grouped", BF16), ("torch-grouped", torch.float32), ("loop", BF16)]


def inputs(number: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Of micro-batch `number`: tokens, experts and weights of choices; none has chosen expert 2."""
    generator = torch.Generator().manual_seed(number)
    x_TD = torch.randn(7 + number, width, generator=generator).to(dtype)
    first_T = torch.tensor([0, 1, 3])[torch.randint(0, 3, (len(x_TD),), generator=generator)]
    experts_TK = torch.stack([first_T, torch.tensor([1, 3, 3, 0])[first_T]], dim=1)
    return x_TD.requires_grad_(), experts_TK, torch.rand(len(x_TD), TOP_K, generator=generator)


class Run:
    """A layer's micro-batches: F1 is the forward of the first, B1 its backward, which leaves weights' gradients for
    later, W1, if there is a queue."""

    def __init__(self, experts: Any, dtype: torch.dtype = torch.float32, queue: WeightGradients | None = None):
        self.experts, self.dtype, self.queue = experts, dtype, queue
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        experts.zero_grad()

    def do(self, actions: str) -> dict[str, Tensor]:
        """The gradients of all parameters, and of the tokens of each micro-batch."""
        for kind, number in ((action[0], int(action[1:])) for action in actions.split()):
            if kind == "F":
                self.forward(number)
            elif kind == "W" and self.queue is not None:
                self.queue.compute(number)
            elif kind == "B":
                with nullcontext() if self.queue is None else self.queue.collecting(number):
                    self.backward(number)
        tokens = {f"tokens {number}": x_TD for number, x_TD in self.inputs.items()}
        named = tokens | dict(self.experts.mlp.named_parameters())
        return {name: tensor.grad.clone() for name, tensor in named.items() if tensor.grad is not None}

    def forward(self, number: int) -> None:
        x_TD, experts_TK, weights_TK = inputs(number, self.experts.shape.model_width, self.dtype)
        with Forward(weight_gradients=self.queue):
            self.outputs[number] = self.experts(x_TD, experts_TK, weights_TK)
        self.inputs[number] = x_TD

    def backward(self, number: int) -> None:
        out_TD = self.outputs.pop(number)
        out_TD.backward(torch.randn(out_TD.shape, generator=torch.Generator().manual_seed(number)).to(out_TD.dtype))


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, grad in expected.items() if not torch.equal(found[name], grad)] == []


def check(experts: Any, dtype: torch.dtype) -> None:
    expected = Run(experts, dtype).do("F1 B1 F2 B2")
    assert expected["w2"].any()
    for order in ORDERS:
        assert_same_bits(Run(experts, dtype, WeightGradients()).do(order), expected)


@pytest.mark.parametrize(("kind", "computed"), two_diagonals(list(KINDS), COMPUTED), ids=str)
def test_bits_are_those_of_an_ordinary_backward(kind: str, computed: tuple[str, torch.dtype]) -> None:
    check(experts_of(kind, computed[0]), computed[1])


@pytest.mark.parametrize("is_swiglu", [True, False])
def test_in_fp8(is_swiglu: bool) -> None:
    experts = tiny_block(hidden_size=32, intermediate_size=16, num_local_experts=EXPERTS).experts
    experts.mlp.kernel = FP8
    experts.mlp.activation.is_swiglu = is_swiglu
    check(experts, BF16)


@pytest.mark.parametrize("what", ["adapters", pytest.param("megablocks", marks=[pytest.mark.slow, interpreted])])
def test_what_is_computed_at_once(what: str) -> None:
    """Adapters, and the sparse GEMMs of MegaBlocks."""
    if what == "megablocks":
        prepare_megablocks()
        sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": EXPERTS}
        experts, num_trained = tiny_block("megablocks-sparse", **sizes).experts, 3
    else:
        experts, num_trained = adapted(experts_of("plain").requires_grad_(False)), 6
    expected, queue = Run(experts).do("F1 B1"), WeightGradients()
    assert len(expected) == 1 + num_trained
    assert all(grad.any() for grad in expected.values())
    assert_same_bits(Run(experts, queue=queue).do("F1 B1"), expected)
    assert queue.bytes == 0


@pytest.mark.parametrize(
    ("kind", "kernel"), [("plain", "torch-grouped"), ("another activation", "loop"), ("no gate", "torch-grouped")]
)
def test_what_waits(kind: str, kernel: str) -> None:
    """No weight has a gradient before its time; and the memory is that of what the GEMMs read."""
    queue = WeightGradients()
    run = Run(experts_of(kind, kernel), queue=queue)
    assert run.do("F1 F2 B1").keys() == {"tokens 1"}
    kept = 4 * run.inputs[1].shape[0] * TOP_K * (2 * D + (2 if kind == "no gate" else 3) * WIDTH)
    assert queue.bytes == kept
    alone = queue.bytes
    run.do("B2")
    assert (len(queue), queue.bytes > alone) == (2, True)
    run.do("W1")
    assert (len(queue), 0 < queue.bytes < 2 * alone) == (1, True)
    run.do("W2")
    assert (len(queue), queue.bytes) == (0, 0)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_only_what_is_asked_to_waits(kernel: str) -> None:
    experts, queue = experts_of("plain", kernel), WeightGradients()
    expected = Run(experts).do("F1 B1 F2 B2")
    run = Run(experts, queue=queue)
    run.do("F1 F2")
    for number in (1, 2):
        run.backward(number)  # not within `collecting`
        assert (len(queue), queue.bytes) == (0, 0)
    assert_same_bits(run.do(""), expected)
    # of a forward that does not name it nothing waits, whatever is collected
    other = Run(experts)
    other.do("F1")
    with queue.collecting(1):
        other.backward(1)
        assert queue.bytes == 0
    assert torch.equal(other.do("")["w1"], Run(experts).do("F1 B1")["w1"])


def test_nothing_waits_of_a_backward_that_fails() -> None:
    queue, experts = WeightGradients(), experts_of("plain")
    run = Run(experts, queue=queue)
    run.do("F1 F2 B1")
    waiting = queue.bytes

    def fail(grad: Tensor) -> None:
        assert queue.bytes > waiting, "it fails too early"
        raise RuntimeError("a backward fails")

    run.inputs[2].register_hook(fail)
    with pytest.raises(RuntimeError, match="a backward fails"):
        run.do("B2")
    assert (len(queue), queue.bytes, queue.is_collecting) == (1, waiting, False)
    with pytest.raises(KeyError):
        queue.compute(2)
    queue.compute(1)
    assert torch.equal(run.do("")["w1"], Run(experts).do("F1 B1")["w1"])
    run.do("F3 B3")
    queue.clear()
    assert (len(queue), queue.bytes) == (0, 0)


def test_by_whatever_thread() -> None:
    """On a GPU nodes run in threads of autograd's, for which nothing is current that this thread set."""
    experts = experts_of("plain", "torch-grouped")
    run = Run(experts, queue=WeightGradients())
    backward: Callable[[int], None] = run.backward
    with ThreadPoolExecutor(1) as other:
        run.backward = lambda number: other.submit(backward, number).result()  # type: ignore[method-assign]
        run.do("F1 B1")
    assert experts.mlp.w1.grad is None
    assert torch.equal(run.do("W1")["w1"], Run(experts).do("F1 B1")["w1"])


@pytest.mark.parametrize(("kind", "kernel"), [("plain", "loop"), ("another activation", "torch-grouped")])
def test_frozen_weights(kind: str, kernel: str) -> None:
    experts, queue = experts_of(kind, kernel), WeightGradients()
    experts.mlp.v1.requires_grad_(False)
    check(experts, torch.float32)
    assert experts.mlp.v1.grad is None
    experts.requires_grad_(False)
    assert Run(experts, queue=queue).do("F1 B1").keys() == {"tokens 1"}
    assert queue.bytes == 0

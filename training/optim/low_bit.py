"""AdamW with low-bit state (8-bit or bf16); the arithmetic of a step is fp32.

Neither optimizer depends on the parallel layout: blocks of 8-bit state lie within a row, and parameters are cut between
rows; the random numbers of stochastic rounding are a function of seed, parameter, step, row and column. Yet fp32 noise
between layouts now and then tips a value to the other side of a rounding, and so grows more than with fp32 state.

An update is one function of this rank's parts of parameters (see `Compiled`). Small parts of one shape are copied into
a stack and updated by one call, as launching a call for each takes longer than its kernel.

Shape suffixes: P parameters whose parts have one shape, N elements of a part, R its rows, D its columns, B blocks of n
elements.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...moe import torch_private
from ...moe.util.gpu import takes_triton
from ...moe.util.step_parts import register_step_part, writes
from ...sharding.parallelize.parallelize import zeros_by_rows
from ...sharding.state import local_tensor
from ..config.optimizers import block_size
from .matrices import stack_size
from .updates import Compiled, QueuedUpdates, decayed_and_changed, numbers_beside, put

register_step_part(
    __name__,
    "optimizer step",
    lasting=("_AdamW._first_state",),
    kernels={
        "update_fp32": writes(updates=("weight_PN", "mean_PN", "square_PN")),
        "update_8bit": writes(
            updates=("weight_PBn", "mean_codes_PBn", "mean_scales_PB", "square_codes_PBn", "square_scales_PB")
        ),
        "update_bf16": writes(updates=("weight", "mean", "square")),
    },
)

LARGEST_ALIKE = 2**21
"""Elements of the largest part of a parameter that low-bit AdamW copies into a stack of others of its shape: copying
more would take a GPU longer than the host takes to launch an update of its own."""


def alike_size(elements: int, number: int) -> int:
    """Of so many parameters whose parts have one shape, each of as many elements, how many are updated at once."""
    return 1 if elements > LARGEST_ALIKE else stack_size(max(1, elements), number, 1)


class Update(NamedTuple):
    """What one update of some parameters takes beside their tensors.

    mean_share, square_share: 1 - beta1 and 1 - beta2, weights of the gradient and of its square in the new moments.
    mean_correction_P, square_correction_P: 1 - beta^step, by which the moments are divided, fp32.
    decay: 1 - lr * weight decay, by which the weights are multiplied.
    divisor: of the gradients. is_skipped: where it is not 0, all is left as it was. Scalar tensors, of a step that is
    queued (see `training.steps.step.QueuesStep`).

    The other numbers are as `numbers_beside` makes them.
    """

    mean_share: Any
    square_share: Any
    mean_correction_P: Tensor
    square_correction_P: Tensor
    lr: Any
    decay: Any
    eps: Any
    divisor: Tensor | None = None
    is_skipped: Tensor | None = None

    def put(self, new: Tensor, into: Tensor) -> None:
        put(new, into, self.is_skipped)


@Compiled
def update_fp32(weight_PN: Tensor, grad_PN: Tensor, mean_PN: Tensor, square_PN: Tensor, update: Update) -> None:
    """One update of weights whose moments are fp32."""
    weight, mean, square = _updated(weight_PN, grad_PN, mean_PN, square_PN, update)
    update.put(weight, weight_PN)
    update.put(mean, mean_PN)
    update.put(square, square_PN)


@Compiled
def update_8bit(
    weight_PBn: Tensor,
    grad_PBn: Tensor,
    mean_codes_PBn: Tensor,
    mean_scales_PB: Tensor,
    square_codes_PBn: Tensor,
    square_scales_PB: Tensor,
    mean_map: tuple[Tensor, Tensor],
    square_map: tuple[Tensor, Tensor],
    update: Update,
) -> None:
    """One update of weights whose moments are 8-bit codes with a scale per block. The maps are `dynamic_map`'s."""
    mean_PBn = mean_map[0][mean_codes_PBn.int()] * mean_scales_PB.unsqueeze(2)
    square_PBn = square_map[0][square_codes_PBn.int()] * square_scales_PB.unsqueeze(2)
    weight, mean, square = _updated(weight_PBn, grad_PBn, mean_PBn, square_PBn, update)
    update.put(weight, weight_PBn)
    _to_8bit(mean, mean_codes_PBn, mean_scales_PB, mean_map, update)
    _to_8bit(square, square_codes_PBn, square_scales_PB, square_map, update)


@Compiled
def update_bf16(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    step_P: Tensor,
    places_P2: Tensor,
    seed: int,
    update: Update,
) -> None:
    """One update of bf16 weights, (P, R, D) or vectors (P, R), with bf16 moments; weights and second moments are
    rounded stochastically.

    Args:
        step_P: how many updates this makes.
        places_P2: int32: a hash of the parameter's own, and the first of its rows that lie on this rank.
        seed: int32.
    """
    new_weight, new_mean, new_square = _updated(weight, grad, mean.float(), square.float(), update)
    key_P = random_bits(step_P.int() + places_P2[:, 0]) + seed
    bits = position_bits(key_P, places_P2[:, 1], weight)
    update.put(round_to_bf16(new_weight, bits & 0xFFFF), weight)
    update.put(round_to_bf16(new_square, (bits >> 16) & 0xFFFF), square)
    # a tenth of the first moment is new each step: rounding to nearest loses nothing of note
    update.put(new_mean, mean)


def _updated(
    weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, update: Update
) -> tuple[Tensor, Tensor, Tensor]:
    """The new weights and moments in fp32; moments are given so."""
    each_P = (-1, *(1,) * (weight.dim() - 1))
    grad = grad.float() if update.divisor is None else grad.float() / update.divisor
    mean = mean.lerp(grad, update.mean_share)
    square = square.lerp(grad.square(), update.square_share)
    root = (square / update.square_correction_P.view(each_P)).sqrt_().add_(update.eps)
    change = (mean / update.mean_correction_P.view(each_P)).div_(root)
    return decayed_and_changed(weight.float(), change, update.decay, update.lr), mean, square


def _to_8bit(
    moment_PBn: Tensor, codes_PBn: Tensor, scales_PB: Tensor, of_map: tuple[Tensor, Tensor], update: Update
) -> None:
    """Each value becomes the nearest of the map's, times its block's largest magnitude."""
    largest_PB = moment_PBn.abs().amax(dim=-1).clip(1e-12)
    codes = torch.bucketize(moment_PBn / largest_PB.unsqueeze(2), of_map[1], out_int32=True, right=True)
    update.put(codes, codes_PBn)
    update.put(largest_PB, scales_PB)


class _AdamW(QueuedUpdates):
    """AdamW (Loshchilov and Hutter 2019, as `torch.optim.AdamW` computes it) over a subclass's own form of state.

    Args:
        groups: each with "params" and "weight_decay".
        lr, betas, eps: as torch.optim.AdamW has them.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; no rank waits for another."""
        assert closure is None
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    # cut as the parameter is
                    grad = local_tensor(parameter.grad)
                    device = self._step_of(parameter).device
                    alike.setdefault((device, grad.shape, parameter.dtype, grad.dtype), []).append(parameter)
            on_device: dict[torch.device, list[list[Tensor]]] = {}
            for (device, shape, *_), parameters in alike.items():
                size = alike_size(shape.numel(), len(parameters))
                stacks = [parameters[start : start + size] for start in range(0, len(parameters), size)]
                on_device.setdefault(device, []).extend(stacks)
            for stacks in on_device.values():
                for stack, update in zip(stacks, self._updates(stacks, group), strict=True):
                    # of a small parameter a rank may have nothing
                    if local_tensor(stack[0].grad).numel() > 0:  # type: ignore[arg-type]
                        self._update(stack, update)

    def _step_of(self, parameter: Tensor) -> Tensor:
        """How many updates a parameter has had, scalar; its state is made if it has none."""
        if not self.state[parameter]:
            self.state[parameter] = self._first_state(parameter)
        step: Tensor = self.state[parameter]["step"]
        return step

    def _first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Before its first step."""
        return {"step": torch.zeros((), device=parameter.device), **self._no_moments(parameter)}

    def _updates(self, stacks: list[list[Tensor]], group: dict[str, Any]) -> list[Update]:
        """Count one more update of each parameter; what these take, by stack. A few operators for all parameters, whose
        counts lie on one device: for one at a time, launching them would take longer than the update."""
        steps = [self._step_of(parameter) for stack in stacks for parameter in stack]
        torch._foreach_add_(steps, 1)
        if (is_skipped := self._queued[1]) is not None:
            torch._foreach_sub_(steps, [is_skipped] * len(steps))
        # kept on the device: a float of it would wait for the device; in double, as 1 - 0.999 in fp32 is 1e-5 off
        steps_P = torch.stack(steps).double()
        beta1, beta2 = group["betas"]
        sizes = [len(stack) for stack in stacks]
        of_mean, of_square = ((1 - beta**steps_P).float().split(sizes) for beta in (beta1, beta2))
        numbers = (1 - beta1, 1 - beta2, group["lr"], 1 - group["lr"] * group["weight_decay"], group["eps"])
        mean_share, square_share, lr, decay, eps = numbers_beside(steps[0], numbers)
        return [
            Update(mean_share, square_share, mean_P, square_P, lr, decay, eps, *self._queued)
            for mean_P, square_P in zip(of_mean, of_square, strict=True)
        ]

    def _no_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """State of a parameter before its first step: zeros."""
        raise NotImplementedError

    def _update(self, stack: list[Tensor], update: Update) -> None:
        """Update this rank's parts of parameters that have one shape, and of their state, in place."""
        raise NotImplementedError

    def _update_fp32(self, stack: list[Tensor], update: Update) -> None:
        with self._stacked(stack, (-1,), {"exp_avg": (-1,), "exp_avg_sq": (-1,)}) as tensors:
            update_fp32(*tensors, update)

    @contextmanager
    def _stacked(
        self, stack: list[Tensor], shape: tuple[int, ...], state_shapes: dict[str, tuple[int, ...]]
    ) -> Iterator[list[Tensor]]:
        """The weights of parameters, their gradients, and their state of these names, each as one tensor (P, *shape):
        copies, which become the parameters' and their state's at the end, or one parameter's own."""
        weights = [local_tensor(parameter) for parameter in stack]
        grads = [local_tensor(parameter.grad).contiguous() for parameter in stack if parameter.grad is not None]
        state = [[local_tensor(self.state[parameter][name]) for parameter in stack] for name in state_shapes]
        shapes = [(len(stack), *each) for each in (shape, shape, *state_shapes.values())]
        if len(stack) == 1:
            # a compiler takes what is a parameter to have one shape only
            weights = [weights[0].detach()]
            yield [each[0].view(as_one) for each, as_one in zip((weights, grads, *state), shapes, strict=True)]
            return
        stacked = [torch.stack(each) for each in (weights, grads, *state)]
        yield [each.view(as_one) for each, as_one in zip(stacked, shapes, strict=True)]
        del stacked[1]
        for each, new in zip((weights, *state), stacked, strict=True):
            torch._foreach_copy_(each, list(new.unbind()))


class AdamW8bit(_AdamW):
    """AdamW with block-wise 8-bit moments (Dettmers et al. 2022, arXiv 2110.02861; `AdamW8bit` of torchao).

    State: `*_codes` (uint8, of the parameter's shape) and `*_scales` (fp32, one per block of columns): 2.03 bytes per
    parameter for both moments in blocks of 256, where torch.optim.AdamW has 8. Blocks are the largest that divide a
    row; a parameter whose rows no block divides (see `block_size`) keeps its moments in fp32.
    """

    def _no_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        block = block_size(parameter.shape)
        if block is None:
            row = parameter.shape[1:]
            return {name: zeros_by_rows(parameter, row, torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        num_blocks, codes = parameter.shape[-1] // block, {}
        for name in ("exp_avg", "exp_avg_sq"):
            codes[f"{name}_codes"] = zeros_by_rows(parameter, parameter.shape[1:], torch.uint8)
            codes[f"{name}_scales"] = zeros_by_rows(parameter, (num_blocks,), torch.float32)
        return codes

    def _update(self, stack: list[Tensor], update: Update) -> None:
        block = block_size(stack[0].shape)
        if block is None:
            self._update_fp32(stack, update)
            return
        # blocks lie within rows, one after the other
        shapes: dict[str, tuple[int, ...]] = {}
        for name in ("exp_avg", "exp_avg_sq"):
            shapes |= {f"{name}_codes": (-1, block), f"{name}_scales": (-1,)}
        with self._stacked(stack, (-1, block), shapes) as tensors:
            if takes_triton(tensors[0]):
                for each in tensors:
                    if each.dim() == 3:
                        # of a known size, a block is summed up in registers and read once
                        torch_private.mark_static(each, 2)
            maps = [dynamic_map(is_signed, tensors[0].device) for is_signed in (True, False)]
            update_8bit(*tensors, *maps, update)


@cache
def dynamic_map(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The 256 values that a code can stand for, rising from -1 or 0 to 1, and the 255 borders between them, fp32.

    A dynamic exponent, 1 to 1e-6, shares seven bits with a linear fraction, so that small values keep their relative
    precision (Dettmers et al. 2022, section 1.3; `create_dynamic_map` of torchao, whose map has the same values).
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1 if signed else 2 ** (exponent + 1) + 1)
        middles = (10 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        values += middles + [-value for value in middles if signed]
    values_256 = torch.tensor(sorted(values), device=device)
    return values_256, (values_256[1:] + values_256[:-1]) / 2


class AdamWBf16(_AdamW):
    """AdamW over bf16 parameters, with bf16 moments: 8 bytes per parameter with its gradient, where fp32 takes 16. Of
    parameters in fp32, which some families keep beside the others, moments are fp32 and nothing is rounded.

    Weight and second moment are rounded stochastically, up or down with the probability that makes the mean right:
    rounded to nearest, an update below half of bf16's last place (0.2 to 0.4 %) is lost, and a second moment with
    beta2 0.999 never falls, since it loses but 0.1 % a step.

    Args:
        rows: which rows of each parameter lie on this rank, and a number of the parameter's own.
        seed: of the rounding.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        rows: dict[Tensor, tuple[int, range]],
        seed: int,
    ):
        super().__init__(groups, lr, betas, eps)
        self.places: dict[Tensor, Tensor] = {}
        for parameter, (number, here) in rows.items():
            own = random_bits(torch.tensor(number - 2**31, dtype=torch.int32))
            self.places[parameter] = torch.stack([own, torch.full_like(own, here.start)]).to(parameter.device)
        self.seed = seed % 2**31

    def _no_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        row = parameter.shape[1:]
        return {name: zeros_by_rows(parameter, row, parameter.dtype) for name in ("exp_avg", "exp_avg_sq")}

    def _update(self, stack: list[Tensor], update: Update) -> None:
        if stack[0].dtype == torch.float32:
            self._update_fp32(stack, update)
            return
        rows = local_tensor(stack[0].grad).shape[:1]  # type: ignore[arg-type]
        shape = rows if stack[0].dim() == 1 else (*rows, -1)
        with self._stacked(stack, shape, {"exp_avg": shape, "exp_avg_sq": shape}) as tensors:
            step_P = torch.stack([self.state[parameter]["step"] for parameter in stack])
            places_P2 = torch.stack([self.places[parameter] for parameter in stack])
            update_bf16(*tensors, step_P, places_P2, self.seed, update)


def position_bits(key_P: Tensor, first_row_P: Tensor, like: Tensor) -> Tensor:
    """32 random bits, int32, for each element of `like`, (P, R, D) or (P, R), which holds parameters' rows from
    `first_row_P` on; the same for an element wherever it lies. `key_P`: int32."""
    rows_R = torch.arange(like.shape[1], dtype=torch.int32, device=like.device)
    row_PR = random_bits((rows_R + first_row_P.unsqueeze(1)) ^ key_P.unsqueeze(1))
    if like.dim() == 2:
        return random_bits(row_PR)
    # hashed twice, or row a, column b would have the bits of row b, column a
    column_D = random_bits(random_bits(torch.arange(like.shape[2], dtype=torch.int32, device=like.device)))
    return random_bits(row_PR.unsqueeze(2) ^ column_D)


def random_bits(x: Tensor) -> Tensor:
    """A hash of int32 values to int32 values: Ellis' `lowbias32` (github.com/skeeto/hash-prospector)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1)):
        # >> carries the sign bit along, which the mask takes away
        x = (x ^ ((x >> shift) & (0xFFFFFFFF >> shift))) * factor
    return x


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16 stochastically: away from zero with the probability of the 16 low bits that are dropped.

    Args:
        x: fp32, finite.
        bits: int32 of the same shape, uniform in [0, 2^16).
    """
    return ((x.contiguous().view(torch.int32) + bits) & -0x10000).view(torch.float32).bfloat16()

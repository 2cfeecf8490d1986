"""AdamW with low-bit state (8-bit or bf16); the arithmetic of a step is fp32.

Neither optimizer depends on the parallel layout: blocks of 8-bit state lie within a row, and parameters are cut between
rows; the random numbers of stochastic rounding are a function of seed, parameter, step, row and column. Yet fp32 noise
between layouts now and then tips a value to the other side of a rounding, and so grows more than with fp32 state.

A parameter's update is one function of this rank's part of it. On a CPU it is torch's own operators, which read and
write all of it a dozen times; on a GPU `torch.compile` makes one kernel of them, which does so once.

Shape suffixes: P parameters, N elements of a parameter on this rank, R its rows, D its columns, B blocks of n elements.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checkpoints.training_state.resuming import ResumableOptimizer
from ...moe import torch_private
from ...moe.util.gpu import takes_triton
from ...sharding.parallelize.parallelize import zeros_by_rows
from ...sharding.state import local_tensor
from ..config.optimizers import block_size


class Update(NamedTuple):
    """What one update of a parameter takes beside its tensors.

    mean_share, square_share: 1 - beta1 and 1 - beta2, weights of the gradient and of its square in the new moments.
    mean_correction, square_correction: 1 - beta^step, by which the moments are divided; scalar, double.
    decay: 1 - lr * weight decay, by which the weight is multiplied.

    The numbers are floats where torch's own operators compute, and fp32 scalar tensors for `Compiled`, which would be
    compiled anew for each learning rate.
    """

    mean_share: Any
    square_share: Any
    mean_correction: Tensor
    square_correction: Tensor
    lr: Any
    decay: Any
    eps: Any


class Compiled:
    """A function that changes tensors in place: on a GPU compiled to one kernel when it first runs there, for tensors
    of any size."""

    def __init__(self, fn: Callable[..., None]):
        self.fn = fn
        self.__doc__ = fn.__doc__
        self._compiled: Callable[..., None] | None = None

    def __call__(self, *args: Any) -> None:
        if takes_triton(args[0]):
            self.run(*args)
        else:
            self.fn(*args)

    def run(self, *args: Any) -> None:
        if self._compiled is None:
            self._compiled = torch.compile(self.fn, dynamic=True)
        self._compiled(*args)


@Compiled
def update_fp32(weight_N: Tensor, grad_N: Tensor, mean_N: Tensor, square_N: Tensor, update: Update) -> None:
    """One update of a weight whose moments are fp32."""
    weight, mean, square = _updated(weight_N, grad_N, mean_N, square_N, update)
    weight_N.copy_(weight)
    mean_N.copy_(mean)
    square_N.copy_(square)


@Compiled
def update_8bit(
    weight_Bn: Tensor,
    grad_Bn: Tensor,
    mean_codes_Bn: Tensor,
    mean_scales_B: Tensor,
    square_codes_Bn: Tensor,
    square_scales_B: Tensor,
    mean_map: tuple[Tensor, Tensor],
    square_map: tuple[Tensor, Tensor],
    update: Update,
) -> None:
    """One update of a weight whose moments are 8-bit codes with a scale per block. The maps are `dynamic_map`'s."""
    mean_Bn = mean_map[0][mean_codes_Bn.int()] * mean_scales_B.unsqueeze(1)
    square_Bn = square_map[0][square_codes_Bn.int()] * square_scales_B.unsqueeze(1)
    weight, mean, square = _updated(weight_Bn, grad_Bn, mean_Bn, square_Bn, update)
    weight_Bn.copy_(weight)
    _to_8bit(mean, mean_codes_Bn, mean_scales_B, mean_map)
    _to_8bit(square, square_codes_Bn, square_scales_B, square_map)


@Compiled
def update_bf16(
    weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step: Tensor, place: Tensor, seed: int, update: Update
) -> None:
    """One update of a bf16 weight, (R, D) or a vector, with bf16 moments; weight and second moment are rounded
    stochastically.

    Args:
        step: scalar, how many updates this makes.
        place: int32: a hash of the parameter's own, and the first of its rows that lie on this rank.
        seed: int32.
    """
    new_weight, new_mean, new_square = _updated(weight, grad, mean.float(), square.float(), update)
    key = random_bits(step.int() + place[0]) + seed
    bits = position_bits(key, place[1], weight)
    weight.copy_(round_to_bf16(new_weight, bits & 0xFFFF))
    square.copy_(round_to_bf16(new_square, (bits >> 16) & 0xFFFF))
    # a tenth of the first moment is new each step: rounding to nearest loses nothing of note
    mean.copy_(new_mean)


def _updated(
    weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, update: Update
) -> tuple[Tensor, Tensor, Tensor]:
    """The new weight and moments in fp32; moments are given so."""
    grad = grad.float()
    mean = mean.lerp(grad, update.mean_share)
    square = square.lerp(grad.square(), update.square_share)
    root = (square / update.square_correction).sqrt_().add_(update.eps)
    change = (mean / update.mean_correction).div_(root)
    weight = weight.float() * update.decay
    weight = weight - change * update.lr if isinstance(update.lr, Tensor) else weight.sub_(change, alpha=update.lr)
    return weight, mean, square


def _to_8bit(moment_Bn: Tensor, codes_Bn: Tensor, scales_B: Tensor, of_map: tuple[Tensor, Tensor]) -> None:
    """Each value becomes the nearest of the map's, times its block's largest magnitude."""
    largest_B = moment_Bn.abs().amax(dim=-1).clip(1e-12)
    codes_Bn.copy_(torch.bucketize(moment_Bn / largest_B.unsqueeze(1), of_map[1], out_int32=True, right=True))
    scales_B.copy_(largest_B)


class _AdamW(ResumableOptimizer):
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
            on_device: dict[torch.device, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    on_device.setdefault(self._step_of(parameter).device, []).append(parameter)
            for parameters in on_device.values():
                for parameter, update in zip(parameters, self._updates(parameters, group), strict=True):
                    assert parameter.grad is not None
                    # detached, as a compiler takes what is a parameter to have one shape only
                    weight, grad = local_tensor(parameter).detach(), local_tensor(parameter.grad)
                    if weight.numel() > 0:
                        state = {name: local_tensor(tensor) for name, tensor in self.state[parameter].items()}
                        self._update(parameter, weight, grad, state, update)

    def _step_of(self, parameter: Tensor) -> Tensor:
        """How many updates a parameter has had, scalar; its state is made if it has none."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state.update(self._no_moments(parameter))
        step: Tensor = state["step"]
        return step

    def _updates(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Update]:
        """Count one more update of each parameter; what these take. A few operators for all parameters, whose counts
        lie on one device: for one at a time, launching them would take longer than the update."""
        steps = [self._step_of(parameter) for parameter in parameters]
        torch._foreach_add_(steps, 1)
        # kept on the device, in double: a float of it would wait for the device, and 1 - 0.999 in fp32 is 1e-5 off
        steps_P = torch.stack(steps).double()
        beta1, beta2 = group["betas"]
        of_mean_P, of_square_P = 1 - beta1**steps_P, 1 - beta2**steps_P
        numbers: Any = (1 - beta1, 1 - beta2, group["lr"], 1 - group["lr"] * group["weight_decay"], group["eps"])
        if takes_triton(steps[0]):
            numbers = torch.tensor(numbers, dtype=torch.float32).to(steps[0].device).unbind()
        mean_share, square_share, lr, decay, eps = numbers
        return [
            Update(mean_share, square_share, of_mean, of_square, lr, decay, eps)
            for of_mean, of_square in zip(of_mean_P, of_square_P, strict=True)
        ]

    def _no_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """State of a parameter before its first step: zeros."""
        raise NotImplementedError

    def _update(
        self, parameter: Tensor, weight: Tensor, grad: Tensor, state: dict[str, Tensor], update: Update
    ) -> None:
        """Update this rank's part of a parameter and of its state, in place."""
        raise NotImplementedError

    def _update_fp32(self, weight: Tensor, grad: Tensor, state: dict[str, Tensor], update: Update) -> None:
        mean, square = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
        update_fp32(weight.view(-1), grad.reshape(-1), mean, square, update)


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

    def _update(
        self, parameter: Tensor, weight: Tensor, grad: Tensor, state: dict[str, Tensor], update: Update
    ) -> None:
        block = block_size(parameter.shape)
        if block is None:
            self._update_fp32(weight, grad, state, update)
            return
        # blocks lie within rows, one after the other
        tensors = [weight.view(-1, block), grad.reshape(-1, block)]
        for name in ("exp_avg", "exp_avg_sq"):
            tensors += [state[f"{name}_codes"].view(-1, block), state[f"{name}_scales"].view(-1)]
        if takes_triton(weight):
            for tensor in tensors:
                if tensor.dim() == 2:
                    # of a known size, a block is summed up in registers and read once
                    torch_private.mark_static(tensor, 1)
        update_8bit(*tensors, dynamic_map(True, weight.device), dynamic_map(False, weight.device), update)


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

    def _update(
        self, parameter: Tensor, weight: Tensor, grad: Tensor, state: dict[str, Tensor], update: Update
    ) -> None:
        if parameter.dtype == torch.float32:
            self._update_fp32(weight, grad, state, update)
            return
        shape = weight.shape if weight.dim() == 1 else (len(weight), -1)
        mean, square = state["exp_avg"].view(shape), state["exp_avg_sq"].view(shape)
        place = self.places[parameter]
        update_bf16(weight.view(shape), grad.reshape(shape), mean, square, state["step"], place, self.seed, update)


def position_bits(key: Tensor, first_row: Tensor | int, like: Tensor) -> Tensor:
    """32 random bits, int32, for each element of `like`, (R, D) or a vector, which holds a parameter's rows from
    `first_row` on; the same for an element wherever it lies. `key`: int32 scalar tensor."""
    row_R = random_bits((torch.arange(len(like), dtype=torch.int32, device=like.device) + first_row) ^ key)
    if like.dim() == 1:
        return random_bits(row_R)
    # hashed twice, or row a, column b would have the bits of row b, column a
    column_D = random_bits(random_bits(torch.arange(like.shape[1], dtype=torch.int32, device=like.device)))
    return random_bits(row_R.unsqueeze(1) ^ column_D)


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

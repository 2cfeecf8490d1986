"""AdamW with low-bit state (8-bit or bf16); the arithmetic of a step is fp32.

Neither optimizer depends on the parallel layout: blocks of 8-bit state lie within a row, and parameters are cut between
rows; the random numbers of stochastic rounding are a function of seed, parameter, step, row and column. Yet fp32 noise
between layouts now and then tips a value to the other side of a rounding, and so grows more than with fp32 state.

On a GPU a step is one Triton kernel per parameter, which reads and writes each value once
(`training.optim.low_bit_triton`); where tensors are not contiguous, and on a CPU, it is torch's own operators, each of
which does.

Shape suffixes: P parameters, R rows of a parameter on this rank, D its columns, B blocks per row.
"""

from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.training_state.resuming import ResumableOptimizer
from ...moe.util.gpu import takes_triton
from ...sharding.parallelize.parallelize import zeros_by_rows
from ...sharding.state import local_tensor
from ..config.optimizers import block_size
from .update import Update


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
                    self._update(parameter, update)

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
        # two by two, so that each lies as its counterparts do: Triton compiles a kernel anew for another alignment
        corrections = torch.stack([1 - beta1**steps_P, 1 - beta2**steps_P], dim=1)
        lr, eps, decay = group["lr"], group["eps"], 1 - group["lr"] * group["weight_decay"]
        pairs = (pair.unbind() for pair in corrections.unbind())
        return [Update(1 - beta1, 1 - beta2, of_mean, of_square, lr, decay, eps) for of_mean, of_square in pairs]

    def _update(self, parameter: Tensor, update: Update) -> None:
        state = self.state[parameter]
        local = {name: local_tensor(tensor) for name, tensor in state.items()}
        weight, grad = local_tensor(parameter), local_tensor(parameter.grad)  # type: ignore[arg-type]
        if takes_kernel(weight, grad, *local.values()):
            self._fused_update(parameter, weight, grad, local, update)
            return
        weight_RD, grad_RD = weight.float(), grad.float()
        mean_RD, square_RD = self._moments(state)
        mean_RD = mean_RD.lerp(grad_RD, update.mean_share)
        square_RD = square_RD.lerp(grad_RD.square(), update.square_share)
        root_RD = (square_RD / update.square_correction).sqrt_().add_(update.eps)
        change_RD = (mean_RD / update.mean_correction).div_(root_RD)
        weight_RD = (weight_RD * update.decay).sub_(change_RD, alpha=update.lr)
        self._store(parameter, state, weight_RD, mean_RD, square_RD)

    def _fused_update(
        self, parameter: Tensor, weight: Tensor, grad: Tensor, state: dict[str, Tensor], update: Update
    ) -> None:
        """One update by a kernel of `training.optim.low_bit_triton`: of this rank's part of the parameter, its gradient
        and its state."""
        raise NotImplementedError

    def _no_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """State of a parameter before its first step: zeros."""
        raise NotImplementedError

    def _moments(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """This rank's part of the first and second moment in fp32."""
        raise NotImplementedError

    def _store(self, parameter: Tensor, state: dict[str, Tensor], weight: Tensor, mean: Tensor, square: Tensor) -> None:
        """Keep this rank's part of the updated weight and moments, given in fp32."""
        raise NotImplementedError


def takes_kernel(*tensors: Tensor) -> bool:
    """Whether a kernel of `training.optim.low_bit_triton` can update these."""
    return all(takes_triton(t) and t.is_contiguous() for t in tensors)


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

    def _moments(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if "exp_avg" in state:
            return local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
        mean = _from_8bit(state["exp_avg_codes"], state["exp_avg_scales"], signed=True)
        return mean, _from_8bit(state["exp_avg_sq_codes"], state["exp_avg_sq_scales"], signed=False)

    def _store(self, parameter: Tensor, state: dict[str, Tensor], weight: Tensor, mean: Tensor, square: Tensor) -> None:
        local_tensor(parameter).copy_(weight)
        for name, moment, signed in (("exp_avg", mean, True), ("exp_avg_sq", square, False)):
            if name in state:
                local_tensor(state[name]).copy_(moment)
            else:
                _to_8bit(moment, state[f"{name}_codes"], state[f"{name}_scales"], signed)

    def _fused_update(
        self, parameter: Tensor, weight: Tensor, grad: Tensor, state: dict[str, Tensor], update: Update
    ) -> None:
        from .low_bit_triton import step_8bit, step_fp32

        if "exp_avg" in state:
            step_fp32(weight, grad, state["exp_avg"], state["exp_avg_sq"], update)
            return
        step_8bit(
            weight,
            grad,
            state["exp_avg_codes"],
            state["exp_avg_scales"],
            state["exp_avg_sq_codes"],
            state["exp_avg_sq_scales"],
            dynamic_map(True, weight.device),
            dynamic_map(False, weight.device),
            update,
        )


def _from_8bit(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    codes_RD, scales_RB = local_tensor(codes), local_tensor(scales)
    values, _ = dynamic_map(signed, codes_RD.device)
    return (values[codes_RD.int()].unflatten(1, (scales_RB.shape[1], -1)) * scales_RB.unsqueeze(-1)).flatten(1)


def _to_8bit(moment_RD: Tensor, codes: Tensor, scales: Tensor, signed: bool) -> None:
    """Each value becomes the nearest of the map's, times its block's largest magnitude."""
    blocks = moment_RD.unflatten(1, (scales.shape[1], -1))
    scales_RB = blocks.abs().amax(dim=-1).clip_(1e-12)
    _, borders = dynamic_map(signed, moment_RD.device)
    codes_RD = torch.bucketize(blocks / scales_RB.unsqueeze(-1), borders, out_int32=True, right=True).flatten(1)
    local_tensor(codes).copy_(codes_RD)
    local_tensor(scales).copy_(scales_RB)


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
        self.rows = rows
        self.seed = seed

    def _no_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        row = parameter.shape[1:]
        return {name: zeros_by_rows(parameter, row, parameter.dtype) for name in ("exp_avg", "exp_avg_sq")}

    def _moments(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return local_tensor(state["exp_avg"]).float(), local_tensor(state["exp_avg_sq"]).float()

    def _store(self, parameter: Tensor, state: dict[str, Tensor], weight: Tensor, mean: Tensor, square: Tensor) -> None:
        if parameter.dtype == torch.float32:
            for tensor, values in ((parameter, weight), (state["exp_avg"], mean), (state["exp_avg_sq"], square)):
                local_tensor(tensor).copy_(values)
            return
        number, rows, seed = self._random_numbers(parameter)
        of_parameter = random_bits(torch.full_like(state["step"], number, dtype=torch.int32))
        key = random_bits(state["step"].int() + of_parameter)
        bits = position_bits(key + seed, rows, weight)
        local_tensor(parameter).copy_(round_to_bf16(weight, bits & 0xFFFF))
        local_tensor(state["exp_avg_sq"]).copy_(round_to_bf16(square, (bits >> 16) & 0xFFFF))
        # a tenth of the first moment is new each step: rounding to nearest loses nothing of note
        local_tensor(state["exp_avg"]).copy_(mean)

    def _fused_update(
        self, parameter: Tensor, weight: Tensor, grad: Tensor, state: dict[str, Tensor], update: Update
    ) -> None:
        from .low_bit_triton import step_bf16, step_fp32

        moments = (state["exp_avg"], state["exp_avg_sq"])
        if parameter.dtype == torch.float32:
            step_fp32(weight, grad, *moments, update)
            return
        number, rows, seed = self._random_numbers(parameter)
        step_bf16(weight, grad, *moments, state["step"], rows.start, number, seed, update)

    def _random_numbers(self, parameter: Tensor) -> tuple[int, range, int]:
        """What a parameter's random bits begin with: its number and the seed, int32, and its rows on this rank."""
        number, rows = self.rows[parameter]
        return number - 2**31, rows, self.seed % 2**31


def position_bits(key: Tensor, rows: range, like: Tensor) -> Tensor:
    """32 random bits, int32, for each element of `like`, which holds `rows` of a parameter; the same for an element
    wherever it lies. `key`: int32 scalar tensor."""
    row_R = random_bits(torch.arange(rows.start, rows.stop, dtype=torch.int32, device=like.device) ^ key)
    if like.dim() == 1:
        return random_bits(row_R)
    # hashed twice, or row a, column b would have the bits of row b, column a
    num_columns = prod(like.shape[1:])
    column_D = random_bits(random_bits(torch.arange(num_columns, dtype=torch.int32, device=like.device)))
    return random_bits(row_R.unsqueeze(1) ^ column_D).view(like.shape)


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

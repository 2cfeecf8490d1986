"""How near results must be to one another whose sums were added up in another order: here, and nowhere else.

Another processor, number of threads, layout of ranks or kernel adds the same numbers up in another order. Each addition
in fp32 is off by up to 2^-24 of its result, so a result is off by a few such parts of what was added up. That may be
much more than the result, where the numbers cancel. So a tolerance is relative to what was added up:

- a result that nothing cancels in is held to OTHER_ORDER of itself, some 170 roundings in a row;
- beyond that a gradient may be off by OF_ADDED of the gradient of the whole model, which it was added up beside, and a
  figure by OF_ADDED of the numbers that it is the sum of.

Measured on the tables of parity, by models with all hidden units in another order (`parity/test_compare.py`): figures
5e-7 of themselves, gradients 3e-7 of all of them, beyond OTHER_ORDER of themselves 2e-8 of all of them. A fault is far
more: of a gradient that has a thousandth of the whole, a part in a thousand is seen, twice or none of one that has a
millionth.
"""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

OTHER_ORDER = 1e-5
OF_ADDED = 2.0**-22
"""Four roundings."""
AFTER_ADAMW = 5e-5
"""Of a weight after AdamW's first steps: they follow the signs of gradients, also of single numbers that cancel."""


def near(expected: Any, added: float = 0.0, tolerance: float = OTHER_ORDER) -> Any:
    """What equals `expected`, numbers or a list or dict of them, but for the order of sums.

    Args:
        added: the size of the numbers that are added up, where they may cancel.
    """
    return pytest.approx(expected, rel=tolerance, abs=OF_ADDED * added)


def assert_near(found: Any, expected: Any, tolerance: float = OTHER_ORDER) -> None:
    """Of one tensor or several: shape, dtype, and numbers by the 2-norm of all of them, as hardly all cancel."""
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, expected)), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        error = error_beyond(0.0, one, other)
        assert error <= tolerance, f"not close: off by {error:.3g}"


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([tensor.detach().double().norm() for tensor in tensors.values()]).norm())


def gradient_errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """By name, by how much each gradient is off, relatively, beyond what is left of larger numbers that cancel.

    Both are of one model, whole, as its parts are held to the norm of all.
    """
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    rounding = OF_ADDED * norm_of(expected)
    return {name: error_beyond(rounding, found[name], grad) for name, grad in expected.items()}


def error_beyond(rounding: float, found: Tensor, expected: Tensor) -> float:
    """Relative, in the 2-norm; infinite where anything is no number, or nothing was expected."""
    found, expected = found.detach().double(), expected.detach().double()
    error = float((found - expected).norm()) - rounding
    size = float(expected.norm())
    return 0.0 if error <= 0 else error / size if size and error < torch.inf else torch.inf


class OtherOrder:
    """A model of transformers, in place, with its hidden units in a random order, and so their sums."""

    def __init__(self, model: Any, seed: int, nudged: bool = False, block: int | None = None):
        """
        Args:
            nudged: whether each weight is beside that up to one place off, which is more than any processor does.
            block: of so many units each keeps to its own.
        """
        generator = torch.Generator().manual_seed(seed)
        blocks = torch.arange(model.config.hidden_size).split(block or model.config.hidden_size)
        self.units = torch.cat([units[torch.randperm(len(units), generator=generator)] for units in blocks])
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if nudged:
                    weight.mul_(1 + 2.0**-23 * torch.randint(-1, 2, weight.shape, generator=generator))
                weight.copy_(weight.index_select(_dim(name), self.units))

    def undone(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights or gradients, in the order that the model had them in."""
        return {name: tensor.index_select(_dim(name), self.units.argsort()) for name, tensor in tensors.items()}


def _dim(name: str) -> int:
    """That of hidden units in a weight: of what projects to them the last but one, (out, in); else the last."""
    return -2 if re.search(r"o_proj|down_proj|output_linear", name) else -1

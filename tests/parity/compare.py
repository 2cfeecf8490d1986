"""The comparison of figures: the first that differs, in words."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tests.parity.case import Figures
from tests.rounding import AFTER_ADAMW, OF_ADDED, OTHER_ORDER

NOISE, MOST_NOISE = 10.0, 50.0
"""Where transformers in fp32 is off from itself in fp64, ours may be off by so many times as much, but not by more than
so many times the tolerance: in fp64 another expert may be chosen."""
Bits = Literal["", "gradients", "all"]


@dataclass(frozen=True)
class Tolerance:
    """By how much, relatively, figures may differ.

    Attributes:
        figures: of the first step; norms: of its gradient norm, where it is another; infinite: of none.
        after: of what follows an update.
        grads, weights: of each tensor's norm, and of the weights' changes where what they were before is known;
            infinite: not compared. Gradients and changes may beside that differ by OF_ADDED of all of them, and changes
            by OF_ADDED of the weight that they are the difference of.
        noisy: a pattern of names of sums that cancel: gradients are held to twice the tolerance, and weights are not
            compared, as AdamW's first step follows the signs of such gradients.
        as_one: whether gradients are compared as one vector.
        may_lack: whether one side may have no gradient where the other has zeros: of what no token reaches.
        moved: share of the tokens that may go to another expert, of what is rounded; infinite: routing is not compared.
    """

    figures: float = OTHER_ORDER
    after: float = OTHER_ORDER
    norms: float | None = None
    grads: float = OTHER_ORDER
    weights: float = AFTER_ADAMW
    noisy: str = ""
    as_one: bool = False
    may_lack: bool = False
    moved: float = 0.0


def assert_same(found: Figures | None, wanted: Figures, allowed: Tolerance = Tolerance(), bits: Bits = "") -> None:
    """
    Args:
        bits: what has the same bits: nothing, losses and gradients of the first step, or everything.
    """
    assert found is not None
    unlike = first_difference(found, wanted, allowed)
    assert unlike is None, unlike
    if bits:
        steps = slice(1) if bits == "gradients" else slice(None)
        for name in ("losses", "balances", "zs", *(["grad_norms"] if bits == "all" else [])):
            assert (getattr(found, name) or [])[steps] == (getattr(wanted, name) or [])[steps], name
        for what in ("grads", "weights") if bits == "all" else ("grads",):
            assert with_other_bits(getattr(found, what), getattr(wanted, what)) == [], what


def with_other_bits(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that are in one of both alone, or differ in dtype or any bit."""
    names = sorted(found.keys() ^ wanted.keys())
    alike = found.keys() & wanted.keys()
    return names + [name for name in alike if not has_same_bits(found[name], wanted[name])]


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Codes of quantized weights too, some of which are no number."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)))


def first_difference(
    found: Figures,
    wanted: Figures,
    allowed: Tolerance = Tolerance(),
    source: Mapping[str, Tensor] = {},
    in_double: Callable[[], Figures] | None = None,
) -> str | None:
    """In the order in which they come about: figures of the first step, gradients, weights, figures after that.

    Args:
        source: the weights, or adapters, before, where these are known.
        in_double: makes what is wanted in fp64, by which what fp32 cannot tell is judged.
    """
    for step in range(len(wanted.losses)):
        for name in ("losses", "balances", "zs", "grad_norms"):
            ours, theirs = getattr(found, name), getattr(wanted, name)
            if theirs is None or ours is None:
                continue
            error, limit = apart(ours[step], theirs[step]), allowed.figures if step == 0 else allowed.after
            if name == "grad_norms" and allowed.norms is not None and (step == 0 or math.isinf(allowed.norms)):
                limit = allowed.norms
            if not error <= limit and (
                in_double is None
                or not error <= MOST_NOISE * limit
                or error > NOISE * apart(getattr(in_double(), name)[step], theirs[step])
            ):
                return f"step {step + 1}, {name}: {ours[step]!r}, not {theirs[step]!r}"
        for what in ("grads", "weights", "buffers") if step == 0 else ():
            if unlike := _unlike(what, found, wanted, allowed, source if what == "weights" else {}, in_double):
                return unlike
    return _unlike("adapters", found, wanted, allowed, source, in_double) or _routing(found, wanted, allowed)


def apart(one: float, other: float) -> float:
    return 0.0 if one == other or (math.isnan(one) and math.isnan(other)) else abs(one - other) / max(abs(other), 1e-6)


def _unlike(
    what: str,
    found: Figures,
    wanted: Figures,
    allowed: Tolerance,
    source: Mapping[str, Tensor],
    in_double: Callable[[], Figures] | None,
) -> str | None:
    """The first tensor that is another, or whose change from the source is."""
    ours, theirs = getattr(found, what), getattr(wanted, what)
    tolerance = allowed.grads if what == "grads" else allowed.weights
    if others := [n for n in ours.keys() & theirs.keys() if ours[n].dtype != theirs[n].dtype]:
        return f"{what}: {others} have another dtype"
    if math.isinf(tolerance) or (what == "buffers" and not (ours and theirs)):
        return None
    for name in sorted(ours.keys() ^ theirs.keys()):
        if what != "grads" or not allowed.may_lack or bool(ours.get(name, theirs.get(name)).any()):
            return f"{what}: {name} is in one of them alone"
    changes = {
        name: tensor.double() - source[name].double() if source else tensor.double()
        for name, tensor in theirs.items()
        if name in ours and not (tensor.isnan().any() and has_same_bits(ours[name], tensor))
    }
    errors = {name: float((ours[name].double() - theirs[name].double()).norm()) for name in changes}
    norm = math.sqrt(sum(float(change.square().sum()) for change in changes.values()))
    if what == "grads" and allowed.as_one:
        error = math.sqrt(sum(error**2 for error in errors.values()))
        return None if error <= tolerance * norm else f"grads: all are off by {error:.3g} of {norm:.3g}"
    rounding = OF_ADDED * norm if what == "grads" or source else 0.0
    for name, change in changes.items():
        is_noisy = bool(allowed.noisy) and re.search(allowed.noisy, name) is not None
        if is_noisy and what != "grads":
            continue
        limit = tolerance * (2 if is_noisy else 1) * float(change.norm()) + rounding
        if source:
            limit += OF_ADDED * float(source[name].double().norm())
        error = errors[name]
        if not error <= limit and (
            in_double is None
            or not error <= MOST_NOISE * limit
            or error > NOISE * float((getattr(in_double(), what)[name] - theirs[name]).norm())
        ):
            return f"{what}: {name} is off by {error:.3g} of {'a change by ' * bool(source)}{float(change.norm()):.3g}"
    return None


def _routing(found: Figures, wanted: Figures, allowed: Tolerance) -> str | None:
    """What the log tells of routing, where both have it: the same, but for what is rounded."""
    ours, theirs = (dict(figures.routing) for figures in (found, wanted))
    if not ours or not theirs or math.isinf(allowed.moved):
        return None
    entropies = [torch.tensor(each.pop("router_entropy")).flatten().tolist() for each in (ours, theirs)]
    if not all(apart(*pair) <= allowed.after for pair in zip(*entropies, strict=True)):
        return f"routing: entropies {entropies[0]}, not {entropies[1]}"
    counts, wanted_counts = (torch.tensor(each.pop("expert_tokens")) for each in (ours, theirs))
    is_near = float((counts - wanted_counts).abs().sum()) <= allowed.moved * float(wanted_counts.sum())
    if not is_near or ours.keys() != theirs.keys() or (not allowed.moved and ours != theirs):
        return f"routing: {found.routing}, not {wanted.routing}"
    return None

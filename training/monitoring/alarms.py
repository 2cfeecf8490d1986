"""Warnings about a run that goes wrong without failing: a loss that jumps, experts that hardly a token reaches.

They only warn, and are computed alike on all ranks. What they have seen is not saved: a resumed run begins anew.

Shape suffixes: L MoE layers, E experts.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...moe.experts.router_stats import Routing, over_ranks
from ...moe.util.telling import telling
from ..config.train_config import TrainConfig
from ..loss.balance import Balance
from ..steps.step import StepResult
from .log import RunLog

LOSS_WINDOW = 64
"""Finite steps that a loss is compared with; also how many steps pass between two warnings."""
LOSS_NEEDED = 16
"""Finite steps before the first comparison."""
LOSS_DEVIATIONS = 6.0
LOSS_MARGIN = 0.1
"""Fraction of the mean: a loss that hardly moves would otherwise alarm at nothing."""
LAYERS_NAMED = 4
ENOUGH_TOKENS = 1000
"""Tokens of the mean expert that are enough for a verdict on a run that is shorter than a window. With fewer, an expert
that a pretrained router chooses a hundred times more rarely than the mean may have got none by chance."""
CHECK_EVERY = 10
"""Steps after which ranks add up where their tokens went, and a collapsed router is warned of."""
LEAST_STEPS = 5
"""Steps after which routers are judged, unless windows are shorter: of one batch alone, tokens may choose alike."""
COLLAPSED = 0.75
"""Of the experts that get no token when all tokens choose the same ones: the share without any that is a collapse."""
COLLAPSE_TOKENS = 32
"""Tokens of the mean expert that are enough to call it one. By chance, most experts would get a token of so many."""


class Alarms:
    """Everything that is watched in a run."""

    def __init__(self, config: TrainConfig, balance: Balance, top_k: int, groups: Sequence[int], log: RunLog):
        self.log = log
        self.loss = LossAlarm(config.learning_rate)
        self.router = RouterAlarm(config, balance, top_k, groups)
        self.every = min(CHECK_EVERY, config.router_warn_steps)
        self.steps = 0
        self.routing: Routing | None = None

    def step(self, step: int, result: StepResult) -> None:
        """Take in a step. All ranks call it together, after every step."""
        if not result.is_finite:
            return
        found: str | None = None
        with telling("no warnings of the loss", self.log.warn):
            found = self.loss.check(step, result.loss)
        self._warn(step, found)
        if self.every:
            self.steps += 1
            self.routing = result.routing if self.routing is None else self.routing + result.routing
            if self.steps == self.every:
                self._check_routers(step)

    def end(self, step: int) -> None:
        """Look once more when training ends: a run may be shorter than a window. All ranks call it together."""
        self._check_routers(step)
        self._warn_of_routers(step, self.router.end)

    def _check_routers(self, step: int) -> None:
        if self.routing is not None:
            tokens_LE = over_ranks(self.routing).counts_LE.cpu().numpy()
            self._warn_of_routers(step, partial(self.router.check, self.steps, tokens_LE))
        self.steps, self.routing = 0, None

    def _warn_of_routers(self, step: int, check: Callable[[], list[str]]) -> None:
        warnings: list[str] = []
        with telling("no warnings of routers", self.log.warn):
            warnings = check()
        for warning in warnings:
            self._warn(step, warning)

    def _warn(self, step: int, warning: str | None) -> None:
        if warning is not None:
            self.log.event({"step": step, "warning": warning}, f"warning: step {step}: {warning}")


class LossAlarm:
    """A loss that is above the mean of the last finite ones by 6 of their standard deviations, and by a tenth."""

    def __init__(self, learning_rate: float):
        self.learning_rate = learning_rate
        self.losses: deque[float] = deque(maxlen=LOSS_WINDOW)
        self.warned_at: int | None = None

    def check(self, step: int, loss: float) -> str | None:
        """Take in the finite loss of a step; the warning, if there is one."""
        earlier = list(self.losses)
        self.losses.append(loss)
        if len(earlier) < LOSS_NEEDED or (self.warned_at is not None and step - self.warned_at < LOSS_WINDOW):
            return None
        mean, deviation = float(np.mean(earlier)), float(np.std(earlier))
        if loss <= mean + max(LOSS_DEVIATIONS * deviation, LOSS_MARGIN * mean):
            return None
        self.warned_at = step
        return (
            f"loss spike: {loss:.4f}, after a mean of {mean:.4f} with a standard deviation of "
            f"{deviation:.4f}; if it does not recover, resume from an earlier checkpoint with a lower "
            f"--learning-rate (now {self.learning_rate:g}), a lower --max-grad-norm, or other data"
        )


class RouterAlarm:
    """Experts, and groups of them, without a single token, or experts with far more than the mean, over windows of
    --router-warn-steps steps.

    A window also ends with the run. It is then judged for experts without a token, if the mean expert has
    `ENOUGH_TOKENS`, and for an expert that was overloaded in all of it and in the latest steps, by a bound that is
    higher the shorter the window is. It does not end earlier: in a random model's first tens of steps, some experts may
    get thrice the mean and others nothing, though the balancing loss works. Only a router that sends almost all tokens
    to the same few experts is warned of at once, from the latest steps alone, or from the window's where these have too
    few tokens. Each kind is warned of once.

    Args:
        top_k: experts per token.
        groups: of experts, in each layer, from which its router chooses some for a token before it chooses experts; 1
            where it has none.
    """

    def __init__(self, config: TrainConfig, balance: Balance, top_k: int, groups: Sequence[int]):
        self.config = config
        self.balance = balance
        self.top_k = top_k
        self.groups = groups
        self.steps = 0
        self.tokens_LE: Any = 0
        self.latest_LE: Any = 0
        self.warned: set[str] = set()

    def check(self, num_steps: int, tokens_LE: np.ndarray) -> list[str]:
        """Take in the tokens of each expert, over all ranks, in `num_steps` more steps; warnings, if there are any."""
        if self.config.router_warn_steps == 0:
            return []
        self.steps += num_steps
        self.tokens_LE, self.latest_LE = self.tokens_LE + tokens_LE, tokens_LE
        collapsed = None
        if self._has_seen_enough:
            collapsed = self._collapsed(num_steps, tokens_LE) or self._collapsed(self.steps, self.tokens_LE)
        if collapsed is not None and not self.warned:
            self.warned |= {"group", "dead", "load"}  # which would say the same of it
            return [f"{collapsed}; {self._remedy()}"]
        return self._verdict() if self.steps >= self.config.router_warn_steps else []

    def end(self) -> list[str]:
        """Warnings of the window that the end of training leaves open, if there are any."""
        return self._verdict() if self.steps and self._has_seen_enough else []

    @property
    def _has_seen_enough(self) -> bool:
        return self.steps >= min(LEAST_STEPS, self.config.router_warn_steps)

    def _verdict(self) -> list[str]:
        """Warnings of a window, which then begins anew."""
        is_full, fewest = self.steps >= self.config.router_warn_steps, self.tokens_LE.mean(axis=1).min()
        found: dict[str, str | None] = {}
        if is_full or fewest >= ENOUGH_TOKENS:
            found |= {"group": self._dead_groups(), "dead": self._dead()}
        if is_full or fewest >= COLLAPSE_TOKENS:
            found["load"] = self._overloaded()
        self.steps, self.tokens_LE = 0, 0
        new = {kind: text for kind, text in found.items() if text is not None and kind not in self.warned}
        self.warned |= new.keys()
        return [f"{text}; {self._remedy()}" for text in new.values()]

    def _collapsed(self, steps: int, tokens_LE: np.ndarray) -> str | None:
        """A warning of layers in which almost all tokens choose the same experts."""
        mean_L, num_experts = tokens_LE.mean(axis=1), tokens_LE.shape[1]
        dead_L = (tokens_LE == 0).sum(axis=1)
        load_L = _loads(tokens_LE).max(axis=1)
        most_dead = num_experts - self.top_k
        has = (mean_L >= COLLAPSE_TOKENS) & (dead_L >= COLLAPSED * most_dead) & (dead_L > 0)
        layers = np.flatnonzero(has & (load_L > self._default_bound(num_experts)))
        if not len(layers):
            return None
        first, others = layers[0], len(layers) - 1
        more = f"; {others} more layer{'s' * (others > 1)} collapsed too" if others else ""
        return (
            f"router collapse: in {steps} steps, {dead_L[first]} of the {num_experts} experts of layer {first} got no "
            f"token, and expert {tokens_LE[first].argmax()} got {load_L[first]:.2f} times the mean{more}"
        )

    def _dead_groups(self) -> str | None:
        """A warning of groups of experts that are never chosen: none of their experts can learn."""
        layers = zip(self.tokens_LE, self.groups, strict=True)
        tokens = [tokens_E.reshape(n, -1).sum(axis=1) if n > 1 else tokens_E[:0] for tokens_E, n in layers]
        return self._without_tokens("groups of experts", tokens)

    def _dead(self) -> str | None:
        return self._without_tokens("experts", list(self.tokens_LE))

    def _without_tokens(self, what: str, tokens: Sequence[np.ndarray]) -> str | None:
        dead = [np.flatnonzero(of_layer == 0) for of_layer in tokens]
        if not any(map(len, dead)):
            return None
        layers = [
            f"layer {layer}: {', '.join(map(str, numbers))}" for layer, numbers in enumerate(dead) if len(numbers)
        ]
        more = f"; and in {len(layers) - LAYERS_NAMED} more layers" if len(layers) > LAYERS_NAMED else ""
        return (
            f"router collapse: {sum(map(len, dead))} of {sum(map(len, tokens))} {what} got no token in {self.steps} "
            f"steps ({'; '.join(layers[:LAYERS_NAMED])}{more})"
        )

    def _overloaded(self) -> str | None:
        loads_LE = judged_LE = _loads(self.tokens_LE)
        least = bound = self.config.router_warn_load or self._default_bound(loads_LE.shape[1])
        if (missing := 1 - self.steps / self.config.router_warn_steps) > 0:
            judged_LE = np.minimum(loads_LE, _loads(self.latest_LE))
            # from the greatest there can be, in no steps, to the bound, in a full window
            least += max(loads_LE.shape[1] / self.top_k - bound, 0) * missing**2
        layer, expert = np.unravel_index(judged_LE.argmax(), judged_LE.shape)
        if judged_LE[layer, expert] <= least:
            return None
        return (
            f"uneven router: expert {expert} of layer {layer} got {loads_LE[layer, expert]:.2f} times the mean in "
            f"{self.steps} steps, above --router-warn-load {bound:g}"
        )

    def _default_bound(self, num_experts: int) -> float:
        """Halfway between an even load, 1, and the greatest there can be, every token at the same K experts: E/K."""
        return (1 + num_experts / self.top_k) / 2

    def _remedy(self) -> str:
        z = self.balance.weights.z
        return (
            f"{self.balance.remedy()}, or --router-z-loss-coef (now {z:g}) if the router's scores are "
            f"extreme, or lower --learning-rate (now {self.config.learning_rate:g})"
        )


def _loads(tokens_LE: np.ndarray) -> np.ndarray:
    """Each expert's tokens, in times the mean of its layer."""
    loads_LE: np.ndarray = tokens_LE / np.maximum(tokens_LE.mean(axis=1, keepdims=True), 1e-30)
    return loads_LE

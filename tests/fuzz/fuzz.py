"""One seed after another: what transformers computes against our ranks in two parallel layouts, and each difference.

What cannot be is not listed anywhere: a config that transformers itself cannot run is drawn with fewer changes, and of
what the product refuses the flag that it names is left out. Both are counted, so that nobody tests nothing unawares.
"""

import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.distributed.pool import RankFailure, RankPool
from tests.families.configs import tiny_model
from tests.fuzz.draw import Draw, Layout, draw
from tests.fuzz.expected import expected
from tests.fuzz.ranks import trained
from tests.in_double import InDouble
from tests.parity.case import Figures
from tests.parity.compare import Tolerance, first_difference, with_other_bits

ALLOWED = Tolerance(figures=2e-5, after=2e-4, weights=2e-5)
"""What follows an update as large as the gradient has the differences of gradients in it."""
BETWEEN_OURS = replace(ALLOWED, figures=4e-5, weights=4e-5)
MOST_REFUSALS = 12


@dataclass
class Outcome:
    """What became of a seed.

    Attributes:
        drawn: as it was settled, after refusals.
        refused: what was left out, with the reason. unlike: the first difference, in words; None where there is none.
        layouts: that were compared. in_double: whether it took fp64 to judge.
    """

    seed: int
    drawn: Draw | None = None
    refused: list[str] = field(default_factory=list)
    unlike: str | None = None
    layouts: list[Layout] = field(default_factory=list)
    in_double: bool = False
    seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        """Everything, for whoever replays it."""
        equal = "equal" + " within what fp32 can tell" * self.in_double
        verdict = self.unlike or (equal if self.layouts else "refused")
        yield f"seed {self.seed}: {verdict}"
        if self.drawn is None:
            return
        lengths = [[len(sample.tokens) for sample in row] for row in self.drawn.rows]
        yield f"  family {self.drawn.family}, changes {self.drawn.changes}"
        images = [[len(sample.images) for sample in row] for row in self.drawn.rows]
        yield f"  samples {lengths}, images {images}"
        yield f"  micro-batches {self.drawn.micro_batches}, flags {self.drawn.flags}"
        for layout in self.layouts:
            yield f"  on {layout.world_size}: {layout.flags}"
        for reason in self.refused:
            yield f"  refused: {reason}"
        yield f"  python -m tests.fuzz --seed {self.seed}  ({self.seconds:.1f} s)"


def try_seed(seed: int, ranks: RankPool) -> Outcome:
    """Draw, run and compare."""
    begin, outcome = time.monotonic(), Outcome(seed)
    with tempfile.TemporaryDirectory() as name:
        try:
            _try(outcome, ranks, Path(name))
        except RankFailure as failure:
            outcome.unlike = f"a rank failed:\n{failure}"
        except Exception:
            outcome.unlike = f"no comparison came about:\n{traceback.format_exc()}"
    outcome.seconds = time.monotonic() - begin
    return outcome


def _try(outcome: Outcome, ranks: RankPool, directory: Path) -> None:
    drawn = _legal(outcome, directory / "source")
    if drawn is None:
        return
    outcome.drawn = drawn
    found = _on_ranks(outcome, ranks, directory)
    if found is None:
        return
    drawn = outcome.drawn
    wanted, adapters_before = expected(drawn, directory / "expected")
    source = adapters_before if drawn.has_adapters else load_file(directory / "source" / "model.safetensors")
    doubled: list[Figures] = []

    def in_double() -> Figures:
        if not doubled:
            outcome.in_double = True
            with InDouble():
                doubled.append(expected(drawn, directory / "double", torch.float64)[0])
        return doubled[0]

    figures = []
    for number, (steps, adapters) in enumerate(found):
        out = directory / str(number)
        if not drawn.has_adapters and (
            others := with_other_bits(load_file(out / "loaded" / "model.safetensors"), source)
        ):
            outcome.unlike = f"layout {number + 1}: exported as loaded: {others} are not those of the source"
            return
        losses, norms, balances, zs = map(list, zip(*steps, strict=True))
        updated = {} if drawn.has_adapters else load_file(out / "updated" / "model.safetensors")
        figures.append(Figures(losses, norms, balances, zs, weights=updated, adapters=adapters))
        if unlike := first_difference(figures[-1], wanted, ALLOWED, source, in_double):
            outcome.unlike = f"layout {number + 1} and transformers: {unlike}"
            return
    if unlike := first_difference(figures[1], figures[0], BETWEEN_OURS, source, in_double):
        outcome.unlike = f"layout 2 and layout 1: {unlike}"


def _legal(outcome: Outcome, path: Path) -> Draw | None:
    """A draw that transformers itself can run, with as many of its changes as can be; its model is saved."""
    drawn = draw(outcome.seed)
    refusal = _refusal_of_transformers(drawn, path)
    asked = [name for name in drawn.flags if name.startswith("router_")]
    if asked and not tells_router_logits(drawn.family):
        outcome.refused.append(f"transformers, {drawn.family}: tells no logits of some routers")
        drawn = replace(drawn, flags={name: value for name, value in drawn.flags.items() if name not in asked})
    while refusal is not None and drawn.changes:
        outcome.refused.append(f"transformers, {drawn.family}: {refusal}")
        fewer = [
            replace(drawn, changes={name: value for name, value in drawn.changes.items() if name != other})
            for other in drawn.changes
        ]
        for one in fewer:
            if _refusal_of_transformers(one, path) is None:
                return one
        drawn = fewer[0]
        refusal = _refusal_of_transformers(drawn, path)
    return drawn if refusal is None else None


@cache
def tells_router_logits(family: str) -> bool:
    """Whether a family's own class gives those of every MoE layer, where it is asked: what losses are taken of."""
    model: Any = tiny_model(family, seed=1)
    with torch.no_grad():
        out = model(input_ids=torch.arange(3, 9)[None], use_cache=False, output_router_logits=True)
    num_layers = sum(hasattr(module, "is_concatenated") for module in model.modules())
    return len(getattr(out, "router_logits", None) or ()) == num_layers


def _refusal_of_transformers(drawn: Draw, path: Path) -> str | None:
    """Why it cannot be run; or None, and it is saved."""
    try:
        model = drawn.model()
        logits = model.train()(**drawn.inputs(model, drawn.rows[0][0])).logits
        logits.sum().backward()
        model.save_pretrained(path)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip():.200}"
    return None if bool(torch.isfinite(logits).all()) else "logits are not finite"


def _on_ranks(outcome: Outcome, ranks: RankPool, directory: Path) -> list[Any] | None:
    """What each layout gave; None where the model is refused. A flag that is refused is left out: of the layout where
    it is one of its own, else of what is computed, for both; and so is a change to the config."""
    assert outcome.drawn is not None
    found: list[Any] = []
    layouts, drawn = list(outcome.drawn.layouts), outcome.drawn
    for attempt in range(MOST_REFUSALS):
        number = len(found)
        layout, out = layouts[number], directory / f"attempt {attempt}"
        first = ranks.run(trained, layout.world_size, directory / "source", drawn, layout.flags, out)[0]
        if not isinstance(first, str):
            found.append(first)
            if out.exists():
                out.rename(directory / str(number))
            if len(found) == len(layouts):
                outcome.drawn, outcome.layouts = drawn, layouts
                return found
            continue
        outcome.refused.append(first)
        named = [name.replace("-", "_") for name in re.findall(r"--(?:no-)?([a-z][a-z-]+)", first)]
        if name := next((name for name in named if name in layout.flags), None):
            layouts[number] = layout.without(name)
        elif (name := next((name for name in named if name in drawn.flags), None)) and name != "images":
            drawn, found = without(drawn, name), []
        elif name := next((name for name in drawn.changes if re.search(rf"\b{name}\b", first)), None):
            changes = {key: value for key, value in drawn.changes.items() if key != name}
            drawn, found = replace(drawn, changes=changes), []
            if _refusal_of_transformers(drawn, directory / "source") is not None:
                return None
        else:
            return None
    return None


def without(drawn: Draw, name: str) -> Draw:
    """The same without a flag of what is computed."""
    flags = {key: value for key, value in drawn.flags.items() if key != name}
    rows = drawn.rows if name != "packing" else [[sample] for row in drawn.rows for sample in row]
    return replace(drawn, flags=flags, rows=rows)


# ---- many seeds ----


@dataclass
class Tally:
    """Of many seeds: what was compared, how often each mechanism was there, and what was refused."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def compared(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.layouts]

    def lines(self) -> Iterator[str]:
        in_double = sum(outcome.in_double for outcome in self.compared)
        yield f"{len(self.outcomes)} seeds, {len(self.compared)} compared, of these {in_double} judged in fp64"
        mechanisms = Counter(name for outcome in self.compared for name in mechanisms_of(outcome))
        yield "with " + ", ".join(f"{name} {number}" for name, number in sorted(mechanisms.items()))
        refused = Counter(_kind(reason) for outcome in self.outcomes for reason in outcome.refused)
        for reason, number in refused.most_common():
            yield f"refused {number} times: {reason}"


def _kind(reason: str) -> str:
    """A refusal without its values."""
    return re.sub(r"[0-9][0-9.,]*", "N", reason)[:110]


def mechanisms_of(outcome: Outcome) -> set[str]:
    """What was at work in a seed that was compared."""
    assert outcome.drawn is not None
    drawn = outcome.drawn
    names = {*drawn.changes, *(name for name, value in drawn.flags.items() if value)}
    for layout in outcome.layouts:
        for name, value in layout.flags.items():
            if value not in (1, False):
                names.add(name.removesuffix("_size") if name.endswith("_size") else f"{name} {value}")
    return names


def run_seeds(
    seeds: Iterable[int], ranks: RankPool, until: float, tell: Callable[[Outcome], object] = lambda outcome: None
) -> Tally:
    """Try seeds one after the other.

    Args:
        until: when no other one is started, by `time.monotonic`.
        tell: is given each as it is done.
    """
    tally = Tally()
    for seed in seeds:
        if time.monotonic() >= until:
            break
        tally.outcomes.append(try_seed(seed, ranks))
        tell(tally.outcomes[-1])
    return tally

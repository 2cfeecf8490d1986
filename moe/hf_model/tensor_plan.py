"""Which modules of a model tensor parallelism divides, by transformers' own plan (`base_model_tp_plan` of the config's
class: `build_model` forgets one that a config.json brings).

The plan names linear layers: "colwise" ones are divided by their outputs, "rowwise" ones by their inputs. What stands
between them, such as attention on some of the heads, works on one part, and the results of all parts are added up. So a
plan divides a module (attention, an MLP) that has both kinds; here it is a region.

Experts are not divided by their plan: they are distributed over the ep axis.

Shape suffixes: N outputs of a linear layer, K its inputs.
"""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..experts.layer import DMoE
from ..experts.model_facts import facts_of
from ..experts.model_layers import decoder_layers, router_prefixes
from ..linear.linear import is_linear

_COLWISE = frozenset({"colwise", "colwise_gather_output"})
_ROWWISE = frozenset({"rowwise", "rowwise_split_input"})
_PACKED = frozenset({"packed_colwise", "packed_rowwise"})
"""Of layers whose rows, or columns, are several matrices', such as gate and up: of each a rank would need its part. A
region with one is not divided."""


@dataclass(frozen=True)
class DividedModule:
    """A module that is divided.

    Attributes:
        path: of the module.
        colwise: paths of the linear layers that are divided by their outputs. rowwise: by their inputs.
        values: names of parameters with an entry for each head, or another part of the outputs, which no linear layer
            has.
        gathers: whether something between needs all outputs at once, such as a norm over the full width.
    """

    path: str
    colwise: tuple[str, ...]
    rowwise: tuple[str, ...]
    values: tuple[str, ...] = ()
    gathers: bool = False


def regions_of(model: Any) -> list[DividedModule]:
    """The modules of a model's decoder layers that its plan divides, in the model's order; none where the plan has
    nothing for them, code of the model's own reads a weight that would be divided, or layers of several matrices are
    not cut into contiguous rows.

    Args:
        model: from transformers, with our experts in it, and its facts.
    """
    styles = _styles(model)
    inside_experts = [f"{path}." for path, part in model.named_modules() if isinstance(part, DMoE)]
    passed_over = (*inside_experts, *router_prefixes(model))
    by_parent: dict[str, dict[str, str]] = {}
    for path, style in styles.items():
        if style in _COLWISE | _ROWWISE | _PACKED and not path.startswith(passed_over):
            by_parent.setdefault(path.rpartition(".")[0], {})[path] = style
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    read_weights = facts_of(model).read_weights
    regions = []
    for parent, found in by_parent.items():
        linear = {path: style for path, style in found.items() if _is_linear(modules.get(path))}
        colwise = tuple(path for path, style in linear.items() if style in _COLWISE)
        rowwise = tuple(path for path, style in linear.items() if style in _ROWWISE)
        is_fused = any(style in _PACKED for style in linear.values()) or _is_fused(linear, modules)
        if colwise and rowwise and not is_fused and read_weights.isdisjoint(linear):
            values = tuple(path for path in found if path in parameters)
            gathers = any(style == "colwise_gather_output" for style in linear.values())
            regions.append(DividedModule(parent, colwise, rowwise, values, gathers))
    return regions


def _is_linear(module: nn.Module | None) -> bool:
    """Whether it is a linear layer that has something to divide: shared experts may be of width 0."""
    return isinstance(module, nn.Linear) and is_linear(module) and module.in_features > 0 and module.out_features > 0


def _is_fused(linear: dict[str, str], modules: dict[str, Any]) -> bool:
    """Whether an output that a region's code gets in full has several matrices' side by side, as it is wider than what
    the region ends with: that code would cut a part of it as if it were all."""
    ends = [modules[path].in_features for path, style in linear.items() if style in _ROWWISE]
    gathered = [modules[path].out_features for path, style in linear.items() if style == "colwise_gather_output"]
    return bool(ends) and any(width > max(ends) for width in gathered)


def _styles(model: Any) -> dict[str, str]:
    """The plan's style of each module, or parameter, of the decoder layers, by path."""
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    layers = decoder_layers(model)
    base = next(path for path, part in model.named_modules() if any(child is layers for child in part.children()))
    prefix = f"{base}." if base else ""
    rules = [(re.compile(re.escape(prefix + rule).replace(r"\*", r"\d+")), style) for rule, style in plan.items()]
    names = [path for path, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    return {name: style for name in names for rule, style in rules if rule.fullmatch(name)}

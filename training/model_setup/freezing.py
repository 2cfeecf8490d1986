"""What of a model is not trained: --freeze.

A frozen parameter has no gradient, so that nothing is reduced for it, and no optimizer state. It is sharded, gathered
and saved like the others.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...moe.experts.layer import DMoE
from ...moe.experts.model_layers import decoder_layers, layer_prefixes, moe_layers, router_prefixes
from ...moe.hf_model.images import image_parameters, images_of, parameters_by_part
from ...moe.util.errors import ExpertMeshError
from .selection import select

_Names = dict[str, nn.Parameter]


@dataclass(frozen=True)
class Frozen:
    """entries: of --freeze. frozen, total: elements of parameters."""

    entries: tuple[str, ...]
    frozen: int
    total: int

    def line(self) -> str:
        """For a run's first lines."""
        return (
            f"frozen: {', '.join(self.entries)}: {self.frozen / 1e6:,.1f} M of {self.total / 1e6:,.1f} M parameters "
            f"({self.frozen / self.total:.1%}); {(self.total - self.frozen) / 1e6:,.1f} M are trained"
        )


def freeze(model: Any, entries: list[str]) -> Frozen:
    """Have parameters take no gradient, in place.

    Args:
        model: from `build_model`, before it is parallelised.
        entries: names of groups, and regular expressions that are searched for in parameters' names. A tied parameter
            goes by any of its names. Of what images alone pass, they freeze what no parameter of the language model
            fits.

    Raises:
        ExpertMeshError: an entry is no regular expression, or fits nothing; or nothing is left to train, of a part
            that --train-vision has named, too.
    """
    # the names under which checkpoints and logs know them are the first of each
    names: _Names = dict(model.named_parameters(remove_duplicate=False))
    of_images = set(image_parameters(model))
    parts = parameters_by_part(model) if of_images else {}
    trained = [part for part, some in parts.items() if any(p.requires_grad for p in some)]
    groups = groups_of(model)
    for entry in entries:
        found = groups.get(entry)
        if entry == "vision" and images_of(model) is not None:
            raise ExpertMeshError("--freeze vision: it is frozen unless --train-vision names it; leave it out there")
        if found is None:
            found = {name: names[name] for name in select("--freeze", entry, names, "parameter", groups, names)}
        if not found:
            raise ExpertMeshError(
                f"--freeze {entry}: this model has none; it has {', '.join(name for name in groups if groups[name])}"
            )
        in_language_model = {name: p for name, p in found.items() if p not in of_images}
        for parameter in (in_language_model or found).values():
            parameter.requires_grad_(False)
        for part in trained:
            if not any(p.requires_grad for p in parts[part]):
                raise ExpertMeshError(
                    f"--freeze {entry} freezes all that --train-vision {part} is to train; leave one of them out"
                )
    parameters = list(model.parameters())
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    total = sum(p.numel() for p in parameters)
    if frozen == total:
        raise ExpertMeshError(f"--freeze {' '.join(entries)} leaves nothing to train")
    return Frozen(tuple(entries), frozen, total)


def freeze_images(model: Any, trained: list[str]) -> None:
    """Have the parameters that images alone pass take no gradient, but for those of some parts, in place.

    Args:
        trained: names of these parts.

    Raises:
        ExpertMeshError: the model has no such part.
    """
    for part, parameters in parameters_by_part(model).items():
        for parameter in parameters:
            parameter.requires_grad_(part in trained)
        if part in trained and not parameters:
            raise ExpertMeshError(f"--train-vision {part}: {type(model).__name__} has none; leave it out")


def images_line(model: Any) -> str:
    """For a run's first lines: what is trained of the parts that images alone pass."""
    said = []
    for part, parameters in parameters_by_part(model).items():
        number = sum(p.numel() for p in parameters) / 1e6
        trained = sum(p.numel() for p in parameters if p.requires_grad) / 1e6
        how = "frozen" if not trained else "trained" if trained == number else f"{trained:,.1f} M trained"
        said.append(f"{part} ({number:,.1f} M parameters) {how}")
    return f"images: {', '.join(said)}"


def check_experts_frozen(model: Any) -> None:
    """
    Raises:
        ExpertMeshError: experts, beside whatever adapters they have, are trained.
    """
    for layer in moe_layers(model):
        trained = [part.name for part in layer.mlp.layout.parameters if getattr(layer.mlp, part.name).requires_grad]
        if trained:
            raise ExpertMeshError(
                f"--offload-experts: keeps frozen experts in host memory, and {', '.join(trained)} of some are "
                "trained; give --adapter lora or --freeze experts, or --offload for what is trained, too"
            )


def groups_of(model: Any) -> dict[str, _Names]:
    """The language model's parameters that each named group has, by name; one may be in several, or in none."""
    of_images = set(image_parameters(model))
    layers = set(decoder_layers(model))
    in_layers, routers = layer_prefixes(model), router_prefixes(model)

    def within(is_one: Callable[[str, nn.Module], bool]) -> _Names:
        return {
            f"{path}.{name}": parameter
            for path, module in model.named_modules()
            if is_one(path.rpartition(".")[2], module) and module not in layers
            for name, parameter in module.named_parameters()
            if parameter not in of_images
        }

    def is_norm(name: str, module: nn.Module) -> bool:
        return "norm" in type(module).__name__.lower()

    def is_attention(name: str, module: nn.Module) -> bool:
        named = re.search("attn|attention", f"{name} {type(module).__name__}", re.IGNORECASE)
        return named is not None and not is_norm(name, module)

    shared = within(lambda name, module: name.startswith("shared"))
    return {
        "experts": within(lambda name, module: isinstance(module, DMoE)),
        "router": {name: p for name, p in model.named_parameters() if name.startswith(routers)},
        "shared-experts": {name: p for name, p in shared.items() if name.startswith(in_layers)},
        "attention": within(is_attention),
        "embeddings": within(lambda name, module: isinstance(module, nn.Embedding)),
        "norms": within(is_norm),
    }

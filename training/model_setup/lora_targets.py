"""Which modules get adapters: --adapter and --lora-targets."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...checkpoints.adapters.peft_format import reads_by_expert
from ...checkpoints.adapters.servers import servable
from ...moe.experts.layer import DMoE
from ...moe.experts.lora import Lora, add_adapters, is_adapter, linear_layers, unquantized
from ...moe.experts.model_facts import facts_of
from ...moe.experts.model_layers import layer_prefixes, moe_layers, router_prefixes
from ...moe.hf_model.images import image_prefixes
from ...moe.util.errors import ExpertMeshError
from ..config.train_config import TrainConfig
from .freezing import groups_of
from .selection import select

SERVABLE = "servable"
"""The target that stands for what every server loads rightly."""

_OF_SERVABLE = ("attention", "shared-experts", "dense-mlp")
_NOT_CALLED = "the model's code multiplies by the weight itself"


@dataclass(frozen=True)
class Adapted:
    """lora: of all adapters. targets: as asked for, those of `SERVABLE` by name. whole: paths of modules trained whole
    beside them. passed_over: paths of layers among the targets that are not called. trained, total: elements of
    parameters, adapters included."""

    lora: Lora
    targets: tuple[str, ...]
    whole: tuple[str, ...]
    passed_over: tuple[str, ...]
    trained: int
    total: int

    def line(self) -> str:
        """For a run's first lines."""
        lora = self.lora
        kind = f"rank {lora.rank}, alpha {lora.alpha:g}" + (", rsLoRA" if lora.use_rslora else "")
        dropout = f", dropout {lora.dropout:g}" if lora.dropout else ""
        whole = f", and whole {_last_names(self.whole)}" if self.whole else ""
        whole += f", not on {_last_names(self.passed_over)} ({_NOT_CALLED})" if self.passed_over else ""
        return (
            f"adapter: LoRA, {kind}{dropout}, on {', '.join(self.targets)}{whole}: {self.trained / 1e6:,.2f} M of "
            f"{self.total / 1e6:,.1f} M parameters are trained ({self.trained / self.total:.2%})"
        )


def lora_of(config: TrainConfig) -> Lora:
    return Lora(config.lora_rank, config.lora_alpha, config.lora_dropout, config.use_rslora)


def adapt(model: Any, config: TrainConfig) -> Adapted:
    """Give a model the adapters that a configuration asks for, in place, and freeze all else but --modules-to-save.

    Args:
        model: from `build_model`, before it is parallelised.

    Raises:
        ExpertMeshError: a target fits nothing that can have an adapter, or a module is to be trained whole that cannot.
    """
    lora = lora_of(config)
    # the head gives a loss, of parts of the sequence at a time; it has no adapter
    head, every = model.get_output_embeddings(), linear_layers(model)
    vision = {path for path in every if path.startswith(image_prefixes(model))}
    linear = {path: module for path, module in every.items() if module is not head and path not in vision}
    uncalled = facts_of(model).uncalled - vision
    routers = _plain_routers(model, linear)
    named = {**_targets_by_name(model, linear), "vision": vision}
    targets = dict.fromkeys(config.lora_targets)
    chosen: set[str] = set()
    chosen_routers: set[str] = set()
    if SERVABLE in targets:
        named[SERVABLE] = servable({path for group in _OF_SERVABLE for path in named[group]} - uncalled)
        if not _are_packed(model, config):
            targets["experts"] = None
    for target in targets:
        if target in ("experts", "router"):
            continue
        if target == "all-linear":  # as PEFT means it
            chosen |= linear.keys() | vision
            chosen_routers |= routers
            continue
        paths = named[target] if target in named else _by_pattern(target, named, linear, routers, vision)
        if not paths:
            there = [name for name in (*named, "experts", "router") if named.get(name, True)]
            if target == "vision":
                raise ExpertMeshError("--lora-targets vision: there is no vision tower without --images; add it")
            raise ExpertMeshError(f"--lora-targets {target}: this model has none; it has {', '.join(there)}")
        if paths <= uncalled:
            raise ExpertMeshError(
                f"--lora-targets {target}: {_last_names(paths)} cannot have an adapter: {_NOT_CALLED}; leave it out"
            )
        chosen |= paths - routers
        chosen_routers |= paths & routers
    if "router" in config.lora_targets:
        of_routers = _linear_of_routers(model, linear)
        if not routers and not of_routers:
            raise ExpertMeshError("--lora-targets router: this model's routers have no weight that could be adapted")
        chosen |= of_routers
    else:
        routers = chosen_routers
    add_adapters(
        model,
        lora,
        sorted(chosen - uncalled),
        sorted(routers),
        not {"experts", "all-linear"}.isdisjoint(targets),
    )
    whole = _modules_to_save(model, config.modules_to_save)
    for path in whole:
        if any(is_adapter(name) for name, _ in model.get_submodule(path).named_parameters()):
            raise ExpertMeshError(f"--modules-to-save: {path} has an adapter too; leave it out of --lora-targets")
        model.get_submodule(path).requires_grad_(True)
    parameters = list(model.parameters())
    trained, total = (sum(p.numel() for p in some) for some in ((p for p in parameters if p.requires_grad), parameters))
    if SERVABLE in targets:
        targets = {_last_names(sorted(named[each])) if each == SERVABLE else each: None for each in targets}
    return Adapted(lora, tuple(targets), tuple(whole), tuple(sorted(chosen & uncalled)), trained, total)


def _last_names(paths: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in paths))


def _modules_to_save(model: Any, entries: Iterable[str]) -> list[str]:
    """Paths of the modules that --modules-to-save names. What is tied to one of them is trained with it, and named too.

    Raises:
        ExpertMeshError: an entry fits none that can be trained whole: embedding, head, norms and routers can.
    """
    groups, ends = groups_of(model), (model.get_input_embeddings(), model.get_output_embeddings())
    norms, routers = ({name.rpartition(".")[0] for name in groups[group]} for group in ("norms", "router"))
    modules = dict(model.named_modules())
    possible = {path for path, module in modules.items() if module in ends or path in norms | routers}
    chosen: set[str] = set()
    for entry in entries:
        named = {path for path in possible if f".{path}".endswith(f".{entry}")}
        last = sorted({path.rpartition(".")[2] for path in possible})
        found = named or {"norms": norms, "router": routers}.get(entry) or set()
        chosen |= found or select("--modules-to-save", entry, possible, "module that can be", ("norms", "router"), last)
    if ends[0].weight is ends[1].weight and any(modules[path] in ends for path in chosen):
        chosen |= {path for path in possible if modules[path] in ends}
    return [path for path in modules if path in chosen]


def unquantized_lines(model: Any, config: TrainConfig) -> list[str]:
    """For a run's first lines: which linear layers --base-dtype fp8 or nf4 does not quantize, and why."""
    paths = unquantized(model) if config.quantizes_linear else []
    if not paths:
        return []
    names = sorted({path.removeprefix(layer) for path in paths for layer in layer_prefixes(model)} - set(paths))
    return [
        f"base in {config.base_dtype}, except {len(paths)} linear layers whose weights other code "
        f"reads or that stay fp32: {', '.join(names)}"
    ]


def _are_packed(model: Any, config: TrainConfig) -> bool:
    """Whether adapters of experts are exported in PEFT's packed form."""
    layers = {path: module for path, module in model.named_modules() if isinstance(module, DMoE)}
    return config.adapter_format == "packed" or not all(
        reads_by_expert(model, path, layer.mlp.layout) for path, layer in layers.items()
    )


def _linear_of_routers(model: Any, linear: Mapping[str, nn.Module]) -> set[str]:
    """Linear layers that are routers, or parts of one."""
    routers = router_prefixes(model)
    return {path for path in linear if f"{path}.".startswith(routers)}


def _plain_routers(model: Any, linear: Mapping[str, nn.Module]) -> set[str]:
    """Routers that are no linear layer, but have a matrix `weight` as one has."""
    paths = [layer.router for layer in moe_layers(model) if layer.router is not None]
    weights = {path: getattr(model.get_submodule(path), "weight", None) for path in paths}
    return {
        path
        for path, weight in weights.items()
        if path not in linear and isinstance(weight, nn.Parameter) and weight.dim() == 2
    }


def _targets_by_name(model: Any, linear: Mapping[str, nn.Module]) -> dict[str, set[str]]:
    """The linear layers that each name stands for. Dense MLPs are what is left of the decoder layers."""
    groups = groups_of(model)
    found = {
        name: {path for path in linear if f"{path}.weight" in groups[name]} for name in ("attention", "shared-experts")
    }
    taken = found["attention"] | found["shared-experts"]
    taken |= _linear_of_routers(model, linear)
    found["dense-mlp"] = {path for path in linear if path.startswith(layer_prefixes(model)) and path not in taken}
    return found


def _by_pattern(
    target: str, named: Iterable[str], linear: Iterable[str], routers: Iterable[str], vision: set[str]
) -> set[str]:
    """Linear layers of the language model with that in their names; where there are none, those of the tower, or
    routers."""
    groups = ("experts", "router", *named, SERVABLE)
    last_names = sorted({path.rpartition(".")[2] for path in linear})
    found = select("--lora-targets", target, (*linear, *routers, *vision), "linear layer", groups, last_names)
    return found & set(linear) or found & vision or found

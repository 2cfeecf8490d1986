"""LoRA adapters as PEFT's files have them: what tensors are called, how experts are packed, and adapter_config.json.

A pair (A, B) adapts a linear layer: y = x Wᵀ + scaling · x Aᵀ Bᵀ, with A (rank, in) and B (out, rank). Attention and
other linear layers stand in a file as they are. Experts do in one of two forms, which share one adapter_config.json:

per expert: a pair for each matrix of each expert, by the name that the matrix has in checkpoints. PEFT makes the other
    form of it while it loads, by transformers' mapping of names; it can where that mapping stacks matrices of experts
    into gate_up_proj and down_proj.
packed: a pair for each tensor of transformers' fused experts, A (E·rank, in) with the rank fastest and B (out, rank·E)
    with the expert fastest. Gate and up are one tensor, so their pairs are one of twice the rank.

PEFT trains no dropout and no bias on experts, and refuses a config that has them.

Shape suffixes: E experts, r rank, I what a matrix takes in, O what it gives out.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from math import sqrt
from typing import Any, NamedTuple

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor

from ...moe.experts.layout import ExpertLayout

PEFT_VERSION = "0.21.2"
"""Whose form is written."""

PREFIX = "base_model.model."

REMAPPED = frozenset({"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})
"""Last names of modules that PEFT takes for experts' when they are in target_modules, wherever else they stand: those
of a shared expert, or of a dense layer, would not be adapted, and their tensors be dropped without a word."""


SCALE_SETTINGS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""Settings of PEFT's `LoraConfig` that decide by what B · A is multiplied."""

_PLAIN_SETTINGS = frozenset(
    {
        *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
        *("inference_mode", "runtime_config", *SCALE_SETTINGS),
        # which modules these come to is to be seen from the tensors
        *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
        # PEFT lets go of it where a layer is linear, and refuses it where a parameter is adapted
        "fan_in_fan_out",
        # of training, or of what it starts from; biases that were trained are tensors
        *("lora_dropout", "bias", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("qalora_group_size", "megatron_core", "ensure_weight_tying"),
        # whose tensors stand in the place of the base's
        *("modules_to_save", "trainable_token_indices"),
    }
)
"""Settings of PEFT's `LoraConfig` with which an update is scaling · B · A all the same."""

_PLAIN_INITS = ("gaussian", "orthogonal", "eva", "mica")
"""Values of `init_lora_weights`, besides true and false, that leave the base's weights as they are."""


class LoraPair(NamedTuple):
    """A and B of linear layers. Of one: (r, in) and (out, r). Of a layer's experts: (E, r, in) and (E, out, r).
    Packed: (E·r, in) and (out, r·E)."""

    a: Tensor
    b: Tensor


def lora_names(module: str) -> tuple[str, str]:
    """What A and B of a module are called in a file.

    module: its path in transformers' model, or a path of `packed_paths`; of one expert's matrix, the name it has in
        checkpoints, less `.weight`.
    """
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def packed_paths(experts: str, layout: ExpertLayout, target_parameters: Collection[str]) -> dict[str, str]:
    """Where a file has the packed pair of each adapted tensor of an experts module, by the tensor's name.

    PEFT wraps a module once for each tensor, in the order in which the module registers them: the last is outermost,
    and the others are in its base_layer.

    Args:
        experts: the module's path in transformers' model.
        target_parameters: as adapter_config.json has them.
    """
    paths = {tensor: f"{experts}.{tensor}" for tensor in _matrices(layout)}
    adapted = [tensor for tensor, path in paths.items() if any(end in target_parameters for end in _ends(path))]
    return {tensor: experts + ".base_layer" * (len(adapted) - 1 - place) for place, tensor in enumerate(adapted)}


def pack_experts(pairs: Mapping[str, LoraPair], layout: ExpertLayout) -> dict[str, LoraPair]:
    """The packed pairs of a layer, by the name of transformers' tensor.

    Gate and up become one pair of the sum of their ranks: their A's one above the other, their B's in blocks with zeros
    beside. Values keep their dtype.

    Args:
        pairs: by the layout's names: w1 (gate, or up where there is no gate), v1 (up): A (E, r, D), B (E, F, r), and w2
            (down): A (E, r, F), B (E, D, r).
    """
    return {
        tensor: _pack(pairs[names[0]] if len(names) == 1 else _join(pairs, names, layout))
        for tensor, names in _matrices(layout).items()
    }


def unpack_experts(
    packed: Mapping[str, LoraPair], layout: ExpertLayout, peft_version: str | None
) -> dict[str, LoraPair]:
    """The pairs of a layer, by the layout's names, from packed ones by the name of transformers' tensor.

    What PEFT trained shares its A between gate and up: both get all of it, and their own rows of B. What `pack_experts`
    joined comes apart as it was: its rank is twice that of down, and its B has zeros beside the blocks. What comes back
    are views.

    Args:
        peft_version: as adapter_config.json has it; None where it has none, as before 0.18.

    Raises:
        ValueError: tensors do not have the shapes that this version writes.
    """
    swapped = _has_roles_swapped(peft_version, layout.is_transposed)
    pairs = {
        tensor: _unpack(pair, tensor, _sizes(tensor, layout), layout.shape.num_experts, swapped, peft_version)
        for tensor, pair in packed.items()
    }
    unpacked: dict[str, LoraPair] = {}
    rank = min(pair.a.shape[1] for pair in pairs.values())
    for tensor, names in _matrices(layout).items():
        if tensor not in pairs:
            continue
        unpacked |= {names[0]: pairs[tensor]} if len(names) == 1 else _split(pairs[tensor], names, layout, rank)
    return unpacked


def possible_ranks(packed: Mapping[str, int], layout: ExpertLayout, name: str) -> set[int]:
    """Ranks that a matrix's pair may have once `unpack_experts` has made it: what `pack_experts` joined, and what PEFT
    trained with as large a rank, look alike but for their values.

    Args:
        packed: the rank of each packed pair of the layer, by the name of transformers' tensor.
        name: the matrix, as the layout has it.
    """
    tensor, names = next((tensor, names) for tensor, names in _matrices(layout).items() if name in names)
    rank, smallest = packed[tensor], min(packed.values())
    return {rank, smallest} if len(names) > 1 and rank == len(names) * smallest else {rank}


def reads_by_expert(model: Any, experts: str, layout: ExpertLayout) -> bool:
    """Whether PEFT makes packed pairs of a file's pairs by expert, as it loads them into transformers' model of this
    kind. Where it does not, it drops them without an error.

    model: transformers' own, or one of `build_model`. experts: path of an experts module in it.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
    from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming, rename_source_key

    if get_checkpoint_conversion_mapping(model.config.model_type) is None:
        return False  # transformers may know the family by the name of a class; PEFT asks by this one alone
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    if rename_source_key(f"{experts}.", renamings, [])[0] != f"{experts}.":
        return False  # it would make them for the path in another class, as for a language model by itself
    stacked = [
        entry.target_patterns[0]
        for entry in mapping
        if isinstance(entry, WeightConverter) and any(isinstance(made, MergeModulelist) for made in entry.operations)
    ]
    # these two, and the second outermost, are what PEFT knows how to make
    return list(_matrices(layout)) == ["gate_up_proj", "down_proj"] and all(
        any(target.endswith(tensor) for target in stacked) for tensor in _matrices(layout)
    )


def adapter_config(
    *,
    base_model: str | None,
    rank: int,
    alpha: float,
    use_rslora: bool = False,
    modules: Iterable[str] = (),
    weights: Iterable[str] = (),
    experts: Mapping[str, ExpertLayout] | None = None,
    others: Collection[str] = (),
    modules_to_save: Iterable[str] = (),
    is_tied: bool = False,
    token_indices: Mapping[str, list[int]] | None = None,
    model_class: type | None = None,
) -> dict[str, Any]:
    """What adapter_config.json says, for experts in either form.

    Experts are in target_parameters in both forms: of their names in target_modules, PEFT knows some families' alone,
    and there it gets the scaling of gate and up wrong with use_rslora.

    Args:
        base_model: a name on the hub or a path.
        rank, alpha: of each linear layer and each expert's matrix; it is scaled by alpha / rank, or with use_rslora by
            alpha / sqrt(rank).
        modules: paths of linear layers that are adapted.
        weights: paths of modules that are adapted and are no linear layers, but have a weight (out, in), as routers do.
        experts: the experts modules that are adapted, by their paths in transformers' model.
        others: names of the model's modules and parameters that are not adapted. Targets are cut to their last names as
            far as that takes in none of these.
        modules_to_save: paths of modules that are trained whole. is_tied: whether some of these share a weight.
        token_indices: by the paths of modules, the tokens of which rows are trained alone.
        model_class: of transformers, that PEFT is to load for it, where it is not what AutoModelForCausalLM loads.
    """
    modules, experts = list(modules), experts or {}
    linear = [path for path in modules if path.rpartition(".")[2] not in REMAPPED]
    remapped = [path for path in modules if path.rpartition(".")[2] in REMAPPED]
    fused = {f"{path}.{name}": len(parts) for path, of in experts.items() for name, parts in _matrices(of).items()}
    parameters = _shortened([*fused, *(f"{path}.weight" for path in (*remapped, *weights))], others, least=2)
    ends = {end: count for path, count in fused.items() for end in _ends(path)}
    # of how many pairs one is made: gate and up
    joined = {target: ends[target] for target in parameters if ends.get(target, 1) > 1}
    # No two patterns match one name, as PEFT takes the first that does and saves them in another order. It warns that
    # these match no module and are ignored, but applies them.
    return {
        "peft_type": "LORA",
        "peft_version": PEFT_VERSION,
        **_class_to_load(model_class),
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        **({"modules_to_save": list(modules_to_save)} if modules_to_save else {}),
        **({"ensure_weight_tying": True} if is_tied else {}),
        **({"trainable_token_indices": dict(token_indices)} if token_indices else {}),
        "target_modules": _shortened(linear, others, least=1),
        "target_parameters": parameters,
        "rank_pattern": {key: count * rank for key, count in joined.items()},
        "alpha_pattern": {key: (sqrt(count) if use_rslora else count) * alpha for key, count in joined.items()},
    }


def _class_to_load(model_class: type | None) -> dict[str, Any]:
    if model_class is None:
        return {"task_type": "CAUSAL_LM"}
    found = {"base_model_class": model_class.__name__, "parent_library": model_class.__module__}
    return {"task_type": None, "auto_mapping": found}


def unread_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config with which an adapter is more than W + scaling · B · A, by their names: known ones that
    are switched on, and any that a later PEFT may have brought."""
    init = config.get("init_lora_weights", True)
    changes_base = not isinstance(init, bool | None) and init not in _PLAIN_INITS
    found = {key: value for key, value in config.items() if value and key not in _PLAIN_SETTINGS}
    return {**found, **({"init_lora_weights": init} if changes_base else {})}


def names_a_pattern(config: Mapping[str, Any], name: str) -> bool:
    """Whether a pattern of a config says which rank or alpha a module of this name has.

    Raises:
        ValueError: a pattern is no regular expression.
    """
    none = object()
    return any(_of_pattern(config, key, name, none) is not none for key in ("rank_pattern", "alpha_pattern"))


def is_target(path: str, targets: Collection[str]) -> bool:
    """Whether a module or parameter is one of a config's targets: by its last names, as PEFT compares lists of them."""
    return any(end in targets for end in _ends(path))


def target_name(config: Mapping[str, Any], module: str) -> str:
    """What patterns know an adapted module by: the name of its weight, where that is a target of its own."""
    weight = f"{module}.weight"
    targets = config.get("target_parameters") or []
    return weight if any(end in targets for end in _ends(weight)) else module


def rank_and_scaling(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """The rank that a config gives a pair, and what B·A is multiplied by.

    name: path of the module, of transformers' tensor (`...experts.gate_up_proj`), or of one expert's matrix.

    Raises:
        ValueError: a pattern is no regular expression.
    """
    rank = int(_of_pattern(config, "rank_pattern", name, config["r"]))
    alpha = float(_of_pattern(config, "alpha_pattern", name, config["lora_alpha"]))
    return rank, alpha / (sqrt(rank) if config.get("use_rslora") else rank)


def _of_pattern(config: Mapping[str, Any], key: str, name: str, default: Any) -> Any:
    """The first that matches, as in PEFT: all of the name, or what follows one of its dots."""
    for pattern, value in (config.get(key) or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        except re.error as error:
            raise ValueError(f"adapter_config.json: {key} has {pattern!r}, not a valid pattern: {error}") from None
    return default


def _matrices(layout: ExpertLayout) -> dict[str, list[str]]:
    """The layout's matrices in each of transformers' tensors, in the order in which its module registers these."""
    matrices = [parameter for parameter in layout.parameters if parameter.row]
    by_tensor = {name: [part.name for part in matrices if part.place.tensor == name] for name in layout.tensors}
    return {name: parts for name, parts in by_tensor.items() if parts}


def _sizes(tensor: str, layout: ExpertLayout) -> tuple[int, int]:
    """(in, out) of an expert's linear layers in one of transformers' tensors."""
    _, *matrix = layout.tensors[tensor]
    into, out = matrix if layout.is_transposed else reversed(matrix)
    return into, out


def _rows(layout: ExpertLayout, name: str) -> slice:
    """Where a matrix has its rows among the outputs of transformers' tensor."""
    part = next(parameter for parameter in layout.parameters if parameter.name == name)
    first, step = part.place.first, part.place.step
    return slice(first, first + step * part.rows_an_expert, step)


def _pack(pair: LoraPair) -> LoraPair:
    return LoraPair(pair.a.flatten(0, 1), pair.b.permute(1, 2, 0).flatten(1, 2))


def _unpack(
    packed: LoraPair, tensor: str, sizes: tuple[int, int], num_experts: int, swapped: bool, peft_version: str | None
) -> LoraPair:
    columns, rows = reversed(sizes) if swapped else sizes
    rank, odd = divmod(packed.a.shape[0], num_experts)
    expected = (num_experts * rank, columns), (rows, rank * num_experts)
    found = tuple(packed.a.shape), tuple(packed.b.shape)
    if found != expected or odd or not rank:
        version = peft_version or "before 0.18"
        raise ValueError(
            f"the adapter's lora_A and lora_B of {tensor} have shapes {list(found[0])} and {list(found[1])}; for "
            f"{num_experts} experts, PEFT {version} with transformers 5 writes [{num_experts} x rank, {columns}] and "
            f"[{rows}, rank x {num_experts}]"
        )
    over_columns_ErI = packed.a.unflatten(0, (num_experts, rank))
    over_rows_EOr = packed.b.unflatten(1, (rank, num_experts)).permute(2, 0, 1)
    if swapped:
        return LoraPair(over_rows_EOr.transpose(1, 2), over_columns_ErI.transpose(1, 2))
    return LoraPair(over_columns_ErI, over_rows_EOr)


def _join(pairs: Mapping[str, LoraPair], names: list[str], layout: ExpertLayout) -> LoraPair:
    a_ErI = torch.cat([pairs[name].a for name in names], 1)
    rows = sum(pairs[name].b.shape[1] for name in names)
    b_EOr = pairs[names[0]].b.new_zeros(a_ErI.shape[0], rows, a_ErI.shape[1])
    first = 0
    for name in names:
        rank = pairs[name].b.shape[2]
        b_EOr[:, _rows(layout, name), first : first + rank] = pairs[name].b
        first += rank
    return LoraPair(a_ErI, b_EOr)


def _split(pair: LoraPair, names: list[str], layout: ExpertLayout, rank: int) -> dict[str, LoraPair]:
    rows_EFr = {name: pair.b[:, _rows(layout, name)] for name in names}
    runs = {name: slice(place * rank, (place + 1) * rank) for place, name in enumerate(names)}
    beside = [rows_EFr[name][:, :, runs[other]] for name in names for other in names if other != name]
    if pair.a.shape[1] == len(names) * rank and not any(block.any() for block in beside):
        return {name: LoraPair(pair.a[:, runs[name]], rows_EFr[name][:, :, runs[name]]) for name in names}
    return {name: LoraPair(pair.a, rows_EFr[name]) for name in names}


def _has_roles_swapped(peft_version: str | None, is_transposed: bool) -> bool:
    """Whether A is over what the experts give out, and B over what they take in.

    PEFT up to 0.18 takes a tensor for (E, in, out) whatever its flag says, 0.19.0 reads the flag the wrong way round,
    and from 0.19.1 on A is over what they take in. That is with transformers 5; those before set no flag, and what was
    made there the other way round is refused for its shape.
    """
    try:
        version = Version((peft_version or "0.17.0").partition("@")[0])
    except InvalidVersion:
        raise ValueError(f"adapter_config.json: peft_version is {peft_version!r}, not a version") from None
    if version >= Version("0.19.1"):
        return False
    return version >= Version("0.19.0") or not is_transposed


def _shortened(paths: Iterable[str], others: Collection[str], least: int) -> list[str]:
    """The last names of each path, at least so many, that are not also the last names of one of the others."""
    paths = list(dict.fromkeys(paths))
    taken = {end for other in set(others) - set(paths) for end in _ends(other)}
    ends = [next((end for end in _ends(path)[least - 1 :] if end not in taken), path) for path in paths]
    return sorted(set(ends))


def _ends(path: str) -> list[str]:
    """`c`, `b.c` and `a.b.c` of `a.b.c`."""
    names = path.split(".")
    return [".".join(names[-count:]) for count in range(1, len(names) + 1)]

"""A run that begins as an adapter (--init-adapter): whether that fits, and the model's adapters filled from it.

Shape suffixes: E experts, r rank.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...moe.experts.lora import TOKENS, A, B, Lora
from ...moe.hf_model.rope import RopeScaling
from ...moe.util.errors import ExpertMeshError
from ...sharding.runtime.process import raise_together
from ...sharding.state import adapters_of, new_tokens_of, sharded_parameters, token_rows_of, whole_beside_adapters
from ...sharding.topology import Topology
from ..files.dtypes import as_tensor
from ..files.open_files import OpenFiles
from ..files.tensors import StoredTensor
from ..hf.class_names import class_names
from ..hf.headers import read_header
from ..hf.json_files import read_json
from ..hf.names import Names
from .adapter import CONFIG, WEIGHTS, Adapter, adapted_module, read_rope
from .peft_format import (
    PREFIX,
    is_target,
    lora_names,
    rank_and_scaling,
    target_name,
)


def read_adapter(
    model: nn.Module,
    path: Path,
    lora: Lora,
    rope_scaling: RopeScaling | None = None,
    model_config: Any = None,
) -> Adapter:
    """Open an adapter that a model's own are to begin as, which needs none of its weights; by its config and the header
    of its file. `load_adapter` reads the values.

    Args:
        model: with its adapters, on any device; whole, not cut into stages.
        lora: of the model.
        rope_scaling: of the model.
        model_config: that the model was built from, if the adapter may go by the names of another class than its own.

    Raises:
        ExpertMeshError: its largest rank, its scale or its modules are not those of the model's adapters, or it was
            trained with another RoPE scaling.
    """
    if (scaling := read_rope(path)) != rope_scaling:
        there, here = (
            "no --rope-scaling" if found is None else f"--rope-scaling '{json.dumps(found.as_json())}'"
            for found in (scaling, rope_scaling)
        )
        raise ExpertMeshError(f"--init-adapter {path}: was trained with {there}, this run has {here}")
    adapter = Adapter(path, Names(model), None if model_config is None else class_names(model, model_config))
    wanted_rows = {name.replace(TOKENS, "weight"): part for name, part in token_rows_of(model).items()}
    wanted_pairs = {_beside(name) for name in adapters_of(model) if not name.endswith(TOKENS)}
    differing, of_experts = wanted_pairs ^ adapter.beside.keys(), adapter.names.experts.keys()
    if of_experts & adapter.beside.keys():
        differing -= wanted_pairs & of_experts  # those that have none there begin as zeros, and stay so
    if differing:
        name = min(differing)
        targets = adapter.config.get("target_modules") or []
        targets = [*([targets] if isinstance(targets, str) else targets), *adapter.targets]
        raise ExpertMeshError(
            f"--init-adapter {path}: {adapter.theirs(name)} "
            f"{'has no adapter there' if name in wanted_pairs else 'has one there'}; leave out --lora-targets, or name "
            f"what has: {CONFIG} has {', '.join(map(str, targets)):.200}"
        )
    wanted, aliases = set(whole_beside_adapters(model)), adapter.names.aliases
    if (found := {aliases.get(name, name) for name in adapter.whole}) != wanted:
        name = min(wanted ^ found)
        said = ", ".join(map(str, adapter.config.get("modules_to_save") or ["none"]))
        raise ExpertMeshError(
            f"--init-adapter {path}: {adapter.theirs(name)} is {'not ' if name in wanted else ''}trained whole there; "
            f"give the same --modules-to-save: {CONFIG} has {said}"
        )
    ids = {name: new_tokens_of(model, name.rpartition(".")[0]) for name in wanted_rows}
    found_ids = {name: list(places) for name, (_, places) in adapter.token_rows.items() if name not in aliases}
    if ids != found_ids:
        numbers = [len(next(iter(each.values()), ())) for each in (found_ids, ids)]
        raise ExpertMeshError(
            f"--init-adapter {path}: has rows of {numbers[0]} new tokens, this run trains {numbers[1]}, or others; "
            "give the same tokens, and --train-new-tokens if it has some"
        )
    if not adapter.ties and (untied := sorted(aliases.keys() & adapter.whole.keys() | wanted & set(aliases.values()))):
        raise ExpertMeshError(
            f"--init-adapter {path}: {adapter.theirs(untied[0])} is not tied there (ensure_weight_tying in {CONFIG} is "
            "not true), and a run keeps tied weights tied; merge the adapter, and begin with the result as --model"
        )
    least, most = (max(by(found.ranks) for found in adapter.beside.values()) for by in (min, max))
    if lora.rank not in (least, most) or not math.isclose(lora.low_rank.scale, adapter.scale, rel_tol=1e-6):
        raise ExpertMeshError(f"--init-adapter {path}: {_why_not(adapter, lora)}")
    if lora.rank > least and not any(adapter.rank(base) == most for base in sorted(adapter.beside)):
        raise ExpertMeshError(f"--init-adapter {path}: {_why_not(adapter, lora)}")
    return adapter


@torch.no_grad()
def load_adapter(model: nn.Module, adapter: Adapter, lora: Lora, topology: Topology) -> None:
    """Fill a sharded model's adapters from what `read_adapter` has opened. All ranks call it together.

    A pair of a smaller rank is padded with zeros in both A and B, and a matrix of an expert that has none there gets
    zeros alone: these have no gradient, so that they stay zeros and the run trains what the adapter has. Where a pair
    has another scale than the run, its B is multiplied by what they differ by. With Adam its steps are then as large as
    they are at the run's scale.

    Args:
        lora: of the model.

    Raises:
        ExpertMeshError: on all ranks, when a file cannot be read, or has values that are not finite, or are of another
            rank than the model's adapters.
    """
    with raise_together():
        held = {n: part for n, part in adapters_of(model).items() if part.is_here and not n.endswith(TOKENS)}
        shards = sharded_parameters(model, topology, held)
        names = Names(model)
        for base in sorted({_beside(name) for name in shards}):
            here = {which: shards[_adapter_of(base, which, names)] for which in (A, B)}
            if base not in adapter.beside:
                for shard in here.values():
                    shard.local.zero_()
                continue
            if adapter.rank(base) > lora.rank:
                raise ExpertMeshError(f"--init-adapter {adapter.path}: {_why_not(adapter, lora)}")
            scale = adapter.beside[base].scale / lora.low_rank.scale
            for which, shard in here.items():
                values = adapter.rows(base, which, shard.rows, lora.rank)
                is_scaled = which == B and not math.isclose(scale, 1, rel_tol=1e-6)
                shard.local.copy_(values * scale if is_scaled else values)


@torch.no_grad()
def load_whole(model: nn.Module, adapter: Adapter, topology: Topology) -> None:
    """Fill what a sharded model trains whole beside its adapters, and rows of new tokens, from what `read_adapter` has
    opened, in place of what the base has. All ranks call it together.

    Raises:
        ExpertMeshError: on all ranks, when the file cannot be read, or has values that are not finite.
    """
    with raise_together():
        here = {name: part for name, part in whole_beside_adapters(model).items() if part.is_here}
        for name, shard in sharded_parameters(model, topology, here).items():
            shard.fill(shard.rows, adapter.whole_rows(name, shard.rows).view(-1, *shard.row_shape))
        rows = {name: part for name, part in token_rows_of(model).items() if part.is_here}
        for name, shard in sharded_parameters(model, topology, rows).items():
            values = adapter.rows_of_tokens(name.replace(TOKENS, "weight"))
            shard.fill(shard.rows, values[shard.rows.start : shard.rows.stop])


def _why_not(adapter: Adapter, lora: Lora) -> str:
    """Why a run of another rank or scale cannot start from an adapter, and what to give."""
    rank, base = max((adapter.rank(base), base) for base in sorted(adapter.beside))
    there = Lora(rank, _alpha_at(adapter.config, rank), use_rslora=bool(adapter.config.get("use_rslora")))
    wanted, given = (
        f"--lora-rank {each.rank} --lora-alpha {each.alpha:g}" + " --use-rslora" * each.use_rslora
        for each in (there, lora)
    )
    without = ", without --use-rslora" if lora.use_rslora and not there.use_rslora else ""
    largest = "" if rank == adapter.config["r"] else f" ({adapter.theirs(base)} has rank {rank}, the largest)"
    return f"was trained with {wanted}{largest}; this run has {given}; give {wanted}{without}"


def _alpha_at(config: Mapping[str, Any], rank: int) -> float:
    """The alpha with which a pair of this rank has the scale of a config's own rank and alpha."""
    times = rank / config["r"]
    return float(config["lora_alpha"]) * (math.sqrt(times) if config.get("use_rslora") else times)


def rank_and_alpha(path: Path) -> tuple[int, float]:
    """The --lora-rank and --lora-alpha with which a run begins as an adapter: its largest rank, its config's scale.

    Raises:
        ExpertMeshError, TypeError, ValueError, ArithmeticError: the adapter is damaged, which `Adapter` says better.
    """
    config, infos = read_json(path / CONFIG), read_header(path / WEIGHTS)
    targets = config.get("target_parameters") or []
    ranks, is_joined = set[int](), None
    for name in infos:
        if not name.endswith(f".{A}.weight"):
            continue
        module = adapted_module(name.removeprefix(PREFIX).removesuffix(f".{A}.weight"))
        ranks_here = {rank_and_scaling(config, target_name(config, module))[0]}
        inside = [f"{module}.{target.rpartition('.')[2]}" for target in targets]
        packed = {rank_and_scaling(config, each)[0] for each in inside if is_target(each, targets)}
        if packed and {infos[name].shape[0]} != ranks_here:
            ranks_here = packed
            if 2 * min(packed) == max(packed):
                if is_joined is None:
                    both = (lora_names(each)[1] for each in (module, f"{module}.base_layer"))
                    is_joined = _looks_joined(max((infos[b] for b in both), key=lambda b: b.shape[1]))
                ranks_here = {min(packed)} if is_joined else packed
        ranks |= ranks_here
    rank = max(ranks, default=int(config["r"]))
    return rank, _alpha_at(config, rank)


def _looks_joined(stored: StoredTensor) -> bool:
    """Whether a packed B has gate and up in blocks beside zeros, as `pack_experts` makes it: each of its rows has zeros
    in one half."""
    halves = [half.any(1) for half in as_tensor(OpenFiles().array(stored), stored.dtype).chunk(2, 1)]
    return not (halves[0] & halves[1]).any()


def _beside(adapter: str) -> str:
    """The parameter that an adapter's is beside."""
    if adapter.endswith((f".{A}", f".{B}")):
        return f"{adapter.rpartition('.')[0]}.weight"
    return adapter.removesuffix(f"_{A}").removesuffix(f"_{B}")


def _adapter_of(parameter: str, which: str, names: Names) -> str:
    return f"{parameter}_{which}" if parameter in names.experts else f"{parameter.removesuffix('weight')}{which}"
